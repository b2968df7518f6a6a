"""Which calls of different ranks are one collective.

Calls are joined by group, for sends and receives by their two ends as well, and number. Where files have no numbers
they were counted, which goes wrong if files begin at different calls: so what is joined is checked. Calls of one
collective agree in operation, root and size, and none ends before another has begun. Where ranks have different
numbers of calls, for a capture does not begin and end at the same call on all ranks, `shift_between` finds which call
of one is the first of the other. A lane (the calls of one group, or of one pair) with counted numbers on which too
many contradict is not joined at all, and what is not joined is counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from crossrank.comm import OPERATIONS
from crossrank.tools.job.launches import Bools, CallKind, Ints, Launches, reduce_by
from crossrank.tools.traces.rank_trace import Interned

_MAX = np.iinfo(np.int64).max
_OFTEN = 0.05
"""Share of contradictions above which counted numbers are taken to be shifted."""
_MOST = 256
"""Calls that one rank may have more than another at one edge; more is no edge."""
_OVERLAP = 0.5
"""Share of the shorter sequence that both must have."""
_CLEARLY = 4
"""Times by which differences must vary less at one shift than at any other to decide for it."""

NO_NUMBER = "calls without a number: they are not compared across ranks"
UNLIKE_COUNTS = "calls on groups of which the ranks have different numbers of calls: they are not compared"
AT_EDGE = "calls at the edge of a capture, which the files of other ranks of their group do not have"
SHIFTED = "calls that were numbered by counting, and then contradict each other: they are not compared"
TWICE = "calls that share their number with another of the same rank: they are not compared"
DISAGREE = "calls of which the ranks disagree on operation, size or root: see crossrank diagnose"


@dataclass
class Joined:
    """Calls and the collectives that they are parts of."""

    calls: Launches
    lane: Ints
    """Of each call."""
    number: Ints
    """Of each call, as recorded or counted."""
    apart: Bools
    """Of each call: it is not joined with others."""
    unmatched: Counter[str]
    """What could not be joined -> calls."""
    collective: Ints = field(init=False)
    """Of each call."""
    of_kind: Ints = field(init=False)
    """Of each collective: the kind of its first call."""
    own: Bools = field(init=False)
    """Of each collective: it is one rank's own."""

    @property
    def count(self) -> int:
        return len(self.of_kind)

    @property
    def doubtful(self) -> Bools:
        """Of each call: its number was counted, where others of its lane are recorded; it does not tell clocks."""
        recorded: Bools = np.isin(self.lane, self.lane[~self.calls.counted])
        return recorded & self.calls.counted

    @property
    def key(self) -> Ints:
        """Of each call: lane and number as one."""
        span = int(self.number.max(initial=0)) + 1
        return self.lane * span + self.number

    def join(self) -> None:
        """Make one collective of the calls that have a lane and a number in common, of those apart one each."""
        shared = np.where(self.apart, -1 - np.arange(len(self.lane)), self.key)
        keys, first, collective = np.unique(shared, return_index=True, return_inverse=True)
        self.collective, self.of_kind, self.own = collective.astype(np.int64), self.calls.kind[first], keys < 0

    def leave_out(self, calls: Bools, why: str) -> None:
        """Take calls out of their collectives, which `join` makes anew, and count them."""
        if calls.any():
            self.apart |= calls
            self.unmatched[why] += int(calls.sum())

    def on_bad_lanes(self, rows: Ints, bad: Bools) -> Bools:
        """Calls with counted numbers on lanes of which too many of the calls `rows` are bad."""
        of = np.bincount(self.lane[rows])
        wrong = np.bincount(self.lane[rows[bad]], minlength=len(of))
        lanes = np.flatnonzero((wrong > 0) & (wrong > _OFTEN * of))
        on_them: Bools = np.isin(self.lane, lanes) & self.calls.counted & ~self.apart
        return on_them


