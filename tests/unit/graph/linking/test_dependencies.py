"""The edges between host operations, activities and communications."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossrank.tools.graph.linking import Edge, EdgeKind, LinkedTrace, link
from crossrank.tools.graph.linking.dependencies import NEVER, ordered_by
from tests.unit.graph.linking.small_traces import SmallTrace, comm_params
from tests.unit.graph.linking.test_communications import text


def edges(result: LinkedTrace, kind: EdgeKind) -> list[tuple[int, int]]:
    return [(edge.source, edge.target) for edge in result.edges if edge.kind == kind]


def test_callers_and_program_order_follow_start_times_per_thread(tmp_path: Path) -> None:
    trace = SmallTrace()
    first = trace.op("first", -10, 5, 1)
    a = trace.op("a", 0, 100)
    b = trace.op("b", 10, 20, a)
    c = trace.op("c", 12, 5, b)
    other = trace.op("other thread", 13, 5, 3, tid=2)
    d = trace.op("d", 40, 20, a)
    e = trace.op("e", 200, 20)
    result = link(*trace.write(tmp_path))
    assert edges(result, "caller") == [(1, 2), (1, 3), (1, first), (2, a), (a, b), (b, c), (3, other), (a, d), (2, e)]
    assert edges(result, "program_order") == [(first, a), (c, d), (d, e)]  # a to b and b to c are calls


def test_an_enclosing_operation_replaces_a_caller_that_had_ended(tmp_path: Path) -> None:
    trace = SmallTrace()
    outer = trace.op("outer", 0, 200)
    work = trace.op("gloo:all_reduce", 10, 400, outer)
    inside_work = trace.op("inside the time of a Work", 50, 10, work)
    ended = trace.op("ended", 70, 10, outer)
    late = trace.op("late", 100, 10, ended)
    at_edge = trace.op("at the edge of another", 100, 5, outer)
    alone = trace.op("outside all", 300, 10, work)
    del trace.nodes[:3]
    callers = {op.id: op.caller for op in link(*trace.write(tmp_path)).host}
    expected = {inside_work: outer, ended: outer, late: outer, at_edge: outer, alone: 0}
    assert {one: callers[one] for one in expected} == expected


def test_streams_are_ordered_per_device(tmp_path: Path) -> None:
    trace = SmallTrace()
    op = trace.op("a", 0, 1000)
    trace.launch("k1", 10, 20, 5, 501)
    trace.launch("k2", 30, 40, 5, 502, stream=20)
    trace.launch("k3", 50, 60, 5, 503)
    trace.launch("on another device", 70, 80, 5, 504, device=1)
    result = link(*trace.write(tmp_path))
    k1, k2, k3, k4 = 5, 6, 7, 8
    assert edges(result, "stream") == [(k1, k3)]
    assert edges(result, "launch") == [(op, k1), (op, k2), (op, k3), (op, k4)]


def test_a_backward_operation_depends_on_the_last_forward_operation_with_its_number(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.op("aten::linear", 0, 50, seq_id=0)
    addmm = trace.op("aten::addmm", 10, 30, 4, seq_id=0)
    trace.op("aten::relu", 60, 5, seq_id=8)
    evaluate = trace.op("autograd::engine::evaluate_function: AddmmBackward0", 100, 50, 3, tid=2)
    backward = trace.op("AddmmBackward0", 105, 40, evaluate, tid=2, seq_id=0, scope=1, fw_tid=1)
    trace.op("OtherBackward0", 160, 4, 3, tid=2, seq_id=99, scope=1, fw_tid=1)
    assert edges(link(*trace.write(tmp_path)), "forward_backward") == [(addmm, backward)]


def test_a_thread_start_or_resume_depends_on_another_threads_last_op(tmp_path: Path) -> None:
    trace = SmallTrace()
    loss = trace.op("loss", 0, 150)
    backward = trace.op("backward", 200, 5000, 3, tid=2)
    trace.op("more backward", 5300, 100, 3, tid=2)
    step = trace.op("optimizer", 5600, 50)
    trace.op("between two that follow one another", 5660, 20, 3, tid=2)
    trace.op("soon after", 5700, 50)
    trace.op("after a pause in which nobody else worked", 90_000, 50)
    result = link(*trace.write(tmp_path))
    inferred = sorted((edge for edge in result.edges if edge.kind == "inter_thread"), key=lambda edge: edge.target)
    assert inferred == [
        Edge(loss, backward, "inter_thread", inferred=True, slack_ns=50_000),
        Edge(step - 1, step, "inter_thread", inferred=True, slack_ns=200_000),
    ]


def test_a_blocking_call_or_idle_time_shows_that_a_thread_waits(tmp_path: Path) -> None:
    trace = SmallTrace()

    def call(ts: float, number: int, work_us: float, *, is_async: bool) -> int:
        record = {"op": "all_reduce", "c10d": "allreduce_", "pg": "0", "bytes": 96, "async": is_async}
        trace.op(f"crossrank#{number}", ts, 20, inputs=text(record))
        return trace.op("gloo:all_reduce", ts + 5, work_us)

    blocking = call(0, 1, 10, is_async=False)
    trace.op("after", 30, 10)
    waited_for = call(100, 2, 300, is_async=True)
    after = trace.op("after", 420, 10)
    call(500, 3, 100, is_async=True)
    trace.op("aten::mm", 530, 300)
    trace.op("busy when the Work ended", 840, 10)
    call(900, 4, 50, is_async=True)
    result = link(*trace.write(tmp_path))
    assert [edge for edge in result.edges if edge.kind == "sync"] == [
        Edge(blocking, blocking + 1, "sync"),
        Edge(waited_for, after, "sync", inferred=True, slack_ns=15_000),
    ]
    assert result.report.syncs_unresolved == {
        "the traces show no wait for the end of a Work": 1,
        "the execution trace ends first": 1,
    }


@pytest.mark.parametrize(
    ("name", "until", "waits"),
    [
        ("aten::mm", 500, False),
        ("Reducer::wait", 500, True),
        ("c10d::barrier", 500, True),
        ("aten::mm", 404, False),
        ("aten::mm", 30, True),
    ],
)
def test_the_operation_at_the_end_of_a_work_shows_if_a_thread_waits(
    name: str, until: float, waits: bool, tmp_path: Path
) -> None:
    trace = SmallTrace()
    around = trace.op(name, 0, until)
    trace.op(
        "crossrank#1", 5, 20, around, inputs=text({"op": "all_reduce", "c10d": "allreduce_", "pg": "0", "bytes": 96})
    )
    work = trace.op("gloo:all_reduce", 10, 400)
    after = trace.op("after", 420, 10)
    assert edges(link(*trace.write(tmp_path)), "sync") == ([(work, after)] if waits else [])


def test_communications_are_ordered_per_group_and_per_peer(tmp_path: Path) -> None:
    trace = SmallTrace()
    calls = [("allreduce", 0, "0"), ("send", 1, "0"), ("allreduce", 0, "4"), ("broadcast", 0, "0")]
    nodes = []
    for i, (name, rank, pg) in enumerate([*calls, ("send", 2, "0"), ("send", 1, "0")]):
        inputs = comm_params(name, 1, (pg, ""), rank=rank, size=3)
        nodes.append(trace.op("record_param_comms", 10 * i, 5, inputs=inputs))
    assert edges(link(*trace.write(tmp_path)), "group_order") == [(nodes[0], nodes[3]), (nodes[1], nodes[5])]


def test_every_edge_joins_existing_nodes_and_is_unique(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.op("a", 0, 100)
    for i in range(5):
        trace.launch(f"k{i}", 10 + i, 20 + 5 * i, 4, 501 + i, stream=7 + i % 2)
    trace.call("cudaDeviceSynchronize", 50, 40, 600)
    trace.op("b", 200, 10)
    result = link(*trace.write(tmp_path))
    ids = {op.id for op in result.host} | {activity.id for activity in result.activities}
    pairs = [(edge.source, edge.target, edge.kind) for edge in result.edges]
    assert ids.issuperset(end for source, target, _ in pairs for end in (source, target))
    assert len(pairs) == len(set(pairs))
    assert sum(result.report.edges.values()) == len(pairs)


def test_lanes_find_entries_by_key_and_time() -> None:
    lanes = ordered_by([("a", 30, 7), ("b", 10, 1), ("a", 10, 5), ("a", 20, 6)])
    assert [lanes["a"].last_until(time) for time in (9, 10, 19, 20, 99)] == [-1, 5, 5, 6, 7]
    assert [lanes["a"].first_from(time) for time in (0, 10, 11, 30, 31)] == [5, 5, 6, 7, -1]
    assert (lanes["b"].at_or_before(10), lanes["b"].at_or_before(9)) == ((10, 1), NEVER)
    assert (lanes["c"].last_until(5), lanes["c"].first_from(0)) == (-1, -1)
