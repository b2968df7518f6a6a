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

export TRACING=${TRACING:-ALL} TRACING_NSYS=1
export TRACING_WINDOW=${TRACING_WINDOW:-10:12} TRACING_DIR=${TRACING_DIR:-crossrank-recording}
reports=${REPORTS:-nsys-reports}
mkdir -p "$reports"

exec nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --cuda-graph-trace=node \
  --capture-range=cudaProfilerApi --capture-range-end=stop --kill=none --wait=all --trace-fork-before-exec=true \
  --output="$reports/node_${NODE_RANK:-0}" --force-overwrite=true \
  torchrun --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" --nproc-per-node "${NPROC:-8}" \
  --rdzv-backend c10d --rdzv-endpoint "${MASTER:-localhost:29500}" -m crossrank.instrument "$@"
