"""In: a `Plan` and its settings. Out: when every call of every rank began and ended.

`processes` starts them here, or runs in those of a launcher (`launcher` says which). The ranks meet, and compare their
clocks, in `rendezvous`; `messages` is what they send each other. `worker` runs one rank: `program` binds its calls to
tensors and groups, `executor` makes them at the pace of `pacing`. `compute_program` runs the operations between them,
`place_launches` says where between, `operations` what may run, `host_time` what the host did meanwhile.
`watch` ends a rank that hangs, and `failure_report` says where each rank was.
"""
