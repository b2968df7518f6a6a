"""Pairs sends with receives: for each pair of ranks on a group, in the order in which they were called.

Where both ranks' calls are complete from the start of the job, the n-th send belongs to the n-th receive. Where a
ring has wrapped, or completed calls were left out of the dumps, the pairs are found from the sequence numbers, if
those of both ranks run in step (a group of two), and otherwise from the end: the first open send belongs to the first
open receive.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import prod

from crossrank.tools.diagnosis.evidence import COMPLETED, RETIRED, RankEvidence, Signature
from crossrank.tools.diagnosis.job import Job, JobGroup

Call = tuple[int, int]
"""(rank, row of its calls)"""


@dataclass
class Pairing:
    """What became of every send and receive of the job."""

    partner: dict[Call, Call] = field(default_factory=dict)
    """Both ways. Calls that are done on their own rank are there only where the pairs are exact."""
    alone: dict[Call, int] = field(default_factory=dict)
    """Calls that the other rank has not answered -> that rank."""
    done: set[Call] = field(default_factory=set)
    """Open calls of which the other rank saw the end."""
    sizes_differ: list[tuple[Call, Call]] = field(default_factory=list)
    """Send and receive that belong together and are not of one size or type."""


def pair_up(job: Job) -> Pairing:
    """Pair the P2P calls of every group."""
    pairing = Pairing()
    for group in job.groups:
        if not group.has_p2p:
            continue
        lists = _lists(job, group)
        for source, target in sorted(
            {(r, p) for op, r, p in lists if op == "send"} | {(p, r) for op, r, p in lists if op == "recv"}
        ):
            sends = lists.get(("send", source, target), [])
            receives = lists.get(("recv", target, source), [])
            _pair(job, group, (source, sends), (target, receives), pairing)
    return pairing


def _lists(job: Job, group: JobGroup) -> dict[tuple[str, int, int], list[int]]:
    """(operation, rank, peer) -> rows in order."""
    lists: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for rank in group.ranks:
        evidence = job.ranks.get(rank)
        if evidence is None:
            continue
        calls, mine = evidence.calls, job.group_of[rank]
        for row, number in enumerate(calls.signature):
            signature = job.signatures[number]
            if signature.is_p2p and signature.peer is not None and mine[calls.group[row]] == group.index:
                lists[signature.op, rank, signature.peer].append(row)
    return lists


def _pair(
    job: Job, group: JobGroup, sends: tuple[int, list[int]], receives: tuple[int, list[int]], pairing: Pairing
) -> None:
    (source, send_rows), (target, receive_rows) = sends, receives
    one, other = job.ranks.get(source), job.ranks.get(target)
    if one is None or other is None:
        for rank, rows, peer in ((source, send_rows, target), (target, receive_rows, source)):
            if rank in job.ranks:
                for row in rows:
                    if job.ranks[rank].calls.state[row] < RETIRED:
                        pairing.alone[rank, row] = peer
        return
    exact = _is_whole(one) and _is_whole(other)
    if exact or (one.numbered_pairs and other.numbered_pairs):
        pairs, lone_sends, lone_receives = _by_position(one, other, send_rows, receive_rows)
    elif _in_step(one, other, send_rows, receive_rows):
        pairs, lone_sends, lone_receives = _by_number(one, other, send_rows, receive_rows)
    else:
        pairs, lone_sends, lone_receives = _from_the_end(one, other, send_rows, receive_rows)
    for send, receive in pairs:
        a, b = (source, send), (target, receive)
        pairing.partner[a], pairing.partner[b] = b, a
        if not _same_size(job.signature(*a), job.signature(*b)):
            pairing.sizes_differ.append((a, b))
            continue
        for call, of_other in ((a, b), (b, a)):
            if job.ranks[of_other[0]].calls.state[of_other[1]] == COMPLETED:
                pairing.done.add(call)
    # gloo tells no state: once both sides have called, the two will get through.
    if one.numbered_pairs and other.numbered_pairs:
        for send, receive in pairs:
            if ((source, send), (target, receive)) not in pairing.sizes_differ:
                pairing.done.update(((source, send), (target, receive)))
    for rank, rows, peer, of_peer in ((source, lone_sends, target, other), (target, lone_receives, source, one)):
        calls = job.ranks[rank].calls
        local = group.local_index.get(peer)
        progress = of_peer.progress.get(local) if local is not None else None
        for row in rows:
            if calls.state[row] >= RETIRED:
                continue
            if of_peer.active_only and progress is not None and progress.last_completed_collective >= calls.seq[row]:
                pairing.done.add((rank, row))
            else:
                pairing.alone[rank, row] = peer


Matching = tuple[list[tuple[int, int]], list[int], list[int]]
"""Pairs of rows, sends without a receive, receives without a send."""


def _is_whole(evidence: RankEvidence) -> bool:
    """Whether every P2P call since the start of the job is there."""
    return not evidence.wrapped and not evidence.active_only and not evidence.numbered_pairs


def _by_position(one: RankEvidence, other: RankEvidence, sends: list[int], receives: list[int]) -> Matching:
    if one.numbered_pairs and other.numbered_pairs:
        numbers = {other.calls.seq[row]: row for row in receives}
        low = max(min(numbers, default=0), min((one.calls.seq[row] for row in sends), default=0))
        pairs = [(row, numbers[one.calls.seq[row]]) for row in sends if one.calls.seq[row] in numbers]
        matched = {row for pair in pairs for row in pair[:1]}, {pair[1] for pair in pairs}
        lone_sends = [row for row in sends if row not in matched[0] and one.calls.seq[row] >= low]
        lone_receives = [row for row in receives if row not in matched[1] and other.calls.seq[row] >= low]
        return pairs, lone_sends, lone_receives
    count = min(len(sends), len(receives))
    return list(zip(sends, receives)), sends[count:], receives[count:]  # noqa: B905


def _in_step(one: RankEvidence, other: RankEvidence, sends: list[int], receives: list[int]) -> bool:
    """Whether the p2p_seq_ids of both sides are the same where both have some."""
    a = [one.calls.seq[row] for row in sends]
    b = [other.calls.seq[row] for row in receives]
    if not a or not b:
        return bool(one.active_only and other.active_only)
    low, high = max(min(a), min(b)), min(max(a), max(b))
    both = {seq for seq in a if low <= seq <= high}, {seq for seq in b if low <= seq <= high}
    # Dumps of active calls alone may not overlap: one rank is done with what the other still has open.
    return both[0] == both[1] and (bool(both[0]) or (one.active_only and other.active_only))


def _by_number(one: RankEvidence, other: RankEvidence, sends: list[int], receives: list[int]) -> Matching:
    by_seq: dict[int, list[int]] = defaultdict(list)
    for row in receives:
        by_seq[other.calls.seq[row]].append(row)
    pairs, lone_sends = [], []
    for row in sends:
        waiting = by_seq.get(one.calls.seq[row])
        if waiting:
            pairs.append((row, waiting.pop(0)))
        else:
            lone_sends.append(row)
    lone_receives = sorted(row for rows in by_seq.values() for row in rows)
    if other.wrapped and receives:
        lone_sends = [row for row in lone_sends if one.calls.seq[row] > other.calls.seq[receives[0]]]
    if one.wrapped and sends:
        lone_receives = [row for row in lone_receives if other.calls.seq[row] > one.calls.seq[sends[0]]]
    return pairs, lone_sends, lone_receives


def _from_the_end(one: RankEvidence, other: RankEvidence, sends: list[int], receives: list[int]) -> Matching:
    open_sends = [row for row in sends if one.calls.state[row] < RETIRED]
    open_receives = [row for row in receives if other.calls.state[row] < RETIRED]
    # A receive that ended after a send was made may be the one that answered it, noticed earlier on its side.
    for mine, theirs, me, them in (
        (open_sends, receives, one, other),
        (open_receives, sends, other, one),
    ):
        answered = [
            row
            for row in theirs
            if them.calls.state[row] >= RETIRED and mine and them.calls.completed[row] >= me.calls.created[mine[0]] > 0
        ]
        del mine[
            : min(len(answered), max(0, len(open_sends) - len(open_receives), len(open_receives) - len(open_sends)))
        ]
    count = min(len(open_sends), len(open_receives))
    return list(zip(open_sends, open_receives)), open_sends[count:], open_receives[count:]  # noqa: B905


def _same_size(send: Signature, receive: Signature) -> bool:
    sent = sum(map(prod, send.inputs or send.outputs))
    received = sum(map(prod, receive.outputs or receive.inputs))
    if sent != received:
        return False
    return send.dtype() is None or receive.dtype() is None or send.dtype() == receive.dtype()
