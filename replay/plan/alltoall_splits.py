"""Parts of an all_to_all where a recording says only what each rank sends and receives in total.

The flight recorder notes the shapes of an uneven all_to_all and not its splits. Any parts will do that add up on both
sides; those chosen here are as proportional to both as whole rows can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import msgspec

from crossrank.comm import CommRecord


def lacks_parts(calls: Mapping[int, CommRecord], ranks: Sequence[int]) -> bool:
    """Whether `calls`, by rank, are one all_to_all of a tensor per side whose parts are not even and not recorded."""
    if any(rank not in calls for rank in ranks):
        return False
    records = [calls[rank] for rank in ranks]
    if any(one.c10d != "alltoall_base_" or one.in_split or one.out_split for one in records):
        return False
    sizes = {_rows(shape) for one in records for shape in (one.inputs[0], one.outputs[0])}
    return len(sizes) > 1 or sizes.pop() % len(ranks) != 0


def with_parts(calls: Mapping[int, CommRecord], ranks: Sequence[int]) -> dict[int, CommRecord] | None:
    """The same calls with splits; None where what is sent is not what is received, or rows differ in size."""
    records = [calls[rank] for rank in ranks]
    sent = [_rows(one.inputs[0]) for one in records]
    received = [_rows(one.outputs[0]) for one in records]
    widths = {prod(shape[1:]) for one in records for shape in (one.inputs[0], one.outputs[0]) if shape}
    if sum(sent) != sum(received) or len(widths) > 1:
        return None
    parts = fit(sent, received)
    return {
        rank: msgspec.structs.replace(calls[rank], in_split=parts[place], out_split=[row[place] for row in parts])
        for place, rank in enumerate(ranks)
    }


def _rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def fit(rows: Sequence[int], columns: Sequence[int]) -> list[list[int]]:
    """A table of whole numbers with these sums of rows and columns, which are equal in total.

    >>> fit([4, 2], [3, 3])
    [[2, 2], [1, 1]]
    """
    total = sum(rows) or 1
    table = [[row * column // total for column in columns] for row in rows]
    left = [row - sum(cells) for row, cells in zip(rows, table, strict=True)]
    wanted = [column - sum(cells[at] for cells in table) for at, column in enumerate(columns)]
    i = j = 0
    while i < len(left) and j < len(wanted):
        more = min(left[i], wanted[j])
        table[i][j] += more
        left[i] -= more
        wanted[j] -= more
        if not left[i]:
            i += 1
        else:
            j += 1
    return table
