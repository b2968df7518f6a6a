"""All ranks side by side: the groups they share, who of them is missing, and where each stands on every group.

A group is its name and its members: torch lets different sets of ranks use one name (`split_group`), and one rank
cannot be in two groups of a name. gloo's dumps name no members: what an all_gather puts together says
how many they are. A group of which that is not known either is everyone who recorded a call on that name, which is
told (`JobGroup.inferred`); the default group is everyone there is.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import msgspec

from crossrank.comm import OPERATIONS
from crossrank.tools.analysis.diagnosis.evidence import COMPLETED, GLOO, RETIRED, RankEvidence, Signature, Table
from crossrank.tools.traces.flight_recorder import Frame

DEFAULT_GROUP = "default_pg"

CLEARLY_STALE = 3
"""Ends that a rank must have missed before its GPU or its watchdog is called stuck: the last one may be just late."""

_SETTLED = 1_000_000_000
"""ns after which a call that has ended is sure to be noticed by a rank that notices anything."""


@dataclass
class Lane:
    """The collectives of one rank on one group, in order of their sequence numbers."""

    rows: array[int] = field(default_factory=lambda: array("I"))
    """Rows of the rank's calls."""
    seqs: array[int] = field(default_factory=lambda: array("q"))

    def row(self, seq: int) -> int | None:
        """The row of collective `seq`, or None."""
        index = self.index(seq)
        return None if index is None else self.rows[index]

    def index(self, seq: int) -> int | None:
        seqs = self.seqs
        if not seqs:
            return None
        guess = seq - seqs[0]
        if 0 <= guess < len(seqs) and seqs[guess] == seq:
            return guess
        guess = bisect_left(seqs, seq)
        return guess if guess < len(seqs) and seqs[guess] == seq else None


@dataclass
class JobGroup:
    """One process group over all its ranks."""

    index: int
    name: str
    desc: str
    ranks: tuple[int, ...]
    """Global ranks of its members, in rising order."""
    apart: str = ""
    """As in `GroupClaim`."""
    inferred: bool = False
    """The members are not known but gathered from who recorded a call on it: there may be more."""
    size: int = 0
    """How many members its calls show it to have; 0 = not known."""
    local_index: dict[int, int] = field(default_factory=dict)
    """Rank -> index of the group in that rank's own list."""
    lanes: dict[int, Lane] = field(default_factory=dict)
    """Rank -> its collectives."""
    has_p2p: bool = False

    @property
    def pg(self) -> list[str]:
        return [self.name, self.desc]


