"""Find damaged numbers and times of calls. The numbers of a rank's calls on one group rise by one, times rise."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int64]


def odd_ones(values: Column) -> list[int]:
    """Return the positions of values that are not between those around them, which are in order."""
    before, own, after = values[:-2], values[1:-1], values[2:]
    found: list[int] = (np.flatnonzero((before <= after) & ((own < before) | (own > after))) + 1).tolist()
    return found


def mend_numbers(number: Column, lane: Column) -> tuple[int, int]:
    """Correct each number that is not between those before and after it in its lane, although they leave room for it.

    `number` and `lane` have a value per call, in the order of the calls; -1 in `lane` = not in one. Changes `number` in
    place. Return (how many were wrong, how many of these stay wrong because their neighbours leave room for several).
    """
    wrong = unclear = 0
    for one in set(lane.tolist()) - {-1}:
        rows = np.flatnonzero(lane == one)
        before, own, after = (number[rows[start : len(rows) - 2 + start]] for start in range(3))
        for place in np.flatnonzero((after - before >= 2) & ((own < before) | (own > after))).tolist():
            wrong += 1
            if number[rows[place + 2]] - number[rows[place]] == 2:
                number[rows[place + 1]] = number[rows[place]] + 1
            else:
                unclear += 1
    return wrong, unclear


def wrong_numbers_text(wrong: int) -> str:
    """Return the sentence about numbers that `mend_numbers` found."""
    return f"{wrong:,} calls have a number that is not between those of the calls around them"
