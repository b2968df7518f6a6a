"""Aligns two sequences of names that recorded the same thread, where no id says which element is which.

Names repeat from iteration to iteration, so a position must first be found that holds: elements that occur once in
both sequences (with their sequence number, or with the names that follow) are anchors, and the longest chain of
anchors that both sequences have in the same order is kept. From each anchor the rest is matched while names agree,
and in what is left between two anchors new ones are looked for. What only one side has, at the ends or in between,
stays unmatched.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Pair = tuple[int, int]

# Lengths of the runs of names that are tried as anchors, in doublings: up to 2 ** 7 names.
_DOUBLINGS = 8
_DEPTH = 8
"""How often anchors are looked for between anchors."""
_AGREE = 4
"""So many names in a row must agree after a gap."""
_SKIPS = sorted(((i, j) for i in range(17) for j in range(17) if i or j), key=lambda skip: (sum(skip), skip))
"""Elements that a gap may have on either side, the shortest gaps first."""
_WORK = 100_000_000
"""Comparisons that looking for the best place may take."""


@dataclass(frozen=True)
class Alignment:
    """Pairs of positions, ascending on both sides."""

    pairs: list[Pair]
    places: int = 1
    """How many positions fit equally well; the first was taken. 1 where it is settled."""


@dataclass(frozen=True)
class OpSequence:
    """One side: the names of a thread in the order of starts, and autograd's sequence numbers (-1: none)."""

    names: Sequence[str]
    numbers: Sequence[int]


def align(host: OpSequence, device: OpSequence) -> Alignment:
    """Match `host` to `device`.

    Sequence numbers find the iteration. Where fewer elements match with them than by names alone, the two sides
    recorded different iterations, and names alone decide.

    >>> host = OpSequence(["mul", "add", "add"], [-1, 7, -1])
    >>> device = OpSequence(["add", "mul", "add", "add"], [-1, -1, 7, -1])
    >>> align(host, device).pairs
    [(0, 1), (1, 2), (2, 3)]
    """
    codes: dict[str, int] = {}
    ours, theirs = ([codes.setdefault(name, len(codes)) for name in side.names] for side in (host, device))
    numbered = Alignment(
        _Filling(ours, theirs, host.numbers, device.numbers).fill(_anchors(_numbered(host), _numbered(device)))
    )
    if len(numbered.pairs) == min(len(ours), len(theirs)):
        return numbered
    return max(numbered, _by_name(ours, theirs), key=lambda alignment: len(alignment.pairs))


def _numbered(side: OpSequence) -> list[Hashable]:
    return [(name, number) if number >= 0 else None for name, number in zip(side.names, side.numbers, strict=True)]


def _by_name(ours: list[int], theirs: list[int]) -> Alignment:
    filling = _Filling(ours, theirs)
    best, agree, places = _best_place(ours, theirs)
    runs = ours, theirs
    for doubling in range(_DOUBLINGS if agree < min(len(ours), len(theirs)) else 0):
        anchors = _anchors(*runs)
        if anchors:
            return Alignment(filling.fill(anchors))
        runs = _longer_runs(*runs, 1 << doubling)
    return Alignment(filling.fill(best), places)


