"""Root causes in ranks that do not wait: ranks that stopped making calls, and ranks without evidence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from crossrank.tools.analysis.diagnosis.call_history import has_gone_past, is_from_elsewhere, is_new, is_usual
from crossrank.tools.analysis.diagnosis.findings import Finding, LateRank, error_text, late_text, rank_text, ranks_by
from crossrank.tools.analysis.diagnosis.job_state import CLEARLY_STALE, ends_unknown
from crossrank.tools.analysis.diagnosis.mismatches import EXTRA, MISSING
from crossrank.tools.analysis.diagnosis.search import Search, finding_at, finding_of, finding_on
from crossrank.tools.analysis.diagnosis.states import (
    GONE,
    IDLE,
    SILENT,
    accepts,
    may_wait_for_others,
    polls_only,
    state_of,
    that_may_wait_for_the_rest,
    waits_for_thread,
)
from crossrank.tools.analysis.diagnosis.wait_for_graph import StuckOp
from crossrank.tools.traces.ending import LEFT
from crossrank.tools.traces.rank_trace import STATES

_MOMENT = 1_000_000_000
"""ns that a healthy rank may take between two calls."""

_LAUNCHER_DELAY = 3_000_000_000
"""ns within which a launcher terminates the other ranks after one has ended."""

_PATIENCE = 30_000_000_000
"""ns that torchrun gives a rank to end after it has terminated it: on a busy machine, its dump takes long."""


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
    found: list[tuple[StuckOp, Finding]] = []
    for op, met in search.by_most_waited_for(silent, free=True):
        absent = set().union(*(search.kept_by(rank, op.group.name) for rank in met))
        said = _said_to_be_behind(search, op, absent)
        absent = said or absent
        culprits, exception = absent, None
        states = [state_of(ranks[rank], op.group.name) for rank in sorted(absent)]
        proof = _proof_by(search, states)
        if op.is_p2p:
            kind, text, exception = "p2p_unmatched", *_how_they_stopped(search, op, states)
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
            kind, text, exception = MISSING, *_how_they_stopped(search, op, states)
            if stale := {rank for rank in absent if missed_ends.get(rank, 0) >= CLEARLY_STALE}:
                text += (
                    f"; {rank_text(stale)} also has calls unfinished that finished on the other ranks: "
                    "its GPU or its watchdog is stuck"
                )
        late = states if culprits <= absent else []
        known = ranks.keys() & {*op.group.ranks}
        if culprits == absent and len(absent) * 2 > len(known) and may_wait_for_others(ranks, absent):
            culprits = set(op.waiting)
            text += (
                f"; all of them wait there, and may wait for what {rank_text(culprits)} was to do, for example through "
                "the store or a file"
            )
        elif culprits == absent and (owing := _polled_senders(search, op, absent)):
            culprits = owing
            text += f"; a receive from {rank_text(owing)} has no send there, and it may poll for its end"
        elif culprits == absent and (locked := _locked_by_those_that_wait(search, op, absent)):
            culprits = set()
            text += f"; {rank_text(locked)} has locked a file that is open there, and it may try to lock it"
        elif culprits == absent and not said and _are_most_unknown(search, op, absent):
            culprits, proof = set(), "not_known"
            text += "; most ranks of the group say nothing of this call, so it is unknown which of them has not come"
        elif culprits == absent and all(one.state == IDLE and accepts(ranks[one.rank].ending) for one in states):
            culprits = set()
            text += "; another rank may be the one that was to connect"
        elif culprits == absent and (unclear := that_may_wait_for_the_rest(ranks, absent)):
            culprits = absent - unclear
            text += (
                f"; {rank_text(unclear)} may wait for another of these ranks, for example through the store or a file"
            )
        for rank in sorted(met - absent):
            by = rank_text(search.released_by(rank, op.group.name))
            text += f"; {late_text([state_of(ranks[rank], op.group.name)])}, has not made it either: it waits for {by}"
        for rank in sorted(op.absent & search.may_wait_for_a_thread.keys()):
            senders = rank_text(search.may_wait_for_a_thread[rank])
            text += f"; rank {rank} has not made it either: one of its threads receives from {senders}"
        waiting = {"waiting_ranks": sorted(culprits)} if culprits == set(op.waiting) else {}
        about: dict[str, Any] = {"text": text, "exception": exception, "proof": proof, "late_ranks": late}
        finding = finding_of(op, kind, culprits=culprits, **about, **waiting)
        search.add_root(finding, [op])
        found.append((op, finding))
    for (op, one), (other_op, other) in combinations(found, 2):
        _settle(search, (op, one), (other_op, other))


def _said_to_be_behind(search: Search, op: StuckOp, absent: set[int]) -> set[int]:
    """Return those ranks of a log that printed an earlier call as their last one, if they are few and all others that
    have not come printed nothing: these may be in the call."""
    if not _are_of_logs(search, absent):
        return set()
    said = {rank for rank in absent if search.job.enqueued(op.group, rank) is not None}
    return said if len(said) * 2 <= len(op.group.ranks) else set()


def _are_most_unknown(search: Search, op: StuckOp, absent: set[int]) -> bool:
    """Return whether most ranks of a group have not come, or have no log, by the logs alone."""
    few = len(op.waiting) * 2 < len(op.group.ranks)
    return few and not op.is_p2p and _are_of_logs(search, absent)


def _are_of_logs(search: Search, those: set[int]) -> bool:
    return all(rank in search.job.ranks and search.job.ranks[rank].dump.of_log for rank in those)


def _settle(search: Search, first: tuple[StuckOp, Finding], second: tuple[StuckOp, Finding]) -> None:
    """Decide between two ranks that keep each other waiting, each in a call of one of its threads while another thread
    would make the call that is due: a lock may tie them. The one whose call is from another line than before counts."""
    ends = []
    for (op, finding), (other, _) in ((first, second), (second, first)):
        culprits = set(finding.culprit_ranks)
        if not culprits or not culprits <= op.free.intersection(other.waiting):
            return
        ends.append(culprits)
    odd = {rank for rank in set().union(*ends) if is_from_elsewhere(search.job, rank, search.graph.blocked[rank])}
    for (_, finding), culprits in zip((first, second), ends, strict=True):
        if len(odd) != 1 or not odd <= culprits:
            finding.culprit_ranks = []
            finding.waiting_ranks = sorted({*finding.waiting_ranks, *culprits})
            finding.text += f"; {rank_text(culprits)} waits in another call meanwhile, which may keep its threads there"
        else:
            finding.text += f"; {rank_text(culprits)} waits in a call at another line than before"


def _polled_senders(search: Search, op: StuckOp, absent: set[int]) -> set[int]:
    """Return the ranks that wait in an operation and owe a message to the only rank that has not come. This one looks
    for something now and then: it may poll for the end of a receive."""
    if len(absent) != 1 or not polls_only(search.job.ranks[min(absent)].ending):
        return set()
    job, rank = search.job, min(absent)
    receives = [row for row in job.open_rows[rank] if job.signature(rank, row).op == "recv"]
    lacking = [row for row in receives if (rank, row) not in search.pairing.partner]
    senders = {job.signature(rank, row).peer for row in lacking}
    found = {one for one in senders if one is not None}
    return found if senders == found and found <= set(op.waiting) else set()


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
    delay = _LAUNCHER_DELAY if called else _LAUNCHER_DELAY + _PATIENCE
    return any(
        left_at - max(called, default=left_at) <= _MOMENT and 0 < ending.taken_at - left_at <= delay for left_at in left
    )


def _locked_by_those_that_wait(search: Search, op: StuckOp, absent: set[int]) -> set[int]:
    """Return the ranks in a call that have locked a file which all those have open that they wait for."""
    locked = [search.may_try_a_lock_of(rank, op.group.name).intersection(op.waiting) for rank in absent]
    return set().union(*locked) if all(locked) else set()


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
    if all(job.ranks[rank].ending.ended_well for rank in absent):
        return True  # a call that was made once too often may look as usual
    # If the earlier calls of a waiting rank led to this call before, the call is right and the others are late.
    return not any(is_usual(job, rank, search.graph.blocked[rank]) for rank in op.waiting)


def _may_wait_unseen(search: Search, op: StuckOp, absent: set[int]) -> bool:
    """Return whether the many ranks without the call may wait for the few that made it: torch's own NCCL dumps show
    neither stacks nor waits for a new communicator."""
    ranks = search.job.ranks
    unseen = all(ranks[rank].ending.taken_at is None and "nccl" in ranks[rank].backend for rank in absent)
    return unseen and len(absent) * 2 > len(op.group.ranks)


def _how_they_stopped(search: Search, op: StuckOp, states: Sequence[LateRank]) -> tuple[str, str | None]:
    """Return (text on ranks that have not made a call and do not wait, their first exception). `states` is sorted by
    rank."""
    known = [one for one in states if search.is_known(one.rank)]
    others = [one.rank for one in states if one not in known]
    stopped = ranks_by({rank: _how_it_stopped(search, op, rank) for rank in others})
    texts = [f"{rank_text(those)} {how}" for how, those in stopped.items()]
    if known:
        texts.insert(0, f"this call was not {'answered' if op.is_p2p else 'made'} by {late_text(known)}")
    text = "; ".join(texts)
    return text, next(filter(None, (_exception_of(search, one.rank) for one in states)), None)


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
    if rank in search.graph.missed_ends:
        return "has not made this call; its call before does not end on it, and has ended on other ranks"
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
