"""Plans one block of memory for all tensors of a rank's calls, as large as what is in use at once.

A tensor is in use from the launch of its call until the wait for it. Calls of one thread that never overlap share
memory. So the block stays near what the training job needed for its communication buffers.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container, Sequence
from itertools import accumulate
from typing import NamedTuple

from crossrank.comm import total_bytes
from crossrank.dtypes import DTYPES
from crossrank.replay.plan.plan import PlannedCall, launches, waited_before
from crossrank.replay.plan.shapes import tensors

_ALIGNMENT = 512
"""Bytes, like torch's CUDA allocator."""


class Need(NamedTuple):
    """A piece of memory and when it is in use."""

    bytes: int
    first: int
    """The first launch that uses it."""
    until: int
    """The launch before which it is free again."""


def _collect_needs(calls: Sequence[PlannedCall], own: Container[int]) -> dict[int | None, dict[int, Need]]:
    """Return, by thread, the need of each tensor by its position among all. A replacement type has the same size."""
    spans = launches(calls)
    places = 0
    found: dict[int | None, dict[int, Need]] = {}
    for position, ((first, end), until) in enumerate(zip(spans, waited_before(calls, spans), strict=True)):
        for record in (calls[index].record for index in range(first, end) if index not in own):
            width = DTYPES[record.dtype or "uint8"].size
            for shape in (shape for side in tensors(record) for shape in side):
                found.setdefault(record.thread, {})[places] = Need(total_bytes([shape], width), position, until)
                places += 1
    return found


def bytes_needed(calls: Sequence[PlannedCall]) -> int:
    """Return the most bytes of tensors in use at once, summed over threads."""
    whole = 0
    for needs in _collect_needs(calls, ()).values():
        changes = [0] * (len(calls) + 1)
        for need in needs.values():
            changes[need.first] += need.bytes
            changes[need.until] -= need.bytes
        whole += max(accumulate(changes))
    return whole


def lay_out(calls: Sequence[PlannedCall], own: Container[int] = ()) -> tuple[list[int], int]:
    """Return (offset of each tensor of `calls`, bytes of the whole block), without the calls whose index is in `own`.
    Threads share no memory, since their relative timing is unknown.
    """
    size = 0
    offsets: dict[int, int] = {}
    for needs in _collect_needs(calls, own).values():
        thread_offsets, bytes_of_thread = assign_offsets(list(needs.values()))
        offsets |= {place: size + at for place, at in zip(needs, thread_offsets, strict=True)}
        size += bytes_of_thread
    return [offsets[place] for place in range(len(offsets))], size


def assign_offsets(needs: Sequence[Need]) -> tuple[list[int], int]:
    """Return offsets for `needs`, ordered by first use, and the bytes of all. Each takes the lowest sufficient gap.

    >>> assign_offsets([Need(512, 0, 1), Need(512, 1, 3), Need(100, 2, 3)])
    ([0, 0, 512], 1024)
    """
    offsets, whole = [], 0
    taken: list[tuple[int, int, int]] = []  # (start, end, until), ascending
    oldest_end = 0
    for need in needs:
        if oldest_end <= need.first:
            taken = [piece for piece in taken if piece[2] > need.first]
        size = -(-need.bytes // _ALIGNMENT) * _ALIGNMENT
        at = 0
        if size:
            for start, end, _ in taken:
                if start - at >= size:
                    break
                at = max(at, end)
            insort(taken, (at, at + size, need.until))
            oldest_end = min(piece[2] for piece in taken)
        offsets.append(at)
        whole = max(whole, at + size)
    return offsets, whole
