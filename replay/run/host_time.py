"""Estimates the host's own time between operations: what the job did there, without the profiler and the replay.

A recorded gap contains the host's work (mostly Python) and the profiler's, for both operations and the nodes between.
The same gap of a replay under the same profiler contains only the profiler and the replay's own work. So the replay has
to idle for the difference.

If ranks and backend threads share cores, some recorded gaps contain milliseconds of another thread. A replay shares its
cores too and does not idle for these: a gap much longer than in a typical step counts as the typical one.

The profiler adds more time than it takes itself, so these gaps are upper limits. The replay shortens them until a step
is as long as the steps outside the window (from the comms file), both without waits for communication.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, median_low
from typing import NamedTuple

import torch
from torch.autograd.profiler import profile
from torch.profiler import ExecutionTraceObserver

from crossrank.replay.plan.compute.compute_plan import ComputePlan
from crossrank.tools.traces.kineto import HostEvent

_NOISE_NS = 50_000
"""Differences between equal gaps up to this size are noise."""
_SLOWER_MACHINE = 1.25
"""Only a slower machine makes operations longer by this factor."""


class HostTimes(NamedTuple):
    """In ns."""

    before: list[int]
    """Host time before each operation."""
    once: int
    """The excess of single steps, in total; the replay skips it."""


def host_times(plan: ComputePlan, profiled: Sequence[Sequence[int | None]]) -> HostTimes:
    """Return the host's time before each operation.
    `profiled` has the gaps in profiled passes; None (unknown) counts as the typical gap. A gap shorter than the
    replay's reduces the next ones, since otherwise the noise of both would add up.
    """
    without_profiler = _subtract_profiler(plan, profiled)
    typical = _typical_step_gaps(plan, without_profiler)
    before = []
    only_once, debt = 0.0, 0.0
    for own, usual in zip(without_profiler, typical, strict=True):
        if own is None or usual is None:
            before.append(0)
            continue
        excess = own - usual if own - usual > _NOISE_NS else 0.0
        only_once += excess
        due = own - excess - debt
        before.append(max(0, round(due)))
        debt = min(max(0.0, -due), _NOISE_NS)
    return HostTimes(before, round(only_once))


def slowness(plan: ComputePlan, took: Sequence[Sequence[int | None]]) -> float | None:
    """Return how much longer operations take here than when they were recorded; None if unknown.

    `took` has their ns in passes under the profiler. The fastest step of the window counts: in others, other processes
    may have used the cores. Results below `_SLOWER_MACHINE` become 1: a machine's speed varies by as much.
    """
    begins = set(plan.steps)
    shares: list[list[float]] = [[]]
    for number, one in enumerate(plan.operations):
        if number in begins:
            shares.append([])
        known = [ns for passed in took if (ns := passed[number]) is not None]
        if one.node and one.took_ns and known:
            shares[-1].append(median(known) / one.took_ns)
    fastest = max((median(one) for one in shares if one), default=None)
    return 1.0 if fastest is not None and fastest < _SLOWER_MACHINE else fastest


def shortened(most: Sequence[int], total: int) -> list[int]:
    """Scale the times `most` by one factor so that their sum is `total` ns; never make them longer.

    >>> shortened([100, 0, 300], 200), shortened([100, 300], 500), shortened([100, 300], -7)
    ([50, 0, 150], [100, 300], [0, 0])
    """
    share = min(max(total / (sum(most) or 1), 0.0), 1.0)
    return [round(ns * share) for ns in most]


def _subtract_profiler(plan: ComputePlan, profiled: Sequence[Sequence[int | None]]) -> list[float | None]:
    """Return each recorded gap minus the same gap of the replay; None if it is not recorded."""
    every = [gap for gaps in profiled for gap in gaps if gap is not None]
    usual = median(every) if every else 0.0
    left: list[float | None] = []
    for number, one in enumerate(plan.operations):
        known = [gap for gaps in profiled if (gap := gaps[number]) is not None]
        profiler = one.ranges * plan.range_ns + one.split * usual + (median(known) if known else usual)
        left.append(one.gap_ns - profiler if one.gap_ns else None)
    return left


def _typical_step_gaps(plan: ComputePlan, left: Sequence[float | None]) -> list[float | None]:
    """Return, by operation, the lower median of the gaps before the same operation in each step. Same means: the n-th
    operation with this name in its step."""
    begins = set(plan.steps)
    seen: Counter[str] = Counter()
    same: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    places = []
    for number, (one, gap) in enumerate(zip(plan.operations, left, strict=True)):
        if number in begins:
            seen.clear()
        place = one.name, seen[one.name]
        seen[one.name] += 1
        places.append(place)
        if gap is not None:
            same[place].append(gap)
    medians = {place: median_low(gaps) for place, gaps in same.items()}
    return [medians.get(place) for place in places]


def profiled(run: Callable[[], object], et: Path, kineto: Path) -> None:
    """Call `run` under torch's profiler as in a recorded window; write its execution trace and its Kineto trace."""
    observer = ExecutionTraceObserver()
    observer.register_callback(str(et))
    try:
        # `torch.profiler.profile` imports the compiler at its start, which takes seconds.
        with profile(use_device="cuda" if torch.cuda.is_initialized() else None, record_shapes=True) as session:
            observer.start()
            run()
            observer.stop()
    finally:
        observer.unregister_callback()
    session.export_chrome_trace(str(kineto))


def gaps_of(names: Sequence[str], events: Sequence[HostEvent]) -> tuple[list[int | None], list[int | None]]:
    """Return (ns before each operation, ns that each took) from a trace of `events`; None if the trace lacks it.
    Operations with these `names` ran one after another on one thread; an empty name is no operation."""
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
        here = next((n for n in range(at, min(at + _MAX_EXTRA, len(outermost))) if outermost[n].name == name), None)
        if not name or here is None:
            before.append(None)
            took.append(None)
            continue
        event = outermost[here]
        before.append(event.start - outermost[here - 1].end if here and here == at else None)
        took.append(event.end - event.start)
        at = here + 1
    return before, took


_MAX_EXTRA = 8
"""The most events of a replay between two operations."""
