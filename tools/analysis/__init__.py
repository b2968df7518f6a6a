"""Functions from a matched job or rank to a struct with one answer. They open no files and print nothing.

`summary` (what a job communicates), `bandwidth`, `figures`, `waiting` and `traffic` (for the report), `diagnosis` (why
a job hangs).
"""
