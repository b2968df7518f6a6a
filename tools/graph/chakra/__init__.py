"""Chakra execution traces: written from linked traces, checked, and read back."""
