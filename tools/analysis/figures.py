"""The figures of a report: small tables over the calls of all ranks, for any number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import polars as pl

import crossrank
from crossrank.text import plural, printable, rank_ranges
from crossrank.tools.analysis.bandwidth import Bandwidth, bandwidth, known_sum
from crossrank.tools.analysis.diagnosis.findings import Diagnosis
from crossrank.tools.analysis.exposed import Exposed, exposed_of
from crossrank.tools.analysis.traffic import Traffic, traffic
from crossrank.tools.analysis.waiting import Steps, Waiting, steps_of, waiting_of
from crossrank.tools.job.collectives import JobTables
from crossrank.tools.tables import ANSWERS, Row
from crossrank.tools.traces.rank_trace import RankTrace
from crossrank.tools.traces.replayed import ReplayReport

_MOST_CLASSES = 24
_MOST_SOURCES = 20


class Matrix(msgspec.Struct, kw_only=True):
    """Operations by classes of groups. Groups with the same description and size are one class."""

    ops: list[str]
    groups: list[str]
    bytes: list[list[int | None]]
    """S of nccl-tests, summed over ranks; a row per operation. None if that of no call is known."""
    unsized: list[list[int]]
    """Calls with unknown bytes."""
    calls: list[list[int]]
    """Summed over ranks."""
    time_ms: list[list[float | None]]
    """Time from the last arrival, over the collectives with times; null if none has one."""
    waiting_ms: list[list[float | None]]
    """Summed over ranks; null if no waiting time is known."""


class Figures(msgspec.Struct, kw_only=True):
    """Everything that the page shows, and `--json` prints."""

    inputs: list[str]
    world_size: int
    ranks: int
    missing_ranks: str
    nodes: int | None
    about: dict[str, str]
    """Versions and settings -> value on most ranks."""
    calls: int
    bytes: int | None
    """S of nccl-tests, summed over ranks; None if that of no call is known."""
    unsized: int
    """Calls with unknown bytes."""
    by_locality: dict[str, int]
    """Known bytes, as above."""
    matrix: Matrix
    traffic: Traffic
    sources: list[Row]
    """The source lines with most time."""
    source_lines: int
    """Number of all source lines."""
    bandwidth: Bandwidth
    waiting: Waiting | None
    steps: Steps | None
    exposed: Exposed | None
    """None if no waits are recorded."""
    matched: dict[str, list[int]]
    """What was linked -> [number matched, total], over all ranks."""
    diagnosis: Diagnosis | None
    diagnosis_problem: str
    replay: ReplayReport | None
    notes: list[str]
    skipped: list[str]
    schema: str = "crossrank-report 1"
    crossrank: str = crossrank.__version__


def figures(
    found: JobTables,
    *,
    inputs: Sequence[str],
    rates: dict[str, float] | None = None,
    diagnosis: Diagnosis | None = None,
    diagnosis_problem: str = "",
    replay: ReplayReport | None = None,
) -> Figures:
    """Return all figures of a run. `diagnosis_problem` is the reason why there is no diagnosis."""
    ranks, classes = list(found.job.ranks.values()), _classes(found)
    kinds = _kinds(found, classes)
    table = bandwidth(found, inputs=inputs, rates=rates, classes=classes)
    matched: dict[str, list[int]] = {}
    for what, counts in ((what, counts) for one in ranks for what, counts in one.matched.items()):
        matched[what] = [sum(pair) for pair in zip(counts, matched.get(what, (0, 0)), strict=True)]
    size, skipped = len(found.job.world), list(table.skipped)
    if replay is not None and replay.world_size != size:
        skipped.append(
            f"skipped the replay of {printable(replay.source)}: it has {plural(replay.world_size, 'rank')}, the job "
            f"has {size:,}; give a replay of this recording with --replay"
        )
        replay = None
    sources, source_lines = _sources(found, kinds)
    return Figures(
        inputs=table.inputs,
        world_size=size,
        ranks=len(ranks),
        missing_ranks=rank_ranges(table.missing_ranks),
        nodes=len({one.node for one in ranks if one.node}) or None,
        about=_about(ranks),
        calls=table.calls,
        bytes=_known_bytes(int(kinds["bytes"].sum()), int(kinds["unsized"].sum()), int(kinds["calls"].sum())),
        unsized=int(kinds["unsized"].sum()),
        by_locality=_by_locality(found),
        matrix=_matrix(kinds),
        traffic=traffic(found),
        sources=sources,
        source_lines=source_lines,
        bandwidth=table,
        waiting=waiting_of(found),
        steps=steps_of(ranks),
        exposed=exposed_of(ranks),
        matched=matched,
        diagnosis=diagnosis,
        diagnosis_problem=diagnosis_problem,
        replay=replay,
        notes=list(map(printable, found.job.notes)),
        skipped=skipped,
    )


def _about(ranks: Sequence[RankTrace]) -> dict[str, str]:
    given: dict[str, list[str]] = {}
    for one in ranks:
        for name, value in one.about.items():
            given.setdefault(name, []).append(value)
    shown = {name: [value for value, _ in Counter(values).most_common()] for name, values in given.items()}
    return {name: " / ".join(values[:3] + ["…"] * (len(values) > 3)) for name, values in shown.items()}


def _kinds(found: JobTables, classes: Sequence[str]) -> pl.DataFrame:
    """Return one row per kind of call, with sums over its calls."""
    rows = [
        (one.label, classes[one.group], one.source or "(C++)", one.recorded, one.calls, 0 if one.sized else one.calls)
        for one in found.kinds
    ]
    names = ("op", "group", "source", "bytes", "calls", "unsized")
    schema = dict.fromkeys(names[:3], pl.String) | dict.fromkeys(names[3:], pl.Int64)
    made = found.calls.group_by("kind").agg(times=pl.len(), waiting_ms=known_sum("waiting_ns") / 1e6)
    took = found.collectives.group_by("kind").agg(time_ms=known_sum("time_ns") / 1e6)
    return (
        pl.DataFrame(rows, schema=schema, orient="row")
        .with_row_index("kind")
        .join(made, on="kind", how="left", maintain_order="left")
        .join(took, on="kind", how="left", maintain_order="left")
        .with_columns(pl.col("times").fill_null(0))
        .with_columns(pl.col("bytes", "calls", "unsized") * pl.col("times"))
    )


def _by_locality(found: JobTables) -> dict[str, int]:
    """Return recorded bytes by locality of the calls, largest first."""
    sums = Counter[str]()
    for number, count in found.calls["kind"].value_counts().iter_rows():
        one = found.kinds[number]
        for locality, size in one.recorded_by_locality or ((one.locality, one.recorded),):
            sums[locality] += size * count
    return {name: size for name, size in sums.most_common() if size}


def _classes(found: JobTables) -> list[str]:
    """Return the class of each group. Groups with the same description and size are one class; without a description,
    groups with the same size and locality.
    """
    locality_of = {kind.group: kind.locality.replace("_", " ") for kind in found.kinds if kind.ends is None}
    keys = []
    for number, group in enumerate(found.job.groups):
        desc = "" if group.desc == "undefined" else group.desc
        keys.append((desc, group.known_size, "" if desc else locality_of.get(number, "")))
    count = Counter(keys[number] for number in {kind.group for kind in found.kinds})
    names = []
    for key, group in zip(keys, found.job.groups, strict=True):
        desc, size, where = key
        ranks = "number of ranks unknown" if size is None else plural(size, "rank")
        if count[key] > 1:
            named, placed = (f"{desc}: " if desc else ""), f", {where}" if where and where != "unknown" else ""
            names.append(f"{named}{count[key]:,} groups of {ranks}{placed}")
        elif desc or group.name:
            names.append(f"{desc or f'group {group.name}'}: {ranks}")
        else:
            names.append("unknown group")
    return [printable(name) for name in names]


def _matrix(kinds: pl.DataFrame) -> Matrix:
    volume = kinds.group_by("group", maintain_order=True).agg(pl.sum("bytes"))
    groups = volume.sort("bytes", descending=True, maintain_order=True)["group"].to_list()
    if len(groups) > _MOST_CLASSES:
        shown = groups[:_MOST_CLASSES]
        kinds = kinds.with_columns(
            group=pl.when(pl.col("group").is_in(shown)).then("group").otherwise(pl.lit("others"))
        )
        groups = [*shown, "others"]
    ops = kinds["op"].unique(maintain_order=True).to_list()
    names = ("bytes", "unsized", "calls", "time_ms", "waiting_ms")
    sums = kinds.group_by("op", "group").agg(pl.sum(*names[:3]), *(known_sum(name).round(3) for name in names[3:]))
    cells = sums.rows_by_key(("op", "group"), named=True, unique=True)
    none = dict.fromkeys(names[:3], 0) | dict.fromkeys(names[3:])
    columns = {name: [[cells.get((op, group), none)[name] for group in groups] for op in ops] for name in names}
    columns["bytes"] = [
        [_known_bytes(*cell) for cell in zip(*rows, strict=True)]
        for rows in zip(*(columns[name] for name in ("bytes", "unsized", "calls")), strict=True)
    ]
    return Matrix(ops=ops, groups=groups, **columns)


def _known_bytes(size: int, unsized: int, calls: int) -> int | None:
    """Return the bytes of some calls; None if those of none are known."""
    return None if unsized and unsized >= calls else size


def _sources(found: JobTables, kinds: pl.DataFrame) -> tuple[list[Row], int]:
    """Return (the source lines with most time, the number of all). A collective that ranks call from several lines
    counts for each of them."""
    line = ("source", "op")
    calls = found.calls.select("collective", "kind").hstack(found.of_collective("time_ns")).drop_nulls("time_ns")
    calls = calls.join(kinds.select("kind", *line), on="kind").unique(("collective", *line))
    times = calls.group_by(line).agg(time_ms=pl.sum("time_ns") / 1e6)
    lines = kinds.group_by(line, maintain_order=True).agg(pl.sum("calls", "bytes", "unsized"), known_sum("waiting_ms"))
    lines = lines.join(times, on=line, how="left", maintain_order="left")
    lines = lines.with_columns(bytes=pl.when(pl.col("unsized") < pl.col("calls")).then("bytes"))
    lines = lines.with_columns(pl.col("time_ms", "waiting_ms").round(3))
    order = [pl.col(name).fill_null(0) for name in ("time_ms", "bytes")]
    lines = lines.sort([*order, pl.col("source")], descending=[True, True, False], maintain_order=True)
    shown = ANSWERS["sources"].rows(lines.head(_MOST_SOURCES))
    return [row | {"source": printable(row["source"])} for row in shown], len(lines)
