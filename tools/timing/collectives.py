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

A collective that not all members of its group were seen in has a time that includes waiting for the others: an upper
bound, which is counted as such. So has a launch of several sends and receives, which is a rank's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from crossrank.comm import OPERATIONS, Locality
from crossrank.tools.timing.clocks import Clocks, align, is_known
from crossrank.tools.timing.rank_times import SEND_RECV, CallKind, GroupKey, RankTimes, releases_all

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
_MAX = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Group:
    """A process group over all ranks."""

    key: GroupKey
    members: tuple[int, ...]
    """Global ranks: as recorded, else all that used it."""
    size: int

    @property
    def name(self) -> str:
        return self.key.pg


@dataclass(frozen=True)
class Kind:
    """What equal calls share, the same on all ranks."""

    op: str
    group: int
    """Index into `Collectives.groups`."""
    bytes: int
    moved: int
    ends: tuple[int, int] | None
    root: int | None
    dtype: str | None
    source: str | None
    locality: Locality
    calls: int

    @property
    def label(self) -> str:
        """The operation, with a word where several calls went out together."""
        if self.calls == 1:
            return self.op
        return f"{self.op}, batched" if self.op == SEND_RECV else f"{self.op}, coalesced"


@dataclass
class Collectives:
    """Columns over the calls of all ranks, and columns over collectives. Times in ns, on corrected clocks."""

    groups: list[Group]
    kinds: list[Kind]
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
    told: dict[str, int] = field(default_factory=dict)
    """What was left out or could not be compared, and why -> calls."""

    @property
    def timed(self) -> Bools:
        return self.time >= 0

    @property
    def calls(self) -> Ints:
        """Calls that each row stands for: one, or those of a launch."""
        return np.array([kind.calls for kind in self.kinds] or [0], np.int64)[self.kind]

    def busbw(self) -> Floats:
        """GB/s (1e9 bytes) by collective; NaN where none can be given."""
        factors = np.array([_factor(kind, self.groups[kind.group].size) for kind in self.kinds] or [np.nan])
        rate: Floats = self.algbw() * factors[self.of_kind]
        own = self.moved >= 0
        with np.errstate(divide="ignore", invalid="ignore"):
            rate[own] = (self.moved / self.time)[own]
        rate[~self.timed | (self.time == 0)] = np.nan
        return rate

    def algbw(self) -> Floats:
        """GB/s (1e9 bytes) by collective; NaN where none can be given."""
        rate = np.full(len(self.time), np.nan)
        usable = (self.time > 0) & (self.bytes > 0)
        rate[usable] = self.bytes[usable] / self.time[usable]
        return rate


def _factor(kind: Kind, size: int) -> float:
    """Bus factor; NaN where a bandwidth means nothing: a barrier, a group of one, an operation that is not known."""
    if kind.op == SEND_RECV:
        return 1.0
    row = OPERATIONS.get(kind.op)
    if row is None or row.bus_factor is None or (size < 2 and not row.p2p):
        return float("nan")
    return row.bus_factor(size)


def lay_side_by_side(ranks: Sequence[RankTimes]) -> Collectives:
    """Join the calls of all ranks."""
    groups, group_of = _groups(ranks)
    kinds: list[Kind] = []
    numbers: dict[Kind, int] = {}
    columns = []
    for index, times in enumerate(ranks):
        own = [_kind(one, group_of[index][one.group]) for one in times.kinds]
        of_kind = np.array([numbers.setdefault(one, len(numbers)) for one in own] or [0], np.int64)
        kinds += list(numbers)[len(kinds) :]
        kind = of_kind[np.frombuffer(times.kind, np.uint32)] if len(times) else np.empty(0, np.int64)
        columns.append(
            (
                np.full(len(times), times.rank or 0, np.int64),
                np.full(len(times), index, np.int64),
                kind,
                _ints(times.id),
                _ints(times.number),
                np.frombuffer(times.step, np.int32).astype(np.int64),
                _ints(times.called),
                _ints(times.began),
                _ints(times.ended),
            )
        )
    rank, file, kind, identity, number, step, called, began, ended = (
        np.concatenate(parts) if parts else np.empty(0, np.int64) for parts in zip(*columns, strict=True)
    )
    told: Counter[str] = Counter()
    collective, of_kind, of_number, alone = _keys(ranks, groups, kinds, kind, file, number, rank, told)
    count = len(of_kind)
    clock_names = list(dict.fromkeys(times.clock for times in ranks))
    clock_of = np.array([clock_names.index(times.clock) for times in ranks] or [0], np.int64)
    clock = clock_of[file]
    placed = np.array([times.placed for times in ranks] or [True])[file]
    timed = ended > 0
    releasing = np.array([releases_all(one.op) for one in kinds] or [False])
    usable = timed & placed & releasing[kind] & ~alone[collective]
    offsets, clocks = align(clock_names, clock[usable], collective[usable], ended[usable], count)
    on_one = is_known(offsets)
    shift = np.where(on_one, offsets, 0)[clock]
    called, began, ended = (np.where(column > 0, column + shift, 0) for column in (called, began, ended))
    result = Collectives(
        groups=groups,
        kinds=kinds,
        ranks=sorted({times.rank or 0 for times in ranks}),
        world_size=max([times.world_size or 0 for times in ranks] + [max((t.rank or 0) + 1 for t in ranks)]),
        clocks=clocks,
        rank=rank,
        kind=kind,
        id=identity,
        step=step,
        called=called,
        began=began,
        ended=ended,
        collective=collective,
        waiting=np.full(len(rank), -1, np.int64),
        of_kind=of_kind,
        number=of_number,
        bytes=_largest(np.array([one.bytes for one in kinds] or [0], np.int64)[kind], collective, count),
        moved=_largest(np.array([one.moved for one in kinds] or [-1], np.int64)[kind], collective, count),
        seen=np.bincount(collective[timed], minlength=count).astype(np.int64),
        expected=_expected(groups, kinds, of_kind, alone),
        time=np.full(count, -1, np.int64),
        bound=np.zeros(count, bool),
        last_rank=np.full(count, -1, np.int64),
        told=dict(told),
    )
    _measure(result, releasing, placed & on_one[clock], alone)
    return result


