"""When communication began and ended on every rank, from whatever measured it, and what follows for all ranks together.

`rank_times` is the form of one rank; `sources` makes it from a recording, other people's traces or Nsight exports, one
worker per rank. `side_by_side` makes `collectives` of all ranks: `joining` says which calls are one, `clocks` brings
machines together. `from_replay` has collectives that a replay has measured already.
"""
