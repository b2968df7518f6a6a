"""Which marker's range each communication kernel was launched in.

A kernel is found by the correlation id of its launch, which is unique within its process only; the launch lies in
the innermost range around it on the same thread. A marker without an extent reaches to the next one of its thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from crossrank.tools.traces.kernels import communication_kernel
from crossrank.tools.traces.nsight.database import KERNEL, LATEST, MEMCPY, NONE, RUNTIME, Column, Export
from crossrank.tools.traces.nsight.markers import Ranges

_FOREVER = np.iinfo(np.int64).max
_PEER_TO_PEER = 10
"""copyKind of a copy from one GPU to another (CUPTI_ACTIVITY_MEMCPY_KIND_PTOP)."""


@dataclass
class Activities:
    """Kernels, or copies between GPUs, in the order of the file."""

    start: Column
    end: Column
    process: Column
    """globalPid >> 24."""
    correlation: Column
    device: Column
    stream: Column
    graph_node: Column
    op: Column
    """Index into `ops`."""
    ops: list[str | None]
    """Operations that the names of kernels tell."""
    thread: Column
    """globalTid of the launch; `NONE` where none was recorded."""
    launched: Column
    """When, like `start`."""

    def __len__(self) -> int:
        return len(self.start)

    def take(self, rows: Column) -> Activities:
        return Activities(
            start=self.start[rows],
            end=self.end[rows],
            process=self.process[rows],
            correlation=self.correlation[rows],
            device=self.device[rows],
            stream=self.stream[rows],
            graph_node=self.graph_node[rows],
            op=self.op[rows],
            ops=self.ops,
            thread=self.thread[rows],
            launched=self.launched[rows],
        )


_KERNEL = ("start", "end", "globalPid", "correlationId", "deviceId", "streamId", "graphNodeId", "name")


def communication_kernels(export: Export) -> Activities:
    """The kernels that communicate, by their names."""
    there = export.columns(KERNEL)
    name = next((name for name in ("demangledName", "shortName", "mangledName") if name in there), None)
    if name is None:
        return _activities(export, [np.empty(0, np.int64)] * 8, [])
    (distinct,) = export.all(KERNEL, [name], f'GROUP BY "{name}"')
    ops: list[str | None] = []
    of_name: dict[int, int] = {}
    for number, text in export.strings(distinct).items():
        known = communication_kernel(text)
        if known is not None:
            if known[1] not in ops:
                ops.append(known[1])
            of_name[number] = ops.index(known[1])
    names = np.array(sorted(of_name), np.int64)
    numbers = np.array([of_name[one] for one in sorted(of_name)], np.int64)
    parts: list[list[Column]] = []
    if len(names):
        for part in export.read(KERNEL, (*_KERNEL[:-1], name)):
            at = np.minimum(np.searchsorted(names, part[7]), len(names) - 1)
            keep = np.flatnonzero(names[at] == part[7])
            if len(keep):
                parts.append([*(column[keep] for column in part[:7]), numbers[at[keep]]])
    return _activities(export, _joined(parts, 8), ops)


def peer_copies(export: Export) -> Activities:
    """Copies from one GPU to another, which copy-engine collectives and symmetric memory are made of."""
    there = export.columns(MEMCPY)
    where = [f"copyKind = {_PEER_TO_PEER}"] if "copyKind" in there else []
    if {"srcDeviceId", "dstDeviceId"} <= there:
        where.append("(srcDeviceId IS NOT NULL AND dstDeviceId IS NOT NULL AND srcDeviceId != dstDeviceId)")
    if not where:
        return _activities(export, [np.empty(0, np.int64)] * 8, [])
    columns = export.all(MEMCPY, _KERNEL[:-1], f"WHERE {' OR '.join(where)}")
    return _activities(export, [*columns, np.zeros(len(columns[0]), np.int64)], [None])


def _joined(parts: list[list[Column]], count: int) -> list[Column]:
    return [
        np.concatenate([part[index] for part in parts]) if parts else np.empty(0, np.int64) for index in range(count)
    ]


def _activities(export: Export, columns: list[Column], ops: list[str | None]) -> Activities:
    possible = np.flatnonzero((columns[0] >= 0) & (columns[1] > columns[0]) & (columns[1] < LATEST))
    if len(possible) < len(columns[0]):
        lost = len(columns[0]) - len(possible)
        export.notes.append(f"{lost} communication kernels end before they begin, or at times that cannot be")
    start, end, pid, correlation, device, stream, node, op = (column[possible] for column in columns)
    process = np.where(pid == NONE, NONE, pid >> 24)
    thread, launched = _launches(export, process, correlation)
    return Activities(start, end, process, correlation, device, stream, np.maximum(node, 0), op, ops, thread, launched)


def _launches(export: Export, process: Column, correlation: Column) -> tuple[Column, Column]:
    """(thread, time) of the launch of each activity."""
    thread = np.full(len(process), NONE, np.int64)
    launched = np.full(len(process), NONE, np.int64)
    if not len(process) or not {"globalTid", "correlationId", "start"} <= export.columns(RUNTIME):
        return thread, launched
    processes = np.unique(process)
    keys = _key(processes, process, correlation)
    order = np.argsort(keys, kind="stable")
    wanted = keys[order]
    found: list[list[Column]] = []
    for tid, correlated, start in export.read(RUNTIME, ("globalTid", "correlationId", "start")):
        owner = tid >> 24
        mine = np.flatnonzero((correlated != NONE) & np.isin(owner, processes))
        key = _key(processes, owner[mine], correlated[mine])
        at = np.minimum(np.searchsorted(wanted, key), len(wanted) - 1)
        hit = np.flatnonzero(wanted[at] == key)
        if len(hit):
            found.append([key[hit], tid[mine[hit]], start[mine[hit]]])
    if not found:
        return thread, launched
    key, tid, start = _joined(found, 3)
    # The runtime's call and the driver's within it share the id: the outer one is the launch.
    first = np.lexsort((start, key))
    key, tid, start = key[first], tid[first], start[first]
    at = np.minimum(np.searchsorted(key, keys), len(key) - 1)
    hit = key[at] == keys
    thread[hit], launched[hit] = tid[at[hit]], start[at[hit]]
    return thread, launched


def _key(processes: Column, process: Column, correlation: Column) -> Column:
    """One number for process and correlation id."""
    return (np.searchsorted(processes, process) << 33) | (correlation & 0x1FFFFFFFF)


def innermost(ranges: Ranges, thread: Column, moment: Column) -> Column:
    """Index of the innermost range around each moment of a thread; `NONE` where there is none."""
    found = np.full(len(moment), NONE, np.int64)
    if not len(ranges) or not len(moment):
        return found
    by_thread = np.argsort(ranges.thread, kind="stable")
    bounds = {tid: (first, last) for tid, first, last in runs(ranges.thread[by_thread])}
    asked = np.argsort(thread, kind="stable")
    for tid, first, last in runs(thread[asked]):
        place = bounds.get(tid)
        if place is None or tid == NONE:
            continue
        mine = by_thread[place[0] : place[1]]
        rows = asked[first:last]
        start, end = ranges.start[mine], _ends(ranges, mine)
        at = np.searchsorted(start, moment[rows], side="right") - 1
        inside = at >= 0
        parent = _parents(start, end)
        while True:
            left = inside & (end[np.maximum(at, 0)] < moment[rows])
            if not left.any():
                break
            at = np.where(left, parent[np.maximum(at, 0)], at)
            inside = at >= 0
        found[rows] = np.where(inside, mine[np.maximum(at, 0)], NONE)
    return found


def _ends(ranges: Ranges, mine: Column) -> Column:
    """Ends of a thread's ranges; what has none reaches to the next marker without extent, or to the end."""
    end = np.where(ranges.end[mine] == NONE, _FOREVER, ranges.end[mine])
    instant = np.flatnonzero(ranges.instant[mine])
    if len(instant):
        following = np.append(ranges.start[mine[instant[1:]]] - 1, _FOREVER)
        end[instant] = following
    return end


def _parents(start: Column, end: Column) -> Column:
    """Index of the range around each of a thread's ranges, which are in the order of starts; -1 for none."""
    parent = np.arange(-1, len(start) - 1, dtype=np.int64)
    reach = np.maximum.accumulate(end)
    # Most ranges follow each other: behind one that lies around none of those before, nothing is to be looked for.
    alone = np.ones(len(start), bool)
    alone[1:] = reach[:-1] < start[1:]
    parent[alone] = -1
    for index in np.flatnonzero(~alone):
        above = index - 1
        while above >= 0 and end[above] < end[index]:
            above = int(parent[above])
        parent[index] = above
    return parent


def runs(ordered: Column) -> list[tuple[int, int, int]]:
    """(value, first, behind the last) of every run of equal values."""
    if not len(ordered):
        return []
    edges = np.flatnonzero(np.diff(ordered)) + 1
    firsts = np.concatenate(([0], edges))
    lasts = np.concatenate((edges, [len(ordered)]))
    return [(int(ordered[first]), int(first), int(last)) for first, last in zip(firsts, lasts, strict=True)]
