"""Pair sends with receives, for each pair of ranks on a group, in the order of the calls.

If both ranks' calls are complete from the start of the job, the n-th send belongs to the n-th receive. If a ring has
wrapped, or the dumps lack completed calls, sequence numbers give the pairs, if both ranks count equally (a group of
two). Otherwise the first unfinished send belongs to the first unfinished receive.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import prod

from crossrank.comm import CommRecord, is_p2p
from crossrank.tools.analysis.diagnosis.job_state import JobState, ends_unknown
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.traces.rank_trace import COMPLETED, RETIRED

CallId = tuple[int, int]
"""(rank, row of its calls)"""
Pairs = list[tuple[int, int]]
"""(row of a send, row of its receive)"""
Rows = dict[tuple[str, int, int], list[int]]
"""(operation, rank, peer) -> rows in order"""


@dataclass
class Pairing:
    """The result for every send and receive of the job."""

    partner: dict[CallId, CallId] = field(default_factory=dict)
    """Send -> receive and receive -> send. Has calls that finished on their own rank only if the pairs are exact."""
    alone: set[CallId] = field(default_factory=set)
    """Calls without a matching call on the other rank."""
    done: set[CallId] = field(default_factory=set)
    """Unfinished calls whose end the other rank noticed."""
    sizes_differ: list[tuple[CallId, CallId]] = field(default_factory=list)
    """Pairs with different sizes or types."""
    tags_differ: list[tuple[CallId, CallId]] = field(default_factory=list)
    """The n-th send and the n-th receive of two ranks, with different tags."""


class _End:
    """The sends, or the receives, of one rank in one direction between two ranks."""

    def __init__(self, job: JobState, rank: int, peer: int, rows: list[int]) -> None:
        self.rank, self.peer, self.rows = rank, peer, rows
        self.trace = job.ranks[rank]
        self.calls = self.trace.calls
        self.open_rows = [row for row in rows if self.calls.state[row] < RETIRED]
        self.numbers = [self.calls.number[row] for row in rows]
        self.blind_until = job.blind_until(rank)
        self.low = 0
        """Calls with smaller numbers are older than the peer's file."""

    def is_whole(self) -> bool:
        """Return whether the file has every P2P call since the start of the job, in the order of the group."""
        return not self.trace.dump.wrapped and not self.trace.dump.active_only and not self.trace.numbered_pairs

    def leave_alone(self, row: int, pairing: Pairing) -> None:
        """Add a call to `pairing.alone`, unless this rank notices no ends."""
        (pairing.done if row < self.blind_until else pairing.alone).add((self.rank, row))


def pair_up(job: JobState) -> Pairing:
    """Pair the P2P calls of every group."""
    pairing = Pairing()
    for index, lists in sorted(_lists(job).items()):
        group = job.groups[index]
        in_step = _in_step(job, group, lists)
        for source, target in sorted({(rank, peer) if op == "send" else (peer, rank) for op, rank, peer in lists}):
            keys = (("send", source, target), ("recv", target, source))
            ends = [_End(job, *key[1:], lists.get(key, [])) for key in keys if key[1] in job.ranks]
            if len(ends) == 2:
                _pair(job, group, ends[0], ends[1], in_step, pairing)
                continue
            for end in ends:
                for row in end.open_rows:
                    end.leave_alone(row, pairing)
    return pairing


def _lists(job: JobState) -> dict[int, Rows]:
    """Return index of a group -> its sends and receives."""
    found: dict[int, Rows] = defaultdict(lambda: defaultdict(list))
    keys = [(one.op, one.peer) if is_p2p(one) and one.peer is not None else None for one in job.signatures]
    for rank, trace in job.ranks.items():
        own, groups = job.group_of[rank], trace.calls.group
        for row, number in enumerate(trace.calls.signature):
            key = keys[number]
            if key is not None:
                found[own[groups[row]]][key[0], rank, key[1]].append(row)
    return found


def _pair(job: JobState, group: ProcessGroup, send: _End, receive: _End, in_step: bool, pairing: Pairing) -> None:
    numbered = send.trace.numbered_pairs and receive.trace.numbered_pairs
    exact = send.is_whole() and receive.is_whole()
    if numbered or (in_step and not exact):
        pairs = _by_number(send, receive, numbered)
    elif exact:
        pairs = list(zip(send.rows, receive.rows))  # noqa: B905
    else:
        pairs = _from_the_end(send, receive, pairing)
    pairs, unlike = _by_tag(job, send, receive, pairs)
    pairing.tags_differ += [((send.rank, row), (receive.rank, other_row)) for row, other_row in unlike]
    for row, other_row in pairs:
        sent, received = job.signature(send.rank, row), job.signature(receive.rank, other_row)
        a, b = (send.rank, row), (receive.rank, other_row)
        pairing.partner[a], pairing.partner[b] = b, a
        if not _same_size(sent, received):
            pairing.sizes_differ.append((a, b))
            continue
        # gloo reports no state: a transfer finishes once both ranks have called.
        stateless = numbered or (ends_unknown(send.trace) and ends_unknown(receive.trace))
        stateless = stateless and all(job.held_in.get(rank) != held for rank, held in (a, b))
        if stateless or receive.calls.state[other_row] == COMPLETED:
            pairing.done.add(a)
        if stateless or send.calls.state[row] == COMPLETED:
            pairing.done.add(b)
    for end, other in ((send, receive), (receive, send)):
        progress = other.trace.dump.progress.get(group.local_index.get(end.peer, -1))
        ended = -1
        if progress is not None and in_step and other.trace.dump.active_only:  # its numbers mean the same as ours
            ended = progress.last_completed_collective
        for row in end.open_rows:
            call, number = (end.rank, row), end.calls.number[row]
            if call in pairing.partner or call in pairing.done or number < end.low:
                continue
            if number <= ended:
                pairing.done.add(call)
            elif exact:
                pairing.alone.add(call)
            else:
                end.leave_alone(row, pairing)
        _end_in_order(end, pairing)


