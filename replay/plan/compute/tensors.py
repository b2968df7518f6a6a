"""Identifies tensors: assigns slots to the tensors of a window, and finds the memory that they share.

In an execution trace, tensors and storages have numbers that torch reuses after their owner is gone. So a number means
the last tensor made under it. The result of an operation has its own slot. A tensor without a visible maker existed
before the window. It gets its recorded offset in a block of memory that all tensors of its storage share. So views and
in-place operations alias as they did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from crossrank.dtypes import DTYPES, dtype_of
from crossrank.replay.plan.compute.compute_plan import Block, Slot
from crossrank.tools.traces.execution_trace import IO

_TENSOR = "Tensor("
_LIST = "GenericList["
_NOT_GIVEN = ("<Generator>", "<None>")
_NUMBERS = ("inf", "-inf", "nan")
_MAX_COUNT = 1 << 46
"""A limit for elements and memory addresses: a larger number is an error in the file."""


class StandInError(Exception):
    """The operation cannot run. The text is the reason, the same for all such operations."""


@dataclass
class Storage:
    """Memory that tensors share."""

    dtype: str
    device: str
    block: int = -1
    """Index of the block if the memory existed before the window; -1 if an operation made it."""
    holder: int = -1
    """A slot in this memory."""
    bytes: int = 0
    first: int = 0
    """The operation that made it."""
    last: int = 0
    """The last operation that uses it."""
    high: int | None = None
    """The largest integer that is valid for all readers that use its integers as indices."""
    low: int = 0
    is_index: bool = False
    is_number: bool = True
    """All tensors in it have no dimension."""


@dataclass(frozen=True)
class Named:
    """A tensor as the trace describes it."""

    id: int
    storage: int
    """0 if it has none."""
    slot: Slot
    end: int
    """Bytes from the start of its storage to the end of its last element."""


@dataclass
class BoundTensors:
    """The arguments and results of an operation, bound to slots."""

    arguments: list[Any]
    results: list[Any]
    used: list[int] = field(default_factory=list)
    """Slots of its arguments."""
    made: list[int] = field(default_factory=list)
    """Slots of its results."""
    views: list[tuple[int, int]] = field(default_factory=list)
    """(slot, slot it is a view of) of views that have to be made before the operation: the trace does not show who made
    them."""


class Tensors:
    """The tensors of a window, added operation by operation."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.storage_of: list[Storage] = []
        """By slot."""
        self.blocks: list[Storage] = []
        self._slot_of: dict[int, int] = {}
        """Id of a tensor -> slot."""
        self._storages: dict[int, Storage] = {}
        """Number of a storage -> the memory that has this number now."""
        self._by_dtype: dict[tuple[int, str], Storage] = {}
        """(number, type) -> memory from before the window, if tensors of several types share its number."""

    def bind(self, position: int, inputs: IO, outputs: IO) -> BoundTensors:
        """Return the arguments and results of an operation. Raises `StandInError` if its tensors cannot be made."""
        arguments_in_trace = [_decode(*each) for each in _zip_values(inputs)]
        results_in_trace = [_decode(*each) for each in _zip_values(outputs)]
        bound = BoundTensors(arguments=[], results=[])
        bound.arguments = [self._bind_argument(each, position, bound) for each in arguments_in_trace]
        storages_before = {id(self.storage_of[slot]) for slot in bound.used}
        bound.results = [self._bind_result(each, position, bound, storages_before) for each in results_in_trace]
        return bound

    def forget(self, position: int, outputs: IO) -> list[int]:
        """Return the slots of the results of an operation that cannot run, as far as known. They stay empty."""
        bound = BoundTensors(arguments=[], results=[])
        with suppress(StandInError, ValueError, TypeError):
            for each in _zip_values(outputs):
                self._bind_result(_decode(*each), position, bound, set())
        return bound.made

    def extent(self, slot: int) -> tuple[int, int, int]:
        """Return (storage, first byte, one past the last) of a tensor."""
        one = self.slots[slot]
        width = DTYPES[one.dtype].size
        begin = one.offset * width
        return id(self.storage_of[slot]), begin, begin + _extent_in_elements(one.shape, one.strides) * width

    def finished_blocks(self) -> list[Block]:
        """Return the blocks of memory that existed before the window."""
        return [
            Block(
                bytes=one.bytes,
                dtype=one.dtype,
                device=one.device,
                low=one.low if one.high is not None else 0,
                high=max(one.high, one.low) if one.high is not None else 0,
                is_number=one.is_number,
                is_index=one.is_index,
            )
            for one in self.blocks
        ]

    def _bind_argument(self, value: Any, position: int, bound: BoundTensors) -> Any:
        if isinstance(value, list):
            return [self._bind_argument(each, position, bound) for each in value]
        if not isinstance(value, Named):
            return value
        slot = self._slot_for(value, bound)
        bound.used.append(slot)
        self.storage_of[slot].last = position
        return {"slot": slot}

    def _slot_for(self, named: Named, bound: BoundTensors) -> int:
        slot = self._slot_of.get(named.id)
        storage = self._storages.get(named.storage)
        if storage is not None and storage.block >= 0 and storage.dtype != named.slot.dtype:
            storage = self._by_dtype.get((named.storage, named.slot.dtype), storage)
        if slot is not None and not named.storage:
            return slot
        if slot is not None and _is_same_tensor(self.slots[slot], named.slot) and storage is self.storage_of[slot]:
            return slot
        if not named.storage:
            raise StandInError("a tensor has no storage of its own: it is sparse, or of a subclass")
        if storage is not None and storage.block < 0:
            if storage.dtype == named.slot.dtype and named.end <= storage.bytes:
                slot = self._add_slot(named, storage)
                bound.views.append((slot, storage.holder))
                return slot
            storage = None  # other memory at the same address
        if storage is None or (storage.device, storage.dtype) != (named.slot.device, named.slot.dtype):
            is_other = storage is not None and storage.device == named.slot.device
            storage = Storage(named.slot.dtype, named.slot.device, block=len(self.blocks))
            self.blocks.append(storage)
            if is_other:
                self._by_dtype[named.storage, named.slot.dtype] = storage
            else:
                self._storages[named.storage] = storage
        storage.bytes = max(storage.bytes, named.end)
        storage.is_number &= not named.slot.shape
        slot = self._add_slot(named, storage, storage.block)
        storage.holder = slot
        return slot

    def _bind_result(self, value: Any, position: int, bound: BoundTensors, before: set[int]) -> Any:
        if isinstance(value, list):
            return [self._bind_result(each, position, bound, before) for each in value]
        if not isinstance(value, Named):
            return None
        slot = self._slot_of.get(value.id)
        storage = self._storages.get(value.storage)
        if slot is not None and slot in bound.used and _is_same_tensor(self.slots[slot], value.slot):
            return None  # an argument that is also the result: in place, or `out`
        if storage is None or not value.storage or id(storage) not in before:
            storage = Storage(value.slot.dtype, value.slot.device, bytes=value.end, first=position)
            if value.storage:
                self._storages[value.storage] = storage
        made = self._add_slot(value, storage)
        if storage.holder < 0:
            storage.holder = made
        storage.last = position
        bound.made.append(made)
        return made

    def _add_slot(self, named: Named, storage: Storage, block: int = -1) -> int:
        slot = len(self.slots)
        self.slots.append(msgspec.structs.replace(named.slot, block=block))
        self.storage_of.append(storage)
        self._slot_of[named.id] = slot
        return slot


