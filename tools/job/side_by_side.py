"""Lays the calls of all ranks side by side: joins them into collectives, corrects clocks, measures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from crossrank.tools.job.clocks import align, is_known
from crossrank.tools.job.collectives import Bools, Collectives, Group, Ints
from crossrank.tools.job.joining import Joined, contradicted, join, join_groups
from crossrank.tools.job.rank_times import SEND_RECV, CallKind, RankTimes

_MAX = np.iinfo(np.int64).max
MOVED = (
    "calls that were numbered by counting, on clocks that were moved by more than half the time between calls: if the "
    "files begin at different calls, they are paired wrongly"
)


def lay_side_by_side(ranks: Sequence[RankTimes]) -> Collectives:
    """Join the calls of all ranks, which are not empty."""
    groups, group_of = join_groups(ranks)
    numbers: dict[CallKind, int] = {}
    columns = []
    for index, times in enumerate(ranks):
        own = [msgspec.structs.replace(one, group=group_of[index][one.group]) for one in times.kinds]
        of_kind = np.array([numbers.setdefault(one, len(numbers)) for one in own] or [0], np.int64)
        columns.append(
            (
                np.full(len(times), times.rank or 0, np.int64),
                np.full(len(times), index, np.int64),
                of_kind[np.frombuffer(times.kind, np.uint32)] if len(times) else np.empty(0, np.int64),
                _ints(times.id),
                _ints(times.number),
                np.frombuffer(times.step, np.int32).astype(np.int64) if len(times) else np.empty(0, np.int64),
                _ints(times.called),
                _ints(times.began),
                _ints(times.ended),
            )
        )
    kinds = list(numbers)
    rank, file, kind, identity, number, step, called, began, ended = (
        np.concatenate(parts) for parts in zip(*columns, strict=True)
    )
    told: Counter[str] = Counter()
    impossible = (ended > 0) & (ended <= began)
    if impossible.any():
        told["calls whose end does not come after their begin: they are taken to have no times"] = int(impossible.sum())
        began, ended = np.where(impossible, 0, began), np.where(impossible, 0, ended)
    clock_names = list(dict.fromkeys(times.clock for times in ranks))
    place = {name: number for number, name in enumerate(clock_names)}
    clock_of = np.array([place[times.clock] for times in ranks], np.int64)
    clock = clock_of[file]
    placed = np.array([times.placed for times in ranks])[file]
    joined = join(ranks, groups, kinds, kind, file, number, rank, np.where(ended > 0, ended, called), told)
    releasing = np.array([one.releases_all for one in kinds] or [False])
    bad_lanes = True
    while bad_lanes:
        usable = (ended > 0) & placed & releasing[kind] & ~joined.own[joined.collective] & ~joined.doubtful
        offsets, clocks = align(clock_names, clock[usable], joined.collective[usable], ended[usable], joined.count)
        on_one = is_known(offsets)
        shift = np.where(on_one, offsets, 0)
        moved = shift[clock]
        comparable = (ended > 0) & placed & on_one[clock]
        bad_lanes = contradicted(joined, releasing, began + moved, ended + moved, comparable, clocks.slack_ns, told)
    _tell_large_moves(joined, began, moved, told)
    collective, count = joined.collective, joined.count
    called, began, ended = (np.where(column > 0, column + moved, 0) for column in (called, began, ended))
    timed = ended > 0
    result = Collectives(
        groups=groups,
        kinds=kinds,
        ranks=sorted({times.rank or 0 for times in ranks}),
        world_size=_world_size(ranks, groups),
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
        comparable=placed & on_one[clock],
        of_kind=joined.of_kind,
        number=joined.number,
        bytes=_largest(np.array([one.bytes for one in kinds] or [0], np.int64)[kind], collective, count),
        moved=_largest(np.array([one.moved for one in kinds] or [-1], np.int64)[kind], collective, count),
        seen=np.bincount(collective[timed], minlength=count).astype(np.int64),
        expected=_expected(joined, kinds, [group.size for group in groups]),
        time=np.full(count, -1, np.int64),
        bound=np.zeros(count, bool),
        last_rank=np.full(count, -1, np.int64),
        shift={times.rank or 0: int(shift[place[times.clock]]) for times in ranks},
    )
    _measure(result, joined, releasing)
    result.told = dict(told)
    return result


def _world_size(ranks: Sequence[RankTimes], groups: Sequence[Group]) -> int:
    """As the files say it; else what the ranks and groups that they name take at least."""
    said = max(times.world_size or 0 for times in ranks)
    members = [rank for group in groups for rank in group.members[-1:]]
    return said or max([*members, *(times.rank or 0 for times in ranks)]) + 1


def _tell_large_moves(joined: Joined, began: Ints, moved: Ints, told: Counter[str]) -> None:
    """A clock that was moved by more than half the time between calls may hide that they were counted from different
    ones: shifted numbers look like a shifted clock."""
    rows = np.flatnonzero(joined.counted & ~joined.apart & (began > 0) & (moved != 0))
    if not len(rows):
        return
    order = rows[np.lexsort((began[rows], joined.lane[rows]))]
    steps = np.diff(began[order])[np.diff(joined.lane[order]) == 0]
    if len(steps) and int(np.abs(moved[rows]).max()) > np.median(steps) / 2:
        told[MOVED] += len(rows)


def _ints(column: Sequence[int]) -> Ints:
    return np.frombuffer(column, np.int64) if len(column) else np.empty(0, np.int64)  # type: ignore[call-overload]


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
    late = np.array([kind.is_p2p and found.groups[kind.group].key.late_ends for kind in found.kinds] or [False])
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
