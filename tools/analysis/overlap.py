"""Time per rank: computation, communication, exposed communication, and idle time.

Measured in traced windows, per step, or per window if it has no steps:

* computation, communication: time in which a kernel of that kind ran; on a backend without kernels, an operation of
  the host or a Work. Kernels that run at the same time count once.
* profiler: communication without computation in which the rank waited for others whose profilers started later.
* exposed: other communication without computation at the same time.
* memory: copies and memsets without computation and communication.
* idle: the rest. So the duration is computation + profiler + exposed + memory + idle.

`waiting` is the part of communication in which a call waited for another rank. `waits_for` is the rank that arrived
last in most of it. The definitions are those of HolisticTraceAnalysis (`get_temporal_breakdown`,
`get_comm_comp_overlap`), which analyses whole GPU traces.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import polars as pl

from crossrank.text import percent, plural
from crossrank.tools.job.collectives import JobTables
from crossrank.tools.tables import ANSWERS, TABLES, Row
from crossrank.tools.traces.busy import Ints, Spans, covered, difference, spans_of, union
from crossrank.tools.traces.rank_trace import RankTrace

_MOST_RANKS = 128
_MOST_STEPS = 2000


class Overlap(msgspec.Struct, kw_only=True):
    """Time of all ranks in traced windows."""

    measured_on: list[str]
    """`device`, `host`, or both."""
    windows: int
    """Number of steps, or of windows without steps, over all ranks."""
    computation: float
    """Share of their total time; so are the next four."""
    communication: float
    exposed: float
    profiler: float
    memory: float
    idle: float
    outside_ms: float
    """Communication in traced windows outside of these steps, over all ranks."""
    of_ranks: int
    ranks: list[Row]
    """The ranks with most exposed communication, sorted by rank."""
    steps: list[Row]

    @property
    def text(self) -> str:
        return _shares_text({name: getattr(self, name) for name in PARTS})


def overlap_of(found: JobTables) -> Overlap | None:
    """Return the time of the ranks; None if no window was traced."""
    rows = overlap_frame(found)
    if not len(rows):
        return None
    shares = _shares(rows)
    times = [f"{name}_ns" for name in (*shares, "duration", "waiting")]
    mean = [(pl.col(name).mean() / 1e6).round(4).alias(name.replace("_ns", "_ms")) for name in times]
    causes = rows.drop_nulls("waits_for").group_by("rank", "waits_for").agg(pl.sum("waits_for_ns"))
    most = causes.sort("waits_for_ns", "waits_for", descending=[True, False]).unique("rank", keep="first")
    of_rank = rows.group_by("rank").agg(pl.len().alias("iterations"), *mean)
    of_rank = of_rank.join(most.select("rank", "waits_for"), on="rank", how="left")
    shown = of_rank.sort("exposed_ms", "rank", descending=[True, False]).head(_MOST_RANKS).sort("rank")
    parts = ("computation", "exposed", "profiler", "memory", "idle")
    medians = [(pl.col(f"{name}_ns").median() / 1e6).round(4).alias(f"{name}_ms") for name in parts]
    of_step = rows.drop_nulls("step").group_by("step").agg(medians).sort("step")
    of_step = of_step.gather_every(len(of_step) // _MOST_STEPS + 1)
    return Overlap(
        measured_on=sorted(set(rows["measured_on"])),
        windows=len(rows),
        **{name: round(share, 6) for name, share in shares.items()},
        outside_ms=round(outside_ns(found, rows) / 1e6, 3),
        of_ranks=len(of_rank),
        ranks=ANSWERS["time_of_ranks"].rows(shown),
        steps=ANSWERS["time_of_steps"].rows(of_step),
    )


def outside_ns(found: JobTables, rows: pl.DataFrame) -> int:
    """Return the time of communication outside of the rows of `overlap_frame`, summed over ranks."""
    traced = [one.busy.communication for one in found.job.ranks.values() if one.busy.where]
    whole = sum(int((spans[:, 1] - spans[:, 0]).sum()) for spans in traced)
    return whole - int(rows["communication_ns"].sum())


def _shares(rows: pl.DataFrame) -> dict[str, float]:
    """Return the share of each kind of time in the duration of all rows."""
    kinds = ("computation", "communication", "exposed", "profiler", "memory", "idle")
    sums = rows.select(pl.sum(f"{name}_ns") for name in (*kinds, "duration")).row(0, named=True)
    return {name: sums[f"{name}_ns"] / sums["duration_ns"] for name in kinds}


PARTS = {
    "computation": "computation",
    "exposed": "exposed communication",
    "profiler": "waiting for other profilers to start",
    "memory": "copies",
    "idle": "idle",
}
"""Part of a duration -> its name."""


def shown_parts(profiler: float) -> dict[str, str]:
    """Return `PARTS`, without that of the profilers if no time is of it."""
    return {part: name for part, name in PARTS.items() if profiler or part != "profiler"}


def _shares_text(shares: Mapping[str, float]) -> str:
    """Return the share of each part; that of the profilers only if there is any."""
    parts = shown_parts(shares["profiler"])
    return ", ".join(f"{percent(shares[name])} {text}" for name, text in parts.items())


def shares_of(rows: pl.DataFrame) -> str:
    """Return what the rows of `overlap_frame` show, in one sentence."""
    return f"of {plural(len(rows), 'traced step or window', 'traced steps or windows')}: {_shares_text(_shares(rows))}"


def overlap_frame(found: JobTables) -> pl.DataFrame:
    """Return the table `overlap`: one row per rank and step, or per window without steps. `began_ns` is on the rank's
    own clock. Waiting columns are null if the rank cannot be compared with others."""
    traced = [one for one in found.job.ranks.values() if one.busy.where]
    waits, starts = (_waits(found), _starts(found)) if traced else ({}, {})
    frames = [_rank_rows(one, waits.get(one.rank or 0), starts.get(one.rank or 0, spans_of())) for one in traced]
    return pl.concat([pl.DataFrame(schema=TABLES["overlap"].schema), *frames])


def _rank_rows(one: RankTrace, waits: dict[int, Spans] | None, starts: Spans) -> pl.DataFrame:
    busy = one.busy
    iterations = spans_of((begin, end) for _, begin, end in busy.iterations)
    others = busy.observed[covered(union(iterations), busy.observed) == 0]
    windows = np.concatenate([iterations, others])
    steps = [*(number for number, _, _ in busy.iterations), *[None] * len(others)]
    either = union(busy.computation, busy.communication)
    computation, communication, both, every = (
        covered(spans, windows) for spans in (busy.computation, busy.communication, either, union(either, busy.memory))
    )
    exposed = covered(difference(busy.communication, union(busy.computation, starts)), windows)
    duration = windows[:, 1] - windows[:, 0]
    waiting, waits_for, longest = _waited(waits, windows)
    columns = {
        "rank": [one.rank or 0] * len(windows),
        "step": steps,
        "began_ns": windows[:, 0],
        "duration_ns": duration,
        "computation_ns": computation,
        "communication_ns": communication,
        "exposed_ns": exposed,
        "profiler_ns": both - computation - exposed,
        "memory_ns": every - both,
        "idle_ns": duration - every,
        "waiting_ns": waiting,
        "waits_for": waits_for,
        "waits_for_ns": longest,
        "measured_on": [busy.where] * len(windows),
    }
    return pl.DataFrame(columns, schema=TABLES["overlap"].schema)


def _waits_on_own_clock(found: JobTables, column: str) -> pl.DataFrame:
    """Return `rank`, `last_rank` (-1: unknown), `begin` on the rank's own clock and `wait` of the calls with a wait."""
    shift = pl.DataFrame(list(found.shift.items()), {"rank": pl.Int32, "shift": pl.Int64}, orient="row")
    return (
        found.calls.select("rank", "began_ns", wait=column)
        .hstack(found.of_collective("last_rank"))
        .drop_nulls("wait")
        .join(shift, on="rank", maintain_order="left")
        .select("rank", pl.col("last_rank").fill_null(-1), "wait", begin=pl.col("began_ns") - pl.col("shift"))
    )


