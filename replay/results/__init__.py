"""In: what every rank measured. Out: one report of all ranks, as files, a page and text.

`measure` puts the ranks together and beside the recording, `expected_values` says what values had to come out;
`replay_report` writes files and prints a plan. How a report looks is in `tools.output.replay`.
"""
