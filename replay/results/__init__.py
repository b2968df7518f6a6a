"""Makes one report from the measurements of all ranks: files, a page and text.

`measure` joins the ranks and compares them with the recording. `expected_values` computes the correct values.
`replay_report` writes files and prints a plan. `tools.output.replay` formats the report.
"""
