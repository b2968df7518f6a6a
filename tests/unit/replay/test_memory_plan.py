"""Calls that are under way together never share memory, and the block is no larger than it has to be for them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from crossrank.replay.plan.memory_plan import Need, assign_offsets, bytes_needed
from crossrank.replay.plan.plan import PlannedCall
from tests.unit.replay.plans import record


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 3), st.integers(1, 6)), max_size=40))
def test_pieces_that_live_at_once_do_not_overlap(given_needs: list[tuple[int, int, int]]) -> None:
    needs = []
    first = 0
    for each, later, length in given_needs:
        first += later
        needs.append(Need(each, first, first + length))
    offsets, size = assign_offsets(needs)
    assert len(offsets) == len(needs)
    for i, (one, at) in enumerate(zip(needs, offsets, strict=True)):
        assert at % 512 == 0
        assert at + one.bytes <= size
        for other, there in zip(needs[:i], offsets, strict=False):
            alive_together = other.until > one.first and one.bytes and other.bytes
            if alive_together:
                assert at + one.bytes <= there or there + other.bytes <= at


def test_consecutive_calls_share_their_memory() -> None:
    assert assign_offsets([Need(1 << 20, number, number + 1) for number in range(100)]) == ([0] * 100, 1 << 20)
    assert assign_offsets([]) == ([], 0)
    in_turn = [Need(513, 0, 2), Need(512, 0, 3), Need(1024, 2, 3), Need(1, 2, 3)]
    assert assign_offsets(in_turn) == ([0, 1024, 0, 1536], 2048)


def test_a_rank_needs_memory_for_concurrent_calls() -> None:
    gather = record("all_gather", inputs=[[4]], outputs=[[8]], dtype="float64")
    calls = [(gather, 2), (record("all_reduce"), 2), (record("barrier"), 3), (record("all_reduce"), 4)]
    assert bytes_needed([PlannedCall(record=one, wait_before=before) for one, before in calls]) == 96 + 16
