"""Computes the times of every call on every rank from the measurements of a replay.

For one call in one pass, with arrivals a and ends e of its ranks on rank 0's clock:

* issue: the time until the launch returned, on each rank; the host's own work.
* completion: e - a on one rank, with its waiting time.
* waiting: from a rank's arrival to the last rank's arrival.
* time: from the last arrival to the last end: the collective itself. If other calls of its group are unfinished, a call
  arrives when the backend is free for it. The bandwidths are algbw = S / time and busbw = algbw x factor, with S and
  the factor of nccl-tests (`crossrank.comm.OPERATIONS`).

A time or completion below the resolution of the clock is unknown. It has no bandwidth, and is compared with nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from crossrank.comm import OPERATIONS
from crossrank.replay.plan.plan import NOT_IN_STEPS, Plan, launches
from crossrank.replay.plan.schedule import Key, keys_of
from crossrank.replay.run.messages import RankResult
from crossrank.tools.analysis.bandwidth import bucket_of
from crossrank.tools.traces.replayed import (
    Batches,
    CallTimes,
    Compared,
    Comparison,
    Percentiles,
    ReplayRow,
)

_HOST_RESOLUTION_NS = 1
_DEVICE_RESOLUTION_NS = 500
"""The resolution of CUDA's events."""


def measure(plan: Plan, results: Sequence[RankResult]) -> pl.DataFrame:
    """Return one row per call, rank and pass; times in ns, on one clock.

    `call` numbers the calls of all ranks, `index` those of one rank. `first` marks the rows of one rank of a call.
    `recorded` is null without a recorded duration. All rows of a call agree on these columns:

    - `op`: ends in ", batched" for a call of a batch, which has the times of the batch
    - `bytes`: the largest of its ranks
    - `ranks`: members of its group
    - `has_rate`: its bytes and its time belong together
    - `bus_factor`: null if a bandwidth has no meaning
    - `late_end`: on some rank only the wait shows the end, so the times are upper bounds
    - `is_known`: its time is at least the resolution of the clock
    """
    calls = _list_calls(plan, results)
    sizes = [(size, *bucket_of(size)) for size in calls["bytes"].unique()]
    buckets = pl.DataFrame(sizes, schema=dict.fromkeys(("bytes", "size_from", "size_to"), pl.Int64), orient="row")
    rows = calls.join(buckets, on="bytes", maintain_order="left").join(
        _list_times(results), on=("rank", "index"), maintain_order="left"
    )
    last = pl.col("began").max().over("call", "pass")
    completion = pl.col("completed") - pl.col("began")
    time = pl.col("completed").max().over("call", "pass") - last
    on_device = any(result.device != "cpu" for result in results)
    return rows.with_columns(
        issue=pl.col("issued") - pl.col("launched"),
        completion=completion,
        waiting=pl.min_horizontal(last - pl.col("began"), completion),
        time=time,
        is_known=time >= (_DEVICE_RESOLUTION_NS if on_device else _HOST_RESOLUTION_NS),
    )


def _list_calls(plan: Plan, results: Sequence[RankResult]) -> pl.DataFrame:
    """Return one row per call and rank."""
    late = {result.rank: set(result.late_ends) for result in results}
    members = {group.pg: len(group.ranks or ()) for group in plan.groups}
    numbers: dict[Key, int] = {}
    rows = []
    for rank in plan.ranks:
        keys = keys_of(rank)
        for first, end in launches(rank.calls):
            for index in range(first, end):
                record, key = rank.calls[index].record, keys[index]
                number = numbers.setdefault(key, len(numbers))
                op = "send/recv" if key[0] == "p2p" else record.op
                factor = OPERATIONS[record.op].bus_factor
                place = (number, rank.rank, index, rank.calls[index].took_ns or None, index in late[rank.rank])
                of_group = (record.pg, members[record.pg], factor and factor(members[record.pg]))
                rows.append((*place, op, record.op, *of_group, record.bytes, end - first > 1))
    schema = {
        **dict.fromkeys(("call", "rank", "index", "recorded"), pl.Int64),
        "late_end": pl.Boolean,
        **dict.fromkeys(("op", "record_op", "pg"), pl.String),
        "ranks": pl.Int64,
        "bus_factor": pl.Float64,
        "bytes": pl.Int64,
        "batched": pl.Boolean,
    }
    calls = pl.DataFrame(rows, schema=schema, orient="row")
    calls = calls.with_columns(
        pl.first("record_op", "pg", "ranks", "bus_factor", "op").over("call"),
        pl.col("bytes", "batched", "late_end").max().over("call"),
        first=pl.col("rank") == pl.col("rank").first().over("call"),
    )
    return calls.with_columns(
        op=pl.when("batched").then(pl.col("op") + ", batched").otherwise("op"),
        has_rate=(pl.col("bytes") > 0) & ~pl.col("batched") & ~pl.col("late_end"),
    )


