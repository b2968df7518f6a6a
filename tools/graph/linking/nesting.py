"""Which host event runs inside which, and inside which of them a call of the GPU's runtime is made."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crossrank.tools.graph.linking.event_matching import in_order_of_starts
from crossrank.tools.traces.kineto import HostEvent, Id, RuntimeCall

ASYNC_PREFIXES = ("gloo:", "mpi:", "ucc:")
"""Ranges of a Work: begun where the call is made, ended elsewhere when it is done. Nothing runs inside them."""


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
    order: list[int]
    """Events in the order of starts, over all threads."""
    overlaps: int
    """Events that begin inside another one and end after it, other than those of a Work."""

    def upwards(self, call: int) -> Iterator[int]:
        """The events around a call, the innermost first."""
        event = self.around_call[call]
        while event >= 0:
            yield event
            event = self.parent[event]


def nest(events: Sequence[HostEvent], calls: Sequence[RuntimeCall]) -> Nesting:
    """Nest the events and calls of every thread, by one sweep over each."""
    nesting = Nesting(
        parent=[-1] * len(events),
        exclusive_ns=[event.end - event.start for event in events],
        around_call=[-1] * len(calls),
        order=in_order_of_starts(events),
        overlaps=0,
    )
    threads: dict[tuple[Id, Id], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for index in nesting.order:
        threads[events[index].pid, events[index].tid][0].append(index)
    for index in sorted(range(len(calls)), key=lambda index: calls[index].start):
        threads[calls[index].pid, calls[index].tid][1].append(index)
    for of_thread, calls_of_thread in threads.values():
        _sweep(nesting, events, calls, of_thread, calls_of_thread)
    return nesting


def _sweep(
    nesting: Nesting, events: Sequence[HostEvent], calls: Sequence[RuntimeCall], order: list[int], call_order: list[int]
) -> None:
    open_: list[int] = []
    covered_until: list[int] = []  # parallel to open_
    next_call = 0
    for index in [*order, -1]:
        start = events[index].start if index >= 0 else None
        while next_call < len(call_order) and (start is None or calls[call_order[next_call]].start < start):
            call = call_order[next_call]
            nesting.around_call[call] = _around(calls[call], events, open_)
            next_call += 1
        if index < 0:
            return
        event = events[index]
        if is_work(event.name):
            continue
        while open_ and events[open_[-1]].end < event.end:
            if events[open_[-1]].end > event.start:
                nesting.overlaps += 1
            open_.pop()
            covered_until.pop()
        if open_:
            parent = open_[-1]
            nesting.parent[index] = parent
            new = event.end - max(event.start, covered_until[-1])
            if new > 0:
                nesting.exclusive_ns[parent] -= new
                covered_until[-1] = event.end
        open_.append(index)
        covered_until.append(event.start)


def _around(call: RuntimeCall, events: Sequence[HostEvent], open_: list[int]) -> int:
    # No open event ends after one that is further out, so they can be halved.
    at = bisect_right(open_, -call.end, key=lambda index: -events[index].end)
    return open_[at - 1] if at else -1
