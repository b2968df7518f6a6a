"""Sizes of messages in buckets of a factor of four."""

from __future__ import annotations


def bucket_of(size: int) -> tuple[int, int]:
    """First and last size of the bucket that a size falls into: up to 1 KiB, 4 KiB, 16 KiB, ….

    >>> bucket_of(0), bucket_of(1), bucket_of(1024), bucket_of(1025)
    ((0, 0), (1, 1024), (1, 1024), (1025, 4096))
    """
    if size <= 0:
        return 0, 0
    low, high = 1, 1024
    while size > high:
        low, high = high + 1, high * 4
    return low, high
