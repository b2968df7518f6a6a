"""Reads SQLite exports of Nsight Systems: the kernels of each communication call.

`export` opens an export and reads columns. `markers` reads NVTX ranges, `nccl` NCCL's own ranges. `kernel_launches`
joins kernels with the ranges around their launches. `rows` makes the calls of the markers. From these, `read` makes the
times of every rank in the export.

Facts about the format: docs.nvidia.com/nsight-systems/UserGuide, "SQLite Schema Reference". Columns differ between
versions, and tables without rows are not written. So the readers first check that a table or column exists.
"""
