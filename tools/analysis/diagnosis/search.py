"""What the searches for causes share: the picture of who waits, and what has been found so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from crossrank.tools.analysis.diagnosis.findings import Finding
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.analysis.diagnosis.p2p import Pairing
from crossrank.tools.analysis.diagnosis.unrecorded import waits_unrecorded
from crossrank.tools.analysis.diagnosis.waiting import Stall, Waiting
from crossrank.tools.job.groups import ProcessGroup

_LAST = 1 << 63
"""Later than any moment: of what no call shows."""


@dataclass
class Causes:
    """Everything found, roots first."""

    roots: list[Finding] = field(default_factory=list)
    consequences: list[Finding] = field(default_factory=list)
    in_progress: list[Finding] = field(default_factory=list)


@dataclass
class Search:
    """The state of one search."""

    job: JobState
    waiting: Waiting
    pairing: Pairing
    lacking: dict[int, str]
    """Rank without usable evidence -> kind of finding that says why."""
    found: Causes = field(default_factory=Causes)
    root_of: dict[int, int] = field(default_factory=dict)
    """id of a stall -> index of the root that explains it"""
    ranks_of_root: list[set[int]] = field(default_factory=list)
    began: list[int] = field(default_factory=list)
    """When each root began to show, in ns since 1970."""
    explained: set[int] = field(default_factory=set)
    """Ranks of which there is no evidence because a root ended them."""

    def left(self) -> list[Stall]:
        """The stalls that no root explains yet."""
        return [stall for stall in self.waiting.stalls if id(stall) not in self.root_of]

    def silent(self) -> set[int]:
        """Ranks with evidence that wait for nobody."""
        idle = self.job.ranks.keys() - self.waiting.heads.keys() - self.lacking.keys()
        return idle - self.waiting_unrecorded()

    def waiting_unrecorded(self) -> set[int]:
        """Ranks that wait for others in what is no call; not a few while all others are in calls: they went astray."""
        idle = self.job.ranks.keys() - self.waiting.heads.keys() - self.lacking.keys()
        found = {rank for rank in idle if waits_unrecorded(self.job, rank)}
        return set() if found == idle and len(found | self.lacking.keys()) * 2 < len(self.job.world) else found

    def accused(self) -> set[int]:
        """Ranks that a root names."""
        return {rank for finding in self.found.roots for rank in finding.culprit_ranks}

    def may_be_members(self, group: ProcessGroup) -> set[int]:
        """Ranks that wait for nobody, or of which there is no evidence, and that a group does not show as members."""
        return (self.silent() | set(self.lacking)) - set(group.ranks)

    def add_root(self, finding: Finding, stalls: Sequence[Stall], since: int | None = None) -> None:
        """Add a root cause, which explains `stalls` and began at `since` (ns since 1970) or with the first of them."""
        index = len(self.found.roots)
        self.found.roots.append(finding)
        began = [stall.since for stall in stalls] + ([since] if since is not None else [])
        self.began.append(min(began, default=_LAST))
        self.ranks_of_root.append({*finding.culprit_ranks, *finding.waiting_ranks})
        for stall in stalls:
            self.root_of.setdefault(id(stall), index)


def was_cancelled(job: JobState) -> bool:
    """Whether somebody outside ended several ranks of a job that no rank had left before, or died in.

    One alone that was ended is why the others fail.
    """
    ranks = job.ranks.values()
    several = sum(one.ending.was_terminated for one in ranks) > 1
    return several and not any(
        one.ending.has_left or one.ending.unseen or one.ending.reason == "SIGABRT" for one in ranks
    )


def finding_of(stall: Stall, kind: str, *, culprits: Iterable[int] = (), text: str = "") -> Finding:
    """A finding about a call that ranks are stuck in; those of them that are no culprits wait."""
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
