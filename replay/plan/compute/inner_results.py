"""Operations of which somebody later uses what only an operation inside them gave.

`aten::layer_norm` returns one tensor, and its backward takes the mean that `aten::native_layer_norm` inside it gave
too. Such an operation does not run as a whole, or what it keeps for later would be lost; those inside it do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from crossrank.tools.graph.linking.linked_trace import HostOp
from crossrank.tools.traces.execution_trace import IO

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
    """Ids of the nodes that have to be split.

    `order` are nodes as they began, `sides` gives what one takes and gives.
    """
    split: set[int] = set()
    stacks: dict[int, list[_Running]] = {}
    given_by: dict[Tensor, list[_Running]] = {}
    """Tensor -> who gave it last, the outermost that returned it, and those around that one."""
    for op in order:
        stack = stacks.setdefault(op.tid, [])
        while stack and stack[-1].op.id != op.caller:
            _end(stack, given_by)
        inputs, outputs = sides(op)
        takes = list(_tensors(inputs))
        around = {one.op.id for one in stack}
        for tensor in takes:
            for giver in given_by.get(tensor, ()):
                if giver.op.id in around or tensor[0] in giver.takes:
                    break
                split.add(giver.op.id)
        stack.append(_Running(op, frozenset(identity for identity, _ in takes), tuple(_tensors(outputs))))
    return split


def _end(stack: list[_Running], given_by: dict[Tensor, list[_Running]]) -> None:
    ended = stack.pop()
    for tensor in ended.gives:
        given_by[tensor] = stack[::-1]


def _tensors(io: IO) -> Iterator[Tensor]:
    for value, kind in zip(io.values, io.types, strict=False):
        if kind.startswith("Tensor("):
            yield from _tensor(value)
        elif "Tensor(" in kind:
            yield from _inside(value)


def _inside(value: Any) -> Iterator[Tensor]:
    if isinstance(value, list) and value and not isinstance(value[0], list):
        yield from _tensor(value)
    elif isinstance(value, list):
        for one in value:
            yield from _inside(one)


def _tensor(value: Any) -> Iterator[Tensor]:
    if isinstance(value, list) and len(value) >= 6 and isinstance(value[0], int) and isinstance(value[1], int):
        yield value[0], value[1]
