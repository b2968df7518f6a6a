"""Reads dumps of torch's flight recorder: the last calls of a rank, with their state.

`dump` gives what a file says, with its `entries`, checked; `calls` makes a `RankTrace` of it. `safe_pickle` opens
pickles from other machines without running anything; `pickled_entries` reads the many entries of one as columns.
"""
