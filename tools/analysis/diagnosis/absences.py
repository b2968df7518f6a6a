"""Root causes in ranks that wait for nobody: those that stopped making calls, and those of which nothing is known."""

from __future__ import annotations

from collections.abc import Iterator

from crossrank.text import rank_ranges
from crossrank.tools.analysis.diagnosis.collectives import EXTRA, MISSING
from crossrank.tools.analysis.diagnosis.findings import Finding
from crossrank.tools.analysis.diagnosis.habits import is_usual
from crossrank.tools.analysis.diagnosis.job_state import CLEARLY_STALE
from crossrank.tools.analysis.diagnosis.search import Search, finding_of, was_cancelled
from crossrank.tools.analysis.diagnosis.waiting import Stall
from crossrank.tools.traces.ending import LEFT
from crossrank.tools.traces.rank_trace import STATES


def find_silent_ranks(search: Search) -> None:
    """Ranks that wait for nobody and have not made the call that others wait in."""
    waiting, ranks = search.waiting, search.job.ranks
    # A communication that failed ends a rank because of others.
    silent = {rank for rank in search.silent() if not ranks[rank].ending.has_failed}
    covered: set[int] = set()
    while True:
        candidates = [(stall, stall.absent & silent) for stall in search.left()]
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
            search.add_root(finding_of(stall, "p2p_unmatched", culprits=absent, text=text), [stall])
        elif len(dead := {rank for rank in absent if _died_on_gloo(search, rank)}) > 1 and dead == absent:
            text = (
                f"rank {rank_ranges(sorted(dead))} ended without a word; gloo aborts every process that is sent more "
                "than it asked for, so that one of them may have ended the others"
            )
            search.add_root(finding_of(stall, "dump_missing", culprits=dead, text=text), [stall])
        elif _is_extra(search, stall, absent):
            culprits = sorted(stall.waiting)
            text = (
                f"rank {rank_ranges(culprits)} made this call alone; the {len(absent)} other members made none after "
                f"#{stall.seq - 1} and wait for nothing. If they should have made it, they are late"
            )
            finding = finding_of(stall, EXTRA, culprits=culprits, text=text)
            finding.waiting_ranks = culprits
            search.add_root(finding, [stall])
        else:
            stale = sorted(rank for rank in absent if waiting.stale.get(rank, 0) >= CLEARLY_STALE)
            text = "; ".join(_how_it_stopped(search, absent))
            if stale:
                text += (
                    f"; rank {rank_ranges(stale)} also notices no end of calls that are over on the others: "
                    "its GPU or its watchdog is stuck"
                )
            finding = finding_of(stall, MISSING, culprits=absent, text=text)
            finding.exception = next(filter(None, (_exception_of(search, rank) for rank in sorted(absent))), None)
            search.add_root(finding, [stall])


def find_unrecorded_waits(search: Search) -> None:
    """Ranks that wait for others in what is no call: the making of a group, a key of the store.

    Whom they wait for nothing says. One rank that does not wait at all is it; of several nobody can tell.
    """
    waiting = search.waiting_unrecorded()
    if not waiting or search.found.roots:
        return
    world = max(search.job.groups, key=lambda group: (len(group.ranks), -group.index), default=None)
    silent = search.silent()
    culprits = sorted(silent) if len(silent) == 1 else []
    stuck = [stall for stall in search.left() if stall.waits_for() & (waiting | silent)]
    text = (
        f"rank {rank_ranges(sorted(waiting))} waits inside torch.distributed for what is no call, such as a new group"
    )
    if silent:
        text += f"; rank {rank_ranges(sorted(silent))} waits for nobody"
    finding = Finding(
        kind=MISSING if silent else "opposite_order",
        pg=world.pg if world is not None else ["", ""],
        pg_ranks=list(world.ranks) if world is not None else list(search.job.world),
        culprit_ranks=culprits,
        waiting_ranks=sorted(waiting.union(*(stall.waiting for stall in stuck)) - set(culprits)),
        text=text,
    )
    search.add_root(finding, stuck)


def _exception_of(search: Search, rank: int) -> str | None:
    """The exception by which a rank, or one of its threads, stopped making calls."""
    evidence = search.job.ranks[rank]
    if evidence.ending.has_raised:
        return evidence.ending.error
    return next((f"{one.error} (thread {one.thread})" for one in evidence.ending.of_threads), None)


def find_unended_calls(search: Search) -> None:
    """Calls that are over on some ranks and open on one that notices ends, in a job in which nobody waits.

    A rank that has missed many ends notices none; one that has missed its last alone may hang in it.
    """
    job = search.job
    if search.found.roots or search.waiting.heads:
        return
    for rank, rows in sorted(job.unnoticed.items()):
        if len(rows) >= CLEARLY_STALE:
            continue
        group, row = job.group_at(rank, rows[0]), rows[0]
        seq, evidence = job.ranks[rank].calls.number[row], job.ranks[rank]
        ended = [other for other in group.ranks if other in job.ranks and job.completed(group, other) >= seq]
        # Without the moment of the dump it may have been taken just before the end was noticed.
        hangs = evidence.ending.taken_at is not None and len(ended) * 2 > len(group.ranks)
        finding = Finding(
            kind="not_completed" if hangs else "all_joined_not_completed",
            pg=group.pg,
            pg_ranks=list(group.ranks),
            collective_seq_id=seq,
            op=job.signature(rank, row).op,
            culprit_ranks=[rank] if hangs else [],
            waiting_ranks=[] if hangs else [rank],
            text=f"rank {rank_ranges(ended)} saw it end, and on rank {rank} it is {STATES[evidence.calls.state[row]]}"
            + ("" if hangs else ": it hangs there, or the dump was taken just before"),
        )
        search.add_root(finding, [])


