"""What a rank usually does: a training loop repeats itself, so a call that is out of turn stands out."""

from __future__ import annotations

from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.job.groups import ProcessGroup

WINDOW = 512
"""Calls looked back at."""

# (index of the rank's group, operation, peer, stack)
Token = tuple[int, str, "int | None", int]


def is_usual(job: JobState, rank: int, row: int) -> bool:
    """Whether the rank's calls before `row` have led to such a call before."""
    *before, this = _history(job, rank, row)
    return this in _expected(before)


def is_new(job: JobState, rank: int, row: int) -> bool:
    """Whether a rank that went on as before made a call of a kind and with a peer that it had never made."""
    *before, this = _history(job, rank, row)
    return bool(_expected(before)) and all(one[:3] != this[:3] for one in before)


def has_skipped(job: JobState, rank: int, group: ProcessGroup, row: int, peers: tuple[int, ...] = ()) -> bool:
    """Whether a rank made its call at `row` where one on `group` was due: a collective, or P2P with one of `peers`.

    Of a call that it makes for the first time nothing is known.
    """
    *before, this = _history(job, rank, row)
    follows = _expected(before)
    if not follows or this in follows or this not in before:
        return False
    own = job.group_of[rank]
    return all(
        own[local] == group.index and (peer in peers if peers else peer is None) for local, _, peer, _ in follows
    )


def _history(job: JobState, rank: int, row: int) -> list[Token]:
    """The calls of a rank up to the one at `row`."""
    calls, signatures = job.ranks[rank].calls, job.signatures
    some = slice(max(0, row - WINDOW), row + 1)
    what = [(signatures[number].op, signatures[number].peer) for number in calls.signature[some]]
    return [(group, *one, stack) for group, one, stack in zip(calls.group[some], what, calls.stack[some], strict=True)]


def calls_until(job: JobState, rank: int, group: ProcessGroup, op: str) -> int:
    """After how many more calls a rank makes `op` on `group`, as it did after calls like its last ones; `WINDOW` where
    it never did."""
    calls, own = job.ranks[rank].calls, job.group_of[rank]
    before = _history(job, rank, len(calls) - 1) if len(calls) else []
    found = (
        index
        for at in _alike(before)
        for index, (local, name, *_) in enumerate(before[at:])
        if (own[local], name) == (group.index, op)
    )
    return min(found, default=WINDOW)


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
