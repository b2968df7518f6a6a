"""Find root causes among waiting ranks, and their consequences.

Each step of a `Search` explains some of the operations that ranks are stuck in:

* here: operations that every member has reached, and cycles;
* in `unequal_calls`: calls that cannot be one;
* in `absent_ranks`: ranks that do not wait, and ranks without evidence;
* in `outside_calls`: ranks that wait in something else than a call.

Every operation becomes one finding: a root, or a consequence of the root that its waits lead to.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import islice

from crossrank.comm import is_p2p
from crossrank.tools.analysis.diagnosis.call_history import (
    breaks_its_tags,
    changes_peer,
    has_skipped,
    is_from_elsewhere,
    is_new,
    is_out_of_turn,
    is_usual,
    leaves_its_period,
    unlike_the_rest,
)
from crossrank.tools.analysis.diagnosis.findings import (
    call_text,
    error_text,
    group_text,
    rank_text,
    ranks_by,
)
from crossrank.tools.analysis.diagnosis.job_state import CLEARLY_STALE, JobState, is_torchs_own
from crossrank.tools.analysis.diagnosis.mismatches import MISSING
from crossrank.tools.analysis.diagnosis.search import Search, finding_of
from crossrank.tools.analysis.diagnosis.states import may_wake, way_out
from crossrank.tools.analysis.diagnosis.wait_for_graph import StuckOp, WaitForGraph, strongly_connected_components
from crossrank.tools.traces.rank_trace import GLOO, STARTED

_SURE = 1_000_000_000
"""A rank counts as stuck if it waited for this many ns when its dump was written. For a process that ended with an
exception, any wait counts."""
_SURE_OF_CANCELLED = 2_500_000_000
"""The same in a cancelled job: a rank writes its dump up to a second after the signal, later on a busy machine."""

_STOPPED = 2_000_000_000
"""A rank counts as stopped if its comms file ended this many ns before those of the waiting ranks."""

_MOST_COMPARED = 32
"""Ranks of a cycle up to which the periods of their calls are compared."""

_LOOKED_BACK = 16
"""Receives before a call that are compared with it."""
_IN_ORDER = 4
"""Receives that a rank has waited for in order, from which on one that it left out counts."""

FAILED = "communicator_failed"

_ANSWERS = {"send": "recv", "recv": "send"}


# --- running calls ---------------------------------------------------------------------------------------------------


def set_aside_what_just_began(search: Search) -> None:
    """Set aside operations that started just before the dumps: they were running, not stuck."""
    # A rank without files may have ended the others, so it is not known whether the job was cancelled.
    is_cancelled = search.cancelled and len(search.job.ranks) == len(search.job.world)
    for op in search.graph.ops:
        age = _age(search, op)
        if age is not None and age < (_SURE_OF_CANCELLED if is_cancelled else _SURE):
            text = f"running for {max(age, 0) / 1e6:.0f} ms when its first rank wrote its dump"
            search.in_progress.append(finding_of(op, "in_progress", text=text))
            search.graph.set_aside(op)


def _age(search: Search, op: StuckOp) -> int | None:
    """Return for how many ns ranks have waited in a call; None if it is certain that it does not end.

    A wait is measured on the clock of the waiting rank, until its dump, or until its file was written if the dump has
    no time. Ranks are dumped one after the other, so an awaited rank may have made the call after its dump, unless it
    ended or hangs. In a cancelled job all ranks were ended from outside: its dumps count like those of a running job.
    """
    ranks = search.job.ranks
    waiting = [ranks[rank].ending for rank in op.waiting]
    awaited = [ranks[rank].ending for rank in op.awaited if rank in ranks]
    # When the first ranks of a cancelled job end, the communication of the others fails.
    cancelled = search.cancelled and len(awaited) == len(op.awaited)
    taken = [one.taken_by for one in waiting if one.taken_by is not None and (cancelled or not one.has_failed)]
    if len(taken) < len(waiting):
        return None
    over = all(one.is_gone for one in waiting)
    if any(one.has_left or (one.unseen and over) for one in awaited):
        return None
    began = [ranks[rank].calls.called[search.graph.blocked[rank]] for rank in op.waiting]
    # What another rank saw of an awaited one later than its dump is newer.
    moments = [
        max(one.taken_at, one.seen.time_ns if one.seen is not None else 0)
        for one in awaited
        if one.taken_at is not None
        and (cancelled or not one.is_final)
        # If a comms file stopped growing, its rank died or was stopped.
        and not (one.unseen and one.taken_at < max(taken) - _STOPPED)
    ]
    longest = max(end - begin for end, begin in zip(taken, began, strict=True))
    return min([longest, *(moment - min(began) for moment in moments)])


# --- operations without missing ranks --------------------------------------------------------------------------------


def find_closed_ops(search: Search) -> None:
    """Find operations in which ranks are stuck although no rank is missing."""
    for op in search.left():
        if not op.awaited <= set(op.waiting):
            continue
        if op.absent and op.is_p2p:  # a call of one batch has no match in the other
            free = any(
                way_out(search.job.ranks[rank].ending) or may_wake(search.job.ranks[rank].ending) for rank in op.absent
            )
            kind, proof = "p2p_unmatched", "late" if free else "deadlock"
            culprits = op.absent if len(op.absent) < len(op.waiting) else set()
            text = f"{rank_text(op.absent)} made no matching call"
        elif (op.unknown and not op.is_p2p) or (op.group.inferred and search.may_be_members(op.group)):
            continue
        else:
            kind, culprits, text = _why_closed(search, op)
            proof = "gone" if kind == FAILED or (kind == MISSING and culprits) else "late"
        search.add_root(finding_of(op, kind, culprits=culprits, text=text, proof=proof), [op])


def _why_closed(search: Search, op: StuckOp) -> tuple[str, set[int], str]:
    ranks, graph, waiting = search.job.ranks, search.graph, set(op.waiting)
    if gone := _gone_before_its_end(search, op):
        how = ranks_by({rank: error_text(ranks[rank].ending.error) or ranks[rank].ending.reason for rank in gone})
        texts = [
            f"{rank_text(those)} left the job ({why})" if why else f"{rank_text(those)} ended without an error message"
            for why, those in how.items()
        ]
        return MISSING, gone, f"all ranks made the call; {'; '.join(texts)} before it finished on the others"
    failed = {rank for rank in op.group.ranks if rank in ranks and op.group.pg[0] in ranks[rank].ending.failed_groups}
    if failed:
        culprits = failed if len(failed) < len(op.group.ranks) else set()
        return FAILED, culprits, f"all ranks made the call; the communicator has failed on {rank_text(failed)}"
    if op.passed and len(waiting) * 2 < len(op.group.ranks):
        if all("nccl" in ranks[rank].backend for rank in waiting):
            return (
                "not_completed",
                waiting,
                f"it finished on {rank_text(op.passed)}; the GPUs of the other ranks are stuck",
            )
        return "not_completed", set(), f"it finished on {rank_text(op.passed)}"
    timed = {rank for rank in waiting if any(ranks[rank].calls.began)}
    idle = {rank for rank in timed if not _has_started(search, rank)}
    if idle and len(idle) < len(timed):
        culprits = idle if len(idle) * 2 < len(waiting) else set()
        return "not_started", culprits, f"it never started on {rank_text(idle)}; it started on the other ranks"
    stale = {rank for rank in waiting if graph.missed_ends.get(rank, 0) >= CLEARLY_STALE}
    if stale and len(stale) * 2 < len(waiting):
        text = f"{rank_text(stale)} still makes calls, but has calls unfinished that finished on the other ranks"
        return "not_completed", stale, text
    who = "all ranks made the call"
    if op.group.inferred and op.group.size > len(op.group.ranks):
        here = rank_text(op.group.ranks)
        return MISSING, set(), f"{here} of the {op.group.size} ranks made the call; the others are unknown"
    if len(op.group.ranks) == 1 and search.job.ranks[min(waiting)].dump.of_log:
        who = "the log has no other rank of this group"
    elif op.group.inferred or search.job.ranks[min(waiting)].dump.of_log:
        who = "all known ranks of this group made the call; the group may have other members"
    elif any(rank not in ranks for rank in op.group.ranks):
        who = "all ranks with a dump made the call"
    shows = "the dumps do not show which rank delays it"
    if all(search.job.held_in.get(rank) == graph.blocked[rank] for rank in waiting):
        shows = "their hosts are still in it: NCCL connects ranks in their first call"
    elif all(ranks[rank].dump.of_log for rank in waiting):
        shows = (
            "a log cannot show which rank delays it: it has no peers and roots, and other ranks may have no log here"
        )
    elif all(is_torchs_own(ranks[rank]) for rank in waiting):
        shows = "torch's own dumps cannot show which rank delays it: they lack roots and ended processes"
    return "all_joined_not_completed", set(), f"{who}; {shows}"


def _gone_before_its_end(search: Search, op: StuckOp) -> set[int]:
    """Return ranks that made a call on NCCL and ended on their own while others still waited in it.

    Their launched work ended with them. On gloo, the calls of the others fail when a process ends.
    """
    ranks, blocked = search.job.ranks, search.graph.blocked
    # A comms file with later calls of a rank does not show whether this call finished there.
    gone = {
        rank
        for rank in {*op.waiting, *op.passed}
        if ranks[rank].ending.unseen
        or (ranks[rank].ending.has_left and (rank in blocked or _is_open(search, op, rank)))
    }
    # A rank that was terminated alone, long before the others waited; a user who gives up ends all ranks.
    seen = [ranks[rank].ending.taken_at or 0 for rank in op.waiting if not ranks[rank].ending.was_terminated]
    ended = {rank: ranks[rank].ending.taken_at or 0 for rank in op.waiting if ranks[rank].ending.was_terminated}
    gone |= {rank for rank, at in ended.items() if seen and at + _SURE < min(seen)}
    left_behind = set(op.waiting) - gone
    return gone if left_behind and all("nccl" in ranks[rank].backend for rank in left_behind) else set()


def _is_open(search: Search, op: StuckOp, rank: int) -> bool:
    """Return whether a rank's own call of a collective is unfinished."""
    lane = op.group.lanes.get(rank)
    return lane is not None and not op.is_p2p and lane.row(op.seq) in search.job.open_rows[rank]


