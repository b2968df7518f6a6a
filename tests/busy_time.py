"""For how long at least one of several things ran, counted in another way than the product does."""

from __future__ import annotations

from collections.abc import Iterable


def busy_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Time in which at least one runs: begins and ends counted up and down."""
    total, running, since = 0, 0, 0
    changes = [change for begin, end in spans for change in ((begin, 1), (end, -1))]
    for moment, change in sorted(changes):
        total += (moment - since) * (running > 0)
        running, since = running + change, moment
    return total
