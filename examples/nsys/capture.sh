#!/usr/bin/env bash
# Sourced by the other scripts: what `nsys profile` traces, and what begins and ends the capture, in CAPTURE.
#
# A window of crossrank (TRACING_NSYS=1) calls cudaProfilerStart and Stop, and is an NVTX range as well: in a process
# without CUDA nsys writes no report for the former. --capture-range-end=stop and --kill=none leave the job running when
# the window ends: the defaults would stop it with SIGTERM.
if nvidia-smi -L > /dev/null 2>&1; then
  CAPTURE="--trace=cuda,nvtx --cuda-graph-trace=node --capture-range=cudaProfilerApi"
else
  CAPTURE="--trace=nvtx --capture-range=nvtx --nvtx-capture=window@crossrank"
fi
export CAPTURE="$CAPTURE --sample=none --cpuctxsw=none --capture-range-end=stop --kill=none --wait=all"