def _has_started(search: Search, rank: int) -> bool:
    """Return whether the call that a rank is stuck in has started to run."""
    calls, row = search.job.ranks[rank].calls, search.graph.blocked[rank]
    return calls.state[row] == STARTED or calls.began[row] > 0


# --- ranks that wait for each other ----------------------------------------------------------------------------------


def find_cycles(search: Search) -> None:
    """Find ranks that wait for each other."""
    graph = search.graph
    edges = {rank: graph.targets(rank) for rank, op in graph.op_of.items() if op not in search.root_of}
    for cycle in strongly_connected_components(edges):
        if any(_has_another_sender(search, rank, cycle) for rank in cycle):
            continue
        by_op: dict[StuckOp, list[int]] = defaultdict(list)
        for rank in cycle:
            by_op[graph.op_of[rank]].append(rank)
        if any(_lacks_one_that_left(search, op, cycle) for op in by_op):
            continue
        ops = sorted(by_op, key=lambda op: (-len(by_op[op]), by_op[op]))
        p2p = [op for op in ops if op.is_p2p]
        op, text = ops[0], _chain(graph, cycle, edges)
        odd: list[int] = []
        skipped = {tuple(ranks): one for one in ops if (ranks := _skipped_by(search, one, cycle))}
        if len(skipped) == 1:  # if several ranks went past calls of others, each may be the first
            (those, op), *_ = skipped.items()
            odd = list(those)
            kind, stuck = "p2p_unmatched" if op.is_p2p else MISSING, op.waiting
            text = f"{rank_text(odd)} made another call where this one was due: {text}"
        elif len(p2p) == len(ops):
            kind, stuck, odd = "p2p_wait_cycle", cycle, _odd_in_cycle(search, cycle)
        elif all(_is_being_answered(search, one) for one in p2p):
            kind, odd = "opposite_order", _odd_in_order(cycle, ops) or _left_its_order(search, cycle)
            stuck = [rank for one in ops for rank in one.waiting]
        else:
            # Either the matching call is missing, or the collective. Without similar earlier calls it is unknown which.
            op, kind, stuck = p2p[0], "p2p_unmatched", [rank for one in p2p for rank in by_op[one]]
        if not odd:
            how = next(filter(None, (rule(search, cycle, ops) for rule in _RULES)), {})
            odd = sorted(how)
            text += "".join(f"; {how[rank]}" for rank in odd)
        proof = "deadlock"
        if ways := {rank: way for rank in cycle if (way := _way_out(search, rank))}:
            odd, proof = [], "not_known"
            text += "".join(f"; rank {rank} may still go on: {way}" for rank, way in ways.items())
        elif wakes := {rank: wake for rank in cycle if (wake := may_wake(search.job.ranks[rank].ending))}:
            proof = "late"
            text += "".join(f"; rank {rank} may go on if its other thread does: {wake}" for rank, wake in wakes.items())
        waiting = sorted(set(stuck).difference(odd))
        search.add_root(finding_of(op, kind, culprits=odd, waiting_ranks=waiting, text=text, proof=proof), ops)


