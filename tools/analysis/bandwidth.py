"""How fast communication was: times and rates of collectives, grouped as the user asks.

The numbers of one collective are those of `crossrank.tools.job.collectives`; here they are put into rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

import crossrank
from crossrank.comm import Locality
from crossrank.errors import CrossrankError
from crossrank.tools.analysis.buckets import bucket_of
from crossrank.tools.job.clocks import Clocks
from crossrank.tools.job.collectives import Collectives
from crossrank.tools.job.launches import TIMED_BY
from crossrank.tools.job.split import split_by
from crossrank.tools.traces.rank_trace import RankTrace

KEYS = ("op", "group", "size", "locality", "source")
"""What rows may be grouped by."""
BY = ("op", "group", "size", "locality")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Spread = dict[str, float]


class Row(msgspec.Struct, kw_only=True):
    """Collectives that agree in what they are grouped by. None stands for what is not grouped by, or not known."""

    op: str | None = None
    pg: str | None = None
    desc: str | None = None
    ranks: int | None = None
    """Members of the group."""
    size_from: int | None = None
    """Sizes of the bucket in bytes, S of nccl-tests; both ends belong to it. None as well where they are not known."""
    size_to: int | None = None
    locality: str | None = None
    source: str | None = None
    collectives: int
    calls: int
    """Calls with times that they are made of, over all ranks."""
    bytes: int
    """Sum of S, as far as it is known."""
    unsized: int = 0
    """Collectives of which the bytes are not known."""
    time_us: Spread
    """p50, p95, max and total of the times of collectives, from the last arrival."""
    kernel_us: Spread
    """Of the durations on each rank, waiting for others included."""
    waiting_us: Spread | None
    """Of each rank's; None where no rank can be compared with another."""
    algbw_gb_per_s: Spread | None
    """p5, p50, p95 and max over the collectives, GB/s of 1e9 bytes; p5 is what 95 % of them reach."""
    busbw_gb_per_s: Spread | None
    line_rate_gb_per_s: float | None = None
    """As the user gives it for the locality, GB/s."""
    line_rate_share: Spread | None = None
    """busbw over line rate."""
    upper_bounds: int
    """Collectives of which the time is an upper bound, and the rates so lower ones: not all members were seen."""


class Bandwidth(msgspec.Struct, kw_only=True):
    """`bandwidth.json`."""

    inputs: list[str]
    sources: dict[str, int]
    """What measured the times -> ranks."""
    world_size: int
    ranks: list[int]
    missing_ranks: list[int]
    calls: int
    """All calls in the files."""
    timed_calls: int
    collectives: int
    timed_collectives: int
    attributed: dict[str, int]
    """How kernels found their calls -> kernels, over all ranks."""
    unattributed: dict[str, int]
    """What has no counterpart, and why -> how many, over all ranks."""
    unattributed_ms: float
    """Time of communication kernels that belong to no known call, over all ranks."""
    not_compared: dict[str, int]
    """Why calls were not compared across ranks -> calls."""
    clocks: Clocks
    by: list[str]
    rows: list[Row]
    total_ms: float
    """Sum of the times of all collectives."""
    notes: list[str]
    skipped: list[str]
    schema: str = "crossrank-bandwidth 1"
    crossrank: str = crossrank.__version__


_RATE = re.compile(
    r"(?:(?P<locality>\w+)=)?(?P<number>\d{1,9}(?:\.\d{1,9})?)\s*(?P<unit>[kMGT]?)(?P<what>bps|bit/s|b/s|Bps|B/s)"
)
_SCALE = {"": 1e-9, "k": 1e-6, "M": 1e-3, "G": 1.0, "T": 1e3}
_ANY = "any"
LOCALITIES: tuple[str, ...] = get_args(Locality)


def line_rates(texts: Iterable[str]) -> dict[str, float]:
    """GB/s (1e9 bytes) by locality, `any` for what has none of its own, from texts such as `cross_node=400Gbps`.

    >>> line_rates(["400Gbps", "intra_node=450GB/s"])
    {'any': 50.0, 'intra_node': 450.0}
    """
    rates = {}
    for text in texts:
        match = _RATE.fullmatch(text.strip())
        if match is None or float(match["number"]) <= 0 or match["locality"] not in (None, *LOCALITIES):
            raise CrossrankError(
                f"--line-rate {text!r} is not [LOCALITY=]RATE, for example 400Gbps, 50GB/s or intra_node=450GB/s; "
                f"LOCALITY is one of {', '.join(LOCALITIES)}"
            )
        bits = 8 if match["what"].startswith("b") else 1
        rates[match["locality"] or _ANY] = float(match["number"]) * _SCALE[match["unit"]] / bits
    return rates


def bandwidth(
    ranks: Sequence[RankTrace],
    found: Collectives,
    *,
    inputs: Sequence[str] = (),
    by: Sequence[str] = BY,
    rates: dict[str, float] | None = None,
    skipped: Sequence[str] = (),
) -> Bandwidth:
    """The table of `crossrank bandwidth`."""
    rows = make_rows(found, by, rates or {})
    present = set(found.ranks)
    return Bandwidth(
        inputs=list(inputs),
        sources=dict(Counter(one.timed_by for one in ranks)),
        world_size=found.world_size,
        ranks=found.ranks,
        missing_ranks=[rank for rank in range(found.world_size) if rank not in present],
        calls=int(found.calls.sum()),
        timed_calls=int(found.calls[found.ended > 0].sum()),
        collectives=len(found.of_kind),
        timed_collectives=int(found.timed.sum()),
        attributed=dict(found.attributed.most_common()),
        unattributed=dict(found.unattributed.most_common()),
        unattributed_ms=round(sum(one.unattributed_ns for one in ranks) / 1e6, 3),
        not_compared=found.unmatched,
        clocks=found.clocks,
        by=list(by),
        rows=rows,
        total_ms=round(float(found.time[found.timed].sum()) / 1e6, 3),
        notes=[note for one in ranks for note in (*one.notes, *(f"{one.path}: {text}" for text in one.problems))],
        skipped=list(skipped),
    )


