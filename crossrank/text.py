"""Text for people: amounts with their units, ranges of ranks, and names from files made safe to show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def amount(count: float, unknown: int = 0) -> str:
    """Bytes with a decimal unit (1 kB = 1000 B), as nccl-tests counts them, and of `unknown` calls that these are not
    known.

    >>> amount(0), amount(999), amount(25_600_000), amount(0, unknown=2), amount(999, unknown=2)
    ('0 B', '999 B', '25.6 MB', 'unknown', '999 B + 2 unknown')
    """
    if unknown:
        return f"{amount(count)} + {unknown:,} unknown" if count else "unknown"
    value, power = float(count), 0
    while value >= 1000 and power < len(_UNITS) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {_UNITS[power]}" if power else f"{value:.0f} B"


def significant(value: float | None) -> str:
    """A number with three digits, or all of those before the point; a dash where there is none.

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
    """For a column whose title has the unit.

    >>> microseconds(1234.56), microseconds(None)
    ('1,234.6', '-')
    """
    return "-" if value is None else f"{value:,.1f}"


def percent(share: float | None, *, signed: bool = False) -> str:
    """Never rounded up to what it is not.

    >>> percent(0.57), percent(0.99999), percent(None), percent(-0.1234, signed=True)
    ('57.0 %', '99.9 %', '-', '-12.3 %')
    """
    if share is None or not math.isfinite(1000 * share):
        return "-"
    tenths = math.copysign(_tenths(abs(share)), share)
    return f"{tenths / 10:{'+' if signed else ''},.1f} %"


def percents(shares: Sequence[float]) -> list[str]:
    """Parts of one whole, which add up as they are printed: what rounding down leaves over goes to those that it took
    most from.

    >>> percents([1 / 3, 1 / 3, 1 / 3]), percents([0.8676, 0.1324, 0])
    (['33.4 %', '33.3 %', '33.3 %'], ['86.8 %', '13.2 %', '0.0 %'])
    """
    down = list(map(_tenths, shares))
    left = round(1000 * sum(shares)) - sum(down)
    order = sorted(range(len(shares)), key=lambda index: down[index] - 1000 * shares[index])
    up = set(order[: max(0, left)])
    return [f"{(tenths + (index in up)) / 10:,.1f} %" for index, tenths in enumerate(down)]


def _tenths(share: float) -> int:
    """Whole tenths of a percent; what floating point leaves just below one counts as it."""
    return math.floor(1000 * share + 1e-9)


def size_text(size_to: int | None) -> str:
    """The bucket of sizes (`tools.analysis.bandwidth`) that ends with a size, in short.

    >>> size_text(0), size_text(4096), size_text(1 << 30), size_text(None)
    ('0', '≤4 KiB', '≤1 GiB', 'unknown')
    """
    if not size_to:
        return "0" if size_to == 0 else "unknown"
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_to >= unit:
            return f"≤{size_to // unit:,} {name}"
    return f"≤{size_to} B"


def plural(count: int, word: str) -> str:
    """
    >>> plural(1, "rank"), plural(1024, "rank")
    ('1 rank', '1,024 ranks')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def rank_ranges(ranks: Sequence[int]) -> str:
    """Ranks as ranges.

    >>> rank_ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs = [
        [rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), lambda placed: placed[1] - placed[0])
    ]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def printable(text: str) -> str:
    """`text` without control characters: names in a trace must not steer the terminal.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def writable(text: str) -> str:
    """Text that UTF-8 can encode, which names of files need not be."""
    return text.encode("utf-8", "backslashreplace").decode()


FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")


def csv_text(value: object) -> object:
    """A value for a CSV that no spreadsheet takes for a formula: text that could be one begins with `'`.

    >>> csv_text("=1+1"), csv_text("sum"), csv_text(-1)
    ("'=1+1", 'sum', -1)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def from_csv_text(text: str) -> str:
    """The value that `csv_text` was given, as text."""
    return text[1:] if text.startswith("'") else text
