"""The steps from a linked trace to nodes and their bytes, on traces that are made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from crossrank.comm import CommRecord, Group
from crossrank.tools.graph.chakra.chakra_graph import ChakraNode, Comm, Dependency, NumberedGroup, Options
from crossrank.tools.graph.chakra.framing import read_trace
from crossrank.tools.graph.chakra.steps import convert_communications, convert_nodes, draw_dependencies
from crossrank.tools.graph.chakra.write import delay_start, write_chakra
from crossrank.tools.graph.linking import Activity, Communication, Edge, HostOp, LinkedTrace, MatchReport
from crossrank.tools.output.chakra import as_dict

GROUP = NumberedGroup(number="0", ranks=(0, 1), pg="0")


def linked(**fields: Any) -> LinkedTrace:
    given: dict[str, Any] = {"host": [], "activities": [], "communications": [], "edges": []} | fields
    unknown: dict[str, Any] = dict.fromkeys(("rank", "world_size", "pid", "time", "start_ts", "finish_ts"))
    return LinkedTrace(schema="", base_ns=0, inputs={}, groups=[], report=MatchReport(), **unknown, **given)


def host_op(node_id: int, **times: Any) -> HostOp:
    return HostOp(id=node_id, name=f"op {node_id}", caller=0, rf_id=node_id, tid=1, **times)


def kernel(node_id: int) -> Activity:
    return Activity(node_id, "kernel", "kernel", 0, 7, 10 * node_id, 5, None, None, None, msgspec.Raw(b"{}"))


def call(op: str, c10d: str = "", batch: int | None = None, **fields: Any) -> Communication:
    record = CommRecord(id=0, op=op, c10d=c10d, pg="0", bytes=8, t=70, batch=batch)
    return Communication(record=record, origin="comms file", **fields)


def test_operations_without_times_start_at_0_and_durations_are_not_negative() -> None:
    nodes = convert_nodes(linked(host=[host_op(1), host_op(2, exclusive_ns=5, blocked_ns=9)]))
    assert [(node.start_ns, node.duration_ns) for node in nodes.values()] == [(0, 0), (0, 0)]


def test_every_communication_with_a_known_operation_has_a_node() -> None:
    trace = linked(
        host=[host_op(1, start_ns=5), host_op(2, start_ns=6, duration_ns=3)],
        activities=[kernel(3), kernel(4), kernel(5)],
        communications=[
            call("send", "isend", batch=0),
            call("all_reduce", activities=[3], group=Group(pg="0", size=2)),
            call("recv", "irecv", batch=0, activities=[4], host=1),  # the kernel of the whole batch
            call("mystery"),
            call("mystery", activities=[5], host=1),
            call("all_gather"),
            call("mystery", work=2),
            call("send", batch=1),
            call("barrier"),
        ],
    )
    nodes, warnings = convert_nodes(trace), list[str]()
    assert convert_communications(trace, nodes, {"0": GROUP}, warnings) == {3: [3], 4: [4, 6], 5: [5]}
    assert [text.partition(" with ")[0] for text in warnings] == ["2 communication(s)"]
    stream = ("stream", (0, 7))
    assert [(n.id, n.name, n.runs_on, n.start_ns, n.duration_ns) for n in nodes.values() if n.comm is not None] == [
        (2, "op 2", ("communication", 2), 6, 3),
        (3, "kernel", stream, 30, 5),
        (4, "isend", stream, 40, 5),
        (6, "irecv", ("communication", 6), 40, 5),
        (7, "all_gather", ("communication", 7), 70, 0),
        (8, "barrier", ("communication", 8), 70, 0),
        (9, "send", ("communication", 9), 70, 0),
    ]
    assert not any(node.dependencies for node in nodes.values())


def test_the_first_communication_of_an_empty_graph_is_node_1() -> None:
    nodes: dict[int, ChakraNode] = {}
    convert_communications(linked(communications=[call("barrier")]), nodes, {"0": GROUP}, [])
    assert list(nodes) == [1]


def test_overlapping_communications_of_a_group_do_not_wait_for_each_other() -> None:
    comm = Comm(call("all_reduce").record, GROUP)
    starts = {1: 0, 2: 5, 3: 20}
    nodes = {i: ChakraNode(i, "x", ("communication", i), start, 10, comm=comm) for i, start in starts.items()}
    edges = [Edge(1, 2, "group_order"), Edge(2, 3, "group_order"), Edge(1, 2, "sync"), Edge(1, 3, "caller")]
    draw_dependencies(linked(edges=[*edges, Edge(99, 3, "sync")]), nodes, {})
    shown = [node.dependencies for node in nodes.values()]
    assert shown == [[], [Dependency(1, "sync")], [Dependency(2, "group_order"), Dependency(1, "launch")]]


def test_unknown_values_of_a_node_are_marked_unknown(tmp_path: Path) -> None:
    path = tmp_path / "chakra.0.et"
    nodes = [
        ChakraNode(1, "kernel", ("stream", ("gpu", None)), -5, 1500),
        ChakraNode(2, "send", ("communication", 2), 0, 0, comm=Comm(call("send").record, GROUP)),
    ]
    write_chakra(linked(), nodes, [], path, Options())
    first, second = (as_dict(node) for _, node in read_trace(str(path))[1])
    assert (first["start_time_micros"], first["duration_micros"]) == (0, 2)
    times = {"is_cpu_op": False, "start_ns": -5, "duration_ns": 1500}
    assert first["attr"] == times | {"device": -1, "stream": -1}
    assert {name: value for name, value in second["attr"].items() if name.startswith("comm_")} == {
        "comm_size": 8, "comm_op": "send", "comm_src": -1, "comm_dst": -1, "comm_tag": 0,
    }  # fmt: skip
    content = path.read_bytes()
    delay_start(path, 5000)  # no host node that could begin later
    assert path.read_bytes() == content
