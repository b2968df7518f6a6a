#!/usr/bin/env bash
# One Nsight Systems report per node, with all its ranks. Run it once on each node.
#
#   NNODES=2 NODE_RANK=0 MASTER=node-0:29500 NPROC=8 examples/nsys/per_node.sh train.py
#
# The capture begins with the window of the first rank and ends with that of the first rank to leave it. The processes
# in the report tell their ranks by markers. When all nodes are done, on one of them:
#
#   examples/nsys/export.sh nsys-reports && crossrank bandwidth crossrank-recording nsys-reports
set -euo pipefail
# shellcheck source=capture.sh
source "$(dirname "$0")/capture.sh"

export TRACING=${TRACING:-ALL} TRACING_NSYS=1
export TRACING_WINDOW=${TRACING_WINDOW:-10:12} TRACING_DIR=${TRACING_DIR:-crossrank-recording}
reports=${REPORTS:-nsys-reports}
mkdir -p "$reports"

# shellcheck disable=SC2086  # several options
exec nsys profile $CAPTURE --trace-fork-before-exec=true \
  --output="$reports/node_${NODE_RANK:-0}" --force-overwrite=true \
  torchrun --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" --nproc-per-node "${NPROC:-8}" \
  --rdzv-backend c10d --rdzv-endpoint "${MASTER:-localhost:29500}" -m crossrank.instrument "$@"