def _lacks_one_that_left(search: Search, op: StuckOp, cycle: list[int]) -> bool:
    """Return whether a collective can end with no order of the calls in a cycle, as a member left before it."""
    endings = [search.job.ranks[rank].ending for rank in op.absent.difference(cycle) if rank in search.job.ranks]
    return not op.is_p2p and any(one.has_left and not one.has_failed for one in endings)


def _has_another_sender(search: Search, rank: int, cycle: list[int]) -> bool:
    """Return whether a rank of a cycle receives from any source, and a rank outside of the cycle may send."""
    row, op = search.graph.blocked[rank], search.graph.op_of[rank]
    signature = search.job.signature(rank, row)
    return is_p2p(signature) and signature.peer is None and not op.absent <= set(cycle)


def _way_out(search: Search, rank: int) -> str:
    """Return what may end the wait of a rank although it is in a cycle; empty if nothing is known to."""
    trace, blocked = search.job.ranks[rank], search.graph.blocked[rank]
    earlier = [
        row for row in search.job.open_rows[rank] if row < blocked and not is_p2p(search.job.signature(rank, row))
    ]
    if trace.backend == GLOO and earlier:  # the end of a call that it does not wait for may call a function
        return f"its {search.job.signature(rank, earlier[0]).op} has not finished"
    limited = {one.id for one in trace.ending.waits or () if one.limited}
    if trace.calls.id[blocked] in limited or search.graph.op_of[rank].group.name in trace.ending.limited_groups:
        return "its wait has a timeout"
    return way_out(trace.ending)


