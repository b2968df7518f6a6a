"""When the GPU of each process computed, communicated and copied: all kernels, copies and memsets of an export."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from crossrank.tools.traces.busy import Spans, spans_of
from crossrank.tools.traces.nsight.export import (
    GRAPH_TRACE,
    KERNEL,
    LATEST,
    MEMCPY,
    MEMSET,
    NONE,
    Column,
    Columns,
    Export,
)
from crossrank.tools.traces.nsight.kernel_launches import communication_operations, launches
from crossrank.tools.traces.rank_trace import RankTrace

_COMPUTATION, _COMMUNICATION, _MEMORY = range(3)


@dataclass
class DeviceWork(Columns):
    """Kernels, copies and memsets of all processes."""

    process: Column
    """globalPid >> 24."""
    correlation: Column
    device: Column
    stream: Column
    kind: Column


def device_work(export: Export) -> DeviceWork | None:
    """What ran on GPUs. None if kernels that communicate cannot be separated from those that compute: there are no
    kernels, they have no names, or CUDA graphs were traced whole."""
    name, operations = communication_operations(export)
    if name is None or len(export.all(GRAPH_TRACE, ("start",))[0]):
        return None
    columns = ("start", "end", "globalPid", "correlationId", "deviceId", "streamId")
    kernels = export.all(KERNEL, (*columns, name))
    parts = [[*kernels[:6], np.where(np.isin(kernels[6], list(operations)), _COMMUNICATION, _COMPUTATION)]]
    for table in (MEMCPY, MEMSET):
        rows = export.all(table, columns)
        parts.append([*rows, np.full(len(rows[0]), _MEMORY)])
    start, end, pid, *others = (np.concatenate(column) for column in zip(*parts, strict=True))
    work = DeviceWork(start, end, np.where(pid == NONE, NONE, pid >> 24), *others)
    return work.take((start >= 0) & (end > start) & (end < LATEST))


def take_device_work(export: Export, trace: RankTrace, work: DeviceWork, copies: Spans, epoch: int) -> None:
    """Add when a rank's GPU was busy, for the steps that `trace` already has. `work` is that of its process. `copies`
    were launched by its calls, and are communication."""
    spans = np.stack([work.start, work.end], axis=1)
    computation, communication, memory = (spans[work.kind == kind] for kind in (_COMPUTATION, _COMMUNICATION, _MEMORY))
    begins = of_main = spans_of()
    if trace.steps and len(work):
        _, launched = launches(export, work.process, work.correlation)
        streams, of = np.unique(np.stack([work.device, work.stream]), axis=1, return_inverse=True)
        computed = np.where(work.kind == _COMPUTATION, work.end - work.start, 0)
        main = np.bincount(of.ravel(), computed, streams.shape[1]).argmax()
        known = (launched != NONE) & (work.kind != _MEMORY)
        spans_of_launches = np.stack([launched, work.start], axis=1)
        begins, of_main = spans_of_launches[known], spans_of_launches[known & (of.ravel() == main)]
    communication = np.concatenate([communication, copies])
    trace.busy.add("device", epoch, computation, communication, memory, trace.steps, begins, of_main)
