"""Memory for all tensors of a rank's calls: one block, as large as what is alive at once.

A tensor lives from the launch of its call until the wait for it. Calls that are never under way together share memory,
which keeps it within what the training job itself needed for its communication buffers.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from crossrank.comm import CommRecord, total_bytes
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


def bytes_needed(calls: Sequence[PlannedCall]) -> int:
    """Bytes of the tensors that are alive at once, at most, where nothing stands in for recorded types."""
    spans = launches(calls)
    changes = [0] * (len(spans) + 2)
    for position, ((first, end), until) in enumerate(zip(spans, waited_before(calls, spans), strict=True)):
        size = sum(_bytes(call.record) for call in calls[first:end])
        changes[position] += size
        changes[until] -= size
    return max(accumulate(changes))


def _bytes(record: CommRecord) -> int:
    item = DTYPES[record.dtype].size if record.dtype else 0
    return sum(total_bytes(side, item) for side in tensors(record))


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
            oldest_end = min((piece[2] for piece in taken), default=0)
        layout.offsets.append(at)
        layout.size = max(layout.size, at + size)
    return layout
