"""In: an op of the dispatcher and its arguments. Out: one row in the writer's ring.

`recorder` is the hot path. `op_schema` reads what identifies a call, `call_site` finds who made it, and `descriptor`
keeps what is the same at every repetition. `iterations` counts iterations.
"""
