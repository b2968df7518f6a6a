"""What a rank usually does: a training loop repeats itself, so a call can be told from one that is out of turn."""

from __future__ import annotations

from crossrank.tools.diagnosis.job import Job, JobGroup

_WINDOW = 512
"""Calls looked back at."""

# (group, operation, peer, stack)
Token = tuple[int, str, "int | None", int]


def is_usual(job: Job, rank: int, row: int) -> bool | None:
    """Whether the rank's calls before `row` have led to such a call before; None where they are new as well."""
    first = max(0, row - _WINDOW)
    tokens = [_token(job, rank, at) for at in range(first, row + 1)]
    last = len(tokens) - 1
    best, usual = 0, False
    for at in range(1, last):
        length = 0
        while length < at and tokens[at - 1 - length] == tokens[last - 1 - length]:
            length += 1
        if length > best:
            best, usual = length, tokens[at] == tokens[last]
        elif length == best and length:
            usual = usual or tokens[at] == tokens[last]
    return usual if best else None


def has_skipped(job: Job, rank: int, group: JobGroup, row: int) -> bool:
    """Whether a rank that is at `row` has gone past a collective of `group`, judging by its calls so far.

    Between two collectives of the group it made calls like that at `row` a number of times at most. Once it has made
    more since the last one, a collective of the group was due.
    """
    calls = job.ranks[rank].calls
    at_row = job.signature(rank, row)
    like = (calls.group[row], at_row.is_p2p, at_row.op if at_row.is_p2p else "", at_row.peer)
    most, since, intervals = 0, 0, 0
    counted: set[tuple[int, int]] = set()
    for at in range(row + 1):
        signature = job.signature(rank, at)
        if not signature.is_p2p and job.group_at(rank, at) is group:
            if intervals or not job.ranks[rank].wrapped:
                most = max(most, since)
            since, intervals = 0, intervals + 1
            continue
        kind = (calls.group[at], signature.is_p2p, signature.op if signature.is_p2p else "", signature.peer)
        number = (calls.group[at], calls.seq[at])
        if kind == like and number not in counted:
            counted.add(number)
            since += 1
    return intervals > 0 and 0 < most < since


def _token(job: Job, rank: int, row: int) -> Token:
    calls = job.ranks[rank].calls
    signature = job.signature(rank, row)
    return calls.group[row], signature.op, signature.peer, calls.stack[row]
