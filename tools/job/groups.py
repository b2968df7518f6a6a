"""Join the process groups of all ranks: which groups of different ranks are the same, and which ranks are members.

A group is identified by its name and its members, because different sets of ranks can use one name (`split_group`).
Groups of different epochs have different names (`recording.with_epoch`). Old traces name groups by object addresses,
which differ between ranks. These groups are joined by members and by their order on each rank.

If a rank's file lacks the members, they come from another rank's file, or an all_gather shows their number. Otherwise
the members are the ranks that recorded a call on that name (`ProcessGroup.inferred`). The default group has all ranks.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from crossrank.comm import DEFAULT_GROUP, MOST_RANKS, CommRecord, Group, Locality
from crossrank.text import rank_ranges
from crossrank.tools.traces.param_comms import named_by_address
from crossrank.tools.traces.rank_trace import RankTrace

_GLOO_ONLY = re.compile(r"\A(?:\w+:)?gloo(?:,\w+:gloo)*\Z")
"""Backends of a group that is gloo on every device."""
_ONE_INPUT_PER_MEMBER = {"all_gather": 1, "gather": 1, "reduce_scatter": -1, "scatter": -1}
"""Operations whose one side is the group's size times the other: 1 if the output is larger, -1 if the input is."""


@dataclass
class Lane:
    """The collectives of one rank on one group, in the order of their numbers."""

    rows: array[int] = field(default_factory=lambda: array("I"))
    """Rows of the rank's calls."""
    numbers: array[int] = field(default_factory=lambda: array("q"))

    def row(self, number: int) -> int | None:
        """Return the row of collective `number`, or None."""
        index = self.index(number)
        return None if index is None else self.rows[index]

    def index(self, number: int) -> int | None:
        """Return the index of collective `number` in `numbers`, or None."""
        place = bisect_left(self.numbers, number)
        return place if place < len(self.numbers) and self.numbers[place] == number else None


@dataclass
class ProcessGroup:
    """One process group over all its ranks."""

    index: int
    name: str
    desc: str
    members: tuple[int, ...]
    """Global ranks in the group's order."""
    size: int
    """Number of members; more than `members` if some are unknown."""
    apart: str = ""
    """As in `RankGroup`."""
    inferred: bool = False
    """The members are the ranks that recorded a call on the group; there may be more."""
    guessed: bool = False
    """The number of members is unknown too."""
    backend: str = ""
    locality: Locality = "unknown"
    eager: bool = False
    """As in `Group`."""
    local_index: dict[int, int] = field(default_factory=dict)
    """Rank -> index of the group in the list of this rank."""
    lanes: dict[int, Lane] = field(default_factory=dict)
    """Rank -> its collectives."""
    has_p2p: bool = False

    @property
    def known_size(self) -> int | None:
        """The number of members; None if it is a guess."""
        return None if self.guessed else self.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the members in ascending order."""
        return tuple(sorted(self.members))

    @property
    def pg(self) -> list[str]:
        return [self.name, self.desc]

    @property
    def late_ends(self) -> bool:
        """Return whether the end of a send or receive is known only when a thread waits for it (gloo)."""
        return _GLOO_ONLY.search(self.backend) is not None


def is_world(group: Group) -> bool:
    """Return whether name and description are those of the default group."""
    return group.desc == DEFAULT_GROUP or (not group.desc and group.pg in ("0", DEFAULT_GROUP))


class Members:
    """The members of a job's groups. Each list is checked once, and equal tuples are one object: thousands of ranks
    may have groups of thousands."""

    def __init__(self) -> None:
        self._by_list: dict[int, tuple[list[int], tuple[int, ...]]] = {}
        self._equal: dict[tuple[int, ...], tuple[int, ...]] = {}

    def of(self, group: Group) -> tuple[int, ...]:
        """Return the members of a group; empty if they are not recorded, repeated or invalid."""
        ranks = group.ranks
        if not ranks:
            return ()
        known = self._by_list.get(id(ranks))
        if known is None:
            valid = len(set(ranks)) == len(ranks) and min(ranks) >= 0 and max(ranks) < MOST_RANKS
            known = self._by_list[id(ranks)] = ranks, self.one(tuple(ranks) if valid else ())
        return known[1]

    def one(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shared object for tuples equal to this one."""
        return self._equal.setdefault(members, members)


