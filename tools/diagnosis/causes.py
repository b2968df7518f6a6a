"""From who waits for whom to root causes and consequences.

Root causes, in the order in which they are looked for: calls that do not fit (`collectives`, sizes of `p2p`), calls
that every member has reached and that do not end, circles, ranks that stopped making calls, and ranks of which there
is no evidence. Each call that ranks are stuck in is one finding: a root, or a consequence of the root that its
waiting leads to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from crossrank.tools.diagnosis.collectives import EXTRA, MISSING, Mismatch
from crossrank.tools.diagnosis.evidence import RETIRED
from crossrank.tools.diagnosis.findings import Finding
from crossrank.tools.diagnosis.habits import has_skipped, is_usual
from crossrank.tools.diagnosis.job import Job, JobGroup
from crossrank.tools.diagnosis.p2p import Call, Pairing
from crossrank.tools.diagnosis.waiting import (
    Stall,
    Waiting,
    circles,
    grouped_by_stall,
    reports_starts,
    started,
)
from crossrank.tools.tables import rank_ranges

_SURE = 1_000_000_000
"""ns that a rank must have waited when its dump was taken, where the dump says when that was, to count as stuck. A
process that died of an exception was stuck however short that was."""


_CLEARLY_STALE = 3
"""Ends that a rank must have missed before its GPU or its watchdog is called stuck: the last one may be just late."""


@dataclass
class Causes:
    """Everything found, roots first."""

    roots: list[Finding] = field(default_factory=list)
    consequences: list[Finding] = field(default_factory=list)
    in_progress: list[Finding] = field(default_factory=list)


@dataclass
class _Search:
    """The state of one search for causes."""

    job: Job
    waiting: Waiting
    pairing: Pairing
    lacking: dict[int, str]
    """Rank without usable evidence -> kind of finding that says why."""
    found: Causes = field(default_factory=Causes)
    root_of: dict[int, int] = field(default_factory=dict)
    """id of a stall -> index of the root that explains it"""
    ranks_of_root: list[set[int]] = field(default_factory=list)
    told_lacking: set[int] = field(default_factory=set)


def find_causes(
    job: Job, waiting: Waiting, pairing: Pairing, mismatches: list[Mismatch], lacking: dict[int, str]
) -> Causes:
    """All findings about `job`. `lacking` has the ranks that cannot be judged and why."""
    search = _Search(job, waiting, pairing, lacking)
    _set_aside_what_just_began(search)
    _mismatches(search, mismatches)
    _unequal_pairs(search)
    _closed_stalls(search)
    _circles(search)
    _silent_ranks(search)
    _lacking_ranks(search)
    _consequences(search)
    return search.found


def _left(search: _Search) -> list[Stall]:
    return [stall for stall in search.waiting.stalls if id(stall) not in search.root_of]


def _add_root(search: _Search, finding: Finding, stalls: Iterable[Stall]) -> None:
    index = len(search.found.roots)
    search.found.roots.append(finding)
    search.ranks_of_root.append({*finding.culprit_ranks, *finding.waiting_ranks})
    for stall in stalls:
        search.root_of.setdefault(id(stall), index)


def _set_aside_what_just_began(search: _Search) -> None:
    """Where the dumps say when they were taken, a call that began just before is under way, not stuck."""
    job, waiting = search.job, search.waiting
    fresh = []
    for stall in waiting.stalls:
        ages = []
        for rank in stall.waiting:
            evidence = job.ranks[rank]
            if evidence.taken_at is None or evidence.error is not None:
                break
            ages.append(evidence.taken_at - evidence.calls.created[waiting.heads[rank].row])
        else:
            if max(ages) < _SURE:
                fresh.append(stall)
                search.found.in_progress.append(
                    _finding(stall, "in_progress", text=f"under way for {max(ages) / 1e6:.0f} ms when it was dumped")
                )
    for stall in fresh:
        waiting.stalls.remove(stall)
        for rank in stall.waiting:
            waiting.heads.pop(rank)
            waiting.stall_of.pop(rank)
            waiting.edges.pop(rank)


def _finding(stall: Stall, kind: str, *, culprits: Iterable[int] = (), text: str = "") -> Finding:
    culprit_ranks = sorted(culprits)
    return Finding(
        kind=kind,
        pg=stall.group.pg,
        pg_ranks=list(stall.group.ranks),
        collective_seq_id=None if stall.is_p2p else stall.seq,
        p2p_seq_id=stall.seq if stall.is_p2p else None,
        op=stall.op,
        culprit_ranks=culprit_ranks,
        waiting_ranks=sorted(set(stall.waiting) - set(culprit_ranks)),
        text=text,
    )


# --- calls that do not fit ---------------------------------------------------------------------------------------


def _mismatches(search: _Search, mismatches: list[Mismatch]) -> None:
    told: dict[tuple[str, tuple[int, ...]], int] = {}
    ordered = sorted(mismatches, key=lambda mismatch: (_when(search.job, mismatch), mismatch.group.index))
    for mismatch in ordered:
        group = mismatch.group
        behind_it = [
            stall for stall in _left(search) if stall.group is group and not stall.is_p2p and stall.seq >= mismatch.seq
        ]
        stuck = {rank for stall in behind_it for rank in stall.waiting} - set(mismatch.culprits)
        # What a rank that never made the call holds up would hang without the mismatch, too.
        behind_it = [stall for stall in behind_it if not stall.absent & _silent(search)]
        finding = Finding(
            kind=mismatch.kind,
            pg=group.pg,
            pg_ranks=list(group.ranks),
            collective_seq_id=mismatch.seq,
            op=mismatch.op,
            culprit_ranks=list(mismatch.culprits),
            waiting_ranks=sorted(stuck),
            text=_describe(mismatch),
        )
        same = told.get((mismatch.kind, mismatch.culprits)) if mismatch.culprits else None
        if same is not None:  # one mistake of one rank, in another of its groups
            finding.because_of = same
            search.found.consequences.append(finding)
            for stall in behind_it:
                search.root_of.setdefault(id(stall), same)
            continue
        told[mismatch.kind, mismatch.culprits] = len(search.found.roots)
        _add_root(search, finding, behind_it)


def _when(job: Job, mismatch: Mismatch) -> int:
    times = []
    for rank, lane in mismatch.group.lanes.items():
        row = lane.row(mismatch.seq)
        if row is not None:
            times.append(job.ranks[rank].calls.created[row])
    return min(times, default=0)


def _describe(mismatch: Mismatch) -> str:
    if mismatch.elements is not None:
        sent, received = mismatch.elements
        return f"the ranks send {sent} elements in all and expect {received}"
    if mismatch.kind == EXTRA:
        return (
            f"rank {rank_ranges(mismatch.culprits)} made this call and the others did not; their next calls fit again"
        )
    if mismatch.kind == MISSING:
        return f"rank {rank_ranges(mismatch.culprits)} left this call out; its next calls fit the others' again"
    by_call: dict[str, list[int]] = {}
    for rank, (op, elements, dtype, root, reduce) in mismatch.ranks.items():
        words = [op or "coalesced"]
        if elements is not None:
            words.append(f"of {elements} elements")
        words += [word for word in (dtype, reduce) if word]
        if root is not None:
            words.append(f"with root {root}")
        by_call.setdefault(" ".join(words), []).append(rank)
    parts = sorted(by_call.items(), key=lambda item: (-len(item[1]), item[1]))
    return "; ".join(f"rank {rank_ranges(ranks)}: {call}" for call, ranks in parts)


def _unequal_pairs(search: _Search) -> None:
    seen: set[tuple[int, int, int]] = set()
    for send, receive in search.pairing.sizes_differ:
        group = search.job.group_at(*send)
        ends = (group.index, *sorted((send[0], receive[0])))
        if ends in seen:  # the first one of a pair of ranks may have shifted all that follow
            continue
        seen.add((ends[0], ends[1], ends[2]))
        stalls = [stall for stall in _left(search) if stall.is_p2p and set(stall.waiting) & {send[0], receive[0]}]
        stalls = [stall for stall in stalls if _is_at(search.waiting, stall, send, receive)]
        calls = search.job.ranks[send[0]].calls
        _add_root(
            search,
            Finding(
                kind="p2p_size_mismatch",
                pg=group.pg,
                pg_ranks=list(group.ranks),
                p2p_seq_id=calls.seq[send[1]],
                op="send",
                waiting_ranks=sorted(
                    {rank for rank, row in (send, receive) if search.job.ranks[rank].calls.state[row] < RETIRED}
                ),
                text=f"rank {send[0]} sends {_content(search.job, send)}, "
                f"rank {receive[0]} receives {_content(search.job, receive)}",
            ),
            stalls,
        )


def _is_at(waiting: Waiting, stall: Stall, send: Call, receive: Call) -> bool:
    return any(rank in waiting.heads and waiting.heads[rank].row <= row for rank, row in (send, receive))


def _content(job: Job, call: Call) -> str:
    signature = job.signature(*call)
    shapes = signature.outputs or signature.inputs if signature.op == "recv" else signature.inputs or signature.outputs
    return f"{' + '.join(str(list(shape)) for shape in shapes)} {signature.dtype() or ''}".strip()


# --- calls that all have reached ---------------------------------------------------------------------------------


def _closed_stalls(search: _Search) -> None:
    for stall in _left(search):
        inside = stall.waits_for() <= set(stall.waiting)
        if inside and stall.absent and stall.is_p2p:  # two ends of a batch, one of which lacks an answer to the other
            culprits = stall.absent if len(stall.absent) < len(stall.waiting) else set()
            text = f"rank {rank_ranges(sorted(stall.absent))} made no call that answers one of the other's"
            finding = _finding(stall, "p2p_unmatched", culprits=culprits, text=text)
            _add_root(search, finding, [stall])
            continue
        if not inside or (stall.unknown and not stall.is_p2p) or _may_have_more_members(search, stall):
            continue
        kind, culprits_of, text = _why_closed(search, stall)
        _add_root(search, _finding(stall, kind, culprits=culprits_of, text=text), [stall])


def _may_have_more_members(search: _Search, stall: Stall) -> bool:
    """Whether a rank that stopped may be a member of a group whose members are only known from their calls."""
    return stall.group.inferred and bool(_silent(search) - set(stall.group.ranks))


def _why_closed(search: _Search, stall: Stall) -> tuple[str, list[int], str]:
    job, waiting = search.job, search.waiting
    on_gpu = all(job.ranks[rank].backend != "gloo" for rank in stall.waiting)
    if stall.passed and len(stall.waiting) * 2 < len(stall.group.ranks):
        through = rank_ranges(sorted(stall.passed))
        if on_gpu:
            return "not_completed", stall.waiting, f"rank {through} is through; the GPU of the others is stuck"
        return "not_completed", [], f"rank {through} is through"
    timed = [rank for rank in stall.waiting if reports_starts(job, rank)]
    idle = [rank for rank in timed if not started(job, rank, waiting.heads[rank].row)]
    if idle and len(idle) < len(timed):
        culprits = idle if len(idle) * 2 < len(stall.waiting) else []
        return "not_started", culprits, f"on rank {rank_ranges(idle)} it never began to run, on the others it did"
    stale = [rank for rank in stall.waiting if waiting.stale.get(rank, 0) >= _CLEARLY_STALE]
    if stale and len(stale) * 2 < len(stall.waiting):
        return (
            "not_completed",
            stale,
            f"rank {rank_ranges(stale)} goes on making calls, but notices no end of calls that are over on the others",
        )
    return "all_joined_not_completed", [], "every member made the call; the dumps do not show who holds it up"


# --- circles -----------------------------------------------------------------------------------------------------


def _circles(search: _Search) -> None:
    waiting = search.waiting
    edges = {
        rank: targets for rank, targets in waiting.edges.items() if id(waiting.stall_of[rank]) not in search.root_of
    }
    for circle in circles(edges):
        parts = grouped_by_stall(waiting, circle)
        explained = [stall for stall, _ in parts]
        skipped = next((found for stall in explained if (found := _skipped_by(search, stall, circle))[1]), None)
        if skipped is not None:
            stall, culprits = skipped
            kind = "p2p_unmatched" if stall.is_p2p else MISSING
            text = f"rank {rank_ranges(culprits)} went past it: {_chain(waiting, circle, edges)}"
            _add_root(search, _finding(stall, kind, culprits=culprits, text=text), explained)
            continue
        p2p = [(stall, ranks) for stall, ranks in parts if stall.is_p2p]
        stall = parts[0][0]
        odd: list[int] = []
        if not p2p:
            kind = "opposite_order"
            odd = _odd_in_order(waiting, circle, parts)
            stuck = [rank for other in explained for rank in other.waiting]
        elif len(p2p) == len(parts):
            kind, stuck = "p2p_wait_cycle", circle
        else:
            kind, stuck = "p2p_unmatched", [rank for _, ranks in p2p for rank in ranks]
            # Either the answer was left out, or the collective: without calls like these before, nobody can tell.
            stall = p2p[0][0]
        finding = _finding(stall, kind, culprits=odd, text=_chain(waiting, circle, edges))
        finding.waiting_ranks = sorted(set(stuck) - set(odd))
        _add_root(search, finding, explained)


def _skipped_by(search: _Search, stall: Stall, circle: list[int]) -> tuple[Stall, list[int]]:
    """The ranks of a circle that made another call where this one was due, if all that lack it did."""
    heads = search.waiting.heads
    absent = stall.waits_for() & set(circle)
    peers = tuple(stall.waiting) if stall.is_p2p else ()
    past = [rank for rank in absent if has_skipped(search.job, rank, stall.group, heads[rank].row, peers)]
    return stall, sorted(past) if len(past) == len(absent) else []


def _odd_in_order(waiting: Waiting, circle: list[int], parts: list[tuple[Stall, list[int]]]) -> list[int]:
    """Of a circle over groups, the ranks outside its largest part, if that is the majority of those concerned."""
    largest, inside = parts[0]
    concerned = {rank for stall, _ in parts for rank in stall.waiting}
    if len(largest.waiting) * 2 <= len(concerned):
        return []
    rest = {rank for rank in circle if rank not in inside}
    # One that waits only for others of the rest follows from them.
    return sorted(rank for rank in rest if not waiting.edges[rank] <= rest) or sorted(rest)


def _chain(waiting: Waiting, circle: list[int], edges: dict[int, set[int]]) -> str:
    """The circle in words, as a walk from its lowest rank."""
    inside = set(circle)
    walk, rank = [], circle[0]
    for _ in circle:
        target = min(edges[rank] & inside, default=None)
        if target is None:
            break
        stall = waiting.stall_of[rank]
        walk.append(f"rank {rank} waits for {target} in {name_of(stall.group)} {call_of(stall.op, stall.seq)}")
        if target == circle[0] or target not in edges:
            break
        rank = target
    more = len(circle) - len(walk)
    return "; ".join(walk[:8]) + (f"; … {more} more ranks" if more > 0 else "")


def name_of(group: JobGroup) -> str:
    """A group for people."""
    return f"{group.desc} ({group.name})" if group.desc and group.desc != group.name else group.name or "a group"


def call_of(op: str, seq: int | None) -> str:
    return f"{op} #{seq}" if seq is not None else op


# --- ranks that stopped ------------------------------------------------------------------------------------------


def _silent(search: _Search) -> set[int]:
    """Ranks with evidence that wait for nobody."""
    return {rank for rank in search.job.ranks if rank not in search.waiting.heads and rank not in search.lacking}


def _silent_ranks(search: _Search) -> None:
    """Ranks that wait for nobody and have not made the call that others wait in."""
    waiting = search.waiting
    silent = _silent(search)
    covered: set[int] = set()
    while True:
        candidates = [(stall, stall.absent & silent) for stall in _left(search)]
        candidates = [(stall, absent) for stall, absent in candidates if absent - covered]
        if not candidates:
            break
        stall, absent = min(
            candidates,
            key=lambda item: (
                -len(item[1] - covered),
                -len(item[0].waiting),
                item[0].is_p2p,
                item[0].since,
                item[0].group.index,
                item[0].seq,
            ),
        )
        covered |= absent
        if stall.is_p2p:
            text = f"rank {rank_ranges(sorted(absent))} made no call that answers it and waits for nothing itself"
            _add_root(search, _finding(stall, "p2p_unmatched", culprits=absent, text=text), [stall])
        elif _is_extra(search, stall, absent):
            culprits = sorted(stall.waiting)
            text = (
                f"rank {rank_ranges(culprits)} made this call alone; the {len(absent)} other members made none after "
                f"#{stall.seq - 1} and wait for nothing. If they should have made it, they are late"
            )
            finding = _finding(stall, EXTRA, culprits=culprits, text=text)
            finding.waiting_ranks = culprits
            _add_root(search, finding, [stall])
        else:
            stale = sorted(rank for rank in absent if waiting.stale.get(rank, 0) >= _CLEARLY_STALE)
            text = f"rank {rank_ranges(sorted(absent))} stopped making calls before it and waits for nobody"
            if stale:
                text += (
                    f"; rank {rank_ranges(stale)} also notices no end of calls that are over on the others: "
                    "its GPU or its watchdog is stuck"
                )
            _add_root(search, _finding(stall, MISSING, culprits=absent, text=text), [stall])


def _is_extra(search: _Search, stall: Stall, absent: set[int]) -> bool:
    """Whether the few that wait, not the many that are absent, are the odd ones."""
    group = stall.group
    if absent & search.waiting.stale.keys() or any(search.job.ranks[rank].active_only for rank in absent):
        return False
    everyone_else = absent == set(group.ranks) - set(stall.waiting)
    if not everyone_else or len(stall.waiting) * 2 >= len(group.ranks):
        return False
    heads = search.waiting.heads
    # The turn of this call has come on a rank whose calls have led to it before: then the others are late.
    return not any(is_usual(search.job, rank, heads[rank].row) for rank in stall.waiting)


def _lacking_ranks(search: _Search) -> None:
    """Ranks of which there is no evidence: named once, with the call in which most others wait for them."""
    lacking = search.lacking
    told = search.told_lacking
    while True:
        candidates = [
            (stall, {rank for rank in stall.absent if lacking.get(rank) and rank not in told})
            for stall in _left(search)
        ]
        candidates = [(stall, absent) for stall, absent in candidates if absent]
        if not candidates:
            break
        stall, absent = min(
            candidates,
            key=lambda item: (-len(item[1]), -len(item[0].waiting), item[0].is_p2p, item[0].since, item[0].group.index),
        )
        told |= absent
        first = True
        for kind in dict.fromkeys(lacking[rank] for rank in sorted(absent)):
            culprits = [rank for rank in absent if lacking[rank] == kind]
            text = f"rank {rank_ranges(culprits)} cannot be judged, and others wait for it here"
            _add_root(search, _finding(stall, kind, culprits=culprits, text=text), [stall] if first else [])
            first = False
    rest = sorted(rank for rank in lacking if rank not in told)
    world = max(search.job.groups, key=lambda group: (len(group.ranks), -group.index), default=None)
    for kind in dict.fromkeys(lacking[rank] for rank in rest):
        culprits = [rank for rank in rest if lacking[rank] == kind]
        search.found.roots.append(
            Finding(
                kind=kind,
                pg=world.pg if world is not None else ["", ""],
                pg_ranks=list(world.ranks) if world is not None else list(search.job.world),
                culprit_ranks=culprits,
                text=f"rank {rank_ranges(culprits)} cannot be judged; no other rank waits for it",
            )
        )
        search.ranks_of_root.append(set(culprits))


# --- what follows ------------------------------------------------------------------------------------------------


def _consequences(search: _Search) -> None:
    ordered = sorted(_left(search), key=lambda stall: (stall.since, stall.group.index, stall.seq, stall.waiting))
    unexplained = [stall for stall in ordered if _root_behind(search, stall) is None]
    if unexplained:  # something holds these up that the evidence does not show
        stall = max(unexplained, key=lambda stall: (len(stall.waiting), -stall.since, -stall.group.index))
        text = "the dumps do not show who holds it up"
        candidates = _silent(search) - set(stall.group.ranks) if stall.group.inferred else set()
        if candidates:
            text = (
                f"the members of the group are not known; rank {rank_ranges(sorted(candidates))} may be one, "
                "and waits for nobody"
            )
        elif stall.unknown:
            text = f"of rank {rank_ranges(sorted(stall.unknown))} it cannot be told whether it made the call"
        elif stall.waits_for():
            text = f"waits for rank {rank_ranges(sorted(stall.waits_for()))}, of which nothing more is known"
        _add_root(search, _finding(stall, _kind_of_consequence(stall), text=text), [stall])
    for stall in ordered:
        if id(stall) in search.root_of:
            continue
        finding = _finding(stall, _kind_of_consequence(stall), culprits=stall.waits_for() - set(stall.waiting))
        finding.because_of = _root_behind(search, stall)
        if finding.because_of is None:
            finding.because_of = len(search.found.roots) - 1
        targets = sorted(stall.waits_for() or stall.unknown)
        finding.text = f"waits for rank {rank_ranges(targets)}, which is stuck itself" if targets else ""
        search.found.consequences.append(finding)


def _kind_of_consequence(stall: Stall) -> str:
    if stall.is_p2p:
        return "p2p_unmatched" if stall.absent else "all_joined_not_completed"
    return MISSING if stall.absent else "all_joined_not_completed"


def _root_behind(search: _Search, stall: Stall) -> int | None:
    """The root that the waiting in this stall leads to: of those within reach, the nearest."""
    waiting = search.waiting
    seen = set(stall.waiting)
    front = set(stall.waits_for() or stall.unknown)
    if stall.group.inferred and not front:
        front = _silent(search) - set(stall.group.ranks)
    while front:
        reached = Counter[int]()
        for rank in front:
            for index, ranks in enumerate(search.ranks_of_root):
                if rank in ranks:
                    reached[index] += 1
        if reached:
            return min(reached, key=lambda index: (-reached[index], index))
        seen |= front
        front = {target for rank in front for target in waiting.edges.get(rank, ())} - seen
    return None
