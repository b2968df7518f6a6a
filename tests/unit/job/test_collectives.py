"""What the times of all ranks say of a collective: its own time, who waited, how fast it was."""

from __future__ import annotations

import random
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrank.comm import CommRecord, Group
from crossrank.errors import CrossrankError
from crossrank.tools.analysis.bandwidth import bandwidth, line_rates
from crossrank.tools.job.collectives import MOVED, JobTables, match_collectives
from crossrank.tools.job.job import Job
from crossrank.tools.job.matching import AT_EDGE, DISAGREE, SHIFTED, TWICE, UNLIKE_COUNTS
from crossrank.tools.traces.rank_trace import IMPOSSIBLE, RankGroup, RankTrace, TraceBuilder
from tests.unit.job.ranks import Rank


def together(*ranks: Rank) -> JobTables:
    return match_collectives(Job.match([rank.times for rank in ranks]))


def figures(found: JobTables, *names: str) -> list[tuple[Any, ...]]:
    """These columns of every collective."""
    return found.collectives.select(*names).rows()


def waits_us(found: JobTables) -> dict[int, float]:
    return {
        int(rank): float(wait) / 1000
        for rank, wait in found.calls.select("rank", pl.col("waiting_ns").fill_null(-1000)).iter_rows()
    }


def test_a_collective_starts_at_the_last_arrival_and_earlier_time_is_waiting() -> None:
    found = together(Rank(0).call(100, 500), Rank(1).call(400, 500))
    # 1 MB in 100 us; and 2 (n - 1) / n = 1 for two ranks.
    assert figures(found, "time_ns", "last_rank", "algbw_gb_per_s", "busbw_gb_per_s") == [(100_000, 1, 10.0, 10.0)]
    assert waits_us(found) == {0: 300, 1: 0}


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 1.5),
        ("reduce_scatter", 0.75),
        ("all_gather", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("gather", 0.75),
        ("scatter", 0.75),
    ],
)
def test_bus_bandwidth_has_the_factors_of_nccl_tests(op: str, factor: float) -> None:
    found = together(*(Rank(rank, 4).call(100, 200, op) for rank in range(4)))
    assert figures(found, "algbw_gb_per_s", "busbw_gb_per_s") == [(10.0, pytest.approx(10.0 * factor))]


def test_a_barrier_and_a_group_of_one_have_a_time_and_no_bandwidth() -> None:
    barrier = together(*(Rank(rank).call(100, 200, "barrier", bytes=0) for rank in range(2)))
    for found in (barrier, together(Rank(0, 1).call(100, 200))):
        assert figures(found, "time_ns", "busbw_gb_per_s") == [(100_000, None)]


def test_an_uneven_all_to_all_counts_the_busiest_rank_and_no_local_data() -> None:
    # Rank 0 keeps 10 rows, sends 30 to rank 1 and gets 5; a row is 1000 floats.
    ranks = []
    for rank, sent, got in ((0, [10, 30], [10, 5]), (1, [5, 20], [30, 20])):
        facts: dict[str, Any] = {"dtype": "float32", "in_split": sent, "out_split": got, "bytes": 4000 * sum(sent)}
        facts |= {"inputs": [[sum(sent), 1000]], "outputs": [[sum(got), 1000]]}
        ranks.append(Rank(rank).call(100, 200, "all_to_all", **facts))
    # Rank 1 receives 50 rows, and 30 cross.
    assert figures(together(*ranks), "bytes", "exchanged", "busbw_gb_per_s") == [(200_000, 120_000, 1.2)]
    kept = [
        Rank(rank).call(100, 200, "all_to_all", dtype="int8", in_split=split, inputs=[[8]], bytes=8)
        for rank, split in enumerate(([8, 0], [0, 8]))
    ]
    assert figures(together(*kept), "algbw_gb_per_s", "busbw_gb_per_s") == [(8e-5, None)]


