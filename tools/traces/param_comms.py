"""Reads communication calls of execution traces and Kineto traces into one struct.

`record_param_comms` has positional arguments: [tensors], sequence number, group, rank, name, input splits, output
splits and, from schema 1.0.3 on, start, stride and size of the group. Calls without tensors lack the first ones. The
group is a pointer up to 1.0.1, then a name or a (name, description) pair. In newer torch the sequence number is a
(number, is P2P) pair. From 1.1.0 on, attributes have most of this by name. `rank` is the root or the peer within the
group, for ops that have one. Kineto has the same data under other names; `c10d::` and functional ops have it as
arguments of their schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import msgspec

from crossrank.comm import MOST_RANKS, OPERATIONS, CommRecord, Group, Int, Number, operation_of, total_bytes
from crossrank.dtypes import dtype_of
from crossrank.privacy import Privacy
from crossrank.tools.traces.execution_trace import HostOp, attributes, io
from crossrank.tools.traces.json_document import parse


class ParamComms(msgspec.Struct, kw_only=True):
    """One communication call, before its group is looked up."""

    name: str
    """As recorded: `allreduce`, `_allgather_base`, `c10d::send`, `wait`, …"""
    pg: str = ""
    """Name of the group; in old traces the text of a pointer; empty if it is not recorded."""
    desc: str = ""
    ranks: list[int] | range | None = None
    """Global ranks of the group, if they are recorded with the call; a range if only start, stride and size are."""
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


class CollectiveArgs(msgspec.Struct):
    collective: Annotated[str, Privacy.API] | None = msgspec.field(name="Collective name", default=None)
    in_elements: Annotated[Int, Privacy.SIZE] | None = msgspec.field(name="In msg nelems", default=None)
    out_elements: Annotated[Int, Privacy.SIZE] | None = msgspec.field(name="Out msg nelems", default=None)
    group_size: Number = msgspec.field(name="Group size", default=0)
    dtype: Annotated[str, Privacy.DTYPE] | None = None
    in_split: Annotated[Any, Privacy.SIZE] = msgspec.field(name="In split size", default=None)
    out_split: Annotated[Any, Privacy.SIZE] = msgspec.field(name="Out split size", default=None)
    pg: Annotated[str, Privacy.GROUP] = msgspec.field(name="Process Group Name", default="")
    desc: Annotated[str, Privacy.GROUP] = msgspec.field(name="Process Group Description", default="")
    ranks: Annotated[Any, Privacy.NUMBER] = msgspec.field(name="Process Group Ranks", default=None)
    start: Number | None = msgspec.field(name="Global rank start", default=None)
    stride: Number | None = msgspec.field(name="Global rank stride", default=None)
    seq: Number | None = msgspec.field(name="Seq", default=None)
    source_rank: Number | None = msgspec.field(name="Src Rank", default=None)
    target_rank: Number | None = msgspec.field(name="Dst Rank", default=None)
    is_async: bool | None = msgspec.field(name="Is asynchronized op", default=None)


_TENSOR_TYPE = re.compile(r"Tensor\(([^()]+)\)")
_SCHEMA = re.compile(r"\((.*)\) ->", re.DOTALL)
_ARGUMENT = re.compile(r"[\w\])?!] (\w+)(?:=[^,]*)?$")


def from_node(node: HostOp) -> ParamComms | None:
    """Read a `record_param_comms` node; None if the layout of its arguments is unknown."""
    given, result = io(node.inputs), io(node.outputs)
    values = given.values
    at = max((i for i in range(3, len(values)) if isinstance(values[i], str) and _is_int(values[i - 1])), default=None)
    if at is None:
        return None
    seq, group, rest = values[at - 3], values[at - 2], values[at + 1 :]
    pair = group if isinstance(group, list) else [group]
    inputs, dtype = _shapes(given.values[: at - 3], given.shapes, given.types)
    outputs, out_dtype = _shapes(result.values, result.shapes, result.types)
    start, stride, size = map(_int, rest[2:5] if len(rest) >= 5 else (None, None, None))
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
        group_size=size or 0,
        ranks=_strided(start, stride, size),
    )
    named = attributes(node)  # names are more reliable than positions
    for name, value in named.items():
        _set(comms, _ATTRIBUTES.get(name), value)
    start, stride = _int(named.get("global_rank_start")), _int(named.get("global_rank_stride"))
    comms.ranks = comms.ranks or _strided(start, stride, comms.group_size)
    return comms


def from_kineto(args: msgspec.Raw) -> ParamComms | None:
    """Read the arguments of a Kineto event; None if they have no collective."""
    given = parse(args, CollectiveArgs)
    if given is None or not given.collective:
        return None
    operation = operation_of(given.collective)
    p2p = operation is not None and operation.p2p
    same = ("pg", "desc", "group_size", "seq", "in_elements", "out_elements", "dtype", "is_async")
    return ParamComms(
        name=given.collective,
        ranks=_ints(given.ranks) or _strided(given.start, given.stride, given.group_size),
        is_p2p=p2p,
        rank=(given.target_rank if operation is OPERATIONS["send"] else given.source_rank) if p2p else None,
        in_split=_ints(given.in_split),
        out_split=_ints(given.out_split),
        **{name: getattr(given, name) for name in same},
    )


def from_op(node: HostOp) -> ParamComms | None:
    """Read a `c10d::` or functional op by the arguments of its schema; None without a schema."""
    given, result = io(node.inputs), io(node.outputs)
    schema = _SCHEMA.search(str(attributes(node).get("op_schema") or ""))
    names = [match[1] for one in schema[1].split(", ") if (match := _ARGUMENT.search(one))] if schema else []
    if not names:
        return None
    comms = ParamComms(name=node.name)
    dtypes: dict[bool, str | None] = {}
    for i, (name, value) in enumerate(zip(names, given.values, strict=False)):
        if i < len(given.types) and "Tensor" in given.types[i]:
            shapes, dtype = _shapes([value], given.shapes[i:], given.types[i:])
            is_output = name.startswith("output") or name == "out"
            (comms.outputs if is_output else comms.inputs).extend(shapes)
            dtypes[is_output] = dtypes.get(is_output) or dtype
        else:
            _set(comms, _OP_ARGUMENTS.get(name), value)
    if not comms.outputs:
        comms.outputs, _ = _shapes(result.values, result.shapes, result.types)
    comms.dtype = dtypes.get(False) or dtypes.get(True)
    if operation_of(node.name) is OPERATIONS["recv"] and not node.name.startswith("_"):
        comms.outputs, comms.inputs = comms.inputs or comms.outputs, []
    return comms


def shapes_from_elements(comms: ParamComms) -> None:
    """Kineto and PARAM only count elements: make one tensor with that number on each side that has any."""
    if not comms.inputs and comms.in_elements:
        comms.inputs = [[comms.in_elements]]
    if not comms.outputs and comms.out_elements:
        comms.outputs = [[comms.out_elements]]
    if not comms.inputs and not comms.outputs and comms.in_elements == 0:
        comms.inputs = [[0]]  # known to be empty


def to_record(comms: ParamComms, group: Group | None, *, number: int, time: int, c10d: str) -> CommRecord:
    """`comms` as a record. `group` is its group, if known. `time` is in ns on the trace's clock."""
    operation = operation_of(comms.name)
    dtype = dtype_of(comms.dtype) if comms.dtype else None
    size = (group.size if group else 0) or comms.group_size or 1
    item = dtype.size if dtype else 0
    in_bytes = total_bytes(comms.inputs, item) if comms.inputs else (comms.in_elements or 0) * item
    out_bytes = total_bytes(comms.outputs, item) if comms.outputs else (comms.out_elements or 0) * item
    # Calls in place, and receives, may have their tensors on one side only.
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
        dtype=dtype.name if dtype else comms.dtype or None,
        reduce=comms.reduce,
        is_async=comms.is_async,
        root=place if rooted else None,
        peer=place if p2p else None,
        tag=comms.tag,
    )


