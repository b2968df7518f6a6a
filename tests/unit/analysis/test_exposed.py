"""Exposed communication, of ranks whose waits are known."""

from __future__ import annotations

from array import array

import pytest

from crossrank.comm import CommRecord, Group
from crossrank.recording import WAITED_IN
from crossrank.tools.analysis.exposed import Exposed, exposed_of
from crossrank.tools.traces.busy import Busy
from crossrank.tools.traces.rank_trace import HostWaits, RankTrace, TraceBuilder

MS = 1_000_000
SEEN = (
    "measured on the host: in Python's Work.wait, in wait_tensor, in launches, and at the end of a backward pass "
    "for calls that C++ made in it; other waits inside C++ are not recorded"
)


def rank(number: int, *waits: tuple[int, float, float, str], steps: int = 0, backend: str = "gloo") -> RankTrace:
    """A rank with calls 0 (`a.py:1`) and 1 (C++), and its waits: (row, begin and end in ms, what it waited in).
    Iterations take 10 ms."""
    trace = RankTrace(rank=number, path="", source="comms", backend=backend)
    builder = TraceBuilder(trace, [Group(pg="0", size=2)])
    for id, source in enumerate(("a.py:1", None)):
        record = CommRecord(id=id, op="all_reduce", c10d="allreduce_", pg="0", bytes=8, t=0, seq=id + 1, source=source)
        builder.add(record, called=1)
    rows, begins, ends, waited_in = zip(*waits, strict=True) if waits else ((), (), (), ())
    trace.host_waits = HostWaits(
        array("q", rows),
        array("q", [round(begin * MS) for begin in begins]),
        array("q", [round(end * MS) for end in ends]),
        array("B", map(WAITED_IN.index, waited_in)),
    )
    trace.steps = [(step, step * 10 * MS) for step in range(steps + 1)]
    return trace


def exposed(*ranks: RankTrace) -> Exposed:
    found = exposed_of(ranks)
    assert found is not None
    return found


def test_time_is_summed_by_source_line_and_by_kind_of_host_wait() -> None:
    found = exposed(
        rank(0, (0, 1, 3, "wait"), (0, 4, 4.5, "wait"), (1, 5, 6, "launch")),
        rank(1, (0, 0, 0.25, "wait"), (-1, 7, 8, "wait_tensor")),
    )
    assert found.lines == [
        {
            "source": "a.py:1",
            "op": "all_reduce",
            "waited_in": "wait",
            "waits": 3,
            "exposed_ms": 2.75,
            "longest_ms": 2.0,
        },
        {
            "source": "(C++)",
            "op": "all_reduce",
            "waited_in": "launch",
            "waits": 1,
            "exposed_ms": 1.0,
            "longest_ms": 1.0,
        },
        {
            "source": "(not known)",
            "op": None,
            "waited_in": "wait_tensor",
            "waits": 1,
            "exposed_ms": 1.0,
            "longest_ms": 1.0,
        },
    ]
    assert (found.waits, found.of_no_call, found.calls_without) == (5, 1, 1)
    assert (found.per_step_ms, found.share, found.steps) == (None, None, None)
    shown = found.ranks
    assert shown == [{"rank": 0, "exposed_ms": 3.5, "share": None}, {"rank": 1, "exposed_ms": 1.25, "share": None}]


def test_the_end_of_a_backward_pass_waits_for_all_its_cpp_calls() -> None:
    """Calls 0, 2 and 3 are of C++; the pass of iteration 1 ends after call 2, and no pass ends after call 3."""
    trace = RankTrace(rank=0, path="", source="comms", backend="gloo")
    builder = TraceBuilder(trace, [Group(pg="0", size=2)])
    for id, (api, step) in enumerate(((None, 1), ("all_reduce", 1), (None, 1), (None, 2))):
        record = CommRecord(id=id, op="all_reduce", c10d="allreduce_", pg="0", bytes=8, t=0, api=api, step=step)
        builder.add(record, called=1)
    trace.host_waits = HostWaits(
        array("q", [2]), array("q", [5 * MS]), array("q", [9 * MS]), array("B", [WAITED_IN.index("backward")])
    )
    trace.steps = [(1, 0), (2, 10 * MS), (3, 20 * MS)]
    found = exposed(trace)
    assert (found.waits, found.calls_without, found.share) == (1, 2, 0.2)


