"""Brings the clocks of several files or machines together by what collectives imply.

An operation that releases all its ranks ends on them at nearly the same moment, for none can end before the last has
begun. The median difference between the ends of two clocks over all such collectives is what their times differ by;
what the ends then still differ by is the residual, and bounds what waiting and arrival may be wrong by.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import polars as pl

from crossrank.tools.traces.busy import Bools, Ints

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
    """Clocks that share no collective with the others: nothing that compares them is reported."""

    @property
    def slack_ns(self) -> float:
        """By how much times of different clocks may be apart."""
        return 1000 * self.residual_us["p95"] if self.residual_us is not None and self.count > 1 else 0.0


def align(names: Sequence[str], clock: Ints, collective: Ints, ended: Ints) -> tuple[Ints, Bools, Clocks]:
    """(what to add to each clock's times in ns, which clocks could be aligned, what was done).

    One row per rank and collective: index of its clock in `names`, of the collective, and its end.
    Only rows of operations that release all ranks, with known ends, belong here.
    """
    offsets, aligned = np.zeros(len(names), np.int64), np.zeros(len(names), bool)
    if len(names) < 2:
        residual = _residual(collective, ended)
        return offsets, ~aligned, Clocks(count=len(names), note="all ranks are on one clock", residual_us=residual)
    reference = np.full(int(collective.max(initial=-1)) + 1, _UNKNOWN)
    order = np.argsort(clock, kind="stable")
    rows_of = np.split(order, np.searchsorted(clock[order], np.arange(1, len(names))))
    shared = np.zeros(len(names), np.int64)
    joining = [max(range(len(names)), key=lambda index: (len(rows_of[index]), -index))]
    while joining:
        aligned[joining] = True
        for rows, offset in [(rows_of[index], offsets[index]) for index in joining]:
            new = rows[reference[collective[rows]] == _UNKNOWN]
            reference[collective[new]] = ended[new] + offset
        known = (reference[collective] != _UNKNOWN) & ~aligned[clock]
        count_of = np.bincount(clock[known], minlength=len(names))
        # Those that share most with what is aligned go first: one that shares little would pull the others along.
        joining = np.flatnonzero(count_of >= max(1, int(count_of.max()) // 2)).tolist()
        for index in joining:
            mine = rows_of[index][known[rows_of[index]]]
            offsets[index], shared[index] = int(np.median(reference[collective[mine]] - ended[mine])), len(mine)
    rows = np.flatnonzero(aligned[clock])
    residual = _residual(collective[rows], ended[rows] + offsets[clock[rows]])
    moved = {names[i]: round(float(offsets[i]) / 1000, 3) for i in np.flatnonzero(offsets).tolist()}
    largest = sorted(moved, key=lambda name: -abs(moved[name]))[:_MOST_LISTED]
    note = f"{len(names)} clocks, aligned by the end times of collectives"
    if not shared.any():
        note = f"{len(names)} clocks, not aligned: no collective has end times on two of them"
    elif not aligned.all():
        note += f"; {int((~aligned).sum())} of them are not aligned: they share no collective with the others"
    if not len(ended):
        note = f"{len(names)} clocks, not compared: the end times of collectives are unknown"
    return (
        offsets,
        aligned,
        Clocks(
            count=len(names),
            note=note,
            offset_us={name: moved[name] for name in largest},
            collectives=int(shared.sum()),
            weak={names[i]: int(shared[i]) for i in np.flatnonzero((shared > 0) & (shared < _FEW)).tolist()},
            residual_us=residual,
            unaligned=[names[index] for index in np.flatnonzero(~aligned).tolist()],
        ),
    )


def _residual(collective: Ints, ended: Ints) -> dict[str, float] | None:
    ends = pl.LazyFrame({"collective": collective, "ended": ended}).group_by("collective")
    first, last = pl.min("ended"), pl.max("ended")
    spread = ends.agg(count=pl.len(), us=(last - first) / 1000).filter(pl.col("count") > 1).collect()["us"]
    if not len(spread):
        return None
    p50, p95 = np.percentile(spread.to_numpy(), (50, 95))
    return {"p50": round(float(p50), 3), "p95": round(float(p95), 3), "max": round(float(spread.to_numpy().max()), 3)}
