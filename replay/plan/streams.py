"""Decides which recorded threads of a rank share a stream of its GPU.

NCCL has two rules:

* Calls of different communicators need the same order on all ranks, or streams that do not wait for each other. On one
  stream, the second call starts after the first one ended. If two ranks make them in different orders, both wait
  forever.
* Calls of one communicator need the same order on all ranks, on any stream.

In most jobs all threads use one stream: autograd runs the backward pass on the stream of the forward pass, while the
calling thread waits. The recorded order of a rank is then the order on its stream. No file records the stream of a
call. So `choose_streams` takes the first row of `SHARINGS` with which all ranks reach their end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from crossrank.replay.plan.plan import PER_GROUP, PER_RANK, PER_THREAD, Plan, PlannedCall, Streams
from crossrank.replay.plan.schedule import Share, number_threads, walk

Thread = int | None


def _one_stream(calls: Sequence[PlannedCall]) -> dict[Thread, int]:
    return {call.record.thread: 0 for call in calls}


def _stream_per_group(calls: Sequence[PlannedCall]) -> dict[Thread, int]:
    """Threads that call on the same group share a stream: the group needs one order of their calls."""
    first_on: dict[str, Thread] = {}
    shares_with: dict[Thread, Thread] = {}

    def representative(thread: Thread) -> Thread:
        while (other := shares_with.setdefault(thread, thread)) != thread:
            thread = other
        return thread

    for call in calls:
        thread = call.record.thread
        other = first_on.setdefault(call.record.pg, thread)
        shares_with[representative(thread)] = representative(other)
    numbers: dict[Thread, int] = {}
    return {thread: numbers.setdefault(representative(thread), len(numbers)) for thread in list(shares_with)}


SHARINGS: Mapping[Streams, Share] = {
    PER_RANK: _one_stream,
    PER_GROUP: _stream_per_group,
    PER_THREAD: number_threads,
}
"""Name -> function that numbers the streams of a rank, by thread. The first row is closest to most jobs."""

_NOTES = {
    PER_GROUP: "calls of threads without a common group use different GPU streams, since ranks make them in different "
    "orders",
    PER_THREAD: "calls of each thread use a GPU stream of their own, since ranks make them in different orders",
}


def choose_streams(plan: Plan, device: str) -> Streams:
    """Return the streams of a settled plan on `device` (`cpu` or `cuda`). On a CPU, each recorded thread makes its own
    calls, because a call there blocks only its thread."""
    if device != "cuda" or all(len(number_threads(rank.calls)) < 2 for rank in plan.ranks):
        return PER_THREAD
    members = {group.pg: group.ranks or [] for group in plan.groups}
    # In a settled plan, all ranks reach their end if each thread has its own stream.
    return next(name for name, share in SHARINGS.items() if name == PER_THREAD or walk(plan.ranks, members, share).ends)


def describe_streams(plan: Plan, device: str) -> list[str]:
    """Return a note if threads of a rank use several streams on `device`."""
    streams = choose_streams(plan, device)
    several = device == "cuda" and any(len(set(SHARINGS[streams](rank.calls).values())) > 1 for rank in plan.ranks)
    return [_NOTES[streams]] if several else []
