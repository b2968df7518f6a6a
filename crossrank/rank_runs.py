"""Ranks of a large group in compact form: as arithmetic runs, of which the groups of a device mesh have few."""

from __future__ import annotations

from collections.abc import Sequence

from crossrank.comm import MOST_RANKS

Run = tuple[int, int, int]
"""(first rank, number of ranks, distance between them)"""


def to_runs(ranks: Sequence[int]) -> list[Run]:
    """Ranks in their order, as the longest runs from the left.

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
    """The ranks in their order; None where one is not a valid rank.

    >>> from_runs([(0, 4, 1), (8, 3, 4), (5, 1, 1)])
    [0, 1, 2, 3, 8, 12, 16, 5]
    """
    if any(count < 1 for _, count, _ in runs) or sum(count for _, count, _ in runs) > MOST_RANKS:
        return None
    ranks = [first + i * step for first, count, step in runs for i in range(count)]
    return ranks if all(0 <= rank < MOST_RANKS for rank in ranks) else None
