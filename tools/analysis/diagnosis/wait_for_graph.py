"""The wait-for graph: the call in which each rank is stuck, and the ranks that it waits for.

The calls of a rank run in order, so it is stuck in its first unfinished call: its blocked call. It waits for the
members of the group that have not made this call; if all have, for those that are stuck in an earlier call. The waits
end at one of these causes:

* a rank without a blocked call, which has stopped making calls, or has no dump;
* a rank that waits on another thread than the one that makes its calls on the group;
* a call that every member has reached, and that does not end;
* ranks that wait for each other in a cycle.

Everything else is a consequence. If an operation releases all ranks together and finished on one rank, it finished on
all. A rank's own dump may still show it as unfinished: dumps are written at different times, and the thread that
notices ends may hang. On gloo, ends are noticed at once: a rank waits in its last gloo call if that is unfinished.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from crossrank.comm import OPERATIONS, is_p2p
from crossrank.tools.analysis.diagnosis.job_state import JobState, releases_all, reports_ends
from crossrank.tools.analysis.diagnosis.main_threads import is_users, joins
from crossrank.tools.analysis.diagnosis.p2p import Pairing
from crossrank.tools.analysis.diagnosis.states import is_moving
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.traces.ending import Ending
from crossrank.tools.traces.rank_trace import GLOO, RETIRED, Calls, RankTrace

_ENDS_LAST_ON_ROOT = ("gather", "reduce")
"""Operations that may end on other ranks before they end on the root."""

_LONG = 1_000_000_000
"""After this many ns, a rank counts as waiting in an unfinished call that other ranks may leave early."""


@dataclass(eq=False)
class StuckOp:
    """One operation that ranks are stuck in: a collective, or sends and receives that match each other."""

    group: ProcessGroup
    seq: int
    op: str
    is_p2p: bool
    since: int
    """Time at which the first rank started to wait, ns since 1970."""
    waiting: list[int] = field(default_factory=list)
    """Ranks whose blocked call it is."""
    absent: set[int] = field(default_factory=set)
    """Ranks that have not made the call, or ended while others were in it, including ranks without evidence."""
    free: set[int] = field(default_factory=set)
    """Those of them whose thread that calls on the group waits in no call: only other threads of the rank do."""
    behind: set[int] = field(default_factory=set)
    """Ranks that have made it and are stuck in an earlier call."""
    passed: set[int] = field(default_factory=set)
    """Ranks that have finished it."""
    unknown: set[int] = field(default_factory=set)
    """Ranks for which it is unknown whether they made it."""

    @property
    def awaited(self) -> set[int]:
        return self.absent or self.behind


@dataclass
class WaitForGraph:
    """The blocked calls and waits of all ranks."""

    blocked: dict[int, int]
    """Rank -> row of its blocked call; for a batch, the first row."""
    missed_ends: dict[int, int]
    """Rank -> number of calls whose end the other ranks noticed, but not this rank."""
    op_of: dict[int, StuckOp]
    """Rank -> operation that it is stuck in."""

    @property
    def ops(self) -> list[StuckOp]:
        return list(dict.fromkeys(self.op_of.values()))

    def targets(self, rank: int) -> set[int]:
        """Return the ranks that `rank` waits for, and that their own waits keep from making the call."""
        op = self.op_of.get(rank)
        return op.awaited - op.free - {rank} if op is not None else set()

    def set_aside(self, op: StuckOp) -> None:
        """Remove an operation in which no rank is stuck."""
        for rank in op.waiting:
            del self.blocked[rank], self.op_of[rank]


def wait_for_graph(job: JobState, pairing: Pairing) -> WaitForGraph:
    """Find every rank's blocked call and what it waits for."""
    blocked: dict[int, int] = {}
    missed_ends: dict[int, int] = {}
    has_ended_well = len(job.ranks) == len(job.world) and all(_has_ended_well(job, rank) for rank in job.ranks)
    for rank, trace in job.ranks.items() if not has_ended_well else ():
        if trace.ending.has_raised or is_moving(trace) or job.waits_for_none(rank):
            continue  # not in a call
        row, missed = _first_open_row(job, rank, pairing)
        if missed and reports_ends(trace):
            missed_ends[rank] = missed
        rows = (_timed_out(job, rank) if row is None else row, _held_elsewhere(job, rank))
        first = min((one for one in rows if one is not None), default=None)
        if first is not None and not _others_went_on(job, rank, first):
            blocked[rank] = first
    graph = _graph_of(job, blocked, missed_ends, pairing)
    # Another thread of a rank may make the calls that others wait for. Then its wait counts, not the one found above.
    there = {rank: op for op in graph.ops for rank in op.absent & blocked.keys()}
    of_callers = {rank: _row_of_caller(job.ranks[rank], op) for rank, op in there.items()}
    changed = {rank: row for rank, row in of_callers.items() if row is not None and row != blocked[rank]}
    return _graph_of(job, blocked | changed, missed_ends, pairing) if changed else graph