def _best_place(ours: list[int], theirs: list[int]) -> tuple[list[Pair], int, int]:
    """Where most of the names agree: an anchor there, how many agree, and how many places are as good.

    Every place in the longer side where the rarest name stands is tried.
    """
    if len(ours) > len(theirs):
        anchors, agree, places = _best_place(theirs, ours)
        return [(i, j) for j, i in anchors], agree, places
    counts = Counter(theirs)
    common = [name for name in ours if counts[name]]
    if not common:
        return [], 0, 0
    rarest = min(common, key=counts.__getitem__)
    first = ours.index(rarest)
    a, b = np.array(ours), np.array(theirs)
    places = np.flatnonzero(b == rarest)[: 1 + _WORK // len(a)].tolist()
    scores = []
    for shift in (place - first for place in places):
        same = a[max(0, -shift) : len(b) - shift] == b[max(0, shift) : len(a) + shift]
        scores.append(int(np.count_nonzero(same)))
    best = max(scores)
    return [(first, places[scores.index(best)])], best, scores.count(best)


def _longer_runs(ours: list[int], theirs: list[int], length: int) -> tuple[list[int], list[int]]:
    """From numbers for runs of `length` names to numbers for runs of twice that."""
    codes: dict[Pair, int] = {}

    def double(runs: list[int]) -> list[int]:
        return [codes.setdefault(pair, len(codes)) for pair in zip(runs, runs[length:], strict=False)]

    return double(ours), double(theirs)


def _anchors(ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> list[Pair]:
    """Positions of the keys that occur exactly once on each side, ascending in the first."""
    other = _unique(theirs)
    return [(position, other[key]) for key, position in _unique(ours).items() if key in other]


def _unique(keys: Sequence[Hashable]) -> dict[Hashable, int]:
    counts = Counter(keys)
    return {key: position for position, key in enumerate(keys) if key is not None and counts[key] == 1}


def _longest_ascending(anchors: Iterable[Pair]) -> list[Pair]:
    """The longest chain of anchors that ascends on both sides (patience sorting)."""
    ends: list[int] = []  # smallest last position in the second side of a chain of each length
    chains: list[Any] = []  # that chain: its last anchor, and the chain before it
    for anchor in anchors:
        length = bisect_left(ends, anchor[1])
        ends[length : length + 1] = [anchor[1]]
        chains[length : length + 1] = [(anchor, chains[length - 1] if length else None)]
    found: list[Pair] = []
    chain = chains[-1] if chains else None
    while chain is not None:
        anchor, chain = chain
        found.append(anchor)
    return found[::-1]


@dataclass(frozen=True)
class _Filling:
    """Both sides, with a small number for each name; without sequence numbers where names alone decide."""

    ours: Sequence[int]
    theirs: Sequence[int]
    our_numbers: Sequence[int] = ()
    their_numbers: Sequence[int] = ()

    def fill(self, anchors: list[Pair]) -> list[Pair]:
        """All pairs: the anchors, what agrees before and after each, and what is unique in the stretches between."""
        return self._fill(anchors, (0, 0), (len(self.ours), len(self.theirs)), _DEPTH)

    def _fill(self, anchors: list[Pair], low: Pair, high: Pair, depth: int) -> list[Pair]:
        pairs: list[Pair] = []
        chain = _longest_ascending(anchors)
        for anchor, following in pairwise([*chain, high]):
            if anchor[0] < low[0] or anchor[1] < low[1]:
                continue  # reached from the anchor before
            before = self._walk((anchor[0] - 1, anchor[1] - 1), (low[0] - 1, low[1] - 1), -1)[::-1]
            pairs += self._between(low, (before or [anchor])[0], depth)
            pairs += before
            pairs += self._walk(anchor, following, 1)
            low = (pairs[-1][0] + 1, pairs[-1][1] + 1)
        return pairs + self._between(low, high, depth) if chain else []

    def _between(self, low: Pair, high: Pair, depth: int) -> list[Pair]:
        if not depth:
            return []
        unique = _anchors(self.ours[low[0] : high[0]], self.theirs[low[1] : high[1]])
        anchors = [(low[0] + i, low[1] + j) for i, j in unique]
        return self._fill([pair for pair in anchors if self._fits(*pair)], low, high, depth - 1)

    def _walk(self, at: Pair, end: Pair, step: int) -> list[Pair]:
        """Pairs from `at` towards `end`, which is not reached, while names agree or do so again within a few
        elements."""
        pairs = []
        i, j = at
        while (end[0] - i) * step > 0 and (end[1] - j) * step > 0:
            if self._fits(i, j):
                pairs.append((i, j))
                i, j = i + step, j + step
                continue
            for skip_i, skip_j in _SKIPS:
                # Where so many names are left before the end, and agree.
                k, m = i + skip_i * step, j + skip_j * step
                left = min((end[0] - k) * step, (end[1] - m) * step)
                if left >= _AGREE and all(self._fits(k + n * step, m + n * step) for n in range(_AGREE)):
                    i, j = k, m
                    break
            else:
                return pairs
        return pairs

    def _fits(self, i: int, j: int) -> bool:
        if self.ours[i] != self.theirs[j]:
            return False
        ours, theirs = (self.our_numbers[i], self.their_numbers[j]) if self.our_numbers else (-1, -1)
        return ours < 0 or theirs < 0 or ours == theirs
