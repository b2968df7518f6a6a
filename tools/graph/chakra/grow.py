"""A job of R ranks, written for N: the communication of each rank in the larger or smaller job.

Only data parallelism can grow from a trace: each rank does the same with its own batch. A new rank does what the
recorded rank with the same place in all other dimensions does. In the dimension that grows, the first rank stays the
first, since only it may save checkpoints or broadcast. The others follow in turns. The size of a call then:

* all_reduce, reduce, broadcast, all_to_all: unchanged. Gradients and batches of a rank keep their size.
* reduce_scatter: unchanged, since S is the whole. Each rank gets a smaller shard.
* all_gather into one tensor on a group that also has reduce_scatter (FSDP, ZeRO): unchanged, with smaller shards.
* any other all_gather, gather, scatter: unchanged for each member, so S grows with the group.

S of shards is rounded up so that each rank's shard has whole elements. FSDP pads each parameter, which a trace does not
show. For parameters that do not divide evenly, the true S is larger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from math import prod

import msgspec

from crossrank.comm import MOST_RANKS, OPERATIONS, CommRecord, Group, is_p2p
from crossrank.dtypes import dtype_of
from crossrank.errors import CrossrankError
from crossrank.tools.graph.chakra.chakra_graph import Comm, NumberedGroup, number_group
from crossrank.tools.graph.chakra.mesh import Mesh, UsedGroup, name_in

_WHY_NOT = {
    "tp": "each matrix product would be split further, and the shapes do not show in which dimension",
    "pp": "each stage would have fewer layers, and the trace does not show which operations form a layer",
    "cp": "each rank would have a shorter part of the sequence, and the shapes do not show which dimension that is",
    "ep": "each rank would have fewer experts, and the shapes do not show which dimension counts them",
}
"""Dimension -> why it cannot grow."""
_ONE_TENSOR = frozenset(("_allgather_base_", "allgather_into_tensor_coalesced_", "_allgather_into_tensor_coalesced_"))
"""The c10d forms of all_gather whose output is one tensor."""


@dataclass
class JobGrowth:
    """How a job of `recorded` becomes one of `written`. They differ in the size of one dimension."""

    recorded: Mesh
    written: Mesh
    place: int
    """Position of the dimension that grows."""
    sharded: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
    """Name and members of the groups that have reduce_scatter."""
    shards: frozenset[int] = frozenset()
    """Bytes of one rank in the reduce_scatters along the dimension that grows."""
    _groups: dict[tuple[str, frozenset[int], int], NumberedGroup] = field(default_factory=dict, repr=False)
    _dimensions_by_group: dict[tuple[str, tuple[int, ...]], frozenset[int]] = field(default_factory=dict, repr=False)
    """Description and members of a recorded group -> its dimensions. A cache, since each call needs them."""

    def source(self, rank: int) -> int:
        """Return the recorded rank that does what `rank` of the written job does."""
        coordinates = list(self.written.coordinates(rank))
        at, had = coordinates[self.place], self.recorded.dimensions[self.place].size
        coordinates[self.place] = at if at < had else 1 + (at - 1) % (had - 1) if had > 1 else 0
        return self.recorded.rank(tuple(coordinates))

    @cached_property
    def copies(self) -> dict[int, list[int]]:
        """Recorded rank -> the ranks of the written job that do the same."""
        found: dict[int, list[int]] = {}
        for rank in range(self.written.size):
            found.setdefault(self.source(rank), []).append(rank)
        return found

    def group(self, group: NumberedGroup, rank: int) -> NumberedGroup:
        """Return the group of the written job in which `rank` has the place of its source in `group`."""
        fixed = list(self.written.coordinates(rank))
        over = self._dimensions_of(group)
        for place in over:
            fixed[place] = 0
        key = (group.pg, over, self.written.rank(tuple(fixed)))
        found = self._groups.get(key)
        if found is None:
            ranks = [tuple(fixed)]
            for place in sorted(over):
                size = self.written.dimensions[place].size
                ranks = [(*one[:place], at, *one[place + 1 :]) for one in ranks for at in range(size)]
            members = sorted(self.written.rank(one) for one in ranks)
            grown = Group(pg=group.pg, size=len(members), ranks=members, desc=group.desc)
            found = self._groups[key] = number_group(grown, self.written.size)
        return found

    def comm(self, comm: Comm, rank: int) -> Comm:
        """Return the communication of `rank` for `comm` of its source, a recorded rank. `runs_as` stays."""
        group, record = self.group(comm.group, rank), comm.record
        if is_p2p(record):
            record = msgspec.structs.replace(record, peer=self._grown_peer(record.peer, rank))
        else:
            root = record.root
            if root is not None and root in comm.group.ranks:
                root = self._counterpart(root, group)
            record = msgspec.structs.replace(
                record,
                root=root,
                bytes=self.size_of(record, comm.group),
                in_split=_resplit(record.in_split, len(group.ranks)),
                out_split=_resplit(record.out_split, len(group.ranks)),
            )
        return Comm(record, group, comm.runs_as)

    def size_of(self, record: CommRecord, group: NumberedGroup) -> int:
        """Return S of a call on a recorded group in the written job."""
        had, size = len(group.ranks), self.size(group)
        if self.is_shard(record, group):
            shards = self.written.dimensions[self.place].size
            return _round_up(record.bytes * self.recorded.dimensions[self.place].size, shards, record) // shards
        if size == had:
            return record.bytes
        if record.op in ("gather", "scatter") or (record.op == "all_gather" and not self.keeps_whole(record, group)):
            return record.bytes // had * size
        if record.op in ("all_gather", "reduce_scatter"):
            return _round_up(record.bytes, size, record)
        return record.bytes

    def is_shard(self, record: CommRecord, group: NumberedGroup) -> bool:
        """Return whether a call reduces shards over replicas (HSDP). Its group does not grow, but its data is what each
        rank has of a reduce_scatter along the dimension that grows, so it shrinks."""
        over = self._dimensions_of(group)
        return (
            self.place not in over
            and all(self.recorded.dimensions[place].kind == "dp" for place in over)
            and record.bytes in self.shards
        )

    def rules(self, of_ranks: Iterable[Iterable[Comm]]) -> dict[str, int]:
        """Return how the sizes of calls change on groups with another number of members -> calls of all ranks."""
        found: Counter[str] = Counter()
        for comm in chain.from_iterable(of_ranks):
            had, size, record = len(comm.group.ranks), self.size(comm.group), comm.record
            on = f"of {record.op} on groups of {size} instead of {had}"
            if is_p2p(record):
                continue
            if self.is_shard(record, comm.group):
                found[f"of {record.op} over replicas are of shards, which become smaller"] += 1
            elif size == had or record.op == "barrier":
                continue
            elif record.op == "reduce_scatter" or self.keeps_whole(record, comm.group):
                found[f"{on} keep their size, of smaller shards; what does not divide is padded more in truth"] += 1
            elif record.op == "all_to_all" and record.in_split is not None:
                found[f"{on} keep their rows; which of them go to whom is not known"] += 1
            elif self.size_of(record, comm.group) == record.bytes:
                found[f"{on} keep their size"] += 1
            else:
                found[f"of {record.op} have as much for each member: of {size} instead of {had}"] += 1
        return dict(found.most_common())

    def keeps_whole(self, record: CommRecord, group: NumberedGroup) -> bool:
        """Return whether an all_gather joins shards, which shrink, not each rank's own data."""
        return record.c10d in _ONE_TENSOR and (group.pg, tuple(group.ranks)) in self.sharded

    def size(self, group: NumberedGroup) -> int:
        """Return the number of members of a recorded group in the written job."""
        return prod(self.written.dimensions[place].size for place in self._dimensions_of(group))

    def _dimensions_of(self, group: NumberedGroup) -> frozenset[int]:
        key = (group.desc, tuple(group.ranks))
        found = self._dimensions_by_group.get(key)
        if found is None:
            found = self.recorded.over(group.ranks, group.desc)
            if found is None:
                raise CrossrankError(
                    f"the group {list(group.ranks)} is not all ranks of some dimensions of {self.recorded}"
                )
            self._dimensions_by_group[key] = found
        return found

    def _counterpart(self, rank: int, group: NumberedGroup) -> int:
        """Return the first member of `group` that does what a recorded rank does."""
        return next((one for one in group.ranks if self.source(one) == rank), group.ranks[0])

    def _grown_peer(self, peer: int | None, rank: int) -> int | None:
        if peer is None:
            return None
        moved = list(self.recorded.coordinates(peer))
        moved[self.place] = self.written.coordinates(rank)[self.place]
        return self.written.rank(tuple(moved))


