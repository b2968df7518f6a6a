#!/usr/bin/env bash
# Runs ASTRA-sim's analytical backend on a window that was converted for it, and says whether all ranks finished:
#
#   crossrank convert /data/run1 --lower astra-sim -o chakra
#   ASTRA_SIM=…/bin/AstraSim_Analytical_Congestion_Unaware examples/astra-sim/run.sh chakra/chakra     # chakra/chakra-w2
#
# SYSTEM, NETWORK and MEMORY name other files than those beside this script. SYSTEM=…/replay.json plays every
# communication for as long as it was measured. ASTRA-sim ends with 0 although ranks did not finish; this with 1.
set -euo pipefail
prefix=${1:?usage: run.sh FOLDER/chakra, without .RANK.et}
: "${ASTRA_SIM:?must name ASTRA-sim, for example AstraSim_Analytical_Congestion_Unaware}"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
shopt -s nullglob
files=("$prefix".*.et)
ranks=${#files[@]}
(( ranks )) || { echo "run.sh: no $prefix.RANK.et; name a folder and the prefix of its traces" >&2; exit 2; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sed "s/^npus_count:.*/npus_count: [ $ranks ]/" "${NETWORK:-$here/network.yml}" > "$work/network.yml"
"$ASTRA_SIM" \
  --workload-configuration="$prefix" \
  --comm-group-configuration="$(dirname "$prefix")/comm_groups.json" \
  --system-configuration="${SYSTEM:-$here/system.json}" \
  --network-configuration="$work/network.yml" \
  --remote-memory-configuration="${MEMORY:-$here/memory.json}" \
  --logging-folder="$work/log" 2>&1 | tee "$work/output" || echo "run.sh: ASTRA-sim stopped" >&2

finished=$(grep -c 'finished, [0-9]* cycles' "$work/output" || true)
last=$(grep -o 'finished, [0-9]* cycles' "$work/output" | grep -o '[0-9]*' | sort -n | tail -n 1 || true)
echo "$finished of $ranks ranks finished, the last after ${last:-0} ns"
(( finished == ranks ))
