"""Predicts times of a job elsewhere: on another network, on faster or slower devices, with other numbers of ranks."""
