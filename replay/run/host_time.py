"""The host's own time between operations: what the job did there beyond what a replay does, without the profiler.

The gaps of a recording hold three things: what the host did (Python, mostly), what the profiler did at the end of one
operation and the begin of the next, and what it did for the nodes between. A pass of the replay under the same profiler
has gaps between the same operations, with the same arguments; there is nothing in them but the profiler and what the
replay itself needs to get from one operation to the next. So the difference is how long the replay has to idle.

Where ranks and the threads of their backend share cores, some gaps of a recording hold milliseconds in which another
thread had the core. A replay shares its cores likewise, so these are not idled as well: a gap that is much longer than
the same gap of a typical step of the window counts as long as that one.

The profiler stretches what it sees by more than it takes itself, so these gaps are the most that the host can have
taken. Steps outside the window, which the comms file has, say how much of it was real: a step is as long as one of
those, waits for communication left out on both sides.
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
"""What the same gap may be longer or shorter by for no reason that a replay has to care for."""
_OTHER_MACHINE = 1.25
"""What operations take longer by on a slower machine, and not for other reasons."""


class HostTimes(NamedTuple):
    """In ns."""

    before: list[int]
    """Of the host before each operation."""
    once: int
    """By how much single steps had more, in all: it is left out."""


def host_times(plan: ComputePlan, profiled: Sequence[Sequence[int | None]]) -> HostTimes:
    """The host's time before each operation; `profiled` are the gaps before them in passes under the profiler, None
    where one is not known: that of a typical operation stands for it.

    A gap that is shorter than the replay's is made up for by the next ones, or the noise of both would add up.
    """
    left = _beyond_profiler(plan, profiled)
    typical = _of_typical_step(plan, left)
    before = []
    once, debt = 0.0, 0.0
    for own, usual in zip(left, typical, strict=True):
        if own is None or usual is None:
            before.append(0)
            continue
        more = own - usual if own - usual > _NOISE_NS else 0.0
        once += more
        due = own - more - debt
        before.append(max(0, round(due)))
        debt = min(max(0.0, -due), _NOISE_NS)
    return HostTimes(before, round(once))


def slowness(plan: ComputePlan, took: Sequence[Sequence[int | None]]) -> float | None:
    """How much longer operations take here than when they were recorded; `took` are their ns in passes, both under the
    profiler. None where that is not known.

    By the fastest step of the window, and at least 1: a step that was recorded while others had its cores looks as if
    this machine was faster. 1 as well for what one machine differs by from minute to minute.
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
    return 1.0 if fastest is not None and fastest < _OTHER_MACHINE else fastest


def shortened(most: Sequence[int], total: int) -> list[int]:
    """The host's times before operations, each the same share of `most`, so that they are `total` ns together; not
    longer than `most`.

    >>> shortened([100, 0, 300], 200), shortened([100, 300], 500), shortened([100, 300], -7)
    ([50, 0, 150], [100, 300], [0, 0])
    """
    share = min(max(total / (sum(most) or 1), 0.0), 1.0)
    return [round(ns * share) for ns in most]


def _beyond_profiler(plan: ComputePlan, profiled: Sequence[Sequence[int | None]]) -> list[float | None]:
    """What each gap has beyond the same gap of the replay; None where it is not recorded."""
    every = [gap for gaps in profiled for gap in gaps if gap is not None]
    usual = median(every) if every else 0.0
    left: list[float | None] = []
    for number, one in enumerate(plan.operations):
        known = [gap for gaps in profiled if (gap := gaps[number]) is not None]
        profiler = one.ranges * plan.range_ns + one.split * usual + (median(known) if known else usual)
        left.append(one.gap_ns - profiler if one.gap_ns else None)
    return left


def _of_typical_step(plan: ComputePlan, left: Sequence[float | None]) -> list[float | None]:
    """By operation, the lower median of the gaps before the same one of each step: of the same name, of which as many
    came before in its step."""
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
    """Call `run` under torch's profiler, as in the window of a recording, and write its execution trace to `et` and its
    Kineto trace to `kineto`."""
    observer = ExecutionTraceObserver()
    observer.register_callback(str(et))
    try:
        # Not torch.profiler's own: it imports the compiler when it starts, which takes seconds.
        with profile(use_device="cuda" if torch.cuda.is_initialized() else None, record_shapes=True) as session:
            observer.start()
            run()
            observer.stop()
    finally:
        observer.unregister_callback()
    session.export_chrome_trace(str(kineto))


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
