"""Join the calls of all ranks into collectives and transfers, and measure them: time, waiting time, last rank, rates.

d is the duration of a collective on one rank: of its kernel, or of its Work on a backend without kernels.

* `time` counts from the last arrival. If the operation releases all ranks together, the last rank does not wait, so
  `time` is the shortest d and needs no common clock. For other operations (a broadcast, a send) it is the time from
  the last start to the last end, on aligned clocks. If only durations are known, it is the longest d, an upper bound.
* `waiting` of a rank is the part of its d before the last arrival. In the first collective of a rank in a profiler
  window, this part is `profiler`: the ranks' profilers start one after the other, so it shows no late rank.
* algbw = S / time, busbw = algbw * factor, with S and the factor of nccl-tests (see `crossrank.comm.OPERATIONS`). For
  an uneven all_to_all, busbw is the larger of the bytes that the busiest rank sends to others and receives from them,
  divided by time, as PARAM counts it.

An all_to_all with splits does not release all ranks together: a rank that exchanges nothing with the last rank ends
earlier. These times are counted as upper bounds:

* of a collective that lacks calls of some members, or whose members are unknown: the time may include waiting;
* of a launch of several sends and receives, because only one rank is known;
* any time that is shorter than the residual of its clocks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import polars as pl

from crossrank.tools.job.clocks import Clocks, align
from crossrank.tools.job.job import Job
from crossrank.tools.job.launches import SEND_RECV, Launches, launches, of_collectives
from crossrank.tools.job.matching import match_calls, part_lanes
from crossrank.tools.traces.rank_trace import Interned

_PROFILERS = ("kineto", "nsight")
_EXPLAINS = 0.5
"""Share of a wait in the first collective of a window from which on the profilers' starts explain it."""
_COLLECTIVE_COLUMNS = (
    *("kind", "number", "step", "calls", "bytes", "exchanged", "ranks", "expected", "called_ns", "arrived_ns"),
    *("launches", "ended_ns", "time_ns", "is_upper_bound", "longest_wait_ns", "last_rank", "opens", "by_duration"),
)
_END_COLUMNS = ("clock", "collective", "ended_ns")
NO_DURATION = "calls that do not end after their start: their times are ignored"
MOVED = (
    "calls that crossrank numbered by counting, on clocks that it moved by more than half the time between calls: they "
    "are matched wrongly if the files start at different calls"
)


@dataclass(frozen=True, kw_only=True)
class JobTables(Launches):
    """The launches of all ranks, and the collectives and transfers that they belong to.

    `calls` has the columns of `Launches` and `collective` (its row in `collectives`), `comparable` (its times are on
    the common clock), `waiting_ns` and `profiler_ns`. Times are on the common clock if the rank's clock could be
    aligned.
    """

    collectives: pl.DataFrame
    """One row per collective or transfer, with `number`, `step` and the measured columns of the tables `collectives`
    and `transfers` in `crossrank.tools.tables`. More columns: `kind` of its first rank; `launches`, their number;
    `exchanged`, the bytes that the busiest rank exchanges in an uneven all_to_all or a batch; `opens`, whether it is
    the first collective of one of its ranks in a profiler window and the profilers explain the waits in it;
    `by_duration`, whether its waits are differences of durations, not of start times."""
    clocks: Clocks
    shift: dict[int, int]
    """Rank -> offset in ns that was added to its times to align them."""
    unmatched: dict[str, int]
    """Reason why calls were skipped or not compared -> number of calls."""

    @property
    def timed(self) -> pl.DataFrame:
        """Return the collectives that have a time."""
        return self.collectives.drop_nulls("time_ns")

    @cached_property
    def timed_by(self) -> dict[int, str]:
        """Rank -> what measured its calls, for the ranks with a measured call."""
        timed = self.calls.drop_nulls("began_ns")["rank"].unique().to_list()
        return {rank: self.job.ranks[rank].timed_by for rank in sorted(timed)}

    def of_collective(self, *names: str) -> pl.DataFrame:
        """Return columns of `collectives`, with one row per row of `calls`."""
        return self.collectives.select(names)[self.calls["collective"]]

    @cached_property
    def batches_apart(self) -> JobTables:
        """Return these tables with one row per send and receive of a batch; `self` if there are no batches."""
        if any(one.op == SEND_RECV for one in self.kinds):
            return match_collectives(self.job, batches_apart=True)
        return self


