"""Communication in every layout that torch has written it in."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from crossrank.comm import MOST_RANKS, CommRecord, Group, has_size
from crossrank.tools.traces.execution_trace import HostOp
from crossrank.tools.traces.param_comms import (
    ParamComms,
    from_kineto,
    from_node,
    from_op,
    named_by_address,
    shapes_from_elements,
    tensor_bytes,
    to_record,
)
from tests.unit.graph.linking.small_traces import FLOATS

HALVES = [7, 8, 0, 48, 2, "cuda:0"]
LIST = "GenericList[Tensor(float)]"
GROUP = Group(pg="3", size=2, ranks=[4, 6])


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


def node(
    values: list[Any],
    shape: Any = (),
    kind: str = "",
    name: str = "record_param_comms",
    outputs: Any = None,
    **more: Any,
) -> HostOp:
    """A node whose first input has that shape and type; the others are no tensors, of types that nobody reads."""
    empty: list[Any] = [[] for _ in values[1:]]
    inputs = {"values": values, "shapes": [shape, *empty][: len(values)], "types": [kind, *[""] * len(empty)]}
    attributes = raw([{"name": key, "type": "", "value": value} for key, value in more.items()])
    out = raw(outputs or {"values": [], "shapes": [], "types": []})
    return HostOp(1, name, 0, 1, 1, inputs=raw(inputs), outputs=out, attributes=attributes)


def known(comms: ParamComms | None) -> ParamComms:
    assert comms is not None
    return comms


def record(comms: ParamComms | None, group: Group | None = GROUP) -> CommRecord:
    return to_record(known(comms), group, number=0, time=9, c10d="x")


def test_layout_1_0_1_with_a_group_pointer_is_parsed() -> None:
    outputs = {"values": [[9, 8, 0, 768, 4, "cuda:0"]], "shapes": [[768]], "types": ["Tensor(int)"]}
    values = [[1, 2, 0, 3392, 4, "cuda:0"], 150, 94594108284448, 0, "all_to_allv", [96, 224], [96, 96]]
    comms = known(from_node(node(values, [3392], "Tensor(int)", outputs=outputs)))
    assert (comms.name, comms.pg, comms.seq, comms.rank) == ("all_to_allv", "94594108284448", 150, 0)
    assert (comms.group_size, comms.ranks, comms.is_p2p) == (0, None, False)
    made = record(comms, None)
    assert (made.op, made.bytes, made.dtype, made.seq) == ("all_to_all", 3392 * 4, "int32", 150)
    assert (made.inputs, made.outputs, made.in_split, made.out_split) == ([[3392]], [[768]], [96, 224], [96, 96])


def test_a_wait_has_no_tensors_and_no_operation() -> None:
    comms = known(from_node(node([141, 0, 0, "wait", [], []], [], "Int")))
    assert (comms.name, comms.inputs, comms.seq) == ("wait", [], 141)


def test_layout_1_0_3_with_group_name_description_and_shape_is_parsed() -> None:
    values = [[FLOATS, FLOATS], 12, ["3", "dp"], 1, "broadcast", [], [], 4, 2, 2]
    comms = known(from_node(node(values, [[24], [4, 6]], "GenericList[Tensor(float),Tensor(float)]")))
    assert (comms.pg, comms.desc, comms.ranks, comms.group_size) == ("3", "dp", range(4, 8, 2), 2)
    assert (comms.in_split, comms.out_split, comms.is_p2p) == (None, None, False)
    made = record(comms)
    assert (made.op, made.root, made.bytes, made.inputs) == ("broadcast", 6, 192, [[24], [4, 6]])


def test_layout_of_newer_torch_with_sequence_pair_and_attributes_is_parsed() -> None:
    attributes: dict[str, Any] = {
        "collective_name": "send",
        "dtype": "Float",
        "in_msg_nelems": 24,
        "out_msg_nelems": 24,
    }
    attributes |= {"in_split_size": "[]", "out_split_size": "[]", "global_rank_start": 4, "global_rank_stride": 2}
    attributes |= {"pg_name": "3", "pg_desc": "pipeline", "pg_size": 2}
    values = [[FLOATS], [7, True], ["3", "pp"], 1, "send", [], []]
    comms = known(from_node(node(values, [[24]], LIST, **attributes)))
    made = record(comms)
    assert (made.op, made.peer, made.p2p_seq, made.seq, made.bytes, made.dtype) == ("send", 6, 7, None, 96, "float32")
    assert (comms.is_p2p, comms.desc, comms.ranks) == (True, "pipeline", range(4, 8, 2))


def test_a_receive_takes_its_bytes_from_the_side_with_the_tensor() -> None:
    made = record(from_node(node([[FLOATS], 2, "3", 0, "recvAnySource", [], []], [[24]], LIST)))
    assert (made.op, made.peer, made.bytes) == ("recv", 4, 96)


def test_hostile_values_do_no_harm() -> None:
    layout = [[FLOATS], 1, ["3", ""], 0, "allreduce", "[" * 5000, "[1", 0, 1, 1 << 63]
    hostile: dict[str, Any] = {"collective_name": 5, "dtype": ["f"], "pg_size": "9" * 50}
    comms = known(from_node(node(layout, [[24]], "Tensor(float)", **hostile)))
    assert (comms.ranks, comms.in_split, comms.out_split, comms.dtype) == (None, None, None, "float")
    shapeless = known(from_node(node(layout[:5], 7, "Tensor(float)")))
    assert (shapeless.name, shapeless.inputs) == ("allreduce", [])
    args = {"Collective name": "allreduce", "Group size": 1 << 61, "Global rank start": 0, "Global rank stride": 1}
    assert known(from_kineto(raw(args))).ranks is None


@pytest.mark.parametrize("values", [[], ["x"], [1, 2, 3], [[], "a", {}], [None] * 9, ["a", "b", "c", "d"]])
def test_an_unknown_layout_gives_nothing(values: list[Any]) -> None:
    assert from_node(node(values)) is None


def test_kineto_arguments_of_a_kernel_are_parsed() -> None:
    args: dict[str, Any] = {"Collective name": "_allgather_base", "In msg nelems": 12, "Out msg nelems": 24}
    args |= {
        "Group size": 2,
        "dtype": "BFloat16",
        "In split size": "[]",
        "Out split size": "[]",
        "stream": 20,
        "Seq": 5,
    }
    args |= {"Process Group Name": "3", "Process Group Description": "fsdp", "Process Group Ranks": "[4, 6]"}
    comms = known(from_kineto(raw(args)))
    assert (comms.pg, comms.desc, comms.ranks) == ("3", "fsdp", [4, 6])
    made = record(comms)
    assert (made.op, made.bytes, made.dtype, made.seq) == ("all_gather", 48, "bfloat16", 5)
    assert from_kineto(raw({"stream": 7})) is from_kineto(raw({"Collective name": 7, "Group size": []})) is None


def test_a_c10d_op_is_read_by_the_arguments_of_its_schema() -> None:
    schema = (
        "c10d::_reduce_scatter_base_(Tensor output_tensor, Tensor input_tensor, "
        "__torch__.torch.classes.c10d.ProcessGroup process_group, __torch__.torch.classes.c10d.ReduceOp reduce_op, "
        "bool async_op=True, int timeout=-1) -> (Tensor, __torch__.torch.classes.c10d.Work)"
    )
    op = node([FLOATS, HALVES, "<Object>", "<Object>", False, -1], name="c10d::_reduce_scatter_base_", op_schema=schema)
    types = ["Tensor(float)", "Tensor(c10::Half)", "Object", "Object", "Bool", "Int"]
    given = json.loads(bytes(op.inputs)) | {"shapes": [[24], [48], [], [], [], []], "types": types}
    op.inputs = raw(given)
    comms = known(from_op(op))
    assert (comms.inputs, comms.outputs, comms.is_async, comms.reduce, comms.pg) == ([[48]], [[24]], False, None, "")
    assert record(comms).bytes == 96


def test_a_functional_collective_gives_its_group_and_reduction() -> None:
    name = "_c10d_functional::all_reduce"
    schema = f"{name}(Tensor input, str reduce_op, str group_name) -> Tensor"
    outputs = {"values": [FLOATS], "shapes": [[4, 6]], "types": ["Tensor(float)"]}
    op = node([FLOATS, "avg", "3"], [4, 6], "Tensor(float)", name, outputs, op_schema=schema)
    made = record(from_op(op))
    assert (made.op, made.pg, made.reduce, made.bytes) == ("all_reduce", "3", "avg", 96)
    assert made.inputs == made.outputs == [[4, 6]]


def test_a_root_outside_the_group_is_unknown() -> None:
    comms = ParamComms(name="broadcast", rank=5, pg="3")
    assert record(comms).root is None
    assert record(comms, None).root is None


@pytest.mark.parametrize(("name", "sides"), [("c10d::recv_", ([], [[24]])), ("c10d::send", ([[24]], []))])
def test_the_tensor_of_a_receive_is_its_output(name: str, sides: tuple[list[list[int]], list[list[int]]]) -> None:
    group = "__torch__.torch.classes.c10d.ProcessGroup process_group"
    schema = f"{name}(Tensor[] tensors, {group}, int src, int tag) -> ()"
    made = record(from_op(node([[FLOATS], "<Object>", 1, 9], [[24]], LIST, name, op_schema=schema)))
    assert ((made.inputs, made.outputs), made.peer, made.tag, made.bytes) == (sides, 6, 9, 96)
    assert from_op(node([], name=name)) is None


@pytest.mark.parametrize(
    ("fields", "size", "bytes"),
    [
        ({"name": "all_gather", "in_elements": 4}, None, 16),
        ({"name": "all_gather", "in_elements": 4, "group_size": 3}, None, 48),
        ({"name": "all_gather", "in_elements": 4, "group_size": 3}, 2, 32),
        ({"name": "reduce_scatter", "outputs": [[2, 3]]}, 2, 48),
        ({"name": "broadcast", "outputs": [[2, 3]], "dtype": "no such type"}, 2, 0),
        ({"name": "broadcast", "outputs": [[2, 3]]}, 2, 24),
        ({"name": "barrier", "in_elements": 1}, 2, 0),
        ({"name": "something", "in_elements": 4}, 2, 16),
    ],
)
def test_a_missing_side_is_derived_from_the_other(fields: dict[str, Any], size: int | None, bytes: int) -> None:
    group = None if size is None else Group(pg="", size=size)
    assert record(ParamComms(**{"dtype": "Float"} | fields), group).bytes == bytes


@pytest.mark.parametrize(
    ("start", "stride", "size", "ranks"),
    [
        (0, 1, 2, range(2)),
        (4, 2, 3, range(4, 10, 2)),
        (0, 1, MOST_RANKS, range(MOST_RANKS)),
        (0, 1, MOST_RANKS + 1, None),
        (-1, 1, 2, None),
        (0, 0, 2, None),
        (0, 1, 0, None),
        (None, 1, 2, None),
        (0, None, 2, None),
    ],
)
def test_start_and_stride_give_the_ranks_of_a_group(start: Any, stride: Any, size: int, ranks: range | None) -> None:
    args = {"Collective name": "send", "Dst Rank": 1, "Src Rank": 0, "Global rank start": start}
    args |= {"Global rank stride": stride, "Group size": size}
    comms = known(from_kineto(raw(args)))
    assert (comms.ranks, comms.rank, comms.is_p2p) == (ranks, 1, True)


def test_a_call_of_unknown_operation_and_size_keeps_its_name() -> None:
    args = {"Collective name": "warp", "Src Rank": 3, "Global rank start": 0, "Global rank stride": 1}
    assert from_kineto(raw(args)) == ParamComms(name="warp", group_size=0)


@pytest.mark.parametrize("inputs", [[[2, 3]], []])
@pytest.mark.parametrize("in_elements", [6, 0])
def test_recorded_shapes_are_not_replaced_by_counts(inputs: list[list[int]], in_elements: int) -> None:
    comms = ParamComms(name="x", inputs=inputs, outputs=[[5]], in_elements=in_elements, out_elements=8)
    shapes_from_elements(comms)
    assert (comms.inputs, comms.outputs) == (inputs or [[6]] * (in_elements > 0), [[5]])


def test_tensor_bytes_count_at_any_depth() -> None:
    assert tensor_bytes([FLOATS, 3, [HALVES, [1]], [*FLOATS[:5], 0]]) == 192


@pytest.mark.parametrize(("pg", "is_address"), [("123456789", True), ("12345678", False), ("default_pg", False)])
def test_a_long_number_as_a_name_is_an_address(pg: str, is_address: bool) -> None:
    assert named_by_address(pg) == is_address


@pytest.mark.parametrize(("dtype", "is_known"), [("Float", True), ("", False), (None, False)])
def test_the_size_of_a_call_without_an_element_type_is_unknown(dtype: str | None, is_known: bool) -> None:
    args = {"Collective name": "allreduce", "In msg nelems": 0, "Out msg nelems": 1000, "Group size": 0, "dtype": dtype}
    described = from_kineto(msgspec.Raw(msgspec.json.encode(args)))
    assert described is not None
    shapes_from_elements(described)
    record = to_record(described, None, number=1, time=0, c10d="")
    assert (record.bytes, has_size(record)) == (4000 if is_known else 0, is_known)
