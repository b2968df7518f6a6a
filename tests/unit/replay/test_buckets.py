"""DDP's buckets in another size: the same bytes, in the same order, on all ranks."""

from __future__ import annotations

import msgspec
import pytest

from crossrank.errors import CrossrankError
from crossrank.replay.plan.buckets import with_buckets
from crossrank.replay.plan.plan import Plan
from tests.unit.replay.plans import plan_of, record

MIB = 1 << 20


def job(*sizes: int, waits: list[int] | None = None) -> Plan:
    """A step with buckets of so many floats that C++ all_reduces, all waited for at its end."""
    calls = [record("all_reduce", is_async=True, inputs=[[size]], outputs=[[size]], bytes=4 * size) for size in sizes]
    plan = plan_of(calls, calls)
    for rank in plan.ranks:
        for index, call in enumerate(rank.calls):
            call.blocking = False
            call.wait_before = waits[index] if waits else len(calls)
    return plan


def sizes_of(plan: Plan) -> list[list[int]]:
    return [[call.record.inputs[0][0] for call in rank.calls] for rank in plan.ranks]


def test_buckets_are_merged_into_the_last_one_with_their_bytes() -> None:
    plan = job(MIB // 8, MIB // 8, MIB // 4)  # of 4 bytes: half a MiB, half a MiB, 1 MiB
    merged = with_buckets(plan, 4)
    assert sizes_of(merged) == [[MIB // 2]] * 2
    (call,) = merged.ranks[0].calls
    ids = [one.record.id for one in plan.ranks[0].calls]
    assert (call.record.id, call.merged) == (ids[2], ids[:2])
    assert call.wait_before == 1
    assert merged.coverage() == plan.coverage()


def test_split_buckets_keep_the_recorded_launch_position() -> None:
    plan = job(MIB // 2, MIB // 4)
    split = with_buckets(plan, 1)
    assert sizes_of(split) == [[MIB // 4] * 3] * 2
    ids = [one.record.id for one in plan.ranks[0].calls]
    assert [call.record.id for call in split.ranks[0].calls] == [ids[0], ids[0], ids[1]]
    assert [call.wait_before for call in split.ranks[0].calls] == [3, 3, 3]
    assert split.coverage() == plan.coverage()
    assert split.bytes == plan.bytes


def test_a_bucket_is_not_merged_with_buckets_launched_after_its_wait() -> None:
    plan = job(MIB // 8, MIB // 8, MIB // 8, waits=[1, 3, 3])
    assert sizes_of(with_buckets(plan, 4)) == [[MIB // 8, MIB // 4]] * 2


def test_other_calls_keep_their_places() -> None:
    plan = job(MIB // 8, MIB // 8, MIB // 8)
    for rank in plan.ranks:
        rank.calls[1].record = msgspec.structs.replace(rank.calls[1].record, api="all_reduce")
    merged = with_buckets(plan, 4)
    assert sizes_of(merged) == [[MIB // 8, MIB // 4]] * 2
    assert [call.record.api for call in merged.ranks[0].calls] == ["all_reduce", None]


def test_a_job_without_ddp_buckets_is_refused() -> None:
    with pytest.raises(CrossrankError, match="no rank has all_reduces of DDP's reducer"):
        with_buckets(plan_of([record("barrier")], [record("barrier")]), 1)