def test_a_root_beyond_32_bits_of_a_damaged_file_is_taken_as_it_is() -> None:
    found = together(*(Rank(rank).call(100, 150, "broadcast", root=1 << 31) for rank in (0, 1)))
    assert found.collectives["ranks"].to_list() == [2]


def test_a_broadcast_ends_when_the_last_rank_ends_and_needs_clocks() -> None:
    # The root leaves early, which says nothing about how long it took.
    found = together(Rank(0).call(100, 150, "broadcast", root=0), Rank(1).call(400, 500, "broadcast", root=0))
    assert found.collectives["time_ns"].to_list() == [100_000]
    assert waits_us(found) == {0: 50, 1: 0}
    durations = [Rank(rank, placed=False).call(1, end, "broadcast") for rank, end in ((0, 51), (1, 101))]
    assert figures(together(*durations), "time_ns", "is_upper_bound") == [(100_000, True)]


def test_durations_alone_time_collectives_that_release_all_ranks() -> None:
    found = together(Rank(0, placed=False).call(900, 1300), Rank(1, placed=False).call(7, 107))
    assert figures(found, "time_ns", "last_rank", "is_upper_bound") == [(100_000, 1, False)]
    assert waits_us(found) == {0: 300, 1: 0}


def test_a_send_is_matched_with_its_receive() -> None:
    sender = Rank(0).call(100, 500, "send", peer=1, bytes=400_000)
    found = together(sender, Rank(1).call(300, 500, "recv", peer=0, bytes=400_000))
    assert figures(found, "time_ns", "algbw_gb_per_s") == [(200_000, 2.0)]
    assert waits_us(found) == {0: 200, 1: 0}


def test_a_batch_launch_belongs_to_one_rank_and_is_a_bound() -> None:
    rank = Rank(0)
    for op, size in (("send", 100_000), ("recv", 300_000)):
        rank.call(1, 101, op, bytes=size, batch=1, peer=1)
    found = together(rank)
    assert found.kinds[0].label == "send/recv, batched"
    names = ("time_ns", "busbw_gb_per_s", "is_upper_bound", "ranks", "expected")
    assert figures(found, *names) == [(100_000, 3.0, True, 1, 1)]


@pytest.mark.parametrize(("shares", "time_ns"), [(True, 60_000), (False, 20_000)])
def test_batches_are_split_on_request_and_a_shared_time_is_a_bound(shares: bool, time_ns: int) -> None:
    """Both ranks exchange with the other; on NCCL the two calls of a rank are one kernel, on gloo each has its Work."""
    traces = []
    for rank in (0, 1):
        times = RankTrace(rank=rank, path=str(rank), source="kineto", clock="a", world_size=2, numbered_pairs=True)
        builder = TraceBuilder(times, [Group(pg="0", size=2, ranks=[0, 1])])
        common: Any = {"c10d": "", "pg": "0", "t": 0, "batch": 1, "peer": 1 - rank, "p2p_seq": 1, "bytes": 60_000}
        for number, op in enumerate(("send", "recv"), 1):
            began = 1000 if shares or op == "send" else 41_000
            builder.add(CommRecord(id=number, op=op, **common), called=500, began=began, ended=61_000)
        traces.append(times)
    job = Job.match(traces)
    assert [one.label for one in match_collectives(job).kinds] == ["send/recv, batched"]
    found = match_collectives(job, batches_apart=True)
    assert [found.kinds[kind].ends for kind in found.collectives["kind"]] == [(0, 1), (1, 0)]
    assert figures(found, "ranks", "expected", "time_ns", "is_upper_bound") == [(2, 2, time_ns, shares)] * 2
    assert found.about(found.calls, "together")["together"].to_list() == [2 if shares else 1] * 4
    assert found.calls["waiting_ns"].is_not_null().to_list() == [not shares] * 4
    for one in traces:
        one.numbered_pairs = False  # numbers that were counted may be shifted, and nothing of a batch would tell
    found = match_collectives(Job.match(traces), batches_apart=True)
    assert [one.label for one in found.kinds] == ["send/recv, batched"]


