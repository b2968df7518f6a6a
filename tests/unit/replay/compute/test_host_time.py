"""What the host did between operations: what a recording has beyond a replay under the same profiler."""

from __future__ import annotations

from crossrank.replay.plan.compute.compute_plan import ComputeOperation, ComputePlan
from crossrank.replay.run.host_time import gaps_of, host_times
from crossrank.tools.traces.kineto import HostEvent


def plan(*gaps: tuple[int, int, int], range_ns: int = 0) -> ComputePlan:
    """Operations with (gap, ranges in it, split operations in it)."""
    operations = [ComputeOperation(gap_ns=gap, ranges=ranges, split=split) for gap, ranges, split in gaps]
    return ComputePlan(operations=operations, schemas=[], slots=[], blocks=[], range_ns=range_ns)


def test_the_host_idles_for_what_the_replay_has_less_of() -> None:
    given = plan((50_000, 0, 0), (9_000, 0, 0), (0, 0, 0))
    assert host_times(given, [[7_000, 7_000, 7_000]]) == [43_000, 2_000, 0]


def test_a_gap_that_is_shorter_than_the_replays_is_made_up_for_by_the_next() -> None:
    given = plan((4_000, 0, 0), (9_000, 0, 0), (9_000, 0, 0))
    assert host_times(given, [[7_000, 7_000, 7_000]]) == [0, 0, 1_000]


def test_nodes_in_a_gap_cost_the_profiler_time_and_split_operations_as_much_as_one_that_runs() -> None:
    given = plan((30_000, 2, 1), range_ns=4_000)
    assert host_times(given, [[6_000], [8_000], [7_000]]) == [30_000 - 7_000 - 2 * 4_000 - 7_000]


def test_a_gap_that_the_replay_spent_waiting_is_taken_for_a_typical_one() -> None:
    given = plan((20_000, 0, 0), (20_000, 0, 0), (20_000, 0, 0))
    assert host_times(given, [[6_000, None, 6_000]]) == [14_000, 14_000, 14_000]


def event(name: str, start: int, end: int, tid: int = 1) -> HostEvent:
    return HostEvent(name, 1, tid, start, end, None, None, -1, b"")  # type: ignore[arg-type]


def test_gaps_and_times_are_those_of_the_outermost_events_of_the_busiest_thread() -> None:
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
