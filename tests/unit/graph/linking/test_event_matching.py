"""Which host event is which node, what has no event and why, and when two files are not of the same run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrank.tools.graph.linking import link
from crossrank.tools.graph.linking.name_alignment import best_shifts
from crossrank.tools.traces.execution_trace import HostOp
from crossrank.tools.traces.kineto import HostEvent
from tests.unit.graph.linking.small_traces import SmallTrace

PROCESS = "process 123 in the one, 70 in the other"


@pytest.mark.parametrize(
    ("head", "doubts"),
    [
        ({}, []),
        ({"pid": None, "time": "?"}, []),
        ({"pid": 123}, [PROCESS]),
        ({"time": "2024-05-03 13:00:00"}, []),  # 26 hours later, by the clocks of two time zones
        *(
            ({"time": at}, [f"written {at} in the one, 2024-05-02 11:00:00 UTC in the other"])
            for at in ("2024-05-03 13:00:01", "2024-05-01 08:59:59")
        ),
    ],
)
def test_signs_of_different_runs_raise_doubts(head: dict[str, Any], doubts: list[str], tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.op("a", 3600e6, 5)
    trace.op("b", 3700e6, 5)
    trace.et_head |= head
    assert link(*trace.write(tmp_path)).report.doubts == doubts


def test_files_with_a_doubt_and_few_matches_are_refused(tmp_path: Path) -> None:
    trace = SmallTrace()
    for number in range(3):
        trace.op(f"op {number}", 10 * number, 5)
    trace.et_head["pid"] = 123
    del trace.events[1:]
    with pytest.raises(Exception, match=f"{PROCESS}; only 1 of 3 operations match by name"):
        link(*trace.write(tmp_path))
    trace.et_head["pid"] = 70
    assert link(*trace.write(tmp_path)).report.doubts == []


def test_nodes_without_a_matching_event_are_counted_by_reason(tmp_path: Path) -> None:
    trace = SmallTrace()
    for number in range(6):
        trace.op(f"op {number}", 10 * number, 5)
    trace.nodes.append(trace.nodes[3] | {"id": 99})  # a record function id that stands twice
    trace.events[2]["name"] = "renamed"
    trace.events[4]["args"]["Record function id"] = 4  # twice, and 5 not at all
    del trace.events[5]
    trace.host_event("later", 70, 5, 9)
    trace.op("first of what is outside", 80, 5)
    trace.nodes[-1]["attrs"][0]["value"] = 10
    del trace.events[-1], trace.nodes[:3]
    report = link(*trace.write(tmp_path)).report
    assert (report.host_nodes, report.host_matched) == (8, {"record function id": 3})
    assert report.host_unmatched == {
        "the Kineto event with its id has another name": 1,
        "no Kineto event with its id": 2,
        "its id was used before": 1,
        "outside the Kineto trace": 1,
    }
    assert report.warnings[1:] == ["1 Kineto event(s) repeat a record function id; crossrank uses the first of each"]


def without_ids(trace: SmallTrace) -> SmallTrace:
    for event in trace.events:
        event["args"].pop("Record function id", None)
    return trace


def test_threads_without_ids_are_matched_by_their_names(tmp_path: Path) -> None:
    trace = SmallTrace()
    for number, name in enumerate("abcde"):
        trace.op(name, 10 * number, 5)
    for number, name in enumerate("xyz"):
        trace.op(name, 10 * number, 5, 3, tid=2)
    trace.op("of a third thread", 90, 5, tid=3)
    trace.events = [event for event in trace.events if event["name"] not in ("a", "e", "of a third thread")]
    trace.events[1]["name"] = "renamed"
    trace.add("cpu_op", "a", 0, 5, 99, 99, {})
    del trace.nodes[:3]
    report = link(*without_ids(trace).write(tmp_path)).report
    assert (report.host_nodes, report.host_matched) == (9, {"sequence of names": 5})
    assert report.host_unmatched == {
        "outside the Kineto trace": 2,
        "no Kineto event at its position": 1,
        "its thread is not in the Kineto trace": 1,
    }
    assert len(report.warnings) == 1  # that the trace has no roots


@pytest.mark.parametrize(
    ("numbers", "warnings"),
    [
        (
            (0, 1),
            ["thread 1: autograd's sequence numbers differ by 40 (2 of 2 operations): the two files have different"],
        ),
        ((40, 41), []),
        (
            (-1, -1),
            ["thread 1: its names match the Kineto trace at 2 places equally well; the first is used, so times"],
        ),
    ],
)
def test_names_that_match_another_step_are_reported(
    numbers: tuple[int, int], warnings: list[str], tmp_path: Path
) -> None:
    trace = SmallTrace()
    for iteration in range(1 + (numbers[0] < 0)):
        for at, number in enumerate(numbers):
            trace.op(f"aten::op{at}", 100 * iteration + 10 * at, 5, seq_id=number)
            if numbers[0] >= 0:
                trace.events[-1]["args"]["Sequence number"] = 40 + at
    del trace.nodes[5:]
    found = link(*without_ids(trace).write(tmp_path)).report.warnings
    assert [one[: len(expected)] for one, expected in zip(found, warnings, strict=True)] == warnings


def nodes(names: str, numbers: Sequence[int] = ()) -> list[HostOp]:
    given = [*numbers, *[-1] * len(names)]
    return [HostOp(at, name, 0, at, 1, seq_id=given[at]) for at, name in enumerate(names)]


def events(names: str, numbers: Sequence[int] = ()) -> list[HostEvent]:
    given = [*numbers, *[-1] * len(names)]
    no_args = msgspec.Raw(b"{}")
    return [HostEvent(name, 1, 1, 0, 0, None, None, given[at], no_args) for at, name in enumerate(names)]


@pytest.mark.parametrize(
    ("ours", "theirs", "shift", "places"),
    [
        (nodes("bcd"), events("abcde"), 1, 1),
        (nodes("abcde"), events("bcd"), -1, 1),
        (nodes("aba"), events("abbaba"), 3, 1),
        (nodes("aaabaaa"), events("aaaabaaaa"), 1, 1),
        (nodes("abXd"), events("zabYdz"), 1, 1),
        (nodes("abc"), events("abcabcabc"), 0, 3),
        (nodes("abc", (20, -1, 21)), events("abcabcabc", (0, -1, 1, 10, -1, 11, 20, -1, 21)), 6, 1),
        (nodes("abcd", (1, 2, 3, 4)), events("abcd", (41, 42, 43, 44)), 0, 1),
        (nodes("abcd", (1, 2, 3, 10**30)), events("abcdabcd", (41, 42, 43, 1)), 0, 2),
    ],
)
def test_the_best_shift_has_most_equal_names_and_numbers(
    ours: list[HostOp], theirs: list[HostEvent], shift: int, places: int
) -> None:
    found = best_shifts(ours, theirs)
    assert (found[0], len(found)) == (shift, places)


@given(st.text("abc", min_size=1, max_size=60), st.integers(0, 20), st.integers(0, 20))
def test_numbers_locate_a_thread_at_any_start_of_the_other_side(names: str, before: int, after: int) -> None:
    numbers = [*[-1] * before, *range(len(names))]
    theirs = events("a" * before + names + "a" * after, numbers)
    assert best_shifts(nodes(names, range(len(names))), theirs) == [before]