def _graph_of(job: JobState, blocked: dict[int, int], missed_ends: dict[int, int], pairing: Pairing) -> WaitForGraph:
    graph = WaitForGraph(blocked, missed_ends, _stuck_ops(job, blocked, pairing))
    for rank, op in graph.op_of.items():
        if op.is_p2p:
            _place_peers(job, graph, rank, pairing)
        elif rank == op.waiting[0]:
            _place_members(job, graph, op)
    for op in graph.ops:
        there = op.absent & blocked.keys()
        op.free = {rank for rank in there if _may_come_on_a_thread(job, rank, op)}
    return graph


def _row_of_caller(trace: RankTrace, op: StuckOp) -> int | None:
    """Return the row of the call that the thread of a rank waits for that calls on the group of `op`."""
    caller = trace.ending.caller(op.group.name, p2p=op.is_p2p)
    return trace.row_of_thread.get(caller.number or 0) if caller is not None else None


def _has_ended_well(job: JobState, rank: int) -> bool:
    """Return whether a rank ended by itself. The end of a host does not show that its GPU finished its last calls, but
    where torch records no ends, nothing else does."""
    trace = job.ranks[rank]
    shows_open = trace.backend != GLOO and not trace.dump.ends_frozen and bool(job.open_rows[rank])
    ending = trace.ending
    # torch may note the end of a host's last call, or its timeout, only after the recording has ended.
    has_stopped = trace.backend == GLOO and ending.reason == "disable" and ending.error is None and ending.waits == []
    went_on = ending.went_on and not shows_open
    return (ending.ended_well or went_on or has_stopped) and not _was_left_alone(job, rank)


def _was_left_alone(job: JobState, rank: int) -> bool:
    """Return whether a rank made one more call than all others, which have ended: a barrier at the end of its process.
    It has failed, and the script may have handled the error."""
    trace, row = job.ranks[rank], len(job.ranks[rank].calls) - 1
    if row < 0 or not trace.is_gloo(trace.calls.group[row]) or not job.releases_all[trace.calls.signature[row]]:
        return False
    members = job.all_enqueued[job.group_at(rank, row).index]
    return len(members) > 1 and all(
        one == rank
        or (last == trace.calls.number[row] - 1 and job.ranks[one].ending.ended_well and not job.ranks[one].filtered)
        for one, last in members.items()
    )


# --- blocked calls ---------------------------------------------------------------------------------------------------


def _first_open_row(job: JobState, rank: int, pairing: Pairing) -> tuple[int | None, int]:
    """Return (row of the first unfinished call, number of earlier calls whose end only other ranks noticed).

    A send or receive without a wait counts only if nothing else is unfinished. On gloo, hosts wait for calls, so only
    calls with known waits count, if there are any.
    """
    trace, own = job.ranks[rank], job.group_of[rank]
    calls, missed = trace.calls, 0
    awaited = trace.awaited if trace.backend == GLOO else set()
    unawaited: int | None = None
    for row in job.open_rows[rank]:
        p2p = is_p2p(job.signature(rank, row))
        over = (rank, row) in pairing.done if p2p else calls.number[row] <= job.over[own[calls.group[row]]]
        if over and not _waits_although_over(job, rank, row):
            missed += 1
        elif row in awaited or not (awaited or row in trace.unawaited):
            return row, missed
        elif unawaited is None:
            unawaited = row
    return unawaited, missed


def _waits_although_over(job: JobState, rank: int, row: int) -> bool:
    """Return whether a rank waits in a gloo collective that finished on other ranks, which left it early.

    gloo notices the end of calls at once, so a last call that stays unfinished for long did not finish on this rank.
    """
    trace = job.ranks[rank]
    called, ending = trace.calls.called[row], trace.ending
    return (
        trace.source == "flight"
        and row == len(trace.calls) - 1
        and trace.is_gloo(trace.calls.group[row])
        and job.releases_all[trace.calls.signature[row]]
        and ending.is_final
        and not ending.went_on
        and ending.taken_at is not None
        and ending.taken_at - called > _LONG
    )


