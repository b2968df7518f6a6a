"""Find damaged numbers and times of calls. The numbers of a rank's calls on one group rise by one, times rise."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from crossrank.comm import is_p2p
from crossrank.text import plural
from crossrank.tools.traces.rank_trace import RankTrace

_FAR = 1000
"""A number that rises by this more than its lane has calls is wrong."""
Column = npt.NDArray[np.int64]


def odd_ones(values: Column) -> list[int]:
    """Return the positions of values that are not between those around them, which are in order."""
    before, own, after = values[:-2], values[1:-1], values[2:]
    found: list[int] = (np.flatnonzero((before <= after) & ((own < before) | (own > after))) + 1).tolist()
    return found


def mostly_numbered(lacks: Sequence[bool]) -> bool:
    """Return whether calls have numbers of their own, if at most one of them, or a twentieth, `lacks` it: counting
    would number all calls of the file otherwise than those of the other ranks."""
    return len(lacks) > sum(lacks) <= max(1, len(lacks) // 20) or not lacks


def mend_numbers(number: Column, lane: Column) -> tuple[int, list[int]]:
    """Correct each number that is not between those before and after it in its lane, although they leave room for it.

    `number` and `lane` have a value per call, in the order of the calls; -1 in `lane` = not in one. Changes `number` in
    place. Return (how many were wrong, positions of those of them that are unknown). A number is unknown if more than
    one fits, or if it is the last one and far from the others: it is 0 then.
    """
    wrong, unknown = 0, list[int]()
    for one in set(lane.tolist()) - {-1}:
        rows = np.flatnonzero(lane == one)
        before, own, after = (number[rows[start : len(rows) - 2 + start]] for start in range(3))
        known = set(number[rows].tolist())
        for place in np.flatnonzero((after - before >= 2) & ((own < before) | (own > after))).tolist():
            first, last = int(number[rows[place]]), int(number[rows[place + 2]])
            if not known.isdisjoint(range(first + 1, min(last, first + 3))):
                continue  # rows in another order
            wrong += 1
            if last - first == 2:
                number[rows[place + 1]] = first + 1
            else:
                unknown.append(int(rows[place + 1]))
        if len(rows) > 2 and number[rows[-1]] - number[rows[-2]] > len(rows) + _FAR:
            wrong += 1
            unknown.append(int(rows[-1]))
    number[unknown] = 0
    return wrong, unknown


def mend_in(trace: RankTrace, number: Column, lane: Column, id: Column) -> None:
    """Correct numbers as `mend_numbers` does, and note it in `trace`."""
    wrong, unknown = mend_numbers(number, lane)
    if wrong:
        trace.problems.append(f"{wrong:,} calls have a number that is not between those of the calls around them")
    for row in unknown:
        trace.lose_after(int(id[row]))


def mend(trace: RankTrace) -> None:
    """Correct damaged numbers of collectives. One without a number may be the one that other ranks wait for."""
    calls = trace.calls
    number, group, id = (np.array(column, np.int64) for column in (calls.number, calls.group, calls.id))
    if not (number > 0).any():
        return
    p2p = np.array([is_p2p(one) for one in trace.signatures], bool)[np.array(calls.signature)]
    nameless = np.flatnonzero(~p2p & (number == 0)).tolist()
    if nameless:
        trace.lose_after(int(id[nameless].max()))
    mend_in(trace, number, np.where(p2p | (number <= 0), -1, group), id)
    if nameless:
        trace.problems.append(f"{plural(len(nameless), 'collective')} without a number")
    calls.number = array("q", number.tobytes())
