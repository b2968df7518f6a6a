"""What the host did between operations: what a recording has beyond a replay under the same profiler."""

from __future__ import annotations

import pytest

from crossrank.replay.plan.compute.compute_plan import ComputeOperation, ComputePlan
from crossrank.replay.run.host_time import gaps_of, host_times, slowness
from crossrank.tools.traces.kineto import HostEvent


def plan(*gaps: tuple[int, int, int], range_ns: int = 0, names: str = "", steps: tuple[int, ...] = (0,)) -> ComputePlan:
    """Operations with (gap, ranges in it, split operations in it)."""
    operations = [
        ComputeOperation(name=name, gap_ns=gap, ranges=ranges, split=split)
        for (gap, ranges, split), name in zip(gaps, names.ljust(len(gaps)), strict=True)
    ]
    return ComputePlan(operations=operations, schemas=[], slots=[], blocks=[], range_ns=range_ns, steps=list(steps))


@pytest.mark.parametrize(
    ("gaps", "profiled", "before"),
    [
        # The host idles for what the replay has less of.
        ([(50_000, 0, 0), (9_000, 0, 0), (0, 0, 0)], [[7_000, 7_000, 7_000]], [43_000, 2_000, 0]),
        # A gap that is shorter than the replay's is made up for by the next.
        ([(4_000, 0, 0), (9_000, 0, 0), (9_000, 0, 0)], [[7_000, 7_000, 7_000]], [0, 0, 1_000]),
        # Nodes in a gap cost the profiler time, and split operations as much as one that runs.
        ([(30_000, 2, 1)], [[6_000], [8_000], [7_000]], [30_000 - 7_000 - 2 * 4_000 - 7_000]),
        # A gap that the replay spent waiting is taken for a typical one.
        ([(20_000, 0, 0)] * 3, [[6_000, None, 6_000]], [14_000, 14_000, 14_000]),
    ],
)
def test_the_host_idles_for_the_extra_time_of_the_recording(
    gaps: list[tuple[int, int, int]], profiled: list[list[int | None]], before: list[int]
) -> None:
    assert host_times(plan(*gaps, range_ns=4_000), profiled).before == before


def test_extra_host_time_of_one_step_is_skipped_and_reported() -> None:
    """In the second of three steps another thread had the core for 3 ms before `b`, and 20 us before `a`."""
    ms = 1_000_000
    gaps = [400_000, 10_000, 420_000, 3 * ms, 410_000, 10_000]
    given = plan(*((gap, 0, 0) for gap in gaps), names="ababab", steps=(0, 2, 4))
    found = host_times(given, [[5_000] * 6])
    assert found.before == [395_000, 5_000, 415_000, 5_000, 405_000, 5_000]
    assert found.once == 3 * ms - 10_000


def test_different_steps_are_compared_at_shared_operations() -> None:
    given = plan(*((gap, 0, 0) for gap in (300_000, 10_000, 300_000, 200_000, 800_000)), names="abacb", steps=(0, 2))
    assert host_times(given, [[0] * 5]) == ([300_000, 10_000, 300_000, 200_000, 10_000], 790_000)


def test_a_pause_in_every_step_is_host_time() -> None:
    given = plan((5_000_000, 0, 0), (5_100_000, 0, 0), names="aa", steps=(0, 1))
    assert host_times(given, [[0, 0]]) == ([5_000_000, 5_000_000], 100_000)


def timed(*took: int, steps: tuple[int, ...] = (0,)) -> ComputePlan:
    operations = [ComputeOperation(node=1, took_ns=ns) for ns in took]
    return ComputePlan(operations=operations, schemas=[], slots=[], blocks=[], steps=list(steps))


def test_slowness_is_the_ratio_of_operation_times() -> None:
    assert slowness(timed(100, 100, 100), [[200, 150, 220], [200, None, 240]]) == 2.0
    assert slowness(timed(100, 100), [[110, 120]]) == 1.0
    assert slowness(timed(100, 100), [[None, None]]) is None


def test_a_step_slowed_by_other_processes_does_not_make_the_replay_machine_faster() -> None:
    assert slowness(timed(100, 100, 300, 300, steps=(0, 2)), [[150, 150, 150, 150]]) == 1.5
    assert slowness(timed(300, 300), [[100, 100]]) == 1.0


def event(name: str, start: int, end: int, tid: int = 1) -> HostEvent:
    return HostEvent(name, 1, tid, start, end, None, None, -1, b"")  # type: ignore[arg-type]


def test_gaps_and_times_come_from_outermost_events_of_the_busiest_thread() -> None:
    events = [
        event("aten::add", 100, 200),
        event("aten::linear", 230, 400),
        event("aten::addmm", 240, 390),
        event("gloo:all_reduce", 210, 500, tid=2),
        event("aten::noise", 410, 420),
        event("aten::mul", 450, 470),
    ]
    before, took = gaps_of(["aten::add", "", "aten::linear", "aten::mul", "aten::lost"], events)
    assert before == [None, None, 30, None, None]
    assert took == [100, None, 170, 20, None]
