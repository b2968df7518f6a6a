"""The tables of a job as frames, in memory and in files."""
