"""The figures of a report: small tables made of the calls of all ranks, for any number of ranks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

import crossrank
from crossrank.tools.bandwidth import BY, Bandwidth, bandwidth
from crossrank.tools.diagnosis.findings import Diagnosis
from crossrank.tools.report.gather import Material, Replayed
from crossrank.tools.report.traffic import Traffic, traffic
from crossrank.tools.tables import printable, rank_ranges
from crossrank.tools.timing.collectives import Collectives, Group
from crossrank.tools.timing.rank_times import RankTimes

_MOST_CLASSES = 24
_MOST_SOURCES = 20
_MOST_BINS = 120
_MOST_ROWS = 128
_MOST_RANKS = 16
"""Ranks that are listed by name."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Matrix(msgspec.Struct, kw_only=True):
    """Operations by classes of groups: groups with one description and size are one class."""

    ops: list[str]
    groups: list[str]
    bytes: list[list[int]]
    """S of nccl-tests, summed over ranks; a row per operation."""
    calls: list[list[int]]
    """Summed over ranks."""
    time_ms: list[list[float]]
    """Of the collectives that have times, from the last arrival."""
    waiting_ms: list[list[float]]
    """Summed over ranks."""


class Source(msgspec.Struct, kw_only=True):
    """A line of the user's code."""

    source: str
    op: str
    calls: int
    bytes: int
    time_ms: float | None
    waiting_ms: float | None


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
    last: list[dict[str, Any]]
    """Ranks that others waited for, those that cost most first: how often they came last, of how many collectives, and
    the sum of the longest waits for them."""
    waiters: list[dict[str, Any]]
    """Ranks that waited longest in all."""


class Steps(msgspec.Struct, kw_only=True):
    """Iterations: the time from one to the next."""

    step: list[int]
    p50_ms: list[float]
    """Over the ranks; so are the next two."""
    least_ms: list[float]
    most_ms: list[float]


class Figures(msgspec.Struct, kw_only=True):
    """Everything that the page shows, and `--json` prints."""

    inputs: list[str]
    world_size: int
    ranks: int
    missing_ranks: str
    nodes: int
    about: dict[str, str]
    """Versions and settings -> what most ranks say."""
    calls: int
    bytes: int
    by_locality: dict[str, int]
    """Bytes, S of nccl-tests, summed over ranks."""
    matrix: Matrix
    traffic: Traffic
    sources: list[Source]
    bandwidth: Bandwidth
    waiting: Waiting | None
    steps: Steps | None
    matched: dict[str, list[int]]
    """What was linked -> [matched, of how many], over all ranks."""
    diagnosis: Diagnosis | None
    diagnosis_problem: str
    replay: Replayed | None
    notes: list[str]
    skipped: list[str]
    schema: str = "crossrank-report 1"
    crossrank: str = crossrank.__version__


def figures(material: Material, rates: dict[str, float] | None = None) -> Figures:
    """All figures of a run."""
    found, ranks = material.together, material.ranks
    sizes = np.array([kind.bytes for kind in found.kinds] or [0], np.int64)
    by_kind = np.bincount(found.kind, minlength=len(found.kinds)).astype(np.int64)
    localities: Counter[str] = Counter()
    for kind, count in zip(found.kinds, by_kind.tolist(), strict=False):
        localities[kind.locality] += kind.bytes * count
    present = set(found.ranks)
    classes = _classes(found)
    table = bandwidth(
        ranks, _by_class(found, classes), inputs=material.inputs, by=BY, rates=rates, skipped=material.skipped
    )
    matched: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for one in ranks:
        for what, (count, of) in one.matched.items():
            matched[what] += count
            total[what] += of
    return Figures(
        inputs=material.inputs,
        world_size=found.world_size,
        ranks=len(found.ranks),
        missing_ranks=rank_ranges([rank for rank in range(found.world_size) if rank not in present]),
        nodes=len({one.node for one in ranks if one.node}),
        about=_about(ranks),
        calls=int(found.calls.sum()),
        bytes=int((sizes[: len(by_kind)] * by_kind).sum()),
        by_locality=dict(localities.most_common()),
        matrix=_matrix(found, classes),
        traffic=traffic(found, ranks),
        sources=_sources(found),
        bandwidth=table,
        waiting=_waiting(found, ranks),
        steps=_steps(ranks),
        matched={what: [matched[what], of] for what, of in total.items()},
        diagnosis=material.diagnosis,
        diagnosis_problem=material.diagnosis_problem,
        replay=material.replay,
        notes=list(dict.fromkeys(printable(note) for one in ranks for note in one.notes)),
        skipped=material.skipped,
    )


