"""All ranks of a job: their groups, and the collectives of each rank on each group by number.

`Job.match` joins groups across ranks for every command. These modules build on it:

* `matching` joins timed launches, for bandwidth, timeline and report.
* `analysis/diagnosis/p2p` pairs sends and receives, which may lack a match.
* `replay/plan/counterparts` pairs sends and receives for a replay.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from crossrank.comm import CommRecord, Locality, is_p2p
from crossrank.text import plural, rank_ranges
from crossrank.tools.job.groups import Lane, Members, ProcessGroup, is_world, join_groups, sizes_shown, world_of
from crossrank.tools.traces.comms import stack_of
from crossrank.tools.traces.flight.dump import Frame
from crossrank.tools.traces.rank_trace import Interned, RankTrace, Signatures

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class Job:
    """All ranks, matched."""

    ranks: dict[int, RankTrace]
    groups: list[ProcessGroup]
    group_of: dict[int, list[int]]
    """Rank -> its local index of a group -> index in `groups`."""
    signatures: list[CommRecord]
    """`Calls.signature` of every rank is an index into these."""
    stacks: list[tuple[Frame, ...]]
    world: tuple[int, ...]
    """All known ranks of the job."""
    outside: list[str] = field(default_factory=list)
    """Files that were skipped because they do not belong to this job."""
    skipped: list[str] = field(default_factory=list)
    """Files that could not be used, with the reason."""
    ranked_by: list[str] = field(default_factory=list)
    """What shows the ranks of files whose names and heads do not have them."""
    _locality_of: dict[object, Locality] = field(default_factory=dict)

    @classmethod
    def match(cls, traces: Sequence[RankTrace], world_size: int | None = None, *, lanes: bool = True) -> Self:
        """Match traces of different ranks. `world_size` is given by the user. Without `lanes`, `ProcessGroup.lanes`
        stays empty."""
        members = Members()
        traces, outside = _drop_outside_ranks(sorted(traces, key=lambda one: one.rank or 0), world_size, members)
        sizes = sizes_shown(traces)
        world, world_is_known = world_of(traces, world_size, sizes, members)
        signatures, stacks = Signatures(), Interned[tuple[Frame, ...]]()
        for trace in traces:
            calls = trace.calls
            numbers = list(map(signatures.number, trace.signatures))
            calls.signature = array("I", map(numbers.__getitem__, calls.signature))
            numbers = list(map(stacks.number, trace.stacks))
            calls.stack = array("I", map(numbers.__getitem__, calls.stack))
            trace.signatures, trace.stacks = signatures.rows, stacks.rows
        groups, group_of = join_groups(traces, world, world_is_known, sizes, members)
        p2p = list(map(is_p2p, signatures.rows))
        for trace in traces if lanes else ():
            _fill_lanes(trace, groups, group_of[trace.rank or 0], p2p)
        return cls(
            ranks={trace.rank or 0: trace for trace in traces},
            groups=groups,
            group_of=group_of,
            signatures=signatures.rows,
            stacks=stacks.rows,
            world=world,
            outside=outside,
        )

    @property
    def missing(self) -> list[int]:
        """Return the ranks without a file."""
        return [rank for rank in self.world if rank not in self.ranks]

    @property
    def missing_text(self) -> str:
        """Return which ranks have no file, and what that means; empty if none is missing."""
        if not (missing := self.missing):
            return ""
        verb, whose = ("is", "its") if len(missing) == 1 else ("are", "their")
        return f"rank {rank_ranges(missing)} {verb} missing: times of {whose} groups include waiting time"

    def locality_of(self, group: ProcessGroup, ends: tuple[int, ...] | None = None) -> Locality:
        """Return the locality of a group, or of a transfer between `ends`: as a file has it, else from the nodes of the
        ranks."""
        if group.locality != "unknown" and not ends:
            return group.locality
        if group.guessed and self.missing:
            return "unknown"
        key = (group.index, ends)
        if key not in self._locality_of:
            nodes = {self.ranks[rank].node if rank in self.ranks else "" for rank in ends or group.members}
            where: Locality = "intra_node" if len(nodes) == 1 else "cross_node"
            self._locality_of[key] = where if nodes and "" not in nodes else "unknown"
        return self._locality_of[key]

    @property
    def notes(self) -> list[str]:
        """Return the notes of all files, each once, as `notes_of` does."""
        return notes_of((rank, one.notes) for rank, one in self.ranks.items())

    def signature(self, rank: int, row: int) -> CommRecord:
        """Return a call's record without its number and times."""
        return self.signatures[self.ranks[rank].calls.signature[row]]

    def stack(self, rank: int, row: int) -> tuple[Frame, ...]:
        """Return a call's stack, innermost frame first; one frame if only the line is recorded."""
        return self.stacks[self.ranks[rank].calls.stack[row]] or stack_of(self.signature(rank, row))

    def group_at(self, rank: int, row: int) -> ProcessGroup:
        """Return the group of a call."""
        return self.groups[self.group_of[rank][self.ranks[rank].calls.group[row]]]


