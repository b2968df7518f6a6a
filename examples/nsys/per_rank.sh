#!/usr/bin/env bash
# On one node: a report of Nsight Systems per rank, of the iterations of TRACING_WINDOW, and what they say together.
#
#   NPROC=8 TRACING_WINDOW=100:102 examples/nsys/per_rank.sh train.py --lr 1e-4
#
# The window of crossrank starts and stops the capture (TRACING_NSYS=1), with or without a GPU: see capture.sh.
set -euo pipefail
# shellcheck source=capture.sh
source "$(dirname "$0")/capture.sh"

export TRACING=${TRACING:-ALL} TRACING_NSYS=1
export TRACING_WINDOW=${TRACING_WINDOW:-10:12} TRACING_DIR=${TRACING_DIR:-crossrank-recording}
reports=${REPORTS:-nsys-reports}
mkdir -p "$reports"

# $0 of the inner shell is the folder, "$@" the script and its arguments; nsys itself fills in %q{RANK}.
torchrun ${TORCHRUN_ARGS:-} --nproc-per-node "${NPROC:-8}" --no-python bash -c '
  exec nsys profile $CAPTURE \
    --output="$0/rank_%q{RANK}" --force-overwrite=true python -m crossrank.instrument "$@"' "$reports" "$@"

"$(dirname "$0")/export.sh" "$reports"
if [[ $CAPTURE == *cuda* ]]; then  # without kernels nothing says how long a call took
  crossrank bandwidth "$TRACING_DIR" "$reports"
fi
crossrank timeline "$TRACING_DIR" "$reports" -o "$reports/timeline.pftrace"
crossrank report "$TRACING_DIR" "$reports" -o "$reports/report.html"