def match_collectives(job: Job, *, batches_apart: bool = False, release: bool = False) -> JobTables:
    """Join the calls of all ranks into collectives and transfers, on one clock, and measure them.

    With `batches_apart`, each send of a batch is joined with its receive. The time of the batch is then an upper bound
    for each of them. `release` is as in `launches`; it also drops the columns `id`, `number` and `ended_ns`.
    """
    found, unmatched = launches(job, batches_apart=batches_apart, release=release), Counter[str]()
    found = replace(found, calls=_drop_impossible_times(found.calls, unmatched))
    names = Interned[str]()
    clock_of = {rank: names.number(trace.clock or trace.path) for rank, trace in job.ranks.items()}
    clock = pl.col("rank").replace_strict(list(clock_of), list(clock_of.values()), return_dtype=pl.UInt32)
    calls = found.about(match_calls(found, unmatched), "releases_all").with_columns(clock=clock)
    usable = pl.col("ended_ns").is_not_null() & pl.col("placed") & pl.col("releases_all")
    doubtful = pl.col("counted") & (~pl.col("counted")).any().over("lane")
    while True:
        ends = calls.filter(usable & ~pl.col("apart") & ~doubtful)
        clock_of_end, collective, ended = (ends[name].cast(pl.Int64).to_numpy() for name in _END_COLUMNS)
        shift, aligned, clocks = align(names.rows, clock_of_end, collective, ended)
        of_call = pl.DataFrame({"shift": shift, "aligned": aligned})[calls["clock"]]
        calls = calls.with_columns(of_call["shift"], comparable=pl.col("placed") & of_call["aligned"])
        parted = part_lanes(calls, usable & pl.col("comparable"), clocks.slack_ns, unmatched)
        if parted is calls:
            break
        calls = parted
    openers = _window_openers(job, calls)  # before the shift: it compares times of one rank
    if shift.any():
        _note_large_shifts(calls, unmatched)
        calls = calls.with_columns(pl.col("called_ns", "began_ns", "ended_ns") + pl.col("shift"))
    found = replace(found, calls=calls.drop("lane", "clock", "shift", *(["id"] if release else [])))
    del calls, parted, ends, clock_of_end, collective, ended, of_call  # several columns as long as the calls
    calls, collectives = _measure(found, clocks, openers, all(one.busy.where != "device" for one in job.ranks.values()))
    return JobTables(
        job=job,
        kinds=found.kinds,
        calls=calls.drop("apart", "releases_all", *(["number", "ended_ns"] if release else [])),
        sent=found.sent,
        not_placed=found.not_placed,
        attributed=found.attributed,
        unattributed=found.unattributed,
        collectives=collectives,
        clocks=clocks,
        shift={rank: int(shift[one]) for rank, one in clock_of.items() if aligned[one]},
        unmatched=unmatched,
    )


def _drop_impossible_times(calls: pl.DataFrame, unmatched: Counter[str]) -> pl.DataFrame:
    impossible = calls.select((pl.col("ended_ns") <= pl.col("began_ns")).fill_null(value=False)).to_series()
    if not impossible.any():
        return calls
    unmatched[NO_DURATION] = int(impossible.sum())
    return calls.with_columns(pl.when(~impossible).then(pl.col("began_ns", "ended_ns")))


