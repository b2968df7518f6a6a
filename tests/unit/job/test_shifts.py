"""Captures do not begin and end at the same call on all ranks, and files of several runs are told apart."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from crossrank.tools.job.alignment import shift_between
from crossrank.tools.job.collectives import match_collectives
from crossrank.tools.job.job import Job
from crossrank.tools.job.matching import AT_EDGE, UNLIKE_COUNTS
from crossrank.tools.job.one_run import problems
from crossrank.tools.traces.nsight.read import read_export
from crossrank.tools.traces.rank_trace import RankTrace
from tests.unit.traces.nsight.exports import EPOCH, ExportFile

MS = 1_000_000


def rank_times(
    folder: Path, rank: int, numbers: Iterable[int], *, clock: int = 0, jitter: int = 0, ranks: int = 2
) -> RankTrace:
    """All_reduces of `ranks` ranks at every ms: those with `numbers`, on a clock that is off by `clock` ns."""
    export = ExportFile(epoch=EPOCH + clock)
    process = export.process(70 + rank)
    process.identity(rank, ranks)
    process.group(ranks=tuple(range(ranks)))
    for number in numbers:
        start = MS * (10 + number) + jitter * number * number
        process.marker(start, start + 9000, None)
        process.kernel(start + 5000, start + 10_000, start + 100_000)
    (times,) = read_export(str(export.write(folder / f"rank_{rank}.sqlite")), rank, {})
    return times


@pytest.mark.parametrize(
    ("first", "second", "joined", "at_edge"),
    [
        (range(20), range(22), 20, 2),
        (range(2, 22), range(22), 20, 2),
        (range(1, 21), range(22), 20, 2),
        (range(20), range(2, 24), 18, 6),
        (range(20), range(20), 20, 0),
    ],
    ids=["end", "begin", "both edges", "each at another edge", "none"],
)
def test_launches_at_the_edge_of_a_capture_do_not_drop_the_group(
    tmp_path: Path, first: range, second: range, joined: int, at_edge: int
) -> None:
    found = match_collectives(Job.match([rank_times(tmp_path, 0, first), rank_times(tmp_path, 1, second)]))
    assert found.unmatched == ({AT_EDGE: at_edge} if at_edge else {})
    together = found.calls.filter(pl.len().over("collective") == 2)
    assert together["number"].to_list() == [*range(1, joined + 1)] * 2
    assert together.group_by("collective").agg(pl.n_unique("called_ns"))["called_ns"].to_list() == [1] * joined


def test_uneven_times_match_calls_on_different_clocks(tmp_path: Path) -> None:
    ranks = [
        rank_times(tmp_path, 0, range(20), jitter=3000),
        rank_times(tmp_path, 1, range(2, 24), clock=700 * MS, jitter=3000),
    ]
    found = match_collectives(Job.match(ranks))
    assert len(found.calls.filter(pl.len().over("collective") == 2)) == 2 * 18
    assert UNLIKE_COUNTS not in found.unmatched


def test_even_times_on_different_clocks_match_no_calls(tmp_path: Path) -> None:
    ranks = [rank_times(tmp_path, 0, range(20)), rank_times(tmp_path, 1, range(22), clock=700 * MS)]
    assert match_collectives(Job.match(ranks)).unmatched == {UNLIKE_COUNTS: 42}


def shift(what: list[int], other: list[int], when: object = 0, other_when: object = 0) -> int | None:
    times = (np.zeros(len(one), np.int64) + np.array(at) for one, at in ((what, when), (other, other_when)))
    mine, theirs = times
    return shift_between(np.array(what, np.int64), mine, np.array(other, np.int64), theirs)


@pytest.mark.parametrize(
    ("what", "other", "expected"),
    [
        ([1, 2, 3, 1], [3, 1, 1, 2, 3, 1], 2),
        ([1, 2, 3, 1], [1, 2, 3, 1, 2, 3], 0),
        ([1, 2, 3, 1], [4, 4, 4, 4, 4, 4], None),
        ([1, 2, 1, 2], [1, 2, 1, 2, 1, 2], None),  # both 0 and 2
        ([1, 2, 3, 4, 5, 6], [4, 5, 6, 7, 8, 9], -3),
        ([4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6], 3),
        ([1, 2, 3, 4, 5, 6], [5, 6, 7, 8, 9, 10], None),  # less than half of them
        ([5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6], None),
        ([1], [1], 0),
        ([2], [3, 2], 1),
        ([], [1], None),
        (list(range(1, 9)), [9] * 256 + list(range(1, 9)), 256),
        (list(range(1, 9)), [9] * 257 + list(range(1, 9)), None),
        (list(range(514)), list(range(257, 772)), None),
        (list(range(514)), list(range(256, 771)), -256),
        (list(range(514)), [*range(-256, 258)], 256),
    ],
)
def test_different_calls_decide_the_shift(what: list[int], other: list[int], expected: int | None) -> None:
    assert shift(what, other) == expected


EVEN = np.arange(1, 7) * 100 + 10_000
UNEVEN = np.arange(1, 7) ** 2 * 100


@pytest.mark.parametrize(
    ("when", "other", "expected"),
    [
        (EVEN, [9900, 10_000, *EVEN], 2),
        (EVEN, np.array([9900, 10_000, *EVEN]) + 49, 2),
        (EVEN, np.array([9900, 10_000, *EVEN]) - 49, 2),
        (EVEN, np.array([9900, 10_000, *EVEN]) + 50, None),  # as near to one as to the other
        (EVEN, [9900, 0, *EVEN], None),
        (EVEN[:2], [10_000, *EVEN[:2]], 1),
        (EVEN * [0, 1, 1, 1, 1, 1], [9900, 10_000, *EVEN], None),
        (UNEVEN, [1, 2, *UNEVEN + 10**9], 2),
        (UNEVEN, [1, *UNEVEN + 10**9, 2 * 10**9], 1),
        (UNEVEN, [*UNEVEN[2:] + 10**9, 2 * 10**9, 3 * 10**9, 4 * 10**9], -2),
        (UNEVEN, [*UNEVEN[3:] + 10**9, 5 * 10**9, 6 * 10**9, 9 * 10**9], -3),
        (UNEVEN[:2], UNEVEN[:3] + 10**9, None),  # too few to vary
        (UNEVEN + [0, 40, 0, 90, 0, 70], [1, 2, *UNEVEN + 10**9], 2),
        (UNEVEN + [0, 340, 0, 390, 0, 370], [1, 2, *UNEVEN + 10**9], None),
        ([500], [400, 500], None),
    ],
)
def test_close_or_steady_times_of_equal_calls_decide_the_shift(
    when: object, other: list[int], expected: int | None
) -> None:
    assert shift([1] * len(np.array(when)), [1] * len(other), when, other) == expected


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
    ("first", "second", "gap"),
    [
        (ran(0, 0, 10, "a"), ran(1, 9, 20, "a"), None),
        (ran(0, 0, 10, "a"), ran(1, 11, 20, "a"), 1),
        # Clocks of two machines may be a minute apart.
        (ran(0, 0, 10, "a"), ran(1, 69, 80, "b"), None),
        (ran(0, 0, 10, "a"), ran(1, 71, 80, "b"), 61),
        (ran(0, 0, 10, ""), ran(1, 11, 20, ""), None),
        # A job that was killed: of each rank only its calls are known.
        (called(0, 0, "a"), called(1, 59, "a"), None),
        (called(0, 0, "a"), called(1, 61, "a"), 61),
        (ran(0, 0, 10, "a"), called(1, 5, "", "kineto"), None),
        (called(0, 0, "", "kineto"), called(1, 86_400, "", "kineto"), 86_400),
    ],
)
def test_ranks_separated_in_time_are_from_different_runs(first: RankTrace, second: RankTrace, gap: int | None) -> None:
    apart = f"the ranks are from different runs: rank-0 ends {gap} s before rank-1 starts; give the files of one run"
    assert list(problems([second, first])) == ([] if gap is None else [apart])
