"""When a rank computed, communicated and copied, in the windows in which all it did was traced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Spans = NDArray[np.int64]
"""Rows of (begin, end), in ns."""


def spans_of(pairs: Iterable[tuple[int, int]] = ()) -> Spans:
    return np.array(list(pairs), np.int64).reshape(-1, 2)


def union(*parts: Spans) -> Spans:
    """The same time as spans that do not overlap, in order.

    >>> union(spans_of([(5, 9), (1, 3)]), spans_of([(2, 4)])).tolist()
    [[1, 4], [5, 9]]
    """
    spans = np.concatenate([spans_of(), *parts])
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(spans[:, 1])
    first = np.append(True, spans[1:, 0] > ends[:-1])
    last = np.append(first[1:], True)
    return np.stack([spans[first, 0], ends[last]], axis=1)


def difference(some: Spans, without: Spans) -> Spans:
    """The time of `some` that is not in `without`.

    >>> difference(spans_of([(0, 10), (12, 14)]), spans_of([(2, 3), (9, 13)])).tolist()
    [[0, 2], [3, 9], [13, 14]]
    """
    some, without = union(some), union(without)
    edges = np.unique(np.concatenate([some.ravel(), without.ravel()]))
    pieces = np.stack([edges[:-1], edges[1:]], axis=1) if len(edges) else spans_of()
    return union(pieces[_within(some, pieces[:, 0]) & ~_within(without, pieces[:, 0])])


def _within(spans: Spans, moments: Ints) -> NDArray[np.bool_]:
    """Whether each moment lies in one of `spans`, which do not overlap."""
    place = np.searchsorted(spans[:, 0], moments, side="right") - 1
    inside: NDArray[np.bool_] = place >= 0
    inside[inside] = moments[inside] < spans[place[inside], 1]
    return inside


def covered(spans: Spans, windows: Spans) -> Ints:
    """ns of each window that lie in `spans`, which do not overlap and are in order.

    >>> covered(spans_of([(1, 4), (5, 9)]), spans_of([(0, 2), (3, 6), (9, 9)])).tolist()
    [1, 2, 0]
    """
    before = np.append(0, np.cumsum(spans[:, 1] - spans[:, 0]))

    def until(moments: Ints) -> Ints:
        place = np.searchsorted(spans[:, 0], moments, side="right")
        behind = np.maximum(0, spans[place - 1, 1] - moments) if len(spans) else 0
        whole: Ints = before[place] - np.where(place > 0, behind, 0)
        return whole

    return until(windows[:, 1]) - until(windows[:, 0])


_STEADY = 0.1
"""Share of an iteration by which a device's lag behind its host may vary where iterations take as long on both."""


def _on_device(
    steps: Sequence[tuple[int, int]], launches: Spans, main: Spans, first: int, last: int
) -> Iterator[tuple[int, int, int]]:
    """(iteration, begin, end) on a GPU, of `steps`, which say when the host began each. The GPU may run behind.
    `launches` and `main` are as `Busy.add` has them.

    A GPU that stays behind by one time has the host's iterations, later by that time: what it did first in one says
    little. Elsewhere the host runs ahead, and an iteration begins on the GPU with what was launched first in it.
    """
    if len(steps) < 2:
        return
    at = np.array([begin for _, begin in steps], np.int64)
    begins, place = _first_begins(at, main, last)
    launched = np.append(place[1:], len(main)) > place
    ran = np.flatnonzero(launched[:-1])
    lags = begins[launched] - at[launched]
    slack = _STEADY * np.median(np.diff(at))
    if len(ran) and lags.max() - lags.min() <= slack and last - at[ran[-1] + 1] <= np.median(lags) + slack:
        lag = int(np.median(lags))
        for one in ran.tolist():
            (number, begin), (_, end) = steps[one], steps[one + 1]
            # The last one may have been cut off, or have an end in which the GPU did nothing.
            is_cut = one == ran[-1] and 2 * (last - begin - lag) < end - begin
            yield number, begin + lag, last if is_cut else end + lag
        return
    moved = np.maximum(first, _first_begins(at, launches, last)[0]).tolist()
    yield from _seen([(number, begin) for (number, _), begin in zip(steps, moved, strict=True)], first, last)


def _first_begins(moments: Ints, launches: Spans, last: int) -> tuple[Ints, Ints]:
    """(when what was launched from each moment on began first, `last` where nothing was; how many were launched before
    it)"""
    launches = launches[np.argsort(launches[:, 0], kind="stable")]
    begins = np.append(np.minimum.accumulate(launches[::-1, 1])[::-1], last)
    place = np.searchsorted(launches[:, 0], moments)
    return begins[place], place


def _seen(steps: Sequence[tuple[int, int]], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """(iteration, begin, end) of those of which at least half lies between `first` and `last`."""
    for (number, begin), (_, end) in pairwise(steps):
        seen = min(end, last) - max(begin, first)
        if seen > 0 and 2 * seen >= end - begin:
            yield number, begin, end


@dataclass(eq=False)
class Busy:
    """What one rank did, over its windows. Times are ns since 1970; spans of one kind do not overlap."""

    where: Literal["device", "host", ""] = ""
    """A GPU's kernels and copies, or the operations of the host and the Works of its backend; empty where nothing was
    traced."""
    observed: Spans = field(default_factory=spans_of)
    """From the first to the last of each window."""
    computation: Spans = field(default_factory=spans_of)
    communication: Spans = field(default_factory=spans_of)
    memory: Spans = field(default_factory=spans_of)
    """Copies and memsets of a GPU."""
    iterations: list[tuple[int, int, int]] = field(default_factory=list)
    """(iteration, begin, end) on what the spans are of: see `_on_device`."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Busy):
            return NotImplemented
        # Arrays that are compared give arrays.
        return all(np.array_equal(one, vars(other)[name]) for name, one in vars(self).items())

    def add(
        self,
        where: Literal["device", "host"],
        base_ns: int,
        computation: Spans,
        communication: Spans,
        memory: Spans,
        steps: Sequence[tuple[int, int]],
        launches: Spans,
        main: Spans | None = None,
    ) -> None:
        """Take in a window, whose times are ns since `base_ns`. `steps` are iterations and when they began on the host,
        `launches` when each kernel was launched and when it began, `main` the same of the stream that computes most
        (default: of all). A window on hosts says nothing beside one on a GPU.
        """
        every = np.concatenate([computation, communication, memory]) + base_ns
        if not len(every) or (self.where == "device" and where == "host"):
            return
        if self.where != where:
            self.observed = self.computation = self.communication = self.memory = spans_of()
            self.iterations = []
        self.where = where
        first, last = int(every[:, 0].min()), int(every[:, 1].max())
        self.observed = union(self.observed, spans_of([(first, last)]))
        self.computation = union(self.computation, computation + base_ns)
        self.communication = union(self.communication, communication + base_ns)
        self.memory = union(self.memory, memory + base_ns)
        main = launches if main is None else main
        if where == "device":
            self.iterations += _on_device(steps, launches + base_ns, main + base_ns, first, last)
        else:
            self.iterations += _seen(steps, first, last)
