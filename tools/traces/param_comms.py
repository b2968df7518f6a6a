"""Communication as execution traces and Kineto describe it, read into one struct.

`record_param_comms` has its arguments by position: [tensors], sequence number, group, rank, name, input splits,
output splits and, from schema 1.0.3 on, start, stride and size of the group. The tensors are absent for calls that
have none. The group is a pointer up to 1.0.1, then a name or a (name, description) pair; newer torch has a
(number, is P2P) pair for the sequence number; from 1.1.0 on attributes say most of it by name. `rank` is the root
or the peer within the group for ops that have one. Kineto says the same by other names; `c10d::` and functional
ops say it by the arguments of their schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from crossrank.comm import MOST_RANKS, OPERATIONS, CommRecord, Group, Int, operation_of, total_bytes
from crossrank.dtypes import dtype_of
from crossrank.tools.traces.execution_trace import HostNode, attributes, io
from crossrank.tools.traces.json_document import parse


class ParamComms(msgspec.Struct, kw_only=True):
    """One communication call, before its group is looked up."""

    name: str
    """As recorded: `allreduce`, `_allgather_base`, `c10d::send`, `wait`, …"""
    pg: str = ""
    """Name of the group; the text of a pointer in old traces, empty where it is not recorded."""
    desc: str = ""
    ranks: list[int] | range | None = None
    """Global ranks of the group, where they are recorded with the call; a range where it counts them."""
    group_size: int = 0
    seq: int | None = None
    is_p2p: bool = False
    rank: int | None = None
    """Root or peer as a rank within the group."""
    global_rank: int | None = None
    """Root or peer as a global rank."""
    inputs: list[list[int]] = []
    outputs: list[list[int]] = []
    in_elements: int | None = None
    out_elements: int | None = None
    dtype: str | None = None
    in_split: list[int] | None = None
    out_split: list[int] | None = None
    reduce: str | None = None
    is_async: bool | None = None
    tag: int | None = None


class _KinetoArgs(msgspec.Struct):
    collective: str | None = msgspec.field(name="Collective name", default=None)
    in_elements: Int | None = msgspec.field(name="In msg nelems", default=None)
    out_elements: Int | None = msgspec.field(name="Out msg nelems", default=None)
    group_size: Int = msgspec.field(name="Group size", default=0)
    dtype: str | None = None
    in_split: Any = msgspec.field(name="In split size", default=None)
    out_split: Any = msgspec.field(name="Out split size", default=None)
    pg: str = msgspec.field(name="Process Group Name", default="")
    desc: str = msgspec.field(name="Process Group Description", default="")
    ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    start: Int | None = msgspec.field(name="Global rank start", default=None)
    stride: Int | None = msgspec.field(name="Global rank stride", default=None)
    seq: Int | None = msgspec.field(name="Seq", default=None)
    source_rank: Int | None = msgspec.field(name="Src Rank", default=None)
    target_rank: Int | None = msgspec.field(name="Dst Rank", default=None)
    is_async: bool | None = msgspec.field(name="Is asynchronized op", default=None)


_TENSOR_TYPE = re.compile(r"Tensor\(([^()]+)\)")
_ARGUMENT = re.compile(r"[\w\])?!] (\w+)(?:=[^,]*)?$")


def from_node(node: HostNode) -> ParamComms | None:
    """What a `record_param_comms` node says; None where its arguments have no layout that is known."""
    given, result = io(node.inputs), io(node.outputs)
    values = given.values
    at = max((i for i in range(3, len(values)) if isinstance(values[i], str) and _is_int(values[i - 1])), default=-1)
    if at < 0:
        return None
    seq, group, rest = values[at - 3], values[at - 2], values[at + 1 :]
    pair = group if isinstance(group, list) else [group]
    inputs, dtype = _tensors(given.values[: at - 3], given.shapes, given.types)
    outputs, out_dtype = _tensors(result.values, result.shapes, result.types)
    start, stride, size = (rest[2:5] + [None] * 3)[:3] if len(rest) >= 5 else (None, None, None)
    comms = ParamComms(
        name=values[at],
        pg=str(pair[0]) if pair else "",
        desc=str(pair[1]) if len(pair) > 1 else "",
        seq=_int(seq[0] if isinstance(seq, list) and seq else seq),
        is_p2p=bool(seq[1]) if isinstance(seq, list) and len(seq) > 1 else False,
        rank=values[at - 1],
        inputs=inputs,
        outputs=outputs,
        dtype=dtype or out_dtype,
        in_split=_ints(rest[0]) if rest else None,
        out_split=_ints(rest[1]) if len(rest) > 1 else None,
        group_size=_int(size) or 0,
        ranks=_strided(_int(start), _int(stride), _int(size)),
    )
    _add_attributes(comms, attributes(node))
    return comms


def _add_attributes(comms: ParamComms, named: Mapping[str, Any]) -> None:
    """The attributes of schema 1.1.0 and later; what they say by name is surer than a position."""
    comms.name = _text(named.get("collective_name")) or comms.name
    comms.pg = _text(named.get("pg_name")) or comms.pg
    comms.desc = _text(named.get("pg_desc")) or comms.desc
    comms.dtype = _text(named.get("dtype")) or comms.dtype
    comms.group_size = _int(named.get("pg_size")) or comms.group_size
    comms.in_elements = _int(named.get("in_msg_nelems"))
    comms.out_elements = _int(named.get("out_msg_nelems"))
    comms.in_split = _ints(named.get("in_split_size")) or comms.in_split
    comms.out_split = _ints(named.get("out_split_size")) or comms.out_split
    start, stride = _int(named.get("global_rank_start")), _int(named.get("global_rank_stride"))
    comms.ranks = comms.ranks or _strided(start, stride, comms.group_size)


def from_kineto(args: msgspec.Raw) -> ParamComms | None:
    """What the arguments of a Kineto event say; None where they name no collective."""
    given = parse(args, _KinetoArgs)
    if given is None or not given.collective:
        return None
    operation = operation_of(given.collective)
    peer = None
    if operation is not None and operation.p2p:
        peer = given.target_rank if operation.name == "send" else given.source_rank
    return ParamComms(
        name=given.collective,
        pg=given.pg,
        desc=given.desc,
        ranks=_ints(given.ranks) or _strided(given.start, given.stride, given.group_size),
        group_size=given.group_size,
        seq=given.seq,
        is_p2p=operation is not None and operation.p2p,
        rank=peer,
        in_elements=given.in_elements,
        out_elements=given.out_elements,
        dtype=given.dtype,
        in_split=_ints(given.in_split),
        out_split=_ints(given.out_split),
        is_async=given.is_async,
    )


def from_op(node: HostNode) -> ParamComms | None:
    """What a `c10d::` or functional op says by the arguments of its schema; None without a schema."""
    given, result = io(node.inputs), io(node.outputs)
    schema = str(attributes(node).get("op_schema") or "")
    names = _argument_names(schema)
    if not names:
        return None
    comms = ParamComms(name=node.name)
    dtypes: dict[bool, str | None] = {}
    for i, (name, value) in enumerate(zip(names, given.values, strict=False)):
        if i < len(given.types) and "Tensor" in given.types[i]:
            shapes, dtype = _tensors([value], given.shapes[i : i + 1], given.types[i : i + 1])
            is_output = name.startswith("output") or name == "out"
            (comms.outputs if is_output else comms.inputs).extend(shapes)
            dtypes[is_output] = dtypes.get(is_output) or dtype
        elif name in _OP_ARGUMENTS:
            field, read = _OP_ARGUMENTS[name]
            setattr(comms, field, read(value))
    if not comms.outputs:
        comms.outputs, _ = _tensors(result.values, result.shapes, result.types)
    comms.dtype = dtypes.get(False) or dtypes.get(True)
    operation = operation_of(node.name)
    if operation is not None and operation.name == "recv" and not node.name.startswith("_"):
        comms.outputs, comms.inputs = comms.inputs or comms.outputs, []
    return comms


def to_record(comms: ParamComms, group: Group | None, *, number: int, time: int, c10d: str) -> CommRecord:
    """`comms` as a record; `group` is the one it names, if that is known. `time` is in ns on the trace's clock."""
    operation = operation_of(comms.name)
    dtype = dtype_of(comms.dtype) if comms.dtype else None
    size = (group.size if group else 0) or comms.group_size or 1
    item = dtype.size if dtype else 0
    in_bytes = total_bytes(comms.inputs, item) if comms.inputs else (comms.in_elements or 0) * item
    out_bytes = total_bytes(comms.outputs, item) if comms.outputs else (comms.out_elements or 0) * item
    # Calls that work in place, and receives, may name their tensors on one side only.
    in_bytes, out_bytes = (
        in_bytes or out_bytes * (size if operation is OPERATIONS["reduce_scatter"] else 1),
        out_bytes or in_bytes * (size if operation is OPERATIONS["all_gather"] else 1),
    )
    place = comms.global_rank
    ranks = group.ranks if group else comms.ranks
    if place is None and comms.rank is not None and ranks is not None and 0 <= comms.rank < len(ranks):
        place = ranks[comms.rank]
    rooted = operation is not None and operation.rooted
    p2p = operation is not None and operation.p2p
    return CommRecord(
        id=number,
        op=operation.name if operation else comms.name,
        c10d=c10d,
        pg=comms.pg,
        bytes=operation.bytes(in_bytes, out_bytes, size) if operation else in_bytes,
        t=time,
        seq=None if p2p else comms.seq,
        p2p_seq=comms.seq if p2p else None,
        inputs=comms.inputs,
        outputs=comms.outputs,
        in_split=comms.in_split,
        out_split=comms.out_split,
        dtype=dtype.name if dtype else comms.dtype,
        reduce=comms.reduce,
        is_async=comms.is_async,
        root=place if rooted else None,
        peer=place if p2p else None,
        tag=comms.tag,
    )