def world_of(
    traces: Sequence[RankTrace], world_size: int | None, sizes: Sizes, members: Members
) -> tuple[tuple[int, ...], bool]:
    """Return (all known ranks of the job, whether there are no others). `world_size` is given by the user."""
    if world_size is not None:
        return members.one(tuple(range(world_size))), True
    groups = {id(one.group): (one, members.of(one.group)) for trace in traces for one in trace.groups}.values()
    known = [trace.world_size or 0 for trace in traces]
    known += [len(ranks) or sizes.get((one.group.pg, one.apart), 0) for one, ranks in groups if is_world(one.group)]
    last = [trace.rank or 0 for trace in traces] + [max(ranks) for _, ranks in groups if ranks]
    # Ranks count from 0, so all ranks below a known one exist.
    return members.one(tuple(range(max([*known, *(rank + 1 for rank in last)], default=0)))), any(known)


Sizes = dict[tuple[str, str], int]
"""(name of a group, `RankGroup.apart`) -> number of members that its calls show."""


def sizes_shown(traces: Sequence[RankTrace]) -> Sizes:
    """Return the sizes of groups whose members are unknown on some rank, from the shapes of gathers and scatters."""
    found: dict[tuple[str, str], Counter[int]] = {}
    for trace in traces:
        if all(one.group.ranks is not None for one in trace.groups):
            continue
        for local, number in set(zip(trace.calls.group, trace.calls.signature, strict=True)):
            size = _size_shown_by(trace.signatures[number])
            if size:
                one = trace.groups[local]
                found.setdefault((one.group.pg, one.apart), Counter())[size] += 1
    return {key: max(counts, key=lambda size: (counts[size], size)) for key, counts in found.items()}


def _size_shown_by(call: CommRecord) -> int:
    """Return the number of members that the shapes of a gather or scatter show; 0 if unknown or uneven."""
    way = _ONE_INPUT_PER_MEMBER.get(call.op, 0)
    part, whole = (call.inputs, call.outputs)[::way] if way else ([], [])
    if any(shape != whole[0] for shape in whole):
        return 0
    elements = [sum(map(prod, shapes)) for shapes in (part, whole)]
    return elements[1] // elements[0] if elements[0] and elements[1] % elements[0] == 0 else 0


def join_groups(
    traces: Sequence[RankTrace], world: tuple[int, ...], world_is_known: bool, sizes: Sizes, known: Members
) -> tuple[list[ProcessGroup], dict[int, list[int]]]:
    """Return (all groups, rank -> index among them of each of the rank's groups)."""
    members_of: dict[str, dict[int, tuple[int, ...]]] = {}
    for trace in traces:
        for one in trace.groups:
            if members := known.of(one.group):
                members_of.setdefault(one.group.pg, {})[id(members)] = members
    groups: list[ProcessGroup] = []
    found: dict[tuple[str, str, int], ProcessGroup] = {}
    group_of: dict[int, list[int]] = {}
    for trace in traces:
        rank = trace.rank or 0
        own: list[int] = []
        addressed: Counter[object] = Counter()
        used = set(trace.calls.group)
        for local, one in enumerate(trace.groups):
            group, name = one.group, one.group.pg
            members = known.of(group)
            if not members:
                # Take the members from another rank's file.
                fitting = [ranks for ranks in members_of.get(name, {}).values() if rank in ranks]
                members = fitting[0] if len(fitting) == 1 else ()
            size = sizes.get((name, one.apart), 0) or max(group.size, 0)
            inferred = False
            is_of_all = is_world(group) if size == 0 else size == len(world) and not named_by_address(name)
            if not members and is_of_all:
                members, inferred = world, not world_is_known
            if named_by_address(name):
                addressed[members or size] += 1
                count = addressed[members or size]
                name = f"ranks {rank_ranges(members)}" if members else f"{size} ranks" if size else name
                name += f" #{count}" if count > 1 else ""
            key = (name, one.apart, id(members))
            joined = found.get(key)
            if joined is None:
                joined = found[key] = ProcessGroup(
                    len(groups),
                    name,
                    group.desc,
                    members,
                    size if inferred else len(members) or size,
                    apart=one.apart,
                    inferred=inferred or not members,
                    backend=group.backend,
                    locality=group.locality,
                    eager=group.eager,
                )
                groups.append(joined)
            if not members and (local in used or trace.source == "flight") and rank not in joined.members:
                joined.members = (*joined.members, rank)
            joined.desc = joined.desc or group.desc
            joined.local_index.setdefault(rank, local)
            own.append(joined.index)
        group_of[rank] = own
    for joined in groups:
        joined.inferred = joined.inferred and joined.size != len(joined.members)
        joined.guessed = joined.inferred and joined.size == 0
        joined.size = max(joined.size, len(joined.members))
    return groups, group_of
