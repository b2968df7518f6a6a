"""In: files of one rank, whoever wrote them. Out: what they hold, typed, with what could not be read.

Start with `discover` (which files a path holds, of what kind, of which rank). Each format has its module:
`execution_trace`, `kineto`, `flight`, `nsight`; `json_document` and `flight.safe_pickle` open what
nobody vouches for; `param_comms`, `group_config` and `kernels` know how torch and the libraries describe communication.
"""