def _window_openers(job: Job, calls: pl.DataFrame) -> pl.DataFrame:
    """Return the collectives that are the first of a rank in a profiler window, with `windows_apart_ns`: how long after
    the first window of their members the last one begins, on the job's clock; null if the clocks are not aligned."""
    of_ranks = [pl.DataFrame(schema={"collective": pl.UInt32, "opens": pl.Boolean, "begins": pl.Int64})]
    rank_of_row = calls["rank"].to_numpy()
    for rank, trace in job.ranks.items():
        if trace.timed_by not in _PROFILERS or not trace.busy.where:
            continue
        first, behind = np.searchsorted(rank_of_row, (rank, rank + 1))  # ranks follow each other
        own = calls.slice(first, behind - first).drop_nulls("began_ns").sort("began_ns", maintain_order=True)
        begins = trace.busy.observed[:, 0]
        window = np.searchsorted(begins, own["began_ns"].to_numpy(), side="right")
        of_call = own.select("collective", "shift", "comparable").with_columns(
            opens=np.diff(window, prepend=-1) != 0, begins=begins[np.maximum(window - 1, 0)]
        )
        moment = pl.when("comparable").then(pl.col("begins") + pl.col("shift"))
        of_ranks.append(of_call.select("collective", "opens", begins=moment))
    known = pl.col("begins").is_not_null().all()
    return (
        pl.concat(of_ranks)
        .group_by("collective")
        .agg(pl.any("opens"), windows_apart_ns=pl.when(known).then(pl.max("begins") - pl.min("begins")))
        .filter("opens")
    )


def _note_large_shifts(calls: pl.DataFrame, unmatched: Counter[str]) -> None:
    """Count calls whose clock moved by more than half the time between calls: shifted numbers look like a shifted
    clock."""
    began, shift = pl.col("began_ns"), pl.col("shift")
    moved = calls.filter(pl.col("counted") & ~pl.col("apart") & began.is_not_null() & (shift != 0))
    between = moved.sort("lane", "began_ns").select(began.diff().over("lane").median()).item()
    if between is not None and moved.select(shift.abs().max()).item() > between / 2:
        unmatched[MOVED] += len(moved)


