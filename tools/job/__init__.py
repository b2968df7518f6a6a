"""In: what every rank's files say of its communication. Out: all ranks together.

`sources` finds and reads the ranks, one worker each, into `rank_times`; `side_by_side` makes `collectives` of all
ranks: `joining` says which calls are one, `clocks` brings machines together. `from_replay` has collectives that a
replay has measured already.
"""
