"""All ranks of a job from the file of one (`--one-trace`): on every rank its groups in their place, peers as far away.

Groups of parallel jobs are regular: ranks `start, start + stride, …`, and others of the same form beside them, which
together tile the ranks. The file of one rank says the form, so every other rank's group follows from it.
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
    """A regular group: the form that all groups of one dimension of a job share."""

    stride: int
    size: int

    @property
    def block(self) -> int:
        """Ranks that the groups of this form which lie in each other take up."""
        return self.stride * self.size

    def members(self, rank: int) -> range:
        """The group of this form that `rank` is in."""
        start = rank // self.block * self.block + rank % self.stride
        return range(start, start + self.block, self.stride)


def strided_group(ranks: list[int], world_size: int) -> StridedGroup | None:
    """The form of a group; None for one that is not regular, or whose like do not tile the world.

    >>> strided_group([1, 3, 5, 7], 8), strided_group([0, 1, 3], 4), strided_group([1, 2], 4)
    (StridedGroup(stride=2, size=4), None, None)
    """
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if stride < 1:
        return None
    form = StridedGroup(stride, len(ranks))
    return form if world_size % form.block == 0 and list(form.members(ranks[0])) == ranks else None


def spread(source: RankTrace, world_size: int | None = None) -> list[RankTrace]:
    """The calls of one rank for all ranks of its world. A message to the peer d ranks on becomes one from every rank
    to that d ranks on; where the file lacks its other end (a first pipeline stage only sends), that is added beside it.
    What a rank receives in an uneven all_to_all follows from what the others send.

    Raises `CrossrankError` where a group is not regular, or the number of ranks is none that a job has.
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
    whole, added = _with_both_ends(source, forms, home)
    as_list = cache(list[int])
    made = [_copy(whole, home, rank, size, forms, as_list) for rank in range(size)]
    made[home].notes = [
        *source.notes,
        f"the file of rank {home} stands for all {size} ranks (--one-trace); groups that it is not in are not known",
    ]
    if added:
        made[home].notes.append(f"{added} sends or receives have no other end in it, which was added on every rank")
    return made


def _copy(
    whole: RankTrace,
    home: int,
    rank: int,
    size: int,
    forms: dict[str, StridedGroup],
    as_list: Callable[[range], list[int]],
) -> RankTrace:
    """What `rank` does where `home` does what is in `whole`. `as_list` gives all ranks of a group the same list."""
    moved = Signatures()
    numbers = [
        moved.number(_moved(call, home, rank, forms[call.pg]) if call.pg in forms else call)
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
        # What is known of the file is reported once.
        **{} if rank == home else _OF_A_COPY,
    )


_OF_A_COPY: dict[str, Any] = {"is_copy": True, "dropped": 0, "problems": [], "notes": []}


def _moved(record: CommRecord, home: int, rank: int, form: StridedGroup) -> CommRecord:
    """The call that `rank` makes where `home` made `record`."""
    there, here = form.members(home), form.members(rank)
    at_home, at_rank = there.index(home), here.index(rank)
    root, peer = record.root, record.peer
    if root is not None and root in there:
        root = here[there.index(root)]
    if peer is not None and peer in there:
        peer = here[(at_rank + there.index(peer) - at_home) % form.size]
    in_split, out_split, outputs = record.in_split, record.out_split, record.outputs
    if in_split and len(in_split) == form.size:
        # By distance: what home sends to the member d places on, every member sends d places on.
        sends = [in_split[(at_home + distance) % form.size] for distance in range(form.size)]
        in_split = [sends[(member - at_rank) % form.size] for member in range(form.size)]
        out_split = [sends[(at_rank - member) % form.size] for member in range(form.size)]
        outputs = [[sum(out_split), *outputs[0][1:]]] if outputs else outputs
    return msgspec.structs.replace(
        record, root=root, peer=peer, in_split=in_split, out_split=out_split, outputs=outputs
    )


def _with_both_ends(source: RankTrace, forms: dict[str, StridedGroup], home: int) -> tuple[RankTrace, int]:
    """The calls with a receive beside every send without one from as far on the other side, and the reverse; how many
    were added."""
    records = list(source.records())
    ways = [_way(record, forms, home) for record in records]
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
"""What a send and the receive that answers it elsewhere have in common: group, how far the message goes, tag."""


def _sign(record: CommRecord) -> int:
    return 1 if record.op == "send" else -1


def _way(record: CommRecord, forms: dict[str, StridedGroup], home: int) -> Way | None:
    form = forms.get(record.pg)
    if form is None or record.peer is None or not is_p2p(record) or record.peer not in (members := form.members(home)):
        return None
    distance = (members.index(record.peer) - members.index(home)) * _sign(record)
    return record.pg, distance % form.size, record.tag or 0
