"""Reads the files of one rank, from any tool, into typed data, and lists what could not be read.

Start with `discover` (the files at a path, with kind and rank). Each format has its module: `execution_trace`,
`kineto`, `flight`, `nsight`. `json_document` and `flight.safe_pickle` read untrusted files. `param_comms`,
`group_config` and `kernels` know how torch and the libraries describe communication.
"""
