"""From who waits for whom to root causes and consequences.

Root causes, in the order in which they are looked for: calls that do not fit (here), calls that every member has
reached and circles (`deadlocks`), ranks that stopped making calls and ranks of which there is no evidence
(`absences`). Each call that ranks are stuck in is one finding: a root, or a consequence of the root that its waiting
leads to (`consequences`).
"""

from __future__ import annotations

from crossrank.tools.diagnosis.absences import find_lacking_ranks, find_silent_ranks, find_stale_ranks
from crossrank.tools.diagnosis.collectives import EXTRA, MISSING, Mismatch
from crossrank.tools.diagnosis.consequences import explain_the_rest
from crossrank.tools.diagnosis.deadlocks import find_circles, find_closed_stalls
from crossrank.tools.diagnosis.evidence import RETIRED
from crossrank.tools.diagnosis.findings import Finding
from crossrank.tools.diagnosis.job import Job
from crossrank.tools.diagnosis.p2p import Call, Pairing
from crossrank.tools.diagnosis.search import Causes, Search, finding_of
from crossrank.tools.diagnosis.waiting import Stall, Waiting
from crossrank.tools.tables import rank_ranges

_SURE = 1_000_000_000
"""ns that a rank must have waited when its dump was taken, where the dump says when that was, to count as stuck. A
process that died of an exception was stuck however short that was."""


def find_causes(
    job: Job, waiting: Waiting, pairing: Pairing, mismatches: list[Mismatch], lacking: dict[int, str]
) -> Causes:
    """All findings about `job`. `lacking` has the ranks that cannot be judged and why."""
    search = Search(job, waiting, pairing, lacking)
    _set_aside_what_just_began(search)
    _mismatches(search, mismatches)
    _unequal_pairs(search)
    find_closed_stalls(search)
    find_circles(search)
    find_silent_ranks(search)
    find_stale_ranks(search)
    find_lacking_ranks(search)
    explain_the_rest(search)
    return search.found


def _set_aside_what_just_began(search: Search) -> None:
    """Where the dumps say when they were taken, a call that began just before is under way, not stuck."""
    job, waiting = search.job, search.waiting
    fresh = []
    for stall in waiting.stalls:
        taken = [job.ranks[rank].taken_at for rank in stall.waiting]
        if None in taken or any(job.ranks[rank].error is not None for rank in stall.waiting):
            continue
        # Ranks are dumped one after the other: what one had not done by then it may have done since.
        others = [job.ranks[rank].taken_at for rank in stall.waits_for() if rank in job.ranks]
        earliest = min(moment for moment in [*taken, *others] if moment is not None)
        age = earliest - min(job.ranks[rank].calls.created[waiting.heads[rank].row] for rank in stall.waiting)
        if age < _SURE:
            fresh.append(stall)
            text = f"under way for {max(age, 0) / 1e6:.0f} ms when the first of its ranks was dumped"
            search.found.in_progress.append(finding_of(stall, "in_progress", text=text))
    for stall in fresh:
        waiting.stalls.remove(stall)
        for rank in stall.waiting:
            waiting.heads.pop(rank)
            waiting.stall_of.pop(rank)
            waiting.edges.pop(rank)


def _mismatches(search: Search, mismatches: list[Mismatch]) -> None:
    told: dict[tuple[str, tuple[int, ...]], int] = {}
    silent = search.silent()
    ordered = sorted(mismatches, key=lambda mismatch: (_when(search.job, mismatch), mismatch.group.index))
    for mismatch in ordered:
        group = mismatch.group
        behind_it = [
            stall for stall in search.left() if stall.group is group and not stall.is_p2p and stall.seq >= mismatch.seq
        ]
        stuck = {rank for stall in behind_it for rank in stall.waiting} - set(mismatch.culprits)
        # What a rank that never made the call holds up would hang without the mismatch, too.
        behind_it = [stall for stall in behind_it if not stall.absent & silent]
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
        search.add_root(finding, behind_it)


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


def _unequal_pairs(search: Search) -> None:
    seen: set[tuple[int, int, int]] = set()
    for send, receive in search.pairing.sizes_differ:
        group = search.job.group_at(*send)
        ends = (group.index, *sorted((send[0], receive[0])))
        if ends in seen:  # the first one of a pair of ranks may have shifted all that follow
            continue
        seen.add((ends[0], ends[1], ends[2]))
        stalls = [stall for stall in search.left() if stall.is_p2p and set(stall.waiting) & {send[0], receive[0]}]
        stalls = [stall for stall in stalls if _is_at(search.waiting, stall, send, receive)]
        calls = search.job.ranks[send[0]].calls
        search.add_root(
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
