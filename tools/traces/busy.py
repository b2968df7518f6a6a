"""When a rank computed, communicated and copied, in windows that trace everything it did."""

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
"""Rows of (start, end), in ns."""


def spans_of(pairs: Iterable[tuple[int, int]] = ()) -> Spans:
    return np.array(list(pairs), np.int64).reshape(-1, 2)


def union(*parts: Spans) -> Spans:
    """The same time as ordered spans that do not overlap.

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
    """Whether each moment is inside one of `spans`, which do not overlap."""
    place = np.searchsorted(spans[:, 0], moments, side="right") - 1
    inside: NDArray[np.bool_] = place >= 0
    inside[inside] = moments[inside] < spans[place[inside], 1]
    return inside


def covered(spans: Spans, windows: Spans) -> Ints:
    """How many ns of each window `spans` cover. The spans are in order and do not overlap.

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
"""How much a device's lag behind its host may vary, as a share of a step, if steps take equally long on both."""


def _on_device(
    steps: Sequence[tuple[int, int]], launches: Spans, main: Spans, every: Spans, first: int, last: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (step, start, end) on a GPU. `steps` has the starts on the host; for `launches` and `main` see `Busy.add`.
    `every` are the launches of kernels and copies.

    If the GPU's lag is constant, its steps are those of the host, shifted by the lag: the first kernel of a step is no
    reliable start. Otherwise the host runs ahead, and a step starts on the GPU with the first kernel launched in it.
    Copies may run before it: they belong to the step before, or to the first step if it is that.
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
        if len(ran) == 1:
            lag = min(lag, int(_first_begins(at[ran], every, last)[0][0] - at[ran[0]]))
        for one in ran.tolist():
            (number, begin), (_, end) = steps[one], steps[one + 1]
            # The last step may be cut off, or the GPU may be idle at its end.
            is_cut = one == ran[-1] and 2 * (last - begin - lag) < end - begin
            yield number, begin + lag, last if is_cut else end + lag
        return
    moved = np.maximum(first, _first_begins(at, launches, last)[0]).tolist()
    of_steps = every[every[:, 0] >= at[0]]
    if len(of_steps):
        launched_at, begin = of_steps[of_steps[:, 0].argmin()].tolist()
        first_step = int(np.searchsorted(at, launched_at, side="right")) - 1
        moved[first_step] = min(moved[first_step], max(first, begin))
    yield from _seen([(number, begin) for (number, _), begin in zip(steps, moved, strict=True)], first, last)


def _first_begins(moments: Ints, launches: Spans, last: int) -> tuple[Ints, Ints]:
    """For each moment: (first start of a kernel launched from then on, or `last`; number of kernels launched
    before)."""
    launches = launches[np.argsort(launches[:, 0], kind="stable")]
    begins = np.append(np.minimum.accumulate(launches[::-1, 1])[::-1], last)
    place = np.searchsorted(launches[:, 0], moments)
    return begins[place], place


def _seen(steps: Sequence[tuple[int, int]], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yield (step, start, end) of the steps with at least half of their time between `first` and `last`."""
    for (number, begin), (_, end) in pairwise(steps):
        seen = min(end, last) - max(begin, first)
        if seen > 0 and 2 * seen >= end - begin:
            yield number, begin, end


@dataclass(eq=False)
class Busy:
    """What one rank did in its windows. Times are ns since 1970; spans of one kind do not overlap."""

    where: Literal["device", "host", ""] = ""
    """`device`: kernels and copies of a GPU. `host`: operations of the host, and Works of its backend. Empty: no
    trace."""
    observed: Spans = field(default_factory=spans_of)
    """From the first start to the last end in each window."""
    computation: Spans = field(default_factory=spans_of)
    communication: Spans = field(default_factory=spans_of)
    memory: Spans = field(default_factory=spans_of)
    """Copies and memsets of a GPU."""
    iterations: list[tuple[int, int, int]] = field(default_factory=list)
    """(step, start, end) on the device or host, as `where` says: see `_on_device`."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Busy):
            return NotImplemented
        # A comparison of arrays returns an array.
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
        copies: Spans | None = None,
    ) -> None:
        """Add a window, with times in ns since `base_ns`. Windows of hosts are ignored if there is one of a GPU.

        * `steps`: (step, start on the host in ns since 1970).
        * `launches`: (time of the launch, start) of each kernel.
        * `main`: the same for the stream that computes most (default: for all).
        * `copies`: the same for copies and memsets (default: none).
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
            every_launch = launches if copies is None else np.concatenate([launches, copies])
            self.iterations += _on_device(
                steps, launches + base_ns, main + base_ns, every_launch + base_ns, first, last
            )
        else:
            self.iterations += _seen(steps, first, last)
