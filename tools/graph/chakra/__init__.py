"""In: the linked trace of a rank. Out: its Chakra file, checked or simulated.

Read `graph` (nodes and edges between a linked trace and a file), `convert` (the steps in their order) and `steps`;
`write` and `framing` make the file, `check` reads it back, `simulate` plays the nodes of all ranks, `ranks`
does it for a recording.
"""
