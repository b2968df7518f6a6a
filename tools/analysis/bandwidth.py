"""How fast communication was: times and rates of collectives, grouped as the user asks.

The numbers of one collective are those of `crossrank.tools.job.collectives`; here they are put into rows.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, get_args

import msgspec

import crossrank
from crossrank.comm import Locality
from crossrank.errors import CrossrankError
from crossrank.tools.analysis.overlap import Overlap, overlap_of
from crossrank.tools.job.clocks import Clocks
from crossrank.tools.job.collectives import Collectives
from crossrank.tools.traces.rank_trace import RankTrace

if TYPE_CHECKING:
    import polars as pl

KEYS = {
    "op": ("op",),
    "group": ("group",),
    "size": ("size_from", "size_to"),
    "locality": ("locality",),
    "source": ("source",),
}
"""What rows may be grouped by -> the columns that stand for it."""
BY = ("op", "group", "size", "locality")

Spread = dict[str, float]
_TIMES = ("time", "kernel", "waiting")
_OF_TIMES, _OF_RATES = ("p50", "p95", "max", "total"), ("p5", "p50", "p95", "max")


class BandwidthRow(msgspec.Struct, kw_only=True):
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
    unsized: int
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
    rows: list[BandwidthRow]
    total_ms: float
    """Sum of the times of all collectives."""
    notes: list[str]
    skipped: list[str]
    overlap: Overlap | None = None
    """What the ranks did with their time; None where no window was traced."""
    schema: str = "crossrank-bandwidth 1"
    crossrank: str = crossrank.__version__


_RATE = re.compile(r"(?P<number>\d{1,9}(?:\.\d{1,9})?)\s*(?P<unit>[kMGT]?)(?P<what>bps|bit/s|b/s|Bps|B/s)")
_SCALE = {"": 1e-9, "k": 1e-6, "M": 1e-3, "G": 1.0, "T": 1e3}
_ANY = "any"
LOCALITIES: tuple[str, ...] = get_args(Locality)


def gb_per_s(text: str) -> float | None:
    """GB/s (1e9 bytes) from a rate in bits or bytes; None where it is none.

    >>> gb_per_s("400Gbps"), gb_per_s("50 GB/s"), gb_per_s("50")
    (50.0, 50.0, None)
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        return None
    return float(match["number"]) * _SCALE[match["unit"]] / (8 if match["what"].startswith("b") else 1)


def line_rates(texts: Iterable[str]) -> dict[str, float]:
    """GB/s (1e9 bytes) by locality, `any` for what has none of its own, from texts such as `cross_node=400Gbps`.

    >>> line_rates(["400Gbps", "intra_node=450GB/s"])
    {'any': 50.0, 'intra_node': 450.0}
    """
    rates = {}
    for text in texts:
        locality, _, number = text.strip().rpartition("=")
        rate = gb_per_s(number)
        if not rate or locality not in ("", *LOCALITIES):
            raise CrossrankError(
                f"--line-rate {text!r} is not [LOCALITY=]RATE, for example 400Gbps, 50GB/s or intra_node=450GB/s; "
                f"LOCALITY is one of {', '.join(LOCALITIES)}"
            )
        rates[locality or _ANY] = rate
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
        timed_calls=int(found.calls[found.measured].sum()),
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
        notes=list(dict.fromkeys(note for one in ranks for note in (*one.notes, *one.named_problems))),
        skipped=list(skipped),
        overlap=overlap_of(ranks, found),
    )


_BUCKET_ENDS = (0, *(1024 * 4**power for power in range(27)))


def bucket_of(size: int) -> tuple[int, int]:
    """First and last size of the bucket that a size falls into: up to 1 KiB, 4 KiB, 16 KiB, ….

    >>> bucket_of(0), bucket_of(1), bucket_of(1024), bucket_of(1025)
    ((0, 0), (1, 1024), (1, 1024), (1025, 4096))
    """
    place = bisect_left(_BUCKET_ENDS, size)
    return _BUCKET_ENDS[place - 1] + 1 if place else 0, _BUCKET_ENDS[place]


def make_rows(found: Collectives, by: Sequence[str], rates: dict[str, float]) -> list[BandwidthRow]:
    """One row per combination of what is grouped by; the one that takes longest first."""
    import polars as pl

    keys = [column for name in by for column in KEYS[name]]
    collectives = found.collectives_frame().with_row_index("collective").drop_nulls("time")
    sizes = [(size, *bucket_of(size)) for size in collectives["bytes"].drop_nulls().unique()]
    buckets = pl.DataFrame(sizes, schema=dict.fromkeys(("bytes", *KEYS["size"]), pl.Int64), orient="row")
    collectives = collectives.join(buckets, on="bytes", how="left", maintain_order="left")
    calls = found.calls_frame("collective", "calls", "began", "ended", "waiting").filter(pl.col("ended") != 0)
    of_row = collectives.select(pl.col("collective").cast(pl.Int64), *keys)
    of_calls = (
        calls.join(of_row, on="collective")
        .with_columns(pl.col("waiting").replace(-1, None), kernel=pl.col("ended") - pl.col("began"))
        .group_by(keys)
        .agg(pl.col("calls").sum(), _spread("kernel", _OF_TIMES), _spread("waiting", _OF_TIMES))
    )
    of_collectives = collectives.group_by(keys, maintain_order=True).agg(
        pl.len().alias("collectives"),
        pl.col("bytes", "unsized", "bound").sum(),
        pl.col("locality").unique().alias("localities"),
        _spread("time", _OF_TIMES),
        _spread("algbw", _OF_RATES),
        _spread("busbw", _OF_RATES),
    )
    rows = []
    for one in of_collectives.join(of_calls, on=keys, nulls_equal=True, maintain_order="left").iter_rows(named=True):
        group = found.groups[one["group"]] if "group" in by else None
        places = one["localities"]
        rate = rates.get(places[0] if len(places) == 1 else "", rates.get(_ANY))
        busbw = _rounded(one["busbw"], _four_digits)
        times: dict[str, Any] = {f"{name}_us": _rounded(one[name], _microseconds) for name in _TIMES}
        row = BandwidthRow(
            **{name: one[name] for name in keys if name != "group"},
            pg=group.name if group else None,
            desc=group.desc if group else None,
            ranks=group.size if group else None,
            **{name: one[name] for name in ("collectives", "calls", "bytes", "unsized")},
            **times,
            algbw_gb_per_s=_rounded(one["algbw"], _four_digits),
            busbw_gb_per_s=busbw,
            line_rate_gb_per_s=rate,
            line_rate_share={name: round(value / rate, 4) for name, value in busbw.items()} if busbw and rate else None,
            upper_bounds=one["bound"],
        )
        rows.append(row)
    return sorted(rows, key=lambda one: (-one.time_us["total"], one.op or "", one.pg or ""))


def _spread(column: str, names: Sequence[str]) -> pl.Expr:
    """Percentiles, `max` and `total` of a column, as a struct in its place."""
    import polars as pl

    of = pl.col(column)
    whole = {"max": of.max(), "total": of.sum()}
    made = [whole[name] if name in whole else of.quantile(int(name[1:]) / 100, "linear") for name in names]
    return pl.struct([one.alias(name) for one, name in zip(made, names, strict=True)]).alias(column)


def _rounded(spread: Spread, rounded: Callable[[float], float]) -> Spread | None:
    return None if spread["p50"] is None else {name: rounded(value) for name, value in spread.items()}


def _microseconds(ns: float) -> float:
    return round(ns / 1000, 3)


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")
