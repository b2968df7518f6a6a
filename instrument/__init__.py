"""The recorder: runs in a training process, writes the files of one rank and the markers for Nsight Systems.

Read `api` (the calls of a script), `session` (the life of one recording), then `hooks/` (how it detects calls),
`record/` (one call, one row), `compiled/` (the same in C++), `identity/` (rank, node, GPU), `write/` (files and
markers) and `hang/` (the response to a hang). `runner` records a script without a change to it. No error of the
recorder reaches the training loop.
"""