def _about(ranks: Sequence[RankTimes]) -> dict[str, str]:
    said: dict[str, Counter[str]] = {}
    for one in ranks:
        for name, value in one.about.items():
            said.setdefault(name, Counter())[value] += 1
    return {
        name: " / ".join(value for value, _ in values.most_common(3)) + (" / …" if len(values) > 3 else "")
        for name, values in said.items()
    }


# --- classes of groups ------------------------------------------------------------------------------------------------


def _classes(found: Collectives) -> list[str]:
    """Class of each group: those that the job made alike count as one.

    Alike is what has one description and size; without a description, one size and reach.
    """
    reach: dict[int, str] = {}
    for kind in found.kinds:
        if kind.ends is None:
            reach[kind.group] = kind.locality.replace("_", " ")

    def alike(number: int, group: Group) -> tuple[str, int, str]:
        desc = group.key.desc if group.key.desc not in ("", "undefined") else ""
        return desc, group.size, "" if desc else reach.get(number, "")

    keys = [alike(number, group) for number, group in enumerate(found.groups)]
    count = Counter(keys)
    names = []
    for (desc, size, where), group in zip(keys, found.groups, strict=True):
        number = count[desc, size, where]
        if number == 1:
            names.append(f"{desc or f'group {group.name}'}: {size} rank{'s' if size != 1 else ''}")
        else:
            what = desc or f"groups {where}".strip()
            names.append(f"{what}: {number} of {size} ranks")
    return [printable(name) for name in names]