def _tensors(values: Sequence[Any], shapes: Sequence[Any]) -> Iterator[tuple[list[Any], Any]]:
    """Every tensor in `values`, at any depth of lists, with the value at its position in `shapes`."""
    todo = list(zip(values, shapes, strict=False))[::-1]
    while todo:
        value, shape = todo.pop()
        if _is_tensor(value):
            yield value, shape
        elif isinstance(value, list) and isinstance(shape, list):
            todo.extend(list(zip(value, shape, strict=False))[::-1])


def _shapes(values: Sequence[Any], shapes: Sequence[Any], types: Sequence[str]) -> tuple[list[list[int]], str | None]:
    """Shapes of all tensors in `values`, and the element type of the first."""
    lists = (shape if isinstance(shape, list) else [] for _, shape in _tensors(values, shapes))
    dtype = next((match[1] for text in types[: len(values)] if (match := _TENSOR_TYPE.search(text))), None)
    return [list(filter(_is_int, shape)) for shape in lists], dtype


def tensor_bytes(values: Sequence[Any]) -> int:
    """Bytes of all tensors in `values`, at any depth of lists, by their number of elements."""
    return sum(tensor[3] * tensor[4] for tensor, _ in _tensors(values, values) if _is_int(tensor[4]))


def _is_tensor(value: Any) -> bool:
    """A tensor is [id, storage, offset, elements, bytes per element, device]."""
    return isinstance(value, list) and len(value) == 6 and isinstance(value[5], str) and _is_int(value[3])


