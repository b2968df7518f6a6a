"""What a timeline consists of. Times are ns from the begin of the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


MIDDLE, FIRST, LAST = range(3)
"""Which end of its flow an event is."""


@dataclass(frozen=True)
class Track:
    """One row of the picture, or what holds several together."""

    id: int
    """From 1 on."""
    name: str
    parent: int = 0
    """Track that it belongs to; 0 = none."""
    unit: str | None = None
    """Of a counter; None for a track of events."""


@dataclass
class Events:
    """Events of one track in the order of their begins; none overlaps the next."""

    track: Track
    names: Sequence[str]
    name: Ints
    """Index into `names`."""
    start: Ints
    end: Ints | None
    """None for moments without extent."""
    arguments: dict[str, Ints] = field(default_factory=dict)
    """What is shown of an event: name -> a number for each."""
    flow: Ints | None = None
    """Events with the same number are connected by arrows; 0 = none."""
    flow_end: Ints | None = None
    """`FIRST`, `LAST` or `MIDDLE`."""


@dataclass
class Counter:
    """Values of one track over time."""

    track: Track
    at: Ints
    value: Floats


def lanes(start: Ints, end: Ints) -> Ints:
    """A lane for each event, in the order of starts, so that none overlaps another of its lane; as few as it takes.

    >>> lanes(np.array([0, 1, 5]), np.array([4, 9, 6])).tolist()
    [0, 1, 0]
    """
    lane = np.zeros(len(start), np.int64)
    if not len(start) or (start[1:] >= np.maximum.accumulate(end)[:-1]).all():
        return lane
    free: list[int] = []
    for index, (begin, stop) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        for number, until in enumerate(free):
            if until <= begin:
                free[number] = stop
                lane[index] = number
                break
        else:
            lane[index] = len(free)
            free.append(stop)
    return lane