def _is_same_tensor(slot: Slot, other: Slot) -> bool:
    """Return whether the tensor equals that of `slot`, apart from its memory."""
    return slot == msgspec.structs.replace(other, block=slot.block, device=slot.device)


def _zip_values(io: IO) -> Iterable[tuple[Any, Any, Any, str]]:
    """Return (value, shape, strides, type) of each value. Missing strides become None, which means contiguous."""
    strides = io.strides if len(io.strides) == len(io.values) else [None] * len(io.values)
    return zip(io.values, io.shapes, strides, io.types, strict=True)


def _decode(value: Any, shape: Any, strides: Any, kind: str) -> Any:
    """Return an argument or a result: a `Named` tensor, or a value as in `ComputeOperation.arguments`."""
    if value is None or value in _NOT_GIVEN or "nullptr" in kind:
        return None  # torch makes generators itself
    if kind.startswith(_LIST):
        kinds = _split_list_types(kind)
        strides = strides if isinstance(strides, list) and len(strides) == len(kinds) else [None] * len(kinds)
        if not isinstance(value, list) or not len(value) == len(kinds) == len(shape):
            raise StandInError("a list is longer than the trace keeps")
        return [_decode(*each) for each in zip(value, shape, strides, kinds, strict=True)]
    if kind.startswith(_TENSOR):
        return _parse_tensor(value, shape, strides, kind)
    if kind == "Device":
        return {"device": str(value)}
    if kind == "Double" and value in _NUMBERS:
        return {"number": value}
    if isinstance(value, bool | int | float | str):
        return value
    raise StandInError(f"an argument of type {kind.partition('[')[0]} cannot be made")


def _split_list_types(kind: str) -> list[str]:
    """Return the element types in the type of a list.

    >>> _split_list_types("GenericList[Int,GenericList[Int,Int]]"), _split_list_types("GenericList[]")
    (['Int', 'GenericList[Int,Int]'], [])
    """
    text = kind[len(_LIST) : -1]
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(text):
        depth += letter in "[(<"
        depth -= letter in "])>"
        if letter == "," and not depth:
            parts.append(text[begin:at])
            begin = at + 1
    return [*parts, text[begin:]] if text else []


def _parse_tensor(value: Any, shape: Any, strides: Any, kind: str) -> Named:
    dtype = dtype_of(kind)
    if dtype is None:
        raise StandInError(f"tensors of type {kind.removeprefix(_TENSOR).removesuffix(')')} cannot be made")
    try:
        identity, storage, offset, elements, _, device, *_ = value
        numbers = (identity, storage, offset, elements, *shape, *(strides or ()))
        if not all(0 <= number < _MAX_COUNT for number in numbers):
            raise ValueError
    except (TypeError, ValueError) as error:
        raise StandInError("a tensor has impossible numbers") from error
    strides = list(strides) if strides is not None and len(strides) == len(shape) else contiguous(shape)
    extent = _extent_in_elements(shape, strides)
    if extent >= _MAX_COUNT:
        raise StandInError("a tensor has impossible numbers")
    slot = Slot(shape=list(shape), strides=strides, dtype=dtype.name, device=str(device), offset=offset)
    return Named(identity, storage, slot, (offset + extent) * dtype.size)


def _extent_in_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the distance from the first element to one past the last."""
    return 0 if 0 in shape else sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1


def contiguous(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor.

    >>> contiguous([2, 3, 4])
    [12, 4, 1]
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]
