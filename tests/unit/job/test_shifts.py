"""Captures do not begin and end at the same call on all ranks: what one has more does not cost the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from crossrank.tools.job.collectives import match_collectives
from crossrank.tools.job.job import Job
from crossrank.tools.job.matching import AT_EDGE, UNLIKE_COUNTS
from crossrank.tools.job.shifts import shift_between
from crossrank.tools.traces.nsight.read import read_export
from crossrank.tools.traces.rank_trace import RankTrace
from tests.unit.traces.nsight.exports import EPOCH, ExportFile

MS = 1_000_000


def rank_times(folder: Path, rank: int, numbers: range, *, clock: int = 0, jitter: int = 0) -> RankTrace:
    """All_reduces at every ms, of which `numbers` were captured, on a clock that is off by `clock` ns."""
    export = ExportFile(epoch=EPOCH + clock)
    process = export.process(70 + rank)
    process.identity(rank)
    process.group()
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
def test_launches_at_the_edge_of_a_capture_do_not_cost_the_group(
    tmp_path: Path, first: range, second: range, joined: int, at_edge: int
) -> None:
    found = match_collectives(Job.match([rank_times(tmp_path, 0, first), rank_times(tmp_path, 1, second)]))
    assert int((np.bincount(found.collective) == 2).sum()) == joined
    assert found.unmatched == ({AT_EDGE: at_edge} if at_edge else {})
    for collective in np.flatnonzero(np.bincount(found.collective) == 2):
        assert len(set(found.called[found.collective == collective].tolist())) == 1


def test_clocks_that_do_not_agree_are_bridged_by_uneven_times(tmp_path: Path) -> None:
    ranks = [
        rank_times(tmp_path, 0, range(20), jitter=3000),
        rank_times(tmp_path, 1, range(2, 24), clock=700 * MS, jitter=3000),
    ]
    found = match_collectives(Job.match(ranks))
    assert int((np.bincount(found.collective) == 2).sum()) == 18
    assert UNLIKE_COUNTS not in found.unmatched


def test_even_times_on_clocks_that_do_not_agree_decide_nothing(tmp_path: Path) -> None:
    ranks = [rank_times(tmp_path, 0, range(20)), rank_times(tmp_path, 1, range(22), clock=700 * MS)]
    assert match_collectives(Job.match(ranks)).unmatched == {UNLIKE_COUNTS: 42}


def test_the_calls_themselves_decide_where_they_differ() -> None:
    unknown = np.zeros(6, np.int64)
    what = np.array([1, 2, 3, 1])
    assert shift_between(what, unknown[:4], np.array([3, 1, 1, 2, 3, 1]), unknown) == 2
    assert shift_between(what, unknown[:4], np.array([1, 2, 3, 1, 2, 3]), unknown) == 0
    assert shift_between(what, unknown[:4], np.array([4, 4, 4, 4, 4, 4]), unknown) is None
