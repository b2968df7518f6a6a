"""Finds the nodes of an execution trace that run again: the outermost operations, and the calls between them.

An operation runs the nodes inside it, which are skipped. The operations inside run instead of it if one is true:

* It contains communication, or the dispatch of a tensor subclass (DTensor; the replay cannot make its tensors).
* A later operation uses a tensor that only an operation inside it returned.
* It would choose other operations without gradients.

Threads of a backend (gloo splits tensors there) are skipped: the call does this work again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from crossrank.tools.graph.linking.communications import C10D
from crossrank.tools.graph.linking.linked_trace import Activity, Communication, HostOp
from crossrank.tools.traces.execution_trace import IO, attributes, is_group_node, is_thread_root

SUBCLASS = "PythonSubclass"
_STEP = "ProfilerStep#"
_GRADIENT_DEPENDENT = frozenset(
    f"aten::{name}"
    for name in ("matmul", "linear", "einsum", "tensordot", "dropout", "scaled_dot_product_attention", "instance_norm")
)
"""Composite operations that choose by whether gradients are needed: `matmul` then folds a batch into one product."""


@dataclass(kw_only=True)
class Outermost:
    """A node that the replay runs at its own position."""

    op: HostOp
    schema: str = ""
    """Empty if it is no operation of torch."""
    integers: str = ""
    """The attribute `tensor_range`: JSON with the smallest and largest integer by tensor; empty if it is missing."""
    call: int = -1
    """Id of the record of the call that it launches."""
    device_ns: int = 0
    """Time of its activities on the device."""
    ranges: int = 0
    """Nodes without a schema that began between the previous node and this one, and are inside neither."""
    split: int = 0
    """Operations that began there and are replaced by the operations inside them."""


@dataclass(kw_only=True)
class WindowOps:
    """The nodes that run in a window."""

    found: list[Outermost] = field(default_factory=list)
    """In the order in which they began."""
    steps: list[int] = field(default_factory=list)
    """Positions at which a step begins."""
    positions: dict[int, int] = field(default_factory=dict)
    """Id of a node -> position of the node that contains it."""


def outermost(
    host: Sequence[HostOp],
    communications: Iterable[Communication],
    activities: Iterable[Activity],
    sides: Callable[[HostOp], tuple[IO, IO]],
) -> WindowOps:
    """Return all nodes that run again, ordered by start. `sides` returns the inputs and outputs of a node."""
    by_id = {op.id: op for op in host}
    order = sorted((op for op in host if op.rf_id and not op.is_work), key=lambda op: op.rf_id)
    backend = _find_backend_threads(host)
    order = [op for op in order if op.tid not in backend]
    schemas = {op.id: _read_attributes(op) for op in order}

    def above(op: HostOp) -> Iterable[HostOp]:
        ancestor, seen = by_id.get(op.caller), {op.id}
        while ancestor is not None and ancestor.id not in seen:  # corrected callers may form a cycle in a broken file
            seen.add(ancestor.id)
            yield ancestor
            ancestor = by_id.get(ancestor.caller)

    is_split: set[int] = set()
    """Operations that are replaced by the operations inside them."""
    for op in order:
        if op.name == SUBCLASS:
            is_split.update(one.id for one in above(op))
    call_at: dict[int, int] = {}
    for one in communications:
        host_op = by_id.get(one.host) if one.host is not None else None
        if host_op is None:
            continue
        chain = [host_op, *above(host_op)]
        # The dispatcher's op has the tensors. The ops above it (a functional op) do more than the call.
        at = next((number for number, each in enumerate(chain) if each.name.startswith(C10D)), 0)
        call_at[chain[at].id] = one.record.id
        is_split.update(each.id for each in chain[at + 1 :])
    device_ns: Counter[int] = Counter()
    for activity in activities:
        if activity.host is not None:
            device_ns[activity.host] += activity.duration_ns
    is_split |= used_from_inside(order, sides)
    is_split |= {op.caller for op in order if schemas[op.id][0] and _depends_on_gradients(by_id.get(op.caller))}
    window = WindowOps()
    root_of: dict[int, Outermost] = {}
    ranges = split = 0
    for op in order:
        enclosing = root_of.get(op.caller)
        if enclosing is not None:
            root_of[op.id] = enclosing
            window.positions[op.id] = window.positions[enclosing.op.id]
            enclosing.device_ns += device_ns[op.id]
            continue
        if op.name.startswith(_STEP):
            window.steps.append(len(window.found))
        schema, integers = schemas[op.id]
        call = call_at.get(op.id, -1)
        launches_kernels = device_ns[op.id] > 0
        if not (call >= 0 or (schema and op.id not in is_split) or launches_kernels) or _is_marker(op):
            split += bool(schema)
            ranges += not schema
            continue
        one_op = Outermost(
            op=op,
            schema=schema,
            integers=integers,
            call=call,
            device_ns=device_ns[op.id],
            ranges=ranges,
            split=split,
        )
        ranges = split = 0
        # A range of the user that only launches kernels gets a placeholder; the operations in it run as well.
        if call >= 0 or (schema and op.id not in is_split):
            root_of[op.id] = one_op
        else:
            one_op.schema = ""
        window.positions[op.id] = len(window.found)
        window.found.append(one_op)
    window.steps = sorted({0, *(at for at in window.steps if at < len(window.found))}) if window.found else []
    return window


def _find_backend_threads(host: Sequence[HostOp]) -> set[int]:
    """Return the threads on which operations run only while a Work does."""
    works = sorted((op.start_ns, op.end_ns) for op in host if op.is_work and op.start_ns is not None)
    latest = list(accumulate((end for _, end in works), max))
    starts = [start for start, _ in works]
    outside: set[int] = set()
    timed: set[int] = set()
    for op in host:
        if op.is_work or op.start_ns is None or not op.rf_id:
            continue
        timed.add(op.tid)
        before = bisect_right(starts, op.start_ns) - 1
        if before < 0 or latest[before] < op.end_ns:
            outside.add(op.tid)
    return timed - outside


def _read_attributes(op: HostOp) -> tuple[str, str]:
    given = attributes(op)
    schema, ranges = given.get("op_schema"), given.get("tensor_range")
    return schema if isinstance(schema, str) else "", ranges if isinstance(ranges, str) else ""


def _depends_on_gradients(op: HostOp | None) -> bool:
    return op is not None and op.name in _GRADIENT_DEPENDENT


def _is_marker(op: HostOp) -> bool:
    return is_thread_root(op) or is_group_node(op.name)


Tensor = tuple[int, int]
"""Id of a tensor and number of its storage."""


@dataclass(frozen=True)
class _Running:
    """A node on the stack of its thread."""

    op: HostOp
    takes: frozenset[int]
    """Ids of the tensors that it takes."""
    gives: tuple[Tensor, ...]


def used_from_inside(order: Sequence[HostOp], sides: Callable[[HostOp], tuple[IO, IO]]) -> set[int]:
    """Return the ids of operations with a tensor that only an operation inside them returned and a later one uses.

    `aten::layer_norm` returns one tensor, and its backward also takes the mean, which only `aten::native_layer_norm`
    inside it returned. Run as a whole, such an operation would lose that tensor. `order` has the nodes in the order in
    which they began; `sides` returns the inputs and outputs of a node.
    """
    split: set[int] = set()
    stacks: dict[int, list[_Running]] = {}
    given_by: dict[Tensor, list[_Running]] = {}
    """Tensor -> the operations around the outermost one that returned it last, innermost first."""
    for op in order:
        stack = stacks.setdefault(op.tid, [])
        while stack and stack[-1].op.id != op.caller:
            _pop_ended(stack, given_by)
        inputs, outputs = sides(op)
        takes = list(_find_tensors(inputs))
        around = {one.op.id for one in stack}
        for tensor in takes:
            for giver in given_by.get(tensor, ()):
                if giver.op.id in around or tensor[0] in giver.takes:
                    break
                split.add(giver.op.id)
        stack.append(_Running(op, frozenset(identity for identity, _ in takes), tuple(_find_tensors(outputs))))
    return split


def _pop_ended(stack: list[_Running], given_by: dict[Tensor, list[_Running]]) -> None:
    ended = stack.pop()
    for tensor in ended.gives:
        given_by[tensor] = stack[::-1]


def _find_tensors(io: IO) -> Iterator[Tensor]:
    for value, kind in zip(io.values, io.types, strict=False):
        if kind.startswith("Tensor("):
            yield from _parse_tensor(value)
        elif "Tensor(" in kind:
            yield from _find_tensors_in_list(value)


def _find_tensors_in_list(value: Any) -> Iterator[Tensor]:
    if isinstance(value, list) and value and not isinstance(value[0], list):
        yield from _parse_tensor(value)
    elif isinstance(value, list):
        for one in value:
            yield from _find_tensors_in_list(one)


def _parse_tensor(value: Any) -> Iterator[Tensor]:
    if isinstance(value, list) and len(value) >= 6 and isinstance(value[0], int) and isinstance(value[1], int):
        yield value[0], value[1]
