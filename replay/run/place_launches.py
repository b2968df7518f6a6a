"""Places the calls of a rank between its operations, and finds the calls that use tensors of operations."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from crossrank.replay.plan.compute.compute_plan import ComputePlan
from crossrank.replay.plan.dtype_fallback import substitute
from crossrank.replay.plan.plan import PlannedCall
from crossrank.replay.plan.shapes import tensors
from crossrank.replay.run.program import OwnTensors, Program

Placed = tuple[dict[int, list[int]], dict[int, tuple[int, ...]], tuple[int, ...]]


def place_launches(plan: ComputePlan, program: Program) -> Placed:
    """Return (operation -> launches at it, operation -> launches waited for before it, launches waited for at the end).

    Operations and launches are positions in `plan` and `program`. A launch is placed at the last of its recorded calls.
    A launch that is not recorded goes to the place of the next recorded one. A blocking launch is waited for at once.
    """
    at = _call_positions(plan)
    places = [
        max((at[one] for index in bound.calls for one in program.calls[index].recorded_ids if one in at), default=-1)
        for bound in program.bound
    ]
    last = max(at.values(), default=len(plan.operations) - 1)
    following = last
    for position in reversed(range(len(places))):
        places[position] = following = places[position] if places[position] >= 0 else following
    launches: dict[int, list[int]] = {}
    highest = -1
    for position, place in enumerate(places):
        highest = max(highest, place)
        launches.setdefault(highest, []).append(position)
    positions_of: dict[int, list[int]] = {}
    for position, bound in enumerate(program.bound):
        for index in bound.calls:
            for one in program.calls[index].recorded_ids:
                positions_of.setdefault(one, []).append(position)
    left = {position for position, bound in enumerate(program.bound) if not bound.blocking}
    waits: dict[int, tuple[int, ...]] = {}
    launched: set[int] = set()
    for number, operation in enumerate(plan.operations):
        due = {one for call in operation.waits for one in positions_of.get(call, ())} & left & launched
        if due:
            waits[number] = tuple(sorted(due))
            left -= due
        launched.update(launches.get(number, ()))
    return launches, waits, tuple(sorted(left))


def own_tensors(
    plan: ComputePlan, slots: list[Any], calls: Sequence[PlannedCall], backend: str
) -> dict[int, OwnTensors]:
    """Return, by index, the calls that use tensors of operations, as recorded. A changed call has other tensors.
    `slots` holds the tensors of this rank."""
    position_of = _call_positions(plan)
    own = {}
    highest = -1
    for index, call in enumerate(calls):
        place = position_of.get(call.record.id, -1)
        if place < highest:
            continue  # launched later than recorded, when its tensors may be gone
        highest = place
        instead = substitute(call.record, backend)
        if place < 0 or call.merged or (instead.dtype, instead.elements) != (call.record.dtype, 1):
            continue
        operation = plan.operations[place]
        sides = [[prod(shape) for shape in side] for side in tensors(call.record)]
        named = [operation.inputs, operation.outputs]
        sizes = [[prod(plan.slots[slot].shape) for slot in side] for side in named]
        dtypes = {plan.slots[slot].dtype for side in named for slot in side}
        if [sides[0], sides[-1]] == sizes and dtypes == {call.record.dtype}:
            own[index] = OwnTensors(slots=slots, inputs=operation.inputs, outputs=operation.outputs)
    return own


def _call_positions(plan: ComputePlan) -> dict[int, int]:
    """Return the position of the operation of each call, by its id."""
    return {operation.call: number for number, operation in enumerate(plan.operations) if operation.call >= 0}
