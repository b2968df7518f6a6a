"""What only a GPU can show, with NCCL, and on a machine without one the same with gloo.

`make gpu` runs it on a machine with one H100 or H200, within ten minutes and without a network; `make gpu-cpu` what can
run without a GPU. Elsewhere every test here is skipped.

Several NCCL ranks share the one GPU. NCCL (2.28.9, src/init.cc) refuses two ranks on one device only where host hash
and bus id are both the same, and `NCCL_HOSTID` is the host hash (src/misc/utils.cc): with one of its own every rank is
a node, and they talk over sockets on `lo`. Kernels, proxies and flight recorder are the real ones. Two processes
share the GPU by time slices: durations are right as durations of kernels, and say nothing about any fabric.
"""
