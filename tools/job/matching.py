"""Which calls of different ranks are one collective.

Calls are joined by group, for sends and receives by their two ends as well, and number. Where files have no numbers
they were counted, which goes wrong if files begin at different calls: so what is joined is checked. Calls of one
collective agree in operation, root and size, and none ends before another has begun. Where ranks have different numbers
of calls, as at the edges of a capture, `shifts` finds which call of one is the first of the other. A lane (the calls
of one group, or of one pair) with counted numbers on which too many contradict is not joined at all, and what is not
joined is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crossrank.comm import OPERATIONS
from crossrank.tools.job.launches import Bools, CallKind, Ints, Launches
from crossrank.tools.job.shifts import shift_between

_MAX = np.iinfo(np.int64).max
_OFTEN = 0.05
"""Share of contradictions above which counted numbers are taken to be shifted."""

NO_NUMBER = "calls without a number: they are not compared across ranks"
UNLIKE_COUNTS = "calls on groups of which the ranks have different numbers of calls: they are not compared"
AT_EDGE = "calls at the edge of a capture, which the files of other ranks of their group do not have"
SHIFTED = "calls that were numbered by counting, and then contradict each other: they are not compared"
TWICE = "calls that share their number with another of the same rank: they are not compared"
DISAGREE = "calls of which the ranks disagree on operation, size or root: see crossrank diagnose"


@dataclass
class Joined:
    """Calls and the collectives that they are parts of."""

    lane: Ints
    """Of each call."""
    numbers: Ints
    """Of each call, as recorded or counted."""
    counted: Bools
    """Of each call: whether its number was counted."""
    apart: Bools
    """Of each call: it is not joined with others."""
    collective: Ints
    """Of each call."""
    of_kind: Ints
    """Of each collective: the kind of its first call."""
    number: Ints
    own: Bools
    """Of each collective: it is one rank's own."""
    doubtful: Bools
    """Of each call: its number was counted, where others of its lane are recorded; it does not tell clocks."""

    kind: Ints
    """Of each call."""

    @property
    def count(self) -> int:
        return len(self.of_kind)

    def part(self, calls: Bools) -> None:
        """Take calls out of their collectives."""
        self.apart |= calls
        self.collective, self.of_kind, self.number, self.own = _collectives(
            self.lane, self.numbers, self.apart, self.kind
        )


def match_calls(found: Launches, unmatched: Counter[str]) -> Joined:
    """Join the calls. `unmatched` gets what could not be joined, with the number of calls."""
    kinds, kind, number, rank = found.kinds, found.kind, found.number, found.rank
    moment = np.where(found.ended > 0, found.ended, found.called)
    lanes: dict[object, int] = {}
    lane_of = np.array([lanes.setdefault((one.group, one.ends), len(lanes)) for one in kinds] or [0], np.int64)
    own_kind = np.array([one.is_p2p and one.ends is None for one in kinds] or [False])
    lane = lane_of[kind]
    unnumbered = (number <= 0) & ~own_kind[kind]
    _note(unmatched, NO_NUMBER, unnumbered)
    apart = own_kind[kind] | unnumbered
    counted = found.counted
    unlike = _unlike_counts(lane, rank, counted & ~apart)
    if unlike.any():
        number, unlike, at_edge = _shifted(lane, number, rank, kinds, kind, moment, unlike)
        _note(unmatched, AT_EDGE, at_edge)
        _note(unmatched, UNLIKE_COUNTS, unlike)
        apart |= unlike | at_edge
    twice = _twice(lane, number, rank, apart)
    _note(unmatched, TWICE, twice)
    apart |= twice
    recorded_lanes = np.zeros(int(lane.max(initial=0)) + 1, bool)
    recorded_lanes[lane[~counted]] = True
    collective, of_kind, first, own = _collectives(lane, number, apart, kind)
    joined = Joined(lane, number, counted, apart, collective, of_kind, first, own, counted & recorded_lanes[lane], kind)
    _part_unlike_calls(joined, kinds, unmatched)
    return joined


def contradicted(
    joined: Joined,
    releasing: Bools,
    began: Ints,
    ended: Ints,
    comparable: Bools,
    slack_ns: float,
    unmatched: Counter[str],
) -> bool:
    """Part lanes with counted numbers whose collectives end on a rank before another has begun; whether there is one.

    `slack_ns`: how far the clocks of `began` and `ended` may be apart.
    """
    rows = np.flatnonzero(comparable & releasing[joined.kind] & ~joined.own[joined.collective])
    count = joined.count
    last_begin, first_end = np.full(count, -_MAX), np.full(count, _MAX)
    np.maximum.at(last_begin, joined.collective[rows], began[rows])
    np.minimum.at(first_end, joined.collective[rows], ended[rows])
    bad = _bad_lanes(joined, rows, (last_begin > first_end + slack_ns)[joined.collective[rows]])
    calls = np.isin(joined.lane, bad) & joined.counted & ~joined.apart
    if not calls.any():
        return False
    _note(unmatched, SHIFTED, calls)
    joined.part(calls)
    return True


