"""The usual order of a rank's calls. A training loop repeats itself, so a call out of order is visible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import islice, pairwise

from crossrank.comm import CommRecord, is_p2p
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.analysis.diagnosis.wait_for_graph import StuckOp
from crossrank.tools.job.groups import ProcessGroup

WINDOW = 512
"""Number of earlier calls that are compared."""

_MOST_RANKS, _MOST_CALLS = 32, 1 << 16
"""Ranks, and calls of each, up to which whole programs are compared."""

_ROUNDS, _BEGINNINGS = 4, (0, 4, 16, 64)
"""Rounds of a loop that show its period, and calls before it that are left out."""

_OFTEN = 3
"""Calls of a line that show whether it has always the same peer."""

# (index of the rank's group, operation, peer, (stack, signature or -1))
Token = tuple[int, str, "int | None", tuple[int, int]]


def is_usual(job: JobState, rank: int, row: int, *, sized: bool = False) -> bool:
    """Return whether the rank's calls before `row` were followed by the same call before; with `sized`, by one of the
    same sizes."""
    *before, this = _history(job, rank, row, sized=sized)
    return this in _expected(before)


def is_out_of_turn(job: JobState, rank: int, row: int, *, sized: bool = False) -> bool:
    """Return whether the rank's calls before `row` were always followed by another call before; with `sized`, also by
    one of other sizes. False for a call that the rank makes for the first time: the first call after a loop is no
    mistake."""
    return bool(_due_instead(job, rank, row, sized=sized))


def is_new(job: JobState, rank: int, row: int) -> bool:
    """Return whether a rank made a call of a kind, or with a peer, that it had never made, after its usual calls."""
    *before, this = _history(job, rank, row)
    return bool(_expected(before)) and all(one[:3] != this[:3] for one in before)


def is_from_elsewhere(job: JobState, rank: int, row: int) -> bool:
    """Return whether a rank made a call at a line where it had made none of this kind, after its usual calls."""
    *before, this = _history(job, rank, row)
    return bool(_expected(before)) and this not in before


def changes_peer(job: JobState, rank: int, row: int) -> bool:
    """Return whether a line sends to, or receives from, another rank than each time before."""
    this = job.signature(rank, row)
    if not is_p2p(this) or this.peer is None or this.source is None:
        return False
    before = (job.signature(rank, one) for one in range(row - 1, -1, -1))
    same = (one.peer for one in before if (one.op, one.source) == (this.op, this.source))
    peers = list(islice(same, WINDOW))
    return len(peers) >= _OFTEN and len(set(peers)) == 1 and this.peer not in peers


def changes_tags_otherwise(job: JobState, rank: int, row: int) -> bool:
    """Return whether the tag of a send or receive follows the one before in another way than before: the tags of a
    pair of ranks often count."""
    tags = [one.tag for one in islice(_alike_back(job, rank, row), 3) if one.tag is not None]
    return len(job.ranks[rank].calls) > row and len(tags) == 3 and tags[0] - tags[1] != tags[1] - tags[2]


def breaks_its_tags(job: JobState, rank: int, row: int) -> bool | None:
    """Return whether the tag of a send or receive breaks the order of the tags before it on this pair of ranks: their
    differences had a period. None if they had none."""
    return _breaks_its_period([one.tag or 0 for one in islice(_alike_back(job, rank, row), WINDOW)][::-1])


def breaks_its_sizes(job: JobState, rank: int, row: int) -> bool | None:
    """As `breaks_its_tags`, for the bytes of sends or receives."""
    return _breaks_its_period([one.bytes for one in islice(_alike_back(job, rank, row), WINDOW)][::-1])


def _breaks_its_period(values: list[int]) -> bool | None:
    """Return whether the difference of the last two values breaks the period of those before; None without a period."""
    steps = [later - earlier for earlier, later in pairwise(values)]
    *before, last = steps or [0]
    for period in range(1, len(before) // _OFTEN + 1):
        if before[period:] == before[:-period]:
            return last != before[-period]
    return None


def _alike_back(job: JobState, rank: int, row: int) -> Iterator[CommRecord]:
    """Yield a send or receive, and those before it with the same peer, the latest first."""
    this = job.signature(rank, row)
    calls = (job.signature(rank, one) for one in range(row, -1, -1))
    return (one for one in calls if (one.op, one.peer) == (this.op, this.peer))


def has_skipped(
    job: JobState, rank: int, group: ProcessGroup, row: int, peers: tuple[int, ...] = (), op: str | None = None
) -> bool:
    """Return whether a rank made its call at `row` where a call on `group` was due: a collective, or a send or receive
    with one of `peers`, or only `op`.

    False for a call that the rank makes for the first time.
    """
    own = job.group_of[rank]

    def is_wanted(token: Token) -> bool:
        local, what, peer, _ = token
        return own[local] == group.index and (peer in peers if peers else peer is None) and op in (None, what)

    follows = _due_instead(job, rank, row)
    return (bool(follows) and all(map(is_wanted, follows))) or any(map(is_wanted, _left_out(job, rank, row)))


def unlike_the_rest(job: JobState, among: Collection[int]) -> dict[int, int]:
    """Return rank of `among` -> row of its first call that is another one than most ranks made. The ranks of a mesh
    make the same calls, each on groups of its own.

    Empty if most ranks do not agree, the call is of a kind that only some have made, or the first calls are not known.
    """
    some = [*sorted(among), *sorted(job.ranks.keys() - set(among))][:_MOST_RANKS]
    programs = {rank: _program(job, rank) for rank in some}
    if not all(programs.values()):
        return {}
    for usual in sorted(programs.values(), key=len, reverse=True):
        parts = {rank: at for rank in some if (at := _parts_at(programs[rank], usual)) is not None}
        if len(parts) * 2 < len(some) and len(some) - len(parts) >= _OFTEN:
            known = all(programs[rank][at] in usual and usual[at] in programs[rank][:at] for rank, at in parts.items())
            return parts if known and parts.keys() <= set(among) else {}
    return {}


def leaves_its_period(job: JobState, rank: int, row: int) -> int | None:
    """Return the row of the first call of a rank, up to `row`, that is not the one it made a period before; -1 if there
    is none; None if its calls have no period. A training loop makes the same calls in each step."""
    history = [token[:3] for token in _history(job, rank, row)]
    first = row + 1 - len(history)
    for begin in _BEGINNINGS:
        calls = history[begin:]
        lasts = {
            next((at for at in range(period, len(calls)) if calls[at] != calls[at - period]), len(calls)): period
            for period in range(len(calls) // _ROUNDS, 0, -1)
        }
        latest = max(lasts, default=0)
        if lasts and latest >= _ROUNDS * lasts[latest]:
            return first + begin + latest if latest < len(calls) else -1
    return None


def _program(job: JobState, rank: int) -> list[tuple[str, int, int]]:
    """Return (operation, the number of the group by its first call, bytes) of each call of a rank. Empty if the first
    calls are unknown, or some calls are sends and receives, which differ between ranks."""
    calls, own = job.ranks[rank].calls, job.group_of[rank]
    signatures = [job.signatures[one] for one in calls.signature[:_MOST_CALLS]]
    firsts: dict[int, int] = {}
    """Group -> the number of its first call."""
    for local, number in zip(calls.group, calls.number, strict=True):
        firsts.setdefault(own[local], number)
    order = {group: place for place, group in enumerate(firsts)}
    if any(number != 1 for number in firsts.values()) or len(calls) > _MOST_CALLS or any(map(is_p2p, signatures)):
        return []
    return [(one.op, order[own[local]], one.bytes) for one, local in zip(signatures, calls.group, strict=True)]


def _parts_at(some: list[tuple[str, int, int]], others: list[tuple[str, int, int]]) -> int | None:
    """Return the index of the first call that differs; None if one list begins with the other."""
    return next((at for at, (one, other) in enumerate(zip(some, others)) if one != other), None)  # noqa: B905


def _left_out(job: JobState, rank: int, row: int) -> list[Token]:
    """Return the calls that a rank left out since it made the collective at `row` the last time, of those that it made
    in both rounds before: a batch has no order."""
    *before, this = _history(job, rank, row)
    if this[2] is not None:  # between sends and receives, the rounds of a pipeline may differ
        return []
    places = [at for at, one in enumerate(before) if one == this][-3:]
    if len(places) < 3:
        return []
    first, second, last = (Counter(before[begin + 1 : end]) for begin, end in pairwise([*places, len(before)]))
    return list((first & second) - last)


def has_gone_past(job: JobState, rank: int, group: ProcessGroup) -> bool:
    """Return whether a rank made one of its last calls on another group where a call on `group` was due.

    First checks whether a call on `group` ever followed the call before it. The full comparison is slow.
    """
    calls, own = job.ranks[rank].calls, job.group_of[rank]
    first = max(0, len(calls) - 1 - 2 * WINDOW)
    history = _history(job, rank, len(calls) - 1, windows=2) if len(calls) else []
    led_to_group: set[Token] = set()
    for row, (before, this) in enumerate(pairwise(history), first + 1):
        if own[this[0]] == group.index:
            led_to_group.add(before)
        elif row >= len(calls) - WINDOW and before in led_to_group and has_skipped(job, rank, group, row):
            return True
    return False


def first_in_program(job: JobState, ops: Sequence[StuckOp]) -> StuckOp:
    """Return the operation that the program makes first.

    An operation is later if its members wait in another one before it, or if the ranks made such calls in this order
    before. Otherwise, the operation with most waiting ranks is the first.
    """
    if len(ops) > 1:
        ops = [op for op in ops if not _is_later(op, ops)] or ops
    if len(ops) > 1:
        absent = set().union(*(op.absent for op in ops)) & job.ranks.keys()
        until = {rank: _calls_until(job, rank, ops) for rank in absent}
        due = [min((until[rank][at] for rank in op.absent & absent), default=WINDOW) for at, op in enumerate(ops)]
        ops = [op for op, calls in zip(ops, due, strict=True) if calls == min(due)]
    return min(ops, key=most_waiters_first)


def most_waiters_first(op: StuckOp) -> tuple[int, ...]:
    """Return a sort key for operations whose order is unknown otherwise."""
    return -len(op.waiting), op.is_p2p, op.since, op.group.index, op.seq


def _is_later(op: StuckOp, others: Sequence[StuckOp]) -> bool:
    missing = op.absent | op.behind
    return any(not missing.isdisjoint(other.waiting) for other in others)


def _calls_until(job: JobState, rank: int, ops: Sequence[StuckOp]) -> list[int]:
    """Return after how many more calls a rank is expected to make each of `ops`, from what followed similar calls;
    `WINDOW` if it never did."""
    calls, own = job.ranks[rank].calls, job.group_of[rank]
    before = _history(job, rank, len(calls) - 1) if len(calls) else []
    soonest: dict[tuple[int, str], int] = {}
    for at in _alike(before):
        for index, (local, name, *_) in enumerate(before[at:]):
            soonest[own[local], name] = min(soonest.get((own[local], name), WINDOW), index)
    return [soonest.get((op.group.index, op.op), WINDOW) for op in ops]


def _history(job: JobState, rank: int, row: int, windows: int = 1, *, sized: bool = False) -> list[Token]:
    """Return the call at `row` and the rank's calls before it, at most `windows` windows of them. With `sized`, calls
    of different sizes are different calls."""
    calls, signatures = job.ranks[rank].calls, job.signatures
    some = slice(max(0, row - windows * WINDOW), row + 1)
    what = [(signatures[number].op, signatures[number].peer) for number in calls.signature[some]]
    places = [
        (0 if job.signatures[signature].peer is not None else stack, signature if sized else -1)
        for stack, signature in zip(calls.stack[some], calls.signature[some], strict=True)
    ]
    return [(group, *one, place) for group, one, place in zip(calls.group[some], what, places, strict=True)]


def _due_instead(job: JobState, rank: int, row: int, *, sized: bool = False) -> list[Token]:
    """Return the calls that followed the same calls before, if the rank now made another known call; else empty."""
    *before, this = _history(job, rank, row, sized=sized)
    follows = _expected(before)
    return follows if this not in follows and this in before else []


def _expected(before: list[Token]) -> list[Token]:
    """Return the calls that followed the longest matches of the last calls; empty if there are none."""
    return [before[at] for at in _alike(before)]


def _alike(before: list[Token]) -> list[int]:
    """Return the positions after the longest matches of the last calls, of at least two calls."""
    last = len(before)
    best = 1
    found: list[int] = []
    for at in range(1, last):
        length = 0
        while length < at and before[at - 1 - length] == before[last - 1 - length]:
            length += 1
        if length > best:
            best, found = length, []
        if length == best:
            found.append(at)
    return found