def _ints(column: object) -> Ints:
    return np.frombuffer(column, np.int64) if len(column) else np.empty(0, np.int64)  # type: ignore[call-overload,arg-type]


def _kind(one: CallKind, group: int) -> Kind:
    return Kind(
        op=one.op,
        group=group,
        bytes=one.bytes,
        moved=one.moved,
        ends=one.ends,
        root=one.root,
        dtype=one.dtype,
        source=one.source,
        locality=one.locality,
        calls=one.calls,
    )


def _groups(ranks: Sequence[RankTimes]) -> tuple[list[Group], list[list[int]]]:
    """All groups, and for each rank the index of its own groups among them.

    torch numbers groups anew in each job, but one name may stand for several groups of one job: they differ in members.
    """
    keys: dict[tuple[str, tuple[int, ...] | None], int] = {}
    found: list[GroupKey] = []
    users: list[set[int]] = []
    group_of = []
    members_of: dict[str, set[tuple[int, ...]]] = {}
    for times in ranks:
        for key in times.groups:
            if key.ranks is not None:
                members_of.setdefault(key.pg, set()).add(key.ranks)
    for times in ranks:
        used = {kind.group for kind in times.kinds}
        own = []
        for place, key in enumerate(times.groups):
            members = key.ranks
            if members is None:
                fitting = [one for one in members_of.get(key.pg, ()) if times.rank in one]
                members = fitting[0] if len(fitting) == 1 else None
            index = keys.setdefault((key.pg, members), len(keys))
            if index == len(found):
                found.append(GroupKey(pg=key.pg, ranks=members, desc=key.desc, size=key.size))
                users.append(set())
            if place in used:
                users[index].add(times.rank or 0)
            own.append(index)
        group_of.append(own)
    groups = []
    for key, by in zip(found, users, strict=True):
        members = key.ranks if key.ranks is not None else tuple(sorted(by))
        groups.append(Group(key=key, members=members, size=max(key.size, len(members))))
    return groups, group_of


