"""All ranks of a job from the file of one (`--one-trace`): on every rank its groups in their place, peers as far away.

Groups of parallel jobs are regular: ranks `start, start + stride, …`, and others of the same form beside them, which
together tile the ranks. The file of one rank says the form, so every other rank's group follows from it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import msgspec

from crossrank.comm import CommRecord, is_p2p
from crossrank.errors import CrossrankError
from crossrank.text import rank_ranges
from crossrank.tools.traces.rank_calls import RankCalls, RecordedCall


@dataclass(frozen=True)
class Form:
    """A regular group: the form that all groups of one dimension of a job share."""

    stride: int
    size: int

    @property
    def block(self) -> int:
        """Ranks that the groups of this form which lie in each other take up."""
        return self.stride * self.size

    def members(self, rank: int) -> list[int]:
        """The group of this form that `rank` is in."""
        start = rank // self.block * self.block + rank % self.stride
        return list(range(start, start + self.block, self.stride))


def form_of(ranks: list[int], world_size: int) -> Form | None:
    """The form of a group; None for one that is not regular, or whose like do not tile the world.

    >>> form_of([1, 3, 5, 7], 8), form_of([0, 1, 3], 4), form_of([1, 2], 4)
    (Form(stride=2, size=4), None, None)
    """
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if stride < 1:
        return None
    form = Form(stride, len(ranks))
    return form if world_size % form.block == 0 and form.members(ranks[0]) == ranks else None


def spread(source: RankCalls, world_size: int | None = None) -> list[RankCalls]:
    """The calls of one rank for all ranks of its world. A message to the peer d ranks on becomes one from every rank
    to that d ranks on; where the file lacks its other end (a first pipeline stage only sends), that is added beside it.
    What a rank receives in an uneven all_to_all follows from what the others send.

    Raises `CrossrankError` where a group is not regular.
    """
    home = source.rank if source.rank is not None else 0
    size = source.world_size or world_size or _highest(source) + 1
    if home >= size:
        raise CrossrankError(f"{source.path}: is of rank {home}, which is not among {size} ranks")
    forms: dict[str, Form] = {}
    for group in source.groups:
        ranks = group.ranks or (list(range(size)) if group.size in (0, size) else [])
        if home not in ranks:
            continue
        form = form_of(ranks, size)
        if form is None:
            raise CrossrankError(
                f"{source.path}: group {group.pg!r} (ranks {rank_ranges(ranks)}) has no regular form that tiles "
                f"{size} ranks; give the files of all ranks"
            )
        forms[group.pg] = form
    whole, added = _with_both_ends(source.calls, forms, home)
    made = []
    for rank in range(size):
        calls = [
            msgspec.structs.replace(call, record=_moved(call.record, home, rank, forms[call.record.pg]))
            if call.record.pg in forms
            else call
            for call in whole
        ]
        groups = [
            msgspec.structs.replace(group, ranks=forms[group.pg].members(rank), size=forms[group.pg].size)
            for group in source.groups
            if group.pg in forms
        ]
        one = msgspec.structs.replace(
            source, rank=rank, world_size=size, calls=calls, groups=groups, numbered=False, starts_late=False
        )
        made.append(one if rank == home else msgspec.structs.replace(one, **_OF_A_COPY))
    made[home].notes = [
        *source.notes,
        f"the file of rank {home} stands for all {size} ranks (--one-trace); groups that it is not in are not known",
    ]
    if added:
        made[home].notes.append(f"{added} sends or receives have no other end in it, which was added on every rank")
    return made


_OF_A_COPY: dict[str, Any] = {
    "is_copy": True, "waits": 0, "waits_without_call": 0, "dropped": 0, "problems": [], "notes": [],
}  # fmt: skip
"""What is said of the file is said once."""


def _highest(source: RankCalls) -> int:
    members = [rank for group in source.groups for rank in group.ranks or ()]
    return max([source.rank or 0, *members])


def _moved(record: CommRecord, home: int, rank: int, form: Form) -> CommRecord:
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


def _with_both_ends(calls: list[RecordedCall], forms: dict[str, Form], home: int) -> tuple[list[RecordedCall], int]:
    """`calls` with a receive beside every send without one from as far on the other side, and the reverse."""
    ends: dict[tuple[object, ...], Counter[str]] = defaultdict(Counter)
    keys: list[tuple[object, ...] | None] = []
    for call in calls:
        key = _distance_key(call.record, forms, home)
        keys.append(key)
        if key is not None:
            ends[key][call.record.op] += 1
    surplus = {key: counts["send"] - counts["recv"] for key, counts in ends.items()}
    next_id = max((call.record.id for call in calls), default=0) + 1
    made: list[RecordedCall] = []
    new_index = [0]
    added = 0
    for call, key in zip(calls, keys, strict=True):
        op = call.record.op
        if key is not None and surplus[key] * (1 if op == "send" else -1) > 0:
            surplus[key] -= 1 if op == "send" else -1
            batch = call.record.batch if call.record.batch is not None else call.record.id
            made.append(msgspec.structs.replace(call, record=msgspec.structs.replace(call.record, batch=batch)))
            made.append(msgspec.structs.replace(call, record=_other_end(call.record, forms, home, next_id, batch)))
            next_id, added = next_id + 1, added + 1
        else:
            made.append(call)
        new_index.append(len(made))
    for call in made:
        if call.wait_before is not None:
            call.wait_before = new_index[call.wait_before]
    return made, added


def _distance_key(record: CommRecord, forms: dict[str, Form], home: int) -> tuple[object, ...] | None:
    """What a send and the receive that answers it elsewhere have in common: how far the message goes."""
    form = forms.get(record.pg)
    if form is None or not is_p2p(record) or record.peer not in form.members(home):
        return None
    members = form.members(home)
    distance = members.index(record.peer) - members.index(home)
    return record.pg, (distance if record.op == "send" else -distance) % form.size, record.tag or 0


def _other_end(record: CommRecord, forms: dict[str, Form], home: int, number: int, batch: int) -> CommRecord:
    members = forms[record.pg].members(home)
    assert record.peer is not None
    distance = members.index(record.peer) - members.index(home)
    return msgspec.structs.replace(
        record,
        id=number,
        op="recv" if record.op == "send" else "send",
        c10d="recv_" if record.op == "send" else "send",
        inputs=record.outputs,
        outputs=record.inputs,
        peer=members[(members.index(home) - distance) % len(members)],
        batch=batch,
    )
