"""Logs of a job's launcher: what their lines say of each rank."""
