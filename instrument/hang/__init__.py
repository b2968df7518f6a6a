"""In: silence. Out: dumps, and a verdict in the training log while the job hangs.

`watch` notices that this rank communicates no more, `response` says what happens then, and `verdict` diagnoses the job
in a process of its own, with the tools that `crossrank diagnose` uses.
"""
