"""Replayed against recorded: how close the times of a replay come to those of the recording.

Two times are compared. The completion of a call on one rank (from its begin to its end, waiting for others included)
with what the recording says of that rank; and the collective itself (in the replay from the last arrival, in the
recording the shortest completion among the ranks, which is that of the last to arrive, where none can end before
it: not of broadcasts, reductions to one rank, sends). The relative error is
|replayed - recorded| / recorded, with the median over the passes as the replayed time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from crossrank.comm import OPERATIONS
from crossrank.replay.plan.plan import NOT_IN_STEPS, Plan
from crossrank.replay.results.measure import RankResult, end_to_end_ns
from crossrank.tools.traces.replayed import Compared, Comparison

if TYPE_CHECKING:
    import polars as pl


def compare(plan: Plan, times: pl.DataFrame, results: Sequence[RankResult]) -> Comparison:
    """Set the times of a replay, as `measure` gives them, against those that `plan` has of its recording."""
    import polars as pl

    size = ("op", "size_from", "size_to")
    calls = times.group_by("call", "rank", maintain_order=True).agg(
        pl.col(*size, "record_op", "recorded").first(),
        pl.col("completion").median().alias("replayed"),
        pl.col("time").median(),
    )
    releasing = [name for name, row in OPERATIONS.items() if row.releases_all]
    calls = calls.with_columns(members=pl.len().over("call"))
    timed = calls.filter(pl.col("recorded") > 0)
    whole = (
        timed.filter(pl.col("record_op").is_in(releasing))
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
    # Of calls here and there the end says nothing; of some iterations it does.
    reasons = plan.coverage().reasons.keys() - {NOT_IN_STEPS}
    return max(spans) / 1000 if spans and not reasons and not plan.damage else None
