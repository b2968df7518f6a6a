"""In: what every rank's files say of its communication, a `RankTrace` each. Out: all ranks matched, a `Job`.

Read `groups` (which groups of different ranks are one), `job` (`Job.match`), `launches` (all ranks in columns),
`matching` (which calls are one), `clocks` (one clock) and `collectives` (times and waits, as arrays or
polars frames). `sources` and `read_rank` find and read the ranks, `from_replay` what a replay has measured.
"""