def _list_times(results: Sequence[RankResult]) -> pl.DataFrame:
    """Return one row per rank, pass and index of a call, on rank 0's clock."""
    parts = []
    for result in results:
        for number, one in enumerate(result.passes):
            columns = {name: np.frombuffer(getattr(one, name), np.int64) + result.offset_ns for name in _MOMENTS}
            part = pl.DataFrame(columns).with_row_index("index")
            parts.append(part.with_columns(pl.col("index").cast(pl.Int64), rank=result.rank, **{"pass": number}))
    return pl.concat(parts).with_columns(pl.col("rank", "pass").cast(pl.Int64))


_MOMENTS = ("launched", "issued", "began", "completed")
_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def percentiles_us(nanoseconds: Sequence[float]) -> Percentiles:
    """Return percentiles in us."""
    return Percentiles(**{name: round(float(np.quantile(nanoseconds, q)) / 1000, 3) for name, q in _SHARES.items()})


def table(times: pl.DataFrame) -> list[ReplayRow]:
    """Return one row per operation, group and size bucket, the longest first."""

    def spread(ns: pl.Expr) -> pl.Expr:
        return pl.struct((ns.quantile(q, "linear") / 1000).round(3).alias(name) for name, q in _SHARES.items())

    moves_bytes = pl.col("first") & pl.col("has_rate") & pl.col("bus_factor").is_not_null()
    has_rate = moves_bytes & pl.col("is_known")
    rate = (pl.col("bytes") / pl.col("time")).filter(has_rate)  # bytes/ns equals GB/s
    once = pl.col("first") & (pl.col("pass") == 0)

    def rates(factor: pl.Expr | float) -> pl.Expr:
        of_times = pl.struct((rate.quantile(1 - q, "linear") * factor).alias(name) for name, q in _SHARES.items())
        return pl.when(has_rate.any()).then(of_times)

    rows = times.group_by("op", "pg", "size_from", "size_to", maintain_order=True).agg(
        pl.first("ranks"),
        calls=once.sum(),
        bytes=pl.col("bytes").filter(once).sum(),
        time_us=spread(pl.col("time").filter("first")),
        **{f"{name}_us": spread(pl.col(name)) for name in ("issue", "completion", "waiting")},
        algbw_gb_per_s=rates(1.0),
        busbw_gb_per_s=rates(pl.first("bus_factor")),
        late_ends=(once & pl.col("late_end")).sum(),
        unknown_times=(moves_bytes & ~pl.col("is_known")).sum(),
    )
    result = []
    for row in rows.to_dicts():
        spreads = {name: Percentiles(**one) for name, one in row.items() if isinstance(one, dict)}
        result.append(ReplayRow(**row | spreads))
    return sorted(result, key=lambda row: -row.time_us.p50 * row.calls)


def blocks(times: pl.DataFrame, plan: Plan, field: str) -> list[CallTimes]:
    """Return the times of calls by a `field` of their records (`source` or `step`), the longest block first. Calls
    without a value are skipped; a call with several values counts for each."""
    named = [
        (rank.rank, index, str(getattr(call.record, field)))
        for rank in plan.ranks
        for index, call in enumerate(rank.calls)
        if getattr(call.record, field) is not None
    ]
    names = pl.DataFrame(named, {"rank": pl.Int64, "index": pl.Int64, "name": pl.String}, orient="row")
    totals = (
        times.join(names, on=("rank", "index"), maintain_order="left")
        .with_columns(once=pl.struct("name", "call", "pass").is_first_distinct())
        .group_by("name", "pass", maintain_order=True)
        .agg(
            calls=pl.col("once").sum(),
            bytes=pl.col("bytes").filter("once").sum(),
            time_us=pl.col("time").filter("once").sum(),
            waiting_us=pl.col("waiting").sum() / plan.world_size,
            span_us=pl.col("completed").max() - pl.col("began").min(),
        )
    )
    spread = ("time_us", "waiting_us", "span_us")
    rows = totals.group_by("name", maintain_order=True).agg(pl.first("calls", "bytes"), *spread)
    result = [CallTimes(**row | {name: percentiles_us(row[name]) for name in spread}) for row in rows.to_dicts()]
    return sorted(result, key=lambda block: -block.time_us.p50)


