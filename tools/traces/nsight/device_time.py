"""When the GPU of each process computed, communicated and copied: all kernels, copies and memsets of an export."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from crossrank.tools.traces.busy import Spans, spans_of
from crossrank.tools.traces.device_times import UNKNOWN, EventTimes, described, impossible_times
from crossrank.tools.traces.kernels import KernelsOfName, unknown_kernels
from crossrank.tools.traces.nsight.export import (
    GRAPH_TRACE,
    KERNEL,
    LATEST,
    MEMCPY,
    MEMSET,
    NONE,
    RUNTIME,
    Column,
    Columns,
    Export,
)
from crossrank.tools.traces.nsight.kernel_launches import kernel_names, launches, operations_of
from crossrank.tools.traces.rank_trace import RankTrace

_COMPUTATION, _COMMUNICATION, _MEMORY = range(3)
_TABLES = (KERNEL, MEMCPY, MEMSET)


@dataclass
class DeviceWork(Columns):
    """Kernels, copies and memsets of all processes."""

    process: Column
    """globalPid >> 24."""
    correlation: Column
    device: Column
    stream: Column
    context: Column
    row: Column
    """Number of the row in its table, which is `table` in `_TABLES`."""
    table: Column
    kind: Column
    name: Column
    """Id of a kernel's name in `StringIds`; `NONE` for copies and memsets."""
    launched: Column
    """Time of the launch; `NONE` if it was not recorded."""


def device_work(export: Export) -> tuple[DeviceWork, dict[int, str]] | None:
    """What ran on GPUs, and the names of kernels by their ids. None if kernels that communicate cannot be separated
    from those that compute: there are no kernels, they have no names, or CUDA graphs were traced whole."""
    name, names = kernel_names(export)
    if name is None or len(export.all(GRAPH_TRACE, ("start",))[0]):
        return None
    columns = ("start", "end", "globalPid", "correlationId", "deviceId", "streamId", "contextId", "rowid")
    kernels = export.all(KERNEL, (*columns, name))
    kinds = np.where(np.isin(kernels[-1], list(operations_of(names))), _COMMUNICATION, _COMPUTATION)
    parts = [[*kernels[:-1], np.zeros_like(kinds), kinds, kernels[-1]]]
    for number, table in enumerate(_TABLES[1:], 1):
        rows = export.all(table, columns)
        parts.append([*rows, *(np.full(len(rows[0]), value) for value in (number, _MEMORY, NONE))])
    start, end, pid, *others = (np.concatenate(column) for column in zip(*parts, strict=True))
    process = np.where(pid == NONE, NONE, pid >> 24)
    others.append(launches(export, process, others[0])[1])
    work = DeviceWork(start, end, process, *others)
    is_wrong = (start < 0) | (end < start) | (end >= LATEST)
    if is_wrong.any():
        counts = zip(_TABLES, np.bincount(work.table[is_wrong], minlength=len(_TABLES)).tolist(), strict=True)
        shown = ", ".join(f"{count:,} of {table}" for table, count in counts if count)
        export.notes.append(f"rows that end before they start, or at impossible times, were left out: {shown}")
    work = work.take(~is_wrong & (end > start))
    return _without_impossible_times(export, work, names), names


def _without_impossible_times(export: Export, work: DeviceWork, names: dict[int, str]) -> DeviceWork:
    """Leave out what `impossible_times` finds. The export says when, and the reader of calls leaves it out too."""
    keys = np.stack([work.process, work.device, work.stream, work.context])
    stream = np.unique(keys, axis=1, return_inverse=True)[1].ravel()
    launched = np.where(work.launched == NONE, UNKNOWN, work.launched)
    correlation = np.where(work.correlation == NONE, UNKNOWN, work.correlation)
    times = EventTimes(work.start, work.end, work.device, stream, correlation, work.process, launched, launched)
    host = [export.value(RUNTIME, "start", select=f"{edge}(start)") for edge in ("MIN", "MAX")]
    first, last = (one if isinstance(one, int) else None for one in host)
    window = None if first is None or last is None else (2 * first - last, 2 * last - first)
    wrong = impossible_times(times, window=window)
    export.notes += described(wrong, lambda index: names.get(int(work.name[index])) or _TABLES[int(work.table[index])])
    is_wrong = np.isin(np.arange(len(work)), list(wrong))
    for number, table in enumerate(_TABLES):
        export.left_out[table] = work.row[is_wrong & (work.table == number)]
    return work.take(~is_wrong)


def take_device_work(trace: RankTrace, work: DeviceWork, names: dict[int, str], copies: Spans, epoch: int) -> None:
    """Add when a rank's GPU was busy, for the steps that `trace` already has. `work` is that of its process. `copies`
    were launched by its calls, and are communication."""
    spans = np.stack([work.start, work.end], axis=1)
    computation, communication, memory = (spans[work.kind == kind] for kind in (_COMPUTATION, _COMMUNICATION, _MEMORY))
    begins = of_main = spans_of()
    if trace.steps and len(work):
        streams, of = np.unique(np.stack([work.device, work.stream]), axis=1, return_inverse=True)
        computed = np.where(work.kind == _COMPUTATION, work.end - work.start, 0)
        main = np.bincount(of.ravel(), computed, streams.shape[1]).argmax()
        known = (work.launched != NONE) & (work.kind != _MEMORY)
        spans_of_launches = np.stack([work.launched, work.start], axis=1)
        begins, of_main = spans_of_launches[known], spans_of_launches[known & (of.ravel() == main)]
    trace.notes += unknown_kernels(_computing(work, names))
    communication = np.concatenate([communication, copies])
    trace.busy.add("device", epoch, computation, communication, memory, trace.steps, begins, of_main)


def _computing(work: DeviceWork, names: dict[int, str]) -> list[KernelsOfName]:
    """Return the kernels that count as computation, by name."""
    computes = work.take(work.kind == _COMPUTATION)
    numbers, of, count = np.unique(computes.name, return_inverse=True, return_counts=True)
    ns = np.bincount(of.ravel(), computes.end - computes.start, len(numbers))
    rows = zip(numbers.tolist(), count.tolist(), ns.tolist(), strict=True)
    return [KernelsOfName(names[number], many, int(took)) for number, many, took in rows if number in names]
