"""Who waits for whom: what each rank is stuck in, and where the waiting begins.

A rank's calls run in the order in which it made them, so it is stuck in the first that has not ended: its blocked
call. The rank waits for the members of that call's group that have not made the call; where all have, for those that
are stuck in something earlier. Ranks that wait for nobody are where the waiting begins:

* a rank without a blocked call, which has stopped making calls (or of which there is no dump);
* a call that every member has reached, and that does not end;
* ranks that wait for each other in a cycle.

Everything else is a consequence. A call that is over on some rank although it ends on none before all have begun it
is over for everyone, whatever a rank's own dump says: dumps are taken at different moments, and the thread that
notices completions may be the one that hangs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from crossrank.comm import OPERATIONS, is_p2p
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.analysis.diagnosis.p2p import Pairing
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.traces.rank_trace import RETIRED, RankTrace

_ENDS_LAST_ON_ROOT = ("gather", "reduce")
"""Operations that the other ranks may leave before the root has what it waits for."""

_LONG = 1_000_000_000
"""ns by which a member must be late, on a group whose calls do not keep others from going on, to count as stuck."""


@dataclass(frozen=True, kw_only=True)
class BlockedCall:
    """The call that a rank is stuck in."""

    row: int
    group: ProcessGroup
    seq: int
    op: str
    launch: list[int] = field(default_factory=list)
    """Rows of all sends and receives that went out with it; empty for a collective."""
    peers: tuple[int, ...] = ()
    """Other ends of those that have not been answered; empty for a collective."""

    @property
    def is_p2p(self) -> bool:
        return bool(self.peers)


@dataclass(eq=False)
class StuckOp:
    """One operation that ranks are stuck in: a collective, or sends and receives that answer each other."""

    group: ProcessGroup
    seq: int
    op: str
    is_p2p: bool
    since: int
    """ns since 1970 when the first rank began to wait."""
    waiting: list[int] = field(default_factory=list)
    """Ranks whose blocked call it is."""
    absent: set[int] = field(default_factory=set)
    """Ranks that have not made the call, those without evidence included."""
    behind: set[int] = field(default_factory=set)
    """Ranks that have made it and are stuck in something before it."""
    passed: set[int] = field(default_factory=set)
    """Ranks that are through."""
    unknown: set[int] = field(default_factory=set)
    """Ranks that may or may not have made it."""

    @property
    def awaited(self) -> set[int]:
        return self.absent or self.behind


@dataclass
class WaitForGraph:
    """The whole picture."""

    blocked: dict[int, BlockedCall]
    op_of: dict[int, StuckOp]
    """Rank -> what it is stuck in."""
    missed_ends: dict[int, int]
    """Rank -> number of calls whose end the other ranks have seen and it has not."""

    @property
    def ops(self) -> list[StuckOp]:
        return list(dict.fromkeys(self.op_of.values()))

    def targets(self, rank: int) -> set[int]:
        """The ranks that `rank` waits for."""
        return self.op_of[rank].awaited - {rank} if rank in self.op_of else set()

    def set_aside(self, op: StuckOp) -> None:
        """Take it for a call that nobody is stuck in."""
        for rank in op.waiting:
            del self.blocked[rank], self.op_of[rank]


def wait_for_graph(job: JobState, pairing: Pairing) -> WaitForGraph:
    """Find every rank's blocked call and what it waits for."""
    blocked: dict[int, BlockedCall] = {}
    missed_ends: dict[int, int] = {}
    for rank, trace in job.ranks.items():
        call, missed = _blocked_call(job, rank, pairing)
        # gloo and comms files do not report ends, so nothing follows from one that is not there.
        if missed and trace.source == "flight" and trace.backend != "gloo":
            missed_ends[rank] = missed
        if call is not None:
            blocked[rank] = call
    graph = WaitForGraph(blocked, _stuck_ops(job, blocked, pairing), missed_ends)
    for rank, op in graph.op_of.items():
        if op.is_p2p:
            _place_peers(job, graph, rank, pairing)
        elif rank == op.waiting[0]:
            _place_members(job, graph, op)
    return graph


# --- what a rank is stuck in -----------------------------------------------------------------------------------------


def _blocked_call(job: JobState, rank: int, pairing: Pairing) -> tuple[BlockedCall | None, int]:
    """The blocked call of a rank, and how many calls that are over it has not seen the end of."""
    trace = job.ranks[rank]
    if trace.ending.has_raised:
        return None, 0  # it is not in a call: it left
    row, missed = _first_open_row(job, rank, pairing)
    if row is None:
        row = _timed_out(job, rank)
    rows = [one for one in (row, _held_elsewhere(job, rank)) if one is not None]
    if not rows or _others_went_on(job, rank, min(rows)):
        return None, missed
    row = min(rows)
    launch: list[int] = []
    peers: tuple[int, ...] = ()
    group, signature = job.group_at(rank, row), job.signature(rank, row)
    if is_p2p(signature):
        launch = [row] if trace.numbered_pairs else _launch(job, rank, row)
        peers = _peers(job, rank, launch, pairing)
    number = trace.calls.number[row]
    return BlockedCall(row=row, group=group, seq=number, op=signature.op, launch=launch, peers=peers), missed


