"""The file that link writes: what Chakra's converter reads, and what we add."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from crossrank.errors import CrossrankError
from crossrank.tools.graph.linking import Edge, LinkedTrace, link, linked_file
from crossrank.tools.graph.linking.linked_file import microseconds, read_linked, write_linked
from tests.unit.graph.linking.small_traces import ET_HEAD, SmallTrace, comm_params, flat_node


def trace_with_everything() -> SmallTrace:
    trace = SmallTrace()
    op = trace.op("aten::mm", 0.5, 100.125)
    trace.launch("gemm", 10, 30.001, 270, 501)
    trace.op("record_param_comms", 40, 20, op, inputs=comm_params("allreduce", 3))
    trace.launch("ncclDevKernel_AllReduce_Sum_f32(x)", 45, 305, 45, 504, stream=20, grid=[8, 1, 1])
    trace.call("cudaDeviceSynchronize", 110, 250, 505)
    trace.sync("Context Sync", 110, 245, 505, stream=4294967295)
    trace.op("aten::add", 400, 50)
    trace.op("on the other thread", 5000, 50, 3, tid=2)
    trace.nodes.append(trace.nodes[-1] | {"id": 90, "name": "## process_group:init ##", "attrs": []})
    return trace


def written(trace: SmallTrace, folder: Path) -> dict[str, Any]:
    path = folder / "linked.json"
    write_linked(link(*trace.write(folder)), path)
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_nodes_have_the_fields_that_chakras_converter_reads(tmp_path: Path) -> None:
    content = written(trace_with_everything(), tmp_path)
    assert ET_HEAD.items() <= content.items()
    nodes = {node["id"]: node for node in content["nodes"]}
    assert list(nodes) == [1, 2, 3, 4, 5, 6, 7, 90, 91, 92]
    assert all({"id", "name", "ctrl_deps", "inputs", "outputs", "attrs"} <= set(node) for node in content["nodes"])
    times = {"inclusive_dur": 100.125, "exclusive_dur": 80.125, "ts": 0.5}
    of_op = {"id": 4, "name": "aten::mm", "ctrl_deps": 2, "inter_thread_dep": None} | times
    assert {name: one for name, one in nodes[4].items() if name not in ("inputs", "outputs", "attrs")} == of_op
    gemm, reduce = nodes[91], nodes[92]
    fields = ("ctrl_deps", "cat", "ph", "stream", "ts", "inclusive_dur")
    assert [gemm[name] for name in fields] == [4, "kernel", "X", 7, 30.001, 270]
    assert gemm["attrs"] == nodes[4]["attrs"]  # the converter reads thread and ids of an activity from its host node
    assert "pg_name" not in gemm
    assert [reduce[name] for name in ("ctrl_deps", "pg_name", "comm_host")] == [5, "0", 5]
    assert reduce["args"]["grid"] == [8, 1, 1]
    assert nodes[6]["sync_dep"] == [91, 92]
    assert nodes[7]["inter_thread_dep"] == 6
    assert "ts" not in nodes[90]


def test_our_fields_give_dependencies_and_communications(tmp_path: Path) -> None:
    nodes = {node["id"]: node for node in written(trace_with_everything(), tmp_path)["nodes"]}
    waited_for = {5: "program_order", 91: "sync", 92: "sync"}
    assert nodes[6]["deps"] == [{"id": source, "kind": kind} for source, kind in waited_for.items()]
    assert nodes[7]["deps"] == [{"id": 6, "kind": "inter_thread", "inferred": True, "slack_ns": 4550000}]
    assert nodes[92]["deps"] == [{"id": 5, "kind": "launch"}]
    assert [number for number, node in nodes.items() if "comm" in node] == [5]
    record: dict[str, Any] = {"id": 0, "op": "all_reduce", "c10d": "allreduce", "pg": "0", "bytes": 96, "t": 40000}
    record |= {"seq": 3} | {"in": [[24]], "dtype": "float32"}
    group = {"pg": "0", "size": 2, "ranks": [0, 1], "desc": "default_pg"}
    known = {"origin": "record_param_comms", "host": 5, "activities": [92], "work": None, "seq_counted": False}
    assert nodes[5]["comm"] == known | {"record": record, "group": group}


def test_the_header_gives_inputs_and_match_quality(tmp_path: Path) -> None:
    trace = trace_with_everything()
    head = written(trace, tmp_path)["crossrank"]
    digest = hashlib.sha256((tmp_path / "rank-0.et.json").read_bytes()).hexdigest()
    assert head["inputs"]["rank-0.et.json"] == digest
    assert set(head["inputs"]) == {"rank-0.et.json", "rank-0.kineto.json"}
    assert (head["rank"], head["world_size"], head["base_time_ns"]) == (0, 2, 1714644000000000000)
    assert head["match"]["host_matched"] == {"record function id": 4}
    assert head["match"]["edges"]["sync"] == 2


@pytest.mark.parametrize(
    ("out", "decompress"),
    [
        ("out.zst", lambda data: zstandard.ZstdDecompressor().decompressobj().decompress(data)),
        ("out.gz", gzip.decompress),
        ("out", bytes),
    ],
)
def test_the_same_input_gives_the_same_bytes(tmp_path: Path, out: str, decompress: Callable[[bytes], bytes]) -> None:
    contents = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        write_linked(link(*trace_with_everything().write(folder)), folder / out)
        contents.append((folder / out).read_bytes())
        assert sorted(path.name for path in folder.iterdir()) == [out, "rank-0.et.json", "rank-0.kineto.json"]
    assert contents[0] == contents[1]
    assert len(json.loads(decompress(contents[0]))["nodes"]) == 10


ATTRIBUTES = ("rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid", "op_schema")


def test_flat_nodes_get_the_layout_that_the_converter_reads(tmp_path: Path) -> None:
    trace = SmallTrace(nodes=[flat_node(1, "root", 1), flat_node(2, "[pytorch|profiler|execution_graph|thread]", 1)])
    trace.et_head["schema"] = "1.0.1"
    trace.nodes.append(
        flat_node(3, "aten::t", 2, 1, op_schema="t(Tensor self)", inputs=[4], input_shapes=[[]], input_types=["Int"])
    )
    trace.host_event("aten::t", 1, 2, 1)
    content = written(trace, tmp_path)
    assert content["schema"] == "1.0.2-chakra.0.0.4"
    assert content["crossrank"]["et_schema"] == "1.0.1"
    node = content["nodes"][2]
    assert node["inputs"] == {"values": [4], "shapes": [[]], "types": ["Int"]}
    assert {attr["name"]: attr["value"] for attr in node["attrs"]} == dict(
        zip(ATTRIBUTES, (1, 0, -1, 0, 1, 0, "t(Tensor self)"), strict=True)
    )


@pytest.mark.parametrize(("lost", "under"), [(0, 2), (3, 4)])
def test_an_activity_without_a_host_node_is_kept_under_a_thread_and_marked(
    lost: int, under: int, tmp_path: Path
) -> None:
    trace = SmallTrace()
    trace.op("early", 0, 10)
    trace.launch("between", 20, 25, 5, 501)
    trace.op("late", 40, 10)
    del trace.nodes[:lost]  # without roots it stands under the first node
    node = written(trace, tmp_path)["nodes"][-1]
    assert (node["name"], node["ctrl_deps"], node["unlinked"]) == ("between", under, "no operation encloses its launch")
    given = list(zip(ATTRIBUTES, (0, 0, -1, 0, 0, 0, ""), strict=True))
    assert [(one["name"], one["value"]) for one in node["attrs"]] == given


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = link(*trace_with_everything().write(tmp_path))
    result.edges.append(Edge(1, 4, object()))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        write_linked(result, tmp_path / "out.json.zst")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.et.json", "rank-0.kineto.json"]


def _content(trace: LinkedTrace) -> Any:
    ops = [
        (op.id, op.name, op.rf_id, op.tid, op.caller, op.is_work, op.start_ns)
        + (op.duration_ns, op.exclusive_ns, op.blocked_ns)
        for op in trace.host
    ]
    return ops, trace.activities, trace.communications, sorted(trace.edges, key=str), trace.report


def test_a_written_trace_reads_back_unchanged(tmp_path: Path) -> None:
    trace = trace_with_everything()
    trace.op("gloo:all_reduce", 6000, 90, 7)
    trace.launch("in no operation", 390, 392, 23, 505)
    trace.call("cudaStreamSynchronize", 410, 20, 506)
    trace.sync("Stream Sync", 410, 20, 506)
    trace.op("aten::mul", 460, 5)
    result = link(*trace.write(tmp_path))
    assert [op.blocked_ns for op in result.host if op.blocked_ns] == [5_000]
    write_linked(result, tmp_path / "linked.json.zst")
    assert _content(read_linked(str(tmp_path / "linked.json.zst"))) == _content(result)


@pytest.mark.parametrize(
    ("node", "changes", "message"),
    [
        (6, {"id": 4}, "two nodes have the id 4, the second is 'aten::add'"),
        (6, {"deps": [{"id": 777, "kind": "sync"}]}, "node 6 depends on 777, which is not another node of the file"),
        (6, {"deps": [{"id": 6, "kind": "sync"}]}, "node 6 depends on 6, which is not another node of the file"),
        (5, {"comm": {"work": 777}}, "the all_reduce of node 5 names node 777, which does not exist"),
        (5, {"comm": {"activities": [92, 777]}}, "the all_reduce of node 5 names node 777, which does not exist"),
        (6, {"ts": 1 << 52}, "node 6 ('aten::add'): ValueError: invalid time 4503599627370496 us"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(
    node: int, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    content = written(trace_with_everything(), tmp_path)
    (changed,) = (one for one in content["nodes"] if one["id"] == node)
    changed |= {"comm": changed["comm"] | changes["comm"]} if "comm" in changes else changes
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(content))
    with pytest.raises(CrossrankError) as error:
        read_linked(str(path))
    assert str(error.value) == f"{path}: {message}; link it again"


@pytest.mark.parametrize("size", [0, -1, (1 << 20) + 1, 1 << 61])
def test_an_invalid_number_of_ranks_raises_a_doubt(size: int, tmp_path: Path) -> None:
    content = written(trace_with_everything(), tmp_path)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(content | {"crossrank": content["crossrank"] | {"world_size": size}}))
    trace = read_linked(str(path))
    assert trace.world_size is None
    assert trace.report.doubts[-1] == f"the trace gives the job {size} ranks, which is not valid"


def test_microseconds_keep_every_digit() -> None:
    texts = [bytes(microseconds(ns)) for ns in (0, 1, 999, 1000, -1500, 1694128201435418123)]
    assert texts == [b"0", b"0.001", b"0.999", b"1", b"-1.500", b"1694128201435418.123"]


@pytest.mark.parametrize("batch", [1, 2, 5, 10, 11])
def test_the_file_is_json_for_any_number_of_nodes_per_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    whole = written(trace_with_everything(), tmp_path)
    assert len(whole["nodes"]) == 10
    monkeypatch.setattr(linked_file, "_BATCH", batch)
    assert written(trace_with_everything(), tmp_path) == whole