def _starts(found: JobTables) -> dict[int, Spans]:
    """Return rank -> spans in which it waited for profilers of other ranks to start."""
    waits = _waits_on_own_clock(found, "profiler_ns").select("rank", "begin", end=pl.col("begin") + pl.col("wait"))
    return {rank: union(own.drop("rank").to_numpy()) for (rank,), own in waits.group_by("rank")}


def _waits(found: JobTables) -> dict[int, dict[int, Spans]]:
    """Return rank -> last rank (-1: unknown) -> spans in which the rank waited for it, on the rank's own clock. The
    inner dict is empty if the rank was compared and did not wait."""
    waits = _waits_on_own_clock(found, "waiting_ns")
    result: dict[int, dict[int, Spans]] = {one: {} for one in waits["rank"].unique()}
    waits = waits.filter(pl.col("wait") > 0).sort("rank", "last_rank", maintain_order=True)
    for (rank, last), own in waits.group_by("rank", "last_rank", maintain_order=True):
        result[rank][last] = union(own.select("begin", end=pl.col("begin") + pl.col("wait")).to_numpy())
    return result


def _waited(waits: dict[int, Spans] | None, windows: Spans) -> tuple[Ints | None, list[int | None], list[int | None]]:
    """Return per window: (waiting time, rank it waited for longest, waiting time for that rank)."""
    unknown: list[int | None] = [None] * len(windows)
    if waits is None:
        return None, unknown, unknown
    waiting = covered(union(*waits.values()), windows)
    known = [rank for rank in waits if rank >= 0]
    if not known:
        return waiting, unknown, unknown
    for_each = np.stack([covered(waits[rank], windows) for rank in known])
    longest = for_each.max(axis=0).tolist()
    most = for_each.argmax(axis=0).tolist()
    return (
        waiting,
        [known[place] if ns else None for place, ns in zip(most, longest, strict=True)],
        [ns or None for ns in longest],
    )