def _is_being_answered(search: Search, op: StuckOp) -> bool:
    """Return whether the other rank of each send or receive is launching the matching call: NCCL connects the two ranks
    there, and may wait for other work on the GPU."""
    for rank in op.waiting:
        other, row = search.pairing.partner.get((rank, search.graph.blocked[rank]), (rank, -1))
        trace = search.job.ranks[other]
        if row < 0 or trace.calls.id[row] not in trace.dump.launching:
            return False
    return True


def _skipped_by(search: Search, op: StuckOp, cycle: list[int]) -> list[int]:
    """Return the ranks of a cycle that made another call where this one was due, if all ranks without it did."""
    absent = sorted(op.awaited.intersection(cycle))
    peers = tuple(op.waiting) if op.is_p2p else ()
    job, blocked, answer = search.job, search.graph.blocked, _ANSWERS.get(op.op)
    skipped = [rank for rank in absent if has_skipped(job, rank, op.group, blocked[rank], peers, answer)]
    # A receive from any source lacks one message, of any of these ranks.
    any_source = op.is_p2p and any(job.signature(rank, blocked[rank]).peer is None for rank in op.waiting)
    return skipped if any_source or skipped == absent else []


def _odd_in_cycle(search: Search, cycle: list[int]) -> list[int]:
    """Return the ranks of a cycle of sends and receives that made an unusual call, if all others made usual calls."""
    job, blocked = search.job, search.graph.blocked
    odd = [rank for rank in cycle if is_new(job, rank, blocked[rank])]
    usual = [rank for rank in cycle if is_usual(job, rank, blocked[rank])]
    return odd if len(odd) + len(usual) == len(cycle) and len(odd) < len(usual) else []


def _left_its_order(search: Search, cycle: list[int]) -> list[int]:
    """Return the ranks of a cycle that made another call than usual where all others made their usual calls.

    Empty unless fewer ranks wait in their calls than in the others: a rank may also be ahead of one that is behind.
    """
    job, graph = search.job, search.graph
    ends = {rank: (job, rank, graph.blocked[rank]) for rank in cycle}
    odd = [rank for rank in cycle if not is_usual(*ends[rank])]
    unusual = [is_out_of_turn(*ends[rank]) or is_from_elsewhere(*ends[rank]) for rank in odd]
    with_odd = {rank for one in odd for rank in graph.op_of[one].waiting}
    with_others = {rank for one in set(cycle).difference(odd) for rank in graph.op_of[one].waiting}
    return odd if all(unusual) and len(with_odd) < len(with_others) and with_odd.isdisjoint(with_others) else []


