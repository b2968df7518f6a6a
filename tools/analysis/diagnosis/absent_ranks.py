"""Root causes in ranks that do not wait: ranks that stopped making calls, and ranks without evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossrank.tools.analysis.diagnosis.call_history import has_gone_past, is_new, is_usual
from crossrank.tools.analysis.diagnosis.findings import LateRank, error_text, late_text, rank_text, ranks_by
from crossrank.tools.analysis.diagnosis.job_state import CLEARLY_STALE, ends_unknown
from crossrank.tools.analysis.diagnosis.mismatches import EXTRA, MISSING
from crossrank.tools.analysis.diagnosis.root_causes import Search, finding_at, finding_of, finding_on
from crossrank.tools.analysis.diagnosis.states import (
    GONE,
    IDLE,
    RUNS,
    SILENT,
    STOPPED,
    lock_holder,
    may_wait_for_others,
    members_in_making,
    polls_only,
    state_of,
    waits_for_thread,
)
from crossrank.tools.analysis.diagnosis.wait_for_graph import StuckOp
from crossrank.tools.traces.ending import ANSWERS, LEFT, Ending
from crossrank.tools.traces.rank_trace import STATES

_MOMENT = 1_000_000_000
"""ns that a healthy rank may take between two calls."""

_LAUNCHER_DELAY = 3_000_000_000
"""ns within which a launcher terminates the other ranks after one has ended."""


def find_silent_ranks(search: Search) -> None:
    """Find ranks that do not wait and have not made the call that others wait in."""
    ranks, missed_ends = search.job.ranks, search.graph.missed_ends
    on_gloo = {one.backend for one in ranks.values() if one.source == "flight"} == {"gloo"}
    # A rank that ended by failed communication, or by the launcher, ended because of other ranks.
    ended_by_others = {
        rank
        for rank in search.silent
        if ranks[rank].ending.has_failed or (_was_ended_next(search, rank) and not _left_a_call_out(search, rank))
    }
    silent = search.silent - ended_by_others - search.may_wait_for_a_thread.keys()
    for op, absent in search.by_most_waited_for(silent):
        culprits, exception = absent, None
        states = [state_of(ranks[rank], op.group.name) for rank in sorted(absent)]
        proof = _proof_by(search, states)
        if op.is_p2p:
            kind, text, exception = "p2p_unmatched", *_how_they_stopped(search, op, absent)
            if _went_astray(search, op):
                culprits, exception = set(op.waiting), None
                text = (
                    f"{rank_text(culprits)} made this call for the first time, and {rank_text(absent)} does not answer "
                    f"it; other ranks wait for {rank_text(culprits)} in their usual calls"
                )
        elif proof == "gone" and on_gloo and len(absent) > 1 and all(ranks[rank].ending.unseen for rank in absent):
            kind = "dump_missing"
            text = (
                f"{rank_text(absent)} ended without an error message; gloo aborts a process that receives more "
                "than it asked for, so one of them may have ended the others"
            )
        elif _is_extra(search, op, absent):
            kind, culprits, proof = EXTRA, set(op.waiting), "mismatch"
            text = (
                f"only {rank_text(culprits)} made this call; the {len(absent)} other ranks of the group made no call "
                f"after #{op.seq - 1} and have left the job"
            )
        elif _may_wait_unseen(search, op, absent):
            kind, culprits, proof = "not_recorded", set(), "not_known"
            text = (
                f"{rank_text(absent)} has not made this call. It may wait for a new communicator: torch's own dumps "
                "do not show that"
            )
        else:
            kind, text, exception = MISSING, *_how_they_stopped(search, op, absent)
            if stale := {rank for rank in absent if missed_ends.get(rank, 0) >= CLEARLY_STALE}:
                text += (
                    f"; {rank_text(stale)} also has calls unfinished that finished on the other ranks: "
                    "its GPU or its watchdog is stuck"
                )
        if culprits == absent and len(absent) * 2 > len(op.group.ranks) and may_wait_for_others(ranks, absent):
            culprits = set()
            text += "; they may wait for the others there, for example through the store"
        for rank in sorted(op.absent & search.may_wait_for_a_thread.keys()):
            senders = rank_text(search.may_wait_for_a_thread[rank])
            text += f"; rank {rank} has not made it either: one of its threads receives from {senders}"
        waiting = {"waiting_ranks": sorted(culprits)} if culprits == set(op.waiting) else {}
        late = states if culprits in (absent, set()) else []
        about: dict[str, Any] = {"text": text, "exception": exception, "proof": proof, "late_ranks": late}
        search.add_root(finding_of(op, kind, culprits=culprits, **about, **waiting), [op])


def _proof_by(search: Search, states: Sequence[LateRank]) -> str:
    """Return what the states of ranks that have not made a call prove. On gloo, a rank that ends fails the calls of the
    others: a rank without a sign of life is gone then."""
    is_gone = any(one.state == GONE for one in states)
    return "gone" if is_gone or (search.anyone_failed and all(one.state == SILENT for one in states)) else "late"


def _went_astray(search: Search, op: StuckOp) -> bool:
    """Return whether the waiting ranks made a call for the first time, while others wait for them in usual calls."""
    job, graph = search.job, search.graph
    waited_for = {
        rank
        for rank, one in graph.op_of.items()
        if one is not op and one.awaited >= set(op.waiting) and is_usual(job, rank, graph.blocked[rank])
    }
    return bool(waited_for) and all(is_new(job, rank, graph.blocked[rank]) for rank in op.waiting)


def _was_ended_next(search: Search, rank: int) -> bool:
    """Return whether the launcher terminated this rank between two calls because another rank had ended.

    If the end time of the other rank is unknown, it ended at the earliest at this rank's last call.
    """
    ending, called = search.job.ranks[rank].ending, search.job.ranks[rank].calls.called
    if ending.taken_at is None or not ending.was_terminated:
        return False
    left = [
        one.ending.taken_at
        for one in search.job.ranks.values()
        if one.ending.taken_at and (one.ending.ended_itself or (one.ending.unseen and ends_unknown(one)))
    ]
    if search.lacking:
        awaited_since = min((op.since for op in search.left() if rank in op.absent), default=ending.taken_at)
        if ending.taken_at - max(called, default=awaited_since) <= _MOMENT + _LAUNCHER_DELAY:
            return True
    # A rank that has not made its first call may be slow, so its time without calls proves nothing.
    return any(
        left_at - max(called, default=left_at) <= _MOMENT and 0 < ending.taken_at - left_at <= _LAUNCHER_DELAY
        for left_at in left
    )


def _left_a_call_out(search: Search, rank: int) -> bool:
    """Return whether a rank skipped a call that others wait in, which its earlier calls led to, and made one on another
    group."""
    groups = (op.group for op in search.left() if rank in op.absent and not op.is_p2p)
    return any(has_gone_past(search.job, rank, group) for group in groups)


def _is_extra(search: Search, op: StuckOp, absent: set[int]) -> bool:
    """Return whether the few waiting ranks made an extra call, so that the many absent ranks are not missing."""
    job, members = search.job, op.group.ranks
    if not all(job.ranks[rank].ending.has_left for rank in absent):
        return False  # they may still make it
    if absent != set(members).difference(op.waiting) or len(op.waiting) * 2 >= len(members):
        return False
    # If the earlier calls of a waiting rank led to this call before, the call is right and the others are late.
    return not any(is_usual(job, rank, search.graph.blocked[rank]) for rank in op.waiting)


def _may_wait_unseen(search: Search, op: StuckOp, absent: set[int]) -> bool:
    """Return whether the many ranks without the call may wait for the few that made it: torch's own NCCL dumps show
    neither stacks nor waits for a new communicator."""
    ranks = search.job.ranks
    unseen = all(ranks[rank].ending.taken_at is None and "nccl" in ranks[rank].backend for rank in absent)
    return unseen and len(absent) * 2 > len(op.group.ranks)


def _how_they_stopped(search: Search, op: StuckOp, absent: set[int]) -> tuple[str, str | None]:
    """Return (text on ranks that have not made a call and do not wait, their first exception)."""
    known = {rank for rank in absent if search.is_known(rank)}
    stopped = ranks_by({rank: _how_it_stopped(search, op, rank) for rank in absent - known})
    texts = [f"{rank_text(those)} {how}" for how, those in stopped.items()]
    if known:
        states = [state_of(search.job.ranks[rank], op.group.name) for rank in sorted(known)]
        texts.insert(0, f"this call was not {'answered' if op.is_p2p else 'made'} by {late_text(states)}")
    text = "; ".join(texts)
    return text, next(filter(None, (_exception_of(search, rank) for rank in sorted(absent))), None)


def _how_it_stopped(search: Search, op: StuckOp, rank: int) -> str:
    """Return a text on a rank that has not made a call, or left others in it, and does not wait."""
    trace, ranks = search.job.ranks[rank], search.job.ranks.values()
    ending = trace.ending
    if ending.reason in LEFT or ending.ended:
        why = error_text(ending.error) or ending.reason or "its recording ended"
        how = "while others were in" if rank in op.passed else "without answering" if op.is_p2p else "without making"
        return f"left the job ({why}) {how} this call"
    if trace.source == "comms" and not trace.dump.has_no_entries and any(one.source == "flight" for one in ranks):
        return "wrote no dump, and its comms file ends before this call: it died, or did not notice the hang"
    if op.is_p2p:
        return "made no matching call, and does not wait in another one"
    return "never made this call, and does not wait in another one"


def _exception_of(search: Search, rank: int) -> str | None:
    """Return the exception that stopped a rank, or one of its threads."""
    ending = search.job.ranks[rank].ending
    if ending.has_raised:
        return ending.error
    if ending.activity is not None and not waits_for_thread(ending):
        return None  # it ended long ago, and the rank trained on without it
    return next((f"{one.error} (thread {one.thread})" for one in ending.of_threads), None)


def find_stale_ranks(search: Search) -> None:
    """Find ranks that notice no ends of calls, although other ranks do. During a hang, this is a fault of its own.

    Either the GPU of the rank is stuck, or its watchdog, whether or not others wait for it. Without waiting ranks in
    the job, it proves nothing.
    """
    job = search.job
    stale = {rank for rank, rows in job.unnoticed.items() if len(rows) >= CLEARLY_STALE}
    if not search.graph.blocked or len(stale) * 2 >= len(job.ranks):
        return
    for rank in sorted(stale.difference(*(root.culprit_ranks for root in search.roots))):
        rows = job.unnoticed[rank]
        text = (
            f"rank {rank} still makes calls, but {len(rows)} of its calls are unfinished that finished on the other "
            "ranks: its GPU or its watchdog is stuck"
        )
        finding = finding_at(job, rank, rows[0], "not_completed", culprit_ranks=[rank], text=text, proof="late")
        search.add_root(finding, since=job.moment(rank, rows[0]))


def find_unrecorded_waits(search: Search) -> None:
    """Find ranks that wait outside of calls: for example, for a new group or a key of the store.

    A group that is made waits for all its members. Ranks that make groups with other members at the same time wait for
    each other. In all other cases, the files do not show which rank they wait for; if exactly one rank does not wait,
    it is the culprit.
    """
    waiting, silent, ranks = search.waiting_unrecorded, search.silent, search.job.ranks
    if not waiting or search.roots:
        return
    making = {rank: one for rank in sorted(waiting) if (one := members_in_making(ranks[rank].ending)) is not None}
    whats = {rank: f"{_members_text(one)}{_place_text(ranks[rank].ending)}" for rank, one in making.items()}
    ranks_of = sorted(ranks_by(whats).items(), key=_by_size)
    awaited = silent.intersection(*(one or search.job.world for one in making.values())) if making else silent
    culprits = awaited if making or len(silent) == 1 else set()
    stuck = [op for op in search.left() if op.awaited & (waiting | silent)]
    kind, proof = (MISSING, "late") if silent else ("opposite_order", "not_known")
    text = f"{rank_text(waiting)} waits inside torch.distributed, but not in a call; for example, it creates a group"
    if making:
        text = "; ".join(f"{rank_text(those)} makes a group of {members}" for members, those in ranks_of)
    if len(ranks_of) > 1:
        kind, proof = "opposite_order", "mismatch"
        culprits = set(ranks_of[-1][1]) if len(ranks_of) == 2 and len(ranks_of[0][1]) > len(ranks_of[1][1]) else set()
    finding = finding_on(
        search.world,
        kind,
        culprit_ranks=sorted(culprits),
        waiting_ranks=sorted(waiting.union(*(op.waiting for op in stuck)) - culprits),
        text=text + (f"; {rank_text(silent)} does not wait" if silent else ""),
        proof=proof,
        late_ranks=[state_of(ranks[rank]) for rank in sorted(culprits & silent)],
    )
    search.add_root(finding, stuck)


def _members_text(members: Sequence[int]) -> str:
    return rank_text(members) if members else "all ranks"


def _place_text(ending: Ending) -> str:
    """Return which group of a rank the one that it makes is."""
    return "" if ending.groups_made is None else f" (no. {ending.groups_made + 1} on these ranks)"


def _by_size(found: tuple[str, list[int]]) -> tuple[int, list[int]]:
    return -len(found[1]), found[1]


def find_lock_holders(search: Search) -> None:
    """Find ranks that wait in a call for ranks that wait for a file lock of theirs."""
    ranks = search.job.ranks
    rank_of = {(one.host, one.ending.process): rank for rank, one in ranks.items() if one.ending.process is not None}
    for op in search.left():
        locks = {rank: lock_holder(ranks[rank].ending, op.group.name) for rank in op.absent & ranks.keys()}
        holders = {rank: rank_of.get((ranks[rank].host, process)) for rank, process in locks.items() if process}
        culprits = {holder for holder in holders.values() if holder in op.waiting and holder is not None}
        # Each rank that has not come waits for a lock, which one of the waiting ranks holds, or another of these ranks.
        if culprits and op.absent == holders.keys() and all(one in {*culprits, *holders} for one in holders.values()):
            text = f"{rank_text(holders)} waits for a file lock that {rank_text(culprits)} holds"
            about = {"text": text, "waiting_ranks": sorted(holders), "proof": "deadlock"}
            search.add_root(finding_of(op, "holds_lock", culprits=culprits, **about), [op])


def find_lacking_ranks(search: Search) -> None:
    """Find ranks without evidence. Each is reported once, with the call in which most others wait for it."""
    lacking = {rank: kind for rank, kind in search.lacking.items() if rank not in search.explained}
    for op, absent in search.by_most_waited_for(set(lacking)):
        here = {rank: lacking.pop(rank) for rank in absent & lacking.keys()}
        for index, (kind, ranks) in enumerate(ranks_by(here).items()):
            text = f"other ranks wait for {rank_text(ranks)} here, and its state is unknown"
            search.add_root(
                finding_of(op, kind, culprits=ranks, text=text, proof="not_known"), [op] if index == 0 else []
            )
    for kind, ranks in ranks_by(lacking).items():
        text = f"the state of {rank_text(ranks)} is unknown; no other rank waits for it"
        search.add_root(finding_on(search.world, kind, culprit_ranks=ranks, text=text, proof="not_known"))


def find_raised_exceptions(search: Search) -> None:
    """Find ranks that ended with an exception, if no call shows a fault."""
    if search.roots or search.graph.blocked:
        return
    endings = {rank: one.ending for rank, one in search.job.ranks.items()}
    raised = [rank for rank, one in endings.items() if one.has_raised]
    failed = [rank for rank, one in endings.items() if one.has_failed and not search.cancelled]
    unseen = [rank for rank, one in endings.items() if one.unseen]
    if not raised and not failed:
        if unseen and all(one.is_gone for rank, one in endings.items() if rank not in unseen):
            _add_unended(search, unseen)
        return
    # It is unknown which rank ended first. Few ranks with one error are more likely the cause than many with another.
    unseen = unseen if len(unseen) < len(raised) or not raised else []
    texts = [f"{rank_text(unseen)} ended without an error message"] if unseen else []
    texts += sorted(f"rank {rank}: {error_text(endings[rank].error)}" for rank in (raised or failed)[:4])
    finding = finding_on(
        search.world,
        "dump_missing" if unseen else "raised",
        culprit_ranks=unseen or raised,
        waiting_ranks=sorted({*failed, *raised}) if unseen else failed,
        exception=endings[raised[0]].error if raised and not unseen else None,
        text="; ".join(texts),
        proof="gone",
    )
    search.add_root(finding)


def _add_unended(search: Search, unseen: list[int]) -> None:
    """Report ranks whose end is unknown, if all other ranks ended: the job may be complete."""
    if len(unseen) < len(search.job.ranks):
        text = f"{rank_text(unseen)} has no dump, and its comms file has no last line: it was killed, or it still runs"
        search.add_root(finding_on(search.world, "dump_missing", culprit_ranks=unseen, text=text, proof="not_known"))


def find_unended_calls(search: Search) -> None:
    """Find calls that finished on some ranks but not on a rank that notices ends, in a job without waiting ranks.

    A rank that has missed many ends notices none. A rank that has missed only the last one may hang in it.
    """
    job = search.job
    if search.roots or search.graph.blocked:
        return
    for rank, (row, *more) in sorted(job.unnoticed.items()):
        if len(more) + 1 >= CLEARLY_STALE:
            continue
        group, trace = job.group_at(rank, row), job.ranks[rank]
        seq, state = trace.calls.number[row], STATES[trace.calls.state[row]]
        ended = [other for other in group.ranks if other in job.ranks and job.completed(group, other) >= seq]
        # Without its time, the dump may have been written just before the rank noticed the end.
        hangs = trace.ending.taken_at is not None and len(ended) * 2 > len(group.ranks)
        text = f"it finished on {rank_text(ended)}, and on rank {rank} it is {state}"
        if hangs:
            finding = finding_at(job, rank, row, "not_completed", culprit_ranks=[rank], text=text, proof="late")
        else:
            text += ": it hangs there, or the dump was written just before its end"
            finding = finding_at(
                job, rank, row, "all_joined_not_completed", waiting_ranks=[rank], text=text, proof="late"
            )
        search.add_root(finding)


def find_unknown_waits(search: Search) -> None:
    """Report a silent job whose ranks have unfinished calls but no known waits."""
    unknown = {rank for rank in search.may_wait_otherwise if not search.is_known(rank)}
    if unknown and not search.roots:
        text = f"{rank_text(unknown)} has unfinished calls; whether it waits for them is unknown"
        search.add_root(finding_on(search.world, "not_recorded", text=text, proof="not_known"))


def find_standstill(search: Search) -> None:
    """Report a silent job in which no rank waits in a call, and some ranks do nothing.

    If the other ranks use little CPU time at one line, they poll, and wait in this way: for example, for a key of the
    store.
    """
    if search.roots or search.graph.blocked:
        return
    answered = {rank: one for rank, one in search.job.ranks.items() if one.ending.reason in ANSWERS}
    ranks = {rank: one for rank, one in answered.items() if not one.ending.went_on}
    states = [state_of(one) for rank, one in sorted(ranks.items()) if search.is_known(rank)]
    standing = [one for one in states if one.state in (IDLE, STOPPED)]
    activities = [one.ending.activity for one in ranks.values() if one.ending.activity is not None]
    if not standing or any(one.has_communicated for one in activities):
        return
    running = [one for one in states if one.state == RUNS]
    polls = len(running) > len(standing) and len({one.place for one in running}) == 1
    polls = polls and all(polls_only(ranks[one.rank].ending) for one in running)
    left = [state_of(one) for _, one in sorted(search.job.ranks.items()) if one.ending.ended_well]
    left = left if not running and len(left) * 2 < len(search.job.ranks) else []
    finding = finding_on(
        search.world,
        "no_progress",
        culprit_ranks=[one.rank for one in (standing if polls else left)],
        waiting_ranks=[one.rank for one in running] if polls else [],
        text=late_text([*states, *left]),
        proof="late" if polls else "not_known",
        late_ranks=standing if polls else [],
    )
    search.add_root(finding)


def find_unknown_ends(search: Search) -> None:
    """Report a silent job in which all ranks made every call, and it is unknown which calls finished."""
    ranks = search.job.ranks
    if search.roots or search.graph.blocked or not ranks:
        return
    hung = [rank for rank, one in ranks.items() if one.ending.reason in ANSWERS and not one.ending.went_on]
    if hung and all(ends_unknown(ranks[rank]) for rank in hung):
        frozen = all(ranks[rank].dump.ends_frozen for rank in hung)
        why = (
            "torch records no ends of calls while it destroys a group"
            if frozen
            else "the dumps have no entries of torch's flight recorder"
        )
        text = f"all ranks made every recorded call; {why}, so it is unknown which calls finished"
        search.add_root(finding_on(search.world, "not_recorded", waiting_ranks=hung, text=text, proof="not_known"))
