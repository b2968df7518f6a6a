"""In: an op of the dispatcher and its arguments. Out: one row in the recorder's ring, in a tenth of the time of Python.

`recorder.cpp` is the kernel, with `frames.c`, which reads Python's frames. `build` compiles them at first use and loads
what is built. `recorder` is what Python does for it: `CompiledRecorder` stands where `record.recorder.PythonRecorder`
does otherwise.
"""