def _strided(start: int | None, stride: int | None, size: int | None) -> range | None:
    if start is None or stride is None or not size or stride < 1 or start < 0:
        return None
    if max(start, stride, size) > MOST_RANKS:
        return None
    return range(start, start + stride * size, stride)


def _ints(value: Any) -> list[int] | None:
    """A list of numbers, or the text of one as in newer schemas; None if it is empty or cut off."""
    if isinstance(value, str):
        return parse(value, list[Int]) or None
    if isinstance(value, list) and value and all(_is_int(number) for number in value):
        return list(value)
    return None


def _text(value: Any) -> str | None:
    return str(value) or None if isinstance(value, str | int) else None


def _reduction(value: Any) -> str | None:
    return value if isinstance(value, str) and not value.startswith("<") else None


def _int(value: Any) -> int | None:
    return value if _is_int(value) else None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_Field = tuple[str, Callable[[Any], Any]]
"""A field of `ParamComms`, and the function that reads its value; None = unknown."""


def _set(comms: ParamComms, field: _Field | None, value: Any) -> None:
    if field is not None and (known := field[1](value)) is not None:
        setattr(comms, field[0], known)


# Attribute of a node of schema 1.1.0 and later.
_ATTRIBUTES: dict[str, _Field] = {
    "collective_name": ("name", _text),
    "pg_name": ("pg", _text),
    "pg_desc": ("desc", _text),
    "dtype": ("dtype", _text),
    "pg_size": ("group_size", lambda value: _int(value) or None),
    "in_msg_nelems": ("in_elements", _int),
    "out_msg_nelems": ("out_elements", _int),
    "in_split_size": ("in_split", _ints),
    "out_split_size": ("out_split", _ints),
}
# Argument of an op's schema.
_OP_ARGUMENTS: dict[str, _Field] = {
    **dict.fromkeys(("root_rank", "src", "dst", "root"), ("rank", _int)),
    "group_name": ("pg", lambda value: value if isinstance(value, str) else None),
    "tag": ("tag", _int),
    "group_size": ("group_size", _int),
    "reduce_op": ("reduce", _reduction),
    "async_op": ("is_async", lambda value: value if isinstance(value, bool) else None),
    "input_split_sizes": ("in_split", _ints),
    "output_split_sizes": ("out_split", _ints),
}


_ADDRESS_DIGITS = 9


def named_by_address(pg: str) -> bool:
    """Whether a group's name is the address of its object, which differs between ranks."""
    return pg.isdecimal() and len(pg) >= _ADDRESS_DIGITS
