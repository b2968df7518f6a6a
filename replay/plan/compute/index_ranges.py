"""Which integers stand in a tensor: a replay makes its own, and an index beyond a table would end it.

The trace has the range of a tensor's integers where the observer was asked to save it
(`ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_RANGE`). Elsewhere those who read it as indices say how many rows
there are; what was copied from another tensor tells the same of that one.

A trace does not have the values of numbers that were made tensors (`tokens - first_token`, `masked[mask] = 0`). Indices
that were computed with them are brought into the table before they are read.
"""

from __future__ import annotations

from typing import NamedTuple

from crossrank.replay.plan.compute.compute_plan import slots_in
from crossrank.replay.plan.compute.tensors import BoundTensors, Storage, Tensors
from crossrank.tools.traces.json_document import parse


class _Reads(NamedTuple):
    """An operation that reads integers as indices."""

    indices: int
    """Place of the argument that holds them."""
    table: int
    """Place of the argument whose size bounds them, or that is the bound itself."""
    dimension: int | None = 0
    """The dimension of the table; None: the argument after the table says it."""


_READS = {
    f"aten::{name}": reads
    for reads, names in (
        (_Reads(1, 0), "embedding embedding_bag _embedding_bag _embedding_bag_forward_only index index_put_"),
        (_Reads(1, 2), "embedding_backward embedding_dense_backward"),
        (_Reads(2, 0, None), "index_select gather scatter scatter_ scatter_add_ index_add_"),
        (_Reads(1, 0, 1), "nll_loss nll_loss_forward nll_loss_nd cross_entropy_loss"),
        (_Reads(2, 1, 1), "nll_loss_backward"),
        (_Reads(0, 1), "one_hot"),
    )
    for name in names.split()
}
_COPIES = frozenset(
    f"aten::{name}" for name in ("to", "_to_copy", "clone", "contiguous", "reshape", "copy_", "flatten")
)
_EMPTY = ("aten::empty", "aten::new_empty")
_INTEGERS = ("int64", "int32")
"""What tables are read with."""


class IndexRanges:
    """Collects what is known of integers while a window is read."""

    def __init__(self) -> None:
        self._copies: list[tuple[Storage, Storage]] = []
        """(copy, what it was made of)"""
        self._guessed: dict[int, Storage] = {}
        """By id: integers that were computed with numbers which the trace does not have."""

    def note(self, name: str, bound: BoundTensors, tensors: Tensors, ranges: str) -> list[tuple[int, int]]:
        """Take what an operation says of the tensors that it takes. Returns (slot, rows) of indices that may lie beyond
        the table that they are read from."""
        if ranges:
            self._take_recorded(bound, tensors, ranges)
        reads, beyond = _READS.get(name), []
        if reads is not None and max(reads[:2]) < len(bound.arguments):
            beyond = self._take_reader(reads, bound, tensors)
        self._spread_guesses(bound, tensors)
        if name in _COPIES:
            ends = [tensors.storage_of[slot] for slot in (*bound.used, *bound.made)]
            if name == "aten::copy_":
                ends.reverse()
            if len(ends) > 1 and ends[0] is not ends[-1]:
                self._copies.append((ends[-1], ends[0]))
        return beyond

    def gives_no_values(self, name: str, bound: BoundTensors, tensors: Tensors) -> list[int]:
        """Slots of integers that an operation gives without a value."""
        if not name.startswith(_EMPTY):
            return []
        return [slot for slot in bound.made if tensors.slots[slot].dtype in _INTEGERS]

    def settle(self) -> None:
        """Give what is known of a copy to what it was made of."""
        for copy, of in reversed(self._copies):
            if copy.is_index and copy.high is not None:
                _limit(of, copy.high)

    def _spread_guesses(self, bound: BoundTensors, tensors: Tensors) -> None:
        """What is given, or changed in place, by an operation that takes a guessed integer is one."""
        taken = [tensors.storage_of[slot] for slot in bound.used]
        if any(id(one) in self._guessed or _is_unknown_number(one) for one in taken):
            for one in (*taken[:1], *(tensors.storage_of[slot] for slot in bound.made)):
                if one.dtype in _INTEGERS:
                    self._guessed[id(one)] = one

    def _take_recorded(self, bound: BoundTensors, tensors: Tensors, ranges: str) -> None:
        for place, limits in (parse(ranges, dict[int, tuple[int, int]]) or {}).items():
            if 0 <= place < len(bound.used) and 0 <= limits[1] - limits[0] < 1 << 40 and abs(limits[0]) < 1 << 40:
                storage = tensors.storage_of[bound.used[place]]
                known = storage.high is not None and not storage.is_index
                storage.low = min(storage.low, limits[0]) if known else limits[0]
                storage.high = max(storage.high or 0, limits[1]) if known else limits[1]
                storage.is_index = False

    def _take_reader(self, reads: _Reads, bound: BoundTensors, tensors: Tensors) -> list[tuple[int, int]]:
        beyond = []
        table = bound.arguments[reads.table]
        slots = slots_in(table)
        shape = tensors.slots[slots[0]].shape if slots else []
        for number, slot in enumerate(slots_in(bound.arguments[reads.indices])):
            if isinstance(table, int):
                size = table
            else:
                dimension = reads.dimension
                if dimension is None:
                    dimension = bound.arguments[reads.table + 1]
                elif isinstance(bound.arguments[reads.indices], list):
                    dimension = number  # a list has indices for each dimension
                size = shape[dimension] if isinstance(dimension, int) and -len(shape) <= dimension < len(shape) else 1
            storage = tensors.storage_of[slot]
            if id(storage) in self._guessed and storage.dtype in _INTEGERS and size > 0:
                beyond.append((slot, size))
            if storage.high is None or storage.is_index:
                _limit(storage, max(size - 1, 0))
        return beyond


def _is_unknown_number(one: Storage) -> bool:
    return one.block >= 0 and one.is_number and one.high is None and one.dtype in _INTEGERS


def _limit(storage: Storage, high: int) -> None:
    storage.high = high if storage.high is None else min(storage.high, high)
    storage.is_index = True