def _tensors(values: Sequence[Any], shapes: Sequence[Any], types: Sequence[str]) -> tuple[list[list[int]], str | None]:
    """Shapes of all tensors in `values`, however deep in lists, and the element type of the first."""
    found: list[list[int]] = []
    todo = list(zip(values, shapes, strict=False))[::-1]
    while todo:
        value, shape = todo.pop()
        if _is_tensor(value):
            found.append([extent for extent in shape if _is_int(extent)] if isinstance(shape, list) else [])
        elif isinstance(value, list) and isinstance(shape, list):
            todo.extend(list(zip(value, shape, strict=False))[::-1])
    dtype = next((match[1] for text in types[: len(values)] if (match := _TENSOR_TYPE.search(text))), None)
    return found, dtype


def tensor_bytes(values: Sequence[Any]) -> int:
    """Bytes of all tensors in `values`, however deep in lists, by their number of elements."""
    total = 0
    todo = list(values)
    while todo:
        value = todo.pop()
        if _is_tensor(value):
            total += value[3] * value[4] if _is_int(value[4]) else 0
        elif isinstance(value, list):
            todo.extend(value)
    return total


def _is_tensor(value: Any) -> bool:
    """A tensor is [id, storage, offset, elements, bytes per element, device]."""
    return isinstance(value, list) and len(value) == 6 and isinstance(value[5], str) and _is_int(value[3])


