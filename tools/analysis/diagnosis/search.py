"""The state of a search for causes: which operations are explained, and by which finding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from crossrank.tools.analysis.diagnosis.call_history import first_in_program, most_waiters_first
from crossrank.tools.analysis.diagnosis.findings import Finding
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.analysis.diagnosis.p2p import Pairing
from crossrank.tools.analysis.diagnosis.states import is_moving, may_try_a_lock_of, released_by, waits_for_key
from crossrank.tools.analysis.diagnosis.wait_for_graph import StuckOp, WaitForGraph
from crossrank.tools.job.groups import ProcessGroup

_LAST = 1 << 63
"""Later than any time: the start of causes that no call shows."""


@dataclass
class Search:
    """The state of a job, and the causes that were found so far."""

    job: JobState
    graph: WaitForGraph
    pairing: Pairing
    lacking: dict[int, str]
    """Rank without usable evidence -> kind of the finding with the reason."""
    roots: list[Finding] = field(default_factory=list)
    consequences: list[Finding] = field(default_factory=list)
    in_progress: list[Finding] = field(default_factory=list)
    root_of: dict[StuckOp, int] = field(default_factory=dict)
    """Operation -> index of the root that explains it."""
    began: list[int] = field(default_factory=list)
    """Start of the effects of each root, in ns since 1970."""
    explained: set[int] = field(default_factory=set)
    """Ranks without evidence because a root ended them."""

    def left(self) -> list[StuckOp]:
        """Return the operations that no root explains yet."""
        return [op for op in self.graph.ops if op not in self.root_of]

    @cached_property
    def _idle(self) -> set[int]:
        unknown = {rank for rank in self.may_wait_otherwise - self._listening if not self.is_known(rank)}
        unknown |= {rank for rank, one in self.job.ranks.items() if one.dump.waits_for_unknown}
        return self.job.ranks.keys() - self.graph.blocked.keys() - self.lacking.keys() - unknown

    def is_known(self, rank: int) -> bool:
        """Return whether a rank has answered what it does."""
        ending = self.job.ranks[rank].ending
        return ending.activity is not None or ending.seen is not None

    @cached_property
    def may_wait_otherwise(self) -> set[int]:
        """Return ranks with unfinished calls but no known wait for them. They may wait in an unrecorded way, such as
        polling whether a call has finished."""
        job = self.job
        return {rank for rank in job.ranks if job.open_rows[rank] and job.waits_for_none(rank)}

    @cached_property
    def _listening(self) -> set[int]:
        """Return those of them whose other threads wait for all of these calls."""
        job = self.job
        return {one for one in self.may_wait_otherwise if job.ranks[one].awaited.issuperset(job.open_rows[one])}

    @cached_property
    def waiting_unrecorded(self) -> set[int]:
        """Return ranks that wait outside of calls. Empty if they are few and all others are in calls: then they made a
        wrong turn."""
        job = self.job
        found = {one for one in self._idle if job.waits_unrecorded(one) or waits_for_key(job.ranks[one].ending)}
        return set() if found == self._idle and len(found | self.lacking.keys()) * 2 < len(self.job.world) else found

    @property
    def silent(self) -> set[int]:
        """Return ranks with evidence that do not wait."""
        return self._idle - self.waiting_unrecorded

    @cached_property
    def may_wait_for_a_thread(self) -> dict[int, set[int]]:
        """Return silent rank -> the ranks that one of its threads receives from, if they are silent, missing, or in
        this result themselves.

        The main thread of the rank may wait for this thread in a lock, which the files do not show.
        """
        job, found = self.job, dict[int, set[int]]()
        silent = (self.silent - self._listening) | self.lacking.keys()
        listening = [rank for rank in self.silent & self._listening if not is_moving(job.ranks[rank])]
        for _ in listening:  # a chain of them has at most this length
            for rank in listening:
                ends = [(job.signature(rank, row).peer, job.group_at(rank, row)) for row in job.open_rows[rank]]
                # A receive from any source may be from any member.
                senders = {one for peer, group in ends for one in (group.ranks if peer is None else [peer])}
                if rank not in found and (those := (silent | found.keys()) & senders - {rank}):
                    found[rank] = those
        return found

    @cached_property
    def _rank_of_process(self) -> dict[tuple[str, int], int]:
        """(host, process) -> the rank that it is, or that it is a child of."""
        found = {}
        for rank, trace in self.job.ranks.items():
            activity, process = trace.ending.activity, trace.ending.process
            for one in (process, *(child.id for child in (activity.children if activity is not None else ()))):
                if one is not None:
                    found[trace.host, one] = rank
        return found

    def released_by(self, rank: int, pg: str) -> set[int]:
        """Return the other ranks that can release a rank that has not made a call on a group: it waits for a file lock
        of theirs, or for their data. Empty if something else may release it."""
        found = self._ranks_of(rank, released_by(self.job.ranks[rank].ending, pg))
        return set() if None in found or rank in found else {one for one in found if one is not None}

    def may_try_a_lock_of(self, rank: int, pg: str) -> set[int]:
        """Return the ranks that have locked a file which a rank that sleeps has open."""
        found = self._ranks_of(rank, may_try_a_lock_of(self.job.ranks[rank].ending, pg))
        return {one for one in found if one is not None and one != rank}

    def _ranks_of(self, rank: int, processes: Iterable[int]) -> set[int | None]:
        """Return the ranks of processes on the host of a rank; None is in it for a process that is none of them."""
        host = self.job.ranks[rank].host
        return {self._rank_of_process.get((host, one)) for one in processes}

    def kept_by(self, rank: int, pg: str) -> set[int]:
        """Return the silent ranks at the ends of what a silent rank waits for: through pipes, sockets and file locks,
        and through the calls that those wait in. The rank itself if it waits for none."""
        reached, left, ends = {rank}, [rank], set[int]()
        while left:
            one = left.pop()
            op = self.graph.op_of.get(one)
            those = op.absent if op is not None else self.released_by(one, pg) if one in self.job.ranks else set()
            left += those - reached
            reached |= those
            if not those:
                ends.add(one)
        return ends if ends and ends <= self.silent else {rank}

    @cached_property
    def cancelled(self) -> bool:
        """Return whether several ranks were ended from outside, in a job in which no rank had ended or failed before.

        If only one rank was ended, it is the reason why the others fail. If communication failed first, this is the
        reason why the launcher ended the ranks.
        """
        endings = [one.ending for one in self.job.ranks.values()]
        terminated = [one.taken_at or _LAST for one in endings if one.was_terminated]
        several = len(terminated) > 1
        if several and any((one.taken_at or _LAST) < min(terminated) for one in endings if one.has_failed):
            return False
        return several and not any(one.ended_itself or one.unseen for one in endings)

    @cached_property
    def anyone_failed(self) -> bool:
        """Return whether the communication of a rank failed, as it does on gloo if a peer ends."""
        return any(one.ending.has_failed for one in self.job.ranks.values())

    @property
    def world(self) -> ProcessGroup:
        """Return the largest group, for findings without a group."""
        everyone = ProcessGroup(index=-1, name="", desc="", members=self.job.world, size=len(self.job.world))
        return max(self.job.groups, key=lambda group: (len(group.ranks), -group.index), default=everyone)

    def may_be_members(self, group: ProcessGroup) -> set[int]:
        """Return ranks that do not wait or have no evidence, and are not known members of a group."""
        return (self.silent | self.lacking.keys()) - set(group.ranks)

    def add_root(self, finding: Finding, ops: Iterable[StuckOp] = (), since: int | None = None) -> None:
        """Add a root cause that explains `ops`. It started at `since` (ns since 1970), or with the first of `ops`."""
        moments = [op.since for op in ops] + ([since] if since is not None else [])
        for op in ops:
            self.root_of.setdefault(op, len(self.roots))
        self.roots.append(finding)
        self.began.append(min(moments, default=_LAST))

    def by_most_waited_for(self, ranks: set[int], *, free: bool = False) -> Iterator[tuple[StuckOp, set[int]]]:
        """Yield (operation, the ranks of `ranks` that are missing in it, with `free` also those that are free to come).

        Starts with the operation that lacks most ranks that were not yielded before; if several lack the same ranks,
        with the first in the program. The caller must explain each operation.
        """
        met: set[int] = set()
        while lacking := {op: those for op in self.left() if (those := self._missing(op, ranks, free)) - met}:
            news = {op: absent - met for op, absent in lacking.items()}
            first = min(news, key=lambda op: (-len(news[op]), *most_waiters_first(op)))
            op = first_in_program(self.job, [op for op in news if news[op] == news[first]])
            met |= lacking[op]
            yield op, lacking[op]

    @staticmethod
    def _missing(op: StuckOp, ranks: set[int], free: bool) -> set[int]:
        return op.absent & ranks | (op.free if free else set())


def finding_on(group: ProcessGroup, kind: str, **facts: Any) -> Finding:
    return Finding(kind=kind, pg=group.pg, pg_ranks=list(group.ranks), **facts)


def finding_at(job: JobState, rank: int, row: int, kind: str, **facts: Any) -> Finding:
    """Return a finding about a collective that a rank made."""
    number, op = job.ranks[rank].calls.number[row], job.signature(rank, row).op
    return finding_on(job.group_at(rank, row), kind, collective_seq_id=number, op=op, **facts)


def finding_of(op: StuckOp, kind: str, *, culprits: Iterable[int] = (), **facts: Any) -> Finding:
    """Return a finding about a stuck operation. By default, all its ranks except the culprits wait."""
    number = "p2p_seq_id" if op.is_p2p else "collective_seq_id"
    waiting = sorted(set(op.waiting).difference(culprits))
    about = {number: op.seq, "op": op.op, "culprit_ranks": sorted(culprits), "waiting_ranks": waiting}
    return finding_on(op.group, kind, **about | facts)
