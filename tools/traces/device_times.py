"""Finds events whose times cannot be right: profilers sometimes write 0, or an end that is none.

These are certain of device events, up to the offset between the clocks of device and host, which the trace shows:

* A kernel begins after its launch, and ends before the end of a synchronization that waited for it.
* It is within the profiler's window.
* One stream runs one after the other. Kernels may overlap at their edges (programmatic dependent launch), and those of
  one launch of a graph may run at once. But a kernel does not last longer than two others that came after it.

Ranges of the host are within the profiler's window, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from crossrank.text import plural

Column = npt.NDArray[np.int64]
UNKNOWN = np.iinfo(np.int64).min
"""In a column: the trace does not say."""
_SLACK = 1_000_000
"""ns by which clocks may differ that no other event shows."""
_MOST_OFFSET = 100_000_000
"""ns that the clocks of one machine differ at most."""
_STOP = 100_000_000
"""ns that calls of the host may last after the window: the profiler waits for the devices at its end."""
_LONGEST_WINDOW = 3600 * 1_000_000_000
"""ns."""
_FEW, _SHARE = 3, 0.05
"""This number of events, and this share of them, are no accident: they show the offset of the clocks."""
_LOOKED_AT = 64
"""Later events of a stream that are looked at for each event."""
BEFORE_LAUNCH = "a start before their launch"
AFTER_SYNC = "an end after a synchronization that waited for them"
OUTSIDE = "a time outside of the profiler's window"
OVERLAPS = "a duration that contains several later ones of their stream"


@dataclass(frozen=True)
class EventTimes:
    """Kernels, copies and memsets in columns. Times are in ns, on the clock of the trace."""

    start: Column
    end: Column
    device: Column
    stream: Column
    """Equal numbers: one stream of one context and process."""
    correlation: Column
    """Equal numbers: one launch. `UNKNOWN` = not known, as in the columns that follow."""
    process: Column
    """Process of the launch."""
    launched: Column
    """When the call began that launched it."""
    returned: Column
    """When this call ended."""


def impossible_times(
    of: EventTimes, syncs: Mapping[int, Column] | None = None, window: tuple[int, int] | None = None
) -> dict[int, str]:
    """Return the position of each device event with impossible times -> what is wrong with them.

    `syncs`: process -> start and end of each call in it that waited for a device, in order, of shape (calls, 2).
    `window`: start and end of what the profiler recorded; None = unknown."""
    wrong = dict.fromkeys(_beyond_offset(of.launched - of.start, of.launched != UNKNOWN), BEFORE_LAUNCH)
    for index in _beyond_offset(*_late(of, syncs or {})):
        wrong.setdefault(index, AFTER_SYNC)
    if window is not None:
        for index in _outside(of.start, of.end, window[0] - _SLACK, window[1] + _SLACK):
            wrong.setdefault(index, OUTSIDE)
    return wrong | dict.fromkeys(_containing(of, list(wrong)), OVERLAPS)


def impossible_ranges(start: Column, end: Column, window: tuple[int, int] | None) -> dict[int, str]:
    """Return the position of each range of the host that is not in the window -> what is wrong with its times."""
    if not len(start):
        return {}
    middle = int(np.median(start))
    first, last = window or (middle - _LONGEST_WINDOW, middle + _LONGEST_WINDOW)
    return dict.fromkeys(_outside(start, end, first - _SLACK, last + _STOP), OUTSIDE)


def _outside(start: Column, end: Column, first: int, last: int) -> list[int]:
    """Return the few events that start before `first` or end after `last`. If there are many, a trace was cut, or has
    work that was under way."""
    found: list[int] = np.flatnonzero((start < first) | (end > last)).tolist()
    return found if len(found) < _many(len(start)) else []


def described(wrong: Mapping[int, str], name_of: Callable[[int], str], what_events: str = "device event") -> list[str]:
    """Return one sentence for each kind of impossible times: how many events, and the first one."""
    by_kind: dict[str, list[int]] = defaultdict(list)
    for index, what in sorted(wrong.items()):
        by_kind[what].append(index)
    return [
        f"left out: {plural(len(those), what_events)} with {what} (first: {name_of(those[0])!r})"
        for what, those in by_kind.items()
    ]


def _many(events: int) -> int:
    """Return how many of some events are no accident."""
    return max(_FEW, int(events * _SHARE))


def _beyond_offset(excess: Column, known: npt.NDArray[np.bool_]) -> list[int]:
    """Return the events that break a bound by more than the offset of the clocks: what many of them break it by.

    `excess`: ns by which each event breaks the bound, where it is `known`."""
    largest = np.sort(excess[known])[::-1]
    place = _many(len(largest)) - 1
    offset = min(max(0, int(largest[place])), _MOST_OFFSET) if place < len(largest) else 0
    found: list[int] = np.flatnonzero(known & (excess > offset + _SLACK)).tolist()
    return found


def _late(of: EventTimes, syncs: Mapping[int, Column]) -> tuple[Column, npt.NDArray[np.bool_]]:
    """Return (ns by which each event ends after a synchronization of the device that waited for it, where known)."""
    late, known = np.zeros(len(of.end), np.int64), np.zeros(len(of.end), bool)
    if len(np.unique(of.device)) > 1:  # a call waits for one device, and does not say for which
        return late, known
    for process, spans in syncs.items():
        begins, ends = spans.T
        own = np.flatnonzero((of.process == process) & (of.returned != UNKNOWN))
        place = np.searchsorted(begins, of.returned[own])
        own, place = own[place < len(ends)], place[place < len(ends)]
        late[own], known[own] = of.end[own] - ends[place], True
    return late, known


def _containing(of: EventTimes, wrong: list[int]) -> list[int]:
    """Return the events that contain two whole later ones of the same stream, launched by other calls."""
    usable = of.end > of.start
    usable[wrong] = False
    rows = np.flatnonzero(usable)
    rows = rows[np.lexsort((-of.end[rows], of.start[rows], of.stream[rows]))]
    start, end, stream, correlation = (column[rows] for column in (of.start, of.end, of.stream, of.correlation))
    inside = np.zeros(len(rows), np.int64)
    for later in range(1, min(_LOOKED_AT, len(rows) - 1) + 1):
        overlaps = (stream[later:] == stream[:-later]) & (start[later:] < end[:-later])
        if not overlaps.any():
            break
        is_other = (correlation[later:] != correlation[:-later]) | (correlation[:-later] == UNKNOWN)
        inside[:-later] += overlaps & is_other & (end[later:] <= end[:-later])
    found: list[int] = rows[inside > 1].tolist()
    return found
