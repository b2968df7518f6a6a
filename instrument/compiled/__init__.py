"""In: an op of the dispatcher and its arguments. Out: one row in the recorder's ring, in a tenth of the time of Python.

`recorder.cpp` is the module, over `kernel.h` (what happens before and after a launch), `read_call.h` (what tells a call
from others), `works.h` (whose wait is whose), `recording.h` and `ring.h` (what is kept), and `frames.c`, which reads
Python's frames. `build` compiles them at first use and loads what is built. `recorder` is what Python does for it:
`CompiledRecorder` stands where `record.python_recorder.PythonRecorder` does otherwise.
"""
