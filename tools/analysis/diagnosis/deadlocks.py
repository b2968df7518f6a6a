"""Root causes among ranks that all wait: a call that every member has reached, and ranks that wait in a circle."""

from __future__ import annotations

from crossrank.text import rank_ranges
from crossrank.tools.analysis.diagnosis.collectives import MISSING
from crossrank.tools.analysis.diagnosis.findings import call_text, group_text
from crossrank.tools.analysis.diagnosis.habits import has_skipped, is_new, is_usual
from crossrank.tools.analysis.diagnosis.job_state import CLEARLY_STALE
from crossrank.tools.analysis.diagnosis.search import Search, finding_of
from crossrank.tools.analysis.diagnosis.waiting import (
    Stall,
    Waiting,
    circles,
    grouped_by_stall,
    reports_starts,
    started,
)


def find_closed_stalls(search: Search) -> None:
    """Calls in which ranks are stuck although nobody is missing."""
    for stall in search.left():
        inside = stall.waits_for() <= set(stall.waiting)
        if inside and stall.absent and stall.is_p2p:  # two ends of a batch, one of which lacks an answer to the other
            culprits = stall.absent if len(stall.absent) < len(stall.waiting) else set()
            text = f"rank {rank_ranges(sorted(stall.absent))} made no call that answers one of the other's"
            finding = finding_of(stall, "p2p_unmatched", culprits=culprits, text=text)
            search.add_root(finding, [stall])
            continue
        if not inside or (stall.unknown and not stall.is_p2p) or _may_have_more_members(search, stall):
            continue
        kind, culprits_of, text = _why_closed(search, stall)
        search.add_root(finding_of(stall, kind, culprits=culprits_of, text=text), [stall])


def _may_have_more_members(search: Search, stall: Stall) -> bool:
    """Whether a rank that waits for nobody may be a member of a group whose members are only known from their calls."""
    return stall.group.inferred and bool(search.may_be_members(stall.group))


def _why_closed(search: Search, stall: Stall) -> tuple[str, list[int], str]:
    job, waiting = search.job, search.waiting
    on_gpu = all("nccl" in job.ranks[rank].backend for rank in stall.waiting)
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
    stale = [rank for rank in stall.waiting if waiting.stale.get(rank, 0) >= CLEARLY_STALE]
    if stale and len(stale) * 2 < len(stall.waiting):
        return (
            "not_completed",
            stale,
            f"rank {rank_ranges(stale)} goes on making calls, but notices no end of calls that are over on the others",
        )
    who = "every member made the call"
    if stall.group.inferred and stall.group.size > len(stall.group.ranks):
        here = rank_ranges(stall.group.ranks)
        return MISSING, [], f"of the {stall.group.size} members rank {here} made the call; the others are not known"
    if stall.group.inferred:
        who = "every rank that ever called on this group made the call; whether it has other members is not known"
    elif any(rank not in job.ranks for rank in stall.group.ranks):
        who = "every member with a dump made the call"
    return "all_joined_not_completed", [], f"{who}; the dumps do not show who holds it up"


def find_circles(search: Search) -> None:
    """Ranks that wait for each other."""
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
            search.add_root(finding_of(stall, kind, culprits=culprits, text=text), explained)
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
            odd = _odd_in_cycle(search, circle)
        else:
            kind, stuck = "p2p_unmatched", [rank for _, ranks in p2p for rank in ranks]
            # Either the answer was left out, or the collective: without calls like these before, nobody can tell.
            stall = p2p[0][0]
        finding = finding_of(stall, kind, culprits=odd, text=_chain(waiting, circle, edges))
        finding.waiting_ranks = sorted(set(stuck) - set(odd))
        search.add_root(finding, explained)


def _skipped_by(search: Search, stall: Stall, circle: list[int]) -> tuple[Stall, list[int]]:
    """The ranks of a circle that made another call where this one was due, if all that lack it did."""
    heads = search.waiting.heads
    absent = stall.waits_for() & set(circle)
    peers = tuple(stall.waiting) if stall.is_p2p else ()
    past = [rank for rank in absent if has_skipped(search.job, rank, stall.group, heads[rank].row, peers)]
    return stall, sorted(past) if len(past) == len(absent) else []


def _odd_in_cycle(search: Search, circle: list[int]) -> list[int]:
    """Of a circle of sends and receives, the ranks that did what they never did, where all others did as always."""
    heads = search.waiting.heads
    odd = [rank for rank in circle if is_new(search.job, rank, heads[rank].row)]
    usual = [rank for rank in circle if is_usual(search.job, rank, heads[rank].row)]
    return odd if len(odd) + len(usual) == len(circle) and len(odd) < len(usual) else []


def _odd_in_order(waiting: Waiting, circle: list[int], parts: list[tuple[Stall, list[int]]]) -> list[int]:
    """Of a circle over groups, the ranks of the rarer order: among those that are in all of its groups."""
    both = set.intersection(*(set(stall.group.ranks) for stall, _ in parts))
    votes = [len(both.intersection(stall.waiting)) for stall, _ in parts]
    most = max(votes)
    if most * 2 <= sum(votes):
        return []
    in_order = parts[votes.index(most)][0].waiting
    return sorted(rank for rank in both.intersection(circle) if rank not in in_order)


def _chain(waiting: Waiting, circle: list[int], edges: dict[int, set[int]]) -> str:
    """The circle in words, as a walk from its lowest rank."""
    inside = set(circle)
    walk, rank = [], circle[0]
    for _ in circle:
        target = min(edges[rank] & inside, default=None)
        if target is None:
            break
        stall = waiting.stall_of[rank]
        walk.append(f"rank {rank} waits for {target} in {group_text(stall.group.pg)} {call_text(stall.op, stall.seq)}")
        if target == circle[0] or target not in edges:
            break
        rank = target
    more = len(circle) - len(walk)
    return "; ".join(walk[:8]) + (f"; … {more} more ranks" if more > 0 else "")
