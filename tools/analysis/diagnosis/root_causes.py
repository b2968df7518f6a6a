"""Find root causes among waiting ranks, and their consequences.

Each step of a `Search` explains some of the operations that ranks are stuck in:

* here: mismatched calls, operations that every member has reached, and cycles;
* in `absent_ranks`: ranks that do not wait, and ranks without evidence.

Every operation becomes one finding: a root, or a consequence of the root that its waits lead to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from crossrank.tools.analysis.diagnosis.call_history import (
    changes_tags_otherwise,
    first_in_program,
    has_skipped,
    is_new,
    is_usual,
    most_waiters_first,
)
from crossrank.tools.analysis.diagnosis.findings import (
    Finding,
    Place,
    call_text,
    error_text,
    group_text,
    rank_text,
    ranks_by,
)
from crossrank.tools.analysis.diagnosis.job_state import CLEARLY_STALE, JobState, ends_unknown, is_torchs_own
from crossrank.tools.analysis.diagnosis.mismatches import MISSING, Mismatch
from crossrank.tools.analysis.diagnosis.p2p import Pairing, content_text
from crossrank.tools.analysis.diagnosis.stacks import place_of_call
from crossrank.tools.analysis.diagnosis.states import is_moving
from crossrank.tools.analysis.diagnosis.wait_for_graph import StuckOp, WaitForGraph, strongly_connected_components
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.traces.rank_trace import STARTED

_MOST_PLACES = 4
"""Different calls of one collective that are shown if it is unknown which one is wrong."""
_SURE = 1_000_000_000
"""A rank counts as stuck if it waited for this many ns when its dump was written. For a process that ended with an
exception, any wait counts."""

_STOPPED = 2_000_000_000
"""A rank counts as stopped if its comms file ended this many ns before those of the waiting ranks."""

_ANSWERS = {"send": "recv", "recv": "send"}

_LAST = 1 << 63
"""Later than any time: the start of causes that no call shows."""


@dataclass
class Search:
    """The state of a job, and the causes that were found so far."""

    job: JobState
    graph: WaitForGraph
    pairing: Pairing
    lacking: dict[int, str]
    """Rank without usable evidence -> kind of the finding with the reason."""
    roots: list[Finding] = field(default_factory=list)
    consequences: list[Finding] = field(default_factory=list)
    in_progress: list[Finding] = field(default_factory=list)
    root_of: dict[StuckOp, int] = field(default_factory=dict)
    """Operation -> index of the root that explains it."""
    began: list[int] = field(default_factory=list)
    """Start of the effects of each root, in ns since 1970."""
    explained: set[int] = field(default_factory=set)
    """Ranks without evidence because a root ended them."""

    def left(self) -> list[StuckOp]:
        """Return the operations that no root explains yet."""
        return [op for op in self.graph.ops if op not in self.root_of]

    @cached_property
    def _idle(self) -> set[int]:
        unknown = {rank for rank in self.may_wait_otherwise - self._listening if not self.is_known(rank)}
        return self.job.ranks.keys() - self.graph.blocked.keys() - self.lacking.keys() - unknown

    def is_known(self, rank: int) -> bool:
        """Return whether a rank has answered what it does."""
        ending = self.job.ranks[rank].ending
        return ending.activity is not None or ending.seen is not None

    @cached_property
    def may_wait_otherwise(self) -> set[int]:
        """Return ranks with unfinished calls but no known wait for them. They may wait in an unrecorded way, such as
        polling whether a call has finished."""
        job = self.job
        return {rank for rank in job.ranks if job.open_rows[rank] and job.waits_for_none(rank)}

    @cached_property
    def _listening(self) -> set[int]:
        """Return those of them whose other threads wait for all of these calls."""
        job = self.job
        return {one for one in self.may_wait_otherwise if job.ranks[one].awaited.issuperset(job.open_rows[one])}

    @cached_property
    def waiting_unrecorded(self) -> set[int]:
        """Return ranks that wait outside of calls. Empty if they are few and all others are in calls: then they made a
        wrong turn."""
        found = {rank for rank in self._idle if self.job.waits_unrecorded(rank)}
        return set() if found == self._idle and len(found | self.lacking.keys()) * 2 < len(self.job.world) else found

    @property
    def silent(self) -> set[int]:
        """Return ranks with evidence that do not wait."""
        return self._idle - self.waiting_unrecorded

    @cached_property
    def may_wait_for_a_thread(self) -> dict[int, set[int]]:
        """Return silent rank -> the ranks that one of its threads receives from, if they are silent, missing, or in
        this result themselves.

        The main thread of the rank may wait for this thread in a lock, which the files do not show.
        """
        job, found = self.job, dict[int, set[int]]()
        silent = (self.silent - self._listening) | self.lacking.keys()
        listening = [rank for rank in self.silent & self._listening if not is_moving(job.ranks[rank])]
        for _ in listening:  # a chain of them has at most this length
            for rank in listening:
                ends = [(job.signature(rank, row).peer, job.group_at(rank, row)) for row in job.open_rows[rank]]
                # A receive from any source may be from any member.
                senders = {one for peer, group in ends for one in (group.ranks if peer is None else [peer])}
                if rank not in found and (those := (silent | found.keys()) & senders - {rank}):
                    found[rank] = those
        return found

    @cached_property
    def cancelled(self) -> bool:
        """Return whether several ranks were ended from outside, in a job in which no rank had ended or failed before.

        If only one rank was ended, it is the reason why the others fail. If communication failed first, this is the
        reason why the launcher ended the ranks.
        """
        endings = [one.ending for one in self.job.ranks.values()]
        terminated = [one.taken_at or _LAST for one in endings if one.was_terminated]
        several = len(terminated) > 1
        if several and any((one.taken_at or _LAST) < min(terminated) for one in endings if one.has_failed):
            return False
        return several and not any(one.ended_itself or one.unseen for one in endings)

    @cached_property
    def anyone_failed(self) -> bool:
        """Return whether the communication of a rank failed, as it does on gloo if a peer ends."""
        return any(one.ending.has_failed for one in self.job.ranks.values())

    @property
    def world(self) -> ProcessGroup:
        """Return the largest group, for findings without a group."""
        everyone = ProcessGroup(index=-1, name="", desc="", members=self.job.world, size=len(self.job.world))
        return max(self.job.groups, key=lambda group: (len(group.ranks), -group.index), default=everyone)

    def may_be_members(self, group: ProcessGroup) -> set[int]:
        """Return ranks that do not wait or have no evidence, and are not known members of a group."""
        return (self.silent | self.lacking.keys()) - set(group.ranks)

    def add_root(self, finding: Finding, ops: Iterable[StuckOp] = (), since: int | None = None) -> None:
        """Add a root cause that explains `ops`. It started at `since` (ns since 1970), or with the first of `ops`."""
        moments = [op.since for op in ops] + ([since] if since is not None else [])
        for op in ops:
            self.root_of.setdefault(op, len(self.roots))
        self.roots.append(finding)
        self.began.append(min(moments, default=_LAST))

    def by_most_waited_for(self, ranks: set[int]) -> Iterator[tuple[StuckOp, set[int]]]:
        """Yield (operation, the ranks of `ranks` that are missing in it).

        Starts with the operation that lacks most ranks that were not yielded before; if several lack the same ranks,
        with the first in the program. The caller must explain each operation.
        """
        met: set[int] = set()
        while lacking := {op: op.absent & ranks for op in self.left() if op.absent & ranks - met}:
            news = {op: absent - met for op, absent in lacking.items()}
            first = min(news, key=lambda op: (-len(news[op]), *most_waiters_first(op)))
            op = first_in_program(self.job, [op for op in news if news[op] == news[first]])
            met |= lacking[op]
            yield op, lacking[op]


def finding_on(group: ProcessGroup, kind: str, **facts: Any) -> Finding:
    return Finding(kind=kind, pg=group.pg, pg_ranks=list(group.ranks), **facts)


def finding_at(job: JobState, rank: int, row: int, kind: str, **facts: Any) -> Finding:
    """Return a finding about a collective that a rank made."""
    number, op = job.ranks[rank].calls.number[row], job.signature(rank, row).op
    return finding_on(job.group_at(rank, row), kind, collective_seq_id=number, op=op, **facts)


def finding_of(op: StuckOp, kind: str, *, culprits: Iterable[int] = (), **facts: Any) -> Finding:
    """Return a finding about a stuck operation. By default, all its ranks except the culprits wait."""
    number = "p2p_seq_id" if op.is_p2p else "collective_seq_id"
    waiting = sorted(set(op.waiting).difference(culprits))
    about = {number: op.seq, "op": op.op, "culprit_ranks": sorted(culprits), "waiting_ranks": waiting}
    return finding_on(op.group, kind, **about | facts)


# --- running calls ---------------------------------------------------------------------------------------------------


def set_aside_what_just_began(search: Search) -> None:
    """Set aside operations that started just before the dumps: they were running, not stuck."""
    for op in search.graph.ops:
        age = _age(search, op)
        if age is not None and age < _SURE:
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
    moments = [
        one.taken_at
        for one in awaited
        if one.taken_at is not None
        and (cancelled or not one.is_final)
        # If a comms file stopped growing, its rank died or was stopped.
        and not (one.unseen and one.taken_at < max(taken) - _STOPPED)
    ]
    longest = max(end - begin for end, begin in zip(taken, began, strict=True))
    return min([longest, *(moment - min(began) for moment in moments)])


# --- mismatched calls ------------------------------------------------------------------------------------------------


def find_misfits(search: Search, mismatches: list[Mismatch]) -> None:
    """Find collectives that ranks called differently. One mistake of a rank is one root, even in several groups."""
    job = search.job
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    aborted = {rank for rank in job.world if _may_be_aborted(job, rank)}
    for mismatch in sorted(mismatches, key=lambda one: (one.since, one.group.index)):
        group = mismatch.group
        behind_it = [op for op in search.left() if op.group is group and not op.is_p2p and op.seq >= mismatch.seq]
        stuck = {rank for op in behind_it for rank in op.waiting} - set(mismatch.culprits)
        # Operations that wait for a rank that never made the call would hang without the mismatch, too.
        on_gloo = all(job.ranks[rank].is_gloo(group.local_index.get(rank)) for rank in mismatch.ranks)
        gone = aborted.intersection(group.ranks).difference(mismatch.ranks) if on_gloo else set()
        runs_ahead = all(ends_unknown(job.ranks[rank]) for rank in mismatch.ranks)
        behind_it = [
            op
            for op in behind_it
            if runs_ahead or _has_more_calls(search, op, mismatch) or not op.absent & search.silent - gone
        ]
        about = {"collective_seq_id": mismatch.seq, "op": mismatch.op}
        culprits, text = list(mismatch.culprits or _raised_in(job, mismatch)), mismatch.text
        finding = finding_on(
            group,
            mismatch.kind,
            **about,
            culprit_ranks=culprits,
            waiting_ranks=sorted(stuck),
            text=text,
            proof="mismatch",
        )
        if not culprits:
            finding.places = _places_of_each_call(job, mismatch)
        same = known.get((mismatch.kind, mismatch.culprits)) if mismatch.culprits else None
        if same is not None:
            finding.because_of = same
            search.consequences.append(finding)
            search.root_of = dict.fromkeys(behind_it, same) | search.root_of
            continue
        root = known[mismatch.kind, mismatch.culprits] = len(search.roots)
        search.add_root(finding, behind_it, mismatch.since)
        if gone:
            search.explained |= gone
            why = "gloo aborts a process that receives more than it asked for"
            text = f"{rank_text(gone)} has no record of this call: {why}"
            follows = finding_on(group, "dump_missing", **about, waiting_ranks=sorted(gone), text=text, because_of=root)
            search.consequences.append(follows)


def _places_of_each_call(job: JobState, mismatch: Mismatch) -> list[Place]:
    """Return the source line of each different call, on its first rank: it is unknown which call is wrong."""
    first: dict[int, tuple[int, int]] = {}
    for rank, row in job.rows_of(mismatch.group, mismatch.seq):
        first.setdefault(job.ranks[rank].calls.signature[row], (rank, row))
    places = [place_of_call(job, *end, "member", "its call") for end in list(first.values())[:_MOST_PLACES]]
    return [place for place in places if place is not None]


def _has_more_calls(search: Search, op: StuckOp, mismatch: Mismatch) -> bool:
    """Return whether ranks with other calls wait in a call that the rest, which ended normally, never had to make."""
    traces = [search.job.ranks.get(rank) for rank in op.absent]
    ended_well = all(one is not None and one.ending.has_left and not one.ending.has_raised for one in traces)
    return ended_well and set(op.waiting) <= set(mismatch.culprits)


def _may_be_aborted(job: JobState, rank: int) -> bool:
    """Return whether gloo may have aborted a rank, as it does if a process receives more than it asked for."""
    trace = job.ranks.get(rank)
    return trace is None or trace.ending.unseen or trace.ending.reason == "SIGABRT"


def _raised_in(job: JobState, mismatch: Mismatch) -> tuple[int, ...]:
    """Return the ranks that their own exception ended in this call, unless there are many."""
    lanes = mismatch.group.lanes
    raised = [
        rank for rank in mismatch.ranks if job.ranks[rank].ending.has_raised and lanes[rank].numbers[-1] == mismatch.seq
    ]
    return tuple(raised) if len(raised) * 2 < len(mismatch.ranks) else ()


def find_unequal_pairs(search: Search) -> None:
    """Find pairs of sends and receives with different sizes or types."""
    job, blocked, seen = search.job, search.graph.blocked, set()
    for send, receive in search.pairing.sizes_differ:
        group, ends, ranks = job.group_at(*send), {"sender": send, "receiver": receive}, {send[0], receive[0]}
        if (pair := (group.index, *sorted(ranks))) in seen:
            continue  # the first mismatch of a pair of ranks may have shifted all later ones
        seen.add(pair)
        is_reached = any(blocked.get(rank, row + 1) <= row for rank, row in ends.values())
        places = [place_of_call(job, *end, role, "its call") for role, end in ends.items()]
        finding = finding_on(
            group,
            "p2p_size_mismatch",
            proof="mismatch",
            p2p_seq_id=job.ranks[send[0]].calls.number[send[1]],
            op="send",
            waiting_ranks=sorted({rank for rank, row in ends.values() if row in job.open_rows[rank]}),
            text=f"rank {send[0]} sends {content_text(job, send)}, "
            f"rank {receive[0]} receives {content_text(job, receive)}",
            places=[place for place in places if place is not None],
        )
        explained = [op for op in search.left() if is_reached and op.is_p2p and not ranks.isdisjoint(op.waiting)]
        search.add_root(finding, explained, job.moment(*send))


def find_unequal_tags(search: Search) -> None:
    """Find ranks that wait for each other in a send and a receive with different tags."""
    job, blocked = search.job, search.graph.blocked
    for send, receive in search.pairing.tags_differ:
        ranks = {send[0], receive[0]}
        ops = [op for op in search.left() if op.is_p2p and not ranks.isdisjoint(op.waiting)]
        if len(ranks) < 2 or not ops or any(blocked.get(rank) != row for rank, row in (send, receive)):
            continue
        ends = {"sender": send, "receiver": receive}
        places = [place_of_call(job, *end, role, "its call") for role, end in ends.items()]
        left_its_order = [rank for rank, row in (send, receive) if changes_tags_otherwise(job, rank, row)]
        odd = left_its_order if len(left_its_order) == 1 else []
        finding = finding_on(
            job.group_at(*send),
            "p2p_tag_mismatch",
            proof="mismatch",
            p2p_seq_id=job.ranks[send[0]].calls.number[send[1]],
            op="send",
            culprit_ranks=odd,
            waiting_ranks=sorted(ranks.difference(odd)),
            text=f"rank {send[0]} sends with tag {job.signature(*send).tag}, "
            f"rank {receive[0]} receives with tag {job.signature(*receive).tag}",
            places=[place for place in places if place is not None],
        )
        search.add_root(finding, ops, job.moment(*send))


# --- operations without missing ranks --------------------------------------------------------------------------------


def find_closed_ops(search: Search) -> None:
    """Find operations in which ranks are stuck although no rank is missing."""
    for op in search.left():
        if not op.awaited <= set(op.waiting):
            continue
        if op.absent and op.is_p2p:  # a call of one batch has no match in the other
            kind, proof = "p2p_unmatched", "deadlock"
            culprits = op.absent if len(op.absent) < len(op.waiting) else set()
            text = f"{rank_text(op.absent)} made no matching call"
        elif (op.unknown and not op.is_p2p) or (op.group.inferred and search.may_be_members(op.group)):
            continue
        else:
            kind, culprits, text = _why_closed(search, op)
            proof = "gone" if kind == MISSING and culprits else "late"
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
    if op.group.inferred:
        who = "all known ranks of this group made the call; the group may have other members"
    elif any(rank not in ranks for rank in op.group.ranks):
        who = "all ranks with a dump made the call"
    shows = "the dumps do not show which rank delays it"
    if all(search.job.held_in.get(rank) == graph.blocked[rank] for rank in waiting):
        shows = "their hosts are still in it: NCCL connects ranks in their first call"
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
        by_op: dict[StuckOp, list[int]] = defaultdict(list)
        for rank in cycle:
            by_op[graph.op_of[rank]].append(rank)
        ops = sorted(by_op, key=lambda op: (-len(by_op[op]), by_op[op]))
        p2p = [op for op in ops if op.is_p2p]
        op, text = ops[0], _chain(graph, cycle, edges)
        odd: list[int] = []
        skipped = {tuple(ranks): one for one in ops if (ranks := _skipped_by(search, one, cycle))}
        if len(skipped) == 1:  # if several ranks went past calls of others, each may be the first
            (those, op), *_ = skipped.items()
            odd = list(those)
            kind, stuck = "p2p_unmatched" if op.is_p2p else MISSING, op.waiting
            text = f"{rank_text(odd)} skipped it: {text}"
        elif len(p2p) == len(ops):
            kind, stuck, odd = "p2p_wait_cycle", cycle, _odd_in_cycle(search, cycle)
        elif all(_is_being_answered(search, one) for one in p2p):
            kind, odd = "opposite_order", _odd_in_order(cycle, ops)
            stuck = [rank for one in ops for rank in one.waiting]
        else:
            # Either the matching call is missing, or the collective. Without similar earlier calls it is unknown which.
            op, kind, stuck = p2p[0], "p2p_unmatched", [rank for one in p2p for rank in by_op[one]]
        waiting = sorted(set(stuck).difference(odd))
        search.add_root(finding_of(op, kind, culprits=odd, waiting_ranks=waiting, text=text, proof="deadlock"), ops)


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
    absent = op.awaited.intersection(cycle)
    peers = tuple(op.waiting) if op.is_p2p else ()
    blocked, answer = search.graph.blocked, _ANSWERS.get(op.op)
    skipped = all(has_skipped(search.job, rank, op.group, blocked[rank], peers, answer) for rank in absent)
    return sorted(absent) if skipped else []


def _odd_in_cycle(search: Search, cycle: list[int]) -> list[int]:
    """Return the ranks of a cycle of sends and receives that made an unusual call, if all others made usual calls."""
    job, blocked = search.job, search.graph.blocked
    odd = [rank for rank in cycle if is_new(job, rank, blocked[rank])]
    usual = [rank for rank in cycle if is_usual(job, rank, blocked[rank])]
    return odd if len(odd) + len(usual) == len(cycle) and len(odd) < len(usual) else []


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
            culprits=op.awaited.difference(op.waiting),
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
