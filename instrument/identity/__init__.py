"""Finds the identity of this rank: process groups, node, GPU.

`process_groups` has the groups and their counters, `topology` the node of every rank, `gpu` the device. `header` makes
the first line of the comms file from them.
"""