@dataclass(frozen=True, kw_only=True)
class CopiesOf:
    """The ranks of a larger or smaller job that do what one recorded rank does."""

    growth: JobGrowth
    folder: str | None
    """None: write nothing."""
    window: int
    late_ns: int
    """Delay of the recorded rank's start after the first rank."""
    dedupe: bool
    """Write equal files once, under several names."""


def _resplit(splits: list[int] | None, size: int) -> list[int] | None:
    """Return the rows for each member of a group of another size. Their sum and proportions stay the same.

    >>> _resplit([4, 2], 4), _resplit([1, 1, 2], 1)
    ([2, 2, 1, 1], [4])
    """
    if splits is None or len(splits) == size or not splits:
        return splits
    upto = [0]
    for rows in splits:
        upto.append(upto[-1] + rows)
    ends = []
    for member in range(size + 1):
        at, rest = divmod(member * len(splits), size)
        ends.append(upto[at] + (splits[at] * rest // size if at < len(splits) else 0))
    return [end - begin for begin, end in pairwise(ends)]


def plan_growth(mesh: Mesh, groups: Iterable[UsedGroup], ranks: int, name: str) -> JobGrowth:
    """Return the growth of the dimension `name` to a job of `ranks` ranks.

    Raise `CrossrankError` if the trace does not show what a rank would do then.
    """
    place = mesh.index(name)
    dimension = mesh.dimensions[place]
    others = mesh.size // dimension.size
    if not 0 < ranks <= MOST_RANKS:
        raise CrossrankError(f"--grow-to {ranks} is not a number of ranks; a job has 1 to {MOST_RANKS:,}")
    if ranks % others:
        raise CrossrankError(
            f"{ranks} ranks are no multiple of the {others} that {mesh} has for one of {name}; ask for {others}, "
            f"{2 * others}, {4 * others}, …"
        )
    if dimension.kind != "dp" and ranks != mesh.size:
        why = _WHY_NOT.get(dimension.kind)
        raise CrossrankError(
            f"--grow {name}: {why}; record the job with more of it, or grow dp"
            if why is not None
            else f"--grow {name}: purpose of this dimension unknown; give it with --dims, such as dp={dimension.size}"
        )
    used = list(groups)
    if dimension.size == 1 < mesh.size and not any(name_in(group.desc) in (name, dimension.kind) for group in used):
        raise CrossrankError(
            f"--grow {name}: the recorded job has only one rank in it, without communication; record it with two"
        )
    for group in used:
        _refuse_growth(mesh, place, group)
    larger = replace(dimension, size=ranks // others)
    written = Mesh((*mesh.dimensions[:place], larger, *mesh.dimensions[place + 1 :]))
    sharded = frozenset(
        (group.pg, group.ranks) for group in used if any(call.op == "reduce_scatter" for call in group.calls)
    )
    shards = frozenset(
        call.bytes // len(group.ranks)
        for group in used
        if place in (mesh.over(group.ranks, group.desc) or frozenset())
        for call in group.calls
        if call.op == "reduce_scatter" and call.bytes
    )
    return JobGrowth(mesh, written, place, sharded, shards)


def _round_up(size: int, ranks: int, record: CommRecord) -> int:
    """Return the bytes, rounded up so that each rank has whole elements."""
    dtype = dtype_of(record.dtype) if record.dtype is not None else None
    step = ranks * (dtype.size if dtype is not None else 1)
    return -(-size // step) * step


def _refuse_growth(mesh: Mesh, place: int, group: UsedGroup) -> None:
    """Raise if calls on a group that grows depend on the number of ranks, by their count or their peers."""
    name = mesh.dimensions[place].name
    over = mesh.over(group.ranks, group.desc) or frozenset()
    if place not in over:
        return
    what = f"--grow {name}: group {group.desc or list(group.ranks)}"
    if any(mesh.coordinates(rank)[place] != mesh.coordinates(peer)[place] for rank, peer in group.messages):
        raise CrossrankError(f"{what} has sends and receives in it, and the peers of more ranks are unknown")
    rooted = [call for call in group.calls if (row := OPERATIONS.get(call.op)) is not None and row.rooted]
    roots = {call.root for call in rooted if call.root in group.ranks}
    if len({mesh.coordinates(root)[place] for root in roots}) > 1:
        raise CrossrankError(
            f"{what} has {rooted[0].op} with {len(roots)} of its ranks as root, as where each one has its shard "
            "(ZeRO): more ranks would make more of them"
        )


def used_groups(of_ranks: Mapping[int, Iterable[tuple[CommRecord, NumberedGroup]]]) -> list[UsedGroup]:
    """Return the groups with calls. `of_ranks` maps a rank to its calls, each with its group."""
    found: dict[tuple[str, tuple[int, ...]], UsedGroup] = {}
    for rank, calls in of_ranks.items():
        for record, group in calls:
            members = tuple(group.ranks)
            found.setdefault((group.pg, members), UsedGroup(group.pg, members, group.desc)).add(rank, record)
    return list(found.values())
