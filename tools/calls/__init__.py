"""Reads what each rank communicated, from any kind of file, into one form: `RankCalls`."""
