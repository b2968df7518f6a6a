"""In: what an analysis found. Out: what a person or a program reads.

`console` (tables), `report` (the page of a run), `timeline` (all ranks for Perfetto).
"""