def _argument_names(schema: str) -> list[str]:
    start, end = schema.find("("), schema.rfind(") ->")
    if start < 0 or end < 0:
        return []
    names = []
    for argument in schema[start + 1 : end].split(", "):
        match = _ARGUMENT.search(argument)
        if match:
            names.append(match[1])
    return names


def _strided(start: int | None, stride: int | None, size: int | None) -> range | None:
    if start is None or stride is None or not size or stride < 1 or start < 0:
        return None
    if max(start, stride, size) > MOST_RANKS:
        return None
    return range(start, start + stride * size, stride)


def _ints(value: Any) -> list[int] | None:
    """A list of numbers, or the text of one as newer schemas have it; None where it is empty or cut short."""
    if isinstance(value, str):
        return parse(value, list[Int]) or None
    if isinstance(value, list) and value and all(_is_int(number) for number in value):
        return list(value)
    return None


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str | int) else ""


def _int(value: Any) -> int | None:
    return value if _is_int(value) else None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# Argument of an op's schema -> the field of `ParamComms` that it is, and how its value is read.
_OP_ARGUMENTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(("root_rank", "src", "dst", "root"), ("rank", _int)),
    "group_name": ("pg", lambda value: value if isinstance(value, str) else ""),
    "tag": ("tag", _int),
    "group_size": ("group_size", lambda value: _int(value) or 0),
    "reduce_op": ("reduce", lambda value: value if isinstance(value, str) and not value.startswith("<") else None),
    "async_op": ("is_async", lambda value: value if isinstance(value, bool) else None),
    "input_split_sizes": ("in_split", _ints),
    "output_split_sizes": ("out_split", _ints),
}
