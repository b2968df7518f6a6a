"""Memory for all tensors of a rank's calls: one block, as large as what is alive at once.

A tensor lives from the launch of its call until the wait for it. Calls of a thread that are never under way together
share memory, which keeps it within what the training job itself needed for its communication buffers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec

from crossrank.comm import total_bytes
from crossrank.dtypes import DTYPES
from crossrank.replay.plan.plan import PlannedCall, launches, waited_before
from crossrank.replay.plan.shapes import tensors

_ALIGNMENT = 512
"""Bytes, as torch's CUDA allocator aligns."""


@dataclass(frozen=True)
class Need:
    """A piece of memory and when it is needed."""

    bytes: int
    first: int
    """Launch that uses it first."""
    until: int
    """Launch before which it is given back."""


@dataclass
class Layout:
    """Where each piece lies."""

    offsets: list[int] = field(default_factory=list)
    size: int = 0
    """Bytes of the whole block."""


def needs_of(calls: Sequence[PlannedCall], own: Container[int] = ()) -> list[Need]:
    """What every tensor of `calls` needs, in their order, but for those of which the index is in `own`; what stands in
    for a type has the same size."""
    spans = launches(calls)
    return [
        Need(total_bytes([shape], DTYPES[call.record.dtype or "uint8"].size), position, until)
        for position, ((first, end), until) in enumerate(zip(spans, waited_before(calls, spans), strict=True))
        for index in range(first, end)
        if index not in own
        for call in (calls[index],)
        for side in tensors(call.record)
        for shape in side
    ]


def bytes_needed(calls: Sequence[PlannedCall]) -> int:
    """Bytes of the tensors that are alive at once, at most: each thread's by themselves."""
    return sum(_bytes_of_thread(own) for _, own in by_thread(calls))


def by_thread(calls: Sequence[PlannedCall]) -> list[tuple[list[int], list[PlannedCall]]]:
    """For each thread the indices of its calls, and the calls as if no other thread made any."""
    indices: dict[int | None, list[int]] = {}
    for index, call in enumerate(calls):
        indices.setdefault(call.record.thread, []).append(index)
    if len(indices) < 2:
        return [(list(range(len(calls))), list(calls))]
    return [
        (
            mine,
            [
                msgspec.structs.replace(calls[index], wait_before=bisect_left(mine, calls[index].wait_before))
                for index in mine
            ],
        )
        for mine in indices.values()
    ]


def lay_out(calls: Sequence[PlannedCall], own: Container[int] = ()) -> Layout:
    """Where the tensors of `calls` lie, in their order, but for those of which the index is in `own`. Threads share no
    memory, for nobody knows what they do at the same time."""
    whole = Layout()
    offsets: dict[int, list[int]] = {}
    for indices, mine in by_thread(calls):
        theirs = {place for place, index in enumerate(indices) if index in own}
        layout = assign_offsets(needs_of(mine, theirs))
        found = iter(layout.offsets)
        for place, index in enumerate(indices):
            count = 0 if place in theirs else sum(map(len, tensors(mine[place].record)))
            offsets[index] = [whole.size + next(found) for _ in range(count)]
        whole.size += layout.size
    whole.offsets = [at for index in range(len(calls)) for at in offsets[index]]
    return whole


def _bytes_of_thread(calls: Sequence[PlannedCall]) -> int:
    changes = [0] * (len(calls) + 1)
    for need in needs_of(calls):
        changes[need.first] += need.bytes
        changes[need.until] -= need.bytes
    return max(accumulate(changes))


def assign_offsets(needs: Sequence[Need]) -> Layout:
    """Offsets for `needs`, which are ordered by their first use: each takes the lowest gap that is large enough.

    >>> assign_offsets([Need(512, 0, 1), Need(512, 1, 3), Need(100, 2, 3)])
    Layout(offsets=[0, 0, 512], size=1024)
    """
    layout = Layout()
    taken: list[tuple[int, int, int]] = []  # (start, end, until), in rising order
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
        layout.offsets.append(at)
        layout.size = max(layout.size, at + size)
    return layout
