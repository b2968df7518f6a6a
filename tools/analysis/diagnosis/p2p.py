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

from crossrank.comm import CommRecord, is_p2p
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.traces.rank_trace import COMPLETED, RETIRED, RankTrace

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
    sizes_differ: dict[tuple[Call, Call], None] = field(default_factory=dict)
    """Send and receive that belong together and are not of one size or type."""


def pair_up(job: JobState) -> Pairing:
    """Pair the P2P calls of every group."""
    pairing = Pairing()
    of_group = _lists(job)
    for group in job.groups:
        if not group.has_p2p:
            continue
        lists = of_group[group.index]
        in_step = _in_step(job, group, lists)
        ways = {(rank, peer) for op, rank, peer in lists if op == "send"}
        ways |= {(peer, rank) for op, rank, peer in lists if op == "recv"}
        for source, target in sorted(ways):
            sends = lists.get(("send", source, target), [])
            receives = lists.get(("recv", target, source), [])
            _pair(job, group, (source, sends), (target, receives), pairing, in_step)
    return pairing


def _lists(job: JobState) -> dict[int, dict[tuple[str, int, int], list[int]]]:
    """Index of a group -> (operation, rank, peer) -> rows in order."""
    found: dict[int, dict[tuple[str, int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    p2p = [is_p2p(signature) and signature.peer is not None for signature in job.signatures]
    for rank, evidence in job.ranks.items():
        calls, mine = evidence.calls, job.group_of[rank]
        for row, number in enumerate(calls.signature):
            if p2p[number]:
                signature = job.signatures[number]
                assert signature.peer is not None
                found[mine[calls.group[row]]][signature.op, rank, signature.peer].append(row)
    return found


def _pair(
    job: JobState,
    group: ProcessGroup,
    sends: tuple[int, list[int]],
    receives: tuple[int, list[int]],
    pairing: Pairing,
    in_step: bool,
) -> None:
    (source, send_rows), (target, receive_rows) = sends, receives
    one, other = job.ranks.get(source), job.ranks.get(target)
    if one is None or other is None:
        for rank, rows, peer in ((source, send_rows, target), (target, receive_rows, source)):
            if rank in job.ranks:
                for row in rows:
                    if job.ranks[rank].calls.state[row] < RETIRED:
                        _leave_alone(job, rank, row, peer, pairing)
        return
    numbered = one.numbered_pairs and other.numbered_pairs
    exact = numbered or (_is_whole(one) and _is_whole(other))
    if numbered:
        pairs, lone_sends, lone_receives = _by_count(one, other, send_rows, receive_rows)
    elif exact:
        count = min(len(send_rows), len(receive_rows))
        pairs = list(zip(send_rows, receive_rows))  # noqa: B905
        lone_sends, lone_receives = send_rows[count:], receive_rows[count:]
    elif in_step:
        pairs, lone_sends, lone_receives = _by_number(one, other, send_rows, receive_rows)
    else:
        pairs, lone_sends, lone_receives, over = _from_the_end(job, one, other, send_rows, receive_rows)
        pairing.done.update((source, row) for row in over[0])
        pairing.done.update((target, row) for row in over[1])
    strangers = [
        pair for pair in pairs if not _same_tag(job.signature(source, pair[0]), job.signature(target, pair[1]))
    ]
    pairs = [pair for pair in pairs if pair not in strangers]
    lone_sends, lone_receives = lone_sends + [a for a, _ in strangers], lone_receives + [b for _, b in strangers]
    for send, receive in pairs:
        a, b = (source, send), (target, receive)
        pairing.partner[a], pairing.partner[b] = b, a
        if not _same_size(job.signature(*a), job.signature(*b)):
            pairing.sizes_differ[a, b] = None
            continue
        for call, of_other in ((a, b), (b, a)):
            if job.ranks[of_other[0]].calls.state[of_other[1]] == COMPLETED:
                pairing.done.add(call)
    # gloo tells no state: once both sides have called, the two will get through.
    if numbered:
        for send, receive in pairs:
            if ((source, send), (target, receive)) not in pairing.sizes_differ:
                pairing.done.update(((source, send), (target, receive)))
    for rank, rows, peer, of_peer in ((source, lone_sends, target, other), (target, lone_receives, source, one)):
        calls = job.ranks[rank].calls
        local = group.local_index.get(peer)
        progress = of_peer.dump.progress.get(local) if local is not None else None
        for row in rows:
            if calls.state[row] >= RETIRED:
                continue
            # In step the peer's number means the same as ours.
            passed = in_step and of_peer.dump.active_only and progress is not None
            if passed and progress is not None and progress.last_completed_collective >= calls.number[row]:
                pairing.done.add((rank, row))
            elif exact:
                pairing.alone[rank, row] = peer
            else:
                _leave_alone(job, rank, row, peer, pairing)
    for rank, rows in ((source, send_rows), (target, receive_rows)):
        _end_in_order(job, rank, rows, pairing)


def _leave_alone(job: JobState, rank: int, row: int, peer: int, pairing: Pairing) -> None:
    """Note that `peer` has not answered a call, unless its rank would not have noticed an answer."""
    if row < job.blind_until(rank):
        pairing.done.add((rank, row))
    else:
        pairing.alone[rank, row] = peer


def _end_in_order(job: JobState, rank: int, rows: list[int], pairing: Pairing) -> None:
    """Transfers between two ranks in one direction end in order: where one is over, all before it are."""
    states = job.ranks[rank].calls.state
    over = False
    for row in reversed(rows):
        if over and states[row] < RETIRED:
            pairing.done.add((rank, row))
            pairing.alone.pop((rank, row), None)
        over = over or states[row] == COMPLETED or (rank, row) in pairing.done


Matching = tuple[list[tuple[int, int]], list[int], list[int]]
"""Pairs of rows, sends without a receive, receives without a send."""


def _is_whole(evidence: RankTrace) -> bool:
    """Whether every P2P call since the start of the job is there."""
    return not evidence.dump.wrapped and not evidence.dump.active_only and not evidence.numbered_pairs


def _by_count(one: RankTrace, other: RankTrace, sends: list[int], receives: list[int]) -> Matching:
    """By the numbers of comms files, which count the calls to that peer. What came before the other's first is left."""
    by_count = {other.calls.number[row]: row for row in receives}
    low = max(min(by_count, default=0), min((one.calls.number[row] for row in sends), default=0))
    pairs = [(row, by_count[one.calls.number[row]]) for row in sends if one.calls.number[row] in by_count]
    paired_sends, paired_receives = {send for send, _ in pairs}, {receive for _, receive in pairs}
    lone_sends = [row for row in sends if row not in paired_sends and one.calls.number[row] >= low]
    lone_receives = [row for row in receives if row not in paired_receives and other.calls.number[row] >= low]
    return pairs, lone_sends, lone_receives


def _in_step(job: JobState, group: ProcessGroup, lists: dict[tuple[str, int, int], list[int]]) -> bool:
    """Whether equal p2p_seq_ids are the two ends of one transfer.

    They count all P2P launches of a rank on the group, so both ends agree only where nobody has two peers, and only if
    they launch alike. The calls that are seen on both ends show it; in a group of two without such calls it is taken
    for granted, for in dumps of active calls one rank may be done with all that the other still has open.
    """
    peers: dict[int, set[int]] = defaultdict(set)
    for _, rank, peer in lists:
        peers[rank].add(peer)
    if any(len(others) > 1 for others in peers.values()):
        return False
    seen = False
    for (op, rank, peer), rows in lists.items():
        others = lists.get(("recv", peer, rank), []) if op == "send" else []
        if not others:
            continue
        a = [job.ranks[rank].calls.number[row] for row in rows]
        b = [job.ranks[peer].calls.number[row] for row in others]
        low, high = max(min(a), min(b)), min(max(a), max(b))
        both = [{seq for seq in seqs if low <= seq <= high} for seqs in (a, b)]
        if both[0] != both[1]:
            return False
        seen = seen or bool(both[0])
    return seen or len(group.ranks) == 2


def _by_number(one: RankTrace, other: RankTrace, sends: list[int], receives: list[int]) -> Matching:
    by_seq: dict[int, list[int]] = defaultdict(list)
    for row in receives:
        by_seq[other.calls.number[row]].append(row)
    pairs, lone_sends = [], []
    for row in sends:
        waiting = by_seq.get(one.calls.number[row])
        if waiting:
            pairs.append((row, waiting.pop(0)))
        else:
            lone_sends.append(row)
    lone_receives = sorted(row for rows in by_seq.values() for row in rows)
    if other.dump.wrapped and receives:
        lone_sends = [row for row in lone_sends if one.calls.number[row] > other.calls.number[receives[0]]]
    if one.dump.wrapped and sends:
        lone_receives = [row for row in lone_receives if other.calls.number[row] > one.calls.number[sends[0]]]
    return pairs, lone_sends, lone_receives


def _from_the_end(
    job: JobState, one: RankTrace, other: RankTrace, sends: list[int], receives: list[int]
) -> tuple[list[tuple[int, int]], list[int], list[int], tuple[list[int], list[int]]]:
    """A matching, and the open sends and receives that are over."""
    open_sends = [row for row in sends if one.calls.state[row] < RETIRED]
    open_receives = [row for row in receives if other.calls.state[row] < RETIRED]
    # What looks open on a rank that notices no ends, from before a collective that is over, answers nothing.
    blind_sends = [row for row in open_sends if row < job.blind_until(one.rank or 0)]
    blind_receives = [row for row in open_receives if row < job.blind_until(other.rank or 0)]
    open_sends, open_receives = open_sends[len(blind_sends) :], open_receives[len(blind_receives) :]
    surplus = len(open_sends) - len(open_receives)
    # One side may have noticed the end of a transfer that is still open on the other: of the surplus, those calls that
    # were made before the other side saw transfers end.
    over: tuple[list[int], list[int]] = blind_sends, blind_receives
    if surplus > 0:
        ended = min(surplus, _ended_since(other, receives, one.calls.called[open_sends[0]]))
        over = blind_sends + open_sends[:ended], blind_receives
        open_sends = open_sends[ended:]
    elif surplus < 0:
        ended = min(-surplus, _ended_since(one, sends, other.calls.called[open_receives[0]]))
        over = blind_sends, blind_receives + open_receives[:ended]
        open_receives = open_receives[ended:]
    count = min(len(open_sends), len(open_receives))
    return list(zip(open_sends, open_receives)), open_sends[count:], open_receives[count:], over  # noqa: B905


def _ended_since(evidence: RankTrace, rows: list[int], moment: int) -> int:
    """How many of the calls ended at or after `moment` (ns since 1970)."""
    calls = evidence.calls
    return sum(1 for row in rows if calls.state[row] >= RETIRED and calls.ended[row] >= moment > 0)


def _same_tag(send: CommRecord, receive: CommRecord) -> bool:
    return send.tag is None or receive.tag is None or send.tag == receive.tag


def _same_size(send: CommRecord, receive: CommRecord) -> bool:
    sent = sum(map(prod, send.inputs or send.outputs))
    received = sum(map(prod, receive.outputs or receive.inputs))
    if sent != received:
        return False
    return send.dtype is None or receive.dtype is None or send.dtype == receive.dtype
