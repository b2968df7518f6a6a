"""In: a diagnosis, and the job that it is about. Out: text, sections of a page, a table of calls, a database.

Read `verdict` first (a finding as facts, which the page shows as well), then `diagnosis_page` and `call_tables`.
"""
