"""What a rank usually does: a training loop repeats itself, so a call can be told from one that is out of turn."""

from __future__ import annotations

from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.job.groups import ProcessGroup

_WINDOW = 512
"""Calls looked back at."""

# (index of the rank's group, operation, peer, stack)
Token = tuple[int, str, "int | None", int]


def expected(job: JobState, rank: int, row: int) -> list[Token]:
    """What followed before, wherever the rank's calls were like those before `row` for longest; empty where never."""
    first = max(0, row - _WINDOW)
    tokens = [_token(job, rank, at) for at in range(first, row + 1)]
    last = len(tokens) - 1
    best = 0
    found: list[Token] = []
    for at in range(1, last):
        length = 0
        while length < at and tokens[at - 1 - length] == tokens[last - 1 - length]:
            length += 1
        if length > best:
            best, found = length, []
        if length == best and length:
            found.append(tokens[at])
    return found


def is_usual(job: JobState, rank: int, row: int) -> bool:
    """Whether the rank's calls before `row` have led to such a call before."""
    return _token(job, rank, row) in expected(job, rank, row)


def is_new(job: JobState, rank: int, row: int) -> bool:
    """Whether a rank that went on as before made a call of a kind and with a peer that it had never made."""
    group, op, peer, _ = _token(job, rank, row)
    before = range(max(0, row - _WINDOW), row)
    return bool(expected(job, rank, row)) and all(_token(job, rank, at)[:3] != (group, op, peer) for at in before)


def has_skipped(job: JobState, rank: int, group: ProcessGroup, row: int, peers: tuple[int, ...] = ()) -> bool:
    """Whether a rank made its call at `row` where one on `group` was due: a collective, or P2P with one of `peers`.

    Of a call that it makes for the first time nothing can be said.
    """
    follows = expected(job, rank, row)
    token = _token(job, rank, row)
    first = max(0, row - _WINDOW)
    if not follows or token in follows or all(_token(job, rank, at) != token for at in range(first, row)):
        return False
    mine = job.group_of[rank]
    return all(
        mine[local] == group.index and (peer in peers if peers else peer is None) for local, _, peer, _ in follows
    )


def _token(job: JobState, rank: int, row: int) -> Token:
    calls = job.ranks[rank].calls
    signature = job.signature(rank, row)
    return calls.group[row], signature.op, signature.peer, calls.stack[row]
