"""In: one session. Out: torch and Python changed so that the session learns of calls, steps, signals and ends.

Nothing outside this folder changes anything of torch or Python.
"""
