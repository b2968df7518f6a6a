"""Who waits for whom: what each rank is stuck in, and where the waiting begins.

A rank's calls run in the order in which it made them, so it is stuck in the first that has not ended: its head. The
rank waits for the members of that call's group that have not made the call; where all have, for those that are stuck
in something earlier. Ranks that wait for nobody are where the waiting begins:

* a rank without a head, which has stopped making calls (or of which there is no dump);
* a call that every member has reached, and that does not end;
* ranks that wait for each other in a circle.

Everything else is a consequence. A call that is over on some rank although it ends on none before all have begun it
is over for everyone, whatever a rank's own dump says: dumps are taken at different moments, and the thread that
notices completions may be the one that hangs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from crossrank.comm import OPERATIONS, is_p2p
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.analysis.diagnosis.p2p import Pairing
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.traces.rank_trace import RETIRED, STARTED, RankTrace

_ENDS_LAST_ON_ROOT = ("gather", "reduce")
"""Operations that the other ranks may leave before the root has what it waits for."""

_LONG = 1_000_000_000
"""ns by which a member must be late, on a group whose calls do not keep others from going on, to count as stuck."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """The call that a rank is stuck in."""

    rank: int
    row: int
    group: ProcessGroup
    seq: int
    op: str
    peers: tuple[int, ...] = ()
    """Other ends of a P2P call, or of all calls of its batch; empty for a collective."""

    @property
    def is_p2p(self) -> bool:
        return bool(self.peers)


@dataclass
class Stall:
    """One call that ranks are stuck in."""

    group: ProcessGroup
    seq: int
    op: str
    is_p2p: bool
    waiting: list[int] = field(default_factory=list)
    """Ranks whose head it is."""
    absent: set[int] = field(default_factory=set)
    """Ranks that have not made the call, those without evidence included."""
    behind: set[int] = field(default_factory=set)
    """Ranks that have made it and are stuck in something before it."""
    passed: set[int] = field(default_factory=set)
    """Ranks that are through."""
    unknown: set[int] = field(default_factory=set)
    """Ranks of which it cannot be told whether they made it."""
    since: int = 0
    """ns since 1970 when the first rank began to wait."""

    def waits_for(self) -> set[int]:
        return self.absent or self.behind


@dataclass
class Waiting:
    """The whole picture."""

    heads: dict[int, Head]
    stalls: list[Stall]
    stall_of: dict[int, Stall]
    """Rank -> the stall of its head."""
    edges: dict[int, set[int]]
    """Waiting rank -> ranks it waits for."""
    stale: dict[int, int]
    """Rank -> number of calls whose end the other ranks have seen and it has not."""


def who_waits(job: JobState, pairing: Pairing) -> Waiting:
    """Find every rank's head and what it waits for."""
    released = job.over
    heads: dict[int, Head] = {}
    stale: dict[int, int] = {}
    for rank in job.ranks:
        head, missed = _head(job, rank, released, pairing)
        # gloo and comms files do not report ends, so nothing follows from one that is not there.
        if missed and job.ranks[rank].source == "flight" and job.ranks[rank].backend != "gloo":
            stale[rank] = missed
        if head is not None:
            heads[rank] = head
    stall_of = _stalls(job, heads, pairing)
    stalls = list({id(stall): stall for stall in stall_of.values()}.values())
    for rank, head in heads.items():
        if head.is_p2p:
            _place_peers(job, stall_of[rank], head, heads, pairing)
    for stall in stalls:
        if not stall.is_p2p:
            _place_members(job, stall, heads)
    edges = {rank: stall.waits_for() - {rank} for rank, stall in stall_of.items()}
    return Waiting(heads=heads, stalls=stalls, stall_of=stall_of, edges=edges, stale=stale)


def _stalls(job: JobState, heads: dict[int, Head], pairing: Pairing) -> dict[int, Stall]:
    """Heads that are one call: a collective by its number, sends and receives by what answers what."""
    by_call: dict[tuple[int, int], Stall] = {}
    stall_of: dict[int, Stall] = {}
    for rank, head in sorted(heads.items()):
        stall = None
        if head.is_p2p:
            for row in _rows_of(job, head):
                partner = pairing.partner.get((rank, row))
                other = heads.get(partner[0]) if partner is not None else None
                if partner is None or other is None or partner[1] not in _rows_of(job, other):
                    continue
                known = stall_of.get(other.rank)
                if known is not None and stall is not None and known is not stall:
                    for member in known.waiting:  # this head joins what were two
                        stall_of[member] = stall
                    stall.waiting += known.waiting
                    stall.since = min(stall.since, known.since)
                stall = stall or known
        else:
            stall = by_call.get((head.group.index, head.seq))
        created = job.moment(rank, head.row)
        if stall is None:
            stall = Stall(head.group, head.seq, head.op, head.is_p2p, since=created)
            if not head.is_p2p:
                by_call[head.group.index, head.seq] = stall
        stall.since = min(stall.since, created)
        stall.waiting.append(rank)
        stall_of[rank] = stall
    return stall_of


