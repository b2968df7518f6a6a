"""In: the linked trace of a rank. Out: its Chakra file, checked or simulated.

Read `chakra_graph` (nodes and edges between a linked trace and a file), `convert` (the steps in their order) and
`steps`; `write` and `framing` make the file, `feeder_contract` checks it, `simulate` plays the nodes of all ranks,
`convert_ranks` does it for a recording.
"""
