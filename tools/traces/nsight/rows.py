"""The calls that the markers of a process stand for, as rows of a `RankTimes` that have no times yet.

A comms file of the same run knows all of a call, found by the id in the marker. Without one the markers say what is
the same at each call, and the calls of a group are numbered in their order.
"""

from __future__ import annotations

from array import array
from collections import defaultdict

import numpy as np

from crossrank.comm import CommRecord, is_p2p
from crossrank.recording import CommsFile
from crossrank.tools.job.rank_times import SEND_RECV, GroupKey, RankTimes, TimesBuilder
from crossrank.tools.traces.nsight.database import NONE, Column
from crossrank.tools.traces.nsight.launches import Activities, innermost
from crossrank.tools.traces.nsight.markers import BATCH, Ranges

FILTERED = -2
"""In the place of a row: the launch of calls that were not emitted (TRACING=CROSSNODE)."""
SIZELESS = "markers without sizes, of a process with more than 4096 distinct calls: their bytes are not known"
LEFT_OUT = "markers without the splits or shapes of their call, which were too long: it counts as an even one"


def rows_of_comms(path: str, calls: Ranges, builder: TimesBuilder, epoch: int) -> Column | None:
    """Rows of the records of a comms file that the markers name; returns the row of each range, `NONE` for an id that
    the file does not have. None where it has none of them or they are other calls: it is of another run."""
    times = builder.times
    wanted = set(calls.id.tolist())
    said = dict(zip(calls.id.tolist()[::-1], calls.meaning.tolist()[::-1], strict=True))
    batches: dict[int, list[CommRecord]] = defaultdict(list)
    entries: list[tuple[int, tuple[int, ...], int, int, int]] = []
    compared = unlike = 0
    file = CommsFile(path)
    for record in file.records():
        meaning = said.get(record.id)
        if meaning is not None and (marked := calls.meanings[meaning].record) is not None and marked.op != "coalesced":
            compared += 1
            unlike += (record.op, record.pg) != (marked.op, marked.pg) or 0 < marked.bytes != record.bytes
        if record.batch is not None and (record.batch in wanted or record.id in wanted):
            batches[record.batch].append(record)
        elif record.id in wanted:
            number = record.p2p_seq if is_p2p(record) else record.seq
            _define(builder, file)
            kind = builder.kind(builder.take([record]))
            entries.append((record.id, (record.id,), kind, number or 0, record.step))
    if unlike > _OTHER_RUN * compared:
        _forget(builder)
        return None
    _define(builder, file)
    for batch, records in batches.items():
        kind = builder.kind(builder.take(records))
        first = records[0]
        number = first.id if times.kinds[kind].op == SEND_RECV else (first.p2p_seq if is_p2p(first) else first.seq) or 0
        named = (batch, *(record.id for record in records if record.id != batch))
        entries.append((batch, named, kind, number, first.step))
    if not entries:
        return None
    times.numbered = times.p2p_numbered = True
    header = file.header
    if header is not None:
        times.world_size, times.node = header.world_size, header.node
        wall = header.clock.get("wall", 0) - header.clock.get("t", 0)
        times.steps = [(line["step"], line["t"] + wall) for line in file.steps if "step" in line and "t" in line]
    entries.sort()
    called = dict(zip(calls.id.tolist()[::-1], calls.start.tolist()[::-1], strict=True))
    ids: list[int] = []
    rows: list[int] = []
    for row, (identity, named, kind, number, step) in enumerate(entries):
        moments = [called[name] for name in named if name in called]
        builder.add(kind, id=identity, number=number, step=step, called=min(moments) + epoch if moments else 0)
        ids += named
        rows += [row] * len(named)
    order = np.argsort(np.array(ids), kind="stable")
    ordered, row_of_id = np.array(ids, np.int64)[order], np.array(rows, np.int64)[order]
    at = np.minimum(np.searchsorted(ordered, calls.id), len(ordered) - 1)
    return np.where(ordered[at] == calls.id, row_of_id[at], NONE)


