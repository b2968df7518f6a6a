"""In: a diagnosis, and the job that it is about. Out: text, sections of a page, a table of calls, a database.

Read `text` first (a finding as facts, which the page shows as well), then `page`, `entries` and `database`.
"""