def test_a_time_without_all_members_is_a_bound() -> None:
    found = together(Rank(0, 3).call(100, 500), Rank(2, 3).call(300, 500))
    assert figures(found, "time_ns", "is_upper_bound", "ranks", "expected") == [(200_000, True, 2, 3)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"op": "broadcast"}),
        ({"bytes": 8}, {"bytes": 16}),
        ({"op": "broadcast", "root": 0}, {"op": "broadcast", "root": 1}),
    ],
    ids=["operations", "sizes", "roots"],
)
def test_calls_that_differ_in_operation_size_or_root_are_not_compared(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    found = together(Rank(0).call(100, 500, **first).call(600, 700), Rank(1).call(400, 500, **second).call(650, 700))
    assert found.unmatched == {DISAGREE: 2}
    assert sorted(found.collectives["time_ns"].to_list()) == [50_000, 100_000, 400_000]


def test_counted_numbers_are_compared_only_if_ranks_have_equal_counts() -> None:
    same = together(Rank(0, numbered=False).call(100, 500), Rank(1, numbered=False).call(400, 500))
    assert same.collectives["time_ns"].to_list() == [100_000]
    ranks = [Rank(rank, numbered=False).call(0.5, 0.9, pg="like") for rank in range(2)]
    late = together(ranks[0].call(1, 9).call(100, 500), ranks[1].call(400, 500))
    assert late.unmatched == {UNLIKE_COUNTS: 3}
    assert figures(late, "ranks", "is_upper_bound") == [(ranks, True) for ranks in (1, 1, 1, 2)]


def test_an_all_to_all_releases_ranks_without_exchange_separately() -> None:
    # 0 and 1 exchange 1 GB in 20 ms, 2 and 3 a kilobyte in 20 us.
    ranks = []
    for rank in range(4):
        size, end = (250_000_000, 20_100) if rank < 2 else (250, 120)
        split = [size if other == rank ^ 1 else 0 for other in range(4)]
        facts: dict[str, Any] = {"dtype": "float32", "in_split": split, "out_split": split, "bytes": 4 * size}
        ranks.append(Rank(rank, 4).call(100, end, "all_to_all", inputs=[[size]], outputs=[[size]], **facts))
    found = together(*ranks)
    assert figures(found, "time_ns", "busbw_gb_per_s") == [(20_000_000, 50.0)]
    assert waits_us(found) == {0: 0, 1: 0, 2: 0, 3: 0}
    assert found.clocks.residual_us is None


def test_counted_numbers_that_contradict_each_other_are_not_compared() -> None:
    sizes = [1_000_000, 100_000_000]
    alternating = [Rank(0, numbered=False), Rank(1, numbered=False)]
    for number in range(6):
        for rank, one in enumerate(alternating):
            one.call(1000 * number + 100, 1000 * number + 200, bytes=sizes[(number + rank) % 2])
    found = together(*alternating)
    assert found.unmatched == {SHIFTED: 12}
    assert found.collectives["is_upper_bound"].all()
    shifted = [Rank(0, numbered=False), Rank(1, numbered=False)]
    for number in range(6):
        shifted[0].call(10_000 * number + 100, 10_000 * number + 200)
        shifted[1].call(10_000 * (number + 1) + 100, 10_000 * (number + 1) + 200)
    found = together(*shifted)
    assert found.unmatched == {SHIFTED: 12}
    assert found.calls["waiting_ns"].is_null().all()


@pytest.mark.parametrize(("later", "unmatched"), [(10_000, {MOVED: 6}), (4_900, {}), (-5_100, {MOVED: 6})])
def test_a_clock_offset_that_hides_shifted_numbers_is_reported(later: int, unmatched: dict[str, int]) -> None:
    ranks = [Rank(0, host="a", numbered=False), Rank(1, host="b", numbered=False)]
    for number in range(6):
        ranks[0].call(10_000 * number + 100, 10_000 * number + 200)
        ranks[1].call(10_000 * number + later + 100, 10_000 * number + later + 200)
    assert together(*ranks).unmatched == unmatched


def test_a_group_recreated_under_its_old_name_is_reported() -> None:
    ranks = [Rank(rank).call(100, 200).call(9000, 9100, number=1) for rank in range(2)]
    found = together(*ranks)
    assert found.unmatched == {TWICE: 4}
    assert (found.collectives["ranks"] == 1).all()


def test_a_call_that_ends_before_its_start_has_no_time() -> None:
    found = together(Rank(0).call(500, 400), Rank(1).call(300, 400))
    assert list(found.unmatched.values()) == [1]
    assert figures(found, "ranks", "is_upper_bound") == [(1, True)]


def test_a_collective_without_times_has_no_duration_or_last_rank() -> None:
    found = together(*(Rank(rank).call(0, 0) for rank in range(2)))
    assert found.collectives.select("time_ns", "last_rank", "is_upper_bound").row(0) == (None, None, False)
    assert found.calls["waiting_ns"].to_list() == [None, None]


def test_a_group_with_unknown_members_gives_bounds() -> None:
    found = together(*(Rank(rank).call(100, 200, pg="7") for rank in range(2)))
    assert [group.guessed for group in found.job.groups if group.name == "7"] == [True]
    assert found.collectives["is_upper_bound"].to_list() == [True]
    world = [Rank(rank, 8).call(100, 200) for rank in range(2)]
    for rank in world:
        rank.times.groups[0] = RankGroup(Group(pg="0", size=0))
    found = together(*world)
    assert (found.job.groups[0].size, figures(found, "expected", "is_upper_bound")) == (8, [(8, True)])


def test_a_launch_with_missing_calls_has_no_rate() -> None:
    rank = Rank(0, 1)
    for number in (4, 6):
        rank.call(1, 2, "all_gather", id=number, batch=4, bytes=1000)
    assert figures(together(rank), "time_ns", "algbw_gb_per_s") == [(1000, None)]


@pytest.mark.parametrize(
    "facts",
    [
        {"bytes": -1},
        {"bytes": 1 << 62},
        {"op": "all_to_all", "in_split": [-5, 6], "out_split": [1, 0]},
        {"op": "all_to_all", "in_split": [1, 1], "inputs": [[1 << 40, 1 << 40]], "dtype": "float32"},
        {"op": "all_to_all", "in_split": [1 << 60, 1]},
    ],
)
def test_every_impossible_size_is_counted_and_not_used(facts: dict[str, Any]) -> None:
    found = together(Rank(0, 1).call(100, 200, **facts).call(300, 400, **facts))
    assert (found.unattributed, found.collectives["bytes"].to_list()) == ({IMPOSSIBLE: 2}, [None, None])


# --- clocks -----------------------------------------------------------------------------------------------------------


def test_clocks_are_aligned_by_the_ends_of_collectives() -> None:
    ahead = Rank(1, clock=7_000_000, host="b")
    first = Rank(0, host="a")
    for number in range(5):
        first.call(1000 * number + 100, 1000 * number + 500)
        ahead.call(1000 * number + 400, 1000 * number + 502)
    first.call(9000, 9050, "broadcast")
    ahead.call(9010, 9100, "broadcast")
    found = together(first, ahead)
    assert (found.clocks.offset_us, found.clocks.weak) == ({"b": -7_000_002.0}, {"b": 5})
    assert together(Rank(0, host="a").call(1, 2), Rank(1, host="b").call(1, 2)).clocks.weak == {"b": 1}
    assert found.clocks.residual_us == {"p50": 0.0, "p95": 0.0, "max": 0.0}
    # The last of a broadcast's begins is rank 1's at 9010, and the last end its own.
    assert found.collectives["time_ns"].to_list() == [102_000] * 5 + [90_000]
    assert set(found.collectives["last_rank"].to_list()) == {1}


def test_clocks_without_a_common_collective_are_reported_and_not_compared() -> None:
    found = together(Rank(0, host="a").call(100, 200, "broadcast"), Rank(1, host="b").call(150, 290, "broadcast"))
    assert found.clocks.unaligned == ["b"]
    assert figures(found, "time_ns", "is_upper_bound") == [(140_000, True)]


def test_a_clock_with_few_shared_collectives_does_not_shift_others() -> None:
    """C shares 12 late collectives with A, and many with B, which shares many with A."""
    a, b, c = Rank(0, 3, host="a"), Rank(1, 3, host="b"), Rank(2, 3, host="c")
    for one, other, numbers, late in ((a, b, range(1, 31), 0), (b, c, range(40, 80), 0), (a, c, range(100, 112), 5000)):
        for number in numbers:
            one.call(1000 * number + 100, 1000 * number + 200, number=number)
            other.call(1000 * number + 100 + late, 1000 * number + 200 + late, number=number)
    found = together(a, b, c)
    assert (found.shift, found.clocks.weak) == ({0: 0, 1: 0, 2: 0}, {})


@pytest.mark.parametrize(("took", "bound"), [(150, True), (250, False)])
def test_the_shortest_duration_marks_the_last_rank_if_clocks_drift(took: int, bound: bool) -> None:
    ranks = [Rank(0, host="a", numbered=False), Rank(1, host="b", numbered=False)]
    for number in range(40):
        drift = 10 * number
        ranks[0].call(1000 * number + 150, 1000 * number + 200)
        ranks[1].call(1000 * number + 100 + drift, 1000 * number + 200 + drift)
    for rank in ranks:
        rank.call(10**6, 10**6 + took, "broadcast")
    found = together(*ranks)
    assert set(found.collectives["last_rank"][:40]) == {0}
    assert found.clocks.residual_us is not None
    assert found.clocks.residual_us["max"] == 195.0
    assert found.unmatched == {}  # within what the clocks agree to, an end before a begin is none
    # What takes less than the clocks agree is a bound.
    assert found.collectives["is_upper_bound"].to_list() == [False] * 40 + [bound]


@given(
    st.lists(st.integers(-(10**7), 10**7), min_size=2, max_size=6),
    st.lists(
        st.tuples(st.integers(1, 1000), st.lists(st.integers(0, 500), min_size=6, max_size=6)), min_size=1, max_size=8
    ),
    st.randoms(),
)
def test_any_shift_of_clocks_gives_the_same_times_and_waits(
    shifts: list[int], calls: list[tuple[int, list[int]]], random: random.Random
) -> None:
    def job(shifted: bool) -> JobTables:
        ranks = [
            Rank(rank, len(shifts), clock=shift if shifted else 0, host=f"host-{rank}")
            for rank, shift in enumerate(shifts)
        ]
        begin = 10**8
        for took, delays in calls:
            arrivals = [begin + delays[rank] for rank in range(len(ranks))]
            for rank, one in enumerate(ranks):
                one.call(arrivals[rank], max(arrivals) + took)
            begin += 10_000
        return together(*ranks)

    plain, moved = job(False), job(True)
    assert (
        plain.collectives["time_ns"].to_list()
        == moved.collectives["time_ns"].to_list()
        == [1000 * took for took, _ in calls]
    )
    assert plain.calls["waiting_ns"].to_list() == moved.calls["waiting_ns"].to_list()
    assert moved.clocks.residual_us == {"p50": 0.0, "p95": 0.0, "max": 0.0}


# --- rows and rates ---------------------------------------------------------------------------------------------------


def test_rows_have_the_figures_of_their_collectives() -> None:
    ranks = [Rank(0), Rank(1)]
    for took in (100, 200, 400):
        for rank in ranks:
            rank.call(1000, 1000 + took, source="train.py:7", locality="cross_node")
    ranks[0].call(5000, 5900, bytes=100).call(6000, 6400, bytes=5000)
    ranks[1].call(5800, 5900, bytes=100).call(0, 0, bytes=5000)
    result = bandwidth(together(*ranks), rates=line_rates(["cross_node=0.16Tbps", "20000kB/s"]))
    assert (result.calls, result.timed_calls, result.collectives, result.total_ms) == (10, 9, 5, 1.2)
    big, half, small = result.rows
    assert (half["collectives"], half["calls"], half["upper_bounds"], half["kernel_us"]["p50"]) == (1, 1, 1, 400.0)
    about = {"op": "all_reduce", "pg": "0", "ranks": 2, "size_from": 262145, "size_to": 1048576}
    assert about.items() <= big.items()
    assert (big["collectives"], big["calls"], big["bytes"]) == (3, 6, 3_000_000)
    assert big["time_us"] == {"p50": 200.0, "p95": 380.0, "max": 400.0, "total": 700.0}
    assert big["busbw_gb_per_s"] == {"p5": 2.75, "p50": 5.0, "p95": 9.5, "max": 10.0}
    assert big["line_rate_gb_per_s"] == 20.0
    assert big["line_rate_share"] == {"p5": 0.1375, "p50": 0.25, "p95": 0.475, "max": 0.5}
    assert small["waiting_us"] == {"p50": 400.0, "p95": 760.0, "max": 800.0, "total": 800.0}
    assert small["line_rate_share"] == {"p5": 0.05, "p50": 0.05, "p95": 0.05, "max": 0.05}
    assert [row["source"] for row in bandwidth(together(*ranks), by=["source"]).rows] == ["train.py:7", None]


@pytest.mark.parametrize("text", ["400", "fast", "-3Gbps", "moon=3Gbps", "0Gbps"])
def test_a_line_rate_without_unit_or_known_locality_is_refused(text: str) -> None:
    with pytest.raises(CrossrankError, match=r"is not \[LOCALITY=\]RATE, for example 400Gbps"):
        line_rates([text])


def test_the_rank_that_starts_last_on_one_host_waits_for_no_other_although_it_ends_later() -> None:
    found = together(Rank(0).call(100, 450), Rank(1).call(110, 500))
    assert found.collectives["last_rank"].to_list() == [1]
    assert waits_us(found) == {0: 10.0, 1: 0.0}


def test_no_rank_that_is_last_has_waited() -> None:
    rng = random.Random(1)
    ranks = [Rank(number) for number in range(4)]
    for call in range(1, 40):
        for one in ranks:
            begin = 1000 * call + rng.randrange(300)
            one.call(begin, begin + 50 + rng.randrange(400), number=call)
    found = together(*ranks)
    last = found.calls.join(
        found.collectives.with_row_index("collective").cast({"collective": pl.UInt32}), on="collective"
    )
    assert last.filter(pl.col("rank") == pl.col("last_rank"))["waiting_ns"].to_list() == [0] * 39


@pytest.mark.parametrize(("unlike", "unmatched"), [(2, {DISAGREE: 4}), (3, {AT_EDGE: 6})])
def test_counted_numbers_with_more_than_a_twentieth_of_contradictions_are_aligned(
    unlike: int, unmatched: dict[str, int]
) -> None:
    ranks = [Rank(0, numbered=False), Rank(1, numbered=False)]
    for number in range(40):
        for rank, one in enumerate(ranks):
            size = 64 if rank and number < unlike else 1_000_000
            one.call(1000 * number + 100, 1000 * number + 200, bytes=size)
    assert together(*ranks).unmatched == unmatched


def test_counted_numbers_with_unknown_sizes_contradict_no_known_ones() -> None:
    ranks = [Rank(0, numbered=False), Rank(1, numbered=False)]
    for number in range(40):
        for rank, one in enumerate(ranks):
            size = 0 if rank and number % 4 == 0 else 1_000_000
            one.call(1000 * number + 100, 1000 * number + 200, bytes=size)
    found = together(*ranks)
    assert found.unmatched == {}
    assert found.collectives["ranks"].to_list() == [2] * 40
