"""Finds the recorded launch that an entry of torch's flight recorder measured.

torch and crossrank number calls differently. But torch creates its entry after crossrank records the call, and within
the launch. So an entry belongs to the last launch of its process group that started before it, if the operation is
the same. If several entries match, the launch takes the first one; a batch takes the one that closes it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from crossrank.comm import operation_of

Call = TypeVar("Call")
_CLOSING = "coalesced"


@dataclass(eq=False, slots=True)
class RecordedLaunch(Generic[Call]):
    """A recorded launch: one call or one batch."""

    began: int
    """Start in ns since 1970."""
    op: str
    """Operation of its first call."""
    is_batch: bool
    calls: list[Call]


class RecordedLaunches(Generic[Call]):
    """Launches of one process that have no entry yet. Add launches, and look up entries, by increasing time."""

    def __init__(self) -> None:
        self._launches_by_group: dict[str, list[RecordedLaunch[Call]]] = defaultdict(list)

    def add(self, pg: str, launch: RecordedLaunch[Call]) -> None:
        """Add a launch on the group named `pg`."""
        self._launches_by_group[pg].append(launch)

    def take(self, pg: str, name: str, created: int) -> RecordedLaunch[Call] | None:
        """Return and remove the launch of an entry; None if there is none, or if the entry is only a part of it.
        `name` is the `profiling_name`: `nccl:all_reduce`, `nccl:send 0->1`, `nccl:coalesced`. `created` is in ns."""
        launches = self._launches_by_group.get(pg, [])
        place = bisect_right(launches, created, key=_began)
        del launches[: max(place - 1, 0)]  # later entries belong to later launches
        return launches.pop(0) if place and _measures(name, launches[0]) else None

    def keep_last(self, most: int) -> None:
        """Remove all launches of each group except the last `most`."""
        for launches in self._launches_by_group.values():
            del launches[:-most]


_began = attrgetter("began")


def _measures(name: str, launch: RecordedLaunch[Call]) -> bool:
    """Return whether an entry named `name` measures a launch. In a batch, only the closing entry has times."""
    if launch.is_batch:
        return name.endswith(_CLOSING)
    operation = operation_of(name.partition(" ")[0])
    return operation is not None and operation.name == launch.op
