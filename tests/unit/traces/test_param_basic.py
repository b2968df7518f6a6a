"""PARAM's basic traces: lists of calls, groups, waits and computations."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from crossrank.comm import CommRecord, Group
from crossrank.tools.traces.param_basic import read_basic
from crossrank.tools.traces.rank_trace import RankTrace, Waits


def read(folder: Path, *rows: dict[str, Any]) -> RankTrace:
    (folder / "basic.json").write_text(json.dumps(rows))
    return read_basic(str(folder / "basic.json"), 1)


def test_calls_have_groups_sizes_waits_and_batches(tmp_path: Path) -> None:
    sized = {"in_msg_size": 6, "out_msg_size": 6, "dtype": "float32"}
    trace = read(
        tmp_path,
        {"comms": "init", "pg_id": 0, "world_size": 4},
        {"comms": "init", "pg_id": 5, "global_ranks": [1, 3]},
        {"comms": "all_reduce", "req": 0, "startTime_ns": 70, **sized},
        {"compute": "gemm"},
        {"comms": "Broadcast", "pg_id": 5, "root": 3, **sized},
        {"comms": "wait", "req": 0},
        {"comms": "wait", "req": 9},
        {"comms": "isend", "req": [4, 0], "use_batch": True, "src_rank": 1, "dst_rank": 2, **sized},
        {"comms": "irecv", "use_batch": True, "src_rank": 0, "dst_rank": 1, **sized},
        {"comms": "reduce", "src_rank": 2, **sized},
        {"comms": "irecv", "use_batch": True, "src_rank": 2, "dst_rank": 1, **sized},
        {"comms": "all_to_allv", "in_split": [2, 4], "out_split": [3, 3], **sized},
        {"comms": "wait", "req": [4, 0]},
        {"comms": "warp", "src_rank": 2, "in_split": [], "out_split": [], **sized},
    )
    same: dict[str, Any] = {"c10d": "", "bytes": 24, "inputs": [[6]], "outputs": [[6]], "dtype": "float32", "pg": "0"}
    assert list(trace.records()) == [
        CommRecord(id=0, op="all_reduce", t=70, **same),
        CommRecord(id=1, op="broadcast", t=0, **same | {"pg": "5", "root": 3}),
        CommRecord(id=2, op="send", t=0, peer=2, batch=2, **same),
        CommRecord(id=3, op="recv", t=0, peer=0, batch=2, **same),
        CommRecord(id=4, op="reduce", t=0, root=2, **same),
        CommRecord(id=5, op="recv", t=0, peer=2, batch=5, **same),
        CommRecord(id=6, op="all_to_all", t=0, in_split=[2, 4], out_split=[3, 3], **same),
        CommRecord(id=7, op="warp", t=0, **same),
    ]
    assert trace.waits == Waits(
        before=array("q", [2, -1, 7, -1, -1, -1, -1, -1]),
        blocking=array("b", [0, 1, 0, 1, 1, 1, 1, 1]),
        returned=array("q", [0] * 8),
        recorded=2,
        without_call=1,
    )
    groups = [one.group for one in trace.groups]
    assert groups == [Group(pg="0", size=4, ranks=[0, 1, 2, 3]), Group(pg="5", size=2, ranks=[1, 3])]
    assert (trace.rank, trace.world_size, trace.timed, trace.numbered) == (1, 4, True, False)
    assert trace.notes == ["1 computation(s) of a file are no communication and are not replayed"]


@pytest.mark.parametrize(
    ("inputs", "outputs", "shapes"),
    [(0, None, ([[0]], [])), (0, 0, ([[0]], [])), (0, 8, ([], [[8]])), (8, None, ([[8]], [])), (None, None, ([], []))],
)
def test_a_side_that_is_not_counted_has_no_tensor(
    tmp_path: Path, inputs: int | None, outputs: int | None, shapes: tuple[list[list[int]], list[list[int]]]
) -> None:
    trace = read(tmp_path, {"comms": "all_gather", "in_msg_size": inputs, "out_msg_size": outputs, "dtype": "int8"})
    (record,) = trace.records()
    assert (record.inputs, record.outputs, record.bytes) == (*shapes, 8 if 8 in (inputs, outputs) else 0)
    assert (trace.world_size, trace.timed, trace.notes) == (None, False, [])
    assert [one.group for one in trace.groups] == [Group(pg="0", size=0)]
    assert read(tmp_path, {"compute": "gemm"}).world_size is read(tmp_path).world_size is None
    assert trace.waits is not None
    assert list(trace.waits.blocking) == [-1]
