"""In: what every rank measured. Out: one report of all ranks, as files, a page and text.

`measure` puts the ranks together, `compare` sets them beside the recording, `check` says what values had to come out;
`report` writes, `page` and `show` present.
"""
