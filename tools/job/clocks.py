"""Brings the clocks of several files or machines together by what collectives imply.

An operation that releases all its ranks ends on them at nearly the same moment, for none can end before the last has
begun. The median difference between the ends of two clocks over all such collectives is what their times differ by;
what the ends then still differ by is the residual, and bounds what waiting and arrival may be wrong by.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from crossrank.tools.job.launches import Ints, reduce_by

_UNKNOWN = np.iinfo(np.int64).min
_MOST_LISTED = 1024
_FEW = 10
"""Collectives below which an offset is not sure."""


class Clocks(msgspec.Struct, kw_only=True):
    """What was done about clocks."""

    count: int
    """Different clocks among the files."""
    note: str
    offset_us: dict[str, float] = {}
    """Clock -> what was added to its times; the largest, where there are more than 1024."""
    collectives: int = 0
    """Collectives that tell the difference of two clocks."""
    weak: dict[str, int] = {}
    """Clocks whose offset rests on less than 10 collectives -> how many."""
    residual_us: dict[str, float] | None = None
    """p50, p95 and max over the collectives: from the first rank's end to the last one's, after the correction. None
    where no collective was seen by two clocks."""
    unaligned: list[str] = []
    """Clocks that share no collective with the others: what compares them is not given."""

    @property
    def slack_ns(self) -> float:
        """By how much times of different clocks may be apart."""
        return 1000 * self.residual_us["p95"] if self.residual_us is not None and self.count > 1 else 0.0


def align(names: Sequence[str], clock: Ints, collective: Ints, ended: Ints, count: int) -> tuple[Ints, Clocks]:
    """(what to add to each clock's times in ns, what was done); `is_known` tells which clocks could not be aligned.

    One row per rank and collective: index of its clock in `names`, of the collective (below `count`), and its end.
    Only rows of operations that release all ranks, with known ends, belong here.
    """
    offsets = np.zeros(len(names), np.int64)
    if len(names) < 2:
        residual = _residual(collective, ended, count)
        return offsets, Clocks(count=len(names), note="all ranks are on one clock", residual_us=residual)
    offsets[:] = _UNKNOWN
    reference = np.full(count, _UNKNOWN)
    order = np.argsort(clock, kind="stable")
    rows_of = np.split(order, np.searchsorted(clock[order], np.arange(1, len(names))))
    shared = np.zeros(len(names), np.int64)
    first = max(range(len(names)), key=lambda index: (len(rows_of[index]), -index))
    offsets[first] = 0
    _take(reference, collective[rows_of[first]], ended[rows_of[first]])
    while True:
        # Those that share most with what is aligned go first: one that shares little would pull the others along.
        known = (reference[collective] != _UNKNOWN) & (offsets == _UNKNOWN)[clock]
        count_of = np.bincount(clock[known], minlength=len(names))
        best = int(count_of.max(initial=0))
        if not best:
            break
        joining = np.flatnonzero(count_of >= max(1, best // 2)).tolist()
        for index in joining:
            rows = rows_of[index]
            mine = rows[known[rows]]
            offsets[index] = int(np.median(reference[collective[mine]] - ended[mine]))
            shared[index] = len(mine)
        for index in joining:
            rows = rows_of[index]
            _take(reference, collective[rows], ended[rows] + offsets[index])
    aligned = offsets != _UNKNOWN
    rows = np.flatnonzero(aligned[clock])
    residual = _residual(collective[rows], ended[rows] + offsets[clock[rows]], count)
    moved = {names[i]: round(float(offsets[i]) / 1000, 3) for i in np.flatnonzero(aligned).tolist() if offsets[i]}
    largest = sorted(moved, key=lambda name: -abs(moved[name]))[:_MOST_LISTED]
    note = f"{len(names)} clocks, brought together by the ends of collectives"
    if not shared.any():
        note = f"{len(names)} clocks, and no collective was timed on two of them: each is taken by itself"
    elif not aligned.all():
        note += f"; {int((~aligned).sum())} of them share no collective with the others, and are taken as they are"
    if not len(ended):
        note = f"{len(names)} clocks, and nothing tells when collectives ended: they are not compared"
    return offsets, Clocks(
        count=len(names),
        note=note,
        offset_us={name: moved[name] for name in largest},
        collectives=int(shared.sum()),
        weak={names[i]: int(shared[i]) for i in np.flatnonzero((shared > 0) & (shared < _FEW)).tolist()},
        residual_us=residual,
        unaligned=[names[index] for index in np.flatnonzero(~aligned).tolist()],
    )


def is_known(offsets: Ints) -> NDArray[np.bool_]:
    """Which clocks could be aligned."""
    known: NDArray[np.bool_] = offsets != _UNKNOWN
    return known


def _take(reference: Ints, collective: Ints, ended: Ints) -> None:
    """Ends of collectives that nobody has told yet."""
    new = reference[collective] == _UNKNOWN
    reference[collective[new]] = ended[new]


def _residual(collective: Ints, ended: Ints, count: int) -> dict[str, float] | None:
    seen = np.bincount(collective, minlength=count) > 1
    if not seen.any():
        return None
    first = reduce_by(np.minimum, collective, ended, count, np.iinfo(np.int64).max)
    last = reduce_by(np.maximum, collective, ended, count, _UNKNOWN)
    spread = (last - first)[seen] / 1000
    p50, p95 = np.percentile(spread, (50, 95))
    return {"p50": round(float(p50), 3), "p95": round(float(p95), 3), "max": round(float(spread.max()), 3)}
