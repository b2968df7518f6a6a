"""Show a diagnosis and its job: as text, sections of a page, a table of calls, and a database.

Start with `verdict` (the facts of a finding, also for the page), then read `diagnosis_page` and `call_tables`.
"""
