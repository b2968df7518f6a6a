"""Turns an op of the dispatcher and its arguments into one row in the recorder's ring.

`recorder` is the base of both kernels, `python_recorder` the one in Python. `op_schema` reads the arguments of a call,
`call_site` finds its source line, `descriptor` keeps the data that repeated calls share, `iterations` counts steps.
"""
