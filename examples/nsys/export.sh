#!/usr/bin/env bash
# SQLite exports of all reports in a folder: examples/nsys/export.sh nsys-reports
#
# --include-json writes the arguments of NCCL's own ranges, which serve where markers of crossrank are missing. Nsight
# Systems 2022 and 2023 refuse the option.
set -euo pipefail
shopt -s nullglob

options=()
if [[ $(nsys export --help) == *--include-json* ]]; then
  options=(--include-json true --include-blobs true)
fi

for report in "$1"/*.nsys-rep; do
  nsys export --type sqlite ${options[@]+"${options[@]}"} --force-overwrite true \
    --output "${report%.nsys-rep}.sqlite" "$report"
done
