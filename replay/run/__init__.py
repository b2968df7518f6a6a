"""In: a `Plan` and its settings. Out: when every call of every rank began and ended.

`processes` starts them here, or runs in those of a launcher (`launcher` says which); they meet in `rendezvous`.
`worker` runs one rank: `program` binds its calls to tensors and groups, `executor` makes them at the
pace of `pacing`, `clock_offsets` compares machines. `failure_report` says where a rank was that failed.
"""
