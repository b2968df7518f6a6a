"""Finds the edges of the graph, with one function for each reason to wait. `waits` finds waits for the GPU."""

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
"""A thread that is idle for longer may have waited for another thread."""
_MAX_OPS_BACK = 64
Key = TypeVar("Key", bound=Hashable)
_time = itemgetter(0)
NEVER = (-sys.maxsize, -1)


class Ordered(list[tuple[int, int]]):
    """A sorted list of (time, number of an item). The number -1 means no item."""

    def at_or_before(self, time: int) -> tuple[int, int]:
        """Return the last entry at or before `time`."""
        at = bisect_right(self, time, key=_time)
        return self[at - 1] if at else NEVER

    def last_until(self, time: int) -> int:
        """Return the last item at or before `time`."""
        return self.at_or_before(time)[1]

    def first_from(self, time: int) -> int:
        """Return the first item at or after `time`."""
        at = bisect_left(self, time, key=_time)
        return self[at][1] if at < len(self) else -1


def ordered_by(entries: Iterable[tuple[Key, int, int]]) -> Mapping[Key, Ordered]:
    """Group entries (key, time, number) by key. A missing key returns an empty list."""
    groups: dict[Key, Ordered] = defaultdict(Ordered)
    for key, time, number in entries:
        groups[key].append((time, number))
    for group in groups.values():
        group.sort()
    return groups


def program_order(ordered: Sequence[HostOp]) -> Iterator[Edge]:
    """Yield an edge from each operation to the next one that its thread starts, unless the first calls the second."""
    last: dict[int, int] = {}
    for op in ordered:
        before = last.get(op.tid)
        if before is not None and before != op.caller:
            yield Edge(before, op.id, "program_order")
        last[op.tid] = op.id


def in_program_order(host: Sequence[HostOp]) -> list[HostOp]:
    """Return the operations ordered by the start of their RecordFunctions, without roots and ranges of a Work."""
    return sorted((op for op in host if op.rf_id > 0 and not op.is_work), key=lambda op: op.rf_id)


def stream_order(activities: Sequence[Activity]) -> Iterator[Edge]:
    """Yield an edge from each activity to the next one on its stream. `activities` are ordered by start."""
    last: dict[tuple[object, object], int] = {}
    for activity in activities:
        stream = (activity.device, activity.stream)
        if stream in last:
            yield Edge(last[stream], activity.id, "stream")
        last[stream] = activity.id


def forward_backward(ordered: Sequence[HostOp]) -> Iterator[Edge]:
    """Yield an edge from each forward operation to its backward node.

    Autograd gives both the same sequence number, and the backward node the forward thread. If an inner operation needs
    no gradient, several forward operations share a number. The last one to start made the backward node, as in Kineto's
    `fwdbwd` arrows.
    """
    forward: dict[tuple[int, int], int] = {}
    for op in (op for op in ordered if op.seq_id >= 0):
        if not op.fw_tid:
            forward[op.tid, op.seq_id] = op.id
        elif (op.fw_tid, op.seq_id) in forward:
            yield Edge(forward[op.fw_tid, op.seq_id], op.id, "forward_backward")


def inter_thread(ordered: Sequence[HostOp]) -> Iterator[Edge]:
    """Yield an edge to each operation that starts a thread, or continues it after a pause. The edge comes from the last
    operation that another thread finished before. After a pause, it must have finished during the pause.
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
    """Yield an edge from a Work on the host (gloo) to the operation with which the thread continues.

    A blocking call returns when its Work is done. Otherwise the thread waited if two things hold. When the Work ended,
    it was idle or inside a communication, and it continued soon after. `unresolved` counts all other Works.
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
        at = bisect_left(thread, end, key=_start_of)
        if at == len(thread):
            unresolved["the execution trace ends first"] += 1
            continue
        target, slack = thread[at], _start_of(thread[at]) - end
        if communication.record.is_async is False:
            yield Edge(work.id, target.id, "sync")
        elif slack <= PAUSE_NS and _is_waiting(thread, at, end, slack):
            yield Edge(work.id, target.id, "sync", inferred=True, slack_ns=slack)
        else:
            unresolved["the traces show no wait for the end of a Work"] += 1


def _is_waiting(thread: Sequence[HostOp], following: int, moment: int, slack: int) -> bool:
    """Return whether a thread only waited at `moment`: in a communication, or idle for longer than `slack`."""
    busy_until = 0
    for op in reversed(thread[max(0, following - _MAX_OPS_BACK) : following]):
        if op.end_ns >= moment:
            return operation_of(op.name) is not None or "wait" in op.name
        busy_until = max(busy_until, op.end_ns)
    return moment - busy_until > slack


def _start_of(op: HostOp) -> int:
    return op.start_ns or 0


def group_order(communications: Sequence[Communication]) -> Iterator[Edge]:
    """Yield an edge from each communication to the next on its group. For P2P, peer and direction are the same too."""
    last: dict[tuple[object, ...], int] = {}
    for communication in communications:
        node = runs_as(communication)
        before = last.get(communication.order)
        if before is not None and before != node:  # the calls of one launch share a kernel
            yield Edge(before, node, "group_order")
        last[communication.order] = node


def runs_as(communication: Communication) -> int:
    """Return the node that represents the communication's execution: its kernel, its Work, or the call."""
    if communication.activities:
        return communication.activities[0]
    if communication.work is not None:
        return communication.work
    assert communication.host is not None
    return communication.host
