"""Makes rows of a `RankTrace`, still without times, from the markers of a process.

A comms file of the same run has the whole call, under the id in the marker. Without one, the markers only have what
equal calls share, and the calls of a group are numbered in their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby

import msgspec
import numpy as np

from crossrank.comm import CommRecord, is_p2p
from crossrank.recording import CommsFile
from crossrank.tools.traces.nsight.export import NONE, Column, at
from crossrank.tools.traces.nsight.kernel_launches import Activities, innermost
from crossrank.tools.traces.nsight.markers import BATCH, CALL, Ranges
from crossrank.tools.traces.rank_trace import COMPLETED, TraceBuilder, launch_of

FILTERED = -2
"""In the place of a row: a launch whose calls have no markers (TRACING=CROSSNODE)."""
SIZELESS = "markers without sizes, of a process with more than 4096 distinct calls: their bytes are unknown"
LEFT_OUT = "markers without the splits or shapes of their call, which were too long: the call counts as even"
_OTHER_RUN = 0.01
"""Maximum share of markers that differ from the record with their id."""


def rows_of_comms(path: str, calls: Ranges, builder: TraceBuilder, epoch: int) -> Column | None:
    """Add a row for each launch of a comms file that has a marker. Return the row of each range, `NONE` for an id that
    the file lacks. Return None if the file is of another run: it has none of the ids, or other calls."""
    trace = builder.trace
    first = {identity: index for index, identity in reversed(list(enumerate(calls.id.tolist())))}
    launches: dict[int, list[CommRecord]] = {}
    compared = unlike = 0
    file = CommsFile(path)
    for record in file.records():
        identity = record.id if record.batch is None else record.batch
        if record.id not in first and identity not in first:
            continue
        launches.setdefault(identity, []).append(record)
        if record.id in first and (meaning := calls.of_range(first[record.id])).what == CALL:
            one = meaning.record
            compared += 1
            unlike += (record.op, record.pg) != (one.op, one.pg) or 0 < one.bytes != record.bytes
    if unlike > _OTHER_RUN * compared or not launches:
        return None
    for group in file.groups:
        builder.define(group, anew=True)
    trace.numbered = trace.numbered_pairs = trace.records_steps = True
    header = file.header
    if header is not None:
        trace.world_size, trace.node = header.world_size, header.node
        wall = header.clock.get("wall", 0) - header.clock.get("t", 0)
        trace.steps = [(line["step"], line["t"] + wall) for line in file.steps if "step" in line and "t" in line]
    row_of: dict[int, int] = {}
    for identity, records in sorted(launches.items()):
        named = {identity, *(record.id for record in records)}
        called = min(int(calls.start[first[name]]) for name in named if name in first)
        launch = msgspec.structs.replace(launch_of(records), id=identity, batch=None)
        row_of |= dict.fromkeys(named, builder.add(launch, called=called + epoch))
    return np.array([row_of.get(identity, NONE) for identity in calls.id.tolist()], np.int64)


def rows_of_markers(calls: Ranges, kernels: Activities, builder: TraceBuilder, epoch: int) -> Column:
    """Add rows for all calls from their markers; return the row of each range."""
    trace, ids = builder.trace, calls.id.copy()
    head = np.arange(len(calls))  # the first of the ranges that share a row
    launches: dict[int, int] = {}  # first call of a batch -> signature of the launch
    for members, closing, identity in _batches(calls, kernels):
        head[[*members, closing]] = members[0] if members else FILTERED
        if members:
            launches[members[0]] = builder.signatures.of(launch_of([calls.of_range(one).record for one in members]))
            ids[members[0]] = identity
    heads = np.flatnonzero(head == np.arange(len(calls)))
    single = heads[~np.isin(heads, list(launches))]
    used, counts = np.unique(calls.meaning[single], return_counts=True)
    signature_of = np.zeros(len(calls.meanings), np.int64)
    for number, count in zip(used.tolist(), counts.tolist(), strict=True):
        meaning = calls.meanings[number]
        signature_of[number] = builder.signatures.of(meaning.record)
        if meaning.sizeless or meaning.left_out:
            trace.unattributed[SIZELESS if meaning.sizeless else LEFT_OUT] += count
    signature = signature_of[calls.meaning]
    signature[list(launches)] = list(launches.values())
    group_of = np.array([builder.group(one.pg) for one in builder.signatures.rows], np.int64)
    row = np.cumsum(head == np.arange(len(calls))) - 1
    columns = {
        "signature": signature[heads],
        "group": group_of[signature[heads]],
        "id": np.where(ids == NONE, row, ids)[heads],
        "called": calls.start[heads] + epoch,
        "batch": np.full(len(heads), -1),
        "state": np.full(len(heads), COMPLETED),
    }
    trace.calls.extend(columns)
    return np.where(head == FILTERED, FILTERED, at(row, head))


def _batches(calls: Ranges, kernels: Activities) -> Iterator[tuple[list[int], int, int]]:
    """Yield (calls, range that launched them, id) of every batch; without calls if these have no markers.

    The launch of a batch has its own range, with the id of the first member. Its members are the calls from that one
    on, of its thread and group, that launched nothing. The older shim marks only calls: sends and receives that
    launched nothing belong to the next one that did.
    """
    if not any(one.what == BATCH or (one.old and is_p2p(one.record)) for one in calls.meanings):
        return
    launched = set(innermost(calls, kernels.thread, kernels.launched).tolist())
    waiting: dict[tuple[int, str], list[int]] = defaultdict(list)
    for index, (thread, identity) in enumerate(zip(calls.thread.tolist(), calls.id.tolist(), strict=True)):
        meaning = calls.of_range(index)
        old_p2p = meaning.old and is_p2p(meaning.record)
        place = thread, "" if old_p2p else meaning.record.pg
        if meaning.what == BATCH:
            yield _of_batch(calls, waiting.pop(place, []), identity), index, identity
        elif index not in launched:
            if old_p2p or not meaning.old:
                waiting[place].append(index)
        elif old_p2p and (members := waiting.pop(place, [])):
            yield [*members, index], index, identity


def _of_batch(calls: Ranges, waiting: list[int], identity: int) -> list[int]:
    """The calls among `waiting`, which launched nothing, that belong to the batch whose first call has this id. Without
    ids, the last ones that are of one operation, or all sends and receives."""
    if identity != NONE:
        return [index for index in waiting if calls.id[index] >= identity]
    runs = [list(run) for _, run in groupby(waiting, lambda index: _kind(calls.of_range(index).record))]
    return runs[-1] if runs else []


def _kind(record: CommRecord) -> str:
    return "send/recv" if is_p2p(record) else record.op
