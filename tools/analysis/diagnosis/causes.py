"""From who waits for whom to root causes and consequences.

Root causes, in the order in which they are looked for: calls that do not fit (here), calls that every member has
reached and circles (`deadlocks`), ranks that stopped making calls and ranks of which there is no evidence
(`absences`). Each call that ranks are stuck in is one finding: a root, or a consequence of the root that its waiting
leads to (`consequences`).
"""

from __future__ import annotations

from crossrank.text import rank_ranges
from crossrank.tools.analysis.diagnosis.absences import (
    find_lacking_ranks,
    find_raised_exceptions,
    find_silent_ranks,
    find_stale_ranks,
    find_unended_calls,
    find_unrecorded_waits,
)
from crossrank.tools.analysis.diagnosis.collectives import EXTRA, MISSING, Mismatch
from crossrank.tools.analysis.diagnosis.consequences import explain_the_rest
from crossrank.tools.analysis.diagnosis.deadlocks import find_circles, find_closed_stalls
from crossrank.tools.analysis.diagnosis.findings import Finding
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.analysis.diagnosis.p2p import Call, Pairing
from crossrank.tools.analysis.diagnosis.places import place_of_call
from crossrank.tools.analysis.diagnosis.search import Causes, Search, finding_of, was_cancelled
from crossrank.tools.analysis.diagnosis.waiting import Stall, Waiting
from crossrank.tools.traces.rank_trace import RETIRED

_SURE = 1_000_000_000
"""ns that a rank must have waited when its dump was taken, where the dump says when that was, to count as stuck. A
process that died of an exception was stuck however short that was."""

_STOPPED = 2_000_000_000
"""ns by which a comms file must have stopped growing before those of the ranks that wait."""