def _rows_of(job: JobState, head: Head) -> list[int]:
    """The rows of the launch that a P2P head is."""
    return [head.row] if job.ranks[head.rank].numbered_pairs else _batch(job, head.rank, head.row)


def _head(job: JobState, rank: int, released: dict[int, int], pairing: Pairing) -> tuple[Head | None, int]:
    """The head of a rank, and how many calls it has not seen the end of that are over."""
    if job.ranks[rank].ending.has_raised:
        return None, 0  # it is not in a call: it left
    row, missed = _first_open_row(job, rank, released, pairing)
    if row is None:
        row = _timed_out(job, rank)
    other = _held_elsewhere(job, rank)
    if other is not None and (row is None or other < row):
        row = other
    if row is None:
        return None, missed
    group, signature = job.group_at(rank, row), job.signature(rank, row)
    if _others_went_on(job, rank, row, group):
        return None, missed
    peers = _peers(job, rank, row, pairing) if is_p2p(signature) else ()
    seq = job.ranks[rank].calls.number[row]
    return Head(rank=rank, row=row, group=group, seq=seq, op=signature.op, peers=peers), missed


def _others_went_on(job: JobState, rank: int, row: int, group: ProcessGroup) -> bool:
    """Whether the last call in the unfinished file of a rank is not where it is stuck: the others are past it."""
    evidence = job.ranks[rank]
    if not evidence.ending.unseen or row != len(evidence.calls) - 1 or is_p2p(job.signature(rank, row)):
        return False
    signature = job.signature(rank, row)
    if signature.op in _ENDS_LAST_ON_ROOT and signature.root == rank:
        return False
    return any((job.enqueued(group, other) or 0) > evidence.calls.number[row] for other in group.ranks if other != rank)


def _first_open_row(job: JobState, rank: int, released: dict[int, int], pairing: Pairing) -> tuple[int | None, int]:
    """The first call that has not ended, and the number of those before it whose end only other ranks have seen.

    A send or receive that its rank did not wait for counts where nothing else is open.
    """
    evidence = job.ranks[rank]
    calls, mine = evidence.calls, job.group_of[rank]
    missed = 0
    unawaited: int | None = None
    for row, state in enumerate(calls.state):
        if state >= RETIRED:
            continue
        if is_p2p(job.signature(rank, row)):
            if (rank, row) in pairing.done:
                missed += 1
            elif row not in evidence.unawaited:
                return row, missed
            elif unawaited is None:
                unawaited = row
        elif calls.number[row] <= released[mine[calls.group[row]]]:
            missed += 1
        else:
            return row, missed
    return unawaited, missed


def _peers(job: JobState, rank: int, row: int, pairing: Pairing) -> tuple[int, ...]:
    """The other ends of the P2P launch at `row` that matter: those that have not answered, if there are any."""
    together = [row] if job.ranks[rank].numbered_pairs else _batch(job, rank, row)
    alone = [one for one in together if (rank, one) in pairing.alone]
    rows = alone or [one for one in together if (rank, one) not in pairing.done]
    peers = {job.signature(rank, one).peer for one in rows} - {None, rank}
    # To a receive from any source everyone else could send.
    return tuple(sorted(peer for peer in peers or job.group_at(rank, row).ranks if peer is not None and peer != rank))


def _timed_out(job: JobState, rank: int) -> int | None:
    """The last call of a rank, where it is done with it although it cannot have ended.

    gloo retires a call that timed out as it does one that ended. But no all_reduce ends without all of its members,
    and a process whose communication fails most often dies of its last call.
    """
    evidence = job.ranks[rank]
    row = len(evidence.calls) - 1
    if row < 0 or evidence.calls.state[row] != RETIRED:
        return None
    operation = OPERATIONS.get(job.signature(rank, row).op)
    if operation is None or operation.p2p:
        return None
    group, seq, created = job.group_at(rank, row), evidence.calls.number[row], evidence.calls.called[row]
    needs_all = operation.releases_all or evidence.ending.has_failed
    for other in group.ranks:
        enqueued = job.enqueued(group, other)
        if enqueued is None:
            if other not in job.ranks and evidence.ending.has_failed:
                return row
        elif needs_all and enqueued < seq and stays_away(job.ranks[other], created):
            return row
    return None


def _held_elsewhere(job: JobState, rank: int) -> int | None:
    """The first call in which a thread of a rank has long been waiting while other threads make calls on other groups.

    A comms file has no states, and only its last call looks open. But none that releases all is over while a member
    stays away from it.
    """
    evidence = job.ranks[rank]
    if evidence.source != "comms":
        return None
    last: dict[int, int] = {}
    for row, number in enumerate(evidence.calls.signature):
        operation = OPERATIONS.get(job.signatures[number].op)
        if operation is not None and operation.releases_all:
            last[evidence.calls.group[row]] = row
    return min((row for row in last.values() if _lacks_a_member(job, rank, row)), default=None)