def make_rows(found: Collectives, by: Sequence[str], rates: dict[str, float]) -> list[Row]:
    """One row per combination of what is grouped by; the one that takes longest first."""
    timed = np.flatnonzero(found.timed)
    if not len(timed):
        return []
    keys: dict[tuple[Any, ...], int] = {}
    sizes = found.bytes[timed]
    kinds = found.of_kind[timed]
    # Collectives are many, kinds and sizes few: each combination is looked at once.
    pairs, inverse = np.unique(np.stack([kinds, sizes]), axis=1, return_inverse=True)
    row_of_pair = [
        keys.setdefault(tuple(_KEY[name](found, kind, size) for name in by), len(keys))
        for kind, size in pairs.T.tolist()
    ]
    row = np.array(row_of_pair, np.int64)[inverse.reshape(-1)]
    row_of_collective = np.full(len(found.of_kind), -1, np.int64)
    row_of_collective[timed] = row
    calls = np.flatnonzero((found.ended > 0) & (row_of_collective[found.collective] >= 0))
    row_of_call = row_of_collective[found.collective[calls]]
    algbw, busbw = found.algbw(), found.busbw()
    by_row = split_by(row, timed, len(keys))
    calls_by_row = split_by(row_of_call, calls, len(keys))
    rows = []
    for key, number in keys.items():
        mine, own = by_row[number], calls_by_row[number]
        given = dict(zip(by, key, strict=True))
        rows.append(_row(found, given, mine, own, algbw[mine], busbw[mine], rates))
    return sorted(rows, key=lambda one: (-one.time_us["total"], one.op or "", one.pg or ""))


_KEY: dict[str, Callable[[Collectives, int, int], Any]] = {
    "op": lambda found, kind, size: found.kinds[kind].label,
    "group": lambda found, kind, size: found.kinds[kind].group,
    "size": lambda found, kind, size: bucket_of(size) if size or found.kinds[kind].sized else (None, None),
    "locality": lambda found, kind, size: found.kinds[kind].locality,
    "source": lambda found, kind, size: found.kinds[kind].source,
}


def _row(
    found: Collectives,
    given: dict[str, Any],
    mine: Ints,
    calls: Ints,
    algbw: Floats,
    busbw: Floats,
    rates: dict[str, float],
) -> Row:
    group = found.groups[given["group"]] if "group" in given else None
    low, high = given.get("size", (None, None))
    waiting = found.waiting[calls]
    waiting = waiting[waiting >= 0]
    bus = _rates(busbw)
    locality = given.get("locality")
    if locality is None and rates:
        places = {found.kinds[kind].locality for kind in np.unique(found.of_kind[mine]).tolist()}
        locality = places.pop() if len(places) == 1 else None
    rate = rates.get(locality or "", rates.get(_ANY))
    return Row(
        op=given.get("op"),
        pg=group.name if group else None,
        desc=group.desc if group else None,
        ranks=group.size if group else None,
        size_from=low,
        size_to=high,
        locality=given.get("locality"),
        source=given.get("source"),
        collectives=len(mine),
        calls=int(found.calls[calls].sum()),
        bytes=int(found.bytes[mine].sum()),
        unsized=int(found.unsized[mine].sum()),
        time_us=spread_us(found.time[mine]),
        kernel_us=spread_us((found.ended - found.began)[calls]),
        waiting_us=spread_us(waiting) if len(waiting) else None,
        algbw_gb_per_s=_rates(algbw),
        busbw_gb_per_s=bus,
        line_rate_gb_per_s=rate,
        line_rate_share={name: round(value / rate, 4) for name, value in bus.items()} if bus and rate else None,
        upper_bounds=int(found.bound[mine].sum()),
    )


def spread_us(nanoseconds: Ints) -> Spread:
    """p50, p95, max and total in us."""
    p50, p95 = np.percentile(nanoseconds, (50, 95))
    figures = {"p50": p50, "p95": p95, "max": nanoseconds.max(), "total": nanoseconds.sum()}
    return {name: round(float(value) / 1000, 3) for name, value in figures.items()}


def _rates(rates: Floats) -> Spread | None:
    known = rates[~np.isnan(rates)]
    if not len(known):
        return None
    p5, p50, p95 = np.percentile(known, (5, 50, 95))
    return {
        name: float(f"{value:.4g}") for name, value in (("p5", p5), ("p50", p50), ("p95", p95), ("max", known.max()))
    }


def summary_lines(result: Bandwidth) -> list[str]:
    """What a person reads above the table: what was measured by what, and how much of it found its call."""
    lacking = f", {len(result.missing_ranks)} missing" if result.missing_ranks else ""
    lines = [f"ranks      {len(result.ranks)} of {result.world_size}{lacking}"]
    lines += [f"measured   {TIMED_BY[source]} ({count} rank(s))" for source, count in result.sources.items()]
    lines.append(
        f"calls      {result.timed_calls:,} of {result.calls:,} have times; they are {result.timed_collectives:,} "
        f"collectives or transfers, {result.total_ms:,.3f} ms"
    )
    clocks = result.clocks
    text = f"clocks     {clocks.note}"
    if clocks.residual_us is not None:
        residual = clocks.residual_us
        text += (
            f"; the ends of a collective differ by {residual['p50']:,.1f} us (p50), {residual['max']:,.1f} us at most"
        )
    lines.append(text)
    return lines
