"""Text for people: amounts with units, ranges of ranks, and names from files made safe to print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def amount(count: float | None, unknown: int = 0) -> str:
    """Format bytes with a decimal unit (1 kB = 1000 B), as nccl-tests does. `unknown` is the number of calls whose
    bytes are unknown.

    >>> amount(0), amount(999), amount(25_600_000), amount(0, unknown=2), amount(999, unknown=2), amount(None)
    ('0 B', '999 B', '25.6 MB', 'unknown', '999 B + 2 unknown', 'unknown')
    """
    if count is None:
        return "unknown"
    if unknown:
        return f"{amount(count)} + {unknown:,} unknown" if count else "unknown"
    value, power = float(count), 0
    while value >= 1000 and power < len(_UNITS) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {_UNITS[power]}" if power else f"{value:.0f} B"


def significant(value: float | None) -> str:
    """Format a number with three digits, or more if the integer part has more; None as a dash.

    >>> significant(0.01234), significant(99.96), significant(1234.5), significant(None)
    ('0.0123', '100', '1,234', '-')
    """
    return "-" if value is None else f"{value:.3g}" if abs(value) < 99.95 else f"{value:,.0f}"


def milliseconds(value: float | None) -> str:
    """
    >>> milliseconds(0.01234), milliseconds(None)
    ('0.0123 ms', '-')
    """
    return "-" if value is None else f"{significant(value)} ms"


def microseconds(value: float | None) -> str:
    """Format a value for a column whose title has the unit.

    >>> microseconds(1234.56), microseconds(None)
    ('1,234.6', '-')
    """
    return "-" if value is None else f"{value:,.1f}"


def percent(share: float | None, *, signed: bool = False) -> str:
    """Format a share in percent, rounded to the nearest tenth. Less than all is never printed as 100 %.

    >>> percent(0.57), percent(0.99977), percent(0.999999), percent(None)
    ('57.0 %', '99.98 %', '> 99.99 %', '-')
    >>> percent(-0.1236, signed=True), percent(-0.0001, signed=True)
    ('-12.4 %', '+0.0 %')
    """
    if share is None or not math.isfinite(1000 * share):
        return "-"
    tenths = round(1000 * share)
    if tenths == 1000 and 0 < share < 1:
        return f"{100 * share:.2f} %" if share < 0.99995 else "> 99.99 %"
    return f"{(tenths or 0) / 10:{'+' if signed else ''},.1f} %"


def size_text(size_to: int | None) -> str:
    """Format a bucket of sizes (`tools.analysis.bandwidth`) by its upper end.

    >>> size_text(0), size_text(4096), size_text(1 << 30), size_text(None)
    ('0', '≤4 KiB', '≤1 GiB', 'unknown')
    """
    if not size_to:
        return "0" if size_to == 0 else "unknown"
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_to >= unit:
            return f"≤{size_to // unit:,} {name}"
    return f"≤{size_to} B"


def plural(count: int, word: str, many: str = "") -> str:
    """
    >>> plural(1, "rank"), plural(1024, "rank"), plural(2, "step or window", "steps or windows")
    ('1 rank', '1,024 ranks', '2 steps or windows')
    """
    return f"{count:,} {word if count == 1 else many or f'{word}s'}"


def rank_ranges(ranks: Sequence[int]) -> str:
    """Format ranks as ranges.

    >>> rank_ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs = [
        [rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), lambda placed: placed[1] - placed[0])
    ]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def printable(text: str) -> str:
    """Escape control characters in `text`: names in a trace must not control the terminal.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def writable(text: str) -> str:
    """Return text that UTF-8 can encode. Names of files may be no such text."""
    return text.encode("utf-8", "backslashreplace").decode()


FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")


def csv_text(value: object) -> object:
    """Return a value for a CSV file that no spreadsheet treats as a formula. Text that could be one gets a leading `'`.

    >>> csv_text("=1+1"), csv_text("sum"), csv_text(-1)
    ("'=1+1", 'sum', -1)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def from_csv_text(text: str) -> str:
    """Return the text that `csv_text` was called with."""
    return text[1:] if text.startswith("'") else text