def match_calls(found: Launches, unmatched: Counter[str]) -> Joined:
    """Join the calls. `unmatched` gets what could not be joined, with the number of calls."""
    lanes = Interned[object]()
    lane = found.by_kind(lambda one: lanes.number((one.group, one.ends)), np.int64)[found.kind]
    own = found.by_kind(lambda one: one.is_p2p and one.ends is None)[found.kind]
    joined = Joined(found, lane, found.number.copy(), own, unmatched)
    joined.leave_out((found.number <= 0) & ~own, NO_NUMBER)
    unlike = _unlike_counts(joined)
    if unlike.any():
        at_edge = _renumber_shifted(joined, unlike)
        joined.leave_out(at_edge, AT_EDGE)
        joined.leave_out(unlike, UNLIKE_COUNTS)
    joined.leave_out(_twice(joined), TWICE)
    joined.join()
    _part_unlike_calls(joined)
    return joined


def part_lanes(joined: Joined, shift_ns: Ints, usable: Bools, slack_ns: float) -> bool:
    """Take apart lanes with counted numbers in which a collective ends on one rank before another has begun it.
    Returns whether there were any.

    `shift_ns` is what puts each call on one clock, to within `slack_ns`; only those that are `usable` are looked at.
    """
    rows = np.flatnonzero(usable & ~joined.own[joined.collective])
    collective, count = joined.collective[rows], joined.count
    last_begin = reduce_by(np.maximum, collective, joined.calls.began[rows] + shift_ns[rows], count, -_MAX)
    first_end = reduce_by(np.minimum, collective, joined.calls.ended[rows] + shift_ns[rows], count, _MAX)
    calls = joined.on_bad_lanes(rows, (last_begin > first_end + slack_ns)[collective])
    if not calls.any():
        return False
    joined.leave_out(calls, SHIFTED)
    joined.join()
    return True


def _renumber_shifted(joined: Joined, unlike: Bools) -> Bools:
    """Renumber the calls of lanes of which the ranks began at different calls, and take them out of `unlike`, both in
    place. Returns which calls ranks have beyond those of the others.

    On each lane the rank with the fewest calls is what the others are shifted to.
    """
    found, lane, number = joined.calls, joined.lane, joined.number
    at_edge = np.zeros(len(lane), bool)
    moment = np.where(found.measured, found.ended, found.called)
    meanings = Interned[object]()
    what = found.by_kind(lambda one: meanings.number((_operation(one), _agreed_size(one), one.root)), np.int64)[
        found.kind
    ]
    order = np.lexsort((number, found.rank, lane))
    order = order[unlike[order]]
    edges = np.flatnonzero((np.diff(lane[order]) != 0) | (np.diff(found.rank[order]) != 0)) + 1
    by_lane: dict[int, list[Ints]] = {}
    for rows in np.split(order, edges):
        by_lane.setdefault(int(lane[rows[0]]), []).append(rows)
    for of_ranks in by_lane.values():
        fewest = min(of_ranks, key=len)
        shifts = [
            0 if rows is fewest else shift_between(what[fewest], moment[fewest], what[rows], moment[rows])
            for rows in of_ranks
        ]
        known = [(rows, shift) for rows, shift in zip(of_ranks, shifts, strict=True) if shift is not None]
        if len(known) < len(shifts):
            continue
        first = max(-shift for _, shift in known)
        last = min(len(rows) - shift for rows, shift in known)
        for rows, shift in known:
            place = np.arange(len(rows)) - shift
            unlike[rows] = False
            at_edge[rows] = (place < first) | (place >= last)
            number[rows] = np.where(at_edge[rows], number[rows], place - first + 1)
    return at_edge


