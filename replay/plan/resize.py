"""A plan for more or fewer ranks than recorded, with the parallel structure kept.

The outermost dimension of a job is the one whose groups span all its ranks (data parallelism, most often); it grows
or shrinks. The dimensions within it keep their groups, which are there more or less often. A rank does what the
recorded rank in its place did. In groups that change their size, what is gathered, scattered or exchanged keeps its
total per rank (sharded parameters stay as large); what is reduced or broadcast stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

import msgspec

from crossrank.comm import CommRecord, Group, is_p2p
from crossrank.errors import CrossrankError
from crossrank.replay.plan.one_trace import Form, form_of
from crossrank.replay.plan.plan import LeftOut, Plan, PlannedCall, leave_out
from crossrank.replay.plan.schedule import calls_by_key, keys_of
from crossrank.replay.plan.shapes import GATHERED_WHOLE, SCATTERED_WHOLE, sized
from crossrank.replay.plan.transform import copy_left_out, with_calls
from crossrank.text import rank_ranges

BEYOND = "its peer is beyond the smaller number of ranks"
GONE = "its rank is beyond the smaller number of ranks"


@dataclass(frozen=True, kw_only=True)
class _Mapped:
    """What becomes of one recorded group."""

    group: Group
    form: Form
    spans: bool
    """It spans all ranks, and so changes its size."""
    size: int
    """New number of members."""


def resize(plan: Plan, world_size: int) -> Plan:
    """`plan` for `world_size` ranks. Raises `CrossrankError` where a group does not divide so."""
    old = plan.world_size
    if world_size == old:
        return plan
    if world_size < 1:
        raise CrossrankError(f"{world_size} ranks cannot replay anything")
    mapped = {group.pg: _map(group, old, world_size) for group in plan.groups}
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
            name: _group_at(one, number, number - template.rank)
            for name, one in mapped.items()
            if template.rank in (one.group.ranks or ())
        }
        groups |= {group.pg: group for group in own.values()}
        calls = [
            _moved(call, mapped[call.record.pg], own[call.record.pg], number, old, sent.get(key, {}))
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
        notes=[*plan.notes, _change_text(mapped, old, world_size)],
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


def _map(group: Group, old: int, new: int) -> _Mapped:
    ranks = group.ranks or []
    form = form_of(ranks, old)
    if form is None:
        raise CrossrankError(
            f"group {group.pg!r} (ranks {rank_ranges(ranks)}) is not regular: {old} ranks cannot be made {new}; "
            "choose the other groups with --pgs, or replay with the recorded number"
        )
    spans = form.block == old
    if spans and (form.size * new) % old:
        raise CrossrankError(
            f"{new} ranks do not divide as the {old} recorded ones: group {group.pg!r} has {form.size} members "
            f"{form.stride} apart, and would have {form.size * new / old:g}"
        )
    if not spans and new % form.block:
        raise CrossrankError(
            f"{new} ranks do not divide into blocks of {form.block}, which group {group.pg!r} "
            f"(ranks {rank_ranges(ranks)}) and its like take up; choose a multiple of {form.block}"
        )
    return _Mapped(group=group, form=form, spans=spans, size=form.size * new // old if spans else form.size)


def _group_at(one: _Mapped, rank: int, shift: int) -> Group:
    """The group that stands for `one` around `rank`, which is `shift` beyond the recorded rank that it follows."""
    if one.spans:
        return msgspec.structs.replace(one.group, ranks=Form(one.form.stride, one.size).members(rank), size=one.size)
    name = one.group.pg if shift == 0 else f"{one.group.pg} +{shift}"
    return msgspec.structs.replace(one.group, pg=name, ranks=[member + shift for member in one.group.ranks or ()])


def _moved(call: PlannedCall, one: _Mapped, group: Group, rank: int, old: int, sent: dict[int, int]) -> PlannedCall:
    record = call.record
    members, before = group.ranks or [], one.group.ranks or []
    root = record.root
    if root is not None:
        root = members[before.index(root) % len(members)]
    peer = record.peer + rank - rank % old if record.peer is not None else None
    record = msgspec.structs.replace(record, pg=group.pg, root=root, peer=peer)
    if len(members) != len(before) and not is_p2p(record):
        record = sized(_reshared(record, group, sent, rank, old), group)
    return msgspec.structs.replace(call, record=record, took_ns=None)


def _reshared(record: CommRecord, group: Group, sent: dict[int, int], rank: int, old: int) -> CommRecord:
    """The tensors of `record` for a group of another size."""
    members = group.ranks or []
    n = len(members)
    inputs, outputs = record.inputs, record.outputs
    in_split = out_split = None
    if record.c10d in GATHERED_WHOLE:
        inputs = [[ceil(prod(shape) / n)] for shape in outputs]
        outputs = [[n * shape[0]] for shape in inputs]
    elif record.c10d in SCATTERED_WHOLE:
        outputs = [[ceil(prod(shape) / n)] for shape in inputs]
        inputs = [[n * shape[0]] for shape in outputs]
    elif record.c10d == "allgather_":
        inputs = [[ceil(sum(map(prod, outputs)) / n)]]
        outputs = inputs * n
    elif record.c10d == "reduce_scatter_":
        outputs = [[ceil(sum(map(prod, inputs)) / n)]]
        inputs = outputs * n
    elif record.c10d == "allgather_coalesced_":
        outputs = inputs * n
    elif record.c10d == "gather_":
        outputs = inputs[:1] * n if record.root == rank else []
    elif record.c10d == "scatter_":
        inputs = outputs[:1] * n if record.root == rank else []
    elif record.op == "all_to_all":
        mine = ceil(sent[rank % old] / n)
        theirs = [ceil(sent[member % old] / n) for member in members]
        if record.c10d == "alltoall_":
            inputs, outputs = [[mine]] * n, [[size] for size in theirs]
        else:
            in_split, out_split = [mine] * n, theirs
            inputs, outputs = [[mine * n]], [[sum(theirs)]]
    return msgspec.structs.replace(record, inputs=inputs, outputs=outputs, in_split=in_split, out_split=out_split)


def _change_text(mapped: dict[str, _Mapped], old: int, new: int) -> str:
    spans = sorted({(one.form.size, one.size, one.form.stride) for one in mapped.values() if one.spans})
    inner = sorted({(one.form.size, one.form.stride) for one in mapped.values() if not one.spans})
    text = f"{new} ranks for the {old} recorded: " + (
        ", ".join(f"groups of {was} with stride {stride} have {now} members" for was, now, stride in spans)
        or "no group spans all ranks"
    )
    if inner:
        text += "; unchanged: " + ", ".join(f"groups of {size} with stride {stride}" for size, stride in inner)
    return text
