"""Finds the marker's range in which each communication kernel was launched.

A kernel has the correlation id of its launch, which is unique only within its process. The launch belongs to the
innermost range around it on the same thread. An instant marker, without an end, reaches to the next one of its thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from crossrank.tools.traces.kernels import communication_kernel
from crossrank.tools.traces.nsight.export import (
    KERNEL,
    LATEST,
    MEMCPY,
    NONE,
    RUNTIME,
    Column,
    Columns,
    Export,
    at,
    lookup,
)
from crossrank.tools.traces.nsight.markers import Ranges

_FOREVER = np.iinfo(np.int64).max
_PEER_TO_PEER = 10
"""copyKind of a copy from one GPU to another (CUPTI_ACTIVITY_MEMCPY_KIND_PTOP)."""


@dataclass
class Activities(Columns):
    """Kernels, or copies between GPUs, in the order of the file. A kernel whose times are impossible has `NONE` as
    start and end: its call is one all the same."""

    process: Column
    """globalPid >> 24."""
    correlation: Column
    device: Column
    stream: Column
    graph_node: Column
    """0 = not launched by a graph."""
    op: Column
    """Index into `ops`."""
    ops: list[str | None]
    """Operations in the names of kernels."""
    thread: Column
    """globalTid of the launch; `NONE` if it was not recorded."""
    launched: Column
    """Time of the launch, on the clock of `start`."""


_ACTIVITY = ("start", "end", "globalPid", "correlationId", "deviceId", "streamId", "graphNodeId", "rowid")


def kernel_names(export: Export) -> tuple[str | None, dict[int, str]]:
    """(column with kernel names, or None; the names by their ids)."""
    there = export.columns(KERNEL)
    column = next((name for name in ("demangledName", "shortName", "mangledName") if name in there), None)
    return column, {} if column is None else export.strings(KERNEL, column)


def operations_of(names: dict[int, str]) -> dict[int, str | None]:
    """Id of the name of a communication kernel -> operation in the name."""
    known = {number: communication_kernel(text) for number, text in names.items()}
    return {number: kernel[1] for number, kernel in known.items() if kernel is not None}


def communication_kernels(export: Export) -> Activities:
    """The kernels that communicate, by their names."""
    name, texts = kernel_names(export)
    op_of = operations_of(texts)
    if name is None:
        return _activities(export, KERNEL, [np.empty(0, np.int64)] * 9, [])
    ops = list(dict.fromkeys(op_of.values()))
    names = np.array(list(op_of), np.int64)
    columns = export.all(KERNEL, (*_ACTIVITY, name), keep=lambda part: lookup(names, part[-1]) != NONE)
    columns[-1] = at(np.array([ops.index(op) for op in op_of.values()], np.int64), lookup(names, columns[-1]))
    return _activities(export, KERNEL, columns, ops)


def peer_copies(export: Export) -> Activities:
    """Copies from one GPU to another, which copy-engine collectives and symmetric memory are made of."""
    there = export.columns(MEMCPY)
    where = [f"copyKind = {_PEER_TO_PEER}"] if "copyKind" in there else []
    if {"srcDeviceId", "dstDeviceId"} <= there:
        where.append("(srcDeviceId IS NOT NULL AND dstDeviceId IS NOT NULL AND srcDeviceId != dstDeviceId)")
    columns = export.all(MEMCPY, _ACTIVITY, f"WHERE {' OR '.join(where) or 'FALSE'}")
    return _activities(export, MEMCPY, [*columns, np.zeros(len(columns[0]), np.int64)], [None])


def _activities(export: Export, table: str, columns: list[Column], ops: list[str | None]) -> Activities:
    possible = (columns[0] >= 0) & (columns[1] > columns[0]) & (columns[1] < LATEST)
    possible &= ~np.isin(columns.pop(7), export.left_out.get(table, np.empty(0, np.int64)))
    if table == KERNEL:
        columns[:2] = [np.where(possible, column, NONE) for column in columns[:2]]
    else:
        columns = [column[possible] for column in columns]
    start, end, pid, correlation, device, stream, node, op = columns
    process = np.where(pid == NONE, NONE, pid >> 24)
    thread, launched = launches(export, process, correlation)
    return Activities(start, end, process, correlation, device, stream, np.maximum(node, 0), op, ops, thread, launched)


def launches(export: Export, process: Column, correlation: Column) -> tuple[Column, Column]:
    """(globalTid, time) of the launch of each activity; `NONE` if it was not recorded."""
    needed = ("globalTid", "correlationId", "start")
    if not len(process) or not {*needed} <= export.columns(RUNTIME):
        return np.full(len(process), NONE, np.int64), np.full(len(process), NONE, np.int64)
    processes = np.unique(process)

    def key(process: Column, correlation: Column) -> Column:
        """One number for process and correlation id; `NONE` if an activity has no such process or id."""
        place = lookup(processes, process)
        return np.where((place == NONE) | (correlation == NONE), NONE, (place << 33) | (correlation & 0x1FFFFFFFF))

    own = key(process, correlation)
    wanted = np.sort(own[own != NONE])
    columns = export.all(RUNTIME, needed, keep=lambda part: lookup(wanted, key(part[0] >> 24, part[1])) != NONE)
    tid, correlated, start = columns
    keys = key(tid >> 24, correlated)
    # The runtime's call and the driver's within it share the id: the outer one is the launch.
    first = np.lexsort((start, keys))
    found = lookup(keys[first], own)
    return at(tid[first], found), at(start[first], found)


def innermost(ranges: Ranges, thread: Column, moment: Column) -> Column:
    """Index of the innermost range around each moment of a thread; `NONE` if there is none."""
    found = np.full(len(moment), NONE, np.int64)
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
    """Ends of a thread's ranges. An instant marker reaches to the next one; other open ranges have no limit."""
    end = np.where(ranges.end[mine] == NONE, _FOREVER, ranges.end[mine])
    instant = np.flatnonzero(ranges.instant[mine])
    if len(instant):
        following = np.append(ranges.start[mine[instant[1:]]] - 1, _FOREVER)
        end[instant] = following
    return end


def _parents(start: Column, end: Column) -> Column:
    """Index of the range around each of a thread's ranges, which are ordered by start; -1 = none."""
    parent = np.full(len(start), NONE, np.int64)
    reach = np.maximum.accumulate(end)
    # Most ranges follow each other: a range that starts after all earlier ones have ended has no parent.
    for index in np.flatnonzero(reach[:-1] >= start[1:]) + 1:
        above = index - 1
        while above >= 0 and end[above] < end[index]:
            above = int(parent[above])
        parent[index] = above
    return parent


def runs(ordered: Column) -> list[tuple[int, int, int]]:
    """(value, first index, last index + 1) of every run of equal values in ascending order."""
    values, first, counts = np.unique(ordered, return_index=True, return_counts=True)
    return list(zip(values.tolist(), first.tolist(), (first + counts).tolist(), strict=True))
