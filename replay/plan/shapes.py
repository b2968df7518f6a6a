"""Completes the tensors of a recorded call, and finds contradictions in it.

Every source lacks something: execution traces lack the outputs of an all_to_all, Kineto has only the number of
elements, old traces lack the group. This module fills in what the operation implies. Afterwards `c10d` is an op that
the replay can call; `inputs` and `outputs` are the tensors that this rank passes to it.
"""

from __future__ import annotations

from itertools import chain
from math import prod
from typing import NamedTuple

import msgspec

from crossrank.comm import OPERATIONS, CommRecord, Group, total_bytes
from crossrank.dtypes import DTYPES
from crossrank.text import rank_ranges


class _Ops(NamedTuple):
    """The c10d ops of an operation."""

    one: str
    """With one tensor per side."""
    listed: str = ""
    """With a list of tensors on a side."""
    coalesced: str = ""
    """Several at once, each with one tensor per side."""


_C10D = {
    "all_reduce": _Ops("allreduce_", "allreduce_coalesced_"),
    "reduce": _Ops("reduce_"),
    "broadcast": _Ops("broadcast_"),
    "all_gather": _Ops("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"),
    "reduce_scatter": _Ops("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"),
    "gather": _Ops("gather_"),
    "scatter": _Ops("scatter_"),
    "all_to_all": _Ops("alltoall_base_", "alltoall_"),
    "send": _Ops("send"),
    "recv": _Ops("recv_"),
    "barrier": _Ops("barrier"),
}
_KNOWN = frozenset(("allgather_coalesced_", *chain.from_iterable(_C10D.values()))) - {""}
GATHERED_WHOLE = frozenset((_C10D["all_gather"].one, _C10D["all_gather"].coalesced))
IN_ONE = GATHERED_WHOLE | {_C10D["reduce_scatter"].one, _C10D["reduce_scatter"].coalesced}
"""c10d ops in which one side is a single tensor with the parts of all members, one after another."""
OWN_INPUTS = ("all_gather", "gather", "send")
OWN_OUTPUTS = ("reduce_scatter", "scatter", "recv")
"""Operations in which one side is a rank's own, and the other holds a part for each member, or nothing."""
Shapes = list[list[int]]
_ANY_ROOT = ("broadcast", "reduce")
"""The root changes no tensor and hardly any time, so an unknown root becomes the first member."""
_IN_PLACE = ("all_reduce", "reduce", "broadcast")
_MOST_ELEMENTS = 1 << 44


class LeftOutError(Exception):
    """The replay cannot make the call. The text is the reason, the same for all such calls."""


class BrokenError(Exception):
    """The call contradicts itself. The text says how, for this one call."""


def complete(record: CommRecord, group: Group | None, rank: int) -> CommRecord:
    """Return `record` with all that the executor needs. Raises `LeftOutError` or `BrokenError` if it cannot."""
    operation = OPERATIONS.get(record.op)
    if operation is None:
        raise LeftOutError(f"{record.op} is not a known operation")
    if record.op != "barrier" and record.dtype is None:
        raise LeftOutError("its element type is not recorded")
    if group is None or group.ranks is None:
        raise BrokenError(f"its group {record.pg!r} is not defined")
    if rank not in group.ranks:
        raise BrokenError(f"rank {rank} is not in its group {record.pg!r} (ranks {rank_ranges(group.ranks)})")
    if record.op == "barrier":
        name = record.c10d if record.c10d == "monitored_barrier_" else "barrier"
        return msgspec.structs.replace(record, c10d=name, inputs=[], outputs=[], dtype=None, bytes=0)
    dtype = DTYPES.get(record.dtype or "")
    if dtype is None:
        raise LeftOutError(f"its element type {record.dtype} is not known")
    if operation.p2p:
        if record.peer is None:
            raise LeftOutError("its peer is not recorded")
        if record.peer not in group.ranks or record.peer == rank:
            raise BrokenError(f"its peer, rank {record.peer}, is not another rank of its group {record.pg!r}")
    if operation.rooted:
        if record.root is None and record.op in _ANY_ROOT:
            record = msgspec.structs.replace(record, root=group.ranks[0])
        elif record.root is None:
            raise LeftOutError("its root is not recorded")
        elif record.root not in group.ranks:
            raise BrokenError(f"its root, rank {record.root}, is not in its group {record.pg!r}")
    if any(extent < 0 for shape in (*record.inputs, *record.outputs) for extent in shape):
        raise BrokenError("a tensor of it has a negative extent")
    if not record.inputs and not record.outputs and not record.in_split and record.bytes <= 0:
        raise LeftOutError("its size is not recorded")
    if record.tag is not None and not 0 <= record.tag < 1 << 31:
        raise BrokenError(f"its tag {record.tag} is not from 0 to {(1 << 31) - 1}")
    whole = _complete_tensors(record, len(group.ranks), dtype.size, rank)
    if any(prod(shape) > _MOST_ELEMENTS for shape in (*whole.inputs, *whole.outputs)):
        raise BrokenError("a tensor of it has more elements than any memory holds")
    return sized(whole, group)


