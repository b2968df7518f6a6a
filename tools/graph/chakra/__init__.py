"""Turns the linked trace of a rank into a Chakra file, and checks or simulates such files.

Read `chakra_graph` (nodes and edges between a linked trace and a file), `convert` (the order of the work) and `steps`.
The modules `write` and `framing` make the file, `feeder_contract` checks it, `simulate` runs the nodes
of all ranks, and `convert_ranks` does all of it for a recording.
"""
