"""Align the calls of two ranks on one group, if their files have no numbers and different numbers of calls.

Captures start and end at different calls: then one shift aligns the ranks (`shift_between`). A file may also lack a
call between others, because a row of it is damaged: then the shift changes there.

`align` finds the alignment with the fewest missing calls. If there are several, differences in time decide. This is a
global alignment of two sequences (Needleman and Wunsch, 1970) within a band of shifts. A pair counts only if every
other alignment is clearly worse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crossrank.tools.traces.busy import Ints

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_MAX_SHIFT = 256
"""Calls that one rank may have more than another at one edge of a capture."""
_MIN_OVERLAP = 0.5
"""Share of the shorter sequence that both ranks must have."""
_MIN_RATIO = 4
"""Time differences must vary this many times less at the chosen shift than at any other."""
_MAX_CELLS = 1 << 20
"""Pairs of calls that `_with_gaps` compares: 8 MiB for each of its matrices."""
_MISSING = 1.0
"""Cost of a call that one of the files lacks, in the unit of the cost of a pair: the difference of its times, divided
by the time between calls, at most 1."""
_TIGHT = 0.25
"""Times that differ by more than this share of the time between calls do not say which calls are a pair."""
_OFFSETS = 3
"""Offsets between two clocks that are tried of each kind, besides 0."""
_FEWEST = 4
"""Pairs that show the offset between two clocks."""
_CLEAR = 0.25
"""An alignment must be cheaper by this than one that pairs a call with another one."""


class LaneCalls(NamedTuple):
    """The calls of one rank on one group, in order."""

    what: Ints
    """Calls of two ranks with equal numbers may be one collective."""
    when: Ints
    """ns, 0 = unknown."""
    step: Ints
    """Negative = unknown."""


def align(mine: LaneCalls, theirs: LaneCalls) -> Ints | None:
    """Return the index in `theirs` of each call of `mine`, or -1; None if too few have one that is certain."""
    if len(mine.what) > len(theirs.what):
        inverse = align(theirs, mine)
        return None if inverse is None else _inverted(inverse, len(mine.what))
    (what, when, step), (other, other_when, other_step) = mine, theirs
    is_timed = bool(len(when) > 1 and when.all() and other_when.all())
    if is_timed and np.array_equal(what, other) and _is_close(when, other_when, other_when - when):
        return np.arange(len(what))
    if (step >= 0).all() and (other_step >= 0).all():  # the best key: ranks count steps alike
        pairs = np.unique(
            np.concatenate([np.stack(one, axis=1) for one in ((what, step), (other, other_step))]),
            axis=0,
            return_inverse=True,
        )[1]
        found = _by_calls(pairs[: len(what)].ravel(), when, pairs[len(what) :].ravel(), other_when)
        if found is not None:
            return found
    return _by_calls(what, when, other, other_when)


def _by_calls(what: Ints, when: Ints, other: Ints, other_when: Ints) -> Ints | None:
    shift = shift_between(what, when, other, other_when)
    if shift is not None:
        rigid = np.arange(len(what)) + shift
        rigid[(rigid < 0) | (rigid >= len(other))] = -1
        apart = (other_when[rigid] - when)[rigid >= 0]
        # Without times, nothing speaks against the shift.
        if not (when.all() and other_when.all()) or _is_close(when, other_when, apart - np.median(apart)):
            return rigid
    return _with_gaps(what, when, other, other_when)


def _inverted(indices: Ints, count: int) -> Ints:
    inverse = np.full(count, -1)
    paired = np.flatnonzero(indices >= 0)
    inverse[indices[paired]] = paired
    return inverse


def _between(when: Ints) -> float:
    """Return the median time between calls."""
    return float(np.median(np.abs(np.diff(when)))) if len(when) > 1 else 0.0


def _is_close(when: Ints, other_when: Ints, apart: Ints | Floats) -> bool:
    """Return whether calls that are `apart` in time are closer to each other than to their neighbours."""
    return bool(np.max(np.abs(apart)) < min(_between(when), _between(other_when)) / 2)


def shift_between(what: Ints, when: Ints, other: Ints, other_when: Ints) -> int | None:
    """Return the index in `other` of the first call of the shorter `what`, negative if `other` lacks it; None if the
    shift is ambiguous.

    Arguments are those of two `LaneCalls`. Criteria:

    1. the calls themselves;
    2. their times, if the clocks agree to less than half the time between calls;
    3. the variation of the time differences, which needs no aligned clocks.
    """
    more = len(other) - len(what)
    if more > _MAX_SHIFT or len(what) == 0:
        return None
    least = max(1, int(len(what) * _MIN_OVERLAP))
    fitting = []
    for shift in range(max(-_MAX_SHIFT, least - len(what)), min(more + _MAX_SHIFT, len(other) - least) + 1):
        first, behind = max(0, -shift), min(len(what), len(other) - shift)
        if np.array_equal(what[first:behind], other[first + shift : behind + shift]):
            fitting.append(shift)
    whole = [shift for shift in fitting if 0 <= shift <= more]
    if len(fitting) == 1 or (len(whole) == 1 and len(np.unique(what)) > 1):
        return (whole or fitting)[0]
    if not fitting or (when == 0).any() or (other_when == 0).any():
        return None
    apart = _medians(when, other_when, fitting, 0.0)
    best = int(apart.argmin())
    if len(what) > 1 and apart[best] < float(np.median(np.diff(when))) / 2:
        return fitting[best]
    vary = _medians(when, other_when, fitting, None)
    best = int(vary.argmin())
    others = np.delete(vary, best)
    pairs = min(len(what), len(other) - fitting[best]) - max(0, -fitting[best])
    return fitting[best] if pairs > 2 and _MIN_RATIO * vary[best] < others.min() else None


def _medians(when: Ints, other_when: Ints, shifts: list[int], offset: float | None) -> Floats:
    """Return for each shift the median of the differences in time, without sign, after `offset` was subtracted; None =
    the median difference of the shift."""
    found, many = [], max(1, _MAX_CELLS // len(when))
    for first in range(0, len(shifts), many):
        some = np.array(shifts[first : first + many])
        index = np.arange(len(when))[:, None] + some
        is_pair = (index >= 0) & (index < len(other_when))
        apart = (other_when[np.clip(index, 0, len(other_when) - 1)] - when[:, None]).astype(np.float64)
        middle = _column_medians(apart, is_pair) if offset is None else offset
        found.append(_column_medians(np.abs(apart - middle), is_pair))
    return np.concatenate(found)


def _column_medians(values: Floats, counts: Bools) -> Floats:
    """Return the median of the values in each column that `counts`. A sort of all columns at once is many times as fast
    as a median of each."""
    ordered = np.sort(np.where(counts, values, np.inf), axis=0)
    number, column = counts.sum(axis=0), np.arange(values.shape[1])
    medians: Floats = (ordered[(number - 1) // 2, column] + ordered[number // 2, column]) / 2
    return medians


def _with_gaps(what: Ints, when: Ints, other: Ints, other_when: Ints) -> Ints | None:
    """As `align`. Either file may lack calls between others."""
    more = len(other) - len(what)
    pad = min(_MAX_SHIFT, (_MAX_CELLS // max(1, len(what)) - more) // 2, len(what))
    if more > _MAX_SHIFT or pad < 1:
        return None
    index = np.arange(len(what))[:, None] + np.arange(-pad, more + pad + 1)
    alike = (index >= 0) & (index < len(other))
    index = np.clip(index, 0, len(other) - 1)
    alike &= what[:, None] == other[index]
    by_time = _by_time(alike, when, other_when, (other_when[index] - when[:, None]).astype(np.float64))
    return _cheapest(np.where(alike, 0.0, np.inf), len(other))[1] if by_time is None else by_time


def _by_time(alike: Bools, when: Ints, other_when: Ints, apart: Floats) -> Ints | None:
    """Return the cheapest alignment by times, if they are known and tell the calls apart."""
    unit = min(_between(when), _between(other_when))
    if not (unit > 0 and when.all() and other_when.all()):
        return None
    results = []
    for offset in _offsets(apart, alike):
        costs = np.where(alike, np.minimum(np.abs(apart - offset) / unit, 1.0), np.inf)
        cost, pairs = _cheapest(costs, len(other_when))
        if pairs is None:
            continue
        paired = np.flatnonzero(pairs >= 0)
        if np.median(np.abs(other_when[pairs[paired]] - when[paired] - offset)) > _TIGHT * unit:
            continue
        if offset == 0:
            return pairs
        if len(paired) < _FEWEST:
            continue
        results.append((cost, pairs))
    if not results:
        return None
    best, pairs = min(results, key=lambda one: one[0])
    rivals = [cost for cost, one in results if not _agree(one, pairs)]
    return pairs if all(cost > _MIN_RATIO * best for cost in rivals) else None


def _agree(one: Ints, other: Ints) -> bool:
    both = (one >= 0) & (other >= 0)
    return bool((one[both] == other[both]).all())


def _offsets(apart: Floats, alike: Bools) -> Iterator[float]:
    """Return the offsets between the clocks that may be right: 0, and the medians of the shifts at which the time
    differences vary least, or at which most calls are alike."""
    yield 0.0
    many = alike.sum(axis=0) >= max(2, len(apart) * _MIN_OVERLAP / 2)
    apart, alike = apart[:, many], alike[:, many]
    if not many.any():
        return
    medians = _column_medians(apart, alike)
    ordered = np.sort(np.where(alike, np.abs(apart - medians), np.inf), axis=0)
    quarter = ordered[alike.sum(axis=0) // 4, np.arange(alike.shape[1])]  # if calls are lost, most are apart
    by_spread, by_count = (np.argsort(one, kind="stable")[:_OFFSETS].tolist() for one in (quarter, -alike.sum(axis=0)))
    yield from (float(medians[column]) for column in dict.fromkeys(by_spread + by_count))


def _cheapest(cost: Floats, count: int) -> tuple[float, Ints | None]:
    """Return (cost of the cheapest alignment, index of the certain partner of each call or -1; None if too few have
    one).

    Column k of `cost` pairs call i with call i + k - pad of the other rank, which has `count` calls; the band is as
    wide on both sides.
    """
    calls, width = cost.shape
    pad = (width - 1 - (count - calls)) // 2
    before = _costs_before(cost, count, pad)
    after = _costs_before(cost[::-1, ::-1], count, pad)[::-1, ::-1]
    whole = before[:-1] + cost + after[1:]
    cheapest = float(before[-1, count - calls + pad])
    row, column = np.nonzero(whole <= cheapest + _CLEAR)
    partner = row + column - pad
    is_best = whole[row, column] <= cheapest + 1e-6
    certain = is_best & (np.bincount(row, minlength=calls)[row] == 1)
    certain &= np.bincount(partner, minlength=count)[partner] == 1
    pairs = np.full(calls, -1)
    pairs[row[certain]] = partner[certain]
    return cheapest, pairs if certain.sum() >= max(1, calls * _MIN_OVERLAP) else None


def _costs_before(cost: Floats, count: int, pad: int) -> Floats:
    """Return the lowest cost of an alignment of the first i calls with the first i + k - pad calls of the other rank,
    for each row i and column k."""
    calls, width = cost.shape
    column = np.arange(width)
    costs = np.full((calls + 1, width), np.inf)
    theirs = column - pad
    costs[0] = np.where((theirs >= 0) & (theirs <= count), _MISSING * theirs, np.inf)
    for i in range(calls):
        row = costs[i] + cost[i]
        row[:-1] = np.minimum(row[:-1], costs[i, 1:] + _MISSING)  # the other file lacks call i
        theirs = column + i + 1 - pad
        row[(theirs < 0) | (theirs > count)] = np.inf
        costs[i + 1] = np.minimum.accumulate(row - _MISSING * column) + _MISSING * column  # this file lacks calls
        costs[i + 1, theirs > count] = np.inf
    return costs
