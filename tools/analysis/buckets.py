"""Sizes of messages in buckets of a factor of four, as tables show them."""

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


def size_text(size_to: int | None) -> str:
    """The bucket that ends with a size, in short.

    >>> size_text(0), size_text(4096), size_text(1 << 30), size_text(None)
    ('0', '≤4 KiB', '≤1 GiB', 'unknown')
    """
    if not size_to:
        return "0" if size_to == 0 else "unknown"
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_to >= unit:
            return f"≤{size_to // unit:,} {name}"
    return f"≤{size_to} B"
