"""Which threads of a rank share a stream of its GPU, so that NCCL gets each rank's calls in an order that ends."""

from __future__ import annotations

import pytest

from crossrank.comm import CommRecord
from crossrank.replay.plan.plan import PER_GROUP, PER_RANK, PER_THREAD, Plan, Streams
from crossrank.replay.plan.streams import SHARINGS, choose_streams, describe_streams
from tests.unit.replay.plans import plan_of, record

_GROUPS = {name: [0, 1] for name in ("a", "b", "c")}


def call(pg: str, thread: int) -> CommRecord:
    return record("all_reduce", pg=pg, thread=thread)


_FORWARD = [call("a", 1), call("b", 1)]
_BACKWARD = [call("a", 2)]
_LOADER = [call("c", 3)]


def on_gpu(*ranks: list[CommRecord]) -> tuple[Plan, Streams]:
    plan = plan_of(*ranks, groups=_GROUPS)
    return plan, choose_streams(plan, "cuda")


def test_threads_share_a_stream_if_all_ranks_reach_their_end_in_the_recorded_order() -> None:
    step = [*_FORWARD, *_BACKWARD]
    plan, streams = on_gpu(step * 2, step * 2)
    assert (streams, describe_streams(plan, "cuda")) == (PER_RANK, [])


def test_threads_with_a_common_group_share_a_stream_if_others_call_in_another_order() -> None:
    plan, streams = on_gpu([*_FORWARD, *_BACKWARD, *_LOADER], [*_LOADER, *_FORWARD, *_BACKWARD])
    assert streams == PER_GROUP
    assert SHARINGS[streams](plan.ranks[0].calls) == {1: 0, 2: 0, 3: 1}
    assert SHARINGS[streams](plan.ranks[1].calls) == {3: 0, 1: 1, 2: 1}
    assert describe_streams(plan, "cuda") == [
        "calls of threads without a common group use different GPU streams, since ranks make them in different orders"
    ]


def test_each_thread_has_a_stream_if_threads_with_a_common_group_call_in_different_orders() -> None:
    first, second = [call("a", 1)], [call("c", 1)]
    others = [call("a", 2), call("b", 2)]
    plan, streams = on_gpu([*first, *second, *others], [*first, *others, *second])
    assert streams == PER_THREAD
    assert SHARINGS[streams](plan.ranks[1].calls) == {1: 0, 2: 1}
    assert describe_streams(plan, "cuda") == [
        "calls of each thread use a GPU stream of their own, since ranks make them in different orders"
    ]


def test_threads_that_a_third_thread_links_share_a_stream() -> None:
    linked = [call("a", 1), call("b", 2), call("a", 3), call("b", 3), call("c", 4)]
    plan = plan_of(linked, linked, groups=_GROUPS)
    assert SHARINGS[PER_GROUP](plan.ranks[0].calls) == {1: 0, 2: 0, 3: 0, 4: 1}


@pytest.mark.parametrize("ranks", [[[*_FORWARD, *_BACKWARD]] * 2, [[*_FORWARD, *_LOADER], [*_LOADER, *_FORWARD]]])
def test_on_a_cpu_each_thread_makes_its_own_calls(ranks: list[list[CommRecord]]) -> None:
    plan = plan_of(*ranks, groups=_GROUPS)
    assert (choose_streams(plan, "cpu"), describe_streams(plan, "cpu")) == (PER_THREAD, [])