@dataclass
class Job:
    """All evidence, compared."""

    ranks: dict[int, RankEvidence]
    groups: list[JobGroup]
    group_of: dict[int, list[int]]
    """Rank -> its local index of a group -> index in `groups`."""
    signatures: list[Signature]
    """The rows that `Calls.signature` of every rank points to."""
    stacks: list[tuple[Frame, ...]]
    world: tuple[int, ...]
    """Every rank that the job is known to have."""
    clock_offset: dict[int, int] = field(default_factory=dict)
    """Rank -> what to add to its times, in ns, to bring the clocks of the ranks together."""
    outside: list[str] = field(default_factory=list)
    """What was left out because it cannot belong to this job."""

    @property
    def missing(self) -> list[int]:
        """Ranks that the job has and of which nothing was left."""
        return [rank for rank in self.world if rank not in self.ranks]

    def enqueued(self, group: JobGroup, rank: int) -> int | None:
        """The last collective that `rank` is known to have called on `group`; None where that cannot be told."""
        evidence, local = self.ranks.get(rank), group.local_index.get(rank)
        if evidence is None:
            return None
        lane = group.lanes.get(rank)
        if lane is not None:
            return max(lane.seqs[-1], evidence.collectives_seen.get(local if local is not None else -1, 0))
        if group.name in evidence.inside_node:
            return None
        if local is None:
            return None if evidence.active_only or evidence.wrapped else 0
        seen = evidence.collectives_seen.get(local)
        if seen:
            return seen
        progress = evidence.progress.get(local)
        # P2P calls put their number in the same place, and gloo's are not even among the entries.
        if progress is not None and not group.has_p2p and not evidence.is_gloo(local):
            return max(progress.last_enqueued_collective, 0)
        if progress is None and evidence.all_joined:
            return 0  # a group has a status from its first call on
        if evidence.active_only or evidence.wrapped:
            return None
        return 0

    def completed(self, group: JobGroup, rank: int) -> int:
        """The last collective of `group` that `rank` itself saw the end of; 0 = none that is known."""
        evidence = self.ranks[rank]
        best = self._last_in_state(group, rank, COMPLETED)
        lane = group.lanes.get(rank)
        on_gloo = evidence.is_gloo(group.local_index.get(rank))
        if evidence.active_only and lane is not None and not on_gloo:
            best = max(best, lane.seqs[0] - 1)  # those before the first open one were left out
        progress = evidence.progress.get(group.local_index.get(rank, -1))
        # gloo counts a collective that timed out as completed; P2P puts its own numbers there.
        if progress is not None and not on_gloo and not group.has_p2p:
            best = max(best, progress.last_completed_collective)
        return best

    def released(self, group: JobGroup) -> int:
        """The last collective that is over on every rank, because one that nobody leaves early has ended somewhere.

        Collectives of one group end in order, so all before it are over as well.
        """
        present = [rank for rank in group.ranks if rank in self.ranks]
        last = max((self.completed(group, rank) for rank in present), default=0)
        # A retired call may have timed out; but not where every member has made it.
        retired = max((self._last_in_state(group, rank, RETIRED) for rank in present), default=0)
        if len(present) == len(group.ranks) and present:
            made_by_all = min(self.enqueued(group, rank) or 0 for rank in present)
            if all(self.ranks[rank].source == "comms" for rank in present):
                retired = made_by_all  # comms files never say that a call ended
            last = max(last, min(retired, made_by_all))
        while last > 0:
            op = self._op_at(group, last)
            row = OPERATIONS.get(op) if op is not None else None
            if op is None or (row is not None and row.releases_all):
                return last
            last -= 1
        return 0

    @cached_property
    def over(self) -> dict[int, int]:
        """Index of a group -> the last of its collectives that is over on every rank."""
        return {group.index: self.released(group) for group in self.groups}

    @cached_property
    def unnoticed(self) -> dict[int, list[int]]:
        """Rank -> rows of its collectives that are over and whose end it has not noticed; only ranks that have such."""
        found = {rank: self._unnoticed_by(rank) for rank in self.ranks}
        return {rank: rows for rank, rows in found.items() if rows}

    def moment(self, rank: int, row: int) -> int:
        """When a call was made, in ns since 1970, on a clock that is that of all ranks as far as is known."""
        return self.ranks[rank].calls.created[row] + self.clock_offset.get(rank, 0)

    def blind_until(self, rank: int) -> int:
        """The row before which nothing follows from a call that looks open: the rank notices no ends. 0 = it does."""
        rows = self.unnoticed.get(rank, [])
        return rows[-1] if len(rows) >= CLEARLY_STALE else 0

    def _unnoticed_by(self, rank: int) -> list[int]:
        evidence = self.ranks[rank]
        if evidence.source != "flight" or evidence.backend == "gloo":
            return []  # they report no ends
        calls, mine = evidence.calls, self.group_of[rank]
        last = len(calls)
        if evidence.taken_at is not None:  # what was made just before may have ended just after
            last = bisect_left(calls.created, evidence.taken_at - _SETTLED)
        return [
            row
            for row in range(last)
            if calls.state[row] < RETIRED
            and calls.seq[row] <= self.over[mine[calls.group[row]]]
            and not self.signature(rank, row).is_p2p
            and not evidence.is_gloo(calls.group[row])
        ]

    def signature(self, rank: int, row: int) -> Signature:
        return self.signatures[self.ranks[rank].calls.signature[row]]

    def stack(self, rank: int, row: int) -> tuple[Frame, ...]:
        return self.stacks[self.ranks[rank].calls.stack[row]]

    def group_at(self, rank: int, row: int) -> JobGroup:
        return self.groups[self.group_of[rank][self.ranks[rank].calls.group[row]]]

    def _last_in_state(self, group: JobGroup, rank: int, state: int) -> int:
        """The last collective of the rank that has come as far as `state`; 0 = none."""
        lane = group.lanes.get(rank)
        if lane is None:
            return 0
        states = self.ranks[rank].calls.state
        for index in range(len(lane.rows) - 1, -1, -1):
            if states[lane.rows[index]] >= state:
                return lane.seqs[index]
        return 0

    def _op_at(self, group: JobGroup, seq: int) -> str | None:
        for rank, lane in group.lanes.items():
            row = lane.row(seq)
            if row is not None:
                return self.signature(rank, row).op
        return None


