"""The figures of a report: small tables made of the calls of all ranks, for any number of ranks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

import crossrank
from crossrank.text import printable, rank_ranges
from crossrank.tools.analysis.bandwidth import BY, Bandwidth, bandwidth
from crossrank.tools.analysis.diagnosis.findings import Diagnosis
from crossrank.tools.analysis.gather import Material
from crossrank.tools.analysis.traffic import Traffic, traffic
from crossrank.tools.analysis.waiting import Steps, Waiting, steps_of, waiting_of
from crossrank.tools.job.collectives import Collectives, Group
from crossrank.tools.job.rank_times import RankTimes
from crossrank.tools.traces.replayed import Report

_MOST_CLASSES = 24
_MOST_SOURCES = 20


class Matrix(msgspec.Struct, kw_only=True):
    """Operations by classes of groups: groups with one description and size are one class."""

    ops: list[str]
    groups: list[str]
    bytes: list[list[int]]
    """S of nccl-tests, summed over ranks; a row per operation."""
    unsized: list[list[int]]
    """Calls of which no file says the bytes."""
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
    """As far as they are known."""
    unsized: int = 0
    """Calls of which the bytes are not known."""
    time_ms: float | None
    waiting_ms: float | None


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
    unsized: int
    """Calls of which the bytes are not known."""
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
    replay: Report | None
    notes: list[str]
    skipped: list[str]
    schema: str = "crossrank-report 1"
    crossrank: str = crossrank.__version__


def figures(material: Material, rates: dict[str, float] | None = None) -> Figures:
    """All figures of a run."""
    found, ranks = material.together, material.ranks
    sizes = np.array([kind.recorded for kind in found.kinds] or [0], np.int64)
    by_kind = np.bincount(found.kind, minlength=len(found.kinds)).astype(np.int64)
    localities: Counter[str] = Counter()
    for kind, count in zip(found.kinds, by_kind.tolist(), strict=False):
        localities[kind.locality] += kind.recorded * count
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
        unsized=int(found.unsized_calls.sum()),
        by_locality=dict(localities.most_common()),
        matrix=_matrix(found, classes),
        traffic=traffic(found, ranks),
        sources=_sources(found),
        bandwidth=table,
        waiting=waiting_of(found, ranks),
        steps=steps_of(ranks),
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
        if number == 1 and not (desc or group.name):
            names.append("unknown group")
        elif number == 1:
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
        volume[classes[kind.group]] += kind.recorded * count
    groups = [name for name, _ in volume.most_common(_MOST_CLASSES)]
    if len(volume) > _MOST_CLASSES:
        groups.append("others")
    ops = list(dict.fromkeys(labels))
    shape = (len(ops), len(groups))
    place = [
        (ops.index(label), groups.index(name) if (name := classes[kind.group]) in groups else len(groups) - 1)
        for kind, label in zip(found.kinds, labels, strict=True)
    ]
    sizes, unsized, calls = (np.zeros(shape, np.int64) for _ in range(3))
    for (row, column), kind, count in zip(place, found.kinds, by_kind, strict=False):
        sizes[row, column] += kind.recorded * count
        calls[row, column] += count * kind.calls
        unsized[row, column] += 0 if kind.sized else count * kind.calls
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
        unsized=unsized.tolist(),
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
    calls, size, unsized, time, waiting = (np.zeros(count) for _ in range(5))
    sizes = np.array([kind.recorded for kind in found.kinds] or [0], np.int64)
    line = of_kind[found.kind]
    np.add.at(calls, line, found.calls)
    np.add.at(size, line, sizes[found.kind])
    np.add.at(unsized, line, found.unsized_calls)
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
            unsized=int(unsized[number]),
            time_ms=round(float(time[number]), 3) if time[number] else None,
            waiting_ms=round(float(waiting[number]), 3) if waiting[number] else None,
        )
        for (source, op), number in numbers.items()
    ]
    return sorted(rows, key=lambda row: (-(row.time_ms or 0), -row.bytes, row.source))[:_MOST_SOURCES]
