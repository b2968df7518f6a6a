"""Which tensor is which: slots for the tensors of a window, and the memory that they share.

An execution trace names tensors and storages by numbers that torch gives again once their owner is gone: a number
means what was made last under it. What an operation gives has a slot of its own; a tensor of which nobody saw the
making was there before the window and lies in a block of memory, at its offset, beside all others of that storage, so
that views and operations in place alias as they did.
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
_MOST = 1 << 46
"""Elements, or places in memory: more is a mistake in the file."""


class StandInError(Exception):
    """The operation cannot run; the text is the reason, the same for all that have it."""


@dataclass
class Storage:
    """Memory that tensors share."""

    dtype: str
    device: str
    block: int = -1
    """Index of the block, where it was there before the window; -1 where an operation gave it."""
    holder: int = -1
    """A slot that lies in it."""
    bytes: int = 0
    first: int = 0
    """The operation that gave it."""
    last: int = 0
    """The last one that uses it."""
    high: int | None = None
    """What reads its integers as indices takes none above this one."""
    low: int = 0
    is_index: bool = False
    is_number: bool = True
    """All tensors in it have no dimension."""


@dataclass(frozen=True)
class Named:
    """A tensor as the trace has it."""

    id: int
    storage: int
    """0 where it has none."""
    slot: Slot
    bytes: int


@dataclass
class BoundTensors:
    """What an operation works on."""

    arguments: list[Any]
    results: list[Any]
    used: list[int] = field(default_factory=list)
    """Slots that it takes."""
    made: list[int] = field(default_factory=list)
    """Slots that it gives."""
    views: list[tuple[int, int]] = field(default_factory=list)
    """(slot, slot it is a view of) of tensors that have to be made before it: nobody saw them being made, though what
    they lie in was."""


class Tensors:
    """The tensors of a window, operation after operation."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.storage_of: list[Storage] = []
        """By slot."""
        self.blocks: list[Storage] = []
        self._slot_of: dict[int, int] = {}
        """Id of a tensor -> slot."""
        self._storages: dict[int, Storage] = {}
        """Number of a storage -> what has it now."""
        self._others: dict[tuple[int, str], Storage] = {}
        """(number, type) -> memory from before the window under a number that has tensors of several types."""

    def bind(self, position: int, inputs: IO, outputs: IO) -> BoundTensors:
        """What an operation takes and gives. Raises `StandInError` where its tensors cannot be made."""
        taken = [_decode(*each) for each in _each(inputs)]
        given = [_decode(*each) for each in _each(outputs)]
        bound = BoundTensors(arguments=[], results=[])
        bound.arguments = [self._take(each, position, bound) for each in taken]
        before = {id(self.storage_of[slot]) for slot in bound.used}
        bound.results = [self._give(each, position, bound, before) for each in given]
        return bound

    def forget(self, position: int, outputs: IO) -> list[int]:
        """Slots of what an operation gives that cannot run, as far as it can be told: they stand empty."""
        bound = BoundTensors(arguments=[], results=[])
        with suppress(StandInError, ValueError, TypeError):
            for each in _each(outputs):
                self._give(_decode(*each), position, bound, set())
        return bound.made

    def extent(self, slot: int) -> tuple[int, int, int]:
        """(storage, first byte, one past the last) of a tensor."""
        one = self.slots[slot]
        width = DTYPES[one.dtype].size
        begin = one.offset * width
        return id(self.storage_of[slot]), begin, begin + _elements(one.shape, one.strides) * width

    def finished_blocks(self) -> list[Block]:
        """The memory that was there before the window."""
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

    def _take(self, value: Any, position: int, bound: BoundTensors) -> Any:
        if isinstance(value, list):
            return [self._take(each, position, bound) for each in value]
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
            storage = self._others.get((named.storage, named.slot.dtype), storage)
        if slot is not None and not named.storage:
            return slot
        if slot is not None and _same(self.slots[slot], named.slot) and storage is self.storage_of[slot]:
            return slot
        if not named.storage:
            raise StandInError("a tensor has no storage of its own: it is sparse, or of a subclass")
        end = named.bytes + named.slot.offset * DTYPES[named.slot.dtype].size
        if storage is not None and storage.block < 0:
            if storage.dtype == named.slot.dtype and end <= storage.bytes:
                slot = self._new(named, storage)
                bound.views.append((slot, storage.holder))
                return slot
            storage = None  # other memory at the same place
        if storage is None or (storage.device, storage.dtype) != (named.slot.device, named.slot.dtype):
            is_other = storage is not None and storage.device == named.slot.device
            storage = Storage(named.slot.dtype, named.slot.device, block=len(self.blocks))
            self.blocks.append(storage)
            if is_other:
                self._others[named.storage, named.slot.dtype] = storage
            else:
                self._storages[named.storage] = storage
        storage.bytes = max(storage.bytes, end)
        storage.is_number &= not named.slot.shape
        slot = self._new(named, storage, storage.block)
        storage.holder = slot
        return slot

    def _give(self, value: Any, position: int, bound: BoundTensors, before: set[int]) -> Any:
        if isinstance(value, list):
            return [self._give(each, position, bound, before) for each in value]
        if not isinstance(value, Named):
            return None
        slot = self._slot_of.get(value.id)
        storage = self._storages.get(value.storage)
        if slot is not None and slot in bound.used and _same(self.slots[slot], value.slot):
            return None  # given back as it was taken: in place, or into `out`
        if storage is None or not value.storage or id(storage) not in before:
            end = value.bytes + value.slot.offset * DTYPES[value.slot.dtype].size
            storage = Storage(value.slot.dtype, value.slot.device, bytes=end, first=position)
            if value.storage:
                self._storages[value.storage] = storage
        made = self._new(value, storage)
        if storage.holder < 0:
            storage.holder = made
        storage.last = position
        bound.made.append(made)
        return made

    def _new(self, named: Named, storage: Storage, block: int = -1) -> int:
        slot = len(self.slots)
        self.slots.append(msgspec.structs.replace(named.slot, block=block))
        self.storage_of.append(storage)
        self._slot_of[named.id] = slot
        return slot


