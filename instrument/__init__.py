"""In: a training process. Out: the files of one rank, and markers for Nsight Systems.

Read `api` (what a script calls), `session` (the life of one recording), then `hooks/` (how it learns of calls),
`record/` (one call, one row), `compiled/` (the same in C++), `identity/` (who and where this rank is), `write/` (files
and markers) and `hang/` (what happens when nothing is communicated any more). `runner` does all of it for a script that
has no line of ours. Nothing here raises into the training loop.
"""
