"""Calls that are under way together never share memory, and the block is no larger than it has to be for them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from crossrank.replay.plan.memory_plan import Layout, Need, assign_offsets, bytes_needed
from crossrank.replay.plan.plan import PlannedCall
from tests.unit.replay.plans import record


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 3), st.integers(1, 6)), max_size=40))
def test_pieces_that_live_at_once_do_not_overlap(given_needs: list[tuple[int, int, int]]) -> None:
    needs = []
    first = 0
    for size, later, length in given_needs:
        first += later
        needs.append(Need(size, first, first + length))
    layout = assign_offsets(needs)
    assert len(layout.offsets) == len(needs)
    for i, (one, at) in enumerate(zip(needs, layout.offsets, strict=True)):
        assert at % 512 == 0
        assert at + one.bytes <= layout.size
        for other, there in zip(needs[:i], layout.offsets, strict=False):
            alive_together = other.until > one.first and one.bytes and other.bytes
            if alive_together:
                assert at + one.bytes <= there or there + other.bytes <= at


def test_calls_one_after_the_other_share_their_memory() -> None:
    layout = assign_offsets([Need(1 << 20, number, number + 1) for number in range(100)])
    assert layout.size == 1 << 20
    assert set(layout.offsets) == {0}
    assert assign_offsets([]).size == 0
    in_turn = [Need(513, 0, 2), Need(512, 0, 3), Need(1024, 2, 3), Need(1, 2, 3)]
    assert assign_offsets(in_turn) == Layout([0, 1024, 0, 1536], 2048)


def test_what_is_alive_at_once_is_what_a_rank_needs() -> None:
    gather = record("all_gather", inputs=[[4]], outputs=[[8]], dtype="float64")
    calls = [(gather, 2), (record("all_reduce"), 2), (record("barrier"), 3), (record("all_reduce"), 4)]
    assert bytes_needed([PlannedCall(record=one, wait_before=before) for one, before in calls]) == 96 + 16
