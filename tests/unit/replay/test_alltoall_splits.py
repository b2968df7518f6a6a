"""Parts of an exchange of which only totals are known add up on both sides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrank.comm import CommRecord
from crossrank.errors import CrossrankError
from crossrank.replay.plan.counterparts import fit
from tests.unit.replay.plans import plan_of, record


@given(st.lists(st.lists(st.integers(0, 99), min_size=3, max_size=3), min_size=3, max_size=3))
def test_any_totals_that_agree_are_met(table: list[list[int]]) -> None:
    rows = [sum(row) for row in table]
    columns = [sum(column) for column in zip(*table, strict=True)]
    made = fit(rows, columns)
    assert [sum(row) for row in made] == rows
    assert [sum(column) for column in zip(*made, strict=True)] == columns
    assert all(part >= 0 for row in made for part in row)


def exchange(inputs: list[int], outputs: list[int]) -> CommRecord:
    return record("all_to_all", c10d="alltoall_base_", inputs=[inputs], outputs=[outputs])


def test_an_exchange_without_splits_gets_some_and_it_is_said() -> None:
    even = exchange([4], [4])
    plan = plan_of([even, exchange([5, 2], [3, 2])], [even, exchange([1, 2], [3, 2])])
    assert [[call.record.in_split for call in rank.calls] for rank in plan.ranks] == [[None, [3, 2]], [None, [0, 1]]]
    assert [rank.calls[1].record.out_split for rank in plan.ranks] == [[3, 0], [2, 1]]
    assert plan.notes[0].startswith("1 uneven all_to_all(s) have no recorded splits: parts were chosen")


@pytest.mark.parametrize("other", [exchange([1], [4]), exchange([1, 2], [3, 2])])
def test_an_exchange_whose_totals_or_rows_differ_is_refused(other: CommRecord) -> None:
    ranks = [exchange([5], [3]), record("barrier")], [other, record("barrier")]
    with pytest.raises(CrossrankError) as refused:
        plan_of(*ranks)
    what = "(all_to_all #1 on '0'): what its ranks send is not what they receive"
    assert str(refused.value) == (
        f"rank-0: rank 0, call 0 {what}; rank-1: rank 1, call 0 {what}; --partial leaves such calls out"
    )
    assert plan_of(*ranks, partial=True).coverage().reasons == {"it contradicts itself": 2}