def _with_another_peer(search: Search, cycle: list[int], ops: list[StuckOp]) -> dict[int, str]:
    changed = [rank for rank in cycle if changes_peer(search.job, rank, search.graph.blocked[rank])]
    how = {rank: f"the line of rank {rank} had another peer each time before" for rank in changed}
    return how if len(how) == 1 else {}


def _with_another_tag(search: Search, cycle: list[int], ops: list[StuckOp]) -> dict[int, str]:
    """The only rank of a cycle of sends and receives whose tag breaks the order of those before it."""
    if not all(op.is_p2p for op in ops):
        return {}
    found = {rank: breaks_its_tags(search.job, rank, search.graph.blocked[rank]) for rank in cycle}
    how = {rank: f"the tag of rank {rank} breaks the order of its tags before" for rank, odd in found.items() if odd}
    return how if len(how) == 1 and None not in found.values() else {}


def _came_from_elsewhere(search: Search, cycle: list[int], ops: list[StuckOp]) -> dict[int, str]:
    """The rank that made its call at another line than before, if ranks that are with it in the call, and all others,
    made their usual calls."""
    job, blocked = search.job, search.graph.blocked
    waiting = {rank for op in ops for rank in op.waiting}
    odd = [rank for rank in waiting if is_from_elsewhere(job, rank, blocked[rank])]
    usual = all(is_usual(job, rank, blocked[rank]) for rank in waiting.difference(odd))
    is_one = len(odd) == 1 and odd[0] in cycle and len(search.graph.op_of[odd[0]].waiting) > 1
    return {rank: f"rank {rank} made its call at another line than before" for rank in odd} if is_one and usual else {}


def _left_its_period(search: Search, cycle: list[int], ops: list[StuckOp]) -> dict[int, str]:
    """The ranks whose calls have left their period, if all other ranks of a cycle keep theirs. Only one in a cycle of
    sends and receives; in one of collectives, a minority, or half, that made its usual calls in another order."""
    of_pairs = all(op.is_p2p for op in ops)
    if len(cycle) > _MOST_COMPARED or any(op.is_p2p for op in ops) != of_pairs:
        return {}
    found = {rank: leaves_its_period(search.job, rank, search.graph.blocked[rank]) for rank in cycle}
    left = {rank: row for rank, row in found.items() if row is not None and row >= 0}
    how = {
        rank: f"in each round before, it made another call than {_made(search.job, rank, left[rank])}" for rank in left
    }
    if not of_pairs and any(is_new(search.job, rank, search.graph.blocked[rank]) for rank in left):
        return {}
    few = len(how) == 1 if of_pairs else 0 < len(how) * 2 <= len(cycle)
    return how if few and None not in found.values() else {}


def _unlike_most_ranks(search: Search, cycle: list[int], ops: list[StuckOp]) -> dict[int, str]:
    parts = unlike_the_rest(search.job, cycle)
    return {rank: f"most ranks made another call than {_made(search.job, rank, row)}" for rank, row in parts.items()}


def _waits_for_a_later_one(search: Search, cycle: list[int], ops: list[StuckOp]) -> dict[int, str]:
    """The only rank of a cycle that waits for a receive, and not for one that the same line posted before it."""
    job, blocked = search.job, search.graph.blocked
    if not all(op.is_p2p for op in ops):
        return {}
    skipped = {rank: row for rank in cycle if (row := _skipped_receive(search, rank, blocked[rank])) is not None}
    how = {rank: f"it has not waited for {_made(job, rank, row)}, which came before" for rank, row in skipped.items()}
    return how if len(how) == 1 else {}


def _skipped_receive(search: Search, rank: int, row: int) -> int | None:
    """Return the row of the receive from the same rank that the same line posted before, if the rank has not waited for
    it, as it did for each one earlier."""
    job, trace = search.job, search.job.ranks[rank]
    this = job.signature(rank, row)
    if this.op != "recv" or not this.source:
        return None
    before = (one for one in range(row - 1, -1, -1) if job.signature(rank, one).op == "recv")
    same = [
        one
        for one in islice(before, _LOOKED_BACK)
        if (job.signature(rank, one).peer, job.signature(rank, one).source) == (this.peer, this.source)
    ]
    is_skipped = len(same) > _IN_ORDER and same[0] not in trace.waited and trace.waited.issuperset(same[1:])
    return same[0] if is_skipped else None


