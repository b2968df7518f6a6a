"""All ranks side by side: which calls are one collective, how long it took, and who waited for whom.

With d the duration of a collective on a rank (its kernel, or its Work on a backend without kernels):

* `time` is that of the collective itself, from the last arrival. Where the operation releases all ranks together, the
  last to arrive waits for nobody: its duration is the shortest d, and needs no clocks to be compared. Elsewhere
  (a broadcast, a send) it is the last begin to the last end, on corrected clocks; where only durations are known,
  the longest d, an upper bound.
* `waiting` of a rank is the part of its d before the last arrival.
* algbw = S / time, busbw = algbw * factor, with S and the factor of nccl-tests (see `crossrank.comm.OPERATIONS`). Of
  an uneven all_to_all busbw is the larger of what a rank sends to others and receives from them, of the busiest
  rank, over time, as PARAM counts it.

An all_to_all with splits releases nobody together: a rank that exchanges nothing with the last to arrive has ended
before. A collective that not all members of its group were seen in, or whose members are not known, has a time that
includes waiting for the others: an upper bound, which is counted as such. So has a launch of several sends and
receives, which is a rank's own, and what is shorter than the clocks that it was measured on agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from crossrank.comm import OPERATIONS
from crossrank.tools.job.clocks import Clocks, align, is_known
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.job.job import Job
from crossrank.tools.job.launches import SEND_RECV, Bools, CallKind, Ints, launches
from crossrank.tools.job.matching import Joined, contradicted, match_calls

Floats = NDArray[np.float64]
_MAX = np.iinfo(np.int64).max
MOVED = (
    "calls that were numbered by counting, on clocks that were moved by more than half the time between calls: if the "
    "files begin at different calls, they are paired wrongly"
)


@dataclass
class Collectives:
    """Columns over the calls of all ranks, and columns over collectives. Times in ns, on corrected clocks."""

    groups: list[ProcessGroup]
    kinds: list[CallKind]
    """Of all ranks, with the groups by their index in `groups`."""
    ranks: list[int]
    """Ranks that were read, ascending."""
    world_size: int
    clocks: Clocks
    # One row per call and rank.
    rank: Ints
    kind: Ints
    id: Ints
    step: Ints
    called: Ints
    """0 = not known; so are `began` and `ended`."""
    began: Ints
    ended: Ints
    collective: Ints
    """Index of the collective that the call is part of."""
    waiting: Ints
    """-1 = not known."""
    comparable: Bools
    """Its begin and end are on the common clock."""
    # One row per collective.
    of_kind: Ints
    """Kind on its first rank."""
    number: Ints
    bytes: Ints
    """S of nccl-tests; the largest of its ranks'."""
    moved: Ints
    """-1 where the bus factor tells it."""
    seen: Ints
    """Ranks with times."""
    expected: Ints
    time: Ints
    """-1 = not known."""
    bound: Bools
    """`time` is an upper bound."""
    last_rank: Ints
    """Who arrived last; -1 = not known."""
    shift: dict[int, int] = field(default_factory=dict)
    """Rank -> what was added to its times to have them on the common clock."""
    unmatched: dict[str, int] = field(default_factory=dict)
    """What was left out or could not be compared, and why -> calls."""
    sent: dict[int, Counter[int]] = field(default_factory=dict)
    not_placed: int = 0
    attributed: Counter[str] = field(default_factory=Counter)
    unattributed: Counter[str] = field(default_factory=Counter)
    """All as in `Launches`."""

    @property
    def timed(self) -> Bools:
        return self.time >= 0

    @property
    def calls(self) -> Ints:
        """Calls that each row stands for: one, or those of a launch."""
        return np.array([kind.calls for kind in self.kinds] or [0], np.int64)[self.kind]

    @property
    def unsized_calls(self) -> Ints:
        """`calls` of the rows of which not all bytes are known, 0 of the others."""
        sized = np.array([kind.sized for kind in self.kinds] or [True])[self.kind]
        calls: Ints = np.where(sized, 0, self.calls)
        return calls

    @property
    def unsized(self) -> Bools:
        """Collectives of which no rank says the bytes."""
        sized = np.array([kind.sized for kind in self.kinds] or [True])[self.of_kind]
        unsized: Bools = ~sized & (self.bytes == 0)
        return unsized

    def busbw(self) -> Floats:
        """GB/s (1e9 bytes) by collective; NaN where none can be given."""
        factors = np.array([_factor(kind, self.groups[kind.group].size) for kind in self.kinds] or [np.nan])
        factor = factors[self.of_kind]
        rate: Floats = self.algbw() * factor
        own = np.flatnonzero((self.moved >= 0) & (self.time > 0) & ~np.isnan(factor))
        rate[own] = np.where(self.moved[own] > 0, self.moved[own] / self.time[own], np.nan)
        return rate

    def algbw(self) -> Floats:
        """GB/s (1e9 bytes) by collective; NaN where none can be given."""
        rate = np.full(len(self.time), np.nan)
        whole = np.array([kind.whole for kind in self.kinds] or [True])[self.of_kind]
        usable = (self.time > 0) & (self.bytes > 0) & whole
        rate[usable] = self.bytes[usable] / self.time[usable]
        return rate