def find_causes(
    job: JobState, waiting: Waiting, pairing: Pairing, mismatches: list[Mismatch], lacking: dict[int, str]
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
    find_unrecorded_waits(search)
    find_lacking_ranks(search)
    explain_the_rest(search)
    find_raised_exceptions(search)
    find_unended_calls(search)
    _put_in_order(search)
    return search.found


def _put_in_order(search: Search) -> None:
    """The root that showed first comes first: a fault is sooner the cause of a later one than the other way round."""
    order = sorted(range(len(search.found.roots)), key=search.began.__getitem__)
    search.found.roots = [search.found.roots[index] for index in order]
    places = {old: new for new, old in enumerate(order)}
    for finding in search.found.consequences:
        if finding.because_of is not None:
            finding.because_of = places[finding.because_of]


def _set_aside_what_just_began(search: Search) -> None:
    """Where the dumps say when they were taken, a call that began just before is under way, not stuck."""
    waiting = search.waiting
    fresh = []
    for stall in waiting.stalls:
        age = _age(search, stall)
        if age is not None and age < _SURE:
            fresh.append(stall)
            text = f"under way for {max(age, 0) / 1e6:.0f} ms when the first of its ranks was dumped"
            search.found.in_progress.append(finding_of(stall, "in_progress", text=text))
    for stall in fresh:
        waiting.stalls.remove(stall)
        for rank in stall.waiting:
            waiting.heads.pop(rank)
            waiting.stall_of.pop(rank)
            waiting.edges.pop(rank)


def _age(search: Search, stall: Stall) -> int | None:
    """For how many ns ranks are known to have waited in a call; None where it is sure that it does not end.

    A wait is measured on the clock of the rank that waits. Ranks are dumped one after the other, so what a rank that
    is waited for had not done by its dump it may have done since; but not where it is gone, or hangs itself. Of a
    cancelled job everyone is gone, and nobody by its own doing: there the dumps count like those of a running job.
    """
    ranks, heads = search.job.ranks, search.waiting.heads
    waiting = {rank: ranks[rank] for rank in stall.waiting}
    awaited = [ranks[rank] for rank in stall.waits_for() if rank in ranks]
    # The first ranks of a cancelled job to end make the communication of the others fail, however healthy it was.
    cancelled = was_cancelled(search.job) and len(awaited) == len(stall.waits_for())
    if any(one.ending.taken_at is None or (one.ending.has_failed and not cancelled) for one in waiting.values()):
        return None
    over = all(one.ending.is_gone for one in waiting.values())
    if any(one.ending.has_left or (one.ending.unseen and over) for one in awaited):
        return None
    began = {rank: one.calls.called[heads[rank].row] for rank, one in waiting.items()}
    ages = [(one.ending.taken_at or 0) - began[rank] for rank, one in waiting.items()]
    first = min(began.values())
    latest = max(one.ending.taken_at or 0 for one in waiting.values())
    moments = [
        one.ending.taken_at
        for one in awaited
        if one.ending.taken_at is not None
        and (cancelled or not one.ending.is_final)
        # A comms file that stopped growing is that of a rank that died, or that was stopped.
        and not (one.ending.unseen and one.ending.taken_at < latest - _STOPPED)
    ]
    return min([max(ages), *(moment - first for moment in moments)])


def _mismatches(search: Search, mismatches: list[Mismatch]) -> None:
    told: dict[tuple[str, tuple[int, ...]], int] = {}
    silent = search.silent()
    aborted = {rank for rank in search.job.world if _may_be_aborted(search.job, rank)}
    ordered = sorted(mismatches, key=lambda mismatch: (_when(search.job, mismatch), mismatch.group.index))
    for mismatch in ordered:
        group = mismatch.group
        behind_it = [
            stall for stall in search.left() if stall.group is group and not stall.is_p2p and stall.seq >= mismatch.seq
        ]
        stuck = {rank for stall in behind_it for rank in stall.waiting} - set(mismatch.culprits)
        # What a rank that never made the call holds up would hang without the mismatch, too.
        on_gloo = all(search.job.ranks[rank].is_gloo(group.local_index.get(rank)) for rank in mismatch.ranks)
        gone = aborted.intersection(group.ranks) - mismatch.ranks.keys() if on_gloo else set()
        behind_it = [stall for stall in behind_it if not stall.absent & silent - gone]
        culprits = mismatch.culprits or _raised_in(search.job, mismatch)
        finding = Finding(
            kind=mismatch.kind,
            pg=group.pg,
            pg_ranks=list(group.ranks),
            collective_seq_id=mismatch.seq,
            op=mismatch.op,
            culprit_ranks=list(culprits),
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
        search.add_root(finding, behind_it, _when(search.job, mismatch))
        if gone:
            search.explained |= gone
            search.found.consequences.append(_aborted(finding, gone, len(search.found.roots) - 1))


def _may_be_aborted(job: JobState, rank: int) -> bool:
    """Whether a rank may have ended without a word: gloo aborts a process that is sent more than it asked for."""
    evidence = job.ranks.get(rank)
    return evidence is None or evidence.ending.unseen or evidence.ending.reason == "SIGABRT"


def _aborted(mismatch: Finding, gone: set[int], root: int) -> Finding:
    return Finding(
        kind="dump_missing",
        pg=mismatch.pg,
        pg_ranks=mismatch.pg_ranks,
        collective_seq_id=mismatch.collective_seq_id,
        op=mismatch.op,
        waiting_ranks=sorted(gone),
        text=f"rank {rank_ranges(sorted(gone))} left nothing of this call: gloo aborts a process that is sent more "
        "than it asked for",
        because_of=root,
    )


def _raised_in(job: JobState, mismatch: Mismatch) -> tuple[int, ...]:
    """The ranks that an exception of their own ended in this call."""
    raised = []
    for rank in mismatch.ranks:
        lane = mismatch.group.lanes[rank]
        if job.ranks[rank].ending.has_raised and lane.numbers[-1] == mismatch.seq:
            raised.append(rank)
    return tuple(raised) if len(raised) * 2 < len(mismatch.ranks) else ()


def _when(job: JobState, mismatch: Mismatch) -> int:
    times = []
    for rank, lane in mismatch.group.lanes.items():
        row = lane.row(mismatch.seq)
        if row is not None:
            times.append(job.moment(rank, row))
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
    if mismatch.contradictions:
        texts: dict[str, list[int]] = {}
        for rank, text in sorted(mismatch.contradictions.items()):
            texts.setdefault(text, []).append(rank)
        return "; ".join(f"rank {rank_ranges(ranks)}: {text}" for text, ranks in texts.items())
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
                p2p_seq_id=calls.number[send[1]],
                op="send",
                waiting_ranks=sorted(
                    {rank for rank, row in (send, receive) if search.job.ranks[rank].calls.state[row] < RETIRED}
                ),
                text=f"rank {send[0]} sends {_content(search.job, send)}, "
                f"rank {receive[0]} receives {_content(search.job, receive)}",
                places=[
                    place
                    for role, call in (("sender", send), ("receiver", receive))
                    if (place := place_of_call(search.job, *call, role, "its call")) is not None
                ],
            ),
            stalls,
            search.job.moment(*send),
        )


def _is_at(waiting: Waiting, stall: Stall, send: Call, receive: Call) -> bool:
    return any(rank in waiting.heads and waiting.heads[rank].row <= row for rank, row in (send, receive))


def _content(job: JobState, call: Call) -> str:
    signature = job.signature(*call)
    shapes = signature.outputs or signature.inputs if signature.op == "recv" else signature.inputs or signature.outputs
    return f"{' + '.join(str(list(shape)) for shape in shapes)} {signature.dtype or ''}".strip()
