"""Changes to torch and Python by which a session detects calls, steps, signals and the end of the process.

Only this folder changes torch or Python.
"""