def _measure(
    found: Launches, clocks: Clocks, openers: pl.DataFrame, on_host: bool
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return (the launches with `waiting_ns` and `profiler_ns`, the collectives with their measured columns)."""
    began, ended = pl.col("began_ns"), pl.col("ended_ns")
    duration = ended - began
    of_kinds = of_collectives(
        found.calls,
        found.facts,
        bytes=pl.max("bytes"),
        exchanged=pl.max("exchanged"),
        calls=pl.max_horizontal("calls", "together").max(),
        shares_launch=pl.max("together") > 1,
    )
    collectives = (
        found.calls.lazy()
        .group_by("collective")
        .agg(
            pl.first("kind", "number", "step", "apart"),
            launches=pl.len(),
            ranks=ended.count(),
            called_ns=pl.min("called_ns"),
            first_ns=began.min(),
            arrived_ns=began.max(),
            ended_ns=ended.max(),
            shortest=duration.min(),
            longest=duration.max(),
            placed=(pl.col("comparable") | ended.is_null()).all(),
            # If one call does not release all ranks, the collective does not.
            released=pl.col("releases_all").all() & ~pl.first("apart"),
        )
        .sort("collective")
        .collect()
        .hstack(of_kinds.drop("collective"))
    )
    collectives = _with_times(
        found.about(collectives, "participants", "late_ends", "guessed", "sized"), clocks, on_host
    )
    collectives = _with_openers(collectives, openers)
    of_call = collectives.select("by_duration", "shortest", "by_begin", "compared", "opens", last_begin="arrived_ns")[
        found.calls["collective"]
    ]
    lateness, longer = pl.col("last_begin") - began, duration - pl.col("shortest")
    wait = pl.when("by_duration").then(longer).otherwise(pl.min_horizontal(lateness, duration))
    # The last rank: between clocks, the shortest duration is more exact than start times on aligned clocks.
    is_last = pl.col("compared") & ~pl.col("opens") & (pl.when("by_begin").then(lateness).otherwise(longer) == 0)
    of_call = found.calls.hstack(of_call)
    last = of_call.filter(is_last).select("collective", "rank", exact=pl.col("placed") & ~pl.col("by_begin"))
    opening, compared = pl.col("opens"), pl.col("compared")
    waits_of_calls = of_call.select(
        waiting_ns=pl.when(compared & ~opening).then(wait), profiler_ns=pl.when(compared & opening).then(wait)
    )
    calls = found.calls.hstack(waits_of_calls)
    del of_call  # as large as the calls
    waits = calls.lazy().group_by("collective").agg(longest_wait_ns=pl.max("waiting_ns")).sort("collective").collect()
    # Durations of kernels are exact on any clock. A start within the error of the clocks does not count as late.
    longest = waits["longest_wait_ns"].gather(last["collective"])
    last = (
        last.filter((pl.col("exact") & (longest > 0)) | (longest > clocks.slack_ns))
        .group_by("collective")
        .agg(last_rank=pl.last("rank"))
    )
    collectives = collectives.hstack(waits.select("longest_wait_ns")).join(last, on="collective", how="left")
    return calls, with_rates(found, collectives.sort("collective").select(_COLLECTIVE_COLUMNS))


def _with_openers(collectives: pl.DataFrame, openers: pl.DataFrame) -> pl.DataFrame:
    """Return `collectives` with `opens`, whether a rank may have waited in it because the profiler of another one
    started later. It did not if the windows began much closer together than the ranks arrived."""
    longest, shortest, last, first = map(pl.col, ("longest", "shortest", "arrived_ns", "first_ns"))
    longest_wait = pl.when("released").then(longest - shortest).otherwise(last - first)
    apart = pl.col("windows_apart_ns")
    explains = apart.is_null() | (apart > _EXPLAINS * longest_wait)
    joined = collectives.join(openers, on="collective", how="left", maintain_order="left")
    return joined.with_columns(opens=pl.col("opens").fill_null(value=False) & explains.fill_null(value=True))


def with_rates(found: Launches, collectives: pl.DataFrame) -> pl.DataFrame:
    """Return `collectives` with algbw and busbw in GB/s (1e9 bytes); null if unknown."""
    time, size, exchanged, factor = map(pl.col, ("time_ns", "bytes", "exchanged", "bus_factor"))
    algbw = pl.when(pl.col("whole") & (time > 0) & (size > 0)).then(size / time)
    own = pl.when(exchanged > 0).then(exchanged / time)
    busbw = pl.when((exchanged >= 0) & (time > 0) & factor.is_not_null()).then(own).otherwise(algbw * factor)
    rates = found.about(collectives, "whole", "bus_factor").select(algbw_gb_per_s=algbw, busbw_gb_per_s=busbw)
    return collectives.with_columns(rates)


def _with_times(collectives: pl.DataFrame, clocks: Clocks, on_host: bool) -> pl.DataFrame:
    """Return `collectives` with `time_ns` and how exact it is. `on_host`: hosts measured all times. On one host, starts
    are then more exact than durations; on GPUs it is the other way round, as each has a clock of its own."""
    seen, time, size = map(pl.col, ("ranks", "time_ns", "bytes"))
    apart, released, placed = map(pl.col, ("apart", "released", "placed"))
    span = pl.col("ended_ns") - pl.col("arrived_ns")
    uncertain = ~released & (~placed | ((seen > 1) & (time < clocks.slack_ns)))
    vague = pl.any_horizontal("late_ends", "guessed", "shares_launch")
    return (
        # A send may end before its receive starts; then there is no span from the last start to the last end.
        collectives.with_columns(
            placed=placed & (span > 0).fill_null(value=False), expected=pl.when(apart).then(1).otherwise("participants")
        )
        .with_columns(time_ns=pl.when(released).then("shortest").when(placed).then(span).otherwise("longest"))
        .with_columns(
            bytes=pl.when(pl.col("sized") | (size > 0)).then(size),
            is_upper_bound=(seen > 0) & ((seen < pl.col("expected")) | apart | uncertain | vague),
            # A launch of several transfers works with one peer while it waits for another.
            compared=(seen > 1) & (released | placed) & ~pl.col("shares_launch"),
            by_begin=placed & (pl.lit(value=on_host and clocks.count == 1) | ~released),
        )
        .with_columns(by_duration=released & ~pl.col("by_begin"))
    )
