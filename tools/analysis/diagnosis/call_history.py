"""What a rank usually does: a training loop repeats itself, so a call that is out of turn stands out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.analysis.diagnosis.wait_for_graph import StuckOp
from crossrank.tools.job.groups import ProcessGroup

WINDOW = 512
"""Calls looked back at."""

# (index of the rank's group, operation, peer, stack)
Token = tuple[int, str, "int | None", int]


def is_usual(job: JobState, rank: int, row: int) -> bool:
    """Whether the rank's calls before `row` have led to such a call before."""
    *before, this = _history(job, rank, row)
    return this in _expected(before)


def is_out_of_turn(job: JobState, rank: int, row: int) -> bool:
    """Whether the rank's calls before `row` have led to another call whenever it made them. Of one that it makes for
    the first time nothing is known: the first call after a loop is no mistake."""
    return bool(_due_instead(job, rank, row))


def is_new(job: JobState, rank: int, row: int) -> bool:
    """Whether a rank that went on as before made a call of a kind and with a peer that it had never made."""
    *before, this = _history(job, rank, row)
    return bool(_expected(before)) and all(one[:3] != this[:3] for one in before)


def has_skipped(
    job: JobState, rank: int, group: ProcessGroup, row: int, peers: tuple[int, ...] = (), op: str | None = None
) -> bool:
    """Whether a rank made its call at `row` where one on `group` was due: a collective, or with one of `peers` a send
    or a receive, or `op` alone.

    Of a call that it makes for the first time nothing is known.
    """
    follows = _due_instead(job, rank, row)
    own = job.group_of[rank]
    return bool(follows) and all(
        own[local] == group.index and (peer in peers if peers else peer is None) and op in (None, what)
        for local, what, peer, _ in follows
    )


def has_gone_past(job: JobState, rank: int, group: ProcessGroup) -> bool:
    """Whether one of the last calls of a rank, on another group, was made where one on `group` was due.

    Where no call like the one before it was ever followed by one on `group`, none was due: only the others are compared
    with all that the rank did before, which takes long.
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
    """Of operations that some ranks have not made the one that their program makes first.

    One comes later whose members wait in another one before they come to it; and those ranks show in which order they
    made such calls when they last were here. Where neither tells it is the one with most waiters.
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
    """What orders operations of which nothing else tells which comes first."""
    return -len(op.waiting), op.is_p2p, op.since, op.group.index, op.seq


def _is_later(op: StuckOp, others: Sequence[StuckOp]) -> bool:
    missing = op.absent | op.behind
    return any(not missing.isdisjoint(other.waiting) for other in others)


def _calls_until(job: JobState, rank: int, ops: Sequence[StuckOp]) -> list[int]:
    """After how many more calls a rank makes each of `ops`, as it did after calls like its last ones; `WINDOW` where it
    never did."""
    calls, own = job.ranks[rank].calls, job.group_of[rank]
    before = _history(job, rank, len(calls) - 1) if len(calls) else []
    soonest: dict[tuple[int, str], int] = {}
    for at in _alike(before):
        for index, (local, name, *_) in enumerate(before[at:]):
            soonest[own[local], name] = min(soonest.get((own[local], name), WINDOW), index)
    return [soonest.get((op.group.index, op.op), WINDOW) for op in ops]


def _history(job: JobState, rank: int, row: int, windows: int = 1) -> list[Token]:
    """The calls of a rank up to the one at `row`, so many windows of them."""
    calls, signatures = job.ranks[rank].calls, job.signatures
    some = slice(max(0, row - windows * WINDOW), row + 1)
    what = [(signatures[number].op, signatures[number].peer) for number in calls.signature[some]]
    return [(group, *one, stack) for group, one, stack in zip(calls.group[some], what, calls.stack[some], strict=True)]


def _due_instead(job: JobState, rank: int, row: int) -> list[Token]:
    """What the rank's calls before `row` have led to, where it made another one that it had made before; else empty."""
    *before, this = _history(job, rank, row)
    follows = _expected(before)
    return follows if this not in follows and this in before else []


def _expected(before: list[Token]) -> list[Token]:
    """What followed wherever the calls were like the last ones for longest; empty where never."""
    return [before[at] for at in _alike(before)]


def _alike(before: list[Token]) -> list[int]:
    """Where the calls that led there were like the last ones for longest, two at least."""
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
