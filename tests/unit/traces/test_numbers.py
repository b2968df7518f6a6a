"""Numbers, decimals and texts beyond reason cost their row or their file, and are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crossrank.errors import CrossrankError
from crossrank.tools.graph.linking.linked_file import read_linked
from crossrank.tools.traces.execution_trace import io_texts, read_execution_trace
from crossrank.tools.traces.kineto import read_kineto

NODE = {"id": 1, "name": "[pytorch|profiler|execution_trace|thread]", "ctrl_deps": 1, "inputs": {}, "outputs": {}}


def trace(path: Path, **changes: Any) -> str:
    whole = {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "start_ts": 1, "nodes": [NODE, NODE | {"id": 2}], "finish_ts": 2}
    path.write_text(json.dumps(whole | changes))
    return str(path)


@pytest.mark.parametrize(
    ("field", "value"), [("pid", -1), ("start_ts", 1 << 63), ("finish_ts", 10**400), ("schema", "\ud800")]
)
def test_an_impossible_head_field_is_skipped_and_reported(tmp_path: Path, field: str, value: object) -> None:
    read = read_execution_trace(trace(tmp_path / "rank-0.et.json", **{field: value}))
    assert len(read.nodes) == 2
    assert [text for text in read.damage if text.startswith(f"{field} is unusable")]


@pytest.mark.parametrize("number", [str(1 << 62), str(-(1 << 63)), "1" + "0" * 30])
def test_a_node_with_an_impossible_number_is_skipped_and_counted(tmp_path: Path, number: str) -> None:
    path = trace(tmp_path / "rank-0.et.json", nodes=[NODE, NODE | {"id": 2, "ctrl_deps": "@"}])
    Path(path).write_text(Path(path).read_text().replace('"@"', number))
    read = read_execution_trace(path)
    assert [node.id for node in read.nodes] == [1]
    assert [text for text in read.damage if text.startswith("1 of 2 nodes are unusable")]


@pytest.mark.parametrize("time", ["NaN", "sNaN", "Infinity", "1E+999999999", "-1E+400"])
@pytest.mark.parametrize("field", ["ts", "dur"])
def test_a_decimal_that_is_not_a_time_is_reported(tmp_path: Path, time: str, field: str) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": "1.5", "dur": "2"}
    path = tmp_path / "rank-0.kineto.json"
    events = [event | {"args": {"External id": 1}}, event | {field: time}]
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    read = read_kineto(str(path))
    assert read.host[0].start == 1500
    assert read.damage


@pytest.mark.parametrize("time", ["NaN", "1E+999999999", "-1E+400"])
def test_an_impossible_time_is_refused_in_one_line(tmp_path: Path, time: str) -> None:
    head = {"version": "0", "rank": 0, "world_size": 1, "et_schema": "", "base_time_ns": 0, "inputs": {}, "groups": []}
    path = trace(tmp_path / "rank-0.linked.json", nodes=[NODE | {"ts": time}], crossrank=head)
    with pytest.raises(CrossrankError) as error:
        read_linked(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_invalid_text_in_inputs_is_shown_with_replacement_characters() -> None:
    values, shapes, types = io_texts(msgspec.Raw(b'{"values":["\xed\xa0"],"shapes":[[]],"types":["String"]}'))
    assert (values, shapes, types) == ('["\ufffd\ufffd"]', "[[]]", '["String"]')
