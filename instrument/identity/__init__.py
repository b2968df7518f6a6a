"""In: torch, the machine and the driver. Out: who and where this rank is.

`process_groups` has the groups and their counters, `topology` the node of every rank, `gpu` the device;
`header` puts it together as the first line of the comms file.
"""
