"""Draws the edges of the graph: one function for each reason why something waits. What the GPU makes wait: `waits`."""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TypeVar

from crossrank.comm import operation_of
from crossrank.tools.graph.linking.linked_trace import Activity, Communication, Edge
from crossrank.tools.traces.execution_trace import HostOp

PAUSE_NS = 1_000_000
"""A thread that did nothing for longer than this may have waited for another one."""
_LOOK_BACK = 64
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


def program_order(ordered: Sequence[HostOp]) -> Iterator[Edge]:
    """From each operation to the next that its thread began, where that is not called by it."""
    last: dict[int, int] = {}
    for op in ordered:
        before = last.get(op.tid)
        if before is not None and before != op.caller:
            yield Edge(before, op.id, "program_order")
        last[op.tid] = op.id


def in_program_order(host: Sequence[HostOp]) -> list[HostOp]:
    """Operations by the start of their RecordFunctions, without the roots and without what no thread runs."""
    return sorted((op for op in host if op.rf_id > 0 and not op.is_work), key=lambda op: op.rf_id)


def stream_order(activities: Sequence[Activity]) -> Iterator[Edge]:
    """`activities` are in the order of starts."""
    last: dict[tuple[object, object], int] = {}
    for activity in activities:
        stream = (activity.device, activity.stream)
        if stream in last:
            yield Edge(last[stream], activity.id, "stream")
        last[stream] = activity.id


def forward_backward(ordered: Sequence[HostOp]) -> Iterator[Edge]:
    """Autograd gives a backward node the sequence number and the thread of its forward operation.

    Several forward operations share a number where an inner one needs no gradient; the one begun last made the
    backward node, as Kineto's `fwdbwd` arrows have it.
    """
    forward: dict[tuple[int, int], int] = {}
    for op in (op for op in ordered if op.seq_id >= 0):
        if not op.fw_tid:
            forward[op.tid, op.seq_id] = op.id
        elif (op.fw_tid, op.seq_id) in forward:
            yield Edge(forward[op.fw_tid, op.seq_id], op.id, "forward_backward")


def inter_thread(ordered: Sequence[HostOp]) -> Iterator[Edge]:
    """Where a thread begins, or goes on after a pause: what another thread finished last before that.

    After a pause only what was finished during it counts.
    """
    threads: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # (start, end, id)
    for op in ordered:
        if op.start_ns is not None:
            threads[op.tid].append((op.start_ns, op.end_ns, op.id))
    ends = ordered_by((tid, end, op_id) for tid, ops in threads.items() for _, end, op_id in ops)
    for tid, ops in threads.items():
        ops.sort()
        busy_until, _ = NEVER
        for start, end, op_id in ops:
            if start - busy_until > PAUSE_NS:
                others = (entries.at_or_before(start) for other, entries in ends.items() if other != tid)
                latest, source = max(others, default=NEVER)
                if latest > busy_until:
                    yield Edge(source, op_id, "inter_thread", inferred=True, slack_ns=start - latest)
            busy_until = max(busy_until, end)


def work_waits(
    host: Sequence[HostOp],
    ordered: Sequence[HostOp],
    communications: Sequence[Communication],
    unresolved: Counter[str],
) -> Iterator[Edge]:
    """Where a thread goes on after the Work of a communication that runs on the host (gloo).

    A call that is not asynchronous returns when its Work is done. Otherwise the thread waited if it did nothing, or
    was inside a communication, when the Work ended, and went on soon after. The rest is counted in `unresolved`.
    """
    works: dict[int | None, HostOp] = {op.id: op for op in host if op.is_work}
    threads: dict[int, list[HostOp]] = defaultdict(list)
    for op in ordered if works else ():
        if op.start_ns is not None:
            threads[op.tid].append(op)
    for communication in communications:
        work = works.get(communication.work)
        if work is None or work.start_ns is None:
            continue
        end = work.end_ns
        thread = threads.get(work.tid, [])
        at = bisect_left(thread, end, key=_start)
        if at == len(thread):
            unresolved["nothing follows the wait in the execution trace"] += 1
            continue
        target, slack = thread[at], _start(thread[at]) - end
        if communication.record.is_async is False:
            yield Edge(work.id, target.id, "sync")
        elif slack <= PAUSE_NS and _idle(thread, at, end, slack):
            yield Edge(work.id, target.id, "sync", inferred=True, slack_ns=slack)
        else:
            unresolved["nothing is seen to wait for a Work when it ends"] += 1


def _idle(thread: Sequence[HostOp], following: int, moment: int, slack: int) -> bool:
    """Whether a thread did nothing but wait at a moment: for longer than it then took to go on."""
    busy_until = 0
    for op in reversed(thread[max(0, following - _LOOK_BACK) : following]):
        if op.end_ns >= moment:
            return operation_of(op.name) is not None or "wait" in op.name
        busy_until = max(busy_until, op.end_ns)
    return moment - busy_until > slack


def _start(op: HostOp) -> int:
    return op.start_ns or 0


def group_order(communications: Sequence[Communication]) -> Iterator[Edge]:
    """From each communication to the next on its group; for P2P, on its group with the same peer and direction."""
    last: dict[tuple[object, ...], int] = {}
    for communication in communications:
        node = runs_as(communication)
        before = last.get(communication.order)
        if before is not None and before != node:  # several of one launch have one kernel
            yield Edge(before, node, "group_order")
        last[communication.order] = node


def runs_as(communication: Communication) -> int:
    """The node that stands for the communication's own run: its kernel, its Work, or the call."""
    if communication.activities:
        return communication.activities[0]
    if communication.work is not None:
        return communication.work
    assert communication.host is not None
    return communication.host