def _factor(kind: CallKind, size: int) -> float:
    """Bus factor; NaN where a bandwidth means nothing: a barrier, a group of one, an operation that is not known."""
    if kind.op == SEND_RECV:
        return 1.0
    row = OPERATIONS.get(kind.op)
    if row is None or row.bus_factor is None or (size < 2 and not row.p2p):
        return float("nan")
    return row.bus_factor(size)


def match_collectives(job: Job) -> Collectives:
    """Join the calls of all ranks into collectives and transfers, on one clock, and measure them."""
    found = launches(job)
    unmatched: Counter[str] = Counter()
    kinds, kind, began, ended = found.kinds, found.kind, found.began, found.ended
    impossible = (ended > 0) & (ended <= began)
    if impossible.any():
        unmatched["calls whose end does not come after their begin: they have no times"] = int(impossible.sum())
        began, ended = np.where(impossible, 0, began), np.where(impossible, 0, ended)
        found = replace(found, began=began, ended=ended)
    clock_of_rank = {rank: trace.clock or trace.path for rank, trace in job.ranks.items()}
    names = list(dict.fromkeys(clock_of_rank.values()))
    most = max(job.ranks, default=0) + 1
    clock_of, placed_of = np.zeros(most, np.int64), np.zeros(most, bool)
    for rank, trace in job.ranks.items():
        clock_of[rank], placed_of[rank] = names.index(clock_of_rank[rank]), trace.placed
    clock, placed = clock_of[found.rank], placed_of[found.rank]
    joined = match_calls(found, unmatched)
    releasing = np.array([one.releases_all for one in kinds] or [False])
    bad_lanes = True
    while bad_lanes:
        usable = (ended > 0) & placed & releasing[kind] & ~joined.own[joined.collective] & ~joined.doubtful
        offsets, clocks = align(names, clock[usable], joined.collective[usable], ended[usable], joined.count)
        on_one = is_known(offsets)
        shift = np.where(on_one, offsets, 0)
        moved = shift[clock]
        comparable = (ended > 0) & placed & on_one[clock]
        bad_lanes = contradicted(
            joined, releasing, began + moved, ended + moved, comparable, clocks.slack_ns, unmatched
        )
    _note_large_moves(joined, began, moved, unmatched)
    collective, count = joined.collective, joined.count
    called, began, ended = (np.where(column > 0, column + moved, 0) for column in (found.called, began, ended))
    timed = ended > 0
    result = Collectives(
        groups=job.groups,
        kinds=kinds,
        ranks=sorted(job.ranks),
        world_size=len(job.world),
        clocks=clocks,
        rank=found.rank,
        kind=kind,
        id=found.id,
        step=found.step,
        called=called,
        began=began,
        ended=ended,
        collective=collective,
        waiting=np.full(len(kind), -1, np.int64),
        comparable=placed & on_one[clock],
        of_kind=joined.of_kind,
        number=joined.number,
        bytes=_largest(np.array([one.bytes for one in kinds] or [0], np.int64)[kind], collective, count),
        moved=_largest(np.array([one.moved for one in kinds] or [-1], np.int64)[kind], collective, count),
        seen=np.bincount(collective[timed], minlength=count).astype(np.int64),
        expected=_expected(joined, kinds, [group.size for group in job.groups]),
        time=np.full(count, -1, np.int64),
        bound=np.zeros(count, bool),
        last_rank=np.full(count, -1, np.int64),
        shift={rank: int(shift[clock_of[rank]]) for rank in job.ranks},
        unmatched=unmatched,
        sent=found.sent,
        not_placed=found.not_placed,
        attributed=found.attributed,
        unattributed=found.unattributed,
    )
    _measure(result, joined, releasing)
    return result


