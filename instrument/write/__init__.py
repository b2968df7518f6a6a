"""Writes the files of one rank, and NVTX markers.

`rank_files` names and renames files, `comms_writer` writes the comms file, `window` and `kineto_session` the execution
trace and the Kineto trace, `flight_dump` the flight-recorder dump, `nvtx_markers` the markers for Nsight Systems.
"""