def _complete_tensors(record: CommRecord, n: int, item: int, rank: int) -> CommRecord:
    op, name = record.op, _C10D[record.op].one
    # Kineto and some dumps have no shapes: the bytes (S of nccl-tests) give the number of elements.
    elements = record.bytes // item
    if op in _IN_PLACE:
        inputs = record.inputs or record.outputs or [[elements]]
        if len(inputs) > 1 and op != "all_reduce":
            raise LeftOutError(f"{op} of several tensors at once")
        in_list = len(inputs) > 1 or record.c10d == "allreduce_coalesced_"
        return _set_tensors(record, _C10D[op].listed if in_list else name, inputs, inputs)
    if op == "all_to_all":
        return _complete_all_to_all(record, n, elements)
    own, of_all = own_first(op, (record.inputs, record.outputs))
    if OPERATIONS[op].p2p:
        own, of_all = own or of_all or [[elements]], []
    elif OPERATIONS[op].rooted:
        own = own[:1] or of_all[:1] or [[elements // n]]
        if record.root == rank and len(of_all) not in (0, 1, n):
            raise BrokenError(f"its root holds {len(of_all)} tensors for {n} ranks")
        of_all = [] if record.root != rank else of_all if len(of_all) == n else own * n
    else:
        name, own, of_all = _add_parts(record, n, own, of_all or [[n * prod(shape)] for shape in own] or [[elements]])
    inputs, outputs = own_first(op, (own, of_all))
    return _set_tensors(record, name, inputs, outputs)


def _set_tensors(record: CommRecord, name: str, inputs: list[list[int]], outputs: list[list[int]]) -> CommRecord:
    return msgspec.structs.replace(record, c10d=name, inputs=inputs, outputs=outputs)


def _add_parts(
    record: CommRecord, n: int, small: list[list[int]], large: list[list[int]]
) -> tuple[str, list[list[int]], list[list[int]]]:
    """Complete an all_gather or reduce_scatter: return its c10d op, this rank's tensors and those of all members."""
    op, ops = record.op, _C10D[record.op]
    if not small:
        # `allgather` and similar names: some traces have names that the dispatcher does not know.
        if len(large) == n and record.c10d.replace("_", "").lower() == ops.listed.replace("_", ""):
            raise LeftOutError(f"{op} of a list without this rank's own part")
        if any(prod(shape) % n for shape in large):
            raise BrokenError(f"{prod(large[0])} elements cannot be divided among {n} ranks")
        small = [[prod(shape) // n] for shape in large]
    in_list = record.c10d == ops.listed or (record.c10d not in _KNOWN and len(small) == 1 and len(large) == n > 1)
    if record.c10d == "allgather_coalesced_":
        if len(large) != n * len(small):
            raise BrokenError(f"{len(small)} tensors of each of {n} ranks are gathered into {len(large)}")
        return record.c10d, small, large
    if in_list and len(small) == 1:
        if len(large) == 1 and prod(large[0]) == n * prod(small[0]):
            large = small * n
        if len(large) != n:
            raise BrokenError(f"it has {len(large)} tensors for {n} ranks")
        sizes = {prod(shape) for shape in large}
        if len(sizes) == 1 and sizes != {prod(small[0])}:
            raise BrokenError(f"{prod(small[0])} elements of its own are not the {prod(large[0])} of each rank")
        return ops.listed, small, large
    if len(small) != len(large):
        raise BrokenError(f"it has {len(small)} and {len(large)} tensors on its sides, for {n} ranks")
    for part, whole in zip(small, large, strict=True):
        if prod(whole) != n * prod(part):
            raise BrokenError(f"{prod(part)} elements of each of {n} ranks are not the {prod(whole)} of the other side")
    return ops.one if len(small) == 1 and record.c10d != ops.coalesced else ops.coalesced, small, large


def _complete_all_to_all(record: CommRecord, n: int, elements: int) -> CommRecord:
    inputs, outputs = record.inputs, record.outputs
    if record.c10d == "alltoall_" or (record.c10d not in _KNOWN and len(inputs) == n > 1):
        if len(inputs) != n or len(outputs or inputs) != n:
            raise BrokenError(f"it has {len(inputs)} input and {len(outputs)} output tensors for {n} ranks")
        return _set_tensors(record, "alltoall_", inputs, outputs or inputs)
    if len(inputs) > 1 or len(outputs) > 1:
        raise BrokenError(f"it has {len(inputs)} input and {len(outputs)} output tensors instead of one each")
    inputs = inputs or [[sum(record.in_split) if record.in_split else elements]]
    # Some versions count the splits in elements instead of rows.
    if record.in_split and sum(record.in_split) == prod(inputs[0]):
        inputs = [[prod(inputs[0])]]
    if record.out_split and outputs and sum(record.out_split) == prod(outputs[0]):
        outputs = [[prod(outputs[0])]]
    if not outputs:
        outputs = [[sum(record.out_split), *inputs[0][1:]]] if record.out_split else [list(inputs[0])]
    if not record.in_split and not record.out_split and record.outputs:
        # Dumps have only the totals that are sent and received. `counterparts` infers the splits.
        return _set_tensors(record, "alltoall_base_", inputs, outputs)
    _check_split("in_split", record.in_split, inputs[0], n)
    _check_split("out_split", record.out_split, outputs[0], n)
    row = prod(inputs[0][1:])
    if row != prod(outputs[0][1:]):
        raise BrokenError(f"a row of its input has {row} elements, one of its output {prod(outputs[0][1:])}")
    return _set_tensors(record, "alltoall_base_", inputs, outputs)


def _check_split(name: str, split: list[int] | None, shape: list[int], n: int) -> None:
    rows = shape[0] if shape else 1
    if not split:
        if rows % n:
            raise BrokenError(f"its {rows} rows cannot be divided evenly among {n} ranks")
        return
    if len(split) != n or min(split) < 0:
        raise BrokenError(f"{name} {split[:8]} is not one number for each of {n} ranks")
    if sum(split) != rows:
        raise BrokenError(f"{name} adds up to {sum(split)}, but the tensor has {rows} rows")


def sized(record: CommRecord, group: Group) -> CommRecord:
    """Return `record` with the `bytes` of its tensors."""
    operation = OPERATIONS[record.op]
    item = DTYPES[record.dtype or "uint8"].size
    size = operation.bytes(total_bytes(record.inputs, item), total_bytes(record.outputs, item), len(group.ranks or ()))
    return msgspec.structs.replace(record, bytes=size)


def own_first(op: str, sides: tuple[Shapes, Shapes]) -> tuple[Shapes, Shapes]:
    """Return (a rank's own, those of all members) from (inputs, outputs) of such an operation, and the reverse."""
    return sides[::-1] if op in OWN_OUTPUTS else sides


def of_all_members(record: CommRecord, own: list[list[int]], n: int) -> list[list[int]]:
    """Return the shapes of the side with the parts of all members, if each member has `own`."""
    return [[n * prod(shape)] for shape in own] if record.c10d in IN_ONE else own * n


def parts(shape: list[int], split: list[int] | None, n: int) -> list[int]:
    """Return the number of elements for each of `n` members in a tensor with these splits."""
    whole = prod(shape)
    if not split:
        return [whole // n] * n
    row = whole // (sum(split) or 1)
    return [rows * row for rows in split]


def tensors(record: CommRecord) -> list[list[list[int]]]:
    """Return the shapes of the tensors that need memory: inputs and outputs, or one side if the op works in place."""
    return [record.inputs] if record.op in _IN_PLACE else [record.inputs, record.outputs]
