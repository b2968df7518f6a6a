"""Finds device events whose times cannot be right: torch's profiler sometimes writes 0, or an end that is none.

These are certain, up to the offset between the clocks of device and host, which the trace shows itself:

* A kernel begins after its launch, and ends before the end of a synchronization that waited for it.
* It is within the profiler's window.
* One stream runs one after the other. Kernels may overlap at their edges (programmatic dependent launch), and those of
  one launch of a graph may run at once. But a kernel does not last longer than two others that came after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from crossrank.comm import Int
from crossrank.text import plural
from crossrank.tools.traces.json_document import parse

if TYPE_CHECKING:
    from crossrank.tools.traces.kineto import DeviceEvent, Id, RuntimeCall

_SLACK = 1_000_000
"""ns by which clocks may differ that no other event shows."""
_MOST_OFFSET = 100_000_000
"""ns that the clocks of one machine differ at most."""
_FEW, _SHARE = 3, 0.05
"""This number of events, and this share of them, are no accident: they show the offset of the clocks."""
_LOOKED_AT = 64
"""Later events of a stream that are looked at for each event."""
_DEVICE_SYNCS = ("cudaDeviceSynchronize", "hipDeviceSynchronize", "cuCtxSynchronize")
BEFORE_LAUNCH = "a start before their launch"
AFTER_SYNC = "an end after a synchronization that waited for them"
OUTSIDE = "a time outside of the profiler's window"
OVERLAPS = "a duration that contains several later ones of their stream"


class _Context(msgspec.Struct):
    context: Int | str | None = None


def impossible_times(
    device: Sequence[DeviceEvent], calls: Sequence[RuntimeCall], window: tuple[int, int] | None
) -> dict[int, str]:
    """Return the position of each device event with impossible times -> what is wrong with them.

    `window`: start and end of what the profiler recorded, in ns as all times; None = unknown."""
    launch_of = {one.correlation: one for one in calls if one.correlation is not None}
    launches = [None if one.correlation is None else launch_of.get(one.correlation) for one in device]
    early = {
        index: launch.start - one.start
        for index, (one, launch) in enumerate(zip(device, launches, strict=True))
        if launch is not None
    }
    wrong = dict.fromkeys(_beyond_offset(early), BEFORE_LAUNCH)
    for index in _beyond_offset(_late(device, launches, calls)):
        wrong.setdefault(index, AFTER_SYNC)
    if window is not None:
        first, last = window
        outside = [index for index, one in enumerate(device) if one.start < first - _SLACK or one.end > last + _SLACK]
        if len(outside) < _many(len(device)):  # else a trace was cut, or work that was under way is in it too
            for index in outside:
                wrong.setdefault(index, OUTSIDE)
    for index in _containing(device, launches, wrong):
        wrong[index] = OVERLAPS
    return wrong


def described(device: Sequence[DeviceEvent], wrong: dict[int, str]) -> list[str]:
    """Return one sentence for each kind of impossible times: how many events, and the first one."""
    by_kind: dict[str, list[int]] = defaultdict(list)
    for index, what in sorted(wrong.items()):
        by_kind[what].append(index)
    return [
        f"left out: {plural(len(those), 'device event')} with {what} (first: {device[those[0]].name!r})"
        for what, those in by_kind.items()
    ]


def _many(events: int) -> int:
    """Return how many of some events are no accident."""
    return max(_FEW, int(events * _SHARE))


def _beyond_offset(excess: dict[int, int]) -> Iterable[int]:
    """Yield the events that break a bound by more than the offset of the clocks: what many of them break it by.

    `excess`: position of an event -> ns by which it breaks the bound."""
    largest = sorted(excess.values(), reverse=True)
    place = _many(len(largest)) - 1
    offset = min(max(0, largest[place]), _MOST_OFFSET) if place < len(largest) else 0
    return (index for index, one in excess.items() if one > offset + _SLACK)


def _late(
    device: Sequence[DeviceEvent], launches: Sequence[RuntimeCall | None], calls: Sequence[RuntimeCall]
) -> dict[int, int]:
    """Return for each event that a synchronization of the device waited for: ns by which it ends later than this."""
    if len({one.device for one in device}) > 1:  # a call waits for one device, and does not say for which
        return {}
    syncs: dict[Id, list[tuple[int, int]]] = defaultdict(list)
    for call in calls:
        if call.name in _DEVICE_SYNCS:
            syncs[call.pid].append((call.start, call.end))
    for those in syncs.values():
        those.sort()
    found: dict[int, int] = {}
    for index, (one, launch) in enumerate(zip(device, launches, strict=True)):
        waits = syncs.get(launch.pid, ()) if launch is not None else ()
        if launch is not None and (place := bisect_left(waits, (launch.end, 0))) < len(waits):
            found[index] = one.end - waits[place][1]
    return found


def _containing(
    device: Sequence[DeviceEvent], launches: Sequence[RuntimeCall | None], wrong: dict[int, str]
) -> Iterable[int]:
    """Yield the events that contain two whole later ones of the same stream, launched by other calls."""
    streams: dict[tuple[Id, Id, Id], list[int]] = defaultdict(list)
    for index, (one, launch) in enumerate(zip(device, launches, strict=True)):
        if index not in wrong and one.end > one.start:
            streams[one.device, one.stream, launch.pid if launch is not None else None].append(index)
    for those in streams.values():
        those.sort(key=lambda index: (device[index].start, -device[index].end))
        for place, index in enumerate(those):
            one, inside = device[index], 0
            for other in those[place + 1 : place + 1 + _LOOKED_AT]:
                if device[other].start >= one.end:
                    break
                is_other = device[other].correlation != one.correlation or one.correlation is None
                inside += device[other].end <= one.end and is_other and _context(device[other]) == _context(one)
                if inside > 1:
                    yield index
                    break


def _context(event: DeviceEvent) -> Id:
    """Return the context of an event: streams of several may have the same number."""
    args = parse(event.args, _Context)
    return args.context if args is not None else None
