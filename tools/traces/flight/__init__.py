"""Reads dumps of torch's flight recorder: the last calls of a rank, with their state.

`dump` and `entries` read and check a file; `calls` converts it to a `RankTrace`. `safe_pickle` opens pickles from other
machines without running code; `pickled_entries` reads the entries of a large one as columns.
"""