_RULES = (
    _with_another_peer,
    _with_another_tag,
    _waits_for_a_later_one,
    _came_from_elsewhere,
    _left_its_period,
    _unlike_most_ranks,
)
"""Each returns who of a cycle is wrong, rank -> text, by what its calls were before or those of others are; empty if
that is unknown. The first that knows counts."""


def _made(job: JobState, rank: int, row: int) -> str:
    """Return a call that a rank made, as text."""
    call = job.signature(rank, row)
    where = f" ({call.source})" if call.source else ""
    number = job.ranks[rank].calls.number[row]
    return f"rank {rank}'s {call_text(call.op, number)} of {group_text(job.group_at(rank, row).pg)}{where}"


def _odd_in_order(cycle: list[int], ops: list[StuckOp]) -> list[int]:
    """Return the ranks with the rarer order in a cycle over groups, among the ranks that are in all of these groups."""
    both = set.intersection(*(set(op.group.ranks) for op in ops))
    votes = [len(both.intersection(op.waiting)) for op in ops]
    if max(votes) * 2 <= sum(votes):
        return []
    return sorted(both.intersection(cycle).difference(ops[votes.index(max(votes))].waiting))


def _chain(graph: WaitForGraph, cycle: list[int], edges: dict[int, set[int]]) -> str:
    """Return the cycle as text, starting with its lowest rank."""
    walk: list[str] = []
    rank = cycle[0]
    for _ in cycle:
        target, op = min(edges[rank].intersection(cycle)), graph.op_of[rank]
        walk.append(f"rank {rank} waits for {target} in {group_text(op.group.pg)} {call_text(op.op, op.seq)}")
        rank = target
        if rank == cycle[0]:
            break
    more = len(cycle) - len(walk)
    return "; ".join(walk[:8]) + (f"; … {more} more ranks" if more > 0 else "")


# --- the remaining operations ----------------------------------------------------------------------------------------


def explain_the_rest(search: Search) -> None:
    """Make every remaining operation a consequence. If some have no root, the largest of them becomes a root."""
    ordered = sorted(search.left(), key=lambda op: (op.since, op.group.index, op.seq, op.waiting))
    unexplained = [op for op in ordered if _root_behind(search, op) is None]
    if unexplained:  # the evidence does not show the cause
        op = min(unexplained, key=lambda op: (op.since, -len(op.waiting), op.group.index))
        text = "the dumps do not show which rank delays it"
        candidates = search.may_be_members(op.group) if op.group.inferred else set()
        if candidates:
            text = f"the members of the group are unknown; {rank_text(candidates)} may be one, and does not wait"
        elif op.unknown:
            text = f"it is unknown whether {rank_text(op.unknown)} made the call"
        elif op.awaited:
            text = f"waits for {rank_text(op.awaited)}, whose state is unknown"
        search.add_root(finding_of(op, _kind_of_rest(op), text=text, proof="not_known"), [op])
    for op in ordered:
        if op in search.root_of:
            continue
        targets, root = op.awaited or op.unknown, _root_behind(search, op)
        finding = finding_of(
            op,
            _kind_of_rest(op),
            awaited_ranks=sorted(op.awaited.difference(op.waiting)),
            text=f"waits for {rank_text(targets)}, which also waits" if targets else "",
            because_of=len(search.roots) - 1 if root is None else root,
        )
        search.consequences.append(finding)


def _kind_of_rest(op: StuckOp) -> str:
    if not op.absent:
        return "all_joined_not_completed"
    return "p2p_unmatched" if op.is_p2p else MISSING


def _root_behind(search: Search, op: StuckOp) -> int | None:
    """Return the nearest root that the waits in this operation lead to."""
    of_roots = [{*root.culprit_ranks, *root.waiting_ranks} for root in search.roots]
    seen, front = set(op.waiting), op.awaited or op.unknown
    if op.group.inferred and not front:
        front = search.may_be_members(op.group)
    while front:
        reached = [len(front & ranks) for ranks in of_roots]
        if any(reached):
            return reached.index(max(reached))
        seen |= front
        front = {target for rank in front for target in search.graph.targets(rank)} - seen
    return None