def _first_open_row(job: JobState, rank: int, pairing: Pairing) -> tuple[int | None, int]:
    """The first call that has not ended, and the number of those before it whose end only other ranks have seen.

    A send or receive that its rank did not wait for counts where nothing else is open.
    """
    trace, own = job.ranks[rank], job.group_of[rank]
    calls, missed = trace.calls, 0
    unawaited: int | None = None
    for row in job.open_rows[rank]:
        if is_p2p(job.signature(rank, row)):
            if (rank, row) in pairing.done:
                missed += 1
            elif row not in trace.unawaited:
                return row, missed
            elif unawaited is None:
                unawaited = row
        elif calls.number[row] <= job.over[own[calls.group[row]]]:
            missed += 1
        else:
            return row, missed
    return unawaited, missed


def _others_went_on(job: JobState, rank: int, row: int) -> bool:
    """Whether the last call in the unfinished file of a rank is not where it is stuck: the others are past it."""
    trace, signature, group = job.ranks[rank], job.signature(rank, row), job.group_at(rank, row)
    if not trace.ending.unseen or row != len(trace.calls) - 1 or is_p2p(signature):
        return False
    if signature.op in _ENDS_LAST_ON_ROOT and signature.root == rank:
        return False
    return any((job.enqueued(group, other) or 0) > trace.calls.number[row] for other in group.ranks if other != rank)


def _timed_out(job: JobState, rank: int) -> int | None:
    """The last call of a rank, where it is done with it although it has not ended.

    gloo retires a call that timed out as it does one that ended. But no all_reduce ends without all of its members,
    and a process whose communication fails most often dies of its last call.
    """
    trace = job.ranks[rank]
    row = len(trace.calls) - 1
    if row < 0 or trace.calls.state[row] != RETIRED:
        return None
    operation = OPERATIONS.get(job.signature(rank, row).op)
    if operation is None or operation.p2p:
        return None
    group, seq, called = job.group_at(rank, row), trace.calls.number[row], trace.calls.called[row]
    needs_all = operation.releases_all or trace.ending.has_failed
    for other in group.ranks:
        enqueued = job.enqueued(group, other)
        if enqueued is None:
            if other not in job.ranks and trace.ending.has_failed:
                return row
        elif needs_all and enqueued < seq and _stayed_away(job.ranks[other], called):
            return row
    return None


def _stayed_away(trace: RankTrace, moment: int) -> bool:
    """Whether a rank had not done at `moment` (ns since 1970) either what it had not done when it was dumped."""
    taken_at = trace.ending.taken_at
    return trace.ending.is_final or trace.ending.unseen or taken_at is None or taken_at >= moment


def _held_elsewhere(job: JobState, rank: int) -> int | None:
    """The first call in which a thread of a rank has long been waiting while other threads make calls on other groups.

    A comms file has no states, and only its last call looks open. But none that releases all is over while a member
    stays away from it.
    """
    trace = job.ranks[rank]
    if trace.source != "comms":
        return None
    last = {
        group: row
        for row, (group, number) in enumerate(zip(trace.calls.group, trace.calls.signature, strict=True))
        if job.releases_all[number]
    }
    return min((row for row in last.values() if _lacks_a_member(job, rank, row)), default=None)


def _lacks_a_member(job: JobState, rank: int, row: int) -> bool:
    """Whether a member goes on, or ended, without having made a call for long."""
    calls, group = job.ranks[rank].calls, job.group_at(rank, row)
    enqueued = {other: job.enqueued(group, other) for other in group.ranks}
    late = [other for other, last in enqueued.items() if last is not None and last < calls.number[row]]
    return any((job.ranks[other].ending.taken_at or 0) - calls.called[row] > _LONG for other in late)


def _launch(job: JobState, rank: int, row: int) -> list[int]:
    """The rows of the P2P launch that begins at `row`."""
    calls = job.ranks[rank].calls
    same = (calls.group[row], calls.number[row])
    end = row
    while end < len(calls) and (calls.group[end], calls.number[end]) == same and is_p2p(job.signature(rank, end)):
        end += 1
    return list(range(row, end))


