"""Who waits for whom over the run, and how long iterations take."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from crossrank.tools.job.collectives import Collectives
from crossrank.tools.job.split import split_by
from crossrank.tools.traces.rank_trace import RankTrace

_MOST_BINS = 120
_MOST_ROWS = 128
_MOST_RANKS = 16
"""Ranks that are listed by name."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Last(msgspec.Struct, kw_only=True):
    """A rank that came last."""

    rank: int
    last: int
    """Collectives in which it did, of those whose members are all known."""
    of: int
    """Those that it took part in."""
    cost_ms: float
    """Time during which somebody waited for it; calls that wait at the same time count once."""


class Waiter(msgspec.Struct, kw_only=True):
    """A rank that waited."""

    rank: int
    waiting_ms: float
    """Time during which one of its calls waited; calls that wait at the same time count once."""


class Waiting(msgspec.Struct, kw_only=True):
    """Who waits for whom, over the run."""

    measured: str
    """What tells it: the device's times, or when hosts made their calls."""
    axis: str
    """What a bin is: iterations, or ms since the begin."""
    bins: list[float]
    """Where each begins."""
    p50_us: list[float | None]
    p95_us: list[float | None]
    max_us: list[float | None]
    rows: list[str]
    """Ranks, or blocks of them."""
    mean_us: list[list[float | None]]
    """Mean waiting of a row's calls in each bin."""
    last: list[Last]
    """Ranks that others waited for, those that cost most first."""
    waiters: list[Waiter]
    """Ranks that waited longest in all."""


class Steps(msgspec.Struct, kw_only=True):
    """Iterations: the time from one to the next."""

    step: list[int]
    p50_ms: list[float]
    """Over the ranks; so are the next two."""
    least_ms: list[float]
    most_ms: list[float]


