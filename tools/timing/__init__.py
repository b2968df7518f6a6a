"""When communication began and ended on every rank, from whatever measured it, and what follows for all ranks together.

`rank_times` is the form of one rank; `sources` makes it from a recording, other people's traces or Nsight exports, one
worker per rank; `clocks` brings ranks of different machines together; `collectives` lays the ranks side by side.
"""
