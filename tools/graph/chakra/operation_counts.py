"""Floating-point operations of what ran on a GPU, from the shapes that the execution trace has.

The formulas are those of `torch.utils.flop_counter`, which counts a multiplication and an addition as two and leaves
out everything but products of matrices, convolutions and attention. What is not in the table has no count: it is not 0,
and not 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from crossrank.tools.graph.linking import LinkedTrace
from crossrank.tools.traces.execution_trace import IO, io

Shape = Sequence[int]
_MOST = (1 << 63) - 1


def _product(a: Shape, b: Shape) -> int:
    """Of matrices, or of as many as the extents before the last two say."""
    *batch, rows, inner = a
    if list(b[:-1]) != [*batch, inner]:
        raise ValueError("matrices that do not fit")
    return 2 * prod(batch) * rows * inner * b[-1]


def _convolution(x: Shape, weight: Shape, out: Shape, transposed: bool = False) -> int:
    """Each place of the output, of a transposed one of the input, meets the whole filter."""
    if len(x) < 2 or len(weight) < 2 or len(out) < 2:
        raise ValueError("no tensors of a convolution")
    return 2 * x[0] * prod((x if transposed else out)[2:]) * prod(weight)


def _turned(shape: Shape) -> list[int]:
    """With batch and channels in each other's place."""
    return [shape[1], shape[0], *shape[2:]]


def _convolution_backward(given: IO, made: IO) -> int:
    out, x, weight = given.shapes[:3]
    transposed = bool(given.values[7])
    count = 0
    if made.shapes[0]:
        count += _convolution(out, weight, made.shapes[0], not transposed)
    if made.shapes[1]:
        one, other = (out, x) if transposed else (x, out)
        count += _convolution(_turned(one), _turned(other), _turned(made.shapes[1]))
    return count


def _attention(query: Shape, key: Shape, value: Shape) -> int:
    """Scores, and their product with the values; nothing is left out for a causal mask."""
    batch, heads, length, width = query
    keys = key[2]
    return 2 * batch * heads * length * keys * (width + value[3])


def _attention_backward(query: Shape, key: Shape, value: Shape) -> int:
    """The scores again, and two products for each of those of the forward pass."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (3 * width + 2 * value[3])


Count = Callable[[IO, IO], int]
_MATRICES: Count = lambda given, made: _product(*given.shapes[:2])  # noqa: E731
_ADDED: Count = lambda given, made: _product(*given.shapes[1:3])  # noqa: E731
_CONVOLUTION: Count = lambda given, made: _convolution(given.shapes[0], given.shapes[1], made.shapes[0])  # noqa: E731
_ATTENTION: Count = lambda given, made: _attention(*given.shapes[:3])  # noqa: E731
_ATTENTION_BACKWARD: Count = lambda given, made: _attention_backward(*given.shapes[1:4])  # noqa: E731
COUNTS: dict[str, Count] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::_scaled_mm"), _MATRICES),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm"), _ADDED),
    **dict.fromkeys(("aten::convolution", "aten::_convolution"), lambda given, made: _convolution(
        given.shapes[0], given.shapes[1], made.shapes[0], bool(given.values[6])
    )),
    **{f"aten::{name}": _CONVOLUTION for name in ("cudnn_convolution", "_slow_conv2d_forward", "miopen_convolution")},
    "aten::convolution_backward": _convolution_backward,
    **{f"aten::_scaled_dot_product_{kind}_attention": _ATTENTION for kind in ("efficient", "flash", "cudnn")},
    **{
        f"aten::_scaled_dot_product_{kind}_attention_backward": _ATTENTION_BACKWARD
        for kind in ("efficient", "flash", "cudnn")
    },
}  # fmt: skip
"""Operation -> its count from what it takes and gives."""


def count_of(name: str, given: IO, made: IO) -> int | None:
    """Floating-point operations of one call; None where they are not known.

    >>> count_of("aten::mm", IO(shapes=[[2, 3], [3, 5]]), IO(shapes=[[2, 5]]))
    60
    """
    count = COUNTS.get(name)
    try:
        found = count(given, made) if count is not None else None
    except (ValueError, TypeError, IndexError):  # shapes that the operation cannot have
        return None
    return found if isinstance(found, int) and 0 < found <= _MOST else None


def counts_by_activity(trace: LinkedTrace) -> dict[int, int]:
    """Id of an activity -> its floating-point operations.

    An activity belongs to the innermost operation around its launch that has a count. Of several that one operation
    launched, the longest has the count: the others prepare or gather.
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
