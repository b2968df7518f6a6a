"""Find the ranks that arrive last at collectives, and how long the others wait, over all calls in the dumps.

The arrival of a rank is the time at which its host made the call. Clocks of different nodes are aligned by collectives:
no member can see the end of a collective before all have started it, so the difference of two clocks has bounds. A
clock is not changed if the bounds allow it; otherwise it is moved to the middle of the bounds, and is known to within
half of their distance. If a collective still contradicts the result, this is so for clocks that were not changed, too.
A rank is called late only if it is late wherever its clock is within what is known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from crossrank.text import milliseconds, percent, plural
from crossrank.tools.analysis.diagnosis.findings import ClockAlignment, Finding, GroupStragglers
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.job.groups import ProcessGroup

_FEWEST = 5
"""Groups with fewer collectives are not judged."""
_OFTEN = 0.5
_LONG_MS = 1.0
_FAR = 1 << 62
"""ns; longer than any time."""
_UNBOUNDED = 1 << 60
"""ns that a clock may be wrong by which has a bound on one side only."""


@dataclass(frozen=True)
class _Clock:
    """How far the clock of a rank is moved, and how far from the truth it may be after that, in ns.

    A clock that nothing contradicts is taken as right, until a contradiction remains."""

    offset: int = 0
    unknown: int = 0
    unknown_if_contradicted: int = 0


@dataclass(frozen=True)
class _Times:
    """The collectives of a group that all its ranks with a dump have, with the times of their calls. Times are ns since
    1970, one row per rank."""

    group: ProcessGroup
    ranks: list[int]
    arrivals: NDArray[np.int64]
    ends: NDArray[np.int64]
    """0 = unknown, or unusable because other ranks may leave the collective early."""

    def added(self, clocks: dict[int, _Clock]) -> NDArray[np.int64]:
        return np.array([[clocks.get(rank, _Clock()).offset] for rank in self.ranks])

    def unknown(self, clocks: dict[int, _Clock]) -> NDArray[np.int64]:
        return np.array([[clocks.get(rank, _Clock()).unknown] for rank in self.ranks])


def find_stragglers(job: JobState) -> tuple[list[GroupStragglers], ClockAlignment, list[Finding]]:
    """Return (waits of every group, alignment of the clocks, findings about stragglers)."""
    releases_all = np.array(job.releases_all)
    every = [_times(job, group, releases_all) for group in job.groups if len(group.lanes) > 1]
    times = [one for one in every if one.arrivals.shape[1] >= _FEWEST]
    clocks, alignment = _align(job, times)
    found = [_measure(one, clocks) for one in times]
    unproven = _contradicted(clocks)
    late = [
        Finding(
            kind="straggler",
            pg=row.pg,
            pg_ranks=row.pg_ranks,
            waiting_ranks=[rank for rank in one.ranks if rank != row.last_rank],
            text=f"rank {row.last_rank} arrived last in {percent(row.last_share)} of {row.collectives} collectives, by "
            f"the times of the hosts' calls; the first rank waited {row.wait_ms['p50']:.3g} ms for it (median)"
            + ("" if _is_late(one, unproven, row) else ", if the clocks of the ranks agree"),
        )
        for one, row in zip(times, found, strict=True)
        if row.wait_ms["p50"] > (alignment.residual_ms or 0) and _is_late(one, clocks, row)
    ]
    return sorted(found, key=lambda row: (-row.wait_ms["total"], row.pg)), alignment, late


def _is_late(times: _Times, clocks: dict[int, _Clock], row: GroupStragglers) -> bool:
    """Whether the rank that is last most often is so even if its clock is as wrong as it may be, and the others too."""
    unknown = times.unknown(clocks)
    arrivals = times.arrivals + times.added(clocks)
    own = times.ranks.index(row.last_rank)
    earliest = arrivals[own] - unknown[own]
    others = np.delete(arrivals + unknown, own, axis=0)
    last_share = float((earliest > others.max(axis=0)).mean())
    often = last_share > max(_OFTEN, 1.5 / len(times.ranks))
    return often and float(np.median(earliest - others.min(axis=0))) >= _LONG_MS * 1e6


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
    known = (arrivals > 0).all(axis=0)
    return _Times(group, ranks, arrivals[:, known], ends[:, known])


def _align(job: JobState, times: list[_Times]) -> tuple[dict[int, _Clock], ClockAlignment]:
    """Return (clock of each rank, summary)."""
    clocks: dict[int, _Clock] = {}
    if not any(one.ends.any() for one in times):
        note = "clocks of the hosts, not aligned: no dump has the end times that an alignment needs"
        return {}, ClockAlignment(aligned=False, note=note)
    by_size = sorted(times, key=lambda one: -len(one.ranks))
    for first in sorted(job.ranks):
        before = len(clocks)
        clocks.setdefault(first, _Clock())
        while before < len(clocks):
            before = len(clocks)
            for one in by_size:
                anchor = next((at for at, rank in enumerate(one.ranks) if rank in clocks), None)
                if anchor is not None:
                    of_anchor, others = clocks[one.ranks[anchor]], enumerate(one.ranks)
                    clocks |= {rank: _clock(one, anchor, at, of_anchor) for at, rank in others if rank not in clocks}
    residual = 0
    for one in times:
        added = one.added(clocks)
        excess = np.where(one.ends > 0, (one.arrivals + added).max(axis=0) - added - one.ends, 0)
        residual = max(residual, int(excess.max()))
    if residual:
        clocks = _contradicted(clocks)
    moved = {str(rank): clock.offset / 1e6 for rank, clock in sorted(clocks.items()) if clock.offset}
    unknown = max((clock.unknown for clock in clocks.values()), default=0)
    within = unknown / 1e6 if unknown < _UNBOUNDED else None
    known = "with a bound on one side only" if within is None else f"to within {milliseconds(within)}"
    by = "by the ends of collectives as torch noticed them"
    moved_text = f"the clocks of {plural(len(moved), 'rank')} were aligned {known}, {by}" if moved else ""
    note = moved_text or ("the clocks contradict each other" if residual else "the clocks do not contradict each other")
    return clocks, ClockAlignment(
        aligned=True, offset_ms=moved, within_ms=within if moved else None, residual_ms=residual / 1e6, note=note
    )


def _contradicted(clocks: dict[int, _Clock]) -> dict[int, _Clock]:
    """Return the clocks as far as they are known if none of them is taken as right."""
    return {rank: replace(clock, unknown=clock.unknown_if_contradicted) for rank, clock in clocks.items()}


def _clock(times: _Times, anchor: int, at: int, of_anchor: _Clock) -> _Clock:
    """Return the clock of one rank, from the bounds of its collectives with the anchor."""
    arrivals, ends = times.arrivals, times.ends
    upper = int((ends[anchor] - arrivals[at])[ends[anchor] > 0].min(initial=_FAR))
    lower = int((arrivals[anchor] - ends[at])[ends[at] > 0].max(initial=-_FAR))
    bounds = [bound for bound in (upper, lower) if abs(bound) < _FAR]
    half = max(upper - lower, 0) // 2 if len(bounds) == 2 else _UNBOUNDED
    if lower <= -of_anchor.offset <= upper:
        farthest = max(upper, -lower) + abs(of_anchor.offset) if half < _UNBOUNDED else _UNBOUNDED
        return _Clock(0, of_anchor.unknown, min(_UNBOUNDED, of_anchor.unknown_if_contradicted + farthest))
    unknown, at_most = (
        min(_UNBOUNDED, known + half) for known in (of_anchor.unknown, of_anchor.unknown_if_contradicted)
    )
    return _Clock(of_anchor.offset + sum(bounds) // len(bounds), unknown, at_most)


def _measure(times: _Times, clocks: dict[int, _Clock]) -> GroupStragglers:
    arrivals = times.arrivals + times.added(clocks)
    first = arrivals.min(axis=0)
    waits = arrivals.max(axis=0) - first
    last = arrivals.argmax(axis=0)
    often = np.bincount(last[waits > 0], minlength=len(times.ranks))
    middle, high = np.percentile(waits, (50, 95))
    late = np.median(arrivals - first, axis=1)
    return GroupStragglers(
        pg=times.group.pg,
        pg_ranks=list(times.group.ranks),
        collectives=len(waits),
        last_rank=times.ranks[often.argmax()],
        last_share=int(often.max()) / len(waits),
        max_rank=times.ranks[last[waits.argmax()]],
        wait_ms={
            "p50": round(float(middle)) / 1e6,
            "p95": round(float(high)) / 1e6,
            "max": int(waits.max()) / 1e6,
            "total": float(waits.sum(dtype=np.float64)) / 1e6,
        },
        late_ms={str(rank): float(one) / 1e6 for rank, one in zip(times.ranks, late, strict=True)},
    )
