"""Where a wait is placed that no file tells of, and that ranks which would wait for ever get another place for it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrank.comm import CommRecord
from crossrank.errors import CrossrankError
from crossrank.replay.plan.match import mismatches
from crossrank.replay.plan.plan import PlannedCall, RankPlan, launches
from crossrank.replay.plan.schedule import Walk, keys_of, place_waits, returns_early, walk
from tests.unit.replay.plans import irecv, isend, plan_of, record, recv, send, waits

_BUCKET = record("all_reduce", is_async=True)
_GATHER = {"is_async": True, "inputs": [[4]], "outputs": [[8]]}
_STEPS = [record("all_reduce", is_async=True, step=step) for step in (1, 1, 2)]
_UNTIL_BLOCKING = (
    "where no wait was recorded, the replay waits before the next blocking call of the rank, or at the end of its step"
)


@pytest.mark.parametrize(
    ("calls", "placed", "notes"),
    [
        ([record("all_reduce", is_async=False), record("barrier")], [1, 2], []),
        ([_BUCKET, _BUCKET, record("barrier"), _BUCKET], [2, 2, 3, 4], [_UNTIL_BLOCKING]),
        (_STEPS, [2, 2, 3], [_UNTIL_BLOCKING]),
        # A gather that C++ makes does not let its rank go on; sharded training has two of its own under way.
        ([record("all_gather", **_GATHER), record("barrier")], [1, 2], []),
        ([record("all_gather", api="all_gather_single", **_GATHER)] * 5, [2, 2, 4, 4, 5], [_UNTIL_BLOCKING]),
    ],
)
def test_the_plan_places_the_wait_of_each_call(calls: list[CommRecord], placed: list[int], notes: list[str]) -> None:
    plan = plan_of(calls, calls)
    assert (waits(plan), plan.notes) == (placed, notes)


def test_calls_of_a_batch_have_one_wait() -> None:
    ranks = [[isend(1 - rank, batch=0), irecv(1 - rank, batch=0), record("barrier", id=2)] for rank in (0, 1)]
    plan = plan_of(*ranks)
    assert waits(plan) == [2, 2, 3]
    assert launches(plan.ranks[0].calls) == [(0, 2), (2, 3)]


def test_a_wait_moves_after_the_barrier_if_the_peer_sends_after_it() -> None:
    plan = plan_of([irecv(1), record("barrier")], [record("barrier"), send(0)])
    assert waits(plan) == [2, 2]
    assert plan.notes == ["where no wait was recorded, the replay waits at the end of its step"]


def test_two_ranks_that_send_first_do_not_block_each_other() -> None:
    plan = plan_of([send(1), recv(1)], [send(0), recv(0)])
    assert waits(plan) == [2, 2]
    assert "block each other" in plan.notes[0]


@pytest.mark.parametrize(
    ("op", "fields", "early"),
    [
        ("send", {"api": "isend"}, True),
        ("recv", {"api": "recv"}, False),
        ("send", {}, False),
        ("send", {"batch": 0}, True),
        ("send", {"is_async": True}, True),
        ("all_reduce", {"is_async": True}, True),
        ("all_gather", {"is_async": True}, False),
        ("all_gather", {"is_async": True, "api": "all_gather"}, True),
        ("all_reduce", {"is_async": False, "api": "all_reduce"}, False),
        ("barrier", {"is_async": True, "api": "barrier"}, True),
        ("barrier", {"is_async": True}, False),
        ("barrier", {"is_async": False, "api": "barrier"}, False),
    ],
)
def test_returns_early_finds_asynchronous_calls(op: str, fields: dict[str, Any], early: bool) -> None:
    assert returns_early(record(op, **fields)) is early


def _made(calls: list[tuple[CommRecord, int]]) -> list[PlannedCall]:
    return [PlannedCall(record=one, wait_before=wait) for one, wait in calls]


def test_a_walk_reports_the_call_each_rank_waits_in() -> None:
    alone = RankPlan(rank=0, calls=_made([(record("all_reduce"), 1), (record("barrier"), 2)]))
    other = RankPlan(rank=1, calls=_made([(record("all_reduce"), 1)]))
    found = walk([alone, other], {"0": [0, 1]})
    assert found.reached == {0: 1, 1: 1}
    assert not found.ends
    assert found.over == {0: bytearray([1, 0]), 1: bytearray([1])}


def test_a_walk_counts_calls_launched_before_an_endless_wait_as_made() -> None:
    both_then_wait = _made([(record("all_reduce"), 2), (record("barrier"), 2)])
    found = walk([RankPlan(rank=0, calls=both_then_wait), RankPlan(rank=1, calls=[])], {"0": [0, 1]})
    assert (found.reached[0], found.made[0]) == (0, bytearray([1, 1]))


def test_stuck_ranks_are_reported_even_without_a_diagnosed_fault() -> None:
    plan = plan_of(*[[record("all_reduce"), record("barrier")]] * 2)
    over = dict.fromkeys((0, 1), bytearray([1, 0]))
    made = dict.fromkeys((0, 1), bytearray([1, 1]))
    stuck = Walk(reached={0: 1, 1: 2}, made=made, over=over, keys={rank.rank: keys_of(rank) for rank in plan.ranks})
    assert mismatches(plan, stuck) == ["rank 0 waits forever in barrier (call 1 of rank-0)"]


def test_each_thread_of_a_rank_waits_only_for_its_own_group() -> None:
    """On rank 0 one thread is first, on rank 1 the other: in one line they would wait for each other for ever."""
    first, second = (record("all_reduce", pg=pg, thread=thread) for pg, thread in (("a", 1), ("b", 2)))
    both = {"a": [0, 1], "b": [0, 1]}
    plan = plan_of([first, second], [second, first], groups=both)
    assert [call.blocking for rank in plan.ranks for call in rank.calls] == [True] * 4
    alone = [msgspec.structs.replace(one, thread=7) for one in (first, second)]
    with pytest.raises(CrossrankError, match="the ranks do not fit together"):
        plan_of(alone, alone[::-1], groups=both)


_OPS = st.sampled_from(["blocking", "async", "batch"])


@given(st.lists(st.tuples(_OPS, st.integers(0, 2)), max_size=12))
def test_jobs_with_identical_ranks_always_end(program: list[tuple[str, int]]) -> None:
    ranks = []
    for rank in (0, 1):
        calls: list[PlannedCall] = []
        for number, (kind, step) in enumerate(program):
            if kind == "batch":
                for one in (isend(1 - rank, batch=number, step=step), irecv(1 - rank, batch=number, step=step)):
                    calls.append(PlannedCall(record=one, wait_before=-1))
            else:
                one = record("all_reduce", is_async=kind == "async", api="all_reduce", step=step)
                calls.append(PlannedCall(record=one, wait_before=-1))
        ranks.append(RankPlan(rank=rank, calls=calls))
    _, found = place_waits(ranks, {"0": [0, 1]})
    assert found.ends
    for rank_plan in ranks:
        for index, call in enumerate(rank_plan.calls):
            assert index < call.wait_before <= len(rank_plan.calls)
