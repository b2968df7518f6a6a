"""In: a job or a rank, matched. Out: structs that say one thing about it: no files are opened here, nothing is printed.

`summary` (what a job communicates), `bandwidth`, `figures`, `waiting` and `traffic` (the report's), `diagnosis` (why it
hangs).
"""
