"""Find ranks whose calls cannot be one: collectives, sends and receives that differ in what must be equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from crossrank.comm import is_p2p
from crossrank.tools.analysis.diagnosis.call_history import breaks_its_sizes, breaks_its_tags, changes_tags_otherwise
from crossrank.tools.analysis.diagnosis.findings import Place, rank_text, ranks_by
from crossrank.tools.analysis.diagnosis.job_state import JobState, ends_unknown
from crossrank.tools.analysis.diagnosis.mismatches import Mismatch, match_key
from crossrank.tools.analysis.diagnosis.p2p import content_text
from crossrank.tools.analysis.diagnosis.search import Search, finding_on
from crossrank.tools.analysis.diagnosis.stacks import place_of_call
from crossrank.tools.analysis.diagnosis.wait_for_graph import StuckOp

_MOST_PLACES = 4
"""Different calls of one collective that are shown if it is unknown which one is wrong."""


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
        gone = {rank for rank in aborted.intersection(group.ranks) if on_gloo and not _went_on(mismatch, rank)}
        runs_ahead = all(ends_unknown(job.ranks[rank]) for rank in mismatch.ranks)
        behind_it = [
            op
            for op in behind_it
            if runs_ahead or _has_more_calls(search, op, mismatch) or not op.absent & search.silent - gone
        ]
        about = {"collective_seq_id": mismatch.seq, "op": mismatch.op}
        kind, culprits, text = mismatch.kind, list(mismatch.culprits or _raised_in(job, mismatch)), mismatch.text
        if threads := _threads_at_once(job, mismatch):
            kind, culprits, stuck = "thread_order", [], stuck | set(mismatch.culprits)
            text = f"{text}; these are calls of several threads at the same time: {_threads_text(threads)}"
        ranks = {"culprit_ranks": culprits, "waiting_ranks": sorted(stuck)}
        finding = finding_on(group, kind, **about, **ranks, text=text, proof="mismatch")
        if not culprits:
            finding.places = _places_of_each_call(job, mismatch)
        same = known.get((kind, mismatch.culprits)) if mismatch.culprits else None
        if same is not None:
            finding.because_of = same
            search.consequences.append(finding)
            search.root_of = dict.fromkeys(behind_it, same) | search.root_of
            continue
        root = known[kind, mismatch.culprits] = len(search.roots)
        search.add_root(finding, behind_it, mismatch.since)
        search.explained |= gone
        if gone := gone.difference(mismatch.ranks):
            why = "gloo aborts a process that receives more than it asked for"
            text = f"{rank_text(gone)} has no record of this call: {why}"
            follows = finding_on(group, "dump_missing", **about, waiting_ranks=sorted(gone), text=text, because_of=root)
            search.consequences.append(follows)


def _threads_at_once(job: JobState, mismatch: Mismatch) -> dict[int, list[str]]:
    """Return rank -> its threads that wait in calls of the group at the same time.

    Empty unless all ranks made the same calls from the mismatch on: only the order of the threads differs then.
    """
    group, made, threads = mismatch.group, [], {}
    for rank in mismatch.ranks:
        trace, lane = job.ranks[rank], group.lanes[rank]
        rows = [row for row, seq in zip(lane.rows, lane.numbers, strict=True) if seq >= mismatch.seq]
        made.append(Counter(match_key(job.signature(rank, row)) for row in rows))
        own = {trace.calls.id[row] for row in rows}
        waiting = sorted({one.thread for one in trace.ending.waits or () if one.id in own})
        if len(waiting) > 1:
            threads[rank] = waiting
    return threads if all(one == made[0] for one in made) else {}


def _threads_text(threads: dict[int, list[str]]) -> str:
    by_names = ranks_by({rank: " and ".join(names) for rank, names in threads.items()})
    return "; ".join(f"{names} of {rank_text(ranks)}" for names, ranks in by_names.items())


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


def _went_on(mismatch: Mismatch, rank: int) -> bool:
    """Return whether a rank made another call on the group after its call that does not fit the others."""
    return rank in mismatch.ranks and mismatch.group.lanes[rank].numbers[-1] > mismatch.seq


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
        text = (
            f"rank {send[0]} sends {content_text(job, send)}, rank {receive[0]} receives {content_text(job, receive)}"
        )
        odd = _only_one_that(breaks_its_sizes, job, send, receive)
        text += "".join(f"; rank {rank} had another order of sizes before" for rank in odd)
        finding = finding_on(
            group,
            "p2p_size_mismatch",
            proof="mismatch",
            p2p_seq_id=job.ranks[send[0]].calls.number[send[1]],
            op="send",
            culprit_ranks=sorted(odd),
            waiting_ranks=sorted({rank for rank, row in ends.values() if row in job.open_rows[rank]} - odd),
            text=text,
            places=[place for place in places if place is not None],
        )
        explained = [op for op in search.left() if is_reached and op.is_p2p and not ranks.isdisjoint(op.waiting)]
        search.add_root(finding, explained, job.moment(*send))


def _only_one_that(
    breaks: Callable[[JobState, int, int], bool | None], job: JobState, send: tuple[int, int], receive: tuple[int, int]
) -> set[int]:
    """Return the rank of a send and its receive that breaks the order of its calls, if the other one keeps its own."""
    found = {rank: breaks(job, rank, row) for rank, row in (send, receive)}
    return {rank for rank, broken in found.items() if broken} if {*found.values()} == {True, False} else set()


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
        text = (
            f"rank {send[0]} sends with tag {job.signature(*send).tag}, "
            f"rank {receive[0]} receives with tag {job.signature(*receive).tag}"
        )
        odd = _with_another_tag(job, send, receive)
        text += "".join(f"; the other ranks have the tag of rank {one} in this call" for one in ranks - odd if odd)
        if not odd:  # tags may be any numbers, so only a long order counts
            odd = _only_one_that(breaks_its_tags, job, send, receive)
            text += "".join(f"; rank {rank} had another order of tags before" for rank in odd)
        left_its_order = [rank for rank, row in (send, receive) if changes_tags_otherwise(job, rank, row)]
        if len(left_its_order) == 1 and not odd:
            text += f"; the tag of rank {left_its_order[0]} does not follow from its earlier ones"
        finding = finding_on(
            job.group_at(*send),
            "p2p_tag_mismatch",
            proof="mismatch",
            p2p_seq_id=job.ranks[send[0]].calls.number[send[1]],
            op="send",
            culprit_ranks=sorted(odd),
            waiting_ranks=sorted(ranks - odd),
            text=text,
            places=[place for place in places if place is not None],
        )
        search.add_root(finding, ops, job.moment(*send))


def _with_another_tag(job: JobState, send: tuple[int, int], receive: tuple[int, int]) -> set[int]:
    """Return which rank of a pair has another tag than the other ranks in their calls of the same number: in a ring, or
    where all ranks send to one. Empty if they do not show it."""
    number = job.ranks[send[0]].calls.number[send[1]]
    others = {
        job.signature(rank, row).tag
        for rank, trace in job.ranks.items()
        if rank not in (send[0], receive[0])
        for row in range(len(trace.calls))
        if trace.calls.number[row] == number and is_p2p(job.signature(rank, row))
    }
    odd = {rank for rank, row in (send, receive) if job.signature(rank, row).tag not in others}
    return odd if len(others) == 1 and len(odd) == 1 else set()
