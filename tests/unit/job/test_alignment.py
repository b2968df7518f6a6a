"""Calls of two ranks are aligned although a file lacks some, and no call gets a wrong partner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from crossrank.tools.job.alignment import LaneCalls, align
from crossrank.tools.job.collectives import match_collectives
from crossrank.tools.job.job import Job
from crossrank.tools.job.matching import MISSING
from tests.unit.job.test_shifts import rank_times

MS = 1_000_000


def pairs(
    first: list[int],
    second: list[int],
    *,
    operations: int = 1,
    clock: int = 0,
    noise: float = 1000.0,
    period: float = 1e6,
    timed: bool = True,
    even: bool = False,
    steps_of: int = 0,
) -> tuple[int, int]:
    """Return (right, wrong) pairs of ranks whose files have the calls with these numbers, at irregular times."""
    random = np.random.default_rng(7)
    count = max(*first, *second) + 1
    moment = 10**9 + np.cumsum(np.full(count, period) if even else random.exponential(period, count))
    what = random.integers(0, operations, count)
    own, others = (moment[one] + random.normal(0, noise, len(one)) for one in (first, second))
    when, other_when = (timed * one.astype(np.int64) for one in (own, others + clock))
    steps = (np.array(one) // steps_of if steps_of else np.full(len(one), -1) for one in (first, second))
    first_rank, second_rank = (
        LaneCalls(what[one], at, step) for one, at, step in zip((first, second), (when, other_when), steps, strict=True)
    )
    found = align(first_rank, second_rank)
    if found is None:
        return 0, 0
    partners = [(number, second[place]) for number, place in zip(first, found, strict=True) if place >= 0]
    right = sum(number == partner for number, partner in partners)
    return right, len(partners) - right


ALL = list(range(60))


def without(*numbers: int) -> list[int]:
    return [number for number in ALL if number not in numbers]


@pytest.mark.parametrize("clock", [0, 5_000_000_123])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (without(30), ALL),
        (ALL, without(3)),
        (without(20), without(40)),
        (without(30, 33), ALL),
        (without(0, 1, 30), without(59)),
    ],
    ids=["one", "one of the other", "one of each", "two", "one and the edges"],
)
def test_calls_that_a_file_lacks_shift_no_other_call(first: list[int], second: list[int], clock: int) -> None:
    right, wrong = pairs(first, second, clock=clock)
    assert (wrong, right >= len({*first} & {*second}) - 2) == (0, True)


def test_operations_decide_where_no_times_are_known() -> None:
    right, wrong = pairs(without(30), ALL, operations=4, timed=False)
    assert (wrong, right >= 57) == (0, True)


def test_equal_calls_without_times_have_no_certain_partner() -> None:
    assert pairs(without(30), ALL, timed=False) == (0, 0)


@pytest.mark.parametrize("clock", [700_000, 5_000_000_123])
def test_steps_decide_where_every_step_is_like_the_others(clock: int) -> None:
    right, wrong = pairs(without(4), ALL, clock=clock, even=True, steps_of=10)
    assert (wrong, right >= 57) == (0, True)
    assert pairs(without(4), ALL, clock=clock, even=True)[1] == 0


def test_times_that_differ_by_more_than_the_time_between_calls_decide_nothing() -> None:
    assert pairs(without(30), ALL, noise=3e6) == (0, 0)


def test_a_shift_of_hundreds_of_thousands_of_calls_takes_seconds() -> None:
    calls = list(range(20_000))
    assert pairs([one for one in calls if one != 5000], calls)[1] == 0


def test_a_call_that_one_of_three_ranks_lacks_is_joined_on_the_others(tmp_path: Path) -> None:
    numbers = [range(20), range(20), [number for number in range(20) if number != 7]]
    ranks = [rank_times(tmp_path, rank, own, jitter=3000, ranks=3) for rank, own in enumerate(numbers)]
    found = match_collectives(Job.match(ranks))
    assert found.unmatched == {}
    assert found.collectives["ranks"].value_counts().sort("ranks").rows() == [(2, 1), (3, 19)]
    assert found.collectives.filter(pl.col("ranks") == 2)["is_upper_bound"].to_list() == [True]
    assert found.calls.group_by("collective").agg(pl.n_unique("called_ns"))["called_ns"].to_list() == [1] * 20


def test_a_call_that_the_only_other_rank_lacks_is_counted(tmp_path: Path) -> None:
    numbers = [range(20), [number for number in range(20) if number != 7]]
    ranks = [rank_times(tmp_path, rank, own, jitter=3000) for rank, own in enumerate(numbers)]
    found = match_collectives(Job.match(ranks))
    assert found.unmatched == {MISSING: 1}
    joined = found.calls.filter(pl.len().over("collective") == 2)
    assert len(joined) == 2 * 19
    assert joined.group_by("collective").agg(pl.n_unique("called_ns"))["called_ns"].to_list() == [1] * 19