def _shifted(
    lane: Ints, number: Ints, rank: Ints, kinds: Sequence[CallKind], kind: Ints, moment: Ints, unlike: Bools
) -> tuple[Ints, Bools, Bools]:
    """(numbers, calls of lanes on which no shift was found, calls that ranks have beyond those of the others).

    On each lane the rank with the fewest calls is what the others are shifted to.
    """
    numbers, left, at_edge = number.copy(), unlike.copy(), np.zeros(len(lane), bool)
    what = _meanings(kinds)[kind]
    order = np.lexsort((number, rank, lane))
    order = order[unlike[order]]
    edges = np.flatnonzero((np.diff(lane[order]) != 0) | (np.diff(rank[order]) != 0)) + 1
    by_lane: dict[int, list[Ints]] = {}
    for rows in np.split(order, edges):
        by_lane.setdefault(int(lane[rows[0]]), []).append(rows)
    for of_ranks in by_lane.values():
        fewest = min(of_ranks, key=len)
        shifts = [
            0 if rows is fewest else shift_between(what[fewest], moment[fewest], what[rows], moment[rows])
            for rows in of_ranks
        ]
        if any(shift is None for shift in shifts):
            continue
        first = max(-(shift or 0) for shift in shifts)
        last = min(len(rows) - (shift or 0) for rows, shift in zip(of_ranks, shifts, strict=True))
        for rows, shift in zip(of_ranks, shifts, strict=True):
            place = np.arange(len(rows)) - (shift or 0)
            left[rows] = False
            at_edge[rows] = (place < first) | (place >= last)
            numbers[rows] = np.where(at_edge[rows], number[rows], place - first + 1)
    return numbers, left, at_edge


def _meanings(kinds: Sequence[CallKind]) -> Ints:
    """A number by kind, the same for kinds that may be of one collective."""
    found: dict[object, int] = {}
    return np.array(
        [
            found.setdefault(
                (one.label.partition(",")[0], one.bytes if one.calls == 1 and _agrees_in_size(one) else 0, one.root),
                len(found),
            )
            for one in kinds
        ]
        or [0],
        np.int64,
    )


def _part_unlike_calls(joined: Joined, kinds: Sequence[CallKind], unmatched: Counter[str]) -> None:
    """Ranks that call different things under one number: a fault of the job, or numbers counted from elsewhere."""
    ops: dict[str, int] = {}
    op_of = np.array([ops.setdefault(one.label.partition(",")[0], len(ops)) for one in kinds] or [0], np.int64)
    agrees = np.array([one.calls == 1 and _agrees_in_size(one) for one in kinds] or [False])
    roots = np.array([-1 if one.root is None else one.root for one in kinds] or [-1], np.int64)
    sizes = np.array([one.bytes for one in kinds] or [0], np.int64)
    kind, first = joined.kind, joined.of_kind[joined.collective]
    unlike = op_of[kind] != op_of[first]
    unlike |= agrees[kind] & agrees[first] & (sizes[kind] > 0) & (sizes[first] > 0) & (sizes[kind] != sizes[first])
    unlike |= (roots[kind] >= 0) & (roots[first] >= 0) & (roots[kind] != roots[first])
    if not unlike.any():
        return
    bad = np.zeros(joined.count, bool)
    bad[joined.collective[unlike]] = True
    calls = bad[joined.collective]
    shifted = np.isin(joined.lane, _bad_lanes(joined, np.flatnonzero(~joined.apart), calls[~joined.apart]))
    shifted &= joined.counted & ~joined.apart
    _note(unmatched, SHIFTED, shifted)
    _note(unmatched, DISAGREE, calls & ~shifted)
    joined.part(calls | shifted)


def _bad_lanes(joined: Joined, rows: Ints, bad: Bools) -> Ints:
    """Lanes of which too many of the calls `rows` are bad."""
    lanes = int(joined.lane.max(initial=0)) + 1
    of = np.bincount(joined.lane[rows], minlength=lanes)
    wrong = np.bincount(joined.lane[rows[bad]], minlength=lanes)
    return np.flatnonzero((wrong > 0) & (wrong > _OFTEN * of))


def _agrees_in_size(kind: CallKind) -> bool:
    row = OPERATIONS.get(kind.op)
    return row is not None and row.agrees != "none" and not row.p2p


def _collectives(lane: Ints, number: Ints, apart: Bools, kind: Ints) -> tuple[Ints, Ints, Ints, Bools]:
    span = int(number.max(initial=0)) + 1
    shared = np.where(apart, -1 - np.arange(len(kind)), lane * span + number)
    keys, first, collective = np.unique(shared, return_index=True, return_inverse=True)
    return collective.astype(np.int64), kind[first], number[first], keys < 0


def _unlike_counts(lane: Ints, rank: Ints, counted: Bools) -> Bools:
    """Calls whose numbers were counted, on lanes on which the ranks' counts differ: they began at different calls."""
    if not counted.any():
        return counted
    most = int(rank.max(initial=0)) + 1
    pairs, counts = np.unique(lane[counted] * most + rank[counted], return_counts=True)
    low = np.full(int(lane.max()) + 1, _MAX)
    high = np.zeros(len(low), np.int64)
    np.minimum.at(low, pairs // most, counts)
    np.maximum.at(high, pairs // most, counts)
    unlike: Bools = (low < high)[lane] & counted
    return unlike


def _twice(lane: Ints, number: Ints, rank: Ints, apart: Bools) -> Bools:
    """Calls of a rank that have one number on one lane: a group that was made anew under its old name."""
    order = np.lexsort((rank, number, lane))
    same = (np.diff(lane[order]) == 0) & (np.diff(number[order]) == 0) & (np.diff(rank[order]) == 0)
    joinable = ~apart[order]
    same &= joinable[1:] & joinable[:-1]
    twice = np.zeros(len(lane), bool)
    twice[order[1:][same]] = True
    if not twice.any():
        return twice
    # Of such a collective nobody knows which calls belong together.
    span = int(number.max(initial=0)) + 1
    shared = lane * span + number
    return np.isin(shared, shared[twice]) & ~apart


def _note(unmatched: Counter[str], text: str, calls: Bools) -> None:
    if calls.any():
        unmatched[text] += int(calls.sum())
