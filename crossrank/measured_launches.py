"""Which of the recorded launches it is that torch's flight recorder measured.

The two number calls differently: each numbers those of a group from where it began, torch a batch as one call, and some
not at all. But torch notes a call after our record of it and within its launch. So of one process group an entry is of
the last launch that began before it, if it is of its operation; of several entries the first, or that which closes the
batch.
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
    """A launch as it was recorded: of one call, or of a batch."""

    began: int
    """ns since 1970."""
    op: str
    """Of its first call."""
    is_batch: bool
    calls: list[Call]


class RecordedLaunches(Generic[Call]):
    """The launches of one process that no entry was found for yet. Launches and entries are given in their order."""

    def __init__(self) -> None:
        self._of_group: dict[str, list[RecordedLaunch[Call]]] = defaultdict(list)

    def add(self, pg: str, launch: RecordedLaunch[Call]) -> None:
        """Add one on the group of that name."""
        self._of_group[pg].append(launch)

    def take(self, pg: str, name: str, created: int) -> RecordedLaunch[Call] | None:
        """The launch that an entry is of; None where there is none, or where the entry is of a part of it. `name` is
        its `profiling_name`: `nccl:all_reduce`, `nccl:send 0->1`, `nccl:coalesced`; `created` is in ns since 1970."""
        launches = self._of_group.get(pg, [])
        place = bisect_right(launches, created, key=_began)
        del launches[: max(place - 1, 0)]  # later entries are of later launches
        return launches.pop(0) if place and _fits(name, launches[0]) else None

    def keep_last(self, most: int) -> None:
        """Forget the oldest launches of each group but for so many."""
        for launches in self._of_group.values():
            del launches[:-most]


_began = attrgetter("began")


def _fits(name: str, launch: RecordedLaunch[Call]) -> bool:
    """Whether an entry that torch calls so measures a launch: of a batch only what closes it has times."""
    return closes_batch(name) if launch.is_batch else measured_operation(name) == launch.op


def closes_batch(name: str) -> bool:
    """Whether an entry of that `profiling_name` measures a batch."""
    return name.endswith(_CLOSING)


def measured_operation(name: str) -> str | None:
    """The operation that an entry of that `profiling_name` measures, where it is of one call."""
    operation = operation_of(name.partition(" ")[0])
    return operation.name if operation is not None else None
