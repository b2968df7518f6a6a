"""What follows from the root causes, and what no root explains."""

from __future__ import annotations

from collections import Counter

from crossrank.text import rank_ranges
from crossrank.tools.analysis.diagnosis.collectives import MISSING
from crossrank.tools.analysis.diagnosis.search import Search, finding_of
from crossrank.tools.analysis.diagnosis.waiting import Stall


def explain_the_rest(search: Search) -> None:
    """Every stall that is left becomes a consequence; where no root is behind one, the largest becomes a root."""
    ordered = sorted(search.left(), key=lambda stall: (stall.since, stall.group.index, stall.seq, stall.waiting))
    unexplained = [stall for stall in ordered if _root_behind(search, stall) is None]
    if unexplained:  # something holds these up that the evidence does not show
        stall = min(unexplained, key=lambda stall: (stall.since, -len(stall.waiting), stall.group.index))
        text = "the dumps do not show who holds it up"
        candidates = search.may_be_members(stall.group) if stall.group.inferred else set()
        if candidates:
            text = (
                f"the members of the group are not known; rank {rank_ranges(sorted(candidates))} may be one, "
                "and waits for nobody"
            )
        elif stall.unknown:
            text = f"of rank {rank_ranges(sorted(stall.unknown))} it cannot be told whether it made the call"
        elif stall.waits_for():
            text = f"waits for rank {rank_ranges(sorted(stall.waits_for()))}, of which nothing more is known"
        search.add_root(finding_of(stall, _kind_of_consequence(stall), text=text), [stall])
    for stall in ordered:
        if id(stall) in search.root_of:
            continue
        finding = finding_of(stall, _kind_of_consequence(stall), culprits=stall.waits_for() - set(stall.waiting))
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


def _root_behind(search: Search, stall: Stall) -> int | None:
    """The root that the waiting in this stall leads to: of those within reach, the nearest."""
    waiting = search.waiting
    seen = set(stall.waiting)
    front = set(stall.waits_for() or stall.unknown)
    if stall.group.inferred and not front:
        front = search.may_be_members(stall.group)
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
