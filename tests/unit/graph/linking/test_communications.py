"""Every communication once, with its record from the best source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from crossrank.comm import CommRecord, Group
from crossrank.tools.graph.linking import Communication, link
from tests.unit.graph.linking.small_traces import FLOATS, SmallTrace, comm_params

SCHEMA = (
    "c10d::allreduce_(Tensor[] tensors, __torch__.torch.classes.c10d.ProcessGroup process_group, "
    "bool async_op=True) -> Tensor[]"
)
TENSORS: dict[str, Any] = {
    "values": [[FLOATS], "<Object>", True],
    "shapes": [[[24]], [], []],
    "types": ["GenericList[Tensor(float)]", "Object", "Bool"],
}
PARAMS = comm_params("allreduce", [9, False])
RANGE: dict[str, Any] = {"op": "all_reduce", "c10d": "allreduce_", "pg": "0", "in": [[24]], "out": [[24]], "bytes": 96}
RANGE |= {"dtype": "float32"}


def text(value: Any) -> dict[str, Any]:
    return {"values": [json.dumps(value)], "shapes": [[]], "types": ["String"]}


def found(trace: SmallTrace, folder: Path, comms: Path | None = None) -> list[Communication]:
    return link(*trace.write(folder), None if comms is None else str(comms)).communications


def test_one_call_at_four_depths_is_one_communication_with_its_kernel(tmp_path: Path) -> None:
    trace = SmallTrace()
    functional = trace.op("_c10d_functional::all_reduce", 0, 100)
    c10d = trace.op("c10d::allreduce_", 5, 90, functional, inputs=TENSORS, op_schema=SCHEMA)
    params = trace.op("record_param_comms", 10, 80, c10d, inputs=PARAMS)
    nccl = trace.op("nccl:all_reduce", 15, 70, params)
    trace.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 20, 200, 50, 501, stream=20)
    result = link(*trace.write(tmp_path))
    (only,) = result.communications
    assert (only.origin, only.host, only.activities) == ("record_param_comms", params, [result.activities[0].id])
    assert result.activities[0].host == nccl
    described: dict[str, Any] = {"bytes": 96, "inputs": [[24]], "outputs": [], "dtype": "float32"}
    assert only.record == CommRecord(id=0, op="all_reduce", c10d="allreduce_", pg="0", t=10_000, seq=9, **described)
    assert only.group == Group(pg="0", size=2, ranks=[0, 1], desc="default_pg")
    assert result.report.communications == {"record_param_comms": 1}


def test_records_come_from_the_comms_file_then_our_range(tmp_path: Path) -> None:
    trace = SmallTrace()
    c10d = trace.op("c10d::allreduce_", 0, 100, inputs=TENSORS, op_schema=SCHEMA)
    ours = trace.op("crossrank#7", 5, 90, c10d, inputs=text(RANGE | {"source": "train.py:3"}))
    work = trace.op("gloo:all_reduce", 6, 500)
    trace.op("record_param_comms", 7, 80, ours, inputs=PARAMS)
    for i in range(14):
        trace.op("aten::mm", 600 + i, 1)
    late = trace.op("gloo:all_reduce", 700, 500)
    result = link(*trace.write(tmp_path))
    (only,) = result.communications
    callers = {op.id: op.caller for op in result.host}
    assert (callers[work], callers[late]) == (ours, 2)  # a Work follows its call at once
    assert (only.origin, only.host, only.work, only.seq_counted) == ("crossrank range", ours, work, True)
    assert (only.record.id, only.record.source, only.record.seq, only.record.t) == (7, "train.py:3", 1, 5_000)
    header = {"schema": "crossrank-comms 1", "rank": 0, "world_size": 2, "host": "h", "node": "n"}
    group = {"pg": "0", "size": 2, "ranks": [0, 1], "desc": "default_pg", "locality": "cross_node"}
    gone = group | {"ranks": [0, 5]}
    call = {"id": 7, "seq": 31, "t": 4, "step": 2, "epoch": 1} | RANGE
    lines = [{"header": header}, {"group": gone}, {"group": group | {"epoch": 1}}, call]
    comms = tmp_path / "rank-0.comms.jsonl.zst"
    # A record begins with its id, without spaces.
    content = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    comms.write_bytes(zstandard.ZstdCompressor().compress(content.encode()))
    (only,) = found(trace, tmp_path, comms)
    assert (only.origin, only.record.seq, only.record.step, only.seq_counted) == ("comms file", 31, 2, False)
    assert only.group is not None
    assert (only.group.locality, only.group.ranks) == ("cross_node", [0, 1])


def test_a_call_with_a_wrong_recorded_caller_is_one_communication(tmp_path: Path) -> None:
    trace = SmallTrace()
    backward = trace.op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 0, 200)
    c10d = trace.op("c10d::allreduce_", 10, 90, backward, inputs=TENSORS, op_schema=SCHEMA)
    ours = trace.op("crossrank#7", 15, 70, backward, inputs=text(RANGE))  # while the Work of an earlier call ended
    result = link(*trace.write(tmp_path))
    assert [(one.origin, one.host) for one in result.communications] == [("crossrank range", ours)]
    assert {op.id: op.caller for op in result.host}[ours] == c10d
    assert "the execution trace names a wrong caller for 1 operation" in result.report.warnings[0]


def test_a_call_whose_inner_operation_is_lost_keeps_its_kernel(tmp_path: Path) -> None:
    trace = SmallTrace()
    ours = trace.op("crossrank#7", 0, 90, inputs=text(RANGE))
    lost = trace.op("record_param_comms", 10, 70, ours)
    inner = trace.op("nccl:all_reduce", 20, 50, lost)
    trace.nodes = [node for node in trace.nodes if node["id"] != lost]
    result = link(*trace.write(tmp_path))
    assert [(one.origin, one.host) for one in result.communications] == [("crossrank range", ours)]
    assert {op.id: op.caller for op in result.host}[inner] == ours
    assert any("name a parent that is not in the file (first: node" in one for one in result.report.warnings)


def test_the_c10d_op_is_the_fallback_and_calls_are_counted(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.kineto_head["distributedInfo"]["pg_config"] = [{"pg_name": "0", "pg_size": 2, "ranks": [0, 1]}]
    for i in range(2):
        trace.op("c10d::allreduce_", 100 * i, 50, inputs=TENSORS, op_schema=SCHEMA)
    first, second = found(trace, tmp_path)
    shown = [(c.origin, c.record.pg, c.record.bytes, c.record.seq, c.seq_counted) for c in (first, second)]
    assert shown == [("c10d op", "0", 96, 1, True), ("c10d op", "0", 96, 2, True)]
    assert first.record.is_async is True


def test_a_kernel_without_a_call_is_a_communication_of_its_own(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.op("aten::mm", 0, 100)
    trace.launch("ncclDevKernel_SendRecv(x)", 10, 20, 30, 501)
    args: dict[str, Any] = {"Collective name": "all_gather", "Out msg nelems": 10, "dtype": "Half"}
    args |= {"Process Group Name": "4", "Process Group Ranks": "[1, 3]"}
    trace.launch("some_new_kernel", 40, 60, 30, 502, **args)
    result = link(*trace.write(tmp_path))
    assert [(c.origin, c.record.op, c.record.bytes, c.group) for c in result.communications] == [
        ("kernel name", "ncclDevKernel_SendRecv", 0, None),
        ("kineto kernel", "all_gather", 20, Group(pg="4", size=2, ranks=[1, 3])),
    ]
    assert result.report.communication_kernels_alone == 2


def test_a_kernel_gives_the_group_if_its_call_does_not(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.op("c10d::allreduce_", 0, 50, inputs=TENSORS, op_schema=SCHEMA)
    trace.op("crossrank#7", 100, 50, inputs=text(RANGE | {"op": "broadcast"}))
    args: dict[str, Any] = {"Collective name": "allreduce", "Process Group Name": "4", "Group size": 3}
    trace.launch("ncclDevKernel_AllReduce_Sum_f32(x)", 5, 60, 9, 501, **args)
    trace.launch("ncclDevKernel_AllReduce_Sum_f32(x)", 105, 160, 9, 502, **args)
    shown = [(one.origin, one.record.pg, one.group) for one in found(trace, tmp_path)]
    assert shown == [("c10d op", "4", Group(pg="4", size=3, ranks=None)), ("crossrank range", "0", None)]


POINTER = 94594108284448


def called_by_pointer(trace: SmallTrace, name: str, *, rank: int = 0, splits: tuple[list[int], list[int]]) -> None:
    """A call as the oldest traces have it: its group is the address of an object."""
    values = [[FLOATS], 5, POINTER, rank, name, *splits]
    layout = {"shapes": [[[24]]] + [[]] * 6, "types": ["GenericList[Tensor(float)]"] + [""] * 6}
    trace.op("record_param_comms", 10 * len(trace.nodes), 5, inputs=layout | {"values": values})


@pytest.mark.parametrize(
    ("pg", "from_kineto", "expected"),
    [(POINTER, "4", "4"), (POINTER, "", str(POINTER)), ("0", "4", "0")],
)
def test_data_missing_in_a_node_comes_from_its_event(
    pg: int | str, from_kineto: str, expected: str, tmp_path: Path
) -> None:
    trace = SmallTrace()
    called_by_pointer(trace, "allreduce", splits=([], []))
    trace.nodes[-1]["inputs"]["values"][2] = pg
    trace.events[0]["args"] |= {"Collective name": "allreduce", "Is asynchronized op": True}
    trace.events[0]["args"] |= {"Process Group Name": from_kineto, "Process Group Ranks": "[0, 1, 2]"}
    del trace.nodes[:3]  # whether it has roots or not
    (only,) = found(trace, tmp_path)
    assert (only.record.pg, only.record.is_async) == (expected, True)
    assert only.group == Group(pg=expected, size=3, ranks=[0, 1, 2])


def batched(trace: SmallTrace, launches: int = 1) -> list[int]:
    """A send and a receive that go out together, calls 3 and 4, and what NCCL launches for them."""
    for number, op in ((3, "send"), (4, "recv")):
        record = RANGE | {"op": op, "c10d": op, "peer": 1, "batch": 3}
        trace.op(f"crossrank#{number}", 10 * number, 5, inputs=text(record))
    for launch in range(launches):
        trace.op("nccl:coalesced", 100 * (launch + 1), 50)
        trace.launch("ncclDevKernel_SendRecv(x)", 100 * (launch + 1) + 10, 300 + 60 * launch, 30, 501 + launch)
    return [501 + launch for launch in range(launches)]


def test_calls_of_a_batch_share_the_kernel_launched_after_the_last_call(tmp_path: Path) -> None:
    trace = SmallTrace()
    batched(trace)
    trace.op("crossrank#5", 200, 5, inputs=text(RANGE | {"op": "send", "c10d": "send", "peer": 1, "batch": 5}))
    trace.op("nccl:coalesced", 210, 50)
    trace.launch("ncclDevKernel_SendRecv(x)", 220, 400, 30, 502)
    result = link(*trace.write(tmp_path))
    kernel, of_one = (activity.id for activity in result.activities)
    shown = [(one.record.id, one.record.op, one.activities) for one in result.communications]
    assert shown == [(3, "send", [kernel]), (4, "recv", [kernel]), (5, "send", [of_one])]
    assert result.report.communication_kernels_alone == 0


def test_a_launch_without_a_call_does_not_belong_to_earlier_calls(tmp_path: Path) -> None:
    trace = SmallTrace()
    batched(trace, launches=2)
    result = link(*trace.write(tmp_path))
    first, second = (activity.id for activity in result.activities)
    found = [(one.record.id, one.origin, one.activities) for one in result.communications]
    assert found == [
        (3, "crossrank range", [first]),
        (4, "crossrank range", [first]),
        (5, "kernel name", [second]),  # a number that no call has
    ]


def test_a_call_without_a_time_follows_the_previous_call(tmp_path: Path) -> None:
    trace = SmallTrace()
    nodes = [trace.op("record_param_comms", ts, 5, inputs=PARAMS) for ts in (10, 20, 40)]
    del trace.events[1]
    trace.activity("ncclDevKernel_AllReduce_Sum_f32(x)", 30, 5, 501)
    trace.op("aten::mm", 50, 5)
    calls = found(trace, tmp_path)
    assert [one.host for one in calls] == [*nodes[:2], None, nodes[2]]
    assert [one.record.t for one in calls] == [10_000, 0, 30_000, 40_000]


def test_waits_and_unknown_layouts_are_not_communications(tmp_path: Path) -> None:
    trace = SmallTrace()
    wait = {"values": [141, 0, 0, "wait", [], []], "shapes": [[]] * 6, "types": [""] * 6}
    trace.op("record_param_comms", 0, 5, inputs=wait)
    trace.op("record_param_comms", 10, 5, inputs={"values": ["?"], "shapes": [[]], "types": ["String"]})
    result = link(*trace.write(tmp_path))
    assert result.communications == []
    assert result.report.warnings == [
        "1 record_param_comms node(s) have arguments with an unknown layout and are skipped"
    ]


@pytest.mark.parametrize("splits", [([20, 4], [12, 12]), ([20, 4], []), ([], [12, 12]), ([8, 8, 8], [])])
def test_a_group_named_by_an_address_is_the_world_if_sizes_match(
    splits: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    trace = SmallTrace()
    called_by_pointer(trace, "all_to_allv", splits=splits)
    for name, rank in (("allreduce", 0), ("gather", 1), ("broadcast", 5), ("send", 1)):
        called_by_pointer(trace, name, rank=rank, splits=([], []))
    calls = found(trace, tmp_path)
    assert calls[0].record.in_split == (splits[0] or None)
    world = splits[0] != [8, 8, 8]
    group = Group(pg=str(POINTER), size=2, ranks=[0, 1]) if world else None
    assert [one.group for one in calls] == [group] * 5
    assert [(one.record.bytes, one.record.root, one.record.peer) for one in calls[1:]] == [
        (96, None, None),
        (96 * 2 if world else 96, 1 if world else None, None),
        (96, None, None),
        (96, None, 1 if world else None),
    ]


def test_a_truncated_range_falls_back_to_the_c10d_op(tmp_path: Path) -> None:
    trace = SmallTrace()
    c10d = trace.op("c10d::allreduce_", 0, 100, inputs=TENSORS, op_schema=SCHEMA)
    trace.op("crossrank#7", 5, 90, c10d, inputs={"values": ['{"op": "all_re'], "shapes": [[]], "types": ["String"]})
    result = link(*trace.write(tmp_path))
    assert [(c.origin, c.host, c.record.bytes) for c in result.communications] == [("c10d op", c10d, 96)]
    assert result.report.warnings == ["node 5 (crossrank#7) has no record; read as its c10d op"]


def test_a_hostile_range_is_read_as_its_c10d_op(tmp_path: Path) -> None:
    for name, value in (("crossrank#7", "[" * 5000), ("crossrank#" + "9" * 5000, "{}"), ("crossrank#8", "[1]")):
        trace = SmallTrace()
        c10d = trace.op("c10d::allreduce_", 0, 100, inputs=TENSORS, op_schema=SCHEMA)
        trace.op(name, 5, 90, c10d, inputs={"values": [value], "shapes": [[]], "types": ["String"]})
        assert [(c.origin, c.host) for c in found(trace, tmp_path)] == [("c10d op", c10d)]
