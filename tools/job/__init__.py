"""Match all ranks of a job: from one `RankTrace` per rank to a `Job` and its `JobTables`.

Start with `groups`, `job` (`Job.match`) and `launches` (all calls in columns). Then read `matching` (joins calls into
collectives), `clocks` and `collectives` (times and waits).
`sources` and `read_rank` find and read the files of the ranks. `from_replay` reads the results of a replay.
"""
