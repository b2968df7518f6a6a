"""Makes the tracks of a timeline from the times of all ranks, rank by rank, so that a large job streams through.

A rank has a track of its calls (when the host made them), one of its communication on the device, and its steps; where
calls overlap on the device there is a track for each that runs at a time. Arrows go from the first to the last
arriver of a collective. The job has counters over all ranks: bytes in flight, and bus bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from crossrank.errors import CrossrankError
from crossrank.text import amount, printable
from crossrank.tools.job.collectives import Collectives
from crossrank.tools.job.launches import Bools, CallKind
from crossrank.tools.output.timeline.perfetto import PerfettoWriter
from crossrank.tools.output.timeline.tracks import (
    FIRST,
    LAST,
    MIDDLE,
    Counter,
    Events,
    Floats,
    Ints,
    Track,
    lanes,
)
from crossrank.tools.traces.rank_trace import RankTrace

Flows = Literal["first-last", "all", "none"]

_MOST = np.iinfo(np.int64).max


class Written(msgspec.Struct, kw_only=True):
    """What a timeline holds."""

    ranks: int
    calls: int
    """Calls at the moment that the host made them."""
    activities: int
    """Communication on devices, with begin and end."""
    arrows: int
    """Collectives whose first and last arriver are connected."""
    steps: int
    counters: list[str]
    duration_ms: float
    epoch_ns: int
    """ns since 1970 at time 0; 0 where the files know no wall clock."""


@dataclass
class _Tracks:
    """Numbers tracks as they are made."""

    writer: PerfettoWriter
    count: int = 0

    def add(self, name: str, parent: Track | None = None, unit: str | None = None) -> Track:
        self.count += 1
        track = Track(id=self.count, name=name, parent=parent.id if parent else 0, unit=unit)
        self.writer.track(track)
        return track


def write_timeline(
    ranks: Sequence[RankTrace], found: Collectives, path: Path, *, flows: Flows = "first-last"
) -> Written:
    """Write all ranks to `path`. Raises `CrossrankError` where no call has a time."""
    moments = [column[column > 0] for column in (found.called, found.began)]
    begins = [int(column.min()) for column in moments if len(column)]
    if not begins:
        raise CrossrankError(
            f"{ranks[0].path}: no communication with a time is in it, so there is nothing to lay on a timeline"
        )
    zero = min(begins)
    labels = [_label(found, kind) for kind in found.kinds] or [""]
    placed = {one.rank or 0: one.placed for one in ranks}
    on_device = np.array([placed[rank] for rank in found.ranks])[np.searchsorted(found.ranks, found.rank)]
    on_device &= found.ended > 0
    flow, flow_end = _flows(found, flows, on_device)
    width = len(str(max(found.ranks)))
    written = Written(
        ranks=len(found.ranks),
        calls=0,
        activities=0,
        arrows=len(np.unique(flow[flow > 0])),
        steps=0,
        counters=[],
        duration_ms=(int(max(found.called.max(), found.ended.max())) - zero) / 1e6,
        epoch_ns=zero,
    )
    with PerfettoWriter(path, zero) as writer:
        tracks = _Tracks(writer)
        for counter in _counters(found, zero, tracks, on_device):
            written.counters.append(counter.track.name)
            writer.counter(counter)
        order = np.lexsort((found.called, found.rank))
        edges = np.searchsorted(found.rank[order], [*found.ranks, _MOST])
        by_rank = {one.rank: one for one in ranks}
        for place, rank in enumerate(found.ranks):
            rows = order[edges[place] : edges[place + 1]]
            one = by_rank[rank]
            parent = tracks.add(f"rank {rank:0{width}d}{f' ({printable(one.node[:16])})' if one.node else ''}")
            for events in _of_rank(found, one, rows, zero, labels, flow, flow_end, on_device, tracks, parent):
                if events.track.name == "steps":
                    written.steps += len(events.start)
                elif events.end is None:
                    written.calls += len(events.start)
                else:
                    written.activities += len(events.start)
                writer.events(events)
    return written


def _label(found: Collectives, kind: CallKind) -> str:
    group = found.groups[kind.group]
    name = f"{group.name} {group.desc}".strip() or "unknown group"
    return printable(f"{kind.label} {amount(kind.bytes, unknown=not kind.sized)} · {name}")


def _of_rank(
    found: Collectives,
    one: RankTrace,
    rows: Ints,
    zero: int,
    labels: Sequence[str],
    flow: Ints,
    flow_end: Ints,
    on_device: Bools,
    tracks: _Tracks,
    parent: Track,
) -> Iterator[Events]:
    if one.steps:
        yield _steps(one, found, rows, zero, tracks.add("steps", parent))
    called = rows[found.called[rows] > 0]
    placed = rows[on_device[rows]]
    if len(called):
        yield Events(
            track=tracks.add("calls", parent),
            names=labels,
            name=found.kind[called],
            start=np.maximum(found.called[called] - zero, 0),
            end=None,
            arguments={"number": found.number[called].clip(0), "id": found.id[called].clip(0)},
            # Where the times of the device are known the arrows stand there.
            flow=np.where(on_device[called], 0, flow[called]),
            flow_end=flow_end[called],
        )
    placed = placed[np.argsort(found.began[placed], kind="stable")]
    lane = lanes(found.began[placed], found.ended[placed])
    for number in range(int(lane.max(initial=-1)) + 1):
        mine = placed[lane == number]
        yield Events(
            track=tracks.add("device" if number == 0 else f"device {number + 1}", parent),
            names=labels,
            name=found.kind[mine],
            start=np.maximum(found.began[mine] - zero, 0),
            end=np.maximum(found.ended[mine] - zero, 0),
            arguments={"number": found.number[mine].clip(0)},
            flow=flow[mine],
            flow_end=flow_end[mine],
        )


def _steps(one: RankTrace, found: Collectives, rows: Ints, zero: int, track: Track) -> Events:
    """Iterations; those before the first moment of the timeline begin with it."""
    last = int(max(found.called[rows].max(initial=zero), found.ended[rows].max(initial=zero)))
    shift = found.shift.get(one.rank or 0, 0)
    begins = [max(moment + shift, zero) for _, moment in one.steps]
    ends = [*begins[1:], max(last, begins[-1])]
    names = [f"step {number}" for number, _ in one.steps]
    # The first line of a recording is step 1: what came before it was step 0.
    if begins[0] > zero:
        names.insert(0, f"step {one.steps[0][0] - 1}")
        ends.insert(0, begins[0])
        begins.insert(0, zero)
    return Events(
        track=track,
        names=names,
        name=np.arange(len(names)),
        start=np.array(begins, np.int64) - zero,
        end=np.array(ends, np.int64) - zero,
    )


def _flows(found: Collectives, flows: Flows, on_device: Bools) -> tuple[Ints, Ints]:
    """(flow of each call, which end of it the call is): one flow for each collective of several ranks."""
    flow = np.zeros(len(found.rank), np.int64)
    flow_end = np.full(len(found.rank), MIDDLE, np.int64)
    count = len(found.of_kind)
    members = np.bincount(found.collective, minlength=count)
    arrival = np.where(on_device, found.began, found.called)
    # Between clocks that were not brought together an arrow would say nothing.
    one_clock = found.comparable | (found.clocks.count == 1)
    rows = np.flatnonzero((members[found.collective] > 1) & (arrival > 0) & one_clock)
    if flows == "none" or not len(rows):
        return flow, flow_end
    order = rows[np.lexsort((found.rank[rows], arrival[rows], found.collective[rows]))]
    collective = found.collective[order]
    first = np.concatenate(([True], collective[1:] != collective[:-1]))
    last = np.concatenate((collective[1:] != collective[:-1], [True]))
    flow_end[order[last]] = LAST
    flow_end[order[first]] = FIRST
    # Of a collective of which only one member can be placed there is nothing to connect.
    chosen = order[~(first & last)] if flows == "all" else order[first ^ last]
    flow[chosen] = found.collective[chosen] + 1
    return flow, flow_end


def _counters(found: Collectives, zero: int, tracks: _Tracks, on_device: Bools) -> Iterator[Counter]:
    """Sums over the collectives under way, as far as it is known when they were."""
    timed = np.flatnonzero(on_device & found.comparable & (found.began >= zero) & (found.time[found.collective] >= 0))
    if not len(timed):
        return
    count = len(found.of_kind)
    first, last_begin, last_end = np.full(count, _MOST), np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.minimum.at(first, found.collective[timed], found.began[timed])
    np.maximum.at(last_begin, found.collective[timed], found.began[timed])
    np.maximum.at(last_end, found.collective[timed], found.ended[timed])
    known = np.flatnonzero(last_end > 0)
    job = tracks.add("job")
    at, value = _sum_over_time(first[known] - zero, last_end[known] - zero, found.bytes[known].astype(np.float64))
    yield Counter(tracks.add("bytes in flight", job, "B"), at, value)
    rate = found.busbw()
    rated = known[~np.isnan(rate[known])]
    if len(rated):
        at, value = _sum_over_time(last_begin[rated] - zero, last_end[rated] - zero, rate[rated])
        yield Counter(tracks.add("busbw", job, "GB/s"), at, value)


def _sum_over_time(begin: Ints, end: Ints, value: Floats) -> tuple[Ints, Floats]:
    """When the sum of the values between their begins and ends changes, and what it is then."""
    moments = np.concatenate([begin, end])
    changes = np.concatenate([value, -value])
    at, inverse = np.unique(moments, return_inverse=True)
    sums = np.cumsum(np.bincount(inverse, weights=changes, minlength=len(at)))
    # What rounding leaves when all has ended is no traffic.
    under_way = np.cumsum(np.bincount(inverse, weights=np.repeat([1, -1], len(begin)), minlength=len(at)))
    return at, np.where(under_way > 0, np.maximum(sums, 0), 0.0)