_OTHER_RUN = 0.01
"""Share of markers that may say something else than the record of their id."""


def _forget(builder: TimesBuilder) -> None:
    """Take back what was made of a file that is of another run."""
    builder.times.kinds.clear()
    builder.times.sent.clear()
    builder.kinds.clear()


def _define(builder: TimesBuilder, file: CommsFile) -> None:
    """Give the groups that the file has told so far their members."""
    groups = builder.times.groups
    for group in file.groups[builder.defined :]:
        key = GroupKey.of(group)
        index = builder.group_of(key)
        if groups[index].ranks is None:
            groups[index] = key
    builder.defined = len(file.groups)


def rows_of_markers(calls: Ranges, kernels: Activities, builder: TimesBuilder, epoch: int) -> Column:
    """Rows of all calls by what their markers say; returns the row of each range."""
    times = builder.times
    if not len(calls):
        return np.empty(0, np.int64)
    batch_of, batches = _batches(calls, kernels, builder)
    single = np.flatnonzero(batch_of == NONE)
    filtered = batch_of == FILTERED
    used, inverse, counts = np.unique(calls.meaning[single], return_inverse=True, return_counts=True)
    marked = [calls.meanings[index] for index in used.tolist()]
    kind_of_meaning = []
    for one, count in zip(marked, counts.tolist(), strict=True):
        if one.record is not None:
            kind_of_meaning.append(builder.kind(builder.take([one.record], count)))
        if one.sizeless:
            times.unattributed[SIZELESS] += count
        elif one.left_out:
            times.unattributed[LEFT_OUT] += count
    kinds = np.array(kind_of_meaning, np.int64)
    # First all single calls, then the batches; then in the order in which they were made.
    kind = np.concatenate([kinds[inverse], np.array([batch[0] for batch in batches], np.int64)])
    start = np.concatenate([calls.start[single], np.array([batch[1] for batch in batches], np.int64)])
    ids = np.concatenate([calls.id[single], np.array([batch[2] for batch in batches], np.int64)])
    order = np.argsort(start, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    lanes: dict[object, int] = {}
    lane_of = np.array(
        [lanes.setdefault((one.group, one.ends, one.op == SEND_RECV), len(lanes)) for one in times.kinds], np.int64
    )
    _fill(
        times,
        kind[order],
        np.where(ids == NONE, place, ids)[order],
        _counted(lane_of[kind[order]]),
        start[order] + epoch,
    )
    result = np.empty(len(calls), np.int64)
    result[single] = place[: len(single)]
    result[filtered] = FILTERED
    grouped = np.flatnonzero(batch_of >= 0)
    result[grouped] = place[len(single) + batch_of[grouped]]
    return result


def _fill(times: RankTimes, kind: Column, ids: Column, number: Column, called: Column) -> None:
    times.kind = array("I", kind.astype(np.uint32).tobytes())
    times.id = array("q", ids.tobytes())
    times.number = array("q", number.tobytes())
    times.step = array("i", bytes(4 * len(kind)))
    times.called = array("q", called.tobytes())
    times.began = array("q", bytes(8 * len(kind)))
    times.ended = array("q", bytes(8 * len(kind)))


def _batches(calls: Ranges, kernels: Activities, builder: TimesBuilder) -> tuple[Column, list[tuple[int, int, int]]]:
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
    at = innermost(calls, kernels.thread, kernels.launched)
    launched[at[at != NONE]] = True
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
        batches.append((builder.kind(builder.take(records)), int(calls.start[members[0]]), identity))
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


def _counted(lanes: Column) -> Column:
    """How often the lane of each row stood until there, itself included."""
    order = np.argsort(lanes, kind="stable")
    ordered = lanes[order]
    first = np.concatenate(([True], ordered[1:] != ordered[:-1])) if len(ordered) else np.empty(0, bool)
    begins = np.maximum.accumulate(np.where(first, np.arange(len(ordered)), 0))
    number = np.empty(len(lanes), np.int64)
    number[order] = np.arange(len(ordered)) - begins + 1
    return number
