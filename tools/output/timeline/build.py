"""Build a timeline of all ranks, one rank after the other, so that a large job does not fill the memory.

A rank has a track of its calls on the host, tracks of its communication on the device, and a track of its steps.
Calls that overlap on the device are on different tracks. Arrows go from the first to the last rank that arrives at a
collective. The job has counters over all ranks: bytes in flight, and bus bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO, Literal

import msgspec
import numpy as np
import polars as pl

from crossrank.errors import CrossrankError
from crossrank.text import amount, printable
from crossrank.tools.job.collectives import JobTables
from crossrank.tools.job.launches import CallKind
from crossrank.tools.output.timeline.perfetto import Events, Floats, Ints, PerfettoWriter

Flows = Literal["first-last", "all", "none"]


class Written(msgspec.Struct, kw_only=True):
    """The contents of a timeline."""

    ranks: int
    calls: int
    """Calls on the host; a batch counts once."""
    activities: int
    """Calls with start and end on the device."""
    arrows: int
    """Collectives with an arrow."""
    steps: int | None
    """Steps with a known start and end, over all ranks; null if no rank has steps."""
    counters: list[str]
    duration_ms: float
    """From the first call to the last."""
    epoch_ns: int
    """ns since 1970 at time 0; 0 without a wall clock."""


def write_timeline(found: JobTables, file: BinaryIO, *, flows: Flows = "first-last") -> Written:
    """Write all ranks to `file`. Raises `CrossrankError` if no call has a time."""
    ranks = found.job.ranks
    zero, last = found.calls.select(
        pl.min_horizontal(pl.min("called_ns"), pl.min("began_ns")),
        pl.max_horizontal(pl.max("called_ns"), pl.max("ended_ns")).alias("last"),
    ).row(0)
    if zero is None:
        path = next(iter(ranks.values())).path
        raise CrossrankError(f"{path}: no communication has a time, so the timeline would be empty")
    begins = [one.steps[0][1] + found.shift.get(rank, 0) for rank, one in ranks.items() if one.steps]
    first, zero = zero, min([zero, *begins])
    calls = _with_flows(found, flows)
    written = Written(
        ranks=len(ranks),
        calls=calls["called_ns"].count(),
        activities=int(calls["on_device"].sum()),
        arrows=calls["flow"].n_unique() - calls["flow"].has_nulls(),
        steps=sum(one.ended_steps for one in ranks.values()) if begins else None,
        counters=[],
        duration_ms=(last - first) / 1e6,
        epoch_ns=zero,
    )
    labels = [_label(found, kind) for kind in found.kinds] or [""]
    by_rank = calls.sort("rank", "called_ns", maintain_order=True).partition_by("rank", as_dict=True)
    width = len(str(max(ranks)))
    writer = PerfettoWriter(file, zero)
    job = 0
    for name, unit, at, value in _counters(found, calls, zero):
        job = job or writer.track("job")
        written.counters.append(name)
        writer.counter(writer.track(name, job, unit), at, value)
    for rank, one in ranks.items():
        parent = writer.track(f"rank {rank:0{width}d}{f' ({printable(one.node[:16])})' if one.node else ''}")
        own = by_rank.get((rank,), calls.clear())
        if one.steps:
            of_rank = [(number, moment + found.shift.get(rank, 0)) for number, moment in one.steps]
            writer.events(writer.track("steps", parent), _steps(of_rank, own, zero, one.records_steps))
        for name, events in _rank_tracks(own, labels, zero):
            writer.events(writer.track(name, parent), events)
    return written


def _label(found: JobTables, kind: CallKind) -> str:
    group = found.job.groups[kind.group]
    name = f"{group.name} {group.desc}".strip() or "unknown group"
    return printable(f"{kind.label} {amount(kind.bytes, unknown=not kind.sized)} · {name}")


def _rank_tracks(calls: pl.DataFrame, labels: Sequence[str], zero: int) -> Iterator[tuple[str, Events]]:
    """Yield (name, events) for the tracks of a rank's calls."""
    called = calls.drop_nulls("called_ns")
    if len(called):
        yield (
            "calls",
            Events(
                names=labels,
                name=_ints(called, "kind"),
                start=_ints(called, "called_ns") - zero,
                arguments={"number": _ints(called, "number"), "id": _ints(called, "id").clip(0)},
                # With times of the device, the arrows are on its track.
                flow=_ints(called.select(pl.when(~pl.col("on_device")).then("flow")), "flow"),
            ),
        )
    placed = calls.filter("on_device").sort("began_ns", maintain_order=True)
    slot = slots(_ints(placed, "began_ns"), _ints(placed, "ended_ns"))
    for index in range(int(slot.max(initial=-1)) + 1):
        own = placed.filter(pl.Series(slot == index))
        yield (
            "device" if index == 0 else f"device {index + 1}",
            Events(
                names=labels,
                name=_ints(own, "kind"),
                start=np.maximum(_ints(own, "began_ns") - zero, 0),
                end=np.maximum(_ints(own, "ended_ns") - zero, 0),
                arguments={"number": _ints(own, "number")},
                flow=_ints(own, "flow"),
            ),
        )