def merge(evidence: list[RankEvidence], world_size: int | None = None) -> Job:
    """Put the ranks side by side. `evidence` has each rank once; `world_size` is what the user says."""
    evidence = sorted(evidence, key=lambda one: one.rank)
    evidence, outside = _without_strangers(evidence, world_size)
    _share_what_dumps_leave_out(evidence)
    _keep_backends_apart(evidence)
    ranks = {one.rank: one for one in evidence}
    sizes = _sizes(evidence)
    world, world_is_known = _world(evidence, world_size, sizes)
    signatures: Table[Signature] = Table()
    stacks: Table[tuple[Frame, ...]] = Table()
    for one in evidence:
        calls = one.calls
        numbers = [signatures.number(signature) for signature in one.signatures]
        calls.signature = array("I", map(numbers.__getitem__, calls.signature))
        numbers = [stacks.number(stack) for stack in one.stacks]
        calls.stack = array("I", map(numbers.__getitem__, calls.stack))
        one.signatures, one.stacks = [], []
    groups, group_of = _groups(evidence, world, world_is_known, sizes)
    job = Job(
        ranks=ranks,
        groups=groups,
        group_of=group_of,
        signatures=signatures.rows,
        stacks=stacks.rows,
        world=world,
        outside=outside,
    )
    p2p = [signature.is_p2p for signature in signatures.rows]
    for one in evidence:
        _fill_lanes(one, groups, group_of[one.rank], p2p)
    return job


def _keep_backends_apart(evidence: list[RankEvidence]) -> None:
    """A rank that has used gloo alone of a group's backends counts as those do that have used another beside it."""
    if not any(claim.apart == GLOO for one in evidence for claim in one.groups):
        return
    for one in evidence:
        if one.backend == GLOO:
            one.groups = [claim if claim.apart else msgspec.structs.replace(claim, apart=GLOO) for claim in one.groups]


def _share_what_dumps_leave_out(evidence: list[RankEvidence]) -> None:
    """All ranks of a job dump alike: where one leaves completed calls out, so does one that does not show it."""
    if not any(one.active_only for one in evidence):
        return
    for one in evidence:
        if one.source == "flight" and one.backend != "gloo" and COMPLETED not in one.calls.state and one.groups:
            one.active_only, one.wrapped = True, False


def _without_strangers(evidence: list[RankEvidence], world_size: int | None) -> tuple[list[RankEvidence], list[str]]:
    """Leave out ranks beyond the world: most often a file of another job, or a number that is no rank."""
    claims: Counter[int] = Counter()
    for one in evidence:
        of_group = [max(group.ranks) + 1 for group in one.groups if group.ranks and _is_world(group.desc)]
        claims[one.world_size or max(of_group, default=0)] += 1
    size, by = max(claims.items(), key=lambda claim: (claim[1], claim[0]), default=(0, 0))
    # What one rank says does not shut out the others.
    size = world_size or (size if by * 2 > len(evidence) else 0)
    if not size:
        return evidence, []
    inside = [one for one in evidence if one.rank < size]
    outside = [
        f"{one.path}: rank {one.rank} is outside the world of {size} ranks; the file was left out"
        for one in evidence
        if one.rank >= size
    ]
    return inside, outside


def _is_world(desc: str) -> bool:
    return desc == DEFAULT_GROUP


def _world(evidence: list[RankEvidence], world_size: int | None, sizes: Sizes) -> tuple[tuple[int, ...], bool]:
    """(every rank that the job is known to have, whether it is known to have no others)"""
    if world_size is not None:
        return tuple(range(world_size)), True
    ranks: set[int] = set()
    known = False
    for one in evidence:
        for group in one.groups:
            ranks.update(group.ranks or ())
            size = len(group.ranks or ()) or sizes.get((group.name, group.apart), 0)
            if _is_world(group.desc) and size:
                ranks.update(group.ranks or range(size))
                known = True
        if one.world_size:
            ranks.update(range(one.world_size))
            known = True
    ranks.update(one.rank for one in evidence)
    # Ranks count from 0, so that below one that is there none can be lacking.
    return tuple(range(max(ranks, default=-1) + 1)), known


Sizes = dict[tuple[str, str], int]
"""Name of a group, and what is counted apart on it -> how many members its calls show it to have."""

