"""Replayed against recorded: how close the times of a replay come to those of the recording.

Two times are compared. The completion of a call on one rank (from its begin to its end, waiting for others included)
with what the recording says of that rank; and the collective itself (in the replay from the last arrival, in the
recording the shortest completion among the ranks, which is that of the last to arrive, where none can end before
it: not of broadcasts, reductions to one rank, sends). The relative error is
|replayed - recorded| / recorded, with the median over the passes as the replayed time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from crossrank.comm import OPERATIONS
from crossrank.replay.plan.plan import NOT_IN_STEPS, Plan
from crossrank.replay.results.measure import Measured, RankResult, end_to_end_ns, percentile
from crossrank.tools.analysis.buckets import bucket_of


class Compared(msgspec.Struct, kw_only=True):
    """One operation and size bucket. Times in us."""

    op: str
    size_from: int
    size_to: int
    calls: int
    """Calls of single ranks with a recorded time."""
    recorded_us: float
    """Median completion."""
    replayed_us: float
    ratio: float
    """Median of replayed / recorded: below 1, the replay was faster."""
    error_p50: float
    """Relative error of the completion, median and 95th percentile over the calls."""
    error_p95: float
    collective_recorded_us: float | None
    """Median of the collectives of which every rank's time is recorded; None where there is none."""
    collective_replayed_us: float | None
    collective_error_p50: float | None
    collective_error_p95: float | None


class Comparison(msgspec.Struct, kw_only=True):
    """A replay beside its recording."""

    calls: int
    """Calls of single ranks that could be compared."""
    without_time: int
    """Replayed calls whose duration is not recorded."""
    error_p50: float | None
    """Relative error of the completions over all compared calls."""
    error_p95: float | None
    collective_error_p50: float | None
    collective_error_p95: float | None
    recorded_end_to_end_us: float | None
    """From a rank's first launch to its last call's launch or end, the longest of all ranks; None without times."""
    replayed_end_to_end_us: float
    """Median over the passes."""
    rows: list[Compared]


def compare(plan: Plan, measured: Sequence[Measured], results: Sequence[RankResult]) -> Comparison:
    """Set the times of a replay against those that `plan` brought from its recording."""
    errors: dict[tuple[str, tuple[int, int]], list[tuple[float, float, float]]] = defaultdict(list)
    collective: dict[tuple[str, tuple[int, int]], list[tuple[float, float, float]]] = defaultdict(list)
    without = 0
    for call in measured:
        size = call.op, bucket_of(call.bytes)
        took = {}
        for rank, (index, _) in call.records.items():
            recorded = plan.ranks[rank].calls[index].took_ns
            if not recorded:
                without += 1
                continue
            took[rank] = recorded
            errors[size].append(_error(recorded, percentile(call.completion[rank], 0.5)))
        if len(took) == len(call.records) and OPERATIONS[call.record.op].releases_all:
            collective[size].append(_error(min(took.values()), percentile(call.time, 0.5)))
    everything = [one for found in errors.values() for one in found]
    whole = [one for found in collective.values() for one in found]
    rows = [_row(op, size, found, collective.get((op, size), [])) for (op, size), found in errors.items()]
    return Comparison(
        calls=len(everything),
        without_time=without,
        error_p50=_share(everything, 0.5),
        error_p95=_share(everything, 0.95),
        collective_error_p50=_share(whole, 0.5),
        collective_error_p95=_share(whole, 0.95),
        recorded_end_to_end_us=_recorded_span_us(plan),
        replayed_end_to_end_us=percentile(end_to_end_ns(results), 0.5) / 1000,
        rows=sorted(rows, key=lambda row: -row.recorded_us * row.calls),
    )


def _error(recorded: float, replayed: float) -> tuple[float, float, float]:
    return recorded, replayed, abs(replayed - recorded) / recorded


def _share(found: Sequence[tuple[float, float, float]], share: float) -> float | None:
    return percentile([error for _, _, error in found], share) if found else None


def _row(
    op: str,
    size: tuple[int, int],
    found: list[tuple[float, float, float]],
    collective: list[tuple[float, float, float]],
) -> Compared:
    def median_us(rows: list[tuple[float, float, float]], column: int) -> float | None:
        return percentile([row[column] for row in rows], 0.5) / 1000 if rows else None

    return Compared(
        op=op,
        size_from=size[0],
        size_to=size[1],
        calls=len(found),
        recorded_us=median_us(found, 0) or 0.0,
        replayed_us=median_us(found, 1) or 0.0,
        ratio=percentile([replayed / recorded for recorded, replayed, _ in found], 0.5),
        error_p50=_share(found, 0.5) or 0.0,
        error_p95=_share(found, 0.95) or 0.0,
        collective_recorded_us=median_us(collective, 0),
        collective_replayed_us=median_us(collective, 1),
        collective_error_p50=_share(collective, 0.5),
        collective_error_p95=_share(collective, 0.95),
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
