"""Compares a replayed step with the recorded step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median

import numpy as np

from crossrank.replay.plan.compute.compute_plan import ComputePlan, coverage_of
from crossrank.replay.plan.plan import Plan
from crossrank.replay.run.messages import RankResult
from crossrank.tools.traces.replayed import ComputedOperation, StepComparison

_SHOWN = 200
_MIN_STEPS = 5
"""The fewest steps of a rank for an interval of their median."""


def compare_step(plan: Plan, results: Sequence[RankResult]) -> StepComparison | None:
    """Return the comparison of steps; None if no computation was replayed."""
    computes = {rank.rank: rank.compute for rank in plan.ranks if rank.compute is not None}
    if not computes:
        return None
    recorded = [one.compute for one in plan.ranks if one.compute is not None and not one.is_copy]
    steps = max(len(one.steps) for one in computes.values())
    took = [
        step / (len(computes[result.rank].steps) // len(one.steps))
        for result in results
        for one in result.passes
        if one.steps
        for step in _step_durations(one.steps, one.end)
    ]
    waited = [one.waited / len(computes[result.rank].steps) for result in results for one in result.passes if one.steps]
    unprofiled = [ns for one in recorded for ns in one.unprofiled_ns]
    profiled = [ns for one in recorded for ns in one.profiled_ns]
    timed = [one for one in recorded if any(op.gap_ns for op in one.operations)]
    exposed = [one.exposed_ns / len(one.steps) for one in timed]
    on_host = [one for one in timed if not any(op.on_device for op in one.operations)]
    between = [sum(op.gap_ns for op in one.operations) / len(one.steps) for one in on_host]
    within = [sum(op.took_ns for op in one.operations) / len(one.steps) for one in on_host]
    failed = [
        row
        for result in results
        if result.computed is not None and not plan.ranks[result.rank].is_copy
        for row in result.computed.failed
    ]
    computed = [(one.computed, len(computes[one.rank].steps)) for one in results if one.computed is not None]
    return StepComparison(
        coverage=coverage_of(recorded, failed),
        steps=steps,
        replayed_ms=median(took) / 1e6,
        replayed_p95_ms=float(np.quantile(took, 0.95)) / 1e6,
        recorded_ms=median(unprofiled) / 1e6 if unprofiled else None,
        recorded_steps=len(unprofiled),
        own_ratio=_compute_own_ratio(computes, results),
        noise=_estimate_noise(took, unprofiled, len(results)),
        other_steps=sum(one.other_steps for one in recorded),
        profiled_ms=median(profiled) / 1e6 if profiled else None,
        profiled_operations_ms=fmean(within) / 1e6 if within else None,
        profiled_between_ms=fmean(between) / 1e6 if between else None,
        exposed_ms=median(waited) / 1e6,
        recorded_exposed_ms=fmean(exposed) / 1e6 if exposed else None,
        host_ms=fmean(one.host_ns / count for one, count in computed if count) / 1e6,
        host_once_ms=fmean(one.host_once_ns / count for one, count in computed if count) / 1e6,
        bytes_per_rank=max(one.bytes for one in computes.values()),
        peak_bytes=max((one.peak_bytes for one, _ in computed), default=0),
        operations=_join_operations(computes, results)[:_SHOWN],
    )


def _step_durations(begins: Sequence[int], end: int) -> list[int]:
    return [later - earlier for earlier, later in zip(begins, [*begins[1:], end], strict=True)]


def _compute_own_ratio(computes: dict[int, ComputePlan], results: Sequence[RankResult]) -> float | None:
    """Return replayed / recorded step time without waits, the recorded one scaled to this machine; mean over ranks."""
    ratios = []
    for one in results:
        plan, slowness = computes[one.rank], one.computed.slowness if one.computed is not None else None
        if plan.own_ns and slowness is not None and one.passes:
            own = median(each.own_ns for each in one.passes) / len(plan.steps)
            ratios.append(own / (slowness * plan.own_ns))
    return fmean(ratios) if ratios else None


def _estimate_noise(replayed: Sequence[float], recorded: Sequence[float], ranks: int) -> float | None:
    """Return half the 95 % interval of the ratio of two medians, as a share of it. Ranks of one step wait for each
    other, so only the steps of one rank are independent."""
    shares = []
    for steps in (sorted(replayed), sorted(recorded)):
        count = len(steps) // max(ranks, 1)
        if count < _MIN_STEPS:
            return None
        # The interval of a median in order statistics: count/2 -+ 1.96 sqrt(count)/2.
        half_width = 0.98 * count**0.5 / count
        if not median(steps):
            return None
        low, high = np.quantile(steps, [max(0.0, 0.5 - half_width), min(1.0, 0.5 + half_width)])
        shares.append((high - low) / 2 / median(steps))
    return float(np.hypot(*shares))


def _join_operations(computes: dict[int, ComputePlan], results: Sequence[RankResult]) -> list[ComputedOperation]:
    recorded, replayed, profiled, count = (Counter[str]() for _ in range(4))
    for compute in computes.values():
        for one in compute.operations:
            if one.node and one.call < 0 and not one.on_device:
                recorded[one.name] += one.took_ns
    for result in results:
        rows = result.computed.operations if result.computed is not None else {}
        for name, (how_many, ns, under_profiler) in rows.items():
            replayed[name] += ns
            profiled[name] += under_profiler
            count[name] += how_many
    steps = sum(len(one.steps) for one in computes.values())
    return [
        ComputedOperation(
            name=name,
            count=count[name] / steps,
            recorded_us=recorded[name] / steps / 1000 if recorded[name] else None,
            profiled_us=profiled[name] / steps / 1000 if profiled[name] else None,
            replayed_us=ns / steps / 1000,
        )
        for name, ns in replayed.most_common()
    ]
