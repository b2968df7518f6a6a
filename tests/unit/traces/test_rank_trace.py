"""Calls in columns: as records, in another order, and in place of others."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from crossrank.comm import MOST, UNKNOWN_STEP, CommRecord, Group
from crossrank.tools.traces.rank_trace import (
    IMPOSSIBLE,
    RankTrace,
    TraceBuilder,
    Waits,
    launch_of,
    sort_by_time,
    with_members,
    with_records,
)


def call(id: int, op: str = "all_reduce", **fields: Any) -> CommRecord:
    return CommRecord(id=id, op=op, c10d="", pg="0", **{"bytes": 4, "t": 0} | fields)


def build(*records: CommRecord) -> RankTrace:
    trace = RankTrace(rank=0, path="f", source="comms")
    builder = TraceBuilder(trace, [Group(pg="0", size=2)])
    for record in records:
        builder.add(record, called=record.t, began=record.t and record.t + 5, ended=record.t and record.t + 25)
    return trace


RECORDS = [
    call(1, t=300, seq=1, step=2),
    call(2, "send", t=200, p2p_seq=1, peer=1, batch=0),
    call(3, t=100, seq=2, step=3),
]


def test_a_row_is_the_added_record_and_equal_calls_share_a_signature() -> None:
    trace = build(*RECORDS)
    assert list(trace.records()) == RECORDS
    assert list(trace.calls.signature) == [0, 1, 0]
    assert [trace.took(row) for row in range(3)] == [20] * 3
    trace.calls.took[0], trace.calls.began[1], trace.calls.ended[2] = 7, 0, 0
    assert [trace.took(row) for row in range(3)] == [7, None, None]


def test_calls_are_sorted_by_time_with_their_related_data() -> None:
    trace = build(*RECORDS)
    trace.unawaited = {0}
    sort_by_time(trace)
    assert list(trace.records()) == RECORDS[::-1]
    assert trace.unawaited == {2}


@pytest.mark.parametrize(
    ("fields", "given", "kept"),
    [
        ({"seq": (1 << 62) - 1}, (1 << 60, (1 << 62) - 1), True),
        ({"seq": 1 << 62}, (1 << 60, 0), False),
        ({"t": -1, "seq": 4}, (0, 4), False),
        ({"t": 1 << 62, "seq": 4}, (0, 4), False),
        ({"step": 1 << 31, "seq": 4}, (1 << 60, 4), False),
        ({"step": -1, "seq": 4}, (1 << 60, 4), False),
        ({"id": -(1 << 62), "seq": 4}, (1 << 60, 4), False),
    ],
)
def test_an_impossible_number_costs_itself_alone(fields: dict[str, int], given: tuple[int, int], kept: bool) -> None:
    record = msgspec.structs.replace(call(5, t=1 << 60), **fields)
    trace = RankTrace(rank=0, path="f", source="comms")
    TraceBuilder(trace).add(record, called=record.t)
    assert (trace.calls.called[0], trace.calls.number[0]) == given
    assert (trace.calls.id[0], trace.calls.step[0]) == (
        -1 if abs(record.id) > 1 << 61 else 5,
        UNKNOWN_STEP if "step" in fields else 0,
    )
    assert trace.unattributed == ({} if kept else {IMPOSSIBLE: 1})
    assert [one.group for one in trace.groups] == [Group(pg="0", size=0)]


def test_a_size_from_damaged_extents_is_marked_as_impossible() -> None:
    trace = RankTrace(rank=0, path="f", source="basic")
    extents = [[(1 << 62) - 1]]
    TraceBuilder(trace).add(msgspec.structs.replace(call(5), inputs=extents, bytes=extents[0][0] * 8), called=0)
    assert [(one.bytes, one.inputs) for one in trace.signatures] == [(MOST + 1, [])]


def test_the_first_definition_of_a_group_counts_unless_the_last_is_requested() -> None:
    trace = build()
    builder = TraceBuilder(trace)
    assert (builder.define(Group(pg="0", size=3)), builder.define(Group(pg="0", size=2), "gloo")) == (0, 1)
    assert [one.group.size for one in trace.groups] == [2, 2]
    builder.define(Group(pg="0", size=5), anew=True)
    assert [(one.group.size, one.apart) for one in trace.groups] == [(5, ""), (2, "gloo")]
    assert [trace.is_gloo(group) for group in (None, 0, 1)] == [False, False, True]


def test_replacement_calls_keep_the_times_and_waits_of_their_rows() -> None:
    trace = build(*RECORDS)
    trace.waits = Waits(array("q", [2, -1, 3]), array("b", [0, -1, 1]), array("q", [10, 20, 30]), 2, 1)
    other = call(9, "recv", p2p_seq=1, peer=1, batch=2)
    made = with_records(trace, [(RECORDS[0], 0), (other, 1), (RECORDS[1], 1), (RECORDS[2], 2)])
    assert list(made.records()) == [RECORDS[0], msgspec.structs.replace(other, t=200), *RECORDS[1:]]
    assert list(made.calls.ended) == [325, 225, 225, 125]
    assert list(made.calls.batch) == [-1, 2, 0, -1]
    assert made.waits == Waits(
        array("q", [3, -1, -1, 4]), array("b", [0, -1, -1, 1]), array("q", [10, 20, 20, 30]), 2, 1
    )
    assert list(trace.records()) == RECORDS


def test_launches_are_split_into_their_calls_with_the_same_number() -> None:
    members = [call(0, bytes=4), call(0, "broadcast", bytes=6)]
    launch = launch_of(members)
    assert (launch.bytes, launch.members, launch_of(members[:1])) == (10, members, members[0])
    whole = build(msgspec.structs.replace(launch, id=6, t=50, seq=8), call(7, t=60, seq=9))
    assert list(with_members(whole).records()) == [
        call(6, t=50, seq=8, batch=6),
        call(6, "broadcast", bytes=6, t=50, seq=8, batch=6),
        call(7, t=60, seq=9),
    ]
    assert with_members(build(*RECORDS)).calls == build(*RECORDS).calls


def test_calls_inside_a_node_may_be_left_out() -> None:
    groups = [Group(pg="0", size=2, locality=locality) for locality in ("intra_node", "cross_node", "unknown")]
    trace = build()
    assert [trace.leaves_out(group) for group in groups] == [False] * 3
    trace.filtered = True
    assert [trace.leaves_out(group) for group in groups] == [True, False, False]
