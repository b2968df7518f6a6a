"""In: the execution trace, the Kineto trace and the records of a rank. Out: its nodes, and why each waits for another.

`linking` joins the three into one trace; `chakra` writes it for simulators, checks what was written, and runs it.
"""
