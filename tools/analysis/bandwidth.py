"""Times and rates of collectives, grouped by what the user chooses.

`crossrank.tools.job.collectives` measures each collective; this module groups them into rows.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import get_args

import msgspec
import polars as pl

import crossrank
from crossrank.comm import Locality
from crossrank.errors import CrossrankError
from crossrank.text import plural
from crossrank.tools.analysis.overlap import Overlap, overlap_of
from crossrank.tools.analysis.waiting import openings
from crossrank.tools.job.clocks import Clocks
from crossrank.tools.job.collectives import JobTables
from crossrank.tools.job.job import notes_of
from crossrank.tools.tables import ANSWERS, Row

KEYS = {
    "op": ("op",),
    "group": ("group",),
    "size": ("size_from", "size_to"),
    "locality": ("locality",),
    "source": ("source",),
}
"""`--by` -> the columns to group by."""
BY = ("op", "group", "size", "locality")

_FACTS = ("label", "group", "locality", "source")
_GROUPED_BY = ("op", "group", "size_from", "size_to", "locality", "source")


class Bandwidth(msgspec.Struct, kw_only=True):
    """`bandwidth.json`."""

    inputs: list[str]
    sources: dict[str, int]
    """Source of the times -> number of ranks."""
    world_size: int
    ranks: list[int]
    missing_ranks: list[int]
    calls: int
    """All calls in the files."""
    timed_calls: int
    collectives: int
    timed_collectives: int
    attributed: dict[str, int]
    """How times were measured -> number of calls or kernels, over all ranks."""
    unattributed: dict[str, int]
    """Reason why a call has no time, or a kernel no call -> number of them, over all ranks."""
    unattributed_ms: float
    """Time of communication kernels without a known call, over all ranks."""
    openings: int
    """Collectives whose waits do not count: see `openings` in `waiting.py`."""
    matched: dict[str, int]
    """What joins calls of several ranks -> number of these calls, the best key first."""
    not_compared: dict[str, int]
    """Reason why calls were not compared across ranks -> number of calls."""
    clocks: Clocks
    by: list[str]
    rows: list[Row]
    total_ms: float
    """Sum of the times of all collectives."""
    notes: list[str]
    skipped: list[str]
    overlap: Overlap | None = None
    """Time per rank; None if no window was traced."""
    schema: str = "crossrank-bandwidth 1"
    crossrank: str = crossrank.__version__


_RATE = re.compile(r"(?P<number>\d{1,9}(?:\.\d{1,9})?)\s*(?P<unit>[kMGT]?)(?P<what>bps|bit/s|b/s|Bps|B/s)")
_SCALE = {"": 1e-9, "k": 1e-6, "M": 1e-3, "G": 1.0, "T": 1e3}
_ANY = "any"
LOCALITIES: tuple[str, ...] = get_args(Locality)


def gb_per_s(text: str) -> float | None:
    """Return GB/s (1e9 bytes) of a rate in bits or bytes; None if `text` is not a rate.

    >>> gb_per_s("400Gbps"), gb_per_s("50 GB/s"), gb_per_s("50")
    (50.0, 50.0, None)
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        return None
    return float(match["number"]) * _SCALE[match["unit"]] / (8 if match["what"].startswith("b") else 1)


