"""Parts of an exchange of which only totals are known add up on both sides."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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


def test_an_exchange_without_splits_gets_some_and_it_is_said() -> None:
    first = record("all_to_all", c10d="alltoall_base_", inputs=[[5, 2]], outputs=[[3, 2]])
    second = record("all_to_all", c10d="alltoall_base_", inputs=[[1, 2]], outputs=[[3, 2]])
    plan = plan_of([first], [second])
    assert [rank.calls[0].record.in_split for rank in plan.ranks] == [[3, 2], [0, 1]]
    assert [rank.calls[0].record.out_split for rank in plan.ranks] == [[3, 0], [2, 1]]
    assert plan.notes[0].startswith("1 uneven all_to_all(s) have no recorded splits: parts were chosen")