def _by_tag(job: JobState, send: _End, receive: _End, pairs: Pairs) -> tuple[Pairs, Pairs]:
    """Return (pairs with equal tags, pairs whose tags no other call has).

    Two ranks may make calls with different tags in different orders. Then each send belongs to the first receive with
    its tag.
    """
    tag_of = {end.rank: {row: job.signature(end.rank, row).tag for row in end.rows} for end in (send, receive)}
    tags = [(tag_of[send.rank][row], tag_of[receive.rank][other_row]) for row, other_row in pairs]
    odd = [pair for pair, (a, b) in zip(pairs, tags, strict=True) if a is not None and b is not None and a != b]
    if not odd:
        return pairs, []
    found = [pair for pair in pairs if pair not in odd]
    sends, receives = (
        [row for row in end.rows if row not in {pair[side] for pair in found}]
        for side, end in enumerate((send, receive))
    )
    for row in list(sends):
        other_row = next((one for one in receives if tag_of[receive.rank][one] == tag_of[send.rank][row]), None)
        if other_row is not None:
            found.append((row, other_row))
            sends.remove(row)
            receives.remove(other_row)
    return sorted(found), [pair for pair in odd if pair[0] in sends and pair[1] in receives]


def _end_in_order(end: _End, pairing: Pairing) -> None:
    """Mark all transfers before a finished one as done: transfers in one direction between two ranks end in order."""
    over = False
    for row in reversed(end.rows):
        if over and end.calls.state[row] < RETIRED:
            pairing.done.add((end.rank, row))
            pairing.alone.discard((end.rank, row))
        over = over or end.calls.state[row] == COMPLETED or (end.rank, row) in pairing.done


def _in_step(job: JobState, group: ProcessGroup, lists: Rows) -> bool:
    """Return whether equal p2p_seq_ids identify the two calls of one transfer.

    They count all P2P launches of a rank on the group. So they are equal only if no rank has two peers, and if both
    ranks launch in the same way. Calls that both ranks have show it. In a group of two without these calls it is
    assumed, because one rank may have finished all calls that are unfinished on the other.
    """
    peer_of: dict[int, int] = {}
    if any(peer_of.setdefault(rank, peer) != peer for _, rank, peer in lists):
        return False
    seen = False
    for (op, rank, peer), rows in lists.items():
        answers = lists.get(("recv", peer, rank), []) if op == "send" else []
        if not answers:
            continue
        one = {job.ranks[rank].calls.number[row] for row in rows}
        other = {job.ranks[peer].calls.number[row] for row in answers}
        low, high = max(min(one), min(other)), min(max(one), max(other))
        if any(low <= number <= high for number in one ^ other):
            return False
        seen = seen or not one.isdisjoint(other)
    return seen or len(group.ranks) == 2


def _by_number(send: _End, receive: _End, numbered: bool) -> Pairs:
    """Return pairs of rows with the same number. Calls before the first one of the other rank have no pair."""
    if numbered:  # comms files count the calls to that peer
        send.low = receive.low = max(min(end.numbers, default=0) for end in (send, receive))
    else:
        for end, other in ((send, receive), (receive, send)):
            if other.trace.dump.wrapped and other.rows:
                end.low = other.numbers[0] + 1
    answers: dict[int, list[int]] = defaultdict(list)
    for row, number in zip(receive.rows, receive.numbers, strict=True):
        answers[number].append(row)
    numbers = zip(send.rows, send.numbers, strict=True)
    return [(row, answers[number].pop(0)) for row, number in numbers if answers[number]]


def _from_the_end(send: _End, receive: _End, pairing: Pairing) -> Pairs:
    """Return pairs of unfinished rows in order; add rows that finished on the other rank to `pairing.done`."""
    # A rank that notices no ends has unfinished calls from before a finished collective: ignore these.
    sends, receives = ([row for row in end.open_rows if row >= end.blind_until] for end in (send, receive))
    # One rank may have noticed the end of a transfer that the other has not. If one rank has more unfinished calls,
    # skip those that it made before the other rank noticed ends.
    for own, theirs, end, other in ((sends, receives, send, receive), (receives, sends, receive, send)):
        surplus = len(own) - len(theirs)
        if surplus > 0:
            moment = end.calls.called[own[0]]
            states = ((other.calls.state[row], other.calls.ended[row]) for row in other.rows)
            del own[: min(surplus, sum(state >= RETIRED and at >= moment > 0 for state, at in states))]
    for end, rows in ((send, sends), (receive, receives)):
        pairing.done.update((end.rank, row) for row in set(end.open_rows).difference(rows))
    return list(zip(sends, receives))  # noqa: B905


def _same_size(send: CommRecord, receive: CommRecord) -> bool:
    given, taken = send.inputs or send.outputs, receive.outputs or receive.inputs
    are_equal = not given or not taken or sum(map(prod, given)) == sum(map(prod, taken))  # without shapes: unknown
    return are_equal and (send.dtype is None or receive.dtype is None or send.dtype == receive.dtype)


def content_text(job: JobState, call: CallId) -> str:
    """Return shapes and data type of a send or receive as text."""
    signature = job.signature(*call)
    sides = (signature.outputs, signature.inputs)[:: 1 if signature.op == "recv" else -1]
    shapes = " + ".join(str(list(shape)) for shape in sides[0] or sides[1])
    return f"{shapes} {signature.dtype or ''}".strip()
