"""A replayed step compared with the recorded one."""

from __future__ import annotations

import msgspec
import pytest

from crossrank.replay.plan.compute.compute_plan import ComputeOperation, ComputePlan
from crossrank.replay.results.replay_report import rank_bytes
from crossrank.replay.results.whole_step import _estimate_noise, compare_step
from crossrank.replay.run.messages import Computed, Pass, RankResult
from crossrank.tools.traces.replayed import ComputedOperation
from tests.unit.replay.plans import plan_of, record
from tests.unit.replay.ranks import result

MS = 1_000_000
BARRIER = record("barrier")


def compute(*, own_ms: int | None = 3) -> ComputePlan:
    """Two steps of one operation of 3 ms after a gap of 1 ms."""
    one = ComputeOperation(node=1, name="aten::mm", schema=0, took_ns=3 * MS, gap_ns=MS)
    return ComputePlan(
        operations=[one, one],
        schemas=["aten::mm(Tensor self, Tensor mat2) -> Tensor"],
        slots=[],
        blocks=[],
        steps=[0, 1],
        bytes=64,
        unprofiled_ns=[4 * MS] * 5,
        own_ns=own_ms and own_ms * MS,
        other_steps=3,
        profiled_ns=[5 * MS, 7 * MS],
        exposed_ns=MS,
    )


def replayed(rank: int) -> RankResult:
    """Three passes of two steps of 5 ms, of which 1 ms is a wait for communication."""
    empty = dict.fromkeys(("launched", "issued", "began", "completed"), b"")
    one = Pass(**empty, start=0, end=10 * MS, waited=2 * MS, steps=[0, 5 * MS])
    computed = Computed(
        operations={"aten::mm": (2, 6 * MS, 8 * MS)},
        host_ns=2 * MS,
        host_once_ns=MS // 2,
        slowness=2.0,
        failed=[],
        peak_bytes=1000 + rank,
    )
    return msgspec.structs.replace(result(rank), passes=[one] * 3, computed=computed)


def test_a_step_is_compared_by_its_parts() -> None:
    plan = plan_of([BARRIER], [BARRIER])
    for rank in plan.ranks:
        rank.compute = compute()
    found = compare_step(plan, [replayed(0), replayed(1)])
    assert found is not None
    assert (found.steps, found.recorded_steps, found.other_steps) == (2, 10, 6)
    assert (found.replayed_ms, found.replayed_p95_ms, found.recorded_ms, found.profiled_ms) == (5.0, 5.0, 4.0, 6.0)
    assert (found.profiled_operations_ms, found.profiled_between_ms) == (3.0, 1.0)
    assert (found.exposed_ms, found.recorded_exposed_ms, found.host_ms, found.host_once_ms) == (1.0, 0.5, 1.0, 0.25)
    assert found.own_ratio == pytest.approx(4 / (2 * 3))  # of a machine that is half as fast
    assert found.noise == 0.0
    assert (found.bytes_per_rank, found.peak_bytes) == (64, 1001)
    mm = ComputedOperation(name="aten::mm", count=1.0, recorded_us=3000.0, profiled_us=4000.0, replayed_us=3000.0)
    assert found.operations == [mm]


def test_ratios_are_unknown_without_recorded_steps() -> None:
    plan = plan_of([BARRIER])
    plan.ranks[0].compute = msgspec.structs.replace(compute(own_ms=None), unprofiled_ns=[], profiled_ns=[])
    found = compare_step(plan, [replayed(0)])
    assert found is not None
    assert (found.recorded_ms, found.ratio, found.own_ratio, found.noise, found.profiled_ms) == (None,) * 5


def test_a_replay_of_calls_alone_has_no_step() -> None:
    assert compare_step(plan_of([BARRIER]), [result(0)]) is None


FIVE = [98.0, 99.0, 100.0, 101.0, 102.0]


@pytest.mark.parametrize(
    ("replayed", "recorded", "ranks", "noise"),
    [
        # The interval of a median of five reaches 0.44 of them to each side: from 98.25 to 101.75.
        (FIVE, [100.0] * 5, 1, 0.0175),
        (FIVE, FIVE, 1, 0.0175 * 2**0.5),
        # Steps of two ranks wait for each other: ten are five.
        (FIVE * 2, [100.0] * 10, 2, 0.02),
        ([0.0] * 5, [100.0] * 5, 1, None),
        (FIVE[:4], [100.0] * 5, 1, None),
        (FIVE * 2, [100.0] * 9, 2, None),
    ],
)
def test_the_noise_is_half_the_interval_of_both_medians(
    replayed: list[float], recorded: list[float], ranks: int, noise: float | None
) -> None:
    assert _estimate_noise(replayed, recorded, ranks) == (None if noise is None else pytest.approx(noise, abs=1e-4))


def test_changed_calls_need_their_own_tensors_next_to_the_computation() -> None:
    (rank,) = plan_of([record("all_reduce")]).ranks
    assert rank_bytes(rank) == 16
    rank.compute = compute()
    assert rank_bytes(rank) == 64
    rank.calls[0].record = msgspec.structs.replace(rank.calls[0].record, inputs=[[8]], outputs=[[8]], bytes=32)
    assert rank_bytes(rank) == 64 + 32
