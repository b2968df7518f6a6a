"""Reads SQLite exports of Nsight Systems: which kernels did the work of which communication call.

`export` opens an export and gives columns; `markers` reads what NVTX ranges mean; `kernel_launches` joins kernels with
the ranges that their launch lies in; `rows` says which calls markers stand for, `nccl` reads NCCL's own ranges; `read`
makes the times of every rank in the export from that.

Facts about the format: docs.nvidia.com/nsight-systems/UserGuide, "SQLite Schema Reference". Columns come and go
between versions and tables without rows are not written at all, so everything is asked for before it is read.
"""
