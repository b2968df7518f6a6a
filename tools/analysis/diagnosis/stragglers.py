"""Find the ranks that arrive last at collectives, and how long the others wait, over all calls in the dumps.

The arrival of a rank is the time at which its host made the call. Clocks of different nodes are aligned by collectives:
no member can see the end of a collective before all have started it, so the difference of two clocks has bounds. A
clock is not changed if the bounds allow it; otherwise it is moved to the middle of the bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from crossrank.text import percent, plural
from crossrank.tools.analysis.diagnosis.findings import ClockAlignment, Finding, GroupStragglers
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.job.groups import ProcessGroup

_FEWEST = 5
"""Groups with fewer collectives are not judged."""
_OFTEN = 0.5
_LONG_MS = 1.0
_FAR = 1 << 62
"""ns; longer than any time."""


@dataclass(frozen=True)
class _Times:
    """The collectives of a group that all its ranks with a dump have. Times are ns since 1970, one row per rank."""

    group: ProcessGroup
    ranks: list[int]
    arrivals: NDArray[np.int64]
    ends: NDArray[np.int64]
    """0 = unknown, or unusable because other ranks may leave the collective early."""

    def added(self, offsets: dict[int, int]) -> NDArray[np.int64]:
        return np.array([[offsets.get(rank, 0)] for rank in self.ranks])


def find_stragglers(job: JobState) -> tuple[list[GroupStragglers], ClockAlignment, list[Finding]]:
    """Return (waits of every group, alignment of the clocks, findings about stragglers)."""
    releases_all = np.array(job.releases_all)
    every = [_times(job, group, releases_all) for group in job.groups if len(group.lanes) > 1]
    times = [one for one in every if one.arrivals.shape[1] >= _FEWEST]
    offsets, clocks = _align(job, times)
    found = [_measure(one, offsets) for one in times]
    late = [
        Finding(
            kind="straggler",
            pg=row.pg,
            pg_ranks=row.pg_ranks,
            waiting_ranks=[rank for rank in one.ranks if rank != row.last_rank],
            text=f"rank {row.last_rank} arrived last in {percent(row.last_share)} of {row.collectives} collectives; "
            f"the first rank waited {row.wait_ms['p50']:.3g} ms for it (median)",
        )
        for one, row in zip(times, found, strict=True)
        if row.last_share > max(_OFTEN, 1.5 / len(one.ranks))
        and row.wait_ms["p50"] >= _LONG_MS
        and row.wait_ms["p50"] > clocks.residual_ms  # otherwise the clocks may be wrong
    ]
    return sorted(found, key=lambda row: (-row.wait_ms["total"], row.pg)), clocks, late


def _times(job: JobState, group: ProcessGroup, releases_all: NDArray[np.bool_]) -> _Times:
    ranks = sorted(group.lanes)
    numbers = [np.frombuffer(group.lanes[rank].numbers, np.int64) for rank in ranks]
    common = numbers[0]
    for one in numbers[1:]:
        common = common if np.array_equal(common, one) else np.intersect1d(common, one, assume_unique=True)
    arrivals, ends = np.empty((2, len(ranks), len(common)), np.int64)
    for index, rank in enumerate(ranks):
        calls, lane_rows = job.ranks[rank].calls, np.frombuffer(group.lanes[rank].rows, np.uint32)
        rows = lane_rows[np.searchsorted(numbers[index], common)]
        arrivals[index] = np.frombuffer(calls.called, np.int64)[rows]
        releases = releases_all[np.frombuffer(calls.signature, np.uint32)[rows]]
        ends[index] = np.where(releases, np.frombuffer(calls.ended, np.int64)[rows], 0)
    return _Times(group, ranks, arrivals, ends)


def _align(job: JobState, times: list[_Times]) -> tuple[dict[int, int], ClockAlignment]:
    """Return (offset of each rank in ns, summary)."""
    offsets: dict[int, int] = {}
    if not any(one.ends.any() for one in times):
        note = "clocks of the hosts, not aligned: no dump has the end times that an alignment needs"
        return {}, ClockAlignment(aligned=False, note=note)
    by_size = sorted(times, key=lambda one: -len(one.ranks))
    for first in sorted(job.ranks):
        before = len(offsets)
        offsets.setdefault(first, 0)
        while before < len(offsets):
            before = len(offsets)
            for one in by_size:
                anchor = next((at for at, rank in enumerate(one.ranks) if rank in offsets), None)
                if anchor is not None:
                    of_anchor, others = offsets[one.ranks[anchor]], enumerate(one.ranks)
                    offsets |= {rank: _offset(one, anchor, at, of_anchor) for at, rank in others if rank not in offsets}
    residual = 0
    for one in times:
        added = one.added(offsets)
        excess = np.where(one.ends > 0, (one.arrivals + added).max(axis=0) - added - one.ends, 0)
        residual = max(residual, int(excess.max()))
    moved = {str(rank): offset / 1e6 for rank, offset in sorted(offsets.items()) if offset}
    note = f"the clocks of {plural(len(moved), 'rank')} were aligned" if moved else "the clocks agree"
    return offsets, ClockAlignment(aligned=True, offset_ms=moved, residual_ms=residual / 1e6, note=note)


def _offset(times: _Times, anchor: int, at: int, of_anchor: int) -> int:
    """Return the offset of one rank, from the bounds of its collectives with the anchor."""
    arrivals, ends = times.arrivals, times.ends
    upper = int((ends[anchor] - arrivals[at])[ends[anchor] > 0].min(initial=_FAR))
    lower = int((arrivals[anchor] - ends[at])[ends[at] > 0].max(initial=-_FAR))
    if lower <= -of_anchor <= upper:
        return 0
    bounds = [bound for bound in (upper, lower) if abs(bound) < _FAR]
    return of_anchor + sum(bounds) // len(bounds)


def _measure(times: _Times, offsets: dict[int, int]) -> GroupStragglers:
    arrivals = times.arrivals + times.added(offsets)
    first = arrivals.min(axis=0)
    waits = arrivals.max(axis=0) - first
    last = arrivals.argmax(axis=0)
    often = np.bincount(last[waits > 0], minlength=len(times.ranks))
    ordered = np.sort(waits)
    middle, high = len(ordered) // 2, len(ordered) * 95 // 100
    late = np.median(arrivals - first, axis=1)
    return GroupStragglers(
        pg=times.group.pg,
        pg_ranks=list(times.group.ranks),
        collectives=len(waits),
        last_rank=times.ranks[often.argmax()],
        last_share=int(often.max()) / len(waits),
        max_rank=times.ranks[last[waits.argmax()]],
        wait_ms={
            "p50": int(ordered[middle]) / 1e6,
            "p95": int(ordered[high]) / 1e6,
            "max": int(ordered[-1]) / 1e6,
            "total": float(waits.sum(dtype=np.float64)) / 1e6,
        },
        late_ms={str(rank): float(one) / 1e6 for rank, one in zip(times.ranks, late, strict=True)},
    )