def _keys(
    ranks: Sequence[RankTimes],
    groups: Sequence[Group],
    kinds: Sequence[Kind],
    kind: Ints,
    file: Ints,
    number: Ints,
    rank: Ints,
    told: Counter[str],
) -> tuple[Ints, Ints, Ints, Bools]:
    """(collective of each call, kind of each collective, its number, whether it is one rank's own)."""
    lanes: dict[object, int] = {}
    lane_of = np.array([lanes.setdefault((one.group, one.ends), len(lanes)) for one in kinds] or [0], np.int64)
    own_kind = np.array([one.op == SEND_RECV or (_is_p2p(one.op) and one.ends is None) for one in kinds] or [False])
    lane = lane_of[kind]
    own = own_kind[kind] | (number <= 0)
    if (number <= 0).any():
        told["calls without a number: they are not compared across ranks"] = int(
            ((number <= 0) & ~own_kind[kind]).sum()
        )
    counted = ~np.array([times.numbered for times in ranks] or [True])[file]
    if counted.any():
        own |= _unlike(lane, lane_of, rank, kinds, kind, counted & ~own, told)
    span = int(number.max(initial=0)) + 1
    shared = np.where(own, -1 - np.arange(len(kind)), lane * span + number)
    keys, first, collective = np.unique(shared, return_index=True, return_inverse=True)
    of_kind = kind[first]
    ops: dict[str, int] = {}
    op_of = np.array([ops.setdefault(_side(one.op), len(ops)) for one in kinds] or [0], np.int64)
    strange = op_of[kind] != op_of[of_kind][collective]
    if strange.any():
        # Ranks that call different operations under one number are a fault, which `diagnose` explains.
        bad = np.zeros(len(keys), bool)
        bad[collective[strange]] = True
        told["calls of which the ranks disagree on the operation: see crossrank diagnose"] = int(bad[collective].sum())
        own |= bad[collective]
        shared = np.where(own, -1 - np.arange(len(kind)), lane * span + number)
        keys, first, collective = np.unique(shared, return_index=True, return_inverse=True)
        of_kind = kind[first]
    return collective.astype(np.int64), of_kind, number[first], keys < 0


def _side(op: str) -> str:
    """A send and its receive are one operation."""
    return SEND_RECV if op in ("send", "recv") else op


def _is_p2p(op: str) -> bool:
    row = OPERATIONS.get(op)
    return row is not None and row.p2p


def _unlike(
    lane: Ints, lane_of: Ints, rank: Ints, kinds: Sequence[Kind], kind: Ints, counted: Bools, told: Counter[str]
) -> Bools:
    """Calls whose numbers were counted, on groups on which the ranks' counts differ: they began at different calls."""
    most = int(rank.max(initial=0)) + 1
    pairs, counts = np.unique(lane[counted] * most + rank[counted], return_counts=True)
    lanes = pairs // most
    low = np.full(int(lane_of.max(initial=0)) + 1, _MAX)
    high = np.zeros(len(low), np.int64)
    np.minimum.at(low, lanes, counts)
    np.maximum.at(high, lanes, counts)
    bad = (low < high)[lane] & counted
    if bad.any():
        told["calls on groups of which the ranks have different numbers of calls: they are not compared"] = int(
            bad.sum()
        )
    return bad


def _largest(values: Ints, collective: Ints, count: int) -> Ints:
    largest = np.full(count, -1, np.int64)
    np.maximum.at(largest, collective, values)
    return largest


def _expected(groups: Sequence[Group], kinds: Sequence[Kind], of_kind: Ints, alone: Bools) -> Ints:
    by_kind = [2 if one.ends is not None and one.ends[0] != one.ends[1] else groups[one.group].size for one in kinds]
    expected = np.array(by_kind or [0], np.int64)[of_kind]
    return np.where(alone, 1, expected)


def _measure(found: Collectives, releasing: Bools, comparable: Bools, alone: Bools) -> None:
    """Times of collectives and waits of ranks."""
    count = len(found.of_kind)
    timed = found.ended > 0
    rows = np.flatnonzero(timed)
    collective = found.collective[rows]
    duration = (found.ended - found.began)[rows]
    shortest, longest = np.full(count, _MAX), np.full(count, -1, np.int64)
    np.minimum.at(shortest, collective, duration)
    np.maximum.at(longest, collective, duration)
    last_begin, last_end = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.maximum.at(last_begin, collective, found.began[rows])
    np.maximum.at(last_end, collective, found.ended[rows])
    placed = np.ones(count, bool)
    placed[collective[~comparable[rows]]] = False
    known = found.seen > 0
    releases = releasing[found.of_kind] & ~alone
    found.time[known & releases] = shortest[known & releases]
    spread = known & ~releases & placed
    found.time[spread] = (last_end - last_begin)[spread]
    rest = known & ~releases & ~placed
    found.time[rest] = longest[rest]
    own = np.array([one.op == SEND_RECV for one in found.kinds] or [False])[found.of_kind]
    found.bound = known & ((found.seen < found.expected) | rest | own | (alone & (found.seen > 0)))
    wait = np.where(
        releases[collective],
        duration - found.time[collective],
        np.where(placed[collective], np.minimum(last_begin[collective] - found.began[rows], duration), -1),
    )
    wait[(found.seen < 2)[collective]] = -1
    found.waiting[rows] = wait
    # The last to arrive has the latest begin; where clocks cannot be compared, the shortest duration.
    compared = np.where(placed[collective], last_begin[collective] - found.began[rows], duration - shortest[collective])
    last = np.flatnonzero((compared == 0) & (found.seen > 1)[collective] & (releases | placed)[collective])
    found.last_rank[collective[last]] = found.rank[rows[last]]
