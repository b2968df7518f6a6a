"""Match all ranks of a job: from one `RankTrace` per rank to a `Job` and its `JobTables`.

Read the modules in this order: `groups` (joins groups across ranks), `job` (`Job.match`), `launches` (all calls in
columns), `matching` (joins calls into collectives), `clocks`, `collectives` (times and waits).
`sources` and `read_rank` find and read the files of the ranks. `from_replay` reads the results of a replay.
"""
