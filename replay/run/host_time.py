"""The host's own time between operations: what the job did there beyond what a replay does, without the profiler.

The gaps of a recording hold three things: what the host did (Python, mostly), what the profiler did at the end of one
operation and the begin of the next, and what it did for the nodes between. A pass of the replay under the same profiler
has gaps between the same operations, with the same arguments; there is nothing in them but the profiler and what the
replay itself needs to get from one operation to the next. So the difference is how long the replay has to idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from crossrank.replay.plan.compute.compute_plan import ComputePlan
from crossrank.tools.traces.kineto import HostEvent

_LONGEST_DEBT_NS = 50_000


def host_times(plan: ComputePlan, profiled: Sequence[Sequence[int | None]]) -> list[int]:
    """ns of the host before each operation; `profiled` are the gaps before them in passes under the profiler, None
    where one is not known: that of a typical operation stands for it.

    A gap that is shorter than the replay's is made up for by the next ones, or the noise of both would add up.
    """
    times = []
    debt = 0.0
    every = [gap for gaps in profiled for gap in gaps if gap is not None]
    typical = median(every) if every else 0.0
    for number, one in enumerate(plan.operations):
        if not one.gap_ns:
            times.append(0)
            continue
        known = [gap for gaps in profiled if (gap := gaps[number]) is not None]
        profiler = one.ranges * plan.range_ns + one.split * typical + (median(known) if known else typical)
        left = one.gap_ns - profiler - debt
        times.append(max(0, round(left)))
        debt = min(max(0.0, -left), _LONGEST_DEBT_NS)
    return times


def gaps_of(names: Sequence[str], events: Sequence[HostEvent]) -> tuple[list[int | None], list[int | None]]:
    """(ns before each operation, ns that each took) in a trace of `events`, where operations of these `names` ran one
    after the other on one thread; an empty name is none, and what the trace lacks is None."""
    threads: dict[object, list[HostEvent]] = {}
    for event in events:
        threads.setdefault(event.tid, []).append(event)
    found = max(threads.values(), key=len, default=[])
    outermost: list[HostEvent] = []
    for event in sorted(found, key=lambda one: (one.start, -one.end)):
        if not outermost or event.start >= outermost[-1].end:
            outermost.append(event)
    before: list[int | None] = []
    took: list[int | None] = []
    at = 0
    for name in names:
        here = next((n for n in range(at, min(at + _AHEAD, len(outermost))) if outermost[n].name == name), None)
        if not name or here is None:
            before.append(None)
            took.append(None)
            continue
        event = outermost[here]
        before.append(event.start - outermost[here - 1].end if here and here == at else None)
        took.append(event.end - event.start)
        at = here + 1
    return before, took


_AHEAD = 8
"""How many events a replay may have that are none of the operations."""
