"""Who arrives last at collectives, and how long the others wait: over all calls that the dumps hold.

The arrival of a rank is the moment at which its CPU made the call. Clocks of different hosts are brought together by
what a collective implies: none of its members sees the end of it before all have begun it, so the difference of two
clocks has bounds. A clock is left as it is where the bounds allow that, and moved to the middle of them otherwise.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from statistics import median

from crossrank.comm import OPERATIONS
from crossrank.tools.analysis.diagnosis.findings import Clocks, Finding, GroupStragglers
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.job.groups import ProcessGroup

_FEWEST = 5
"""Collectives below which nothing is said about a group."""
_OFTEN = 0.5
_LONG_MS = 1.0


def find_stragglers(job: JobState) -> tuple[list[GroupStragglers], Clocks, list[Finding]]:
    """(every group with its waits, what was done about clocks, the ranks worth a word)"""
    releases = [
        (operation := OPERATIONS.get(signature.op)) is not None and operation.releases_all
        for signature in job.signatures
    ]
    times = {group.index: _times(job, group, releases) for group in job.groups if len(group.lanes) > 1}
    times = {index: columns for index, columns in times.items() if columns is not None and len(columns.seqs) >= _FEWEST}
    offsets, clocks = _align(job, {index: columns for index, columns in times.items() if columns is not None})
    found: list[GroupStragglers] = []
    late: list[Finding] = []
    for index, columns in times.items():
        assert columns is not None
        row = _measure(job.groups[index], columns, offsets)
        found.append(row)
        share = max(_OFTEN, 1.5 / len(columns.ranks))
        if row.last_share > share and row.wait_ms["p50"] >= _LONG_MS:
            late.append(
                Finding(
                    kind="straggler",
                    pg=row.pg,
                    pg_ranks=row.pg_ranks,
                    culprit_ranks=[],
                    waiting_ranks=[rank for rank in columns.ranks if rank != row.last_rank],
                    text=f"rank {row.last_rank} came last in {row.last_share:.0%} of {row.collectives} collectives; "
                    f"the first waited {row.wait_ms['p50']:.3g} ms for the last (median)",
                )
            )
    found.sort(key=lambda row: (-row.wait_ms["total"], row.pg))
    return found, clocks, late


class _Columns:
    """Times of the collectives of a group that all its ranks with a dump have."""

    def __init__(self, ranks: list[int], seqs: list[int]) -> None:
        self.ranks = ranks
        self.seqs = seqs
        self.arrivals: list[Sequence[int]] = []
        """One column per rank: ns since 1970."""
        self.ends: list[Sequence[int]] = []
        """0 = not known, or not to be used: another rank may leave the collective early."""


def _times(job: JobState, group: ProcessGroup, releases: list[bool]) -> _Columns | None:
    ranks = sorted(group.lanes)
    low = max(group.lanes[rank].numbers[0] for rank in ranks)
    high = min(group.lanes[rank].numbers[-1] for rank in ranks)
    if low > high:
        return None
    common = range(low, high + 1)
    dense = all(
        (start := lane.index(low)) is not None and (end := lane.index(high)) is not None and end - start == high - low
        for lane in (group.lanes[rank] for rank in ranks)
    )
    seqs = list(common) if dense else sorted(set.intersection(*(set(group.lanes[rank].numbers) for rank in ranks)))
    columns = _Columns(ranks, seqs)
    for rank in ranks:
        lane, calls = group.lanes[rank], job.ranks[rank].calls
        first = lane.index(low)
        rows = (
            lane.rows[first : first + len(seqs)]
            if dense and first is not None
            else array("I", (row for seq in seqs if (row := lane.row(seq)) is not None))
        )
        columns.arrivals.append(array("q", (calls.called[row] for row in rows)))
        columns.ends.append(array("q", (calls.ended[row] if releases[calls.signature[row]] else 0 for row in rows)))
    return columns


def _align(job: JobState, times: dict[int, _Columns]) -> tuple[dict[int, int], Clocks]:
    """What to add to each rank's times, in ns."""
    offsets: dict[int, int] = {}
    if not any(any(column) for columns in times.values() for column in columns.ends):
        return {}, Clocks(aligned=False, note="no dump has times of completion: clocks are taken as they are")
    by_size = sorted(times, key=lambda index: (-len(times[index].ranks), index))
    for first in sorted(job.ranks):
        if first in offsets:
            continue
        offsets[first] = 0
        changed = True
        while changed:
            changed = False
            for index in by_size:
                columns = times[index]
                anchor = next((at for at, rank in enumerate(columns.ranks) if rank in offsets), None)
                if anchor is None:
                    continue
                for at, rank in enumerate(columns.ranks):
                    if rank not in offsets:
                        offsets[rank] = _offset(columns, anchor, at, offsets[columns.ranks[anchor]])
                        changed = True
    residual = 0
    for columns in times.values():
        added = [offsets.get(rank, 0) for rank in columns.ranks]
        for arrivals, ends in zip(zip(*columns.arrivals, strict=True), zip(*columns.ends, strict=True), strict=True):
            known = [end + plus for end, plus in zip(ends, added, strict=True) if end]
            if known:
                latest = max(arrival + plus for arrival, plus in zip(arrivals, added, strict=True))
                residual = max(residual, latest - min(known))
    moved = {str(rank): offset / 1e6 for rank, offset in sorted(offsets.items()) if offset}
    note = f"the clocks of {len(moved)} rank(s) were moved" if moved else "no collective contradicts the clocks"
    return offsets, Clocks(aligned=True, offset_ms=moved, residual_ms=residual / 1e6, note=note)


