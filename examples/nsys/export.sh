#!/usr/bin/env bash
# SQLite exports of all reports in a folder: examples/nsys/export.sh nsys-reports
#
# --include-json writes the arguments of NCCL's own ranges, which serve where markers of crossrank are missing.
set -euo pipefail
shopt -s nullglob

for report in "$1"/*.nsys-rep; do
  nsys export --type sqlite --include-json true --include-blobs true --force-overwrite true \
    --output "${report%.nsys-rep}.sqlite" "$report"
done
