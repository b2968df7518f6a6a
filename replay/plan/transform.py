"""What-if on a plan: other sizes, other types, fewer operations, groups or calls. Each gives a new plan.

What a filter takes away counts as left out, with the filter as its reason, so that coverage goes on to say how much of
the recording is replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from math import prod

import msgspec

from crossrank.comm import OPERATIONS, CommRecord, Group, operation_of
from crossrank.dtypes import DTYPES, dtype_of
from crossrank.errors import CrossrankError
from crossrank.replay.plan.build_plan import used_groups
from crossrank.replay.plan.plan import Plan, PlannedCall, RankPlan, with_records
from crossrank.replay.plan.schedule import calls_by_key, keys_of, takers
from crossrank.replay.plan.shapes import IN_ONE, OWN_SIDE, of_all_members, parts, sized


def with_calls(plan: Plan, change: Callable[[RankPlan, int, PlannedCall], CommRecord | str]) -> Plan:
    """`plan` with every record replaced by what `change` gives; a text leaves the call out for that reason."""
    ranks = [
        with_records(rank, [change(rank, index, call) for index, call in enumerate(rank.calls)]) for rank in plan.ranks
    ]
    return msgspec.structs.replace(plan, ranks=ranks, groups=used_groups(ranks, plan.groups), notes=list(plan.notes))


def only_operations(plan: Plan, names: Collection[str]) -> Plan:
    """Only calls of these operations. Raises `CrossrankError` for a name that is no operation."""
    wanted = set()
    for name in names:
        operation = operation_of(name)
        if operation is None:
            raise CrossrankError(f"--ops: {name!r} is no operation; choose from {', '.join(OPERATIONS)}")
        wanted.add(operation.name)
    if len({"send", "recv"} & wanted) == 1:
        raise CrossrankError("--ops: sends and receives answer each other; name both or neither")
    return with_calls(plan, lambda rank, index, call: call.record if call.record.op in wanted else "not in --ops")


def only_groups(plan: Plan, names: Collection[str]) -> Plan:
    """Only calls on these groups, by name or description. Raises `CrossrankError` for one that the plan lacks."""
    wanted = set()
    for name in names:
        found = {group.pg for group in plan.groups if name in (group.pg, group.desc)}
        if not found:
            known = ", ".join(f"{group.pg} ({group.desc})" if group.desc else group.pg for group in plan.groups[:20])
            raise CrossrankError(f"--pgs: no call is on a group {name!r}; choose from {known}")
        wanted |= found
    return with_calls(plan, lambda rank, index, call: call.record if call.record.pg in wanted else "not in --pgs")


def first_calls(plan: Plan, count: int) -> Plan:
    """The first `count` calls of every rank, without those whose counterparts on other ranks come later."""
    keys = {rank.rank: keys_of(rank) for rank in plan.ranks}
    members = {group.pg: group.ranks or [] for group in plan.groups}
    within = Counter(key for mine in keys.values() for key in mine[:count])

    def change(rank: RankPlan, index: int, call: PlannedCall) -> CommRecord | str:
        key = keys[rank.rank][index]
        return call.record if index < count and within[key] == takers(key, members) else "beyond --max-calls"

    return with_calls(plan, change)


def with_dtype(plan: Plan, name: str) -> Plan:
    """The same elements in another type. Raises `CrossrankError` for a type that is not known."""
    dtype = dtype_of(name)
    if dtype is None:
        raise CrossrankError(f"--dtype {name!r} is not known; choose from {', '.join(DTYPES)}")

    def change(record: CommRecord, group: Group) -> CommRecord:
        return record if record.dtype is None else sized(msgspec.structs.replace(record, dtype=dtype.name), group)

    return _resized(plan, change)


def scale_bytes(plan: Plan, factor: float) -> Plan:
    """Every message `factor` times as large, by its number of elements; at least one stays of each that had any.

    Both ends round the same numbers in the same way, so parts of an uneven all_to_all go on to fit together.
    """
    if not 0 < factor <= 1e6:
        raise CrossrankError(f"--scale-bytes {factor:g} is not above 0 and up to 1,000,000")
    return plan if factor == 1 else _resized(plan, lambda record, group: _scaled(record, group, factor))


def _resized(plan: Plan, change: Callable[[CommRecord, Group], CommRecord]) -> Plan:
    """`plan` with other sizes, without recorded durations: calls of another size took another time."""
    groups = {group.pg: group for group in plan.groups}
    changed = with_calls(plan, lambda rank, index, call: change(call.record, groups[call.record.pg]))
    for rank in changed.ranks:
        for call in rank.calls:
            call.took_ns = None
    return changed


def _scale(elements: int, factor: float) -> int:
    return max(1, round(elements * factor)) if elements else 0


def _scaled(record: CommRecord, group: Group, factor: float) -> CommRecord:
    if record.op == "barrier":
        return record
    n = len(group.ranks or ())
    inputs = [[_scale(prod(shape), factor)] for shape in record.inputs]
    outputs = [[_scale(prod(shape), factor)] for shape in record.outputs]
    in_split = out_split = None
    if record.c10d == "alltoall_base_":
        # Part by part, for the sum of rounded parts is not the rounded sum.
        in_split = [_scale(part, factor) for part in parts(record.inputs[0], record.in_split, n)]
        out_split = [_scale(part, factor) for part in parts(record.outputs[0], record.out_split, n)]
        inputs, outputs = [[sum(in_split)]], [[sum(out_split)]]
    elif record.c10d in IN_ONE:
        own = (inputs, outputs)[:: OWN_SIDE[record.op]][0]
        inputs, outputs = (own, of_all_members(record, own, n))[:: OWN_SIDE[record.op]]
    changed = msgspec.structs.replace(record, inputs=inputs, outputs=outputs, in_split=in_split, out_split=out_split)
    return sized(changed, group)


def for_backend(plan: Plan, backend: str) -> Plan:
    """`plan` as `backend` can run it: gloo's all_to_all of a list wants tensors of one size, others are made one tensor
    with splits, on all ranks that take part."""
    if backend != "gloo":
        return plan
    keys = {rank.rank: keys_of(rank) for rank in plan.ranks}
    uneven = {
        key
        for key, calls in calls_by_key(plan, keys, "all_to_all").items()
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
        f"{len(uneven)} all_to_all(s) of lists of uneven tensors are made of one tensor each, for gloo"
    )
    return changed
