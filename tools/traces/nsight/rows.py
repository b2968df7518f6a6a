"""The calls that the markers of a process stand for, as rows of a `RankTrace` that have no times yet.

A comms file of the same run knows all of a call, found by the id in the marker. Without one the markers say what is
the same at each call, and the calls of a group are numbered in their order.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields

import msgspec
import numpy as np

from crossrank.comm import CommRecord, is_p2p
from crossrank.recording import CommsFile
from crossrank.tools.traces.nsight.export import NONE, Column, at, lookup
from crossrank.tools.traces.nsight.kernel_launches import Activities, innermost
from crossrank.tools.traces.nsight.markers import BATCH, Ranges
from crossrank.tools.traces.rank_trace import Calls, RankTrace, TraceBuilder, launch_of

FILTERED = -2
"""In the place of a row: the launch of calls that were not emitted (TRACING=CROSSNODE)."""
SIZELESS = "markers without sizes, of a process with more than 4096 distinct calls: their bytes are not known"
LEFT_OUT = "markers without the splits or shapes of their call, which were too long: it counts as an even one"


def rows_of_comms(path: str, calls: Ranges, builder: TraceBuilder, epoch: int) -> Column | None:
    """Rows of the records of a comms file that the markers name, a launch in one row; returns the row of each range,
    `NONE` for an id that the file does not have. None where it has none of them or they are other calls: it is of
    another run."""
    trace = builder.trace
    wanted = set(calls.id.tolist())
    marked = dict(zip(calls.id.tolist()[::-1], calls.meaning.tolist()[::-1], strict=True))
    called = dict(zip(calls.id.tolist()[::-1], calls.start.tolist()[::-1], strict=True))
    launches: dict[int, list[CommRecord]] = {}
    compared = unlike = 0
    file = CommsFile(path)
    for record in file.records():
        meaning = marked.get(record.id)
        if meaning is not None and (one := calls.meanings[meaning].record) is not None and one.op != "coalesced":
            compared += 1
            unlike += (record.op, record.pg) != (one.op, one.pg) or 0 < one.bytes != record.bytes
        if record.id in wanted or (record.batch is not None and record.batch in wanted):
            launches.setdefault(record.id if record.batch is None else record.batch, []).append(record)
    if unlike > _OTHER_RUN * compared or not launches:
        return None
    for group in file.groups:
        builder.define(group, anew=True)
    trace.numbered = trace.numbered_pairs = True
    header = file.header
    if header is not None:
        trace.world_size, trace.node = header.world_size, header.node
        wall = header.clock.get("wall", 0) - header.clock.get("t", 0)
        trace.steps = [(line["step"], line["t"] + wall) for line in file.steps if "step" in line and "t" in line]
    ids: list[int] = []
    rows: list[int] = []
    for identity, records in sorted(launches.items()):
        named = [identity, *(record.id for record in records if record.id != identity)]
        moments = [called[name] for name in named if name in called]
        launch = msgspec.structs.replace(launch_of(records), id=identity, batch=None)
        row = builder.add(launch, called=min(moments) + epoch if moments else 0)
        ids += named
        rows += [row] * len(named)
    order = np.argsort(np.array(ids), kind="stable")
    return at(np.array(rows, np.int64)[order], lookup(np.array(ids, np.int64)[order], calls.id))


_OTHER_RUN = 0.01
"""Share of markers that may say something else than the record of their id."""


def rows_of_markers(calls: Ranges, kernels: Activities, builder: TraceBuilder, epoch: int) -> Column:
    """Rows of all calls by what their markers say; returns the row of each range."""
    trace = builder.trace
    if not len(calls):
        return np.empty(0, np.int64)
    batch_of, batches = _batches(calls, kernels, builder)
    single = np.flatnonzero(batch_of == NONE)
    filtered = batch_of == FILTERED
    used, inverse, counts = np.unique(calls.meaning[single], return_inverse=True, return_counts=True)
    marked = [calls.meanings[index] for index in used.tolist()]
    launches: list[CommRecord] = []
    for one, count in zip(marked, counts.tolist(), strict=True):
        if one.record is not None:
            launches.append(one.record)
        if one.sizeless:
            trace.unattributed[SIZELESS] += count
        elif one.left_out:
            trace.unattributed[LEFT_OUT] += count
    kinds = np.array([builder.signatures.of(one) for one in launches], np.int64)
    # First all single calls, then the batches; then in the order in which they were made.
    kind = np.concatenate([kinds[inverse], np.array([batch[0] for batch in batches], np.int64)])
    start = np.concatenate([calls.start[single], np.array([batch[1] for batch in batches], np.int64)])
    ids = np.concatenate([calls.id[single], np.array([batch[2] for batch in batches], np.int64)])
    order = np.argsort(start, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    group_of = np.array([builder.group(one.pg) for one in builder.signatures.rows], np.int64)
    _fill(trace, kind[order], group_of[kind[order]], np.where(ids == NONE, place, ids)[order], start[order] + epoch)
    result = np.empty(len(calls), np.int64)
    result[single] = place[: len(single)]
    result[filtered] = FILTERED
    grouped = np.flatnonzero(batch_of >= 0)
    result[grouped] = place[len(single) + batch_of[grouped]]
    return result


def _fill(trace: RankTrace, signature: Column, group: Column, ids: Column, called: Column) -> None:
    count = len(signature)
    columns = {"signature": signature, "group": group, "id": ids, "called": called, "batch": np.full(count, -1)}
    for one in fields(Calls):
        column = getattr(trace.calls, one.name)
        values = columns.get(one.name, np.zeros(count, np.int64))
        column.frombytes(values.astype(np.dtype(column.typecode)).tobytes())


def _batches(calls: Ranges, kernels: Activities, builder: TraceBuilder) -> tuple[Column, list[tuple[int, int, int]]]:
    """(number of the batch that each range belongs to, [(kind, start, id)]).

    The launch of a batch has a range of its own, with the id of the first member: the calls of its thread and group
    since then that launched nothing are its members. The older shim marks calls alone: sends and receives that
    launched nothing belong to the next one that did.
    """
    batch_of = np.full(len(calls), NONE, np.int64)
    batches: list[tuple[int, int, int]] = []
    what = np.array([meaning.what for meaning in calls.meanings])[calls.meaning]
    old_p2p = [meaning.old and meaning.record is not None and is_p2p(meaning.record) for meaning in calls.meanings]
    if not (what == BATCH).any() and not any(old_p2p):
        return batch_of, batches
    launched = np.zeros(len(calls), bool)
    inside = innermost(calls, kernels.thread, kernels.launched)
    launched[inside[inside != NONE]] = True
    waiting: dict[tuple[int, str], list[int]] = defaultdict(list)
    for index in range(len(calls)):
        meaning = calls.meanings[int(calls.meaning[index])]
        record = meaning.record
        if record is None:
            continue
        old = old_p2p[int(calls.meaning[index])]
        lane = int(calls.thread[index]), "" if old else record.pg
        if what[index] != BATCH and not (old and launched[index]):
            if not launched[index] and (old or not meaning.old):
                waiting[lane].append(index)
            continue
        members = waiting.pop(lane, [])
        identity = int(calls.id[index])
        if not old:
            members = _of_batch(calls, members, identity)
            if not members:  # of calls that were not emitted
                batch_of[index] = FILTERED
                continue
        else:
            members = [*members, index]
            if len(members) == 1:
                continue
        records = [one for i in members if (one := calls.meanings[int(calls.meaning[i])].record) is not None]
        for member in (*members, index):
            batch_of[member] = len(batches)
        batches.append((builder.signatures.of(launch_of(records)), int(calls.start[members[0]]), identity))
    return batch_of, batches


def _of_batch(calls: Ranges, waiting: list[int], identity: int) -> list[int]:
    """Those of the calls that launched nothing that belong to the batch whose first call has that id."""
    if identity != NONE:
        return [index for index in waiting if calls.id[index] >= identity]
    # Without ids: the last ones, as far as they are of one operation or all sends and receives.
    found: list[int] = []
    for index in reversed(waiting):
        record = calls.meanings[int(calls.meaning[index])].record
        other = calls.meanings[int(calls.meaning[found[0]])].record if found else record
        if record is None or other is None or (record.op != other.op and not (is_p2p(record) and is_p2p(other))):
            break
        found.insert(0, index)
    return found
