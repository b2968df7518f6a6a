"""Makes a `Plan`, the calls that every rank makes in the replay, from the files of all ranks.

* Input: `replay_inputs` reads the files. Result: `build_plan` makes the plan.
* Parts: `shapes` (tensors of a call), `counterparts` (matching calls), `schedule` (waits), `match` (checks).
* Changes: `transform`, `one_trace`, `dtype_fallback`. Memory: `memory_plan`.
"""