def _others_went_on(job: JobState, rank: int, row: int) -> bool:
    """Return whether a rank is not stuck in the last call of its incomplete file, because the others continued."""
    trace, signature, group = job.ranks[rank], job.signature(rank, row), job.group_at(rank, row)
    if not trace.ending.unseen or row != len(trace.calls) - 1 or is_p2p(signature):
        return False
    if signature.op in _ENDS_LAST_ON_ROOT and signature.root == rank:
        return False
    return any((last or 0) > trace.calls.number[row] for last in job.all_enqueued[group.index].values())


def _timed_out(job: JobState, rank: int) -> int | None:
    """Return the last call of a rank, if gloo retired it although it did not finish.

    gloo retires a call that timed out like a finished one. But an all_reduce does not finish without all members, and a
    process whose communication fails usually ends because of its last call. A script that gives a group a shorter
    timeout handles its end.
    """
    trace = job.ranks[rank]
    row = len(trace.calls) - 1
    if row < 0 or trace.calls.state[row] != RETIRED:
        return None
    operation = OPERATIONS.get(job.signature(rank, row).op)
    if operation is None or operation.p2p:
        return None
    group, seq, called = job.group_at(rank, row), trace.calls.number[row], trace.calls.called[row]
    has_failed = trace.ending.has_failed
    needs_all = operation.releases_all or has_failed
    if job.made_by_all[group.index] >= seq or (group.name in trace.ending.limited_groups and not has_failed):
        return None
    for other, enqueued in job.all_enqueued[group.index].items():
        if enqueued is None:
            if other not in job.ranks and has_failed:
                return row
        elif needs_all and enqueued < seq and _stayed_away(job.ranks[other].ending, called):
            return row
    return None


def _stayed_away(ending: Ending, moment: int) -> bool:
    """Return whether a rank did nothing more between its dump and `moment` (ns since 1970)."""
    return ending.is_final or ending.unseen or ending.taken_at is None or ending.taken_at >= moment


def _held_elsewhere(job: JobState, rank: int) -> int | None:
    """Return the first call in which a thread of a rank waits while other threads make calls on other groups.

    A comms file has no states, so only its last call seems unfinished. But an operation that releases all ranks is
    unfinished if a member has not made it for long, and continued or ended.
    """
    trace = job.ranks[rank]
    if trace.source != "comms":
        return None
    calls = trace.calls
    signatures = enumerate(zip(calls.group, calls.signature, strict=True))
    last = {group: row for row, (group, signature) in signatures if job.releases_all[signature]}
    for row in sorted(last.values()):
        group = job.group_at(rank, row)
        if job.made_by_all[group.index] >= calls.number[row]:
            continue
        enqueued = job.all_enqueued[group.index].items()
        late = [other for other, last in enqueued if last is not None and last < calls.number[row]]
        if any((job.ranks[other].ending.taken_at or 0) - calls.called[row] > _LONG for other in late):
            return row
    return None


def _launch(job: JobState, rank: int, row: int) -> list[int]:
    """Return the rows of the sends and receives in the batch of `row`; empty for a collective."""
    trace = job.ranks[rank]
    calls, end = trace.calls, row
    most = row + 1 if trace.numbered_pairs else len(calls)
    while end < most and is_p2p(job.signature(rank, end)) and _went_out_together(calls, row, end):
        end += 1
    return list(range(row, end))


def _went_out_together(calls: Calls, row: int, other: int) -> bool:
    return calls.group[row] == calls.group[other] and calls.number[row] == calls.number[other]


# --- stuck operations and awaited ranks ------------------------------------------------------------------------------


def _stuck_ops(job: JobState, blocked: dict[int, int], pairing: Pairing) -> dict[int, StuckOp]:
    """Join blocked calls to operations: collectives by number, sends and receives by their pairs."""
    open_p2p = {(rank, one) for rank, row in blocked.items() for one in _launch(job, rank, row)}
    answers: dict[int, set[int]] = {rank: set() for rank, _ in open_p2p}
    for end in open_p2p:
        partner = pairing.partner.get(end)
        if partner in open_p2p:
            answers[end[0]].add(partner[0])
    first_of = {rank: ranks[0] for ranks in strongly_connected_components(answers) for rank in ranks}
    ops: dict[tuple[int, int], StuckOp] = {}
    op_of: dict[int, StuckOp] = {}
    for rank, row in sorted(blocked.items()):
        group, signature, called = job.group_at(rank, row), job.signature(rank, row), job.moment(rank, row)
        seq, p2p = job.ranks[rank].calls.number[row], is_p2p(signature)
        key = (-1, first_of.get(rank, rank)) if p2p else (group.index, seq)
        op = op_of[rank] = ops.setdefault(key, StuckOp(group, seq, signature.op, p2p, called))
        op.since = min(op.since, called)
        op.waiting.append(rank)
    return op_of


