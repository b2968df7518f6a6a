"""Which host event runs inside which, and inside which of them a call of the GPU's runtime is made."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crossrank.tools.traces.kineto import HostEvent, Id, RuntimeCall

ASYNC_PREFIXES = ("gloo:", "mpi:", "ucc:", "hccl:")
"""Ranges of a Work: begun where the call is made, ended elsewhere when it is done. Nothing runs inside them."""

Thread = tuple[Id, Id]


def is_work(name: str) -> bool:
    """Whether a range of this name is that of a Work."""
    return name.startswith(ASYNC_PREFIXES)


@dataclass(kw_only=True)
class Nesting:
    """By positions in `KinetoTrace.host` and `KinetoTrace.calls`; -1 where nothing encloses."""

    parent: list[int]
    exclusive_ns: list[int]
    """Duration of an event without the time that events inside it cover."""
    around_call: list[int]
    """The innermost event on the thread of a call that encloses it from its start to its end."""
    threads: dict[Thread, list[int]]
    """The events of each thread in the order of starts."""
    overlaps: int = 0
    """Events that begin inside another one and end after it, other than those of a Work."""

    @property
    def order(self) -> Iterator[int]:
        """All events, each after those around it."""
        for events in self.threads.values():
            yield from events

    def upwards(self, call: int) -> Iterator[int]:
        """The events around a call, the innermost first."""
        event = self.around_call[call]
        while event >= 0:
            yield event
            event = self.parent[event]


def events_by_thread(events: Sequence[HostEvent]) -> dict[Thread, list[int]]:
    """Positions of the events of each thread, in the order of starts. The external id, given at the start, decides
    between equal times."""
    threads: dict[Thread, list[int]] = defaultdict(list)
    for index in sorted(
        range(len(events)), key=lambda i: (events[i].start, events[i].external_id or 0, -events[i].end)
    ):
        threads[events[index].pid, events[index].tid].append(index)
    return threads


def nest(events: Sequence[HostEvent], calls: Sequence[RuntimeCall]) -> Nesting:
    """Nest the events and calls of every thread, by one sweep over each."""
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
        _sweep(nesting, events, order, calls, calls_of[thread])
    return nesting


def _sweep(
    nesting: Nesting, events: Sequence[HostEvent], order: list[int], calls: Sequence[RuntimeCall], pending: list[int]
) -> None:
    """`pending` are the thread's calls, the last first."""
    # The events that are open, the outermost first, with their ends as negative numbers: those ascend.
    open_: list[int] = []
    ends: list[int] = []
    covered_until: list[int] = []

    def place_calls(until: float) -> None:
        while pending and calls[pending[-1]].start < until:
            call = pending.pop()
            around = bisect_right(ends, -calls[call].end)
            nesting.around_call[call] = open_[around - 1] if around else -1

    for index in order:
        event = events[index]
        start, end = event.start, event.end
        place_calls(start)
        if is_work(event.name):
            continue
        while ends and -ends[-1] < end:
            nesting.overlaps += -ends.pop() > start
            open_.pop()
            covered_until.pop()
        if open_:
            nesting.parent[index] = open_[-1]
            new = end - max(start, covered_until[-1])
            if new > 0:
                nesting.exclusive_ns[open_[-1]] -= new
                covered_until[-1] = end
        open_.append(index)
        ends.append(-end)
        covered_until.append(start)
    place_calls(math.inf)
