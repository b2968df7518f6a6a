"""Turns the execution trace, the Kineto trace and the records of a rank into a graph of what waits for what.

`linking` joins the three into one trace. `chakra` writes it for simulators, checks the written files, and simulates
them. Start with `linking/linked_trace.py` (what a linked trace is), `linking/link.py` (how it is made) and
`chakra/convert.py`.
"""
