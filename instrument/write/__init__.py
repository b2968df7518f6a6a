"""In: rows, groups and moments. Out: the files of one rank, and NVTX markers.

`rank_files` says where files go, `comms_writer` writes the comms file, `window` the execution trace and, with
`kineto_session`, that of Kineto, `flight_dump` the flight recorder, also at a hang, and `nvtx_markers` what Nsight
Systems shows.
"""
