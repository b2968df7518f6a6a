"""A plan for more or fewer ranks than recorded, with the parallel structure kept.

The outermost dimension of a job is the one whose groups span all its ranks (data parallelism, most often); it grows
or shrinks. The dimensions within it keep their groups, which are there more or less often. A rank does what the
recorded rank in its place did. In groups that change their size, what is gathered, scattered or exchanged keeps its
total per rank (sharded parameters stay as large); what is reduced or broadcast stays as it is.
"""

from __future__ import annotations

from math import ceil, prod

import msgspec

from crossrank.comm import OPERATIONS, CommRecord, Group, is_p2p
from crossrank.errors import CrossrankError
from crossrank.replay.plan.one_trace import Form, form_of
from crossrank.replay.plan.plan import LeftOut, Plan, PlannedCall, copy_left_out, leave_out
from crossrank.replay.plan.schedule import calls_by_key, keys_of
from crossrank.replay.plan.shapes import OWN_SIDE, of_all_members, sized
from crossrank.replay.plan.transform import with_calls
from crossrank.text import rank_ranges

BEYOND = "its peer is beyond the smaller number of ranks"
GONE = "its rank is beyond the smaller number of ranks"


Forms = tuple[Form, Form]
"""What a group is in the recording, and in the plan for another number of ranks."""


def resize(plan: Plan, world_size: int) -> Plan:
    """`plan` for `world_size` ranks. Raises `CrossrankError` where a group does not divide so."""
    old = plan.world_size
    if world_size == old:
        return plan
    if world_size < 1:
        raise CrossrankError(f"{world_size} ranks cannot replay anything")
    forms = {group.pg: _forms(group, old, world_size) for group in plan.groups}
    keys = {rank.rank: keys_of(rank) for rank in plan.ranks}
    sent = {
        key: {rank: sum(map(prod, record.inputs)) for rank, record in calls.items()}
        for key, calls in calls_by_key(plan, keys, "all_to_all").items()
    }
    ranks = []
    groups: dict[str, Group] = {}
    for number in range(world_size):
        template = plan.ranks[number % old]
        own = {
            group.pg: (group, _group_at(group, *forms[group.pg], number, number - template.rank))
            for group in plan.groups
            if template.rank in (group.ranks or ())
        }
        groups |= {group.pg: group for _, group in own.values()}
        calls = [
            _moved(call, *own[call.record.pg], number, old, sent.get(key, {}))
            for call, key in zip(template.calls, keys[template.rank], strict=True)
        ]
        is_copy = number >= old or template.is_copy
        ranks.append(msgspec.structs.replace(template, rank=number, calls=calls, is_copy=is_copy))
    changed = msgspec.structs.replace(
        plan,
        world_size=world_size,
        groups=list(groups.values()),
        ranks=ranks,
        left_out=_without(plan, world_size),
        notes=[*plan.notes, _change_text(list(forms.values()), old, world_size)],
    )
    return with_calls(
        changed, lambda rank, index, call: BEYOND if (call.record.peer or 0) >= world_size else call.record
    )


def _without(plan: Plan, world_size: int) -> dict[str, LeftOut]:
    """What of the recording is no longer in `plan` when it has only so many ranks."""
    rows = copy_left_out(plan.left_out)
    for rank in plan.ranks[world_size:]:
        if not rank.is_copy:
            leave_out(rows, GONE, len(rank.calls), sum(call.recorded_bytes for call in rank.calls))
            for reason, row in rank.left_out.items():
                leave_out(rows, reason, row.calls, row.bytes, row.unsized)
    return {reason: row for reason, row in rows.items() if row.calls}


def _forms(group: Group, old: int, new: int) -> Forms:
    ranks = group.ranks or []
    form = form_of(ranks, old)
    if form is None:
        raise CrossrankError(
            f"group {group.pg!r} (ranks {rank_ranges(ranks)}) is not regular: {old} ranks cannot be made {new}; "
            "choose the other groups with --pgs, or replay with the recorded number"
        )
    if form.block < old:
        if new % form.block:
            raise CrossrankError(
                f"{new} ranks do not divide into blocks of {form.block}, which group {group.pg!r} "
                f"(ranks {rank_ranges(ranks)}) and its like take up; choose a multiple of {form.block}"
            )
        return form, form
    if (form.size * new) % old:
        raise CrossrankError(
            f"{new} ranks do not divide as the {old} recorded ones: group {group.pg!r} has {form.size} members "
            f"{form.stride} apart, and would have {form.size * new / old:g}"
        )
    return form, Form(form.stride, form.size * new // old)


def _group_at(group: Group, was: Form, now: Form, rank: int, shift: int) -> Group:
    """What stands for `group` around `rank`, which is `shift` beyond the recorded rank that it follows."""
    name = group.pg if shift == 0 or was != now else f"{group.pg} +{shift}"
    return msgspec.structs.replace(group, pg=name, ranks=now.members(rank), size=now.size)


def _moved(call: PlannedCall, was: Group, group: Group, rank: int, old: int, sent: dict[int, int]) -> PlannedCall:
    record = call.record
    members, before = group.ranks or [], was.ranks or []
    root = members[before.index(record.root) % len(members)] if record.root is not None else None
    peer = record.peer + rank - rank % old if record.peer is not None else None
    record = msgspec.structs.replace(record, pg=group.pg, root=root, peer=peer)
    if len(members) != len(before) and not is_p2p(record):
        record = sized(_reshared(record, members, sent, rank, old), group)
    return msgspec.structs.replace(call, record=record, took_ns=None)


def _reshared(record: CommRecord, members: list[int], sent: dict[int, int], rank: int, old: int) -> CommRecord:
    """The tensors of `record` for a group of another size."""
    n = len(members)
    inputs, outputs = record.inputs, record.outputs
    in_split = out_split = None
    if record.op == "all_to_all":
        mine = ceil(sent[rank % old] / n)
        theirs = [ceil(sent[member % old] / n) for member in members]
        if record.c10d == "alltoall_":
            inputs, outputs = [[mine]] * n, [[size] for size in theirs]
        else:
            in_split, out_split = [mine] * n, theirs
            inputs, outputs = [[mine * n]], [[sum(theirs)]]
    elif record.op in OWN_SIDE:
        own, of_all = (inputs, outputs)[:: OWN_SIDE[record.op]]
        if OPERATIONS[record.op].rooted:
            of_all = own * n if record.root == rank else []
        else:
            if record.c10d != "allgather_coalesced_":
                wholes = [sum(map(prod, of_all))] if len(own) == 1 else map(prod, of_all)
                own = [[ceil(whole / n)] for whole in wholes]
            of_all = of_all_members(record, own, n)
        inputs, outputs = (own, of_all)[:: OWN_SIDE[record.op]]
    return msgspec.structs.replace(record, inputs=inputs, outputs=outputs, in_split=in_split, out_split=out_split)


def _change_text(forms: list[Forms], old: int, new: int) -> str:
    spans = sorted({(was.size, now.size, was.stride) for was, now in forms if was != now})
    inner = sorted({(was.size, was.stride) for was, now in forms if was == now})
    text = f"{new} ranks for the {old} recorded: " + (
        ", ".join(f"groups of {was} with stride {stride} have {now} members" for was, now, stride in spans)
        or "no group spans all ranks"
    )
    if inner:
        text += "; unchanged: " + ", ".join(f"groups of {size} with stride {stride}" for size, stride in inner)
    return text
