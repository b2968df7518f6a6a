"""What goes out in one launch, how many bytes it moves to whom, its number and its time."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from crossrank.comm import CommRecord, Group
from crossrank.tools.job.job import Job
from crossrank.tools.job.launches import BEGIN_ALONE, LEFT_OUT, SEND_RECV, TIMED_BY, UNTIMED, Launches, launches
from crossrank.tools.traces.rank_trace import RankTrace, TraceBuilder

WORLD = Group(pg="0", size=3, ranks=[2, 1, 0])
US = 1000


def traced(
    *records: dict[str, Any], rank: int = 1, group: Group = WORLD, times: tuple[int, ...] = (), **facts: Any
) -> RankTrace:
    """Calls at 10, 20, … us, each with as many us of the device from 2 us later as `times` says."""
    trace = RankTrace(rank=rank, path="a", **{"source": "kineto", "timed_by": "kineto"} | facts)
    builder = TraceBuilder(trace, [group])
    for index, given in enumerate(records):
        record = CommRecord(**dict[str, Any]({"id": index, "c10d": "", "pg": "0", "bytes": 0, "t": 0} | given))
        called, took = (index + 1) * 10 * US, times[index] * US if index < len(times) else 0
        began, ended = (called + 2 * US, called + 2 * US + took) if took else (0, 0)
        builder.add(record, called=called, began=began, ended=ended)
    return trace


def made(trace: RankTrace) -> Launches:
    return launches(Job.match([trace]))


def times_us(found: Launches) -> list[tuple[float, float, float]]:
    times = found.calls.select(pl.col("called_ns", "began_ns", "ended_ns").fill_null(0) / US)
    return times.rows()


def test_sends_and_receives_of_one_launch_are_one_row_with_the_larger_direction() -> None:
    batch: dict[str, Any] = {"op": "send", "batch": 1}
    trace = traced(
        {"op": "all_reduce", "bytes": 64, "seq": 5, "root": 2, "source": "a.py:1", "step": 3},
        batch | {"peer": 0, "bytes": 100, "locality": "intra_node"},
        batch | {"peer": 1, "bytes": 5000},
        batch | {"op": "recv", "peer": 2, "bytes": 90, "locality": "cross_node"},
        batch | {"bytes": 7},
        {"op": "send", "peer": 0, "bytes": 30, "p2p_seq": 4},
        {"op": "recv", "peer": 0, "bytes": 30, "p2p_seq": 9},
        times=(4, 5, 0, 5),
    )
    trace.records_steps = True
    found = made(trace)
    assert [(one.label, one.bytes, one.recorded, one.exchanged, one.ends, one.calls) for one in found.kinds] == [
        ("all_reduce", 64, 64, -1, None, 1),
        (SEND_RECV, 30, 30, -1, (1, 0), 1),
        (SEND_RECV, 30, 30, -1, (0, 1), 1),
        ("send/recv, batched", 107, 5197, 107, None, 4),
    ]
    shown = [(one.root, one.source, one.locality) for one in (found.kinds[0], found.kinds[3])]
    assert shown == [(2, "a.py:1", "unknown"), (None, None, "cross_node")]
    assert found.calls["kind"].to_list() == [0, 3, 1, 2]
    assert found.calls["id"].to_list() == [0, 1, 5, 6]
    assert found.calls["step"].to_list() == [3, 0, 0, 0]
    assert found.calls["number"].to_list() == [5, 1, 1, 1]  # torch counts sends and receives by group
    assert found.calls["counted"].to_list() == [False, True, True, True]
    assert times_us(found) == [(10, 12, 16), (20, 22, 47), (60, 0, 0), (70, 0, 0)]
    assert (found.sent, found.not_placed) == ({1: {0: 100}}, 7)
    assert (found.attributed, found.unattributed) == ({TIMED_BY["kineto"]: 5}, {UNTIMED: 2})
    two = made(traced(batch | {"peer": 0, "bytes": 9}, batch | {"op": "recv", "peer": 0, "bytes": 4}))
    assert (two.sent, two.kinds[0].bytes, two.kinds[0].whole) == ({1: {0: 9}}, 9, False)
    pairs = made(traced(*({"op": "send", "peer": 0, "p2p_seq": number} for number in (4, 6)), numbered_pairs=True))
    assert (pairs.calls["number"].to_list(), pairs.calls["counted"].to_list()) == ([4, 6], [False, False])


def test_an_uneven_all_to_all_reports_bytes_per_receiver() -> None:
    # Of rows of 4 floats rank 1, the second member, sends 1 to rank 2, keeps 2, sends 3 to rank 0, and gets 3, 2, 5.
    uneven: dict[str, Any] = {"op": "all_to_all", "dtype": "float32", "bytes": 96}
    shapes: dict[str, Any] = {"inputs": [[6, 4]], "outputs": [[10, 4]]}
    full = uneven | shapes | {"in_split": [1, 2, 3], "out_split": [3, 2, 5]}
    found = made(
        traced(
            full,
            full,
            full | {"out_split": None},
            full | {"in_split": None},
            full | {"in_split": [1, 5]},  # fewer than members
            full | {"dtype": None},
            full | {"in_split": [0, 0, 0], "out_split": None, "inputs": [[0, 4]], "bytes": 0},
            uneven | {"bytes": 40},
        )
    )
    kinds = [found.kinds[at] for at in found.calls["kind"]]
    known, out_alone, no_type, none, total = (160, 96, 128), (96, 96, 64), (96, 96, -1), (0, 0, 0), (40, 40, -1)
    assert [(one.bytes, one.recorded, one.exchanged) for one in kinds] == [
        *(known, known, out_alone, known, known, no_type, none, total)
    ]
    assert {one.calls for one in kinds} == {1}
    assert [found.kinds[at].releases_all for at in found.calls["kind"][-3:]] == [True, False, True]
    assert found.sent == {1: {2: 4 * 16, 0: 4 * 48}}
    assert found.not_placed == 2 * 96
    last = made(traced(full | {"in_split": [1, 5]}, rank=0))
    assert [(one.bytes, one.exchanged) for one in last.kinds] == [(160, 96)]
    inferred = made(traced(full, group=Group(pg="7", size=3), rank=0))
    assert ([one.exchanged for one in inferred.kinds], inferred.not_placed) == ([160], 96)


def test_a_launch_is_complete_if_its_call_ids_are_consecutive() -> None:
    gathered: dict[str, Any] = {"op": "all_gather", "bytes": 10, "seq": 2}
    found = made(
        traced(
            gathered | {"id": 0, "batch": 0},
            gathered | {"id": 1, "batch": 0},
            gathered | {"id": 7, "batch": 6},
            gathered | {"id": 8, "batch": 6},
            gathered | {"id": 9, "batch": 9},
            gathered | {"id": 11, "batch": 9, "bytes": 0},
        )
    )
    kinds = (found.kinds[at] for at in found.calls["kind"])
    assert [(one.label, one.bytes, one.whole, one.sized) for one in kinds] == [
        ("all_gather, coalesced", 20, True, True),
        ("all_gather, coalesced", 20, False, True),
        ("all_gather, coalesced", 10, False, False),
    ]
    for batch, ids, whole in ((3, (3, 4), True), (3, (3, 5), False), (None, (3, 5), True)):
        members = [CommRecord(id=n, op="all_gather", c10d="", pg="0", bytes=10, t=0, batch=batch) for n in ids]
        alone = made(traced({"op": "all_gather", "members": members, "bytes": 20, "seq": 1}))
        assert [(one.bytes, one.calls, one.whole) for one in alone.kinds] == [(20, 2, whole)]


@pytest.mark.parametrize(
    ("records", "facts", "number", "counted"),
    [
        ([{"op": "all_reduce"}, {"op": "all_reduce", "seq": 9}], {}, [None, 9], False),
        ([{"op": "all_reduce", "seq": 8}, {"op": "all_reduce", "seq": 9}], {"numbered": False}, [1, 2], True),
        ([{"op": "kernel", "seq": 8}, {"op": "kernel"}], {"numbered": False}, [None, None], True),
        ([{"op": "kernel", "seq": 8}, {"op": "kernel"}], {}, [8, None], False),
    ],
)
def test_calls_are_counted_only_in_files_without_numbers(
    records: list[dict[str, Any]], facts: dict[str, Any], number: list[int | None], counted: bool
) -> None:
    found = made(traced(*records, **facts))
    assert (found.calls["number"].to_list(), found.calls["counted"].to_list()) == (number, [counted, counted])


def test_a_call_with_a_negative_number_is_not_compared() -> None:
    trace = traced({"op": "all_reduce"}, {"op": "all_reduce"}, numbered=False)
    trace.calls.number[1] = -1
    assert made(trace).calls["number"].to_list() == [1, None]


def test_times_are_counted_by_their_source() -> None:
    # 10 us from where the device began, 20 from the call, an end without a begin.
    trace = traced(*[{"op": "all_reduce", "seq": 1}] * 4, times=(5, 0, 0, 0), timed_by="flight", left_out=3)
    trace.calls.took[0], trace.calls.took[1], trace.calls.ended[2] = 10 * US, 20 * US, 99 * US
    found = made(trace)
    assert times_us(found) == [(10, 12, 22), (20, 20, 40), (30, 0, 0), (40, 0, 0)]
    assert (found.attributed, found.unattributed) == ({TIMED_BY["flight"]: 2}, {LEFT_OUT: 3, UNTIMED: 2})
    trace = traced(*[{"op": "all_reduce"}] * 2, timed=False, timed_by="comms")
    assert (times_us(made(trace)), made(trace).unattributed) == ([(0, 0, 0)] * 2, {BEGIN_ALONE: 2})
    trace = traced({"op": "all_reduce"}, {"op": "all_reduce"}, times=(1,), timed_by="nsight")
    trace.attributed["ranges"] = 2
    assert (made(trace).attributed, made(trace).unattributed) == ({"ranges": 2}, {})
    assert made(traced()).kinds == []
    assert made(traced()).unattributed == {}
