"""Linked traces as Chakra files: nodes, dependencies, and what the feeders ask for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crossrank.comm import CommRecord, Group
from crossrank.errors import CrossrankError
from crossrank.tools.graph.chakra import et_def_pb2 as pb
from crossrank.tools.graph.chakra.chakra_graph import LATE, Options
from crossrank.tools.graph.chakra.convert import Converted, convert
from crossrank.tools.graph.chakra.feeder_contract import check
from crossrank.tools.graph.chakra.framing import read_trace
from crossrank.tools.graph.chakra.lower import RUNS_AS
from crossrank.tools.graph.chakra.simulate import RankGraph, simulate
from crossrank.tools.graph.chakra.write import COLLECTIVE_TYPES, comm_size
from crossrank.tools.graph.linking import Communication, Edge, LinkedTrace, MatchReport, link
from crossrank.tools.output.chakra import as_dict
from tests.unit.graph.linking.small_traces import FLOATS, SmallTrace, comm_params
from tests.unit.graph.linking.test_communications import batched


def params(name: str, seq: int = 1, *, pg: str = "0", **facts: Any) -> dict[str, Any]:
    return comm_params(name, [seq, False], [pg, "desc"], **facts)


def converted(trace: SmallTrace, folder: Path, **options: Any) -> tuple[dict[int, dict[str, Any]], Converted]:
    return write(link(*trace.write(folder)), folder, **options)


def write(
    trace: LinkedTrace, folder: Path, *, faults: tuple[str, ...] = (), **options: Any
) -> tuple[dict[int, dict[str, Any]], Converted]:
    """The nodes by id, without pauses where `options` do not ask for them, and without the node that stands for the
    time until the rank began."""
    path = folder / "chakra.0.et"
    result = convert(trace, path, Options(**{"pauses": False} | options))
    nodes = [as_dict(node) for _, node in read_trace(str(path))[1]]
    assert tuple(check(str(path)).faults) == faults
    written = [node["id"] for node in nodes]
    for place, node in enumerate(nodes):  # all that a node waits for stands before it
        assert set(node.get("data_deps", []) + node.get("ctrl_deps", [])) <= set(written[:place])
    (start,) = (node["id"] for node in nodes if node["name"] == LATE)
    for node in nodes:
        if node.get("data_deps") == [start]:
            del node["data_deps"]
    return {node["id"]: node for node in nodes if node["id"] != start}, result


def two_streams() -> SmallTrace:
    trace = SmallTrace()
    outer = trace.op("aten::linear", 0, 40)
    trace.op("aten::addmm", 10, 20, outer, inputs={"values": [FLOATS], "shapes": [[24]], "types": ["Tensor(float)"]})
    trace.launch("gemm", 15, 30, 270, 501)
    trace.op("record_param_comms", 50, 20, inputs=params("allreduce"))
    trace.call("cudaStreamWaitEvent", 52, 1, 503)
    trace.launch("ncclDevKernel_AllReduce_Sum_f32(x)", 55, 305, 45, 504, stream=20)
    trace.call("cudaDeviceSynchronize", 110, 250, 505)
    trace.op("aten::add", 400, 50)
    return trace


def test_every_kind_of_dependency_reaches_the_file(tmp_path: Path) -> None:
    nodes, result = converted(two_streams(), tmp_path)
    linear, addmm, params_, add, gemm, reduce = 4, 5, 6, 7, 8, 9
    assert {i: node.get("data_deps", []) for i, node in nodes.items()} == {
        linear: [],
        addmm: [linear],
        params_: [addmm],
        add: [params_, gemm, reduce],  # the host waited for both streams
        gemm: [addmm],
        reduce: [params_, gemm],  # launched by the call, after what the caller computes
    }
    assert nodes[addmm]["ctrl_deps"] == [linear]
    assert result.dependencies == {"program_order": 3, "caller": 1, "launch": 2, "stream_wait": 1, "sync": 2}


def test_deps_data_makes_the_order_of_a_thread_control_only(tmp_path: Path) -> None:
    nodes, _ = converted(two_streams(), tmp_path, deps="data")
    assert (nodes[5]["ctrl_deps"], nodes[5].get("data_deps")) == ([4], None)
    assert (nodes[7]["ctrl_deps"], nodes[7]["data_deps"]) == ([6], [8, 9])


def test_nodes_have_their_times_and_the_fields_of_both_feeders(tmp_path: Path) -> None:
    path = tmp_path / "chakra.0.et"
    convert(link(*two_streams().write(tmp_path)), path)
    nodes = {node.id: node for _, node in read_trace(str(path))[1]}
    gemm, reduce = nodes[8], nodes[9]
    assert (gemm.type, gemm.start_time_micros, gemm.duration_micros) == (pb.COMP_NODE, 1714644000000030, 270)
    kinds = {a.name: (a.WhichOneof("value"), getattr(a, a.WhichOneof("value") or "")) for a in gemm.attr}
    assert kinds == {
        "is_cpu_op": ("bool_val", False),
        "start_ns": ("int64_val", 30_000),
        "duration_ns": ("int64_val", 270_000),
        "device": ("int64_val", 0),
        "stream": ("int64_val", 7),
        "tensor_size": ("uint64_val", 96),
    }
    kinds = {a.name: (a.WhichOneof("value"), getattr(a, a.WhichOneof("value") or "")) for a in reduce.attr}
    assert reduce.type == pb.COMM_COLL_NODE
    assert kinds == {
        "is_cpu_op": ("bool_val", False),
        "start_ns": ("int64_val", 305_000),
        "duration_ns": ("int64_val", 45_000),
        "device": ("int64_val", 0),
        "stream": ("int64_val", 20),
        "comm_size": ("int64_val", 96),
        "pg_name": ("string_val", "0"),
        "comm_op": ("string_val", "all_reduce"),
        "dtype": ("string_val", "float32"),
        "comm_type": ("int64_val", pb.ALL_REDUCE),
        "seq": ("int64_val", 1),
    }
    host = {"is_cpu_op": True, "start_ns": 0, "duration_ns": 10_000, "rf_id": 1, "tid": 1}
    assert as_dict(nodes[4])["attr"] == host
    addmm = nodes[5]
    assert (addmm.duration_micros, nodes[4].duration_micros) == (20, 10)  # of the caller, until its call
    assert json.loads(addmm.inputs.shapes) == [[24]]


def test_the_metadata_names_its_source_and_lists_groups_for_the_feeder(tmp_path: Path) -> None:
    trace = two_streams()
    trace.op("record_param_comms", 500, 20, inputs=params("allreduce", pg="tp-group", size=1))
    path = tmp_path / "chakra.0.et"
    result = convert(link(*trace.write(tmp_path)), path, Options(group_node=True))
    metadata, nodes = read_trace(str(path))
    assert metadata.version == "0.0.4"
    values = as_dict(pb.Node(attr=metadata.attr))["attr"]
    assert json.loads(values["match"])["host_nodes"] == 5
    given = {"schema": "1.1.1-chakra.0.0.4", "pid": 70, "time": "2024-05-02 10:00:01", "start_ts": 1, "finish_ts": 2}
    assert given.items() <= values.items()
    world, small = result.groups
    assert (world.number, world.ranks, small.ranks, small.pg) == ("0", (0, 1), (0,), "tp-group")
    assert 0 < int(small.number) < 1 << 31
    assert [fault.partition(",")[0] for fault in check(str(path)).faults] == ["a METADATA_NODE"]
    start, first = (node for _, node in nodes if node.name == LATE or node.type == pb.METADATA_NODE)
    assert first.id == start.id + 1
    assert first.inputs.values.startswith("['[")
    assert json.loads(first.inputs.values[2:-2]) == [
        {"pg_name": "0", "pg_desc": "desc", "ranks": [0, 1]},
        {"pg_name": small.number, "pg_desc": "desc", "ranks": [0]},
    ]


@pytest.mark.parametrize("op", sorted(COLLECTIVE_TYPES))
def test_every_collective_has_its_type_and_the_bytes_of_one_rank(tmp_path: Path, op: str) -> None:
    trace = SmallTrace()
    trace.op("record_param_comms", 0, 20, inputs=params(op.replace("_", "")))
    cannot = f"ASTRA-sim cannot run {op.upper()}; convert with --lower astra-sim"
    nodes, _ = converted(trace, tmp_path, faults=(cannot,) if op in RUNS_AS else ())
    (node,) = (node for node in nodes.values() if node["type"] == "COMM_COLL_NODE")
    assert node["attr"]["comm_type"] == COLLECTIVE_TYPES[op]
    assert node["attr"]["comm_size"] == (0 if op == "barrier" else 96)
    assert node["data_deps"] == [4]


def test_an_uneven_all_to_all_keeps_its_splits(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.op("record_param_comms", 0, 20, inputs=params("all_to_allv", splits=([20, 4], [12, 12])))
    nodes, _ = converted(trace, tmp_path)
    (node,) = (node for node in nodes.values() if node["type"] == "COMM_COLL_NODE")
    assert (node["attr"]["in_split"], node["attr"]["out_split"]) == ([20, 4], [12, 12])


def test_all_gather_counts_the_shard() -> None:
    assert comm_size(CommRecord(id=0, op="all_gather", c10d="x", pg="0", bytes=800, t=0), 8) == 100
    assert comm_size(CommRecord(id=0, op="reduce_scatter", c10d="x", pg="0", bytes=800, t=0), 8) == 800


def test_a_batch_of_sends_and_receives_is_not_an_all_to_all(tmp_path: Path) -> None:
    trace = SmallTrace()
    group = Group(pg="0", size=2, ranks=[0, 1])
    first, second = (trace.op(f"c10d::{op}", 10 * i, 5) for i, op in enumerate(("send", "recv_")))
    end = trace.op("nccl:coalesced", 20, 10)
    trace.launch("ncclDevKernel_SendRecv(x)", 22, 40, 30, 501, stream=20)
    trace.launch("after", 25, 80, 5, 502, stream=20)
    result = link(*trace.write(tmp_path))
    kernel, after = 7, 8
    (alone,) = result.communications
    assert alone.activities == [kernel]
    for number, (op, host) in enumerate((("send", first), ("recv", second))):
        record = CommRecord(id=number, op=op, c10d=op, pg="0", bytes=96, t=host, peer=1, p2p_seq=(1 << 20) + 4, batch=0)
        result.communications.insert(number, Communication(record=record, group=group, origin="comms file", host=host))
    nodes, _ = write(result, tmp_path)
    send, receive = nodes[kernel], nodes[9]
    assert (send["type"], receive["type"]) == ("COMM_SEND_NODE", "COMM_RECV_NODE")
    assert {key: send["attr"][key] for key in ("comm_src", "comm_dst", "comm_tag", "comm_size")} == {
        "comm_src": 0, "comm_dst": 1, "comm_tag": 4, "comm_size": 96,
    }  # fmt: skip
    assert (receive["attr"]["comm_src"], receive["attr"]["comm_dst"], receive["attr"]["comm_tag"]) == (1, 0, 4)
    assert send["data_deps"] == receive["data_deps"] == [end]
    assert nodes[after]["data_deps"] == [kernel, 9]


def test_calls_that_share_a_kernel_have_a_node_each(tmp_path: Path) -> None:
    trace = SmallTrace()
    batched(trace)
    trace.launch("after", 130, 400, 5, 600)
    result = link(*trace.write(tmp_path))
    for one in result.communications:
        one.group = Group(pg="0", size=2, ranks=[0, 1])
    nodes, _ = write(result, tmp_path)
    found = [(node["type"], node["duration_micros"]) for node in nodes.values() if node["type"].startswith("COMM")]
    assert sorted(found) == [("COMM_RECV_NODE", 30), ("COMM_SEND_NODE", 30)]


@pytest.mark.parametrize(("times", "node"), [((7_000, 3_000), (7, 3)), ((None, 0), (10, 0))])
def test_a_work_is_a_communication_with_its_own_times(tmp_path: Path, times: Any, node: tuple[int, int]) -> None:
    trace = SmallTrace()
    call, work = trace.op("c10d::allreduce_", 10, 5), trace.op("gloo:all_reduce", 12, 9, 3, tid=2)
    result = link(*trace.write(tmp_path))
    result.host[-1].start_ns, result.host[-1].duration_ns = times
    record = CommRecord(id=0, op="all_reduce", c10d="x", pg="0", bytes=8, t=0)
    group = Group(pg="0", size=2, ranks=[0, 1])
    result.communications = [Communication(record=record, group=group, origin="comms file", host=call, work=work)]
    written = write(result, tmp_path)[0][work]
    assert (written["name"], written["type"]) == ("gloo:all_reduce", "COMM_COLL_NODE")
    assert (written["attr"]["start_ns"] // 1000, written["duration_micros"]) == node


def test_a_call_on_an_undefined_group_is_refused(tmp_path: Path) -> None:
    trace = SmallTrace()
    values = [[FLOATS], 5, "pp", 0, "allreduce", [], []]
    trace.op("record_param_comms", 0, 5, inputs={"values": values, "shapes": [[]] * 7, "types": [""] * 7})
    with pytest.raises(CrossrankError, match="all_reduce of node 4 is on process group 'pp', which no file defines"):
        converted(trace, tmp_path)
    assert not (tmp_path / "chakra.0.et").exists()


def test_a_kernel_known_only_by_name_stays_a_computation_and_is_reported(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.op("aten::mm", 0, 100)
    trace.launch("ncclDevKernel_Generic(x)", 10, 20, 30, 501)
    nodes, result = converted(trace, tmp_path)
    assert nodes[5]["type"] == "COMP_NODE"
    assert result.warnings[0].startswith(
        "1 communication(s) with unknown operation or group are written as computations"
    )


def cycle(folder: Path, kind: Any, *, inferred: bool) -> LinkedTrace:
    trace = SmallTrace()
    trace.op("first", 0, 10)
    trace.op("second", 20, 10)
    result = link(*trace.write(folder))
    result.edges.append(Edge(5, 4, kind, inferred))
    return result


def test_a_cycle_is_broken_at_its_weakest_edge_and_reported(tmp_path: Path) -> None:
    nodes, result = write(cycle(tmp_path, "inter_thread", inferred=True), tmp_path)
    assert (nodes[4].get("data_deps"), nodes[5]["data_deps"]) == (None, [4])
    assert result.warnings == [
        "dropped the inferred inter_thread edge 5 -> 4 of a cycle: "
        "4 (first) waits by inferred inter_thread for 5 (second) waits by program_order for 4"
    ]


def test_a_fact_implied_only_by_a_dropped_edge_is_kept(tmp_path: Path) -> None:
    trace = SmallTrace()
    for i in range(3):
        trace.op(f"first {i}", 20 * i, 10)
    other = trace.op("other thread", 100, 10, 3, tid=2)
    result = link(*trace.write(tmp_path))
    result.edges = [edge for edge in result.edges if edge.kind != "inter_thread"]
    result.edges += [
        Edge(4, other, "forward_backward"),
        Edge(6, other, "inter_thread", inferred=True),  # implies the one above, but closes a cycle
        Edge(other, 5, "sync"),
    ]
    nodes, report = write(result, tmp_path)
    assert nodes[other]["data_deps"] == [4]
    assert nodes[5]["data_deps"] == [4, other]
    assert len(report.warnings) == 1


def test_collectives_are_compared_in_the_order_of_their_sequence_numbers(tmp_path: Path) -> None:
    trace = SmallTrace()
    for i, (seq, start) in enumerate(((2, 200), (1, 300))):
        trace.op("record_param_comms", 20 * i, 10, inputs=params("allreduce" if seq == 1 else "broadcast", seq=seq))
        trace.launch("ncclDevKernel_AllReduce_Sum_f32(x)", 20 * i + 2, start, 20, 501 + i, stream=20 + i)
    _, report = converted(trace, tmp_path)
    assert report.collectives == {"0": ["all_reduce of 96 B", "broadcast of 96 B"]}


def test_nodes_follow_their_dependencies_regardless_of_times(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.op("aten::mm", 10, 100)
    for i, (start, stream) in enumerate(((20, 7), (30, 7), (35, 8))):
        trace.launch(f"kernel {i}", 11 + i, start, 5, 501 + i, stream=stream)
    result = link(*trace.write(tmp_path))
    result.edges.append(Edge(7, 5, "stream_wait"))
    nodes, report = write(result, tmp_path)
    assert list(nodes) == [4, 7, 5, 6]
    assert (report.begin_ns - result.base_ns, report.length_ns) == (10_000, 100_000)


def test_a_trace_without_nodes_becomes_a_file_without_nodes(tmp_path: Path) -> None:
    path = tmp_path / "chakra.0.et"
    trace = LinkedTrace(
        rank=None, world_size=None, schema="", base_ns=0, inputs={}, groups=[], report=MatchReport(), pid=None,
        time=None, start_ts=None, finish_ts=None, host=[], activities=[], communications=[], edges=[],
    )  # fmt: skip
    result = convert(trace, path, Options(group_node=True), keep_graph=True)
    assert result.graph == RankGraph(rank=0, begin_ns=0, end_ns=0, nodes=[])
    assert simulate([result.graph]).makespan_ns == 0
    assert replace(result, size=Converted().size, graph=None) == Converted()
    assert Converted().size == 0
    metadata, nodes = read_trace(str(path))
    assert {"pid": 0, "time": "", "start_ts": 0, "finish_ts": 0}.items() <= as_dict(pb.Node(attr=metadata.attr))[
        "attr"
    ].items()
    assert [node.id for _, node in nodes] == [2]


def test_an_error_for_a_large_value_names_its_node(tmp_path: Path) -> None:
    result = link(*two_streams().write(tmp_path))
    result.activities[0].duration_ns = 1 << 70
    with pytest.raises(CrossrankError, match=r"node 8 \(gemm\) does not fit into a Chakra node"):
        convert(result, tmp_path / "chakra.0.et")
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize(
    ("inferred", "strict", "why"), [(True, True, "--strict refuses"), (False, False, "all its edges are certain")]
)
def test_a_cycle_of_facts_or_with_strict_is_refused(tmp_path: Path, inferred: bool, strict: bool, why: str) -> None:
    trace = cycle(tmp_path, "sync", inferred=inferred)
    with pytest.raises(CrossrankError, match=f"dependencies form a cycle: 4 .first. waits by .*; {why}"):
        convert(trace, tmp_path / "chakra.0.et", Options(strict=strict))
    assert not (tmp_path / "chakra.0.et").exists()


def test_edges_implied_by_lane_order_are_left_out(tmp_path: Path) -> None:
    trace = two_streams()
    result = link(*trace.write(tmp_path))
    result.edges += [Edge(4, 7, "forward_backward"), Edge(8, 9, "stream_wait"), Edge(5, 9, "launch")]
    nodes, report = write(result, tmp_path)
    assert nodes[7]["data_deps"] == [6, 8, 9]
    assert nodes[9]["data_deps"] == [6, 8]
    assert report.implied == 3
