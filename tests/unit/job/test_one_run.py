"""Whether files are of one run."""

from __future__ import annotations

import pytest

from crossrank.tools.job.one_run import problems
from crossrank.tools.traces.rank_trace import RankTrace

SECOND = 1_000_000_000
BEGIN = 1_780_000_000 * SECOND


def ran(rank: int, begin: int, end: int, clock: str) -> RankTrace:
    span = BEGIN + begin * SECOND, BEGIN + end * SECOND
    return RankTrace(rank=rank, path=f"rank-{rank}", source="comms", span=span, clock=clock)


def called(rank: int, at: int, clock: str, source: str = "comms") -> RankTrace:
    """A rank of which the file says no end, or a span that is none of the run."""
    grid = (BEGIN - 50 * 86_400 * SECOND, BEGIN - 49 * 86_400 * SECOND) if source == "kineto" else None
    trace = RankTrace(rank=rank, path=f"rank-{rank}", source=source, clock=clock, span=grid)
    trace.calls.append(group=0, signature=0, number=1, id=0, called=BEGIN + at * SECOND)
    return trace


@pytest.mark.parametrize(
    ("first", "second", "is_one"),
    [
        # A job that was killed: of each rank only its calls are known.
        (called(0, 0, "a"), called(1, 59, "a"), True),
        (called(0, 0, "a"), called(1, 61, "a"), False),
        (ran(0, 0, 10, "a"), called(1, 5, "", "kineto"), True),
        (called(0, 0, "", "kineto"), called(1, 86_400, "", "kineto"), False),
    ],
)
def test_where_no_file_says_how_long_it_ran_its_calls_tell(first: RankTrace, second: RankTrace, is_one: bool) -> None:
    assert (list(problems([second, first])) == []) == is_one


@pytest.mark.parametrize(
    ("first", "second", "is_one"),
    [
        (ran(0, 0, 10, "a"), ran(1, 9, 20, "a"), True),
        (ran(0, 0, 10, "a"), ran(1, 11, 20, "a"), False),
        # Clocks of two machines may be a minute apart.
        (ran(0, 0, 10, "a"), ran(1, 69, 80, "b"), True),
        (ran(0, 0, 10, "a"), ran(1, 71, 80, "b"), False),
        (ran(0, 0, 10, ""), ran(1, 11, 20, ""), True),
    ],
)
def test_a_rank_that_ended_before_another_began_is_of_another_run(
    first: RankTrace, second: RankTrace, is_one: bool
) -> None:
    apart = "the ranks are of different runs: rank-0 ends {} s before rank-1 begins; name the files of one run"
    gap = 11 - 10 if first.clock == second.clock else 71 - 10
    assert list(problems([second, first])) == ([] if is_one else [apart.format(gap)])
