"""Things in the order of a time, to be found by one: what ran on a stream, what a thread began."""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from operator import itemgetter
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
_time = itemgetter(0)


NEVER = (-sys.maxsize, -1)


class Ordered(list[tuple[int, int]]):
    """(time, number of the thing), ascending. -1 is the number of nothing."""

    def at_or_before(self, time: int) -> tuple[int, int]:
        """The last entry at or before `time`."""
        at = bisect_right(self, time, key=_time)
        return self[at - 1] if at else NEVER

    def last_until(self, time: int) -> int:
        """The last thing at or before `time`."""
        return self.at_or_before(time)[1]

    def first_from(self, time: int) -> int:
        """The first thing at or after `time`."""
        at = bisect_left(self, time, key=_time)
        return self[at][1] if at < len(self) else -1


def ordered_by(entries: Iterable[tuple[Key, int, int]]) -> Mapping[Key, Ordered]:
    """Entries (key, time, number) by their key; one that has none gives an empty list."""
    groups: dict[Key, Ordered] = defaultdict(Ordered)
    for key, time, number in entries:
        groups[key].append((time, number))
    for group in groups.values():
        group.sort()
    return groups
