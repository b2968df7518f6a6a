"""What-ifs: each function returns a new plan with other sizes, types, operations, groups, calls or ranks.

A filter counts the calls that it skips, with its option as the reason, so that coverage stays true.

`resize` changes the number of ranks and keeps the parallel structure:

* The outermost dimension, whose groups span all ranks (usually data parallelism), grows or shrinks. The inner ones keep
  their groups, and only the number of groups changes. A rank does what the recorded rank at its position did.
* In a group of another size, gathered, scattered and exchanged data keeps its total per rank (sharded parameters keep
  their size). Reduced and broadcast data does not change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from math import ceil, prod

import msgspec

from crossrank.comm import OPERATIONS, CommRecord, Group, Operation, is_p2p, operation_of
from crossrank.dtypes import DTYPES, dtype_of
from crossrank.errors import CrossrankError
from crossrank.replay.plan.build_plan import used_groups
from crossrank.replay.plan.one_trace import StridedGroup, strided_group
from crossrank.replay.plan.plan import LeftOut, Plan, PlannedCall, RankPlan, copy_left_out, leave_out, with_records
from crossrank.replay.plan.schedule import exchanges, keys_of, takers
from crossrank.replay.plan.shapes import IN_ONE, OWN_INPUTS, OWN_OUTPUTS, of_all_members, own_first, parts, sized
from crossrank.text import rank_ranges

BEYOND = "its peer is not among the ranks of the smaller job"
GONE = "its rank is not among the ranks of the smaller job"
OVERLAPS = ("recorded", "none")
Forms = tuple[StridedGroup, StridedGroup]
"""The form of a group in the recording, and in the plan for another number of ranks."""


def with_calls(plan: Plan, change: Callable[[RankPlan, int, PlannedCall], CommRecord | str]) -> Plan:
    """Return `plan` with every record replaced by the result of `change`; a string skips the call for that reason."""
    ranks = [
        with_records(rank, [change(rank, index, call) for index, call in enumerate(rank.calls)]) for rank in plan.ranks
    ]
    return msgspec.structs.replace(plan, ranks=ranks, groups=used_groups(ranks, plan.groups), notes=list(plan.notes))


def only_operations(plan: Plan, names: Collection[str]) -> Plan:
    """Keep only calls of these operations. Raises `CrossrankError` for an unknown operation."""
    wanted = {operation.name for operation in _parse_operations("--ops", names)}
    if len({"send", "recv"} & wanted) == 1:
        raise CrossrankError("--ops: sends and receives belong together; give both or neither")
    return with_calls(plan, lambda rank, index, call: call.record if call.record.op in wanted else "not in --ops")


def without_operations(plan: Plan, names: Collection[str]) -> Plan:
    """Skip calls of these operations; `send` and `recv` only together. Raises `CrossrankError` for an unknown
    operation."""
    dropped: set[str] = set()
    for operation in _parse_operations("--drop", names):
        dropped |= {"send", "recv"} if operation.p2p else {operation.name}
    return with_calls(plan, lambda rank, index, call: "--drop" if call.record.op in dropped else call.record)


def _parse_operations(option: str, names: Collection[str]) -> Iterator[Operation]:
    for name in names:
        operation = operation_of(name)
        if operation is None:
            raise CrossrankError(f"{option}: {name!r} is not an operation; choose from {', '.join(OPERATIONS)}")
        yield operation


def with_overlap(plan: Plan, how: str) -> Plan:
    """Make every call blocking if `how` is `none`."""
    if how != "none":
        return plan
    ranks = [
        msgspec.structs.replace(rank, calls=[msgspec.structs.replace(call, blocking=True) for call in rank.calls])
        for rank in plan.ranks
    ]
    return msgspec.structs.replace(plan, ranks=ranks, notes=list(plan.notes))


def only_groups(plan: Plan, names: Collection[str]) -> Plan:
    """Keep only calls on these groups, by name or description. Raises `CrossrankError` for an unknown group."""
    wanted = set()
    for name in names:
        found = {group.pg for group in plan.groups if name in (group.pg, group.desc)}
        if not found:
            known = ", ".join(f"{group.pg} ({group.desc})" if group.desc else group.pg for group in plan.groups[:20])
            raise CrossrankError(f"--pgs: no call is on a group {name!r}; choose from {known}")
        wanted |= found
    return with_calls(plan, lambda rank, index, call: call.record if call.record.pg in wanted else "not in --pgs")


def first_calls(plan: Plan, count: int) -> Plan:
    """Keep the first `count` calls of every rank, except those whose counterparts on other ranks come later."""
    keys = {rank.rank: keys_of(rank) for rank in plan.ranks}
    members = {group.pg: group.ranks or [] for group in plan.groups}
    within = Counter(key for mine in keys.values() for key in mine[:count])

    def change(rank: RankPlan, index: int, call: PlannedCall) -> CommRecord | str:
        key = keys[rank.rank][index]
        return call.record if index < count and within[key] == takers(key, members) else "beyond --max-calls"

    return with_calls(plan, change)


def with_dtype(plan: Plan, name: str) -> Plan:
    """Send the same elements in another type. Raises `CrossrankError` for an unknown type."""
    dtype = dtype_of(name)
    if dtype is None:
        raise CrossrankError(f"--dtype {name!r} is not known; choose from {', '.join(DTYPES)}")

    def change(record: CommRecord, group: Group) -> CommRecord:
        return record if record.dtype is None else sized(msgspec.structs.replace(record, dtype=dtype.name), group)

    return _change_tensors(plan, change)


def scale_bytes(plan: Plan, factor: float) -> Plan:
    """Multiply the number of elements of every tensor by `factor`; a tensor with elements keeps at least one.

    Both ends round the same numbers in the same way, so that uneven all_to_alls still match.
    """
    if not 0 < factor <= 1e6:
        raise CrossrankError(f"--scale-bytes {factor:g} is not above 0 and up to 1,000,000")
    return _change_tensors(plan, lambda record, group: _scale_record(record, group, factor))


def _change_tensors(plan: Plan, change: Callable[[CommRecord, Group], CommRecord]) -> Plan:
    """Return `plan` with other sizes. It has no recorded durations, since they belong to the old sizes."""
    groups = {group.pg: group for group in plan.groups}
    changed = with_calls(plan, lambda rank, index, call: change(call.record, groups[call.record.pg]))
    for rank in changed.ranks:
        for call in rank.calls:
            call.took_ns = None
    return changed


def _scale_count(elements: int, factor: float) -> int:
    return max(1, round(elements * factor)) if elements else 0


def _scale_record(record: CommRecord, group: Group, factor: float) -> CommRecord:
    if record.op == "barrier":
        return record
    n = len(group.ranks or ())
    inputs = [[_scale_count(prod(shape), factor)] for shape in record.inputs]
    outputs = [[_scale_count(prod(shape), factor)] for shape in record.outputs]
    in_split = out_split = None
    if record.c10d == "alltoall_base_":
        # Part by part: the sum of rounded parts is not the rounded sum.
        in_split = [_scale_count(part, factor) for part in parts(record.inputs[0], record.in_split, n)]
        out_split = [_scale_count(part, factor) for part in parts(record.outputs[0], record.out_split, n)]
        inputs, outputs = [[sum(in_split)]], [[sum(out_split)]]
    elif record.c10d in IN_ONE:
        own, _ = own_first(record.op, (inputs, outputs))
        inputs, outputs = own_first(record.op, (own, of_all_members(record, own, n)))
    changed = msgspec.structs.replace(record, inputs=inputs, outputs=outputs, in_split=in_split, out_split=out_split)
    return sized(changed, group)


def for_backend(plan: Plan, backend: str) -> Plan:
    """Return `plan` for `backend`. gloo's all_to_all of a list needs tensors of equal size; others become one tensor
    with splits, on all ranks."""
    if backend != "gloo":
        return plan
    keys, found = exchanges(plan)
    uneven = {
        key
        for key, calls in found.items()
        for record in calls.values()
        if record.c10d == "alltoall_" and len({prod(shape) for shape in (*record.inputs, *record.outputs)}) > 1
    }
    if not uneven:
        return plan

    def change(rank: RankPlan, index: int, call: PlannedCall) -> CommRecord:
        record = call.record
        if keys[rank.rank][index] not in uneven:
            return record
        sends, receives = ([prod(shape) for shape in shapes] for shapes in (record.inputs, record.outputs))
        tensors = {"inputs": [[sum(sends)]], "outputs": [[sum(receives)]], "in_split": sends, "out_split": receives}
        return msgspec.structs.replace(record, c10d="alltoall_base_", **tensors)

    changed = with_calls(plan, change)
    changed.notes.append(
        f"{len(uneven)} all_to_all(s) with lists of uneven tensors use one tensor each, because of gloo"
    )
    return changed


def resize(plan: Plan, world_size: int) -> Plan:
    """Return `plan` for `world_size` ranks. Raises `CrossrankError` if a group does not divide evenly."""
    old = plan.world_size
    forms = {group.pg: _resize_form(group, old, world_size) for group in plan.groups}
    keys, found = exchanges(plan)
    sent = {
        key: {rank: sum(map(prod, record.inputs)) for rank, record in calls.items()} for key, calls in found.items()
    }
    ranks = []
    groups: dict[str, Group] = {}
    for number in range(world_size):
        template = plan.ranks[number % old]
        own = {
            group.pg: (group, _shift_group(group, *forms[group.pg], number, number - template.rank))
            for group in plan.groups
            if template.rank in (group.ranks or ())
        }
        groups |= {group.pg: group for _, group in own.values()}
        calls = [
            _move_call(call, *own[call.record.pg], number, old, sent.get(key, {}))
            for call, key in zip(template.calls, keys[template.rank], strict=True)
        ]
        is_copy = number >= old or template.is_copy
        ranks.append(msgspec.structs.replace(template, rank=number, calls=calls, is_copy=is_copy))
    changed = msgspec.structs.replace(
        plan,
        world_size=world_size,
        groups=list(groups.values()),
        ranks=ranks,
        left_out=_count_removed_ranks(plan, world_size),
        notes=[*plan.notes, _describe_resize(list(forms.values()), old, world_size)],
    )
    return with_calls(
        changed, lambda rank, index, call: BEYOND if (call.record.peer or 0) >= world_size else call.record
    )


def _count_removed_ranks(plan: Plan, world_size: int) -> dict[str, LeftOut]:
    """Return the skipped calls of the whole recording for a plan with only `world_size` ranks."""
    rows = copy_left_out(plan.left_out)
    for rank in plan.ranks[world_size:]:
        if not rank.is_copy:
            calls = sum(call.recorded_calls for call in rank.calls)
            leave_out(rows, GONE, calls, sum(call.recorded_bytes for call in rank.calls))
            for reason, row in rank.left_out.items():
                leave_out(rows, reason, row.calls, row.bytes, row.unsized)
    return {reason: row for reason, row in rows.items() if row.calls}


def _resize_form(group: Group, old: int, new: int) -> Forms:
    ranks = group.ranks or []
    form = strided_group(ranks, old)
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
    return form, StridedGroup(form.stride, form.size * new // old)


def _shift_group(group: Group, was: StridedGroup, now: StridedGroup, rank: int, shift: int) -> Group:
    """Return the group that replaces `group` for `rank`, which is `shift` after the recorded rank that it repeats."""
    name = group.pg if shift == 0 or was != now else f"{group.pg} +{shift}"
    return msgspec.structs.replace(group, pg=name, ranks=list(now.members(rank)), size=now.size)


def _move_call(call: PlannedCall, was: Group, group: Group, rank: int, old: int, sent: dict[int, int]) -> PlannedCall:
    record = call.record
    members, before = group.ranks or [], was.ranks or []
    root = members[before.index(record.root) % len(members)] if record.root is not None else None
    peer = record.peer + rank - rank % old if record.peer is not None else None
    record = msgspec.structs.replace(record, pg=group.pg, root=root, peer=peer)
    if len(members) != len(before) and not is_p2p(record):
        record = sized(_reshape_for_group(record, members, sent, rank, old), group)
    return msgspec.structs.replace(call, record=record, took_ns=None)


def _reshape_for_group(record: CommRecord, members: list[int], sent: dict[int, int], rank: int, old: int) -> CommRecord:
    """Return `record` with the tensors that it has in a group with other members."""
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
    elif record.op in (*OWN_INPUTS, *OWN_OUTPUTS):
        own, of_all = own_first(record.op, (inputs, outputs))
        if OPERATIONS[record.op].rooted:
            of_all = own * n if record.root == rank else []
        else:
            if record.c10d != "allgather_coalesced_":
                wholes = [sum(map(prod, of_all))] if len(own) == 1 else map(prod, of_all)
                own = [[ceil(whole / n)] for whole in wholes]
            of_all = of_all_members(record, own, n)
        inputs, outputs = own_first(record.op, (own, of_all))
    return msgspec.structs.replace(record, inputs=inputs, outputs=outputs, in_split=in_split, out_split=out_split)


def _describe_resize(forms: list[Forms], old: int, new: int) -> str:
    spans = sorted({(was.size, now.size, was.stride) for was, now in forms if was != now})
    inner = sorted({(was.size, was.stride) for was, now in forms if was == now})
    text = f"{new} ranks for the {old} recorded: " + (
        ", ".join(f"groups of {was} with stride {stride} have {now} members" for was, now, stride in spans)
        or "no group spans all ranks"
    )
    if inner:
        text += "; unchanged: " + ", ".join(f"groups of {size} with stride {stride}" for size, stride in inner)
    return text
