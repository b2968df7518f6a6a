"""What ranks did with their time, in windows that were traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrank.tools.analysis.overlap import overlap_frame, overlap_of
from crossrank.tools.job.collectives import match_collectives
from crossrank.tools.job.job import Job
from crossrank.tools.job.kineto_calls import read_kineto_trace
from crossrank.tools.traces.busy import Busy, covered, difference, spans_of, union
from crossrank.tools.traces.rank_trace import RankTrace
from tests.unit.graph.linking.public_traces import needs_traces, public
from tests.unit.job.ranks import EPOCH, Rank

Pairs = Sequence[tuple[int, int]]


def frame(*traces: RankTrace) -> pl.DataFrame:
    return overlap_frame(match_collectives(Job.match(traces)))


def rows(found: pl.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    return found.select(*columns).rows()


def busy(
    where: Literal["device", "host"],
    *spans: Pairs,
    memory: Pairs = (),
    steps: Pairs = (),
    launches: Pairs = (),
    base: int = 0,
) -> Busy:
    """`spans` are those of computation, and of communication."""
    found = Busy()
    computation, communication, copies = map(spans_of, (*spans, memory))
    found.add(where, base, computation, communication, copies, steps, spans_of(launches))
    return found


WHOLE = ("step", "duration_ns", "computation_ns", "communication_ns", "exposed_ns", "memory_ns", "idle_ns")


def test_a_window_has_computation_exposed_communication_copies_and_idle_time() -> None:
    trace = Rank(0).times
    trace.busy = busy("device", [(0, 40), (30, 50), (90, 100)], [(45, 70), (95, 98)], memory=[(60, 80)])
    assert rows(frame(trace), *WHOLE, "measured_on") == [(None, 100, 60, 28, 20, 10, 10, "device")]


def test_a_step_of_a_gpu_starts_with_its_first_launched_kernel() -> None:
    """The host began iteration 1 at 10 and 2 at 20, when the GPU was still busy with what it had launched before."""
    kernels = [(100, 130), (140, 150), (200, 250)]
    launches = [(12, 100), (15, 140), (21, 200)]
    trace = Rank(0).times
    trace.busy = busy("device", kernels, [], steps=[(0, 0), (1, 10), (2, 20), (3, 30), (4, 40)], launches=launches)
    found = rows(frame(trace), "step", "began_ns", "duration_ns", "idle_ns")
    assert found == [(1, 100, 100, 60), (2, 200, 50, 0)]


def test_copies_before_the_first_kernel_belong_to_the_first_step() -> None:
    """The copy at 20 is launched in step 1, and that at 130 in step 2, before its first kernel."""
    for steps, expected in (
        ([(1, 10), (2, 100)], [(1, 20, 180)]),
        ([(1, 10), (2, 30), (3, 50)], [(1, 20, 120), (2, 140, 60)]),
    ):
        kernels, launches = [(60, 90), (140, 200)], [(15, 60), (35, 140)]
        trace = Rank(0).times
        found = busy("device", kernels, [], memory=[(20, 25), (130, 135)], steps=steps, launches=launches)
        copies = spans_of([(12, 20), (32, 130)])
        trace.busy = Busy()
        trace.busy.add(
            "device", 0, found.computation, found.communication, found.memory, steps, spans_of(launches), None, copies
        )
        assert rows(frame(trace), "step", "began_ns", "duration_ns") == expected


def test_a_step_before_the_first_launch_is_not_a_traced_one() -> None:
    """A recording knows all steps of the job, a window the activities of some."""
    steps = [(1, 0), (2, 100), (3, 200), (4, 300), (5, 400)]
    trace = Rank(0).times
    computation, copies = spans_of([(240, 290), (350, 480)]), spans_of([(210, 215)])
    launches = spans_of([(205, 240), (310, 350)])
    trace.busy.add("device", 0, computation, spans_of(), copies, steps, launches, None, spans_of([(202, 210)]))
    assert rows(frame(trace), "step", "began_ns", "duration_ns") == [(3, 210, 140), (4, 350, 130)]


def test_a_gpu_behind_its_host_has_the_steps_of_the_host() -> None:
    """Each iteration of the host takes 100 ns; the GPU is 55 to 60 behind, and the last ends on the host at 300."""
    launches = [(3, 55), (90, 145), (103, 160), (203, 258)]
    trace = Rank(0).times
    kernels, steps = [(55, 145), (145, 155), (160, 240), (258, 330)], [(0, 0), (1, 100), (2, 200), (3, 300)]
    trace.busy = busy("device", kernels, [], steps=steps, launches=launches)
    found = rows(frame(trace), "step", "began_ns", "duration_ns", "computation_ns")
    assert found == [(0, 58, 100, 97), (1, 158, 100, 80), (2, 258, 100, 72)]


def test_a_step_of_a_host_counts_if_most_of_it_was_traced() -> None:
    steps = [(0, 0), (1, 100), (2, 200), (3, 300), (4, 400)]
    trace = Rank(0).times
    trace.busy = busy("host", [(110, 190), (210, 305)], [(150, 195)], steps=steps)
    assert rows(frame(trace), *WHOLE) == [(1, 100, 80, 45, 5, 0, 15), (2, 100, 90, 0, 0, 0, 10)]


def test_a_window_without_steps_counts_as_a_whole() -> None:
    trace = Rank(0).times
    trace.busy = busy("host", [(0, 10), (20, 30)], [(10, 20)], steps=[(1, 0), (2, 20), (3, 30)])
    none = spans_of()
    trace.busy.add("host", 0, spans_of([(100, 130)]), none, none, [], none)
    assert rows(frame(trace), "step", "duration_ns", "computation_ns") == [(1, 20, 10), (2, 10, 10), (None, 30, 30)]


US = 1000


def two_ranks() -> list[RankTrace]:
    """Rank 1 comes last to the second of three calls, rank 0 to the third."""
    first = Rank(0).call(20, 30).call(100, 400, number=2).call(600, 620, number=3)
    return [first.times, Rank(1).call(20, 30).call(300, 400, number=2).call(500, 620, number=3).times]


def test_the_rank_that_was_waited_for_longest_is_named() -> None:
    traces = two_ranks()
    for one in traces:
        one.busy = busy("device", [(0, 1000 * US)], [(100 * US, 400 * US), (500 * US, 620 * US)], base=EPOCH)
    found = frame(*traces)
    waited = rows(found, "rank", "waiting_ns", "waits_for", "waits_for_ns")
    assert waited == [(0, 200 * US, 1, 200 * US), (1, 100 * US, 0, 100 * US)]


def two_calls_of_which_rank_1_is_late(begins_us: int) -> list[RankTrace]:
    """Rank 1 comes 150 us late to the first call, of which computation hides 30 us on rank 0, and 20 to the second.

    `begins_us`: when rank 1 begins to compute, and with it its window."""
    first = Rank(0).call(50, 240).call(300, 330, number=2)
    ranks = [first.times, Rank(1).call(200, 240).call(320, 330, number=2).times]
    for one, spans in zip(ranks, ([(0, 80), (250, 300)], [(begins_us, 200), (250, 320)]), strict=True):
        calls = [(50, 240), (300, 330)] if one is ranks[0] else [(200, 240), (320, 330)]
        in_us = [[(begin * US, end * US) for begin, end in those] for those in (spans, calls)]
        one.busy = busy("device", *in_us, base=EPOCH)
    return ranks


_PARTS = ("rank", "computation_ns", "profiler_ns", "exposed_ns", "idle_ns", "waiting_ns", "waits_for")


def test_waits_in_the_first_collective_of_a_window_are_for_profilers_that_started_late() -> None:
    ranks = two_calls_of_which_rank_1_is_late(120)
    assert rows(frame(*ranks), *_PARTS) == [
        (0, 130 * US, 120 * US, 70 * US, 10 * US, 20 * US, 1),
        (1, 150 * US, 0, 50 * US, 10 * US, 0, None),
    ]
    shares = overlap_of(match_collectives(Job.match(ranks)))
    assert shares is not None
    assert shares.text == (
        "51.9 % computation, 22.2 % exposed communication, 22.2 % waiting for other profilers to start, 0.0 % copies, "
        "3.7 % idle"
    )


def test_a_rank_that_computes_longer_in_the_first_step_of_a_window_is_waited_for() -> None:
    assert rows(frame(*two_calls_of_which_rank_1_is_late(0)), *_PARTS) == [
        (0, 130 * US, 0, 190 * US, 10 * US, 170 * US, 1),
        (1, 270 * US, 0, 50 * US, 10 * US, 0, None),
    ]


def test_shares_cover_all_ranks_and_each_rank_has_means() -> None:
    ranks = two_ranks()
    for one in ranks:
        spans = [(begin * US, end * US) for begin, end in ((0, 200), (400, 500))]
        calls = [(begin * US, end * US) for begin, end in ((200, 400), (500, 700))]
        one.busy = busy("device", spans, calls, base=EPOCH, steps=[(3, 0), (4, 400 * US), (5, 700 * US)])
        one.busy.iterations = [(3, EPOCH, EPOCH + 400 * US), (4, EPOCH + 400 * US, EPOCH + 800 * US)]
    found = overlap_of(match_collectives(Job.match(ranks)))
    assert found is not None
    assert (found.computation, found.communication, found.exposed, found.idle) == (0.375, 0.5, 0.5, 0.125)
    assert (found.measured_on, found.windows, found.of_ranks) == (["device"], 4, 2)
    ms = {"duration": 0.4, "computation": 0.15, "communication": 0.2, "exposed": 0.2, "memory": 0.0, "idle": 0.05}
    ms |= {"profiler": 0.0}
    of_rank = {"rank": 1, "iterations": 2, "waiting_ms": 0.05, "waits_for": 0}
    assert found.ranks[1] == of_rank | {f"{name}_ms": time for name, time in ms.items()}
    steps = [(one["step"], one["computation_ms"], one["idle_ms"]) for one in found.steps]
    assert steps == [(3, 0.2, 0.0), (4, 0.1, 0.1)]
    for one in ranks:
        one.busy = Busy()
    assert overlap_of(match_collectives(Job.match(ranks))) is None


def test_a_single_rank_has_no_waiting() -> None:
    trace = Rank(0).call(100, 400).times
    trace.busy = busy("device", [(0, 10)], [])
    assert rows(frame(trace), "waiting_ns", "waits_for", "waits_for_ns") == [(None, None, None)]


def test_windows_of_a_gpu_replace_those_of_its_host() -> None:
    found = busy("host", [(0, 10)], [])
    found.add("device", 0, spans_of([(5, 7)]), spans_of(), spans_of(), [], spans_of())
    found.add("host", 0, spans_of([(20, 30)]), spans_of(), spans_of(), [], spans_of())
    assert (found.where, found.observed.tolist()) == ("device", [[5, 7]])


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


@given(SPANS, SPANS, st.integers(0, 60), st.integers(0, 60))
def test_span_operations_agree_with_sets_of_moments(some: Pairs, others: Pairs, begin: int, end: int) -> None:
    window = spans_of([(min(begin, end), max(begin, end))])
    inside, outside = ({at for a, b in spans for at in range(a, b)} for spans in (some, others))
    within = set(range(*window[0]))
    for spans, moments in (
        (union(spans_of(some), spans_of(others)), inside | outside),
        (difference(spans_of(some), spans_of(others)), inside - outside),
    ):
        assert covered(spans, window).tolist() == [len(moments & within)]
        assert (np.diff(spans.ravel()) > 0).all()


@needs_traces
def test_times_of_dlrm_match_holistic_trace_analysis() -> None:
    """Of its 0.5.0, `get_temporal_breakdown` and `get_comm_comp_overlap`: us of idling, computation and what else ran,
    and the % of communication that computation hid."""
    expected = [
        *((6419, 1034, 5556, 4.50), (6428, 1246, 11075, 2.47), (7046, 1068, 3236, 7.88), (8145, 1240, 9468, 3.31)),
        *((8887, 1126, 6576, 0.56), (9121, 1041, 6230, 0.64), (7051, 1051, 3308, 7.56), (8308, 1059, 1600, 9.51)),
    ]
    ranks = [read_kineto_trace(public(f"dlrm_8gpu/rank-{rank}.kineto.json.gz"), rank) for rank in range(8)]
    for one in ranks:
        one.busy.iterations = []  # it looks at whole traces
    found = frame(*ranks)
    us = [pl.col(f"{name}_ns") // 1000 for name in ("idle", "computation")]
    exposed = pl.col("exposed_ns") + pl.col("profiler_ns")  # it counts waits for profilers too
    other = (exposed + pl.col("memory_ns")) // 1000
    hidden = 100 * (1 - exposed / pl.col("communication_ns"))
    assert found.select(*us, other.alias("other"), hidden.round(2).alias("hidden")).rows() == [
        (*whole, pytest.approx(share)) for *whole, share in expected
    ]
    assert found["waits_for"].mode().item() == 7


@needs_traces
def test_steps_marked_by_the_torch_profiler_are_separated() -> None:
    found = frame(read_kineto_trace(public("kineto_mi300/rank-0.kineto.json.gz"), 0))
    assert found["step"].to_list() == [15, 16, 17]
    assert (found["duration_ns"] / 1e6).round(1).to_list() == [19.0, 19.0, 18.6]
    parts = pl.sum_horizontal("computation_ns", "exposed_ns", "profiler_ns", "memory_ns", "idle_ns")
    assert found.select((parts == pl.col("duration_ns")).all()).item()
