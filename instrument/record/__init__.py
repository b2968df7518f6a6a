"""In: an op of the dispatcher and its arguments. Out: one row in the recorder's ring.

`recorder` is what both kernels share, `python_recorder` the one in Python. `op_schema` reads what identifies a call,
`call_site` finds who made it, and `descriptor` keeps what is the same at every repetition. `iterations` counts
iterations.
"""