_ONE_INPUT_PER_MEMBER = {"all_gather": 1, "gather": 1, "reduce_scatter": -1, "scatter": -1}
"""Operations of which one side is the group's size times the other: 1 where it is the output."""


def _sizes(evidence: list[RankEvidence]) -> Sizes:
    """The sizes of groups whose members somebody does not know, from what is gathered and scattered on them."""
    found: dict[tuple[str, str], Counter[int]] = {}
    for one in evidence:
        if all(claim.ranks is not None for claim in one.groups):
            continue
        for local, number in set(zip(one.calls.group, one.calls.signature, strict=True)):
            size = _size_shown_by(one.signatures[number])
            if size:
                claim = one.groups[local]
                found.setdefault((claim.name, claim.apart), Counter())[size] += 1
    return {key: max(counts, key=lambda size: (counts[size], size)) for key, counts in found.items()}


def _size_shown_by(signature: Signature) -> int:
    """How many members a gathering or scattering call shows; 0 = it shows nothing, or is uneven."""
    way = _ONE_INPUT_PER_MEMBER.get(signature.op, 0)
    part, whole = (signature.inputs, signature.outputs)[::way] if way else ((), ())
    if len(set(whole)) > 1:
        return 0
    elements = [sum(map(prod, shapes)) for shapes in (part, whole)]
    return elements[1] // elements[0] if elements[0] and elements[1] % elements[0] == 0 else 0


def _groups(
    evidence: list[RankEvidence], world: tuple[int, ...], world_is_known: bool, sizes: Sizes
) -> tuple[list[JobGroup], dict[int, list[int]]]:
    known: dict[tuple[str, str, tuple[int, ...]], JobGroup] = {}
    unknown: dict[tuple[str, str], JobGroup] = {}
    # Members that one rank knows serve for a rank that does not.
    members_of: dict[str, list[tuple[int, ...]]] = {}
    for one in evidence:
        for claim in one.groups:
            if claim.ranks is not None and claim.ranks not in members_of.setdefault(claim.name, []):
                members_of[claim.name].append(claim.ranks)
    groups: list[JobGroup] = []
    group_of: dict[int, list[int]] = {}
    for one in evidence:
        mine: list[int] = []
        for local, claim in enumerate(one.groups):
            members = claim.ranks
            if members is None:
                members = next((ranks for ranks in members_of.get(claim.name, ()) if one.rank in ranks), None)
            size = sizes.get((claim.name, claim.apart), 0)
            inferred = False
            if members is None and (_is_world(claim.desc) or size == len(world)):
                members, inferred = world, not world_is_known
            if members is not None:
                group = known.get((claim.name, claim.apart, members))
                if group is None:
                    ranks = tuple(sorted(set(members)))
                    group = JobGroup(
                        len(groups), claim.name, claim.desc, ranks, claim.apart, inferred=inferred, size=size
                    )
                    known[claim.name, claim.apart, members] = group
                    groups.append(group)
            else:
                group = unknown.get((claim.name, claim.apart))
                if group is None:
                    group = JobGroup(len(groups), claim.name, claim.desc, (), claim.apart, inferred=True, size=size)
                    unknown[claim.name, claim.apart] = group
                    groups.append(group)
                if one.rank not in group.ranks:
                    group.ranks = (*group.ranks, one.rank)
            group.desc = group.desc or claim.desc
            group.local_index.setdefault(one.rank, local)
            mine.append(group.index)
        group_of[one.rank] = mine
    for group in groups:
        group.inferred = group.inferred and group.size != len(group.ranks)
    return groups, group_of


def _fill_lanes(one: RankEvidence, groups: list[JobGroup], mine: list[int], p2p: list[bool]) -> None:
    for local in one.with_p2p:
        groups[mine[local]].has_p2p = True
    lanes: dict[int, Lane] = {}
    calls = one.calls
    for row, (local, seq, number) in enumerate(zip(calls.group, calls.seq, calls.signature, strict=True)):
        if p2p[number]:
            groups[mine[local]].has_p2p = True
            continue
        lane = lanes.get(local)
        if lane is None:
            lane = lanes[local] = groups[mine[local]].lanes.setdefault(one.rank, Lane())
        if lane.seqs and seq <= lane.seqs[-1]:
            continue  # a call that was recorded twice, or a new epoch of the recorder
        lane.rows.append(row)
        lane.seqs.append(seq)
