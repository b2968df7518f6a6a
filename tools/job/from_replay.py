"""Read the results of a replay as `JobTables`: `replay.csv` has every call of every rank, `replay.json` the groups.

The replay has already measured all ranks on one clock. Its times and waits are medians over its passes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import polars as pl

from crossrank.atomic_file import join
from crossrank.comm import MOST_RANKS, Amount, CommRecord, Group, Int, is_p2p
from crossrank.errors import BROKEN, CrossrankError, one_line
from crossrank.recording import ReadIssues, list_recording, read_chunks
from crossrank.text import from_csv_text
from crossrank.tools.job.clocks import Clocks
from crossrank.tools.job.collectives import JobTables, match_collectives, with_rates
from crossrank.tools.job.job import Job
from crossrank.tools.traces.rank_trace import RankTrace, TraceBuilder
from crossrank.tools.traces.replayed import CSV, JSON, ReplayReport, read_report

_Time = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]


class _Call(msgspec.Struct):
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]
    call: Amount
    op: str
    pg: str
    bytes: Amount
    completion_us_p50: _Time
    waiting_us_p50: _Time
    time_us_p50: _Time | None = None
    """None or 0: unknown."""
    has_rate: bool = True
    """Whether bytes / time is a rate. False in a batch, and if only a wait shows when the call ended."""
    seq: Amount = 0
    peer: Int | None = None
    source: str | None = None


def is_replay(path: str) -> bool:
    """Return whether a folder has the files of a replay and no recording."""
    try:
        listing = list_recording(path)
    except CrossrankError:
        return False
    return {CSV, JSON} <= set(listing.unrecognized) and not listing.files


def read_replay(path: str) -> JobTables:
    """Read the folder of a replay. Raises `CrossrankError` if its files are damaged."""
    report = read_report(path)
    issues = ReadIssues(join(path, CSV))
    content = b"".join(read_chunks(issues.path, issues))
    if issues.problems:
        raise CrossrankError(f"{path}: {issues.problems[0]}; run the replay again")
    try:
        lines = csv.DictReader(io.StringIO(content.decode()))
        given = [{name: from_csv_text(value) for name, value in line.items() if value and name} for line in lines]
        calls = msgspec.convert(given, list[_Call], strict=False)
    except (*BROKEN, csv.Error) as error:
        raise CrossrankError(
            f"{path}: {CSV} is not a file of crossrank replay ({one_line(error)}); run the replay again"
        ) from error
    if not calls or not max(call.rank for call in calls) < report.world_size <= MOST_RANKS:
        raise CrossrankError(
            f"{path}: {CSV} has no call, or a rank of {report.world_size} or more; run the replay again"
        )
    found = match_collectives(Job.match(_traces(calls, report, issues.path), report.world_size))
    times = [
        (one.rank, one.call, round(one.waiting_us_p50 * 1000), _to_ns(one.time_us_p50), not one.has_rate)
        for one in calls
    ]
    schema = {"rank": pl.Int32, "id": pl.Int64, "waiting_ns": pl.Int64, "time_ns": pl.Int64, "late": pl.Boolean}
    replayed = pl.DataFrame(times, schema=schema, orient="row").unique(("rank", "id"), keep="last")
    made = (
        found.calls.drop("waiting_ns")
        .with_columns(profiler_ns=pl.lit(None, pl.Int64))
        .join(replayed, on=("rank", "id"), how="left", maintain_order="left")
    )
    measured = made.group_by("collective").agg(pl.last("time_ns"), pl.any("late")).sort("collective")
    is_partly_seen = pl.col("ranks") < pl.col("expected")
    collectives = found.collectives.with_columns(measured["time_ns"], is_upper_bound=is_partly_seen | measured["late"])
    return replace(
        found,
        calls=made.drop("time_ns", "late"),
        collectives=with_rates(found, collectives),
        clocks=Clocks(count=1, note=f"one clock, aligned by the replay to within {report.clock_error_us:.1f} us"),
    )


def _to_ns(us: float | None) -> int | None:
    """Return ns; None if the time is unknown. A time of 0 was too short to measure."""
    return round(us * 1000) or None if us is not None else None


def _traces(calls: Sequence[_Call], report: ReplayReport, path: str) -> list[RankTrace]:
    sizes = {row.pg: row.ranks for row in report.rows}
    shared: dict[str, Any] = {"path": path, "source": "replay", "timed_by": "replay", "numbered_pairs": True}
    groups = [Group(pg=pg, size=size) for pg, size in sizes.items()]
    builders = {
        rank: TraceBuilder(RankTrace(rank=rank, placed=False, **shared), groups)
        for rank in sorted({call.rank for call in calls})
    }
    for call in calls:
        record = CommRecord(
            id=call.call, op=call.op, c10d="", pg=call.pg, bytes=call.bytes, t=0, peer=call.peer, source=call.source
        )
        number = {"p2p_seq" if is_p2p(record) else "seq": call.seq}
        completed = _to_ns(call.completion_us_p50)
        began, ended = (1, 1 + completed) if completed is not None else (0, 0)
        builders[call.rank].add(msgspec.structs.replace(record, **number), called=1, began=began, ended=ended)
    return [one.trace for one in builders.values()]
