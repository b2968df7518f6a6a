"""Turns an op of the dispatcher and its arguments into a row in the recorder's ring, in a tenth of Python's time.

`recorder.cpp` is the module. It uses `kernel.h` (before and after a launch), `read_call.h` (the arguments of a call)
and `works.h` (the call of a wait). The tables and the ring are in `recording.h` and `ring.h`, Python's frames in
`frames.c`. `build` compiles and loads them. `recorder` is the Python part: `CompiledRecorder` replaces
`record.python_recorder.PythonRecorder`.
"""
