"""What-if with another bucket size of DDP: merges or splits its all_reduces.

DDP's reducer all_reduces gradients in buckets, each as soon as its last gradient is ready. Here the same bytes are sent
in the same order in other buckets. A bucket is launched where the recorded bucket with its last byte was launched. It
is waited for before the first recorded wait for any of its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import msgspec

from crossrank.comm import total_bytes
from crossrank.dtypes import DTYPES
from crossrank.errors import CrossrankError
from crossrank.replay.plan.plan import UNPLACED, Plan, PlannedCall, RankPlan, move_waits

_MB = 1 << 20


def with_buckets(plan: Plan, megabytes: float) -> Plan:
    """Return `plan` with DDP's gradients in buckets of `megabytes` MiB. Raises `CrossrankError` if it has none."""
    if not 0 < megabytes <= 1 << 20:
        raise CrossrankError(f"--bucket-mb {megabytes:g} is not a number of MiB above 0")
    ranks = [_rebucket_rank(rank, round(megabytes * _MB)) for rank in plan.ranks]
    if all(new is old for new, old in zip(ranks, plan.ranks, strict=True)):
        raise CrossrankError("--bucket-mb: no rank has all_reduces of DDP's reducer; remove it")
    return msgspec.structs.replace(plan, ranks=ranks, notes=list(plan.notes))


def _rebucket_rank(rank: RankPlan, size: int) -> RankPlan:
    runs = list(_find_runs(rank.calls))
    if not runs:
        return rank
    replaced: dict[int, list[PlannedCall]] = {}
    """Index of a recorded call -> the calls that replace it."""
    for run in runs:
        replaced |= _make_buckets(rank.calls, run, size)
    calls: list[PlannedCall] = []
    before = [0]
    """By index of a recorded call: the number of new calls before it."""
    for index, call in enumerate(rank.calls):
        calls += replaced.get(index, [msgspec.structs.replace(call)])
        before.append(len(calls))
    move_waits(calls, before)
    return msgspec.structs.replace(rank, calls=calls)


def _find_runs(calls: list[PlannedCall]) -> Iterator[list[int]]:
    """Yield indices of gradient all_reduces that may share buckets: those of one step, group and type, up to the first
    wait for one of them."""
    run: list[int] = []
    for index, call in enumerate(calls):
        record = call.record
        if record.op != "all_reduce" or record.api is not None or call.blocking or record.batch is not None:
            continue
        first = calls[run[0]].record if run else None
        is_next = first is not None and (first.step, first.pg, first.dtype, first.reduce) == (
            record.step,
            record.pg,
            record.dtype,
            record.reduce,
        )
        awaited = any(0 <= calls[one].wait_before <= index for one in run)
        if run and (not is_next or awaited):
            yield run
            run = []
        run.append(index)
    if run:
        yield run


def _make_buckets(calls: list[PlannedCall], run: list[int], size: int) -> dict[int, list[PlannedCall]]:
    """Return the calls that replace each call of a run."""
    elements = [sum(map(prod, calls[index].record.inputs)) for index in run]
    width = DTYPES[calls[run[0]].record.dtype or "float32"].size
    each = max(1, size // width)
    total = sum(elements)
    replaced: dict[int, list[PlannedCall]] = {index: [] for index in run}
    ends = [sum(elements[: place + 1]) for place in range(len(run))]
    waits = [calls[index].wait_before for index in run]
    for begin in range(0, total, each):
        end = min(begin + each, total)
        held = [place for place in range(len(run)) if ends[place] - elements[place] < end and ends[place] > begin]
        last = held[-1]
        whole = calls[run[last]]
        shape = [[end - begin]]
        record = msgspec.structs.replace(
            whole.record, inputs=shape, outputs=shape, bytes=total_bytes(shape, width), batch=None
        )
        placed = [waits[place] for place in held if waits[place] != UNPLACED]
        first = begin == 0
        replaced[run[last]].append(
            msgspec.structs.replace(
                whole,
                record=record,
                wait_before=min(placed) if placed else UNPLACED,
                recorded_bytes=sum(calls[index].recorded_bytes for index in run) if first else 0,
                recorded_calls=sum(calls[index].recorded_calls for index in run) if first else 0,
                took_ns=None,
                merged=[calls[run[place]].record.id for place in held[:-1]],
            )
        )
    return replaced
