"""The dimensions of a job: the layout of its ranks for data, tensor, pipeline, context and expert parallelism.

The members of the groups show where one dimension ends and the next starts. Four ranks with the groups [0, 1], [2, 3]
and [0, 2], [1, 3] have an inner dimension of two neighboring ranks, and an outer one of two ranks at distance two. The
groups' descriptions, or else their calls, show the purpose of a dimension.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

from crossrank.comm import CommRecord, is_p2p
from crossrank.errors import CrossrankError
from crossrank.text import rank_ranges

KINDS = {
    "dp": "data parallel",
    "tp": "tensor parallel",
    "pp": "pipeline parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
}
_DESCRIPTIONS = (
    ("dp_replicate", r"replicate|hsdp_outer"),
    ("dp_shard", r"shard|fsdp|hsdp_inner"),
    ("dp", r"data|ddp|zero|(?<![a-z])dp(?![a-z])"),
    ("cp", r"context|(?<![a-z])cp(?![a-z])|sequence"),
    ("ep", r"expert|(?<![a-z])ep(?![a-z])"),
    ("tp", r"tensor|(?<![a-z])tp(?![a-z])"),
    ("pp", r"pipe|(?<![a-z])pp(?![a-z])"),
)
"""Dimension -> pattern of its groups' descriptions: torch's `mesh_tp`, Megatron's `TENSOR_MODEL_PARALLEL_GROUP`. The
first match counts, since gradients use data and context parallelism together (`mesh_dp_shard_cp`)."""
_COMPILED = tuple((name, re.compile(pattern)) for name, pattern in _DESCRIPTIONS)


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One dimension of a job."""

    name: str
    """`dp`, `tp`, …; `dp_shard` and `dp_replicate` if data parallelism has two dimensions; `dim0` if the purpose is
    unknown."""
    size: int
    because: str
    """The reason for the name."""

    @property
    def kind(self) -> str:
        """A key of `KINDS`, or the name itself."""
        return self.name.partition("_")[0]


Coordinates = tuple[int, ...]


@dataclass(frozen=True)
class Mesh:
    """The dimensions, the outermost first. Neighbors in the last dimension have neighboring ranks."""

    dimensions: tuple[Dimension, ...]

    @property
    def size(self) -> int:
        return prod(one.size for one in self.dimensions)

    def coordinates(self, rank: int) -> Coordinates:
        """
        >>> two = Mesh((Dimension(name="dp", size=4, because=""), Dimension(name="tp", size=2, because="")))
        >>> two.coordinates(5), two.rank((2, 1)), str(two)
        ((2, 1), 5, 'dp=4,tp=2')
        """
        found = []
        for one in reversed(self.dimensions):
            rank, at = divmod(rank, one.size)
            found.append(at)
        return tuple(reversed(found))

    def rank(self, coordinates: Coordinates) -> int:
        rank = 0
        for one, at in zip(self.dimensions, coordinates, strict=True):
            rank = rank * one.size + at
        return rank

    def spanned(self, members: Sequence[int]) -> frozenset[int] | None:
        """Return the positions of the dimensions that a group spans; None if it is not all ranks of some dimensions
        with the others fixed."""
        found = [self.coordinates(rank) for rank in members]
        over = frozenset(
            place for place in range(len(self.dimensions)) if len({coordinates[place] for coordinates in found}) > 1
        )
        whole = prod(self.dimensions[place].size for place in over)
        return over if len(set(found)) == len(members) == whole else None

    def over(self, members: Sequence[int], desc: str) -> frozenset[int] | None:
        """Return `spanned` and the dimensions of one rank that the group also spans. These are the one in its
        description; if the description has none and the group has all ranks, all of them."""
        over = self.spanned(members)
        if over is None:
            return None
        named, alone = name_in(desc), {at for at, one in enumerate(self.dimensions) if one.size == 1}
        if named is not None:
            alone = {at for at in alone if named in (self.dimensions[at].name, self.dimensions[at].kind)}
        return over | alone if named is not None or len(members) == self.size else over

    def index(self, name: str) -> int:
        """Return the position of a dimension. Raise `CrossrankError` if none has this name."""
        for place, one in enumerate(self.dimensions):
            if one.name == name:
                return place
        alike = [one.name for one in self.dimensions if one.kind == name]
        step = f"choose with --grow {' or --grow '.join(alike)}" if alike else "give others with --dims"
        raise CrossrankError(f"the job has no dimension {name!r}, but {self}; {step}")

    def __str__(self) -> str:
        return ",".join(f"{one.name}={one.size}" for one in self.dimensions)


@dataclass
class UsedGroup:
    """A group and the calls on it."""

    pg: str
    ranks: tuple[int, ...]
    desc: str
    calls: list[CommRecord] = field(default_factory=list)
    """Calls of all its ranks."""
    messages: set[tuple[int, int]] = field(default_factory=set)
    """(rank, peer) of sends and receives."""

    def add(self, rank: int, record: CommRecord) -> None:
        self.calls.append(record)
        if is_p2p(record) and record.peer is not None:
            self.messages.add((rank, record.peer))