def _same(slot: Slot, other: Slot) -> bool:
    """Whether a tensor is that of a slot, wherever it lies."""
    return slot == msgspec.structs.replace(other, block=slot.block, device=slot.device)


def _each(io: IO) -> Iterable[tuple[Any, Any, Any, str]]:
    """(value, shape, strides, type) of each; strides that the trace lacks are those of a contiguous tensor."""
    strides = io.strides if len(io.strides) == len(io.values) else [None] * len(io.values)
    return zip(io.values, io.shapes, strides, io.types, strict=True)


def _decode(value: Any, shape: Any, strides: Any, kind: str) -> Any:
    """An argument or a result: a `Named` tensor, or what `ComputeOperation.arguments` holds."""
    if value is None or value in _NOT_GIVEN or "nullptr" in kind:
        return None  # a generator is torch's own
    if kind.startswith(_LIST):
        kinds = _split(kind)
        strides = strides if isinstance(strides, list) and len(strides) == len(kinds) else [None] * len(kinds)
        if not isinstance(value, list) or not len(value) == len(kinds) == len(shape):
            raise StandInError("a list is longer than the trace keeps")
        return [_decode(*each) for each in zip(value, shape, strides, kinds, strict=True)]
    if kind.startswith(_TENSOR):
        return _named(value, shape, strides, kind)
    if kind == "Device":
        return {"device": str(value)}
    if kind == "Double" and value in _NUMBERS:
        return {"number": value}
    if isinstance(value, bool | int | float | str):
        return value
    raise StandInError(f"an argument of type {kind.partition('[')[0]} cannot be made")


def _split(kind: str) -> list[str]:
    """The types in that of a list.

    >>> _split("GenericList[Int,GenericList[Int,Int]]"), _split("GenericList[]")
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


def _named(value: Any, shape: Any, strides: Any, kind: str) -> Named:
    dtype = dtype_of(kind)
    if dtype is None:
        raise StandInError(f"tensors of type {kind.removeprefix(_TENSOR).removesuffix(')')} cannot be made")
    try:
        identity, storage, offset, elements, _, device, *_ = value
        numbers = (identity, storage, offset, elements, *shape, *(strides or ()))
        if not all(0 <= number < _MOST for number in numbers):
            raise ValueError
    except (TypeError, ValueError) as error:
        raise StandInError("a tensor has impossible numbers") from error
    strides = list(strides) if strides is not None and len(strides) == len(shape) else contiguous(shape)
    extent = _elements(shape, strides)
    if extent >= _MOST:
        raise StandInError("a tensor has impossible numbers")
    slot = Slot(shape=list(shape), strides=strides, dtype=dtype.name, device=str(device), offset=offset)
    return Named(identity, storage, slot, extent * dtype.size)


def _elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """From the first element to the last."""
    return 0 if 0 in shape else sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1


def contiguous(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor.

    >>> contiguous([2, 3, 4])
    [12, 4, 1]
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]
