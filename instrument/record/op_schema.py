"""Reads the meaning of the arguments of each c10d op from its schema.

The dispatcher passes arguments by position, without trailing defaults, and their order differs between versions of
torch. So `Reader` finds them by *name* in the installed schema. Tensors named `output…` or `input…` are outputs or
inputs; all others are both, because c10d works in place. An op that is not in `OPERATIONS` is recorded too: by its own
name, with its tensors, without a root or a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from crossrank.comm import operation_of, total_bytes
from crossrank.instrument.torch_private import has

_TENSOR_TYPES = ("Tensor", "List[Tensor]", "List[List[Tensor]]")
_PEER = {"send": "dst", "recv": "src"}

Shapes = tuple[tuple[int, ...], ...]

_Tensor = torch.Tensor
# First item of a key with any number of tensors; other keys have one argument or a pair of tensors.
LONG = "long"

# The arguments that a repeated call with the same shapes shares.
CallKey = tuple[Any, ...]


class Reader:
    """Reads the arguments of one c10d op in the form in which the dispatcher passes them."""

    def __init__(self, c10d: str, schema: torch.FunctionSchema) -> None:
        names = [argument.name for argument in schema.arguments]
        types = [str(argument.type) for argument in schema.arguments]
        self._defaults = tuple(argument.default_value for argument in schema.arguments)

        def position(*wanted: str) -> int:
            """Return the position of the first of these arguments that the schema has; -1 if none."""
            return next((names.index(name) for name in wanted if name in names), -1)

        self.c10d = c10d
        self.direct_api = "ProcessGroup." + c10d.rstrip("_")
        self.operation = operation_of(c10d)
        self.op = self.operation.name if self.operation is not None else c10d.strip("_")
        self.is_p2p = self.operation is not None and self.operation.p2p
        # The tensor of a barrier is a dummy, not payload.
        moves = self.operation is None or self.operation.payload != "none"
        tensors = [at for at, kind in enumerate(types) if moves and kind in _TENSOR_TYPES]
        self.outputs = tuple(at for at in tensors if names[at].startswith("output") or self.op == "recv")
        self.inputs = tuple(at for at in tensors if at not in self.outputs)
        self._in_place = not self.outputs and not self.is_p2p
        self.group = names.index("process_group")
        self._root = position("root_rank", "root")
        self.peer = position(_PEER.get(self.op, ""))
        self.tag = position("tag")
        self._async = position("async_op")
        self.gives_work = bool(schema.returns)
        self.reduce = position("reduce_op")
        self.in_split = position("input_split_sizes")
        self.out_split = position("output_split_sizes")
        self.arguments = len(types)
        self.keyed = tuple(at for at in (self._root, self.peer, self._async) if at >= 0)
        self.keyed_bools = tuple(types[at] == "bool" for at in self.keyed)
        self.tensors_at = self.inputs + self.outputs
        self.dummy = position("tensor") if not self.tensors_at else -1
        self.key: Callable[[Sequence[Any]], CallKey | None] = self._key_of_any
        """Returns the key that identifies a call of this op on its group; None for fake and meta tensors."""
        # Common layouts are read without loops: one list of tensors, one input and one output tensor, no tensor.
        layout = [types[at] for at in self.tensors_at]
        if layout == ["List[Tensor]"] and len(self.keyed) == 1:
            self.key = self._key_of_list
        elif layout == ["Tensor", "Tensor"] and len(self.keyed) == 1 and self.in_split < 0:
            self.key = self._key_of_pair
        elif not layout and len(self.keyed) == 1 and types[self.dummy] == "Tensor":
            self.key = self._key_of_dummy

    def _key_of_list(self, args: Sequence[Any]) -> CallKey | None:
        tensors = args[self.tensors_at[0]]
        if len(tensors) != 1:
            return self._key_of_any(args)
        tensor = tensors[0]
        if (type(tensor) is not _Tensor and not _is_real(tensor)) or tensor.is_meta:
            return None
        position = self.keyed[0]
        value = args[position] if position < len(args) else self._defaults[position]
        return (tensor.shape, tensor.dtype, value)

    def _key_of_pair(self, args: Sequence[Any]) -> CallKey | None:
        at = self.tensors_at
        first, second = args[at[0]], args[at[1]]
        if (type(first) is not _Tensor and not _is_real(first)) or first.is_meta:
            return None
        if type(second) is not _Tensor and not _is_real(second):
            return None
        position = self.keyed[0]
        value = args[position] if position < len(args) else self._defaults[position]
        return (first.shape, second.shape, first.dtype, value)

    def _key_of_dummy(self, args: Sequence[Any]) -> CallKey | None:
        tensor = args[self.dummy]
        if (type(tensor) is not _Tensor and not _is_real(tensor)) or tensor.is_meta:
            return None
        position = self.keyed[0]
        return (LONG, args[position] if position < len(args) else self._defaults[position])

    def _key_of_any(self, args: Sequence[Any]) -> CallKey | None:
        count = len(args)
        key: list[Any] = [LONG, *(args[at] if at < count else self._defaults[at] for at in self.keyed)]
        for position in self.tensors_at:
            if not _add_tensors(key, args[position]):
                return None
        if self.dummy >= 0 and not _add_tensors([], args[self.dummy]):
            return None
        if self.in_split >= 0:
            key += [tuple(args[self.in_split]), tuple(args[self.out_split])]
        return tuple(key)

    def call(self, key: CallKey, group_size: int, reduce: str | None) -> OpCall:
        """Return the call of a key. Slower than making the key, but needed only once per distinct key."""
        in_split = out_split = None
        if key[0] is LONG:
            plain = dict(zip(self.keyed, key[1:], strict=False))
            rest = list(key[1 + len(self.keyed) :])
            if self.in_split >= 0:
                out_split, in_split = rest.pop() or None, rest.pop() or None
            shapes, dtypes = _split_arguments(rest)
        else:  # shapes of the one or two arguments, their dtype, the one value
            count = len(self.tensors_at)
            shapes, dtypes = [(tuple(shape),) for shape in key[:count]], [(key[count],)] * count
            plain = {self.keyed[0]: key[count + 1]}
        in_shapes = tuple(shape for argument in shapes[: len(self.inputs)] for shape in argument)
        out_shapes = tuple(shape for argument in shapes[len(self.inputs) :] for shape in argument)
        if self._in_place:
            out_shapes = in_shapes
        sizes = [
            sum(total_bytes([shape], dtype.itemsize) for shape, dtype in zip(*argument, strict=True))
            for argument in zip(shapes, dtypes, strict=True)
        ]
        in_bytes, out_bytes = sum(sizes[: len(self.inputs)]), sum(sizes[len(self.inputs) :])
        dtype = next((dtype for argument in dtypes for dtype in argument), None)
        return OpCall(
            inputs=in_shapes,
            outputs=out_shapes,
            in_split=in_split,
            out_split=out_split,
            dtype=str(dtype).removeprefix("torch.") if dtype is not None else None,  # the first, where they differ
            bytes=self.operation.bytes(in_bytes, out_bytes, group_size) if self.operation else in_bytes,
            reduce=reduce,
            root=plain.get(self._root),
            peer=plain.get(self.peer),
            is_async=plain.get(self._async),
        )

    def device(self, args: Sequence[Any]) -> str | None:
        """Return the device of the first tensor of a call; None without tensors."""
        for position in self.tensors_at:
            for tensor in _tensors(args[position]):
                return str(tensor.device)
        return None


@dataclass(frozen=True, kw_only=True)
class OpCall:
    """The arguments of one call. `root` and `peer` are ranks within the group."""

    inputs: Shapes
    outputs: Shapes
    in_split: tuple[int, ...] | None
    out_split: tuple[int, ...] | None
    dtype: str | None
    bytes: int
    reduce: str | None
    root: int | None
    peer: int | None
    is_async: bool | None


def _split_arguments(rest: list[Any]) -> tuple[list[Shapes], list[tuple[torch.dtype, ...]]]:
    """Return shapes and dtypes per argument, from the items that `_add_tensors` appended."""
    shapes: list[Shapes] = []
    dtypes: list[tuple[torch.dtype, ...]] = []
    start = 0
    for end, item in enumerate(rest):
        if item is None:
            shapes.append(tuple(tuple(shape) for shape in rest[start:end:2]))
            dtypes.append(tuple(rest[start + 1 : end : 2]))
            start = end + 1
    return shapes, dtypes


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an argument: a tensor, a list of tensors, or a list of lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    for item in value or ():
        found.extend(_tensors(item))
    return found


def _add_tensors(key: list[Any], value: Any) -> bool:
    """Append the shapes and dtypes of an argument to `key`; return False if a tensor is fake or meta."""
    for tensor in _tensors(value):
        if (type(tensor) is not _Tensor and not _is_real(tensor)) or tensor.is_meta:
            return False
        key.append(tensor.shape)
        key.append(tensor.dtype)
    key.append(None)  # ends the argument, so that (a, b), () and (a), (b) differ
    return True


def _is_real(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of a subclass has data: a Parameter has, a FakeTensor or a tracer's proxy has not."""
    if not has("tensor subclasses"):
        return True
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return not isinstance(tensor, FakeTensor | FunctionalTensor) and not torch._is_functional_tensor(tensor)