def _by_class(found: Collectives, classes: Sequence[str]) -> Collectives:
    """The same collectives with the classes in the place of groups."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(classes))}
    groups = []
    for name in numbers:
        first = found.groups[classes.index(name)]
        key = msgspec.structs.replace(first.key, pg=name, desc="")
        groups.append(dataclasses.replace(first, key=key))
    kinds = [msgspec.structs.replace(kind, group=numbers[classes[kind.group]]) for kind in found.kinds]
    return dataclasses.replace(found, groups=groups, kinds=kinds)


def _matrix(found: Collectives, classes: Sequence[str]) -> Matrix:
    labels = [kind.label for kind in found.kinds]
    volume: Counter[str] = Counter()
    by_kind = np.bincount(found.kind, minlength=len(found.kinds)).tolist()
    for kind, count in zip(found.kinds, by_kind, strict=False):
        volume[classes[kind.group]] += kind.bytes * count
    groups = [name for name, _ in volume.most_common(_MOST_CLASSES)]
    if len(volume) > _MOST_CLASSES:
        groups.append("others")
    ops = list(dict.fromkeys(labels))
    shape = (len(ops), len(groups))
    place = [
        (ops.index(label), groups.index(name) if (name := classes[kind.group]) in groups else len(groups) - 1)
        for kind, label in zip(found.kinds, labels, strict=True)
    ]
    sizes, calls = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for (row, column), kind, count in zip(place, found.kinds, by_kind, strict=False):
        sizes[row, column] += kind.bytes * count
        calls[row, column] += count * kind.calls
    time, waiting = np.zeros(shape), np.zeros(shape)
    rows, columns = (np.array([one[i] for one in place] or [0]) for i in range(2))
    timed = np.flatnonzero(found.timed)
    np.add.at(time, (rows[found.of_kind[timed]], columns[found.of_kind[timed]]), found.time[timed] / 1e6)
    waits = np.flatnonzero(found.waiting >= 0)
    np.add.at(waiting, (rows[found.kind[waits]], columns[found.kind[waits]]), found.waiting[waits] / 1e6)
    return Matrix(
        ops=ops,
        groups=groups,
        bytes=sizes.tolist(),
        calls=calls.tolist(),
        time_ms=np.round(time, 3).tolist(),
        waiting_ms=np.round(waiting, 3).tolist(),
    )


def _sources(found: Collectives) -> list[Source]:
    """Lines by the time that they cost; a collective that ranks call from several lines counts for each of them."""
    numbers: dict[tuple[str, str], int] = {}
    of_kind = np.array(
        [numbers.setdefault((kind.source or "(C++)", kind.label), len(numbers)) for kind in found.kinds] or [0],
        np.int64,
    )
    count = max(len(numbers), 1)
    calls, size, time, waiting = (np.zeros(count) for _ in range(4))
    sizes = np.array([kind.bytes for kind in found.kinds] or [0], np.int64)
    line = of_kind[found.kind]
    np.add.at(calls, line, found.calls)
    np.add.at(size, line, sizes[found.kind])
    pairs = np.unique(found.collective * count + line)
    collective = pairs // count
    timed = found.timed[collective]
    np.add.at(time, (pairs % count)[timed], found.time[collective[timed]] / 1e6)
    waits = np.flatnonzero(found.waiting >= 0)
    np.add.at(waiting, line[waits], found.waiting[waits] / 1e6)
    rows = [
        Source(
            source=printable(source),
            op=op,
            calls=int(calls[number]),
            bytes=int(size[number]),
            time_ms=round(float(time[number]), 3) if time[number] else None,
            waiting_ms=round(float(waiting[number]), 3) if waiting[number] else None,
        )
        for (source, op), number in numbers.items()
    ]
    return sorted(rows, key=lambda row: (-(row.time_ms or 0), -row.bytes, row.source))[:_MOST_SOURCES]


# --- over time --------------------------------------------------------------------------------------------------------


def _waiting(found: Collectives, ranks: Sequence[RankTimes]) -> Waiting | None:
    """None where no rank can be compared with another."""
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
        last=_last(found, last, waits),
        waiters=_waiters(found, waits),
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
    order = np.argsort(bin_of, kind="stable")
    edges = np.searchsorted(bin_of[order], np.arange(count + 1))
    columns: list[list[float | None]] = [[], [], []]
    for number in range(count):
        own = values[order[edges[number] : edges[number + 1]]]
        found = [round(float(value), 1) for value in np.percentile(own, (50, 95, 100))] if len(own) else [None] * 3
        for column, value in zip(columns, found, strict=True):
            column.append(value)
    return tuple(columns)


def _last(found: Collectives, last_rank: Ints, waits: Ints) -> list[dict[str, Any]]:
    """Ranks by how long others waited for them: of collectives of which all members are known."""
    count = len(found.of_kind)
    longest = np.zeros(count, np.int64)
    rows = np.flatnonzero(waits >= 0)
    np.maximum.at(longest, found.collective[rows], waits[rows])
    members = np.bincount(found.collective, minlength=count)
    known = (last_rank >= 0) & (members >= found.expected)
    most = max(found.ranks) + 1
    took_part = np.bincount(found.rank[known[found.collective]], minlength=most)
    times = np.bincount(last_rank[known], minlength=most)
    cost = np.bincount(last_rank[known], weights=longest[known] / 1e6, minlength=most)
    order = np.lexsort((np.arange(most), -cost))[:_MOST_RANKS]
    return [
        {
            "rank": int(rank),
            "last": int(times[rank]),
            "of": int(took_part[rank]),
            "cost_ms": round(float(cost[rank]), 3),
        }
        for rank in order
        if cost[rank] > 0
    ]


def _waiters(found: Collectives, waits: Ints) -> list[dict[str, Any]]:
    rows = np.flatnonzero(waits >= 0)
    total = np.bincount(found.rank[rows], weights=waits[rows] / 1e6, minlength=max(found.ranks) + 1)
    order = np.lexsort((np.arange(len(total)), -total))[:_MOST_RANKS]
    return [{"rank": int(rank), "waiting_ms": round(float(total[rank]), 3)} for rank in order if total[rank] > 0]


def _steps(ranks: Sequence[RankTimes]) -> Steps | None:
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