def waiting_of(found: Collectives, ranks: Sequence[RankTrace]) -> Waiting | None:
    """Who waits for whom; None where no rank can be compared with another."""
    waits, moments = found.waiting, found.began
    placed = all(one.placed for one in ranks)
    measured = "the begin and end of communication on the device" if placed else "how long it took on each rank"
    last = found.last_rank
    if not (waits >= 0).any():
        waits, last = _by_calls(found)
        moments, measured = found.called, "the moments at which the hosts made their calls"
    rows = np.flatnonzero((waits >= 0) & (moments > 0))
    if not len(rows):
        return None
    bin_of, begins, axis = _bins(found, moments, rows)
    count = len(begins)
    width = -(-(max(found.ranks) + 1) // _MOST_ROWS)
    blocks = list(range(0, max(found.ranks) + 1, width))
    names = [f"rank {first}" if width == 1 else f"rank {first}-{first + width - 1}" for first in blocks]
    sums, numbers = np.zeros((len(blocks), count)), np.zeros((len(blocks), count))
    np.add.at(sums, (found.rank[rows] // width, bin_of), waits[rows] / 1000)
    np.add.at(numbers, (found.rank[rows] // width, bin_of), 1)
    p50, p95, most = _percentiles(bin_of, waits[rows] / 1000, count)
    with np.errstate(invalid="ignore"):
        mean = sums / np.where(numbers > 0, numbers, np.nan)
    return Waiting(
        measured=measured,
        axis=axis,
        bins=begins,
        p50_us=p50,
        p95_us=p95,
        max_us=most,
        rows=names,
        mean_us=[[None if np.isnan(value) else round(float(value), 1) for value in row] for row in mean],
        last=_last(found, last, waits, moments),
        waiters=_waiters(found, waits, moments),
    )


def _by_calls(found: Collectives) -> tuple[Ints, Ints]:
    """(waiting of each call, who came last to each collective) by when hosts made their calls; needs one clock."""
    count = len(found.of_kind)
    waits = np.full(len(found.rank), -1, np.int64)
    last_rank = np.full(count, -1, np.int64)
    if found.clocks.count > 1:
        return waits, last_rank
    releasing = np.array([kind.releases_all for kind in found.kinds] or [False])
    members = np.bincount(found.collective, minlength=count)
    rows = np.flatnonzero((found.called > 0) & releasing[found.kind] & (members[found.collective] > 1))
    last = np.zeros(count, np.int64)
    np.maximum.at(last, found.collective[rows], found.called[rows])
    waits[rows] = last[found.collective[rows]] - found.called[rows]
    latest = rows[waits[rows] == 0]
    last_rank[found.collective[latest]] = found.rank[latest]
    return waits, last_rank


def _bins(found: Collectives, moments: Ints, rows: Ints) -> tuple[Ints, list[float], str]:
    """(bin of each row, where bins begin, what they are): iterations where they are known, else time."""
    steps = found.step[rows]
    if int(steps.max()) >= 2:
        low, high = int(steps.min()), int(steps.max())
        width = -(-(high - low + 1) // _MOST_BINS)
        count = (high - low) // width + 1
        return (steps - low) // width, [float(low + width * number) for number in range(count)], "iteration"
    first, last = int(moments[rows].min()), int(moments[rows].max())
    count = min(_MOST_BINS, max(1, len(rows) // 8))
    width = max(1, -(-(last - first + 1) // count))
    begins = [round(number * width / 1e6, 3) for number in range(count)]
    return np.minimum((moments[rows] - first) // width, count - 1), begins, "ms since the begin"


def _percentiles(bin_of: Ints, values: Floats, count: int) -> tuple[list[float | None], ...]:
    columns: list[list[float | None]] = [[], [], []]
    for own in split_by(bin_of, values, count):
        found = [round(float(value), 1) for value in np.percentile(own, (50, 95, 100))] if len(own) else [None] * 3
        for column, value in zip(columns, found, strict=True):
            column.append(value)
    return tuple(columns)


def _last(found: Collectives, last_rank: Ints, waits: Ints, moments: Ints) -> list[Last]:
    """How long others waited for each rank, and how often it came last."""
    count = len(found.of_kind)
    longest, arrival = np.zeros(count, np.int64), np.zeros(count, np.int64)
    rows = np.flatnonzero(waits >= 0)
    np.maximum.at(longest, found.collective[rows], waits[rows])
    np.maximum.at(arrival, found.collective[rows], moments[rows])
    members = np.bincount(found.collective, minlength=count)
    known = np.flatnonzero((last_rank >= 0) & (members >= found.expected))
    most = max(found.ranks) + 1
    mine = np.isin(found.collective, known)
    took_part = np.bincount(found.rank[mine], minlength=most)
    times = np.bincount(last_rank[known], minlength=most)
    cost = _union(last_rank[known], (arrival - longest)[known], arrival[known], most)
    order = np.lexsort((np.arange(most), -cost))[:_MOST_RANKS]
    return [
        Last(rank=rank, last=int(times[rank]), of=int(took_part[rank]), cost_ms=round(float(cost[rank]) / 1e6, 3))
        for rank in order.tolist()
        if cost[rank] > 0
    ]


def _waiters(found: Collectives, waits: Ints, moments: Ints) -> list[Waiter]:
    rows = np.flatnonzero(waits > 0)
    total = _union(found.rank[rows], moments[rows], moments[rows] + waits[rows], max(found.ranks) + 1)
    order = np.lexsort((np.arange(len(total)), -total))[:_MOST_RANKS]
    return [
        Waiter(rank=rank, waiting_ms=round(float(total[rank]) / 1e6, 3)) for rank in order.tolist() if total[rank] > 0
    ]


def _union(rank: Ints, begin: Ints, end: Ints, ranks: int) -> Ints:
    """ns that the spans of each rank cover; what overlaps counts once."""
    covered = np.zeros(ranks, np.int64)
    order = np.lexsort((begin, rank))
    rank, begin, end = rank[order], begin[order], end[order]
    if not len(rank):
        return covered
    # Each rank's spans are laid behind those of the one before, so that one running maximum serves all.
    span = int(end.max() - begin.min()) + 1
    shift = rank * span - begin.min()
    begin, end = begin + shift, end + shift
    reach = np.maximum.accumulate(end)
    before = np.concatenate(([begin[0]], reach[:-1]))
    np.add.at(covered, rank, np.maximum(end - np.maximum(begin, before), 0))
    return covered


def steps_of(ranks: Sequence[RankTrace]) -> Steps | None:
    """Durations of iterations; the last one has no end and is left out."""
    durations: dict[int, list[float]] = {}
    for one in ranks:
        for (step, begin), (_, end) in zip(one.steps, one.steps[1:], strict=False):
            durations.setdefault(step, []).append((end - begin) / 1e6)
    if not durations:
        return None
    steps = sorted(durations)
    stride = -(-len(steps) // 2000)
    steps = steps[::stride]
    return Steps(
        step=steps,
        p50_ms=[round(float(np.median(durations[step])), 3) for step in steps],
        least_ms=[round(min(durations[step]), 3) for step in steps],
        most_ms=[round(max(durations[step]), 3) for step in steps],
    )