def _offset(columns: _Columns, anchor: int, at: int, of_anchor: int) -> int:
    """The offset of one rank from the bounds that its collectives with the anchor give."""
    upper = min(
        (end - begun for end, begun in zip(columns.ends[anchor], columns.arrivals[at], strict=True) if end),
        default=None,
    )
    lower = max(
        (begun - end for begun, end in zip(columns.arrivals[anchor], columns.ends[at], strict=True) if end),
        default=None,
    )
    if (upper is None or of_anchor + upper >= 0) and (lower is None or of_anchor + lower <= 0):
        return 0
    if upper is None or lower is None:
        return of_anchor + (upper if upper is not None else lower or 0)
    return of_anchor + (upper + lower) // 2


def _measure(group: ProcessGroup, columns: _Columns, offsets: dict[int, int]) -> GroupStragglers:
    added = [offsets.get(rank, 0) for rank in columns.ranks]
    arrivals = [
        [arrival + plus for arrival in column] if plus else column
        for column, plus in zip(columns.arrivals, added, strict=True)
    ]
    last: Counter[int] = Counter()
    waits: list[int] = []
    worst = (-1, columns.ranks[0])
    firsts: list[int] = []
    for moment in zip(*arrivals, strict=True):
        latest, first = max(moment), min(moment)
        waits.append(latest - first)
        firsts.append(first)
        if latest > first:
            latest_rank = columns.ranks[moment.index(latest)]
            last[latest_rank] += 1
            worst = max(worst, (latest - first, latest_rank), key=lambda wait: wait[0])
    rank, times = min(last.items(), key=lambda item: (-item[1], item[0]), default=(columns.ranks[0], 0))
    late = {
        str(member): median(arrival - first for arrival, first in zip(column, firsts, strict=True)) / 1e6
        for member, column in zip(columns.ranks, arrivals, strict=True)
    }
    ordered = sorted(waits)
    return GroupStragglers(
        pg=group.pg,
        pg_ranks=list(group.ranks),
        collectives=len(waits),
        last_rank=rank,
        last_share=times / len(waits),
        max_rank=worst[1],
        wait_ms={
            "p50": ordered[len(ordered) // 2] / 1e6,
            "p95": ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)] / 1e6,
            "max": ordered[-1] / 1e6,
            "total": sum(waits) / 1e6,
        },
        late_ms=late,
    )
