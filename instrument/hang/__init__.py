"""Detects a hang, writes dumps, and prints a verdict into the training log while the job hangs.

`watch` notices that this rank makes no progress, `response` responds to it, and `verdict` diagnoses the job in its own
process, with the tools that `crossrank diagnose` uses.
"""