def _ints(frame: pl.DataFrame, column: str) -> Ints:
    """Return a column as an array, 0 for null."""
    values: Ints = frame[column].fill_null(0).cast(pl.Int64).to_numpy()
    return values


def slots(start: Ints, end: Ints) -> Ints:
    """Return a slot per event, so that events of one slot do not overlap. Uses as few slots as possible.

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


def _steps(steps: Sequence[tuple[int, int]], calls: pl.DataFrame, zero: int, has_earlier: bool) -> Events:
    """Return the steps. `has_earlier`: calls before the first one are of the step before it."""
    latest = (calls[name].max() for name in ("called_ns", "ended_ns"))
    last = max([zero, *(moment for moment in latest if moment is not None)])
    begins = [max(moment, zero) for _, moment in steps]
    names = [f"step {number}" for number, _ in steps]
    # The first step line of a recording is step 1: step 0 is before it.
    if has_earlier and begins[0] > zero:
        names.insert(0, f"step {steps[0][0] - 1}")
        begins.insert(0, zero)
    edges = np.array([*begins, max(last, begins[-1])], np.int64) - zero
    return Events(names=names, name=np.arange(len(names)), start=edges[:-1], end=edges[1:])


def _with_flows(found: JobTables, flows: Flows) -> pl.DataFrame:
    """Return the calls with `on_device`, whether their times on the device are known, and `flow`, the number of their
    arrow: one per collective of several ranks."""
    # An arrow between clocks that are not aligned has no meaning.
    one_clock = pl.col("comparable") | pl.lit(value=found.clocks.count == 1)
    on_device = pl.col("placed") & pl.col("ended_ns").is_not_null()
    calls = found.calls.with_row_index("place").with_columns(on_device=on_device)
    arrived = pl.when("on_device").then("began_ns").otherwise("called_ns")
    shown = calls.with_columns(arrived=arrived).filter(one_clock).drop_nulls("arrived")
    shown = shown.sort("collective", "arrived", "rank").with_columns(
        turn=pl.int_range(pl.len()).over("collective"), count=pl.len().over("collective")
    )
    # No arrow if only one member of a collective has a time.
    is_end = (pl.col("turn") == 0) | (pl.col("turn") == pl.col("count") - 1)
    chosen = {"first-last": is_end, "all": pl.lit(value=True), "none": pl.lit(value=False)}[flows]
    shown = shown.filter(chosen & (pl.col("count") > 1)).select("place", flow=pl.col("collective") + 1)
    return calls.join(shown, on="place", how="left", maintain_order="left").drop("place")


def _counters(found: JobTables, calls: pl.DataFrame, zero: int) -> Iterator[tuple[str, str, Ints, Floats]]:
    """Yield (name, unit, times, values): sums over the running collectives with known times."""
    sums = found.collectives.with_row_index("collective").select("collective", "time_ns", "bytes", "busbw_gb_per_s")
    timed = (
        calls.filter(pl.col("on_device") & pl.col("comparable") & (pl.col("began_ns") >= zero))
        .group_by("collective")
        .agg(first=pl.min("began_ns"), last_begin=pl.max("began_ns"), end=pl.max("ended_ns"))
        .join(sums.drop_nulls("time_ns"), on="collective")
        .sort("collective")
    )
    if not len(timed):
        return
    first, end, volume = (_ints(timed, name) for name in ("first", "end", "bytes"))
    yield "bytes in flight", "B", *_sum_over_time(first - zero, end - zero, volume.astype(np.float64))
    rated = timed.drop_nulls("busbw_gb_per_s")
    if len(rated):
        last_begin, end = _ints(rated, "last_begin"), _ints(rated, "end")
        yield "busbw", "GB/s", *_sum_over_time(last_begin - zero, end - zero, rated["busbw_gb_per_s"].to_numpy())


def _sum_over_time(begin: Ints, end: Ints, value: Floats) -> tuple[Ints, Floats]:
    """Return the times at which the sum of the active values changes, and the sums."""
    moments = np.concatenate([begin, end])
    changes = np.concatenate([value, -value])
    at, inverse = np.unique(moments, return_inverse=True)
    sums = np.cumsum(np.bincount(inverse, weights=changes, minlength=len(at)))
    # A rest from rounding is not traffic.
    under_way = np.cumsum(np.bincount(inverse, weights=np.repeat([1, -1], len(begin)), minlength=len(at)))
    return at, np.where(under_way > 0, np.maximum(sums, 0), 0.0)
