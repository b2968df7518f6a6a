"""Finds which integers a tensor may hold: an index outside its table would end a replay.

The trace has the range of a tensor's integers if the observer saved it
(`ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_RANGE`). Otherwise the operations that read the integers as
indices give the number of rows. A copy has the range of its original.

A trace lacks the values of numbers that became tensors (`tokens - first_token`, `masked[mask] = 0`). Indices computed
from them are taken modulo the rows of their table.
"""

from __future__ import annotations

from typing import NamedTuple

from crossrank.replay.plan.compute.compute_plan import slots_in
from crossrank.replay.plan.compute.tensors import BoundTensors, Storage, Tensors
from crossrank.tools.traces.json_document import parse


class _Reads(NamedTuple):
    """An operation that reads integers as indices."""

    indices: int
    """Position of the argument with the indices."""
    table: int
    """Position of the argument that bounds them by its size, or is the bound."""
    dimension: int | None = 0
    """The dimension of the table; None: the argument after the table has it."""


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
"""Types of indices."""


class IndexRanges:
    """Collects the ranges of integers while a window is read."""

    def __init__(self) -> None:
        self._copies: list[tuple[Storage, Storage]] = []
        """(copy, original)"""
        self._computed: dict[int, Storage] = {}
        """By id: integers computed from numbers that are not in the trace."""

    def note(self, name: str, bound: BoundTensors, tensors: Tensors, ranges: str) -> list[tuple[int, int]]:
        """Collect what an operation shows about its tensors. Return (slot, rows) of indices that may be outside their
        table."""
        if ranges:
            self._apply_recorded_ranges(bound, tensors, ranges)
        reads, beyond = _READS.get(name), []
        if reads is not None and max(reads[:2]) < len(bound.arguments):
            beyond = self._apply_reader(reads, bound, tensors)
        self._mark_results(bound, tensors)
        if name in _COPIES:
            ends = [tensors.storage_of[slot] for slot in (*bound.used, *bound.made)]
            if name == "aten::copy_":
                ends.reverse()
            if len(ends) > 1 and ends[0] is not ends[-1]:
                self._copies.append((ends[-1], ends[0]))
        return beyond

    def gives_no_values(self, name: str, bound: BoundTensors, tensors: Tensors) -> list[int]:
        """Return the slots of integers that an operation leaves unset."""
        if not name.startswith(_EMPTY):
            return []
        return [slot for slot in bound.made if tensors.slots[slot].dtype in _INTEGERS]

    def settle(self) -> None:
        """Apply the range of each copy to its original."""
        for copy, original in reversed(self._copies):
            if copy.is_index and copy.high is not None:
                _limit_indices(original, copy.high)

    def _mark_results(self, bound: BoundTensors, tensors: Tensors) -> None:
        """Mark the integers that an operation makes, or changes in place, from unknown numbers."""
        taken = [tensors.storage_of[slot] for slot in bound.used]
        if any(id(one) in self._computed or _is_unknown_number(one) for one in taken):
            for one in (*taken[:1], *(tensors.storage_of[slot] for slot in bound.made)):
                if one.dtype in _INTEGERS:
                    self._computed[id(one)] = one

    def _apply_recorded_ranges(self, bound: BoundTensors, tensors: Tensors, ranges: str) -> None:
        for place, limits in (parse(ranges, dict[int, tuple[int, int]]) or {}).items():
            if 0 <= place < len(bound.used) and 0 <= limits[1] - limits[0] < 1 << 40 and abs(limits[0]) < 1 << 40:
                storage = tensors.storage_of[bound.used[place]]
                known = storage.high is not None and not storage.is_index
                storage.low = min(storage.low, limits[0]) if known else limits[0]
                storage.high = max(storage.high or 0, limits[1]) if known else limits[1]
                storage.is_index = False

    def _apply_reader(self, reads: _Reads, bound: BoundTensors, tensors: Tensors) -> list[tuple[int, int]]:
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
            if id(storage) in self._computed and storage.dtype in _INTEGERS and size > 0:
                beyond.append((slot, size))
            if storage.high is None or storage.is_index:
                _limit_indices(storage, max(size - 1, 0))
        return beyond


def _is_unknown_number(one: Storage) -> bool:
    return one.block >= 0 and one.is_number and one.high is None and one.dtype in _INTEGERS


def _limit_indices(storage: Storage, high: int) -> None:
    storage.high = high if storage.high is None else min(storage.high, high)
    storage.is_index = True
