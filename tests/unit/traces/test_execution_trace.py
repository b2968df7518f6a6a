"""Execution traces of every layout, and what is repaired in broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crossrank.comm import Group
from crossrank.errors import CrossrankError
from crossrank.tools.traces.execution_trace import ExecutionTrace, attributes, io, io_texts, read_execution_trace
from tests.unit.graph.linking.small_traces import flat_node, nested_node


def read(path: Path, nodes: list[dict[str, Any]], schema: str = "1.1.0-chakra.0.0.4") -> ExecutionTrace:
    head = {"schema": schema, "pid": 5, "time": "t", "start_ts": 1, "finish_ts": 2}
    (path / "et.json").write_text(json.dumps(head | {"nodes": nodes}))
    return read_execution_trace(str(path / "et.json"))


def test_flat_and_nested_nodes_are_read_alike(tmp_path: Path) -> None:
    tensor = [4, 5, 0, 6, 4, "cuda:0"]
    about: dict[str, Any] = {"tid": 2, "seq_id": 9, "scope": 1, "fw_tid": 1, "op_schema": 'mm(Tensor "x")'}
    shapes, types = [[2, 3]], ["Tensor(float)"]
    sides: dict[str, Any] = {"inputs": [tensor], "input_shapes": shapes, "input_types": types}
    given = {"values": [tensor], "shapes": shapes, "types": types}
    flat = [flat_node(1, "root", 1), flat_node(7, "aten::mm", 1, 3, **about, **sides)]
    nested = [nested_node(1, "root", 1, tid=0), nested_node(7, "aten::mm", 1, 3, inputs=given, **about)]
    for trace in (read(tmp_path, flat, "1.0.1"), read(tmp_path, nested)):
        node = trace.nodes[1]
        numbers = (node.id, node.caller, node.rf_id, node.tid, node.seq_id, node.scope, node.fw_tid)
        assert numbers == (7, 1, 3, 2, 9, 1, 1)
        assert (node.start_ns, node.duration_ns, node.exclusive_ns, node.blocked_ns) == (None, 0, 0, 0)
        assert (io(node.inputs).values, io(node.inputs).shapes, io(node.outputs).values) == ([tensor], shapes, [])
        assert (attributes(node)["op_schema"], attributes(node)["rf_id"]) == ('mm(Tensor "x")', 3)
        assert (trace.pid, trace.start_ts, trace.finish_ts, trace.warnings) == (5, 1, 2, ())
        assert trace.nodes[0].caller == 0  # the root is its own parent in the file


@pytest.mark.parametrize(
    "schema", ["1.0.1", "1.0.2-chakra.0.0.4", "1.0.3-chakra.0.0.4", "1.0.4", "1.1.0", "1.1.1-chakra.1.0.0"]
)
def test_known_schemas_give_no_warning(tmp_path: Path, schema: str) -> None:
    assert read(tmp_path, [nested_node(1, "a", 0)], schema).warnings == ()


def test_an_unknown_schema_is_tried_with_a_warning(tmp_path: Path) -> None:
    trace = read(tmp_path, [nested_node(1, "a", 0), nested_node(2, "b", 0) | {"ctrl_deps": None}], "1.4.0-chakra.2")
    assert [node.caller for node in trace.nodes] == [0, 0]
    assert trace.warnings == (
        "schema '1.4.0-chakra.2' is not known, read as '1.1.1-chakra.0.0.4'; check what it links",
    )


def test_a_parent_may_come_later_and_have_the_larger_id(tmp_path: Path) -> None:
    trace = read(tmp_path, [nested_node(5, "inner", 9, 2), nested_node(9, "outer", 0, 1)])
    assert [(node.id, node.caller) for node in trace.nodes] == [(5, 9), (9, 0)]
    assert trace.warnings == ()


def test_duplicate_ids_are_renumbered_and_reported(tmp_path: Path) -> None:
    nodes = ((4, "a", 0), (4, "b", 0), (6, "c", 4), (4, "d", 0))
    trace = read(tmp_path, [nested_node(*one) for one in nodes])
    found = [(node.id, node.name, node.caller) for node in trace.nodes]
    assert found == [(4, "a", 0), (6, "c", 4), (7, "b", 0), (8, "d", 0)]
    assert trace.warnings == (
        "2 node(s) have an id that another node has (4, 4); the later ones are numbered from 7 on",
    )


def test_a_missing_parent_is_replaced_by_the_thread(tmp_path: Path) -> None:
    root = nested_node(2, "[pytorch|profiler|execution_trace|thread]", 0, tid=1)
    process = nested_node(3, "[pytorch|profiler|execution_trace|process]", 0, tid=4)
    trace = read(tmp_path, [root, process, nested_node(5, "a", 77, 1), nested_node(6, "b", 78, 2, tid=4)])
    assert [(node.id, node.caller) for node in trace.nodes] == [(2, 0), (3, 0), (5, 2), (6, 0)]
    assert "2 node(s) name a parent that is not in the file (first: node 5;" in trace.warnings[0]


def test_a_cycle_of_parents_is_cut(tmp_path: Path) -> None:
    nodes = ((1, "a", 2, 1), (2, "b", 3, 2), (3, "c", 1, 3), (4, "d", 3, 4))
    trace = read(tmp_path, [nested_node(*one) for one in nodes])
    assert [(node.id, node.caller) for node in trace.nodes] == [(1, 2), (2, 3), (3, 0), (4, 3)]
    assert trace.warnings == ("1 chain(s) of parents form a cycle (first: at node 3); cut there",)


def test_a_chain_of_a_hundred_thousand_parents_is_read(tmp_path: Path) -> None:
    count = 100_000
    trace = read(tmp_path, [nested_node(i, "a", i + 1 if i < count else 0, count - i + 1) for i in range(1, count + 1)])
    assert trace.nodes[0].caller == 2
    assert trace.warnings == ()


@pytest.mark.parametrize(
    "attrs",
    [
        None,
        {},
        [1],
        [{"value": 1}],
        [{"name": "rf_id", "value": "abc"}],
        [{"name": "tid", "value": 2.7}],
        [{"name": "tid", "value": 1 << 64}],
    ],
)
def test_invalid_attributes_are_counted(tmp_path: Path, attrs: Any) -> None:
    trace = read(tmp_path, [nested_node(1, "a", 0), nested_node(8, "b", 1) | {"attrs": attrs}])
    a, b = trace.nodes
    assert (a.name, a.rf_id, a.tid) == ("a", 0, 1)
    assert (b.name, b.rf_id, b.tid, b.seq_id, b.scope, b.fw_parent, b.fw_tid) == ("b", 0, 0, -1, 0, 0, 0)
    assert trace.damage == ("1 attribute(s) are not as the schema has them (first: of node 8)",)


def test_a_trace_without_nodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CrossrankError, match="has no nodes"):
        read(tmp_path, [])


def test_the_size_of_a_group_is_not_trusted_blindly(tmp_path: Path) -> None:
    for hostile in ('[{"pg_name": "0", "group_size": 9223372036854775808}]', "[" * 5000, "7"):
        inputs = {"values": [hostile], "shapes": [[]], "types": ["String"]}
        (group,) = read(tmp_path, [nested_node(3, "## process_group:init ##", 0, inputs=inputs)]).groups or (None,)
        assert group is None or len(group.ranks or ()) <= 1 << 20


def test_process_groups_are_read_and_the_world_has_its_ranks(tmp_path: Path) -> None:
    same = {"backend_config": "cuda:nccl", "group_count": 2}
    world = {"pg_name": "0", "pg_desc": "default_pg", "ranks": [], "group_size": 3}
    late = {"pg_name": "7", "pg_desc": "late", "ranks": [0, 2], "group_size": 2}
    config = json.dumps([world | same, late | same])
    node, cut_short = (
        nested_node(
            number, "## process_group:init ##", 0, inputs={"values": values, "shapes": [[]], "types": ["String"]}
        )
        for number, values in ((3, [config]), (4, [config[:50], 3]))
    )
    assert read(tmp_path, [node, cut_short]).groups == (
        Group(pg="0", size=3, ranks=[0, 1, 2], desc="default_pg", backend="cuda:nccl"),
        Group(pg="7", size=2, ranks=[0, 2], desc="late", backend="cuda:nccl"),
    )


def test_wanted_nodes_are_children_of_their_nearest_wanted_caller(tmp_path: Path) -> None:
    parents = {2: ("a", 0), 3: ("x", 2), 4: ("x", 3), 5: ("a", 4), 6: ("x", 7), 7: ("x", 6), 8: ("a", 6), 9: ("a", 2)}
    parents |= {1: ("a", 0), 10: ("a", 77)}
    given = {"values": [1], "shapes": [[]], "types": ["Int"]}
    nodes = [nested_node(id, name, parent, id, inputs=given) for id, (name, parent) in parents.items()]
    read(tmp_path, nodes)
    trace = read_execution_trace(str(tmp_path / "et.json"), lambda name: name == "a")
    assert [(node.id, node.caller) for node in trace.nodes] == [(1, 0), (2, 0), (5, 2), (8, 0), (9, 2), (10, 0)]
    assert all(node.rf_id == node.id for node in trace.nodes)
    assert io_texts(trace.nodes[0].inputs) == ("[1]", "[[]]", '["Int"]')
    assert io_texts(trace.nodes[0].outputs) == io_texts(msgspec.Raw(b"[]")) == ("[]", "[]", "[]")
    assert trace.warnings == ()