def line_rates(texts: Iterable[str]) -> dict[str, float]:
    """Return GB/s (1e9 bytes) by locality from texts such as `cross_node=400Gbps`; `any` is for all other localities.

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
    found: JobTables,
    *,
    inputs: Sequence[str] = (),
    by: Sequence[str] = BY,
    rates: dict[str, float] | None = None,
    classes: Sequence[str] = (),
) -> Bandwidth:
    """Return the answer of `crossrank bandwidth`. `classes` has a new name for each group; groups with one name are
    counted together."""
    ranks, timed = found.job.ranks.values(), found.timed
    calls = found.about(found.calls.select("kind", "ended_ns"), "calls")
    return Bandwidth(
        inputs=list(inputs),
        sources=dict(Counter(one.timed_by for one in ranks)),
        world_size=len(found.job.world),
        ranks=list(found.job.ranks),
        missing_ranks=found.job.missing,
        calls=int(calls["calls"].sum()),
        timed_calls=int(calls.drop_nulls("ended_ns")["calls"].sum()),
        collectives=len(found.collectives),
        timed_collectives=len(timed),
        attributed=dict(found.attributed.most_common()),
        unattributed=dict(found.unattributed.most_common()),
        unattributed_ms=round(sum(one.unattributed_ns for one in ranks) / 1e6, 3),
        openings=openings(found),
        matched=_matched(found),
        not_compared=found.unmatched,
        clocks=found.clocks,
        by=list(by),
        rows=ANSWERS["bandwidth"].rows(bandwidth_rows(found, by, rates or {}, classes)),
        total_ms=round(int(timed["time_ns"].sum()) / 1e6, 3),
        notes=notes_of((one.rank or 0, (*one.notes, *one.named_problems)) for one in ranks),
        skipped=found.job.skipped,
        overlap=overlap_of(found),
    )


_KEYS = {False: "the numbers that torch or the recorder gave them", True: "their order in the group, counted"}


def _matched(found: JobTables) -> dict[str, int]:
    joined = found.calls.select("counted").filter(found.of_collective("launches")["launches"] > 1)
    counts = dict(joined.group_by("counted").len().iter_rows())
    return {text: counts[key] for key, text in _KEYS.items() if key in counts}


_BUCKET_ENDS = (0, *(1024 * 4**power for power in range(27)))


def bucket_of(size: int) -> tuple[int, int]:
    """Return first and last size of the bucket of a size: up to 1 KiB, 4 KiB, 16 KiB, ….

    >>> bucket_of(0), bucket_of(1), bucket_of(1024), bucket_of(1025)
    ((0, 0), (1, 1024), (1, 1024), (1025, 4096))
    """
    index = bisect_left(_BUCKET_ENDS, size)
    return _BUCKET_ENDS[index - 1] + 1 if index else 0, _BUCKET_ENDS[index]


def bandwidth_rows(
    found: JobTables, by: Sequence[str], rates: dict[str, float], classes: Sequence[str] = ()
) -> pl.DataFrame:
    """Return the rows of `bandwidth`: one per combination of the `by` columns, sorted by total time, longest first."""
    keys = [column for name in by for column in KEYS[name]]
    groups = _groups(found, classes)
    timed = found.about(found.collectives.with_row_index("collective").drop_nulls("time_ns"), *_FACTS)
    sizes = [(size, *bucket_of(size)) for size in timed["bytes"].drop_nulls().unique()]
    buckets = pl.DataFrame(sizes, schema=dict.fromkeys(("bytes", *KEYS["size"]), pl.Int64), orient="row")
    timed = (
        timed.with_columns(groups["group"].gather(timed["group"]), unsized=pl.col("bytes").is_null())
        .join(buckets, on="bytes", how="left", maintain_order="left")
        .rename({"label": "op"})
    )
    calls = found.about(found.calls.drop_nulls("ended_ns"), "calls").join(
        timed.select("collective", *keys), on="collective"
    )
    of_calls = calls.group_by(keys).agg(
        pl.sum("calls"),
        kernel_us=_times(pl.col("ended_ns") - pl.col("began_ns")),
        waiting_us=_times(pl.col("waiting_ns")),
    )
    rows = (
        timed.group_by(keys, maintain_order=True)
        .agg(
            pl.len().alias("collectives"),
            pl.sum("unsized"),
            bytes=known_sum("bytes"),
            time_us=_times(pl.col("time_ns")),
            algbw_gb_per_s=_rates(pl.col("algbw_gb_per_s")),
            busbw_gb_per_s=_rates(pl.col("busbw_gb_per_s")),
            upper_bounds=pl.sum("is_upper_bound"),
            place=pl.when(pl.n_unique("locality") == 1).then(pl.first("locality").cast(pl.String)).fill_null(_ANY),
        )
        .join(of_calls, on=keys, nulls_equal=True, maintain_order="left")
        .with_columns(pl.lit(None, pl.Int64).alias(name) for name in _GROUPED_BY if name not in keys)
        .join(groups.unique("group"), on="group", how="left", maintain_order="left")
    )
    line_rate = pl.col("place").replace_strict({_ANY: None, **rates}, default=rates.get(_ANY), return_dtype=pl.Float64)
    share = pl.struct((pl.col("busbw_gb_per_s").struct.field("*") / pl.col("line_rate_gb_per_s")).round(4))
    has_share = pl.col("line_rate_gb_per_s").is_not_null() & pl.col("busbw_gb_per_s").is_not_null()
    return (
        rows.with_columns(line_rate_gb_per_s=line_rate)
        .with_columns(line_rate_share=pl.when(has_share).then(share))
        .sort(
            -pl.col("time_us").struct.field("total"),
            pl.col("op", "pg").cast(pl.String).fill_null(""),
            maintain_order=True,
        )
        .select(*ANSWERS["bandwidth"].columns)
    )


def sentence(rows: pl.DataFrame) -> str:
    """Return what the rows of `bandwidth_rows` show, in one sentence."""
    if not len(rows):
        return "no bandwidth: no call has a measured time"
    total, count = float(rows["time_us"].struct.field("total").sum()) / 1e3, int(rows["collectives"].sum())
    most = rows.row(0, named=True)
    group = most["desc"] or most["pg"]
    what = " ".join([most["op"] or "one row", *([f"of group {group}"] if group else [])])
    bounds = int(rows["upper_bounds"].sum())
    waits = f" ({bounds:,} may include waiting)" if bounds else ""
    timed = plural(count, "timed collective or transfer", "timed collectives and transfers")
    return f"{timed} took {total:,.3f} ms{waits}; {what} took most, {most['time_us']['total'] / 1e3:,.3f} ms"


def _groups(found: JobTables, classes: Sequence[str]) -> pl.DataFrame:
    """Return one row per group of the job: the `group` it is counted as, with that group's name, description, size."""
    first = {name: number for number, name in reversed(list(enumerate(classes)))}
    counts_as = [first[name] for name in classes] or range(len(found.job.groups))
    rows = []
    for number in counts_as:
        group = found.job.groups[number]
        name, desc = (classes[number], "") if classes else (group.name, group.desc)
        rows.append((number, name, desc, group.known_size))
    schema = {"group": pl.Int64, "pg": pl.String, "desc": pl.String, "ranks": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _times(ns: pl.Expr) -> pl.Expr:
    """Return p50, p95, max and total, in us."""
    spread = {"p50": ns.quantile(0.5, "linear"), "p95": ns.quantile(0.95, "linear"), "max": ns.max(), "total": ns.sum()}
    return _struct(ns, {name: (one / 1000).round(3) for name, one in spread.items()})


def _rates(gb_per_s: pl.Expr) -> pl.Expr:
    """Return p5, p50, p95 and max, rounded to four digits."""
    spread = {f"p{percent}": gb_per_s.quantile(percent / 100, "linear") for percent in (5, 50, 95)}
    return _struct(gb_per_s, {name: one.round_sig_figs(4) for name, one in (spread | {"max": gb_per_s.max()}).items()})


def known_sum(column: str) -> pl.Expr:
    """Return the sum of the known values of a column; null if none is known."""
    return pl.when(pl.count(column) > 0).then(pl.sum(column)).alias(column)


def _struct(values: pl.Expr, spread: dict[str, pl.Expr]) -> pl.Expr:
    return pl.when(values.count() > 0).then(pl.struct(one.alias(name) for name, one in spread.items()))