def _died_on_gloo(search: Search, rank: int) -> bool:
    others = [one for one in search.job.ranks.values() if one.source == "flight"]
    return search.job.ranks[rank].ending.unseen and bool(others) and all(one.backend == "gloo" for one in others)


def find_raised_exceptions(search: Search) -> None:
    """Ranks that exceptions ended, where no call shows a fault: a job that failed is not healthy."""
    if search.found.roots or search.waiting.heads:
        return
    ranks = search.job.ranks
    raised = [rank for rank, one in ranks.items() if one.ending.has_raised]
    failed = [] if was_cancelled(search.job) else [rank for rank, one in ranks.items() if one.ending.has_failed]
    if not raised and not failed:
        return
    world = max(search.job.groups, key=lambda group: (len(group.ranks), -group.index), default=None)
    unseen = [rank for rank, one in ranks.items() if one.ending.unseen]
    # Who died first nothing says: a few are sooner the cause of what many raise than the other way round.
    unseen = unseen if len(unseen) < len(raised) or not raised else []
    texts = [f"rank {rank_ranges(unseen)} ended without a word"] if unseen else []
    texts += sorted(f"rank {rank}: {ranks[rank].ending.error}" for rank in (raised or failed)[:4])
    search.add_root(
        Finding(
            kind="dump_missing" if unseen else "raised",
            pg=world.pg if world is not None else ["", ""],
            pg_ranks=list(world.ranks) if world is not None else list(search.job.world),
            culprit_ranks=unseen or raised,
            waiting_ranks=sorted({*failed, *raised}) if unseen else failed,
            exception=None if unseen else next((ranks[rank].ending.error for rank in raised), None),
            text="; ".join(texts),
        ),
        [],
    )


def find_stale_ranks(search: Search) -> None:
    """Ranks that notice no ends although their jobs' other ranks do: beside a hang, a fault of their own.

    What such a rank does not notice, its GPU has not done or its watchdog cannot see, whether or not others wait for
    it. Of a job in which nobody waits it says nothing.
    """
    job = search.job
    stale = [rank for rank, rows in job.unnoticed.items() if len(rows) >= CLEARLY_STALE]
    if not search.waiting.heads or len(stale) * 2 >= len(job.ranks):
        return
    for rank in sorted(set(stale) - search.accused()):
        rows = job.unnoticed[rank]
        group, row = job.group_at(rank, rows[0]), rows[0]
        text = (
            f"rank {rank} goes on making calls, but notices no end of {len(rows)} calls that are over on the others: "
            "its GPU or its watchdog is stuck"
        )
        finding = Finding(
            kind="not_completed",
            pg=group.pg,
            pg_ranks=list(group.ranks),
            collective_seq_id=job.ranks[rank].calls.number[row],
            op=job.signature(rank, row).op,
            culprit_ranks=[rank],
            text=text,
        )
        search.add_root(finding, [], job.moment(rank, row))


def _how_it_stopped(search: Search, absent: set[int]) -> Iterator[str]:
    """What is known of ranks that have not made a call and wait for nobody."""
    ends: dict[str, list[int]] = {}
    for rank in sorted(absent):
        evidence = search.job.ranks[rank]
        if evidence.ending.reason in LEFT or evidence.ending.ended:
            why = evidence.ending.error or evidence.ending.reason or "its recording ended"
            left = f"left the job ({why}) without making this call"
            ends.setdefault(left, []).append(rank)
        elif evidence.source == "comms" and any(one.source == "flight" for one in search.job.ranks.values()):
            how = (
                "left no dump, and its comms file ends before this call: it died, or does not notice that the job hangs"
            )
            ends.setdefault(how, []).append(rank)
        else:
            ends.setdefault("stopped making calls before it and waits for nobody", []).append(rank)
    yield from (f"rank {rank_ranges(ranks)} {how}" for how, ranks in ends.items())


def _is_extra(search: Search, stall: Stall, absent: set[int]) -> bool:
    """Whether the few that wait, not the many that are absent, are the odd ones."""
    group = stall.group
    if absent & search.waiting.stale.keys() or any(search.job.ranks[rank].dump.active_only for rank in absent):
        return False
    everyone_else = absent == set(group.ranks) - set(stall.waiting)
    if not everyone_else or len(stall.waiting) * 2 >= len(group.ranks):
        return False
    heads = search.waiting.heads
    # The turn of this call has come on a rank whose calls have led to it before: then the others are late.
    return not any(is_usual(search.job, rank, heads[rank].row) for rank in stall.waiting)


def find_lacking_ranks(search: Search) -> None:
    """Ranks of which there is no evidence: named once, with the call in which most others wait for them."""
    lacking = {rank: kind for rank, kind in search.lacking.items() if rank not in search.explained}
    told: set[int] = set()
    while True:
        candidates = [
            (stall, {rank for rank in stall.absent if lacking.get(rank) and rank not in told})
            for stall in search.left()
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
            search.add_root(finding_of(stall, kind, culprits=culprits, text=text), [stall] if first else [])
            first = False
    rest = sorted(rank for rank in lacking if rank not in told)
    world = max(search.job.groups, key=lambda group: (len(group.ranks), -group.index), default=None)
    for kind in dict.fromkeys(lacking[rank] for rank in rest):
        culprits = [rank for rank in rest if lacking[rank] == kind]
        finding = Finding(
            kind=kind,
            pg=world.pg if world is not None else ["", ""],
            pg_ranks=list(world.ranks) if world is not None else list(search.job.world),
            culprit_ranks=culprits,
            text=f"rank {rank_ranges(culprits)} cannot be judged; no other rank waits for it",
        )
        search.add_root(finding, [])
