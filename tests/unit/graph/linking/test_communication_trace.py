"""Reading the communication alone gives what reading everything gives, wherever the file is cut into pieces."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossrank.recording import read_chunks
from crossrank.tools.graph.linking import communication_trace as module
from crossrank.tools.graph.linking.communication_trace import CommunicationTrace, read_communication_trace
from crossrank.tools.traces import json_document
from crossrank.tools.traces.execution_trace import read_execution_trace
from tests.unit.graph.linking.public_traces import needs_traces, public
from tests.unit.graph.linking.small_traces import SmallTrace
from tests.unit.graph.linking.test_communications import RANGE, SCHEMA, TENSORS, text
from tests.unit.replay.test_readers import SCHEMAS, et_node


def _summary(trace: CommunicationTrace) -> Any:
    return (
        [(one.record, one.group, one.origin, one.host) for one in trace.communications],
        [(before, wait.seq) for before, wait in trace.waits],
        trace.groups,
    )


def _in_pieces(path: str, batch: int, chunk: int) -> CommunicationTrace:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_document, "_BATCH", batch)
        patched.setattr(json_document, "read_chunks", partial(read_chunks, size=chunk))
        return read_communication_trace(path, 8)


def _of_all_nodes(path: str) -> CommunicationTrace:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "read_execution_trace", lambda path, _: read_execution_trace(path))
        return read_communication_trace(path, 8)


@settings(max_examples=40)
@given(data=st.data())
def test_the_piece_size_does_not_matter(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    schema = data.draw(st.sampled_from(SCHEMAS))
    names = data.draw(st.lists(st.sampled_from(["allreduce", "wait", "barrier", "view"]), min_size=1, max_size=8))
    nodes = []
    for number, name in enumerate(names):
        node = et_node(schema, number + 2, name, number)
        if name == "view":
            node["name"] = data.draw(st.sampled_from(["aten::view", 'odd },\n{ "id": 3', "a]}", '"', "\\"]))
        nodes.append(node)
    path = tmp_path_factory.mktemp("et") / "rank-0.json"
    indent = data.draw(st.sampled_from([None, 2]))
    path.write_text(json.dumps({"schema": schema, "nodes": nodes, "finish_ts": 2}, indent=indent))
    pieces = _in_pieces(str(path), data.draw(st.integers(1, 4000)), data.draw(st.integers(1, 4000)))
    assert _summary(pieces) == _summary(_of_all_nodes(str(path)))


@needs_traces
def test_real_traces_read_in_pieces_give_the_same_result() -> None:
    path = public("dlrm_8gpu/rank-3.et.json.gz")
    pieces = _in_pieces(path, 10_000, 1 << 20)
    assert _summary(pieces) == _summary(_of_all_nodes(path))
    assert len(pieces.communications) == 8


def test_a_truncated_file_is_read_up_to_the_damage(tmp_path: Path) -> None:
    names = ("wait", "allreduce", "start_coalescing", "allreduce", "wait", "novel", "allreduce", "allreduce")
    nodes = [et_node(SCHEMAS[-1], number, name, number) for number, name in enumerate(names, start=2)]
    text = json.dumps({"schema": SCHEMAS[-1], "nodes": nodes})
    path = tmp_path / "rank-0.json"
    path.write_text(text[: len(text) - 40])
    trace = read_communication_trace(str(path))
    assert len(trace.communications) == 3
    assert [before for before, _ in trace.waits] == [0, 2]
    assert trace.unknown == ["novel"]
    assert "7 whole nodes were read" in trace.damage[0]


@pytest.mark.parametrize("taken_off", ["nothing", "c10d", "functional", "both"])
def test_ops_of_one_call_with_wrong_callers_are_one_communication(taken_off: str, tmp_path: Path) -> None:
    trace = SmallTrace()
    backward = trace.op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 0, 200)
    for call in range(2):
        functional = trace.op("_c10d_functional::all_reduce", 10, 90, backward, inputs=TENSORS)
        around_c10d = backward if taken_off in ("functional", "both") else functional
        c10d = trace.op("c10d::allreduce_", 11, 80, around_c10d, inputs=TENSORS, op_schema=SCHEMA)
        around_range = {"c10d": functional, "both": backward}.get(taken_off, c10d)
        trace.op(f"crossrank#{call}", 12, 70, around_range, inputs=text(RANGE))
    alone = trace.op("c10d::allreduce_", 150, 9, backward, inputs=TENSORS, op_schema=SCHEMA)
    trace.op("crossrank#9", 170, 9, backward, inputs=text(RANGE | {"op": "broadcast"}))
    found = read_communication_trace(trace.write(tmp_path)[0]).communications
    assert [one.origin for one in found] == ["crossrank range", "crossrank range", "c10d op", "crossrank range"]
    assert found[2].host == alone
    assert {one.record.t for one in found} == {0}