def _note_large_moves(joined: Joined, began: Ints, moved: Ints, unmatched: Counter[str]) -> None:
    """A clock that was moved by more than half the time between calls may hide that they were counted from different
    ones: shifted numbers look like a shifted clock."""
    rows = np.flatnonzero(joined.counted & ~joined.apart & (began > 0) & (moved != 0))
    if not len(rows):
        return
    order = rows[np.lexsort((began[rows], joined.lane[rows]))]
    steps = np.diff(began[order])[np.diff(joined.lane[order]) == 0]
    if len(steps) and int(np.abs(moved[rows]).max()) > np.median(steps) / 2:
        unmatched[MOVED] += len(rows)


def _largest(values: Ints, collective: Ints, count: int) -> Ints:
    largest = np.full(count, -1, np.int64)
    np.maximum.at(largest, collective, values)
    return largest


def _expected(joined: Joined, kinds: Sequence[CallKind], sizes: Sequence[int]) -> Ints:
    by_kind = [2 if one.ends is not None and one.ends[0] != one.ends[1] else sizes[one.group] for one in kinds]
    expected = np.array(by_kind or [0], np.int64)[joined.of_kind]
    return np.where(joined.own, 1, expected)


def _measure(found: Collectives, joined: Joined, releasing: Bools) -> None:
    """Times of collectives and waits of ranks."""
    count = len(found.of_kind)
    rows = np.flatnonzero(found.ended > 0)
    collective = found.collective[rows]
    duration = (found.ended - found.began)[rows]
    shortest, longest = np.full(count, _MAX), np.full(count, -1, np.int64)
    np.minimum.at(shortest, collective, duration)
    np.maximum.at(longest, collective, duration)
    last_begin, last_end = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.maximum.at(last_begin, collective, found.began[rows])
    np.maximum.at(last_end, collective, found.ended[rows])
    placed = np.ones(count, bool)
    placed[collective[~found.comparable[rows]]] = False
    # A send that left before its receive began is over when the receive has it: ends after begins, or nothing.
    placed &= last_end > last_begin
    known = found.seen > 0
    several = found.seen > 1
    # One call that releases nobody makes the whole collective one of that kind.
    released = np.ones(count, bool)
    released[found.collective[~releasing[found.kind]]] = False
    released &= ~joined.own
    found.time[known & released] = shortest[known & released]
    spread = known & ~released & placed
    found.time[spread] = (last_end - last_begin)[spread]
    rest = known & ~released & ~placed
    found.time[rest] = longest[rest]
    guessed = np.array([found.groups[kind.group].guessed for kind in found.kinds] or [False])[found.of_kind]
    uncertain = spread & several & (found.time < found.clocks.slack_ns)
    late = np.array([kind.is_p2p and found.groups[kind.group].late_ends for kind in found.kinds] or [False])
    found.bound = known & (
        (found.seen < found.expected) | rest | joined.own | guessed | uncertain | late[found.of_kind]
    )
    wait = np.where(
        released[collective],
        duration - found.time[collective],
        np.where(placed[collective], np.minimum(last_begin[collective] - found.began[rows], duration), -1),
    )
    wait[~several[collective]] = -1
    found.waiting[rows] = wait
    # Who arrived last: between clocks the shortest duration tells it better than begins that are only so well aligned.
    by_begin = placed & ((found.clocks.count == 1) | ~released)
    lateness = np.where(
        by_begin[collective], last_begin[collective] - found.began[rows], duration - shortest[collective]
    )
    last = np.flatnonzero((lateness == 0) & several[collective] & (released | placed)[collective])
    found.last_rank[collective[last]] = found.rank[rows[last]]
    kinds = np.array([one.op == SEND_RECV for one in found.kinds] or [False])
    found.waiting[kinds[found.kind]] = -1