def _drop_outside_ranks(
    traces: list[RankTrace], world_size: int | None, members: Members
) -> tuple[list[RankTrace], list[str]]:
    """Drop ranks outside the world: usually a file of another job, or an invalid number. Returns (kept, reasons)."""
    claims: Counter[int] = Counter()
    for trace in traces:
        sizes = (max(members.of(one.group), default=-1) + 1 for one in trace.groups if is_world(one.group))
        claim = trace.world_size or max(sizes, default=0)
        claims[claim] += (trace.rank or 0) < claim  # a size that excludes its own rank is wrong
    # Most ranks must agree on a size: one wrong file must not exclude the others.
    size = world_size or next((size for size, by in claims.items() if by * 2 > len(traces)), 0)
    if not size:
        return traces, []
    outside = [
        f"{one.path}: rank {one.rank} is outside the world of {size} ranks; the file was skipped"
        for one in traces
        if (one.rank or 0) >= size
    ]
    return [one for one in traces if (one.rank or 0) < size], outside


def _fill_lanes(trace: RankTrace, groups: list[ProcessGroup], own: list[int], p2p: list[bool]) -> None:
    for local in trace.dump.with_p2p:
        groups[own[local]].has_p2p = True
    calls = trace.calls
    if not len(calls):
        return
    of_group = np.array(own)[np.frombuffer(calls.group, np.uint32)]
    sends = np.array(p2p)[np.frombuffer(calls.signature, np.uint32)]
    for group in set(of_group[sends].tolist()):
        groups[group].has_p2p = True
    rows = np.flatnonzero(~sends)
    rows = rows[np.argsort(of_group[rows], kind="stable")]
    for part in np.split(rows, np.flatnonzero(np.diff(of_group[rows])) + 1):
        numbers = np.frombuffer(calls.number, np.int64)[part]
        # Skips calls without a number, recorded twice, or after a restart of the recorder's numbers.
        rises = numbers > np.maximum.accumulate(np.append(0, numbers))[:-1]
        if rises.any():
            lane = Lane(array("I", part[rises].astype(np.uint32).tobytes()), array("q", numbers[rises].tobytes()))
            groups[of_group[part[0]]].lanes[trace.rank or 0] = lane


def notes_of(given: Iterable[tuple[int, Iterable[str]]]) -> list[str]:
    """Return notes, each once. One that several ranks have is about each of them, so their ranks are added.

    `given`: (rank, its notes)."""
    ranks: dict[str, list[int]] = {}
    given = [(rank, list(notes)) for rank, notes in given]
    for rank, notes in given:
        for note in dict.fromkeys(notes):
            ranks.setdefault(note, []).append(rank)
    return [_with_ranks(note, those, len(given)) for note, those in ranks.items()]


def _with_ranks(note: str, those: list[int], count: int) -> str:
    """Return a note that some of `count` ranks have with these ranks, unless it names the only one."""
    if len(those) > 1:
        return f"{note} (each of {plural(len(those), 'rank')}: {rank_ranges(those)})"
    names_it = f"rank {those[0]}" in note or f"rank-{those[0]}" in note
    return note if count == 1 or names_it else f"{note} (rank {those[0]})"
