"""Align the clocks of several files or nodes by the end times of collectives.

An operation that releases all its ranks ends on them at nearly the same time: no rank can end before the last one
starts. The offset of two clocks is the median difference of these end times. The difference that remains is the
residual. It bounds the error of waiting times and arrivals.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import polars as pl

from crossrank.tools.traces.busy import Bools, Ints

_UNKNOWN = np.iinfo(np.int64).min
_MOST_LISTED = 1024
_MIN_COLLECTIVES = 10
"""An offset from fewer collectives is reported as weak."""


class Clocks(msgspec.Struct, kw_only=True):
    """How the clocks were aligned."""

    count: int
    """Number of different clocks."""
    note: str
    offset_us: dict[str, float] = {}
    """Clock -> offset that was added to its times. Only the 1024 largest."""
    collectives: int = 0
    """Collectives that the offsets are computed from."""
    weak: dict[str, int] = {}
    """Clock whose offset is computed from fewer than 10 collectives -> number of collectives."""
    residual_us: dict[str, float] | None = None
    """p50, p95 and max over the collectives: time from the first rank's end to the last rank's, after alignment. None
    if no collective has end times on two ranks."""
    unaligned: list[str] = []
    """Clocks that share no collective with the others. Their times are not compared with others."""

    @property
    def slack_ns(self) -> float:
        """Error of a comparison between different clocks."""
        return 1000 * self.residual_us["p95"] if self.residual_us is not None and self.count > 1 else 0.0


def align(names: Sequence[str], clock: Ints, collective: Ints, ended: Ints) -> tuple[Ints, Bools, Clocks]:
    """Return (offset of each clock in ns, whether each clock is aligned, summary).

    The arrays have one row per rank and collective: index of the clock in `names`, index of the collective, end time.
    Pass only operations that release all ranks and have a known end.
    """
    offsets, aligned = np.zeros(len(names), np.int64), np.zeros(len(names), bool)
    if len(names) < 2:
        residual = _residual(collective, ended)
        return offsets, ~aligned, Clocks(count=len(names), note="all ranks are on one clock", residual_us=residual)
    reference = np.full(int(collective.max(initial=-1)) + 1, _UNKNOWN)
    order = np.argsort(clock, kind="stable")
    rows_of_clock = np.split(order, np.searchsorted(clock[order], np.arange(1, len(names))))
    shared = np.zeros(len(names), np.int64)
    newly_aligned = [max(range(len(names)), key=lambda index: (len(rows_of_clock[index]), -index))]
    while newly_aligned:
        aligned[newly_aligned] = True
        for rows, offset in [(rows_of_clock[index], offsets[index]) for index in newly_aligned]:
            new = rows[reference[collective[rows]] == _UNKNOWN]
            reference[collective[new]] = ended[new] + offset
        known = (reference[collective] != _UNKNOWN) & ~aligned[clock]
        count_of = np.bincount(clock[known], minlength=len(names))
        # Align first the clocks that share most collectives: a wrong offset from few collectives would spread.
        newly_aligned = np.flatnonzero(count_of >= max(1, int(count_of.max()) // 2)).tolist()
        for index in newly_aligned:
            mine = rows_of_clock[index][known[rows_of_clock[index]]]
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
        note = f"{len(names)} clocks, not compared: exact end times of collectives are unknown"
    return (
        offsets,
        aligned,
        Clocks(
            count=len(names),
            note=note,
            offset_us={name: moved[name] for name in largest},
            collectives=int(shared.sum()),
            weak={
                names[i]: int(shared[i]) for i in np.flatnonzero((shared > 0) & (shared < _MIN_COLLECTIVES)).tolist()
            },
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
