"""Aligns the operations that two traces of one thread have, by their names alone.

Names repeat from step to step, and one trace may have operations that the other lacks. So the place where most names
agree is found first, without gaps. From the longest run of equal names there, the rest is aligned in both directions:
where the traces differ, with the smallest gap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from crossrank.tools.traces.execution_trace import HostOp
from crossrank.tools.traces.kineto import HostEvent

Codes = NDArray[np.int64]
_MAX_COMPARISONS = 100_000_000
"""Most comparisons of names in the search for the best place of a thread."""
_MOST_SHIFTS = 8
"""Places that are tried, if several fit equally well without gaps."""
_RUN = 8
"""Equal names after which two traces are taken as aligned again."""
_SHORTEST_RUN = 3
"""The same at the end of a trace, if one lacks something that the other has."""
_LONGEST_GAP = 1000
"""Operations in a gap at most: the time of a search grows with the square of their number."""


def aligned(ours: Sequence[HostOp], theirs: Sequence[HostEvent]) -> tuple[list[int], int]:
    """Return for each of `ours` the position in `theirs`, -1 = none, and how many places fit equally well."""
    shifts = best_shifts(ours, theirs)
    a, b = _codes(ours, theirs)
    found = [_aligned_at(shift, a, b) for shift in shifts[:_MOST_SHIFTS]]
    return min(found, key=lambda one: one.count(-1)), len(shifts)


def _aligned_at(shift: int, a: Codes, b: Codes) -> list[int]:
    start, length = _longest_run(a, b, shift)
    found = [-1] * len(a)
    for position in range(start, start + length):
        found[position] = position + shift
    first, last = start, start + length
    for place, other in _pairs(a[last:].tolist(), b[last + shift :].tolist()):
        found[last + place] = last + shift + other
    for place, other in _pairs(a[:first][::-1].tolist(), b[: first + shift][::-1].tolist()):
        found[first - 1 - place] = first + shift - 1 - other
    return found


def best_shifts(ours: Sequence[HostOp], theirs: Sequence[HostEvent]) -> list[int]:
    """Return the positions in `theirs` of the first element of `ours` that fit equally well, in order.

    A position is below 0 if `ours` starts before `theirs`. Names repeat from step to step.
    So two kinds of positions are tried: those where the rarest common name agrees, and the one that most sequence
    numbers point to. The position with most equal names wins, then the one with most equal numbers.
    """
    a, b = _codes(ours, theirs)
    kinds = int(max(a.max(), b.max())) + 1
    counts = np.bincount(a, minlength=kinds) * np.bincount(b, minlength=kinds)
    rarest = int(np.argmin(np.where(counts > 0, counts, counts.max() + 1)))
    here, there = np.flatnonzero(a == rarest), np.flatnonzero(b == rarest)
    shifts = there - here[0] if len(a) <= len(b) else np.sort(there[0] - here)
    numbers = np.array([one.seq_id for one in ours]), np.array([one.seq_id for one in theirs])
    place_of = {number: place for place, number in enumerate(numbers[1].tolist()) if number >= 0}
    votes = Counter(place_of[number] - place for place, number in enumerate(numbers[0].tolist()) if number in place_of)
    tried = dict.fromkeys([shift for shift, _ in votes.most_common(1)])
    tried |= dict.fromkeys(shifts[: 1 + _MAX_COMPARISONS // min(len(a), len(b))].tolist())
    scores = {}
    for shift in sorted(tried):
        mine, its = _overlap(a, b, shift)
        same = a[mine] == b[its]
        equal = same & (numbers[0][mine] == numbers[1][its]) & (numbers[0][mine] >= 0)
        scores[shift] = int(np.count_nonzero(same)), int(np.count_nonzero(equal))
    best = max(scores.values())
    return [shift for shift, score in scores.items() if score == best]


def _codes(ours: Sequence[HostOp], theirs: Sequence[HostEvent]) -> tuple[Codes, Codes]:
    """Return a number for the name of each operation."""
    codes: dict[str, int] = {}
    a, b = (np.array([codes.setdefault(one.name, len(codes)) for one in side], np.int64) for side in (ours, theirs))
    return a, b


def _overlap(a: Codes, b: Codes, shift: int) -> tuple[slice, slice]:
    return slice(max(0, -shift), len(b) - shift), slice(max(0, shift), len(a) + shift)


def _longest_run(a: Codes, b: Codes, shift: int) -> tuple[int, int]:
    """Return (first position in `a`, length) of the longest run of equal names at a shift."""
    mine, its = _overlap(a, b, shift)
    best, position = (mine.start, 0), mine.start
    for is_same, run in groupby((a[mine] == b[its]).tolist()):
        length = len(list(run))
        if is_same and length > best[1]:
            best = position, length
        position += length
    return best


def _pairs(a: Sequence[int], b: Sequence[int]) -> list[tuple[int, int]]:
    """Return the positions of elements that are the same in both, in order, from the start until one of the two ends.

    Where they differ, both continue behind the fewest elements after which `_RUN` of them are equal.
    """
    found, x, y = [], 0, 0
    while x < len(a) and y < len(b):
        if a[x] == b[y]:
            found.append((x, y))
            x, y = x + 1, y + 1
        elif (skipped := _gap(a, b, x, y)) is not None:
            x, y = x + skipped[0], y + skipped[1]
        else:
            break
    return found


def _gap(a: Sequence[int], b: Sequence[int], x: int, y: int) -> tuple[int, int] | None:
    """Return how many elements of each side to leave out at a place where they differ."""
    for total in range(1, _LONGEST_GAP + 1):
        for of_a in range(max(0, total - len(b) + y), min(total, len(a) - x) + 1):
            first, second = a[x + of_a : x + of_a + _RUN], b[y + total - of_a : y + total - of_a + _RUN]
            length = min(len(first), len(second))
            is_long = length >= _SHORTEST_RUN or (length and 2 * of_a == total)
            if is_long and first[:length] == second[:length]:
                return of_a, total - of_a
    return None
