"""Finds which host event runs inside which, and the innermost event around each call of the GPU's runtime."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crossrank.tools.traces.kineto import HostEvent, Id, RuntimeCall

ASYNC_PREFIXES = ("gloo:", "mpi:", "ucc:", "hccl:")
"""Prefixes of the range of a Work. It starts at the call and ends elsewhere with the Work. Nothing runs inside it."""

Thread = tuple[Id, Id]


def is_work(name: str) -> bool:
    """Return whether a range of this name is the range of a Work."""
    return name.startswith(ASYNC_PREFIXES)


@dataclass(kw_only=True)
class Nesting:
    """Enclosing events, by positions in `KinetoTrace.host` and `KinetoTrace.calls`; -1 if nothing encloses."""

    parent: list[int]
    exclusive_ns: list[int]
    """Duration of each event without the time of the events inside it."""
    around_call: list[int]
    """The innermost event that encloses each call on its thread, from its start to its end."""
    threads: dict[Thread, list[int]]
    """The events of each thread, ordered by start."""
    overlaps: int = 0
    """Events that start inside another one and end after it, except ranges of a Work."""

    @property
    def order(self) -> Iterator[int]:
        """Yield all events, each after those around it."""
        for events in self.threads.values():
            yield from events

    def upwards(self, call: int) -> Iterator[int]:
        """Yield the events around a call, the innermost first."""
        event = self.around_call[call]
        while event >= 0:
            yield event
            event = self.parent[event]


def events_by_thread(events: Sequence[HostEvent]) -> dict[Thread, list[int]]:
    """Return the positions of each thread's events, ordered by start. The external id, which rises with the start,
    orders equal times."""
    threads: dict[Thread, list[int]] = defaultdict(list)
    for index in sorted(
        range(len(events)), key=lambda i: (events[i].start, events[i].external_id or 0, -events[i].end)
    ):
        threads[events[index].pid, events[index].tid].append(index)
    return threads


def nest(events: Sequence[HostEvent], calls: Sequence[RuntimeCall]) -> Nesting:
    """Nest the events and calls of each thread in one sweep."""
    nesting = Nesting(
        parent=[-1] * len(events),
        exclusive_ns=[event.end - event.start for event in events],
        around_call=[-1] * len(calls),
        threads=events_by_thread(events),
    )
    calls_of: dict[Thread, list[int]] = defaultdict(list)
    for index in sorted(range(len(calls)), key=lambda index: calls[index].start, reverse=True):
        calls_of[calls[index].pid, calls[index].tid].append(index)
    for thread, order in nesting.threads.items():
        _nest_thread(nesting, events, order, calls, calls_of[thread])
    return nesting


def _nest_thread(
    nesting: Nesting, events: Sequence[HostEvent], order: list[int], calls: Sequence[RuntimeCall], pending: list[int]
) -> None:
    """Nest one thread. `pending` are its calls, the last first."""
    # Open events, the outermost first. Their ends are negative numbers, so that they ascend for bisect.
    open_events: list[int] = []
    ends: list[int] = []
    covered_until: list[int] = []

    def place_calls(until: float) -> None:
        while pending and calls[pending[-1]].start < until:
            call = pending.pop()
            around = bisect_right(ends, -calls[call].end)
            nesting.around_call[call] = open_events[around - 1] if around else -1

    for index in order:
        event = events[index]
        start, end = event.start, event.end
        place_calls(start)
        if is_work(event.name):
            continue
        while ends and -ends[-1] < end:
            nesting.overlaps += -ends.pop() > start
            open_events.pop()
            covered_until.pop()
        if open_events:
            nesting.parent[index] = open_events[-1]
            new = end - max(start, covered_until[-1])
            if new > 0:
                nesting.exclusive_ns[open_events[-1]] -= new
                covered_until[-1] = end
        open_events.append(index)
        ends.append(-end)
        covered_until.append(start)
    place_calls(math.inf)
