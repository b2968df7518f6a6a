"""What every command answers on the public traces, kept in files: `python -m tests.golden` writes them anew.

A change of an answer is then seen in the difference of a file, and is meant or mended.
"""