def find_mesh(world_size: int, groups: Collection[UsedGroup], named: Mapping[str, int] | None = None) -> Mesh:
    """Return the dimensions of a job of `world_size` ranks. `named` has the names and sizes from the user.

    Raise `CrossrankError` if the groups fit no mesh, or do not fit the user's dimensions.
    """
    if named is not None:
        if prod(named.values()) != world_size:
            given = ",".join(f"{name}={size}" for name, size in named.items())
            raise CrossrankError(f"--dims {given} makes {prod(named.values())} ranks; the job has {world_size}")
        mesh = Mesh(tuple(Dimension(name=name, size=size, because="--dims") for name, size in named.items()))
        _check_groups(mesh, groups)
        return mesh
    ends = {1, world_size}
    for group in groups:
        ends.update(_find_ends(group.ranks))
    cuts = sorted(ends)
    for inner, outer in pairwise(cuts):
        if outer % inner:
            raise CrossrankError(
                f"the groups of the job do not form one mesh: dimensions end after {inner} and after {outer} ranks; "
                "give them with --dims, for example dp=4,tp=2"
            )
    sizes = [outer // inner for inner, outer in pairwise(cuts)][::-1]
    mesh = Mesh(tuple(Dimension(name=f"dim{at}", size=size, because="") for at, size in enumerate(sizes)))
    if world_size == 1:
        return Mesh((Dimension(name="dp", size=1, because="a job of one rank"),))
    _check_groups(mesh, groups)
    return _name_dimensions(mesh, groups)


def _find_ends(ranks: Sequence[int]) -> set[int]:
    """Return after how many ranks the dimensions of a group, and those inside them, end.

    >>> sorted(_find_ends([0, 2, 4, 6])), sorted(_find_ends([0, 1, 4, 5])), sorted(_find_ends([3]))
    ([2, 8], [1, 2, 4, 8], [])
    """
    found = set[int]()
    firsts = sorted(ranks)
    while len(firsts) > 1:
        stride = firsts[1] - firsts[0]
        length = 1
        while length < len(firsts) and firsts[length] - firsts[length - 1] == stride:
            length += 1
        found |= {stride, stride * length}
        if len(firsts) % length:
            break
        firsts = firsts[::length]
    return found


def _check_groups(mesh: Mesh, groups: Collection[UsedGroup]) -> None:
    for group in groups:
        if group.calls and mesh.spanned(group.ranks) is None:
            raise CrossrankError(
                f"the group of rank {rank_ranges(group.ranks)}{f' ({group.desc})' if group.desc else ''} is not all "
                f"ranks of some dimensions of {mesh}; give them with --dims, for example dp=4,tp=2"
            )


def _name_dimensions(mesh: Mesh, groups: Collection[UsedGroup]) -> Mesh:
    """Return the mesh with a name for each dimension that has groups of its own, or that only larger groups span."""
    own: dict[int, list[UsedGroup]] = defaultdict(list)
    for group in groups:
        over = mesh.spanned(group.ranks)
        if over is not None and len(over) == 1:
            own[next(iter(over))].append(group)
    used = [mesh.spanned(group.ranks) or frozenset() for group in groups if group.calls]
    found = []
    for place, one in enumerate(mesh.dimensions):
        name, because = _find_name(own.get(place, ()), len(mesh.dimensions) == 1)
        because = because or "neither the descriptions nor the calls of its groups show it"
        if not any(place in over for over in used):
            because = "no communication in it"
        found.append(replace(one, name=name or one.name, because=because))
    # All ranks do the same along a dimension that only groups over more dimensions span: data parallelism.
    if not any(one.kind == "dp" for one in found):
        for place, one in enumerate(found):
            if one.name.startswith("dim") and place not in own and any(place in over for over in used):
                because = "no group has only this dimension, and the job communicates over larger ones"
                found[place] = replace(one, name="dp", because=because)
    names = [one.name for one in found]
    if len(names) != len(set(names)):
        found = [
            replace(one, name=f"{one.name}{place}") if names.count(one.name) > 1 else one
            for place, one in enumerate(found)
        ]
    # If there is only one part of dp, it is all of dp.
    parts = [one for one in found if one.kind == "dp"]
    if len(parts) == 1:
        found = [replace(one, name="dp") if one in parts else one for one in found]
    return Mesh(tuple(found))


def name_in(desc: str) -> str | None:
    """Return the dimension that the description of a group names.

    >>> name_in("mesh_tp"), name_in("DATA_PARALLEL_GROUP"), name_in("default_pg")
    ('tp', 'dp', None)
    """
    return next((name for name, pattern in _COMPILED if pattern.search(desc.lower())), None)


def _find_name(groups: Collection[UsedGroup], is_all: bool) -> tuple[str | None, str]:
    for group in groups:
        if (name := name_in(group.desc)) is not None:
            return name, f"its groups are called {group.desc!r}"
    calls = [call for group in groups for call in group.calls]
    ops = {call.op for call in calls}
    if any(map(is_p2p, calls)):
        return "pp", "its ranks send to each other"
    if {"all_gather", "reduce_scatter"} <= ops:
        return "dp", "all_gather and reduce_scatter in its groups, as with FSDP"
    if ops == {"all_to_all"} and not is_all:
        return "ep", "only all_to_all in its groups"
    if is_all and groups:
        return "dp", "its groups have all ranks"
    return None, ""