def _place_members(job: JobState, graph: WaitForGraph, op: StuckOp) -> None:
    for rank in op.group.ranks:
        if graph.op_of.get(rank) is op:
            continue
        enqueued = job.enqueued(op.group, rank)
        if rank not in job.ranks:
            op.absent.add(rank)
        elif enqueued is None:
            # A dump of active calls has every unfinished call. A call that it lacks was not made, unless a rank may
            # leave it before the others.
            surely = job.ranks[rank].dump.active_only and releases_all(op.op)
            (op.absent if surely else op.unknown).add(rank)
        elif enqueued < op.seq:
            op.absent.add(rank)
        else:
            lane, blocked = op.group.lanes.get(rank), graph.blocked.get(rank)
            row = lane.row(op.seq) if lane is not None else None
            # A call that an active dump no longer has is finished.
            passed = blocked is None or row is None or row < blocked
            (op.passed if passed else op.behind).add(rank)
            if passed and row is not None and _left_others_behind(job, graph, op, (rank, row)):
                op.absent.add(rank)


def _left_others_behind(job: JobState, graph: WaitForGraph, op: StuckOp, end: tuple[int, int]) -> bool:
    """Return whether a rank, with its call at `end`, saw the operation end and left while others still waited in it."""
    rank, row = end
    trace = job.ranks[rank]
    left = trace.ending.is_gone and not trace.ending.has_failed and trace.calls.state[row] >= RETIRED
    return left and all(_waits_although_over(job, other, graph.blocked[other]) for other in op.waiting)


def _place_peers(job: JobState, graph: WaitForGraph, rank: int, pairing: Pairing) -> None:
    op = graph.op_of[rank]
    for row in _launch(job, rank, graph.blocked[rank]):
        end, peer = (rank, row), job.signature(rank, row).peer
        if end in pairing.done:
            continue
        if peer is None:  # a receive from any source: every other member may send
            op.absent |= {*op.group.ranks} - {rank}
        elif end in pairing.alone or peer not in job.ranks:
            op.absent.add(peer)
        else:
            partner, theirs = pairing.partner.get(end), graph.blocked.get(peer)
            if partner is None or theirs is None or partner[1] <= theirs:
                continue
            is_p2p_too = is_p2p(job.signature(peer, theirs))
            if not (is_p2p_too and _went_out_together(job.ranks[peer].calls, theirs, partner[1])):
                op.behind.add(peer)


def _may_come_on_a_thread(job: JobState, rank: int, op: StuckOp) -> bool:
    """Return whether a rank may still make the call of `op` although it waits: on the thread that makes its calls on
    that group, while another thread waits. With NCCL, where hosts do not wait, a thread with an unfinished call counts
    as one that waits. A thread without a line of the user is one of a pool or of torch: it works for another one."""
    trace, ending = job.ranks[rank], job.ranks[rank].ending
    caller = ending.caller(op.group.name, p2p=op.is_p2p)
    waiting: set[int | None] = {one.number for one in ending.waits or ()}
    if trace.backend != GLOO:
        waiting |= {ending.callers.get(job.group_at(rank, row).name) for row in job.open_rows[rank]}
    if caller is None or not waiting or caller.number in waiting or joins(caller):
        return False
    return any(map(is_users, caller.frames))


def strongly_connected_components(edges: Mapping[int, Collection[int]]) -> list[list[int]]:
    """Return the strongly connected sets of more than one rank (Kosaraju's algorithm)."""
    backwards: dict[int, list[int]] = {rank: [] for rank in edges}
    for rank, targets in edges.items():
        for target in targets:
            if target in edges:
                backwards[target].append(rank)
    finished = [rank for ranks in _walks(sorted(edges), edges) for rank in ranks]
    found = [sorted(ranks) for ranks in _walks(reversed(finished), backwards) if len(ranks) > 1]
    return found[::-1]


def _walks(starts: Iterable[int], edges: Mapping[int, Collection[int]]) -> Iterator[list[int]]:
    """Yield the newly reached ranks of a depth-first search from each start, in postorder."""
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
