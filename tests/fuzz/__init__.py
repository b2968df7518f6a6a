"""Mutated files through every reader and command: `python -m tests.fuzz --help`."""
