"""In: the execution trace, the Kineto trace and the records of a rank. Out: its nodes, and why each waits for another.

`linking` joins the three into one trace; `chakra` writes it for simulators, checks what was written, and simulates it.
Start with `linking/linked_trace.py` (what a linked trace is), `linking/link.py` (how it is made) and
`chakra/convert.py`.
"""