def _peers(job: JobState, rank: int, launch: list[int], pairing: Pairing) -> tuple[int, ...]:
    """The other ends of a P2P launch that matter: those that have not answered, if there are any."""
    alone = [row for row in launch if (rank, row) in pairing.alone]
    rows = alone or [row for row in launch if (rank, row) not in pairing.done]
    peers = {peer for row in rows if (peer := job.signature(rank, row).peer) is not None and peer != rank}
    # To a receive from any source everyone else could send.
    return tuple(sorted(peers or {peer for peer in job.group_at(rank, launch[0]).ranks if peer != rank}))


# --- who is stuck in the same, and whom they wait for ----------------------------------------------------------------


def _stuck_ops(job: JobState, blocked: dict[int, BlockedCall], pairing: Pairing) -> dict[int, StuckOp]:
    """Blocked calls that are one operation: a collective by its number, sends and receives by what answers what."""
    open_p2p = {(rank, row) for rank, call in blocked.items() if call.is_p2p for row in call.launch}
    answers: dict[int, set[int]] = {rank: set() for rank, _ in open_p2p}
    for end in open_p2p:
        partner = pairing.partner.get(end)
        if partner in open_p2p:
            answers[end[0]].add(partner[0])
    first_of = {rank: ranks[0] for ranks in strongly_connected_components(answers) for rank in ranks}
    ops: dict[tuple[int, int], StuckOp] = {}
    op_of: dict[int, StuckOp] = {}
    for rank, call in sorted(blocked.items()):
        called = job.moment(rank, call.row)
        key = (-1, first_of.get(rank, rank)) if call.is_p2p else (call.group.index, call.seq)
        op = op_of[rank] = ops.setdefault(key, StuckOp(call.group, call.seq, call.op, call.is_p2p, called))
        op.since = min(op.since, called)
        op.waiting.append(rank)
    return op_of


def _place_members(job: JobState, graph: WaitForGraph, op: StuckOp) -> None:
    for rank in op.group.ranks:
        if graph.op_of.get(rank) is op:
            continue
        trace, call = job.ranks.get(rank), graph.blocked.get(rank)
        if trace is None:
            op.absent.add(rank)
            continue
        enqueued = job.enqueued(op.group, rank)
        if enqueued is None:
            # A dump of active calls has every call that is not over; so what is not in it was not made, unless a rank
            # may be through with it before the others are.
            operation = OPERATIONS.get(op.op)
            surely = trace.dump.active_only and operation is not None and operation.releases_all
            (op.absent if surely else op.unknown).add(rank)
        elif enqueued < op.seq:
            op.absent.add(rank)
        else:
            lane = op.group.lanes.get(rank)
            row = lane.row(op.seq) if lane is not None else None
            # A call that is no longer among the open ones of an active dump is over.
            (op.passed if call is None or row is None or row < call.row else op.behind).add(rank)


def _place_peers(job: JobState, graph: WaitForGraph, rank: int, pairing: Pairing) -> None:
    op, call = graph.op_of[rank], graph.blocked[rank]
    for row in call.launch:
        end, peer = (rank, row), job.signature(rank, row).peer
        if end in pairing.done:
            continue
        if end in pairing.alone or peer is None or peer not in job.ranks:
            op.absent.update([peer] if peer is not None else call.peers)
            continue
        partner, other = pairing.partner.get(end), graph.blocked.get(peer)
        if partner is None or other is None or partner[1] <= other.row:
            continue
        same_number = other.is_p2p and job.ranks[peer].calls.number[partner[1]] == other.seq
        if not same_number or job.group_at(*partner) is not other.group:
            op.behind.add(peer)


def strongly_connected_components(edges: Mapping[int, Collection[int]]) -> list[list[int]]:
    """Sets of ranks each of which reaches all others of its set, of more than one rank (Kosaraju's algorithm)."""
    backwards: dict[int, list[int]] = {rank: [] for rank in edges}
    for rank, targets in edges.items():
        for target in targets:
            if target in edges:
                backwards[target].append(rank)
    finished = [rank for ranks in _walks(sorted(edges), edges) for rank in ranks]
    found = [sorted(ranks) for ranks in _walks(reversed(finished), backwards) if len(ranks) > 1]
    return found[::-1]


def _walks(starts: Iterable[int], edges: Mapping[int, Collection[int]]) -> Iterator[list[int]]:
    """From each start what no walk before has reached, each rank after those that are reached from it."""
    seen: set[int] = set()
    for start in starts:
        reached: list[int] = []
        path = [(start, iter(edges[start]))] if start not in seen else []
        seen.add(start)
        while path:
            rank, targets = path[-1]
            target = next((one for one in targets if one in edges and one not in seen), None)
            if target is None:
                reached.append(rank)
                path.pop()
            else:
                seen.add(target)
                path.append((target, iter(edges[target])))
        yield reached
