"""Compact form of the ranks of a large group: arithmetic runs. The groups of a device mesh have few of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from crossrank.comm import MOST_RANKS

Run = tuple[int, int, int]
"""(first rank, number of ranks, distance between them)"""


def to_runs(ranks: Sequence[int]) -> list[Run]:
    """Return the ranks in their order as runs, each as long as possible, from left to right.

    >>> to_runs([0, 1, 2, 3, 8, 12, 16, 5])
    [(0, 4, 1), (8, 3, 4), (5, 1, 1)]
    """
    runs: list[Run] = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        end = at + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        runs.append((ranks[at], end - at, step))
        at = end
    return runs


def from_runs(runs: Sequence[Run]) -> list[int] | None:
    """Return the ranks in their order; None if one is not a valid rank.

    >>> from_runs([(0, 4, 1), (8, 3, 4), (5, 1, 1)])
    [0, 1, 2, 3, 8, 12, 16, 5]
    """
    if any(count < 1 for _, count, _ in runs) or sum(count for _, count, _ in runs) > MOST_RANKS:
        return None
    ranks = [first + i * step for first, count, step in runs for i in range(count)]
    return ranks if all(0 <= rank < MOST_RANKS for rank in ranks) else None


def ranks_in(text: str) -> set[int]:
    """Return the ranks of a list as `rank_ranges` writes it. Raises `ValueError`.

    >>> sorted(ranks_in("0-2,5"))
    [0, 1, 2, 5]
    """
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a list of ranks; write it as 0-7,12")
        if match[2] and int(match[2]) < int(match[1]):
            raise ValueError(f"{part!r} goes backwards; write the lower rank first")
        first, last = int(match[1]), int(match[2] or match[1])
        if last >= MOST_RANKS:
            raise ValueError(f"{text!r} has a rank above {MOST_RANKS - 1}")
        ranks.update(range(first, last + 1))
    return ranks
