"""The tables behind a report."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from crossrank.comm import CommRecord, Group
from crossrank.tools.analysis import waiting
from crossrank.tools.analysis.figures import Figures, figures
from crossrank.tools.analysis.waiting import count_arrivals
from crossrank.tools.job.collectives import match_collectives
from crossrank.tools.job.job import Job
from crossrank.tools.traces.rank_trace import RankTrace, TraceBuilder
from tests.unit.job.ranks import EPOCH, Rank


def figures_of(*ranks: Rank) -> Figures:
    return figures_of_times([rank.times for rank in ranks])


def figures_of_times(times: list[RankTrace]) -> Figures:
    return figures(match_collectives(Job.match(times)), inputs=["run"], diagnosis_problem="none here")


def late_job() -> list[Rank]:
    """Rank 1 comes 300 us late to each of four all_reduces, two in each of two iterations."""
    ranks = [Rank(0), Rank(1)]
    for number in range(4):
        for rank, late in zip(ranks, (0, 300), strict=True):
            rank.call(1000 * number + 100 + late, 1000 * number + 500, source="train.py:7", locality="cross_node")
    for rank in ranks:
        rank.times.calls.step[:] = array("i", [1, 1, 2, 2])
        last = EPOCH + 5_000_000 + 1_000_000 * (rank.times.rank or 0)
        rank.times.steps = [(1, EPOCH), (2, EPOCH + 2_000_000), (3, last)]
        rank.times.about = {"torch": "2.13.0"}
        rank.times.matched = {"host operations": (90, 100)}
    return ranks


def test_figures_show_the_late_rank_of_a_job() -> None:
    found = figures_of(*late_job())
    assert (found.ranks, found.world_size, found.calls, found.bytes) == (2, 2, 8, 8_000_000)
    assert found.by_locality == {"cross_node": 8_000_000}
    assert found.about == {"torch": "2.13.0"}
    assert found.matched == {"host operations": [180, 200]}
    sums = {"calls": 8, "bytes": 8_000_000, "unsized": 0, "time_ms": 0.4, "waiting_ms": 1.2}
    matrix = {"ops": ["all_reduce"], "groups": ["group 0: 2 ranks"]} | {name: [[one]] for name, one in sums.items()}
    assert msgspec.to_builtins(found.matrix) == matrix
    row = {"source": "train.py:7", "op": "all_reduce"} | sums
    assert [msgspec.to_builtins(one) for one in found.sources] == [row]
    waiting = found.waiting
    assert waiting is not None
    assert (waiting.axis, waiting.bins) == ("step", [1.0, 2.0])
    assert (waiting.p50_us, waiting.max_us) == ([150.0, 150.0], [300.0, 300.0])
    assert (waiting.rows, waiting.mean_us) == (["rank 0", "rank 1"], [[300.0, 300.0], [0.0, 0.0]])
    assert waiting.last == [{"rank": 1, "last": 4, "of": 4, "cost_ms": 1.2}]
    assert waiting.waiters == [{"rank": 0, "waiting_ms": 1.2, "first": 4, "of": 4}]
    steps = {"step": [1, 2], "p50_ms": [2.0, 3.5], "least_ms": [2.0, 3.0], "most_ms": [2.0, 4.0]}
    assert msgspec.to_builtins(found.steps) == steps


def test_waits_of_calls_without_durations_come_from_host_times() -> None:
    for late in (0, 1):
        ranks = [Rank(rank).call(0, 0) for rank in (0, 1)]
        for one in ranks:
            one.times.calls.called[0] = EPOCH + 70_040 * (one.times.rank == late)
        found = figures_of(*ranks)
        assert found.waiting is not None
        assert found.waiting.measured == "the times at which the hosts made their calls"
        assert found.waiting.last == [{"rank": late, "last": 1, "of": 1, "cost_ms": 0.07}]
        assert (found.waiting.bins, found.waiting.p50_us, found.waiting.max_us) == ([0.0], [35.0], [70.0])
        assert (found.bandwidth.rows, found.sources[0]["time_ms"]) == ([], None)
        table = count_arrivals(match_collectives(Job.match([one.times for one in ranks])))
        expected = {late: (late, 1, 0, 1, 0, 70_040), 1 - late: (1 - late, 1, 1, 0, 70_040, 0)}
        assert table.rows() == [expected[0], expected[1]]
    other_clock = [Rank(0, host="a"), Rank(1, host="b")]
    for one in other_clock:
        one.call(0, 0)
        one.times.calls.called[0] = EPOCH
    assert figures_of(*other_clock).waiting is None


def test_bytes_of_a_batch_are_counted_by_the_locality_of_each_call() -> None:
    times = RankTrace(rank=0, path="a", source="kineto", clock="a", world_size=3)
    builder = TraceBuilder(times, [Group(pg="0", size=3, ranks=[0, 1, 2])])
    send = CommRecord(id=1, op="send", c10d="", pg="0", t=0, batch=1, peer=1, bytes=100, locality="intra_node")
    receive = msgspec.structs.replace(send, id=2, op="recv", peer=2, bytes=300, locality="cross_node")
    for record in (send, receive):
        builder.add(record, called=EPOCH, began=EPOCH, ended=EPOCH + 1000)
    found = figures_of_times([times])
    assert (found.bytes, found.by_locality) == (400, {"cross_node": 300, "intra_node": 100})


def groups_job(descs: dict[str, list[list[int]]], world: int) -> list[RankTrace]:
    """Every rank makes one all_reduce on each of its groups."""
    ranks = []
    for rank in range(world):
        times = RankTrace(rank=rank, path=f"rank-{rank}", source="kineto", clock="one", world_size=world)
        mine = [
            Group(pg=f"{desc}{number}", size=len(members), ranks=members, desc=desc)
            for desc, groups in descs.items()
            for number, members in enumerate(groups)
            if rank in members
        ]
        builder = TraceBuilder(times, mine)
        for group in mine:
            record = CommRecord(id=0, op="all_reduce", c10d="", pg=group.pg, bytes=100, t=0)
            builder.add(record, called=EPOCH, began=EPOCH, ended=EPOCH + 1000)
        ranks.append(times)
    return ranks


def test_groups_with_equal_descriptions_are_one_class() -> None:
    tensor = [[0, 1], [2, 3]]
    data = [[0, 2], [1, 3]]
    found = figures_of_times(groups_job({"tp": tensor, "dp": data, "": [[0, 1, 2, 3]]}, 4))
    assert found.matrix.groups == ["tp: 2 groups of 2 ranks", "dp: 2 groups of 2 ranks", "group 0: 4 ranks"]
    assert found.matrix.calls == [[4, 4, 4]]
    shown = [(row["pg"], row["collectives"]) for row in found.bandwidth.rows]
    assert shown == [("dp: 2 groups of 2 ranks", 2), ("tp: 2 groups of 2 ranks", 2), ("group 0: 4 ranks", 1)]


def test_small_classes_and_rare_versions_are_merged() -> None:
    descs = {f"of {number:02d}": [[0, 1]] for number in range(26)} | {"undefined": [[0, 1], [1, 0]]}
    ranks = groups_job(descs, 4)
    for trace in ranks:
        trace.about = {"torch": f"2.{trace.rank}"}
    found = figures_of_times(ranks)
    classes = [f"of {number:02d}: 2 ranks" for number in range(23)]
    assert found.matrix.groups == ["2 groups of 2 ranks", *classes, "others"]
    assert (found.matrix.calls, found.matrix.bytes) == ([[4, *[2] * 23, 6]], [[400, *[200] * 23, 600]])
    assert found.about == {"torch": "2.0 / 2.1 / 2.2 / …"}


def test_a_single_rank_has_no_waiting_but_its_own_times() -> None:
    found = figures_of(Rank(0, 1).call(100, 200))
    assert (found.ranks, found.missing_ranks, found.waiting) == (1, "", None)
    assert found.matrix.time_ms == [[0.1]]
    (row,) = found.bandwidth.rows
    assert (row["busbw_gb_per_s"], row["upper_bounds"]) == (None, 0)


@pytest.mark.parametrize("rows_per_part", [1 << 18, 1])
def test_calls_that_wait_at_the_same_time_count_once(rows_per_part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_ROWS_PER_PART", rows_per_part)
    # Two all_reduces are under way at once while rank 1 sleeps until 50 ms.
    first, second = Rank(0), Rank(1)
    first.call(1000, 51_000).call(2000, 52_000)
    second.call(50_000, 51_000).call(51_000, 52_000)
    for rank in (first, second):
        rank.times.calls.step[:] = array("i", [1, 120])
        rank.times.records_steps = True
    found = figures_of(first, second)
    assert found.waiting is not None
    assert len(found.waiting.bins) == 120
    assert found.waiting.waiters == [{"rank": 0, "waiting_ms": 50.0, "first": 2, "of": 2}]
    assert found.waiting.last == [{"rank": 1, "last": 2, "of": 2, "cost_ms": 50.0}]
    table = count_arrivals(match_collectives(Job.match([first.times, second.times])))
    assert table.rows() == [(0, 2, 2, 0, 50_000_000, 0), (1, 2, 0, 2, 0, 50_000_000)]
    assert found.matrix.waiting_ms == [[98.0]]