def test_a_step_counts_simultaneous_waits_of_threads_once() -> None:
    (_, of_rank_0), found = (
        (0, 4.0),
        exposed(
            rank(0, (0, 1, 4, "wait"), (1, 2, 5, "wait"), (0, 12, 13, "wait"), steps=2),
            rank(1, (0, 1, 2, "wait"), steps=2),
        ),
    )
    assert found.steps is not None
    assert found.steps.step == [0, 1]
    assert found.steps.most_ms == [of_rank_0, 1.0]
    assert found.steps.least_ms == [1.0, 0.0]
    assert found.steps.p50_ms == [2.5, 0.5]
    assert found.per_step_ms == 1.0
    assert found.share == 0.15
    assert [(one["rank"], one["exposed_ms"], one["share"]) for one in found.ranks] == [(0, 5.0, 0.25), (1, 1.0, 0.05)]


def test_steps_in_which_a_profiler_starts_or_stops_count_in_no_share() -> None:
    waits = (0, 1, 4, "wait"), (0, 11, 12, "wait"), (0, 21, 30, "wait")
    first, second = rank(0, *waits, steps=3), rank(1, *waits, steps=3)
    second.profiler_steps = frozenset([0, 2])
    found = exposed(first, second)
    assert (found.per_step_ms, found.share) == (1.0, 0.1)
    assert [one["share"] for one in found.ranks] == [0.1, 0.1]
    assert found.steps is not None
    assert found.steps.p50_ms == [3.0, 1.0, 9.0]  # shown, all the same
    note = "2 steps, in which a profiler started or stopped, count neither in the time per step nor in the shares"
    assert found.notes == [SEEN, note]


def test_a_wait_counts_only_until_the_end_of_the_step_it_starts_in() -> None:
    found = exposed(rank(0, (0, 8, 13, "wait"), (0, 25, 26, "wait"), steps=2))
    assert found.steps is not None
    assert found.steps.p50_ms == [2.0, 0.0]


def test_notes_list_unrecorded_waits() -> None:
    assert exposed(rank(0, (0, 1, 2, "wait"))).notes == [SEEN]
    on_gpu = rank(1, (0, 1, 2, "wait"), backend="nccl")
    assert [note.split("; the kernels")[0] for note in exposed(on_gpu, rank(2)).notes] == [
        SEEN,
        "on a GPU most waits make only the stream wait and return at once",
        "1 rank of 2 recorded no waits",
    ]


def test_traced_gpu_kernels_replace_the_share_of_host_waits() -> None:
    one = rank(0, (0, 1, 2, "wait"), steps=2, backend="nccl")
    assert exposed(one).share is not None
    one.busy = Busy(where="device")
    found = exposed(one)
    assert (found.share, found.per_step_ms, found.steps) == (None, None, None)
    assert (found.waits, len(found.lines)) == (1, 1)


def test_a_job_without_recorded_waits_has_no_exposed_communication() -> None:
    assert exposed_of([rank(0), rank(1)]) is None


@pytest.mark.parametrize(("waited_in", "without"), [("backward", 0), ("wait", 2), ("launch", 2)])
def test_only_the_end_of_a_backward_pass_waits_for_earlier_calls(waited_in: str, without: int) -> None:
    trace = RankTrace(rank=0, path="", source="comms", backend="gloo")
    builder = TraceBuilder(trace, [Group(pg="0", size=2)])
    for id in range(3):
        record = CommRecord(id=id, op="all_reduce", c10d="allreduce_", pg="0", bytes=8, t=0, step=1)
        builder.add(record, called=1)
    trace.host_waits = HostWaits(
        array("q", [2]), array("q", [5 * MS]), array("q", [9 * MS]), array("B", [WAITED_IN.index(waited_in)])
    )
    assert exposed(trace).calls_without == without


@pytest.mark.parametrize(("lines", "note"), [(20, None), (21, "the 20 of 21 source lines with most time")])
def test_a_note_says_that_the_list_of_lines_is_cut(lines: int, note: str | None) -> None:
    trace = RankTrace(rank=0, path="", source="comms", backend="gloo")
    builder = TraceBuilder(trace, [Group(pg="0", size=2)])
    for id in range(lines):
        record = CommRecord(id=id, op="all_reduce", c10d="allreduce_", pg="0", bytes=8, t=0, source=f"a.py:{id}")
        builder.add(record, called=1)
    ends = [(id + 1) * MS for id in range(lines)]
    trace.host_waits = HostWaits(
        array("q", range(lines)), array("q", [0] * lines), array("q", ends), array("B", [0] * lines)
    )
    found = exposed(trace)
    assert len(found.lines) == 20
    assert [one for one in found.notes if "source lines" in one] == ([note] if note else [])