def _lacks_a_member(job: JobState, rank: int, row: int) -> bool:
    """Whether a member goes on, or ended, without having made a call for long."""
    calls, group = job.ranks[rank].calls, job.group_at(rank, row)
    for other in group.ranks:
        enqueued, evidence = job.enqueued(group, other), job.ranks.get(other)
        if evidence is None or evidence.ending.taken_at is None or enqueued is None or enqueued >= calls.number[row]:
            continue
        if evidence.ending.taken_at - calls.called[row] > _LONG:
            return True
    return False


def stays_away(evidence: RankTrace, moment: int) -> bool:
    """Whether a rank had not done at `moment` (ns since 1970) either what it had not done when it was dumped."""
    taken_at = evidence.ending.taken_at
    return evidence.ending.is_final or evidence.ending.unseen or taken_at is None or taken_at >= moment


def _batch(job: JobState, rank: int, row: int) -> list[int]:
    """The rows of the P2P launch that `row` is part of."""
    calls = job.ranks[rank].calls
    rows = []
    for other in range(row, len(calls)):
        if calls.group[other] != calls.group[row] or calls.number[other] != calls.number[row]:
            break
        if not is_p2p(job.signature(rank, other)):
            break
        rows.append(other)
    return rows


def _place_members(job: JobState, stall: Stall, heads: dict[int, Head]) -> None:
    for rank in stall.group.ranks:
        evidence = job.ranks.get(rank)
        head = heads.get(rank)
        if head is not None and head.group is stall.group and not head.is_p2p and head.seq == stall.seq:
            continue
        if evidence is None:
            stall.absent.add(rank)
            continue
        enqueued = job.enqueued(stall.group, rank)
        if enqueued is None:
            # A dump of active calls has every call that is not over; so what is not in it was not made, unless a rank
            # may be through with it before the others are.
            operation = OPERATIONS.get(stall.op)
            surely = evidence.dump.active_only and operation is not None and operation.releases_all
            (stall.absent if surely else stall.unknown).add(rank)
        elif enqueued < stall.seq:
            stall.absent.add(rank)
        elif head is None or _is_before(job, stall, rank, head):
            stall.passed.add(rank)
        else:
            stall.behind.add(rank)


def _is_before(job: JobState, stall: Stall, rank: int, head: Head) -> bool:
    """Whether the rank is past the call of the stall already when it reaches its head."""
    lane = stall.group.lanes.get(rank)
    row = lane.row(stall.seq) if lane is not None else None
    # A call that is no longer among the open ones of an active dump is over.
    return row is None or row < head.row


def _place_peers(job: JobState, stall: Stall, head: Head, heads: dict[int, Head], pairing: Pairing) -> None:
    for row in _rows_of(job, head):
        call = (head.rank, row)
        if call in pairing.done:
            continue
        peer = job.signature(head.rank, row).peer
        if call in pairing.alone or peer is None or peer not in job.ranks:
            stall.absent.update([peer] if peer is not None else head.peers)
            continue
        partner = pairing.partner.get(call)
        of_peer = heads.get(peer)
        if partner is None or of_peer is None:
            continue
        same_launch = of_peer.is_p2p and job.ranks[peer].calls.number[partner[1]] == of_peer.seq
        if partner[1] == of_peer.row or (same_launch and job.group_at(*partner) is of_peer.group):
            continue
        if partner[1] > of_peer.row:
            stall.behind.add(peer)


def started(job: JobState, rank: int, row: int) -> bool:
    """Whether the call is known to have begun to run."""
    calls = job.ranks[rank].calls
    return calls.state[row] == STARTED or calls.began[row] > 0


def reports_starts(job: JobState, rank: int) -> bool:
    """Whether the rank's dump would say that a call has begun to run."""
    return any(job.ranks[rank].calls.began)


def circles(edges: dict[int, set[int]]) -> list[list[int]]:
    """Sets of ranks each of which waits, directly or through others, for all of its set (Tarjan's algorithm)."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    for start in sorted(edges):
        if start in order:
            continue
        work = [(start, iter(sorted(edges[start])))]
        order[start] = low[start] = len(order)
        stack.append(start)
        on_stack.add(start)
        while work:
            rank, targets = work[-1]
            for target in targets:
                if target not in edges:
                    continue
                if target not in order:
                    order[target] = low[target] = len(order)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(sorted(edges[target]))))
                    break
                if target in on_stack:
                    low[rank] = min(low[rank], order[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[rank])
                if low[rank] == order[rank]:
                    circle = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        circle.append(member)
                        if member == rank:
                            break
                    if len(circle) > 1:
                        found.append(sorted(circle))
    return found


def grouped_by_stall(waiting: Waiting, ranks: list[int]) -> list[tuple[Stall, list[int]]]:
    """The stalls that `ranks` are stuck in, that of most ranks first."""
    by_stall: dict[int, list[int]] = defaultdict(list)
    stalls: dict[int, Stall] = {}
    for rank in ranks:
        stall = waiting.stall_of[rank]
        stalls[id(stall)] = stall
        by_stall[id(stall)].append(rank)
    return sorted(
        ((stalls[key], members) for key, members in by_stall.items()), key=lambda item: (-len(item[1]), item[1])
    )
