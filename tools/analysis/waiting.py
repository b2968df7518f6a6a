"""Waiting times between ranks over the run, and durations of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import polars as pl

from crossrank.tools.job.collectives import JobTables
from crossrank.tools.tables import ANSWERS, Row
from crossrank.tools.traces.rank_trace import RankTrace

_MOST_BINS = 120
_MOST_ROWS = 128
_MOST_STEPS = 2000
_ROWS_PER_PART = 1 << 18
_MOST_RANKS = 16
"""Ranks in a list."""


class Waiting(msgspec.Struct, kw_only=True):
    """Waiting times between ranks, over the run."""

    measured: str
    """What the waiting times are computed from: times of communication, or times of calls on the host."""
    by_calls: bool
    """Whether that is the times of calls on the host."""
    axis: str
    """Unit of the bins: `step`, or ms since the start."""
    bins: list[float]
    """Start of each bin."""
    p50_us: list[float | None]
    p95_us: list[float | None]
    max_us: list[float | None]
    rows: list[str]
    """Ranks, or blocks of ranks."""
    mean_us: list[list[float | None]]
    """Row -> bin -> mean waiting time of its calls."""
    last: list[Row]
    """Ranks that other ranks waited for, longest first."""
    waiters: list[Row]
    """Ranks with the longest total waiting time."""
    openings: int
    """Collectives that `last` and `waiters` do not count: see `openings`."""


class Steps(msgspec.Struct, kw_only=True):
    """Durations of steps, or of a part of each step."""

    step: list[int]
    p50_ms: list[float]
    """Over the ranks; so are the next two."""
    least_ms: list[float]
    most_ms: list[float]


def waiting_of(found: JobTables) -> Waiting | None:
    """Return the waiting times between ranks; None if no ranks can be compared."""
    calls = _calls(found)
    placed = all(one.placed for one in found.job.ranks.values())
    measured = "start and end times of communication" if placed else "durations of communication on each rank"
    by_calls = not _has_times(found)
    if by_calls:
        measured = "the times at which the hosts made their calls"
    shown = calls.drop_nulls(("wait", "moment"))
    if not len(shown.filter(pl.col("wait") > 0)):
        return None
    shown, begins, axis = _bins(shown)
    places = range(len(begins))
    count = max(found.job.ranks) + 1
    width = -(-count // _MOST_ROWS)
    blocks = range(0, count, width)
    us = pl.col("wait") / 1000
    of_bin = shown.group_by("bin").agg(us.median(), us.quantile(0.95, "linear").alias("p95"), us.max().alias("max"))
    spread = {place: values for place, *values in of_bin.iter_rows()}
    # A bin without waits has no values.
    p50, p95, most = ([_tenths(spread[at][n] if at in spread else None) for at in places] for n in range(3))
    arrived = _count_arrivals(calls, list(found.job.ranks)).with_columns(of="collectives")
    means = shown.group_by(pl.col("rank") // width, "bin").agg(us.mean())
    mean_of = {(block, place): mean for block, place, mean in means.iter_rows()}
    return Waiting(
        measured=measured,
        by_calls=by_calls,
        axis=axis,
        bins=begins,
        p50_us=p50,
        p95_us=p95,
        max_us=most,
        rows=[f"rank {first}" if width == 1 else f"rank {first}-{first + width - 1}" for first in blocks],
        mean_us=[[_tenths(mean_of.get((block, at))) for at in places] for block in range(len(blocks))],
        last=ANSWERS["last"].rows(with_most(arrived, "waited_for_ns").with_columns(cost_ms=in_ms("waited_for_ns"))),
        waiters=ANSWERS["waiters"].rows(with_most(arrived, "waiting_ns").with_columns(waiting_ms=in_ms("waiting_ns"))),
        openings=openings(found),
    )


def openings(found: JobTables) -> int:
    """Return the number of collectives that are the first of a rank in a profiler window. The start of the profilers
    delays the ranks there, so no wait is known."""
    return len(found.collectives.filter(pl.col("opens") & (pl.col("expected") > 1)))


def _tenths(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _has_times(found: JobTables) -> bool:
    return any(found.calls[name].count() for name in ("waiting_ns", "profiler_ns"))


def _calls(found: JobTables) -> pl.DataFrame:
    """Return the launches with `wait` (ns), its start `moment`, and the number of `launches` of their collective. Uses
    times of communication, or else times of calls on the host."""
    calls = found.calls.select("rank", "kind", "step", "collective", "called_ns", wait="waiting_ns", moment="began_ns")
    shared = found.collectives.select(pl.col("last_rank", "expected").cast(pl.Int32), "opens", "launches")
    calls = calls.hstack(shared[calls["collective"]])
    return calls if _has_times(found) else _wait_by_calls(calls, found)


def _wait_by_calls(calls: pl.DataFrame, found: JobTables) -> pl.DataFrame:
    """Compute waits from the times at which hosts made the calls; needs one clock."""
    calls = calls.with_columns(moment="called_ns")
    if found.clocks.count > 1:
        return calls
    usable = pl.col("releases_all") & pl.col("moment").is_not_null() & (pl.col("launches") > 1) & ~pl.col("opens")
    last = pl.col("moment").filter(usable).max().over("collective")
    calls = found.about(calls, "releases_all").with_columns(wait=pl.when(usable).then(last - pl.col("moment")))
    is_last = (pl.col("wait") == 0) & (pl.max("wait").over("collective") > 0)
    return calls.with_columns(last_rank=pl.col("rank").filter(is_last).last().over("collective"))


def _bins(shown: pl.DataFrame) -> tuple[pl.DataFrame, list[float], str]:
    """Return (calls with `bin`, start of each bin, unit): bins of steps if known, else of time."""
    # All calls of a collective are in one bin.
    shown = shown.with_columns(moment=pl.col("moment").max().over("collective"))
    step, moment = pl.col("step"), pl.col("moment")
    low, high, first, last = shown.select(a=step.min(), b=step.max(), c=moment.min(), d=moment.max()).row(0)
    if not shown["step"].null_count() and high >= 2:
        width = -(-(high - low + 1) // _MOST_BINS)
        count = (high - low) // width + 1
        begins = [float(low + width * number) for number in range(count)]
        return shown.with_columns(bin=(step - low) // width), begins, "step"
    count = min(_MOST_BINS, shown["collective"].n_unique())
    width = -(-(last - first + 1) // count)
    begins = [round(number * width / 1e6, 3) for number in range(count)]
    return shown.with_columns(bin=(moment - first) // width), begins, "ms since the start"


COMPARED = "compared with all others (batches and the starts of profiler windows are not)"
_COUNTED = pl.col("wait").is_not_null() & (pl.col("launches") >= pl.col("expected"))
"""Calls with a known wait in a collective with calls of all members."""


def latest_of(arrivals: pl.DataFrame) -> str:
    """Return which rank of the table `stragglers` others waited for most, in one sentence."""
    arrivals = arrivals.drop_nulls("waited_for_ns")
    if not len(arrivals):
        return ""
    most = arrivals.sort("waited_for_ns", "rank", descending=[True, False]).row(0, named=True)
    return (
        f"others waited most for rank {most['rank']}: {most['waited_for_ns'] / 1e6:,.3f} ms (waits at the same time "
        f"count once); it was last in {most['last']:,} of the {most['collectives']:,} collectives and transfers in "
        f"which its arrival is {COMPARED}"
    )


def count_arrivals(found: JobTables) -> pl.DataFrame:
    """Return one row per rank, over the collectives with calls of all members.

    Columns: the number of `collectives`; in how many the rank was `first` or `last`; `waiting_ns`, how long it waited
    for other ranks; `waited_for_ns`, how long others waited for it. Waits at the same time count once."""
    return _count_arrivals(_calls(found), list(found.job.ranks))


def measure_lateness(found: JobTables) -> pl.DataFrame:
    """Return one row per launch: `late_ns`, how much later than the first rank it arrived; `waiting_ns`, its wait for
    the last rank. Null if ranks cannot be compared. What shows the waits shows how late a rank is: durations, or start
    times on aligned clocks."""
    if _has_times(found):
        moment, wait = pl.when("comparable").then("began_ns"), pl.coalesce("waiting_ns", "profiler_ns")
        calls = found.calls.select("collective", "waiting_ns", moment=moment, wait=wait)
    else:
        calls = _calls(found).select("collective", "moment", "wait", waiting_ns="wait")
        calls = calls if found.clocks.count == 1 else calls.with_columns(moment=None)
    of_collective = calls.lazy().group_by("collective")
    first = of_collective.agg(first=pl.min("moment"), several=pl.count("moment") > 1, longest=pl.max("wait"))
    of_call = first.sort("collective").drop("collective").collect()[calls["collective"]]
    calls = calls.hstack(of_call).hstack(found.of_collective("opens", "by_duration"))
    by_start = pl.when("several").then(pl.col("moment") - pl.col("first"))
    late = pl.when(pl.col("by_duration") & pl.col("wait").is_not_null()).then(pl.col("longest") - pl.col("wait"))
    return calls.select(late.otherwise(by_start).alias("late_ns"), "waiting_ns", opens_window="opens")


def _count_arrivals(calls: pl.DataFrame, ranks: Sequence[int]) -> pl.DataFrame:
    wait, rank, last, moment = map(pl.col, ("wait", "rank", "last_rank", "moment"))
    known = calls.lazy().filter(_COUNTED)
    took_part = known.group_by("rank").agg(collectives=pl.len(), last=(rank == last).sum()).collect()
    late = known.filter((wait > 0) & last.is_not_null())
    # The rank that waited longest in a collective was first. If several did, none was.
    longest_wait = {"rank": rank.filter(wait == wait.max()).min(), "several": (wait == wait.max()).sum() > 1}
    longest = _in_parts(late, ["collective"], lambda part: part.group_by("collective").agg(**longest_wait))
    earliest = longest.filter(~pl.col("several")).group_by("rank").agg(first=pl.len())
    counted = calls.lazy().filter(wait > 0)
    waiting = covered(counted, ["rank"], moment, moment + wait).rename({"ns": "waiting_ns"})
    waited_for = covered(late, ["last_rank"], moment, moment + wait)
    table = pl.DataFrame({"rank": ranks}, schema={"rank": pl.Int32})
    for part in (took_part, earliest, waiting, waited_for.rename({"last_rank": "rank", "ns": "waited_for_ns"})):
        table = table.join(part, on="rank", how="left", maintain_order="left")
    names = ("first", "last", "waiting_ns", "waited_for_ns")
    was_compared = pl.col("collectives").is_not_null()
    counts = (pl.when(was_compared).then(pl.col(name).fill_null(0)).cast(pl.Int64).alias(name) for name in names)
    return table.select(pl.col("rank").cast(pl.Int64), pl.col("collectives").fill_null(0).cast(pl.Int64), *counts)


def covered(spans: pl.LazyFrame, by: Sequence[str], begin: pl.Expr, end: pl.Expr) -> pl.DataFrame:
    """Return `ns`, the time that the spans of each `by` cover; overlapping spans count once."""
    # A span adds its part after the end of all spans that started before it.
    covered_until = pl.max_horizontal("begin", pl.col("end").cum_max().shift(1).over(by))
    return _in_parts(
        spans.select(*by, begin=begin, end=end),
        by,
        lambda part: (
            part.sort(*by, "begin")
            .with_columns(ns=(pl.col("end") - covered_until).clip(0))
            .group_by(by)
            .agg(pl.sum("ns"))
        ),
    )


def _in_parts(rows: pl.LazyFrame, by: Sequence[str], work: Callable[[pl.LazyFrame], pl.LazyFrame]) -> pl.DataFrame:
    """Return the result of `work`, which groups by `by`. If there are many rows, it works on some of the groups after
    the others: its intermediate columns are several times as large as the rows."""
    parts = 1 + rows.select(pl.len()).collect().item() // _ROWS_PER_PART
    if parts == 1:
        return work(rows).collect()
    number = pl.struct(by).hash() % parts
    return pl.concat([work(rows.filter(number == part)).collect() for part in range(parts)])


def with_most(frame: pl.DataFrame, column: str) -> pl.DataFrame:
    """Return the rows of the ranks with the largest values in a column."""
    return frame.filter(pl.col(column) > 0).sort(column, "rank", descending=[True, False]).head(_MOST_RANKS)


def in_ms(ns: str) -> pl.Expr:
    return (pl.col(ns) / 1e6).round(3)


def steps_of(ranks: Sequence[RankTrace]) -> Steps | None:
    """Return the durations of steps. The last step has no end and is skipped."""
    rows = [(step, (end - begin) / 1e6) for one in ranks for step, begin, end in one.step_spans]
    if not rows:
        return None
    return over_ranks(pl.DataFrame(rows, schema={"step": pl.Int64, "ms": pl.Float64}, orient="row"))


def profiler_steps(ranks: Sequence[RankTrace]) -> set[int]:
    """Return the steps in which the profiler of a rank started or stopped: that rank is late, and others wait."""
    return set().union(*(one.profiler_steps or () for one in ranks))


def over_ranks(by_rank: pl.DataFrame) -> Steps:
    """Return statistics over the ranks of the `ms` of each `step`; every n-th step if there are very many."""
    ms = pl.col("ms")
    found = by_rank.group_by("step").agg(p50_ms=ms.median(), least_ms=ms.min(), most_ms=ms.max()).sort("step")
    found = found.gather_every(-(-len(found) // _MOST_STEPS)).with_columns(pl.exclude("step").round(3))
    return Steps(**found.to_dict(as_series=False))
