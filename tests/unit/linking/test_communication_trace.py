"""Reading the communication alone gives what reading everything gives, wherever the file is cut into pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossrank.tools.linking import communication_trace as module
from crossrank.tools.linking.communication_trace import CommunicationTrace, read_communication_trace
from tests.unit.linking.public_traces import needs_traces, public
from tests.unit.replay.test_readers import SCHEMAS, et_node


def _summary(trace: CommunicationTrace) -> Any:
    return (
        trace.schema,
        [(one.record, one.group, one.origin, one.host) for one in trace.communications],
        [(before, wait.seq) for before, wait in trace.waits],
        trace.groups,
    )


def _whole(path: str, monkeypatch: pytest.MonkeyPatch) -> CommunicationTrace:
    with monkeypatch.context() as patched:
        patched.setattr(module, "_scan", lambda path: None)
        return read_communication_trace(path, 8)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_pieces_of_any_size_give_the_same(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
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
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_BATCH", data.draw(st.integers(1, 4000)))
        streamed = read_communication_trace(str(path), 8)
        assert _summary(streamed) == _summary(_whole(str(path), patched))


@needs_traces
def test_real_traces_give_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    path = public("dlrm_8gpu/rank-3.et.json.gz")
    monkeypatch.setattr(module, "_BATCH", 10_000)
    assert _summary(read_communication_trace(path, 8)) == _summary(_whole(path, monkeypatch))
    assert len(read_communication_trace(path, 8).communications) == 8


def test_a_torn_file_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    nodes = [et_node(SCHEMAS[-1], number, "allreduce", number) for number in range(2, 6)]
    text = json.dumps({"schema": SCHEMAS[-1], "nodes": nodes})
    path = tmp_path / "rank-0.json"
    path.write_text(text[: len(text) - 40])
    trace = read_communication_trace(str(path))
    assert len(trace.communications) == 3
    assert "3 whole nodes were read" in trace.damage[0]
