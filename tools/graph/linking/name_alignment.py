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

Pair = tuple[int, int]

# Lengths of the runs of names that are tried as anchors, in doublings: up to 2 ** 7 names.
_DOUBLINGS = 8
_DEPTH = 8
"""How often anchors are looked for between anchors."""
_AGREE = 4
"""So many names in a row must agree after a gap."""
_SKIPS = sorted(((i, j) for i in range(17) for j in range(17) if i or j), key=lambda skip: (sum(skip), skip))
"""Elements that a gap may have on either side, the shortest gaps first."""
_WORK = 10_000_000
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


@dataclass(frozen=True)
class _Side:
    """An `OpSequence` with a small number for each name; without sequence numbers where names alone decide."""

    names: list[int]
    numbers: Sequence[int] = ()


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
    ours, theirs = (
        _Side([codes.setdefault(name, len(codes)) for name in side.names], side.numbers) for side in (host, device)
    )
    numbered = Alignment(_fill(_anchors(_numbered(ours), _numbered(theirs)), ours, theirs))
    if len(numbered.pairs) == min(len(ours.names), len(theirs.names)):
        return numbered
    by_name = _by_name(_Side(ours.names), _Side(theirs.names))
    return max(numbered, by_name, key=lambda alignment: len(alignment.pairs))


def _numbered(side: _Side) -> list[Hashable]:
    return [(name, number) if number >= 0 else None for name, number in zip(side.names, side.numbers, strict=True)]


def _by_name(host: _Side, device: _Side) -> Alignment:
    places = _places_of_all(host.names, device.names)
    if places:
        i, j = places[0]
        length = min(len(host.names), len(device.names))
        return Alignment(list(zip(range(i, i + length), range(j, j + length), strict=True)), len(places))
    ours, theirs = list(host.names), list(device.names)
    for doubling in range(_DOUBLINGS):
        anchors = _anchors(ours, theirs)
        if anchors:
            return Alignment(_fill(anchors, host, device))
        ours, theirs = _longer_runs(ours, theirs, 1 << doubling)
    anchors, count = _best_place(host.names, device.names)
    return Alignment(_fill(anchors, host, device), count)


def _places_of_all(host: list[int], device: list[int]) -> list[Pair]:
    """Every place where the shorter side stands in the longer one as a whole."""
    if len(host) > len(device):
        return [(i, j) for j, i in _places_of_all(device, host)]
    if not host:
        return []
    places: list[Pair] = []
    start = -1
    while True:
        try:
            start = device.index(host[0], start + 1, len(device) - len(host) + 1)
        except ValueError:
            return places
        if device[start : start + len(host)] == host:
            places.append((0, start))


def _longer_runs(host: list[int], device: list[int], length: int) -> tuple[list[int], list[int]]:
    """From numbers for runs of `length` names to numbers for runs of twice that."""
    codes: dict[Pair, int] = {}

    def double(runs: list[int]) -> list[int]:
        return [codes.setdefault(pair, len(codes)) for pair in zip(runs, runs[length:], strict=False)]

    return double(host), double(device)


def _anchors(host: Iterable[Hashable], device: Iterable[Hashable]) -> list[Pair]:
    """Positions of the keys that occur exactly once on each side, ascending in the first."""
    ours, theirs = _unique(host), _unique(device)
    return [(position, theirs[key]) for key, position in ours.items() if key in theirs]


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


def _best_place(host: list[int], device: list[int]) -> tuple[list[Pair], int]:
    """Where most of the names agree, for sequences that only repeat: an anchor there, and how many places are as good.

    Every place where the rarest name stands is tried.
    """
    counts = Counter(device)
    common = [name for name in host if counts[name]]
    if not common:
        return [], 0
    rarest = min(common, key=lambda name: counts[name])
    first = host.index(rarest)
    scores = []
    for position in [i for i, name in enumerate(device) if name == rarest][
        : 1 + _WORK // (1 + min(len(host), len(device)))
    ]:
        shift = position - first
        low, high = max(0, -shift), min(len(host), len(device) - shift)
        equal = sum(map(int.__eq__, host[low:high], device[low + shift : high + shift]))
        scores.append((equal, -position))
    best, place = max(scores)
    return [(first, -place)], sum(score == best for score, _ in scores)


def _fill(anchors: list[Pair], host: _Side, device: _Side) -> list[Pair]:
    """All pairs: the anchors, what agrees before and after each, and what is unique in the stretches between."""
    pairs: list[Pair] = []
    stretches = [(0, (0, 0), (len(host.names), len(device.names)), anchors)] if anchors else []
    while stretches:
        depth, low, high, found = stretches.pop()
        anchors = _longest_ascending(found)
        gaps = []
        for number, anchor in enumerate(anchors):
            if anchor[0] < low[0] or anchor[1] < low[1]:
                continue  # reached from the anchor before
            before = _walk(host, device, (anchor[0] - 1, anchor[1] - 1), (low[0] - 1, low[1] - 1), -1)
            first = before[-1] if before else anchor
            gaps.append((low, first))
            after = _walk(host, device, anchor, anchors[number + 1] if number + 1 < len(anchors) else high, 1)
            pairs += before
            pairs += after
            low = (after[-1][0] + 1, after[-1][1] + 1)
        gaps.append((low, high))
        if depth == _DEPTH:
            continue
        for (low_i, low_j), (high_i, high_j) in gaps:
            inner = _anchors(host.names[low_i:high_i], device.names[low_j:high_j])
            inner = [(low_i + i, low_j + j) for i, j in inner]
            inner = [pair for pair in inner if _fits(host, pair[0], device, pair[1])]
            if inner:
                stretches.append((depth + 1, (low_i, low_j), (high_i, high_j), inner))
    return sorted(pairs)


def _walk(host: _Side, device: _Side, at: Pair, end: Pair, step: int) -> list[Pair]:
    """Pairs from `at` towards `end`, which is not reached, while names agree or do so again within a few elements."""
    pairs = []
    i, j = at
    while (end[0] - i) * step > 0 and (end[1] - j) * step > 0:
        if _fits(host, i, device, j):
            pairs.append((i, j))
            i, j = i + step, j + step
            continue
        for skip_i, skip_j in _SKIPS:
            k, m = i + skip_i * step, j + skip_j * step
            if all(
                (end[0] - k - n * step) * step > 0
                and (end[1] - m - n * step) * step > 0
                and _fits(host, k + n * step, device, m + n * step)
                for n in range(_AGREE)
            ):
                i, j = k, m
                break
        else:
            return pairs
    return pairs


def _fits(host: _Side, i: int, device: _Side, j: int) -> bool:
    if host.names[i] != device.names[j]:
        return False
    ours, theirs = (host.numbers[i], device.numbers[j]) if host.numbers else (-1, -1)
    return ours < 0 or theirs < 0 or ours == theirs
