"""All ranks on one timeline, rank by rank, so that a large job streams through.

A rank has a track of its calls (when the host made them), one of its communication on the device, and its steps; where
calls overlap on the device there is a track for each that runs at a time. Arrows go from the first to the last
arriver of a collective. The job has counters over all ranks: bytes in flight, and bus bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Literal

import msgspec
import numpy as np

from crossrank.errors import CrossrankError
from crossrank.text import amount, printable
from crossrank.tools.job.collectives import Collectives
from crossrank.tools.job.launches import Bools, CallKind
from crossrank.tools.output.timeline.perfetto import Events, Floats, Ints, PerfettoWriter
from crossrank.tools.traces.rank_trace import RankTrace

Flows = Literal["first-last", "all", "none"]

_MOST = np.iinfo(np.int64).max


class Written(msgspec.Struct, kw_only=True):
    """What a timeline holds."""

    ranks: int
    calls: int
    """Calls at the moment that the host made them; a batch is one."""
    activities: int
    """Communication on devices, with begin and end."""
    arrows: int
    """Collectives whose first and last arriver are connected."""
    steps: int
    """Those of every rank of which the begin is known."""
    counters: list[str]
    duration_ms: float
    epoch_ns: int
    """ns since 1970 at time 0; 0 where the files know no wall clock."""


@dataclass(frozen=True)
class _Shown:
    """The calls of all ranks as they are shown."""

    found: Collectives
    zero: int
    """Time 0, in ns since 1970."""
    labels: Sequence[str]
    """Of the kinds of calls."""
    on_device: Bools
    flow: Ints


def write_timeline(
    ranks: Sequence[RankTrace], found: Collectives, file: BinaryIO, *, flows: Flows = "first-last"
) -> Written:
    """Write all ranks to `file`. Raises `CrossrankError` where no call has a time."""
    moments = [column[column > 0] for column in (found.called, found.began)]
    begins = [int(column.min()) for column in moments if len(column)]
    if not begins:
        raise CrossrankError(
            f"{ranks[0].path}: no communication with a time is in it, so there is nothing to lay on a timeline"
        )
    zero = min(begins)
    on_device = found.placed & (found.ended > 0)
    flow = _flows(found, flows, on_device)
    shown = _Shown(found, zero, [_label(found, kind) for kind in found.kinds] or [""], on_device, flow)
    written = Written(
        ranks=len(found.ranks),
        calls=int((found.called > 0).sum()),
        activities=int(on_device.sum()),
        arrows=len(np.unique(flow[flow > 0])),
        steps=sum(len(one.steps) for one in ranks),
        counters=[],
        duration_ms=(int(max(found.called.max(), found.ended.max())) - zero) / 1e6,
        epoch_ns=zero,
    )
    order = np.lexsort((found.called, found.rank))
    rows_of = np.split(order, np.searchsorted(found.rank[order], found.ranks[1:]))
    by_rank = {one.rank: one for one in ranks}
    width = len(str(max(found.ranks)))
    writer = PerfettoWriter(file, zero)
    job = 0
    for name, unit, at, value in _counters(shown):
        job = job or writer.track("job")
        written.counters.append(name)
        writer.counter(writer.track(name, job, unit), at, value)
    for rank, rows in zip(found.ranks, rows_of, strict=True):
        one = by_rank[rank]
        parent = writer.track(f"rank {rank:0{width}d}{f' ({printable(one.node[:16])})' if one.node else ''}")
        for name, events in _of_rank(shown, one, rows):
            writer.events(writer.track(name, parent), events)
    return written


def _label(found: Collectives, kind: CallKind) -> str:
    group = found.groups[kind.group]
    name = f"{group.name} {group.desc}".strip() or "unknown group"
    return printable(f"{kind.label} {amount(kind.bytes, unknown=not kind.sized)} · {name}")


def _of_rank(shown: _Shown, one: RankTrace, rows: Ints) -> Iterator[tuple[str, Events]]:
    """The tracks of a rank, whose calls are `rows`, by name."""
    found, zero = shown.found, shown.zero
    if one.steps:
        yield "steps", _steps(shown, one, rows)
    called = rows[found.called[rows] > 0]
    if len(called):
        yield (
            "calls",
            Events(
                names=shown.labels,
                name=found.kind[called],
                start=np.maximum(found.called[called] - zero, 0),
                arguments={"number": found.number[called].clip(0), "id": found.id[called].clip(0)},
                # Where the times of the device are known the arrows stand there.
                flow=np.where(shown.on_device[called], 0, shown.flow[called]),
            ),
        )
    placed = rows[shown.on_device[rows]]
    placed = placed[np.argsort(found.began[placed], kind="stable")]
    slot = slots(found.began[placed], found.ended[placed])
    for index in range(int(slot.max(initial=-1)) + 1):
        mine = placed[slot == index]
        yield (
            "device" if index == 0 else f"device {index + 1}",
            Events(
                names=shown.labels,
                name=found.kind[mine],
                start=np.maximum(found.began[mine] - zero, 0),
                end=np.maximum(found.ended[mine] - zero, 0),
                arguments={"number": found.number[mine].clip(0)},
                flow=shown.flow[mine],
            ),
        )


def slots(start: Ints, end: Ints) -> Ints:
    """A slot for each event, in the order of starts, so that none overlaps another of its slot; as few as it takes.

    >>> slots(np.array([0, 1, 5]), np.array([4, 9, 6])).tolist()
    [0, 1, 0]
    """
    slot = np.zeros(len(start), np.int64)
    if not len(start) or (start[1:] >= np.maximum.accumulate(end)[:-1]).all():
        return slot
    free: list[int] = []
    for index, (begin, stop) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        number = next((number for number, until in enumerate(free) if until <= begin), len(free))
        free[number : number + 1] = [stop]
        slot[index] = number
    return slot


def _steps(shown: _Shown, one: RankTrace, rows: Ints) -> Events:
    """Iterations; those before the first moment of the timeline begin with it."""
    found, zero = shown.found, shown.zero
    last = int(max(found.called[rows].max(initial=zero), found.ended[rows].max(initial=zero)))
    shift = found.shift.get(one.rank or 0, 0)
    begins = [max(moment + shift, zero) for _, moment in one.steps]
    names = [f"step {number}" for number, _ in one.steps]
    # The first line of a recording is step 1: what came before it was step 0.
    if begins[0] > zero:
        names.insert(0, f"step {one.steps[0][0] - 1}")
        begins.insert(0, zero)
    edges = np.array([*begins, max(last, begins[-1])], np.int64) - zero
    return Events(names=names, name=np.arange(len(names)), start=edges[:-1], end=edges[1:])


def _flows(found: Collectives, flows: Flows, on_device: Bools) -> Ints:
    """The flow of each call, 0 = none: one for each collective of several ranks."""
    flow = np.zeros(len(found.rank), np.int64)
    members = np.bincount(found.collective, minlength=len(found.of_kind))
    arrival = np.where(on_device, found.began, found.called)
    # Between clocks that were not brought together an arrow would say nothing.
    one_clock = found.comparable | (found.clocks.count == 1)
    rows = np.flatnonzero((members[found.collective] > 1) & (arrival > 0) & one_clock)
    if flows == "none" or not len(rows):
        return flow
    order = rows[np.lexsort((found.rank[rows], arrival[rows], found.collective[rows]))]
    changes = np.diff(found.collective[order]) != 0
    first, last = np.concatenate(([True], changes)), np.concatenate((changes, [True]))
    # Of a collective of which only one member can be placed there is nothing to connect.
    chosen = order[~(first & last)] if flows == "all" else order[first ^ last]
    flow[chosen] = found.collective[chosen] + 1
    return flow


def _counters(shown: _Shown) -> Iterator[tuple[str, str, Ints, Floats]]:
    """(name, unit, moments, values): sums over the collectives under way, as far as it is known when they were."""
    found, zero = shown.found, shown.zero
    is_timed = (found.time >= 0)[found.collective]
    timed = np.flatnonzero(shown.on_device & found.comparable & (found.began >= zero) & is_timed)
    if not len(timed):
        return
    count = len(found.of_kind)
    first, last_begin, last_end = np.full(count, _MOST), np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.minimum.at(first, found.collective[timed], found.began[timed])
    np.maximum.at(last_begin, found.collective[timed], found.began[timed])
    np.maximum.at(last_end, found.collective[timed], found.ended[timed])
    known = np.flatnonzero(last_end > 0)
    volume = found.bytes[known].astype(np.float64)
    yield "bytes in flight", "B", *_sum_over_time(first[known] - zero, last_end[known] - zero, volume)
    rate = found.busbw()
    rated = known[~np.isnan(rate[known])]
    if len(rated):
        yield "busbw", "GB/s", *_sum_over_time(last_begin[rated] - zero, last_end[rated] - zero, rate[rated])


def _sum_over_time(begin: Ints, end: Ints, value: Floats) -> tuple[Ints, Floats]:
    """When the sum of the values between their begins and ends changes, and what it is then."""
    moments = np.concatenate([begin, end])
    changes = np.concatenate([value, -value])
    at, inverse = np.unique(moments, return_inverse=True)
    sums = np.cumsum(np.bincount(inverse, weights=changes, minlength=len(at)))
    # What rounding leaves when all has ended is no traffic.
    under_way = np.cumsum(np.bincount(inverse, weights=np.repeat([1, -1], len(begin)), minlength=len(at)))
    return at, np.where(under_way > 0, np.maximum(sums, 0), 0.0)