def batches(times: pl.DataFrame, calls: int) -> Batches | None:
    """Return the times of `calls` consecutive calls of each rank; None if no rank has as many."""
    rows = (
        times.group_by("rank", "pass", pl.col("index") // calls)
        .agg(took=pl.col("completed").max() - pl.col("began").min(), count=pl.len())
        .filter(pl.col("count") == calls)
    )
    if rows.is_empty():
        return None
    per_pass = len(rows.filter(pl.col("pass") == 0))
    return Batches(calls=calls, batches=per_pass, time_us=percentiles_us(rows["took"].to_list()))


def end_to_end_ns(results: Sequence[RankResult]) -> list[int]:
    """Return, by pass, the time from the first rank's start to the last rank's end."""
    return [
        max(one.passes[n].end + one.offset_ns for one in results)
        - min(one.passes[n].start + one.offset_ns for one in results)
        for n in range(len(results[0].passes))
    ]


def compare(plan: Plan, times: pl.DataFrame, results: Sequence[RankResult]) -> Comparison:
    """Compare the times of a replay, from `measure`, with the recorded times in `plan`.

    Compares the completion of a call on one rank, waiting time included. Compares the collective too: in the replay
    from the last arrival, in the recording the shortest completion, which is the last rank's if no rank can end before
    it arrives. So broadcasts, reduces and sends do not count. The relative error is |replayed - recorded| / recorded,
    where the replayed time is the median over the passes. Unknown times, recorded or replayed, do not count.
    """
    size = ("op", "size_from", "size_to")
    calls = times.group_by("call", "rank", maintain_order=True).agg(
        pl.col(*size, "record_op", "recorded").first(),
        pl.col("completion").median().alias("replayed"),
        pl.col("time").filter("is_known").median(),
    )
    releasing = [name for name, row in OPERATIONS.items() if row.releases_all]
    calls = calls.with_columns(members=pl.len().over("call"))
    timed = calls.filter((pl.col("recorded") > 0) & (pl.col("replayed") > 0))
    whole = (
        timed.filter(pl.col("record_op").is_in(releasing) & pl.col("time").is_not_null())
        .group_by("call", maintain_order=True)
        .agg(pl.col(*size, "members").first(), pl.len(), pl.col("recorded").min(), replayed=pl.col("time").first())
        .filter(pl.col("len") == pl.col("members"))
    )
    error = ((pl.col("replayed") - pl.col("recorded")).abs() / pl.col("recorded")).alias("error")
    timed, whole = timed.with_columns(error), whole.with_columns(error)
    medians = {f"{name}_us": pl.col(name).median() / 1000 for name in ("recorded", "replayed")}
    errors = {
        "error_p50": pl.col("error").median(),
        "error_p95": pl.col("error").quantile(0.95, "linear"),
    }
    ratio = (pl.col("replayed") / pl.col("recorded")).median()
    rows = timed.group_by(size, maintain_order=True).agg(calls=pl.len(), **medians, ratio=ratio, **errors)
    of_whole = whole.group_by(size).agg(**{f"collective_{name}": one for name, one in (medians | errors).items()})
    rows = rows.join(of_whole, on=size, how="left", maintain_order="left")
    rows = rows.sort(pl.col("recorded_us") * pl.col("calls"), descending=True, maintain_order=True)
    overall = timed.select(**errors).row(0, named=True)
    overall |= whole.select(**{f"collective_{name}": one for name, one in errors.items()}).row(0, named=True)
    return Comparison(
        calls=len(timed),
        without_time=len(calls) - len(timed),
        **overall,
        recorded_end_to_end_us=_recorded_span_us(plan),
        replayed_end_to_end_us=float(np.median(end_to_end_ns(results))) / 1000,
        rows=[Compared(**row) for row in rows.to_dicts()],
    )


def _recorded_span_us(plan: Plan) -> float | None:
    spans = []
    for rank in plan.ranks:
        times = [(call.record.t, call.took_ns or 0) for call in rank.calls if call.record.t]
        if len(times) > 1:
            spans.append(max(t + took for t, took in times) - times[0][0])
    # With some calls skipped, the end is meaningless. With some steps skipped, it is not.
    reasons = plan.coverage().reasons.keys() - {NOT_IN_STEPS}
    return max(spans) / 1000 if spans and not reasons and not plan.damage else None
