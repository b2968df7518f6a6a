"""A job as tables of columns, in memory and in files."""
