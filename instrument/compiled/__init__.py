"""Turns an op of the dispatcher and its arguments into a row in the recorder's ring, in a tenth of Python's time.

`recorder.cpp` is the module. It uses `kernel.h` (before and after a launch), `read_call.h` (the arguments of a call),
`works.h` (the call of a wait), `recording.h` and `ring.h` (the tables and the ring), and `frames.c` (Python's frames).
`build` compiles and loads them. `recorder` is the Python part: `CompiledRecorder` replaces
`record.python_recorder.PythonRecorder`.
"""
