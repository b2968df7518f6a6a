"""Floating-point operations of GPU activities, from the shapes in the execution trace.

The formulas are those of `torch.utils.flop_counter`. It counts a multiplication and an addition as two, and only matrix
products, convolutions and attention. An operation that is not in the table has no count, rather than 0 or 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from crossrank.tools.graph.linking import LinkedTrace
from crossrank.tools.traces.execution_trace import IO, io

Shape = Sequence[int]
_MAX_COUNT = (1 << 63) - 1


def _count_product(a: Shape, b: Shape) -> int:
    """Return the count of a matrix product, or of a batch of them."""
    *batch, rows, inner = a
    if list(b[:-1]) != [*batch, inner]:
        raise ValueError("matrices with incompatible shapes")
    return 2 * prod(batch) * rows * inner * b[-1]


def _count_convolution(x: Shape, weight: Shape, out: Shape, transposed: bool = False) -> int:
    """Return the count of a convolution: each element of the output (transposed: input) meets the whole filter."""
    if len(x) < 2 or len(weight) < 2 or len(out) < 2:
        raise ValueError("the inputs are not those of a convolution")
    return 2 * x[0] * prod((x if transposed else out)[2:]) * prod(weight)


def _swap_channels(shape: Shape) -> list[int]:
    """Return the shape with batch and channels swapped."""
    return [shape[1], shape[0], *shape[2:]]


def _count_convolution_backward(given: IO, made: IO) -> int:
    out, x, weight = given.shapes[:3]
    transposed = bool(given.values[7])
    count = 0
    if made.shapes[0]:
        count += _count_convolution(out, weight, made.shapes[0], not transposed)
    if made.shapes[1]:
        one, other = (out, x) if transposed else (x, out)
        count += _count_convolution(_swap_channels(one), _swap_channels(other), _swap_channels(made.shapes[1]))
    return count


def _count_attention(query: Shape, key: Shape, value: Shape) -> int:
    """Return the count of the scores and their product with the values. A causal mask removes nothing."""
    batch, heads, length, width = query
    keys = key[2]
    return 2 * batch * heads * length * keys * (width + value[3])


def _count_attention_backward(query: Shape, key: Shape, value: Shape) -> int:
    """Return the count of the scores again, and of two products for each product of the forward pass."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (3 * width + 2 * value[3])


Count = Callable[[IO, IO], int]
_MATRICES: Count = lambda given, made: _count_product(*given.shapes[:2])  # noqa: E731
_ADDED: Count = lambda given, made: _count_product(*given.shapes[1:3])  # noqa: E731
_CONVOLUTION: Count = lambda given, made: _count_convolution(given.shapes[0], given.shapes[1], made.shapes[0])  # noqa: E731
_ATTENTION: Count = lambda given, made: _count_attention(*given.shapes[:3])  # noqa: E731
_ATTENTION_BACKWARD: Count = lambda given, made: _count_attention_backward(*given.shapes[1:4])  # noqa: E731
COUNTS: dict[str, Count] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::_scaled_mm"), _MATRICES),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm"), _ADDED),
    **dict.fromkeys(("aten::convolution", "aten::_convolution"), lambda given, made: _count_convolution(
        given.shapes[0], given.shapes[1], made.shapes[0], bool(given.values[6])
    )),
    **{f"aten::{name}": _CONVOLUTION for name in ("cudnn_convolution", "_slow_conv2d_forward", "miopen_convolution")},
    "aten::convolution_backward": _count_convolution_backward,
    **{f"aten::_scaled_dot_product_{kind}_attention": _ATTENTION for kind in ("efficient", "flash", "cudnn")},
    **{
        f"aten::_scaled_dot_product_{kind}_attention_backward": _ATTENTION_BACKWARD
        for kind in ("efficient", "flash", "cudnn")
    },
}  # fmt: skip
"""Operation -> function that counts from its inputs and outputs."""


def count_of(name: str, given: IO, made: IO) -> int | None:
    """Return the floating-point operations of one call; None if unknown.

    >>> count_of("aten::mm", IO(shapes=[[2, 3], [3, 5]]), IO(shapes=[[2, 5]]))
    60
    """
    count = COUNTS.get(name)
    try:
        found = count(given, made) if count is not None else None
    except (ValueError, TypeError, IndexError):  # shapes that the operation cannot have
        return None
    return found if isinstance(found, int) and 0 < found <= _MAX_COUNT else None


def counts_by_activity(trace: LinkedTrace) -> dict[int, int]:
    """Return activity id -> floating-point operations.

    An activity belongs to the innermost operation around its launch that has a count. If the operation launched
    several, the longest one has the count: the others prepare or gather.
    """
    ops = {op.id: op for op in trace.host}
    kernels: dict[int, list[Any]] = defaultdict(list)
    for activity in trace.activities:
        at, seen = ops.get(activity.host or 0), set[int]()
        while at is not None and at.name not in COUNTS and at.id not in seen:
            seen.add(at.id)
            at = ops.get(at.caller)
        if at is not None and at.name in COUNTS and activity.category == "kernel":
            kernels[at.id].append(activity)
    counts: dict[int, int] = {}
    for host, launched in kernels.items():
        node = ops[host]
        found = count_of(node.name, io(node.inputs), io(node.outputs))
        if found is not None:
            counts[max(launched, key=lambda one: one.duration_ns).id] = found
    return counts
