"""In: what every rank's file says it communicated. Out: a `Plan`, the calls of every rank as they will be made.

`replay_inputs` finds and reads the files; `build_plan` makes the plan, with `shapes` (the tensors of a call),
`counterparts` (which calls are one), `schedule` (where a rank waits) and `match` (whether the ranks fit together).
`transform`, `one_trace` and `dtype_fallback` change what is replayed; `memory_plan` says what it needs.
"""
