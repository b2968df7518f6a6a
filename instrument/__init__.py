"""The recorder: runs in a training process, writes the files of one rank and the markers for Nsight Systems.

First read `api` (the calls of a script) and `session` (the life of one recording). Then read `hooks/` (how it detects
calls), `record/` (one call, one row), `compiled/` (the same in C++) and `identity/` (rank, node, GPU). `write/` writes
files and markers; `hang/` responds to a hang. `runner` records a script without a change to it. No error of the
recorder reaches the training loop.
"""
