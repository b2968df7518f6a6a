"""Makes all ranks of a job from the file of one rank (`--one-trace`), with groups and peers shifted to each rank.

Groups of parallel jobs are regular: ranks `start, start + stride, …`. Groups of the same form tile all ranks. So the
file of one rank determines every other rank's groups.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec

from crossrank.comm import CommRecord, is_p2p
from crossrank.errors import CrossrankError
from crossrank.replay.plan.plan import check_world_size
from crossrank.text import rank_ranges
from crossrank.tools.traces.rank_trace import RankGroup, RankTrace, Signatures, with_records


@dataclass(frozen=True)
class StridedGroup:
    """The form of a regular group, which all groups of one dimension of a job share."""

    stride: int
    size: int

    @property
    def block(self) -> int:
        """Return the number of consecutive ranks that interleaved groups of this form cover."""
        return self.stride * self.size

    def members(self, rank: int) -> range:
        """Return the members of the group of this form that contains `rank`."""
        start = rank // self.block * self.block + rank % self.stride
        return range(start, start + self.block, self.stride)


def strided_group(ranks: list[int], world_size: int) -> StridedGroup | None:
    """Return the form of a group; None if it is not regular, or if groups of its form do not tile the world.

    >>> strided_group([1, 3, 5, 7], 8), strided_group([0, 1, 3], 4), strided_group([1, 2], 4)
    (StridedGroup(stride=2, size=4), None, None)
    """
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if stride < 1:
        return None
    form = StridedGroup(stride, len(ranks))
    return form if world_size % form.block == 0 and list(form.members(ranks[0])) == ranks else None


def spread(source: RankTrace, world_size: int | None = None) -> list[RankTrace]:
    """Return the traces of all ranks, made from one. A message to the peer d ranks on becomes one from every rank.

    If the other end of a message is missing (a first pipeline stage only sends), each rank gets it. The receives of an
    uneven all_to_all follow from the sends. Raises `CrossrankError` for irregular groups or impossible rank numbers.
    """
    home = source.rank if source.rank is not None else 0
    highest = max([home, *(rank for one in source.groups for rank in one.group.ranks or ())])
    size = source.world_size or world_size or highest + 1
    check_world_size(size, source.path)
    if not 0 <= home < size:
        raise CrossrankError(f"{source.path}: is of rank {home}, which is not among {size} ranks")
    forms: dict[str, StridedGroup] = {}
    for group in (one.group for one in source.groups):
        ranks = group.ranks or (list(range(size)) if group.size in (0, size) else [])
        if home not in ranks:
            continue
        form = strided_group(ranks, size)
        if form is None:
            raise CrossrankError(
                f"{source.path}: group {group.pg!r} (ranks {rank_ranges(ranks)}) has no regular form that tiles "
                f"{size} ranks; give the files of all ranks"
            )
        forms[group.pg] = form
    whole, added = _add_missing_ends(source, forms, home)
    as_list = cache(list[int])
    made = [_copy_trace(whole, home, rank, size, forms, as_list) for rank in range(size)]
    made[home].notes = [
        *source.notes,
        f"the file of rank {home} is used for all {size} ranks (--one-trace); groups without this rank are unknown",
    ]
    if added:
        made[home].notes.append(f"{added} sends or receives have no match in it; the replay added it on every rank")
    return made


def _copy_trace(
    whole: RankTrace,
    home: int,
    rank: int,
    size: int,
    forms: dict[str, StridedGroup],
    as_list: Callable[[range], list[int]],
) -> RankTrace:
    """Return the trace of `rank` if `home` does what is in `whole`. `as_list` returns one list per group, shared by its
    ranks."""
    moved = Signatures()
    numbers = [
        moved.number(_move_call(call, home, rank, forms[call.pg]) if call.pg in forms else call)
        for call in whole.signatures
    ]
    groups = [
        RankGroup(msgspec.structs.replace(one.group, ranks=as_list(form.members(rank)), size=form.size))
        if (form := forms.get(one.group.pg)) is not None
        else one
        for one in whole.groups
    ]
    return replace(
        whole,
        rank=rank,
        world_size=size,
        calls=replace(whole.calls, signature=array("I", map(numbers.__getitem__, whole.calls.signature))),
        signatures=moved.rows,
        groups=groups,
        numbered=False,
        starts_late=False,
        # Facts about the file are reported once.
        **{} if rank == home else _OF_A_COPY,
    )


_OF_A_COPY: dict[str, Any] = {"is_copy": True, "dropped": 0, "problems": [], "notes": []}


def _move_call(record: CommRecord, home: int, rank: int, form: StridedGroup) -> CommRecord:
    """Return the call that `rank` makes where `home` made `record`."""
    there, here = form.members(home), form.members(rank)
    at_home, at_rank = there.index(home), here.index(rank)
    root, peer = record.root, record.peer
    if root is not None and root in there:
        root = here[there.index(root)]
    if peer is not None and peer in there:
        peer = here[(at_rank + there.index(peer) - at_home) % form.size]
    in_split, out_split, outputs = record.in_split, record.out_split, record.outputs
    if in_split and len(in_split) == form.size:
        # By distance: each member sends d places on what home sends d places on.
        sends = [in_split[(at_home + distance) % form.size] for distance in range(form.size)]
        in_split = [sends[(member - at_rank) % form.size] for member in range(form.size)]
        out_split = [sends[(at_rank - member) % form.size] for member in range(form.size)]
        outputs = [[sum(out_split), *outputs[0][1:]]] if outputs else outputs
    return msgspec.structs.replace(
        record, root=root, peer=peer, in_split=in_split, out_split=out_split, outputs=outputs
    )


def _add_missing_ends(source: RankTrace, forms: dict[str, StridedGroup], home: int) -> tuple[RankTrace, int]:
    """Return the calls and the number of added ones: each send gets a receive from as far on the other side, and vice
    versa."""
    records = list(source.records())
    ways = [_route_of(record, forms, home) for record in records]
    surplus: Counter[Way] = Counter()
    for record, way in zip(records, ways, strict=True):
        if way is not None:
            surplus[way] += _sign(record)
    if not any(surplus.values()):
        return source, 0
    next_id = max(source.calls.id, default=0) + 1
    made: list[tuple[CommRecord, int]] = []
    for row, (record, way) in enumerate(zip(records, ways, strict=True)):
        if way is None or record.peer is None or surplus[way] * _sign(record) <= 0:
            made.append((record, row))
            continue
        surplus[way] -= _sign(record)
        batch = record.batch if record.batch is not None else record.id
        members = forms[record.pg].members(home)
        op, c10d = ("recv", "recv_") if record.op == "send" else ("send", "send")
        other = msgspec.structs.replace(
            record,
            id=next_id,
            op=op,
            c10d=c10d,
            inputs=record.outputs,
            outputs=record.inputs,
            peer=members[(2 * members.index(home) - members.index(record.peer)) % len(members)],
            batch=batch,
        )
        made += [(msgspec.structs.replace(record, batch=batch), row), (other, row)]
        next_id += 1
    return with_records(source, made), len(made) - len(records)


Way = tuple[str, int, int]
"""What a send and its receive have in common: group, distance of the message, tag."""


def _sign(record: CommRecord) -> int:
    return 1 if record.op == "send" else -1


def _route_of(record: CommRecord, forms: dict[str, StridedGroup], home: int) -> Way | None:
    form = forms.get(record.pg)
    if form is None or record.peer is None or not is_p2p(record) or record.peer not in (members := form.members(home)):
        return None
    distance = (members.index(record.peer) - members.index(home)) * _sign(record)
    return record.pg, distance % form.size, record.tag or 0
