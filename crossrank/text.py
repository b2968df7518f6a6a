"""Text for people: amounts with their units, ranks in short, and names from files made safe to show."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def amount(count: float, unknown: int = 0) -> str:
    """Bytes with a decimal unit (1 kB = 1000 B), as nccl-tests counts them, and of `unknown` calls that these are not
    known.

    >>> amount(0), amount(999), amount(25_600_000), amount(0, unknown=2), amount(999, unknown=2)
    ('0 B', '999 B', '25.6 MB', 'unknown', '999 B + 2 unknown')
    """
    if unknown:
        return f"{amount(count)} + {unknown:,} unknown" if count else "unknown"
    value = float(count)
    for unit in _UNITS:
        if value < 1000 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def rank_ranges(ranks: Sequence[int]) -> str:
    """Ranks in short.

    >>> rank_ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    parts: list[str] = []
    ordered = sorted(ranks)
    start = 0
    for i in range(1, len(ordered) + 1):
        if i == len(ordered) or ordered[i] != ordered[i - 1] + 1:
            first, last = ordered[start], ordered[i - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = i
    return ",".join(parts)


def printable(text: str) -> str:
    """`text` without control characters: names in a trace must not steer the terminal.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def writable(text: str) -> str:
    """Text that every encoding of Unicode has: names of files need not be."""
    return text.encode("utf-8", "backslashreplace").decode()