def shift_between(what: Ints, when: Ints, other: Ints, other_when: Ints) -> int | None:
    """The place in `other` of the first call of the shorter `what`, negative where `other` lacks it; None where nothing
    decides for one.

    `what` are numbers that are equal where calls may be one collective, `when` ns, 0 = not known. First the calls
    themselves decide, then their times if these are on clocks that agree to less than half of the time between calls,
    then how much the differences of times vary, for which clocks need not agree.
    """
    more = len(other) - len(what)
    if more > _MOST or len(what) == 0:
        return None
    least = max(1, int(len(what) * _OVERLAP))
    fitting = []
    for shift in range(max(-_MOST, least - len(what)), min(more + _MOST, len(other) - least) + 1):
        mine = slice(max(0, -shift), min(len(what), len(other) - shift))
        theirs = slice(mine.start + shift, mine.stop + shift)
        if np.array_equal(what[mine], other[theirs]):
            fitting.append((shift, mine, theirs))
    whole = [one for one in fitting if 0 <= one[0] <= more]
    if len(fitting) == 1 or (len(whole) == 1 and len(np.unique(what)) > 1):
        return (whole or fitting)[0][0]
    if not fitting or (when == 0).any() or (other_when == 0).any():
        return None
    gaps = [other_when[theirs] - when[mine] for _, mine, theirs in fitting]
    apart = np.array([float(np.median(np.abs(gap))) for gap in gaps])
    best = int(apart.argmin())
    if len(what) > 1 and apart[best] < float(np.median(np.diff(when))) / 2:
        return fitting[best][0]
    vary = np.array([float(np.median(np.abs(gap - np.median(gap)))) for gap in gaps])
    best = int(vary.argmin())
    others = np.delete(vary, best)
    return fitting[best][0] if len(gaps[best]) > 2 and _CLEARLY * vary[best] < others.min() else None


def _operation(kind: CallKind) -> str:
    return kind.label.partition(",")[0]


def _agreed_size(kind: CallKind) -> int:
    """The bytes that all ranks of a collective have alike; 0 where they need not."""
    row = OPERATIONS.get(kind.op)
    return kind.bytes if kind.calls == 1 and row is not None and row.agrees != "none" and not row.p2p else 0


def _part_unlike_calls(joined: Joined) -> None:
    """Ranks that call different things under one number: a fault of the job, or numbers counted from elsewhere."""
    found, ops = joined.calls, Interned[str]()
    op = found.by_kind(lambda one: ops.number(_operation(one)), np.int64)
    size = found.by_kind(_agreed_size, np.int64)
    root = found.by_kind(lambda one: -1 if one.root is None else one.root, np.int64)
    kind, first = found.kind, joined.of_kind[joined.collective]
    unlike = op[kind] != op[first]
    unlike |= (size[kind] > 0) & (size[first] > 0) & (size[kind] != size[first])
    unlike |= (root[kind] >= 0) & (root[first] >= 0) & (root[kind] != root[first])
    if unlike.any():
        calls = np.isin(joined.collective, joined.collective[unlike])
        shifted = joined.on_bad_lanes(np.flatnonzero(~joined.apart), calls[~joined.apart])
        joined.leave_out(shifted, SHIFTED)
        joined.leave_out(calls & ~shifted, DISAGREE)
        joined.join()


def _unlike_counts(joined: Joined) -> Bools:
    """Calls whose numbers were counted, on lanes on which the ranks' counts differ: they began at different calls."""
    counted = joined.calls.counted & ~joined.apart
    most = int(joined.calls.rank.max(initial=0)) + 1
    pairs, counts = np.unique(joined.lane[counted] * most + joined.calls.rank[counted], return_counts=True)
    lanes = int(joined.lane.max(initial=0)) + 1
    low = reduce_by(np.minimum, pairs // most, counts, lanes, _MAX)
    high = reduce_by(np.maximum, pairs // most, counts, lanes, 0)
    unlike: Bools = (low < high)[joined.lane] & counted
    return unlike


def _twice(joined: Joined) -> Bools:
    """Calls of a rank that have one number on one lane: a group that was made anew under its old name. Of such a
    collective nobody knows which calls belong together."""
    rows = np.flatnonzero(~joined.apart)
    columns = [column[rows] for column in (joined.calls.rank, joined.number, joined.lane)]
    order = np.lexsort(columns)
    same = np.logical_and.reduce([np.diff(column[order]) == 0 for column in columns])
    twice: Bools = np.isin(joined.key, joined.key[rows[order[1:][same]]]) & ~joined.apart
    return twice
