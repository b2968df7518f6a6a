"""Aligns two sequences of names that recorded the same thread, where no id says which element is which.

Names repeat from iteration to iteration, so a position must first be found that holds: elements that occur once in
both sequences (with their sequence number, or together with the names that follow) are anchors, and the longest
run of anchors that both sequences have in the same order is kept. From anchor to anchor the rest is matched while
names agree. What only one side has, at the ends or in between, stays unmatched.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

Pair = tuple[int, int]

# Lengths of the runs of names that are tried as anchors, where single elements are not unique.
_RUNS = (1, 4, 16, 64)
_PLACES = 4096


@dataclass(frozen=True)
class Alignment:
    """Pairs of positions, ascending on both sides."""

    pairs: list[Pair]
    places: int = 1
    """How many positions fit equally well; the first was taken. 1 where anchors settle it."""


@dataclass(frozen=True)
class OpSequence:
    """One side: the names of a thread in the order of starts, and autograd's sequence numbers (-1: none)."""

    names: Sequence[str]
    numbers: Sequence[int]

    def without_numbers(self) -> OpSequence:
        return OpSequence(self.names, [-1] * len(self.names))

    def keys(self) -> list[Hashable]:
        """Elements by name and number; None where there is no number."""
        return [(name, number) if number >= 0 else None for name, number in zip(self.names, self.numbers, strict=True)]

    def runs(self, length: int) -> list[Hashable]:
        """Elements by their name and those of the `length - 1` that follow."""
        if length == 1:
            return list(self.names)
        return [tuple(self.names[i : i + length]) for i in range(len(self.names) - length + 1)]


def align(host: OpSequence, device: OpSequence) -> Alignment:
    """Match `host` to `device`, in O(n log n).

    Sequence numbers find the iteration. Where fewer elements match with them than by names alone, the two sides
    recorded different iterations, and names alone decide.

    >>> host = OpSequence(["mul", "add", "add"], [-1, 7, -1])
    >>> device = OpSequence(["add", "mul", "add", "add"], [-1, -1, 7, -1])
    >>> align(host, device).pairs
    [(0, 1), (1, 2), (2, 3)]
    """
    numbered = _align(host, device)
    if len(numbered.pairs) == min(len(host.names), len(device.names)):
        return numbered
    by_name = _align(host.without_numbers(), device.without_numbers())
    return max(numbered, by_name, key=lambda alignment: len(alignment.pairs))


def _align(host: OpSequence, device: OpSequence) -> Alignment:
    anchors = _anchors(host.keys(), device.keys())
    places = 1
    for length in _RUNS:
        if anchors:
            break
        anchors = _anchors(host.runs(length), device.runs(length))
    if not anchors:
        anchors, places = _first_place(host.names, device.names)
    if not anchors:
        return Alignment([])
    return Alignment(_fill(_longest_ascending(anchors), host, device), places)


def _anchors(host: Iterable[Hashable], device: Iterable[Hashable]) -> list[Pair]:
    """Positions of the keys that occur exactly once on each side, ascending in the first."""
    ours, theirs = _unique(host), _unique(device)
    return sorted((position, theirs[key]) for key, position in ours.items() if key in theirs)


def _unique(keys: Iterable[Hashable]) -> dict[Hashable, int]:
    keys = list(keys)
    counts = Counter(keys)
    return {key: position for position, key in enumerate(keys) if key is not None and counts[key] == 1}


def _longest_ascending(anchors: list[Pair]) -> list[Pair]:
    """The longest chain of anchors that ascends on both sides (patience sorting)."""
    ends: list[int] = []  # smallest last device position of a chain of each length
    last: list[int] = []  # index of the anchor at that end
    before: list[int] = []
    for index, (_, position) in enumerate(anchors):
        length = bisect_left(ends, position)
        before.append(last[length - 1] if length else -1)
        if length == len(ends):
            ends.append(position)
            last.append(index)
        else:
            ends[length] = position
            last[length] = index
    chain = []
    index = last[-1]
    while index >= 0:
        chain.append(anchors[index])
        index = before[index]
    return chain[::-1]


def _first_place(host: Sequence[str], device: Sequence[str]) -> tuple[list[Pair], int]:
    """Where the shorter sequence fits best into the longer one as a whole, for sequences that only repeat.

    Every place where its rarest name stands is tried.
    """
    here = set(device)
    common = [name for name in host if name in here]
    if not common:
        return [], 0
    counts = Counter(device)
    rarest = min(common, key=lambda name: counts[name])
    first = host.index(rarest)
    scores = []
    for position in [i for i, name in enumerate(device) if name == rarest][:_PLACES]:
        shift = position - first
        low, high = max(0, -shift), min(len(host), len(device) - shift)
        equal = sum(map(str.__eq__, host[low:high], device[low + shift : high + shift]))
        scores.append((equal, -position))
    best, place = max(scores)
    return [(first, -place)], sum(score == best for score, _ in scores)


def _fill(anchors: list[Pair], host: OpSequence, device: OpSequence) -> list[Pair]:
    """All pairs: the anchors, what agrees before and after each, and what is unique in the stretches between."""
    pairs: list[Pair] = []
    stretches = [(0, len(host.names), 0, len(device.names), anchors)]
    while stretches:
        low_i, high_i, low_j, high_j, anchors = stretches.pop()
        gaps = []
        for i, j in anchors:
            if i < low_i or j < low_j:
                continue  # reached from the anchor before
            first_i, first_j = i, j
            while first_i > low_i and first_j > low_j and _fits(host, first_i - 1, device, first_j - 1):
                first_i, first_j = first_i - 1, first_j - 1
            gaps.append((low_i, first_i, low_j, first_j))
            low_i, low_j = i + 1, j + 1
            while low_i < high_i and low_j < high_j and _fits(host, low_i, device, low_j):
                low_i, low_j = low_i + 1, low_j + 1
            pairs.extend(zip(range(first_i, low_i), range(first_j, low_j), strict=True))
        gaps.append((low_i, high_i, low_j, high_j))
        for gap in gaps:
            inner = _anchors(host.names[gap[0] : gap[1]], device.names[gap[2] : gap[3]])
            inner = [(gap[0] + i, gap[2] + j) for i, j in inner]
            inner = [pair for pair in inner if _fits(host, pair[0], device, pair[1])]
            if inner:
                stretches.append((*gap, _longest_ascending(inner)))
    return sorted(pairs)


def _fits(host: OpSequence, i: int, device: OpSequence, j: int) -> bool:
    if host.names[i] != device.names[j]:
        return False
    ours, theirs = host.numbers[i], device.numbers[j]
    return ours < 0 or theirs < 0 or ours == theirs
