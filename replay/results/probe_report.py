"""Reports the result of a probe: the time of each group relative to similar groups, and the slow ranks and links.

A group's time in a pass is from its first member's launch to its last member's end, since all start after a barrier.
The median over the passes counts. Its ratio is this time divided by the lower quartile of similar groups: equal size,
equal bytes, equal placement (one host or several). So it finds slow groups even if they are the majority.

A slow partner slows a group, so a rank's score is the lower quartile of its groups' ratios. In a bisection it is the
minimum, since the partners repeat. Groups across hosts and within one are judged separately, because a slow network
card slows only the first; the larger score counts. A rank needs two groups. A link is slow if a pair is slow in every
pass and neither of its ranks is slow.

A ratio counts only if chance does not explain it. Times of the same group differ between passes by a factor that has a
90th percentile d in similar groups. Then medians over n passes differ by up to d ** (1.6 / sqrt(n)): the *noise*. With
normal logarithms of the times, d is 2.3 standard deviations, and this factor 3 standard deviations of a median. So it
rarely happens to one of hundreds of groups. With one pass, the noise is unknown, and no rank or link is called slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median, median_low

import msgspec
import numpy as np
import polars as pl

import crossrank
from crossrank.comm import Int
from crossrank.replay.plan.probe import LEAST_ALIKE, Machine, Probe
from crossrank.replay.run.messages import RankResult
from crossrank.text import amount, microseconds, plural, printable, rank_ranges
from crossrank.tools.output.console import Columns, table_of
from crossrank.tools.tables import Row

_SHOWN = 20
_MIN_GROUPS = 2
"""The fewest groups for a score."""
_NOISE = 1.6
"""See the top of this module."""


class ProbeReport(msgspec.Struct, kw_only=True):
    """The content of `probe.json`."""

    source: str
    kind: str
    backend: str
    world_size: int
    hosts: dict[str, int]
    sizes: list[int]
    rounds: int
    passes: int
    tolerance: float
    noise: float | None
    """The largest factor by which chance explains differences of similar groups; None after a single pass."""
    others: list[float]
    """Smallest, median and largest score of the ranks that are not slow."""
    ranks: list[Row]
    """The slowest rank first. `score` is the largest over `bytes` and `across_hosts`, which have its case; `groups` is
    the number of groups there, `quick_us` their lower quartile (bisect: minimum). Other columns: `rank`, `host`,
    `is_slow`."""
    links: list[Row]
    """Pairs that are slow only with each other, slowest first: `ranks`, `hosts`, `bytes`, `ratio`, `us` and
    `ranks_are_well` (both were judged in such groups and are not slow; otherwise one of them may be slow)."""
    compared: int
    """Groups with enough similar groups."""
    alone: int
    """Groups with too few similar groups, or without a known time, which are ignored."""
    not_judged: list[Int]
    """Ranks with too few groups for a score."""
    schema: str = "crossrank-probe 1"
    crossrank: str = crossrank.__version__

    @property
    def slow_ranks(self) -> list[Row]:
        return [one for one in self.ranks if one["is_slow"]]


def judge(
    probe: Probe, results: Sequence[RankResult], machines: Sequence[Machine], backend: str, tolerance: float
) -> ProbeReport:
    """Find the ranks and links that are slower than `tolerance` times similar ones."""
    took = group_times(probe, results)
    groups = pl.DataFrame(
        {
            "ranks": [list(one.members) for one in probe.groups],
            "size": [len(one.members) for one in probe.groups],
            "bytes": [one.bytes for one in probe.groups],
            "across_hosts": [one.across_hosts for one in probe.groups],
            "ns": [float(median(one)) for one in took],
            "us": [median(one) / 1000 for one in took],
            "least": list(map(min, took)),
            "changes": [np.abs(np.diff(np.log(np.maximum(one, 1)))).tolist() for one in took],
        }
    )
    alike = ("size", "bytes", "across_hosts")
    compared = groups.filter(pl.col("ns") > 0).filter(pl.len().over(*alike) >= LEAST_ALIKE)
    changes = pl.col("changes").explode().quantile(0.9, "higher")
    noise = compared.group_by(*alike).agg(noise=(changes * (_NOISE / math.sqrt(len(took[0])))).exp())
    limit = pl.when(pl.col("noise").is_not_null()).then(pl.max_horizontal("noise", pl.lit(tolerance)))
    compared = compared.join(noise, on=alike).with_columns(base=_lower_quartile(pl.col("ns")).over(*alike), limit=limit)
    hosts = [one.host for one in machines]
    kinds = _judge_ranks(compared, hosts, pl.Expr.min if probe.kind == "bisect" else _lower_quartile)
    judged = set(kinds.select("rank", "bytes", "across_hosts").iter_rows())
    ranks = kinds.unique("rank", keep="first", maintain_order=True)
    slow = set(ranks.filter("is_slow")["rank"])
    is_slow_pair = (pl.col("size") == 2) & (pl.col("least") > pl.col("limit") * pl.col("base"))
    links = [
        {
            "ranks": one["ranks"],
            "hosts": [hosts[rank] for rank in one["ranks"]],
            "bytes": one["bytes"],
            "ratio": one["ns"] / one["base"],
            "us": one["us"],
            "ranks_are_well": all((rank, one["bytes"], one["across_hosts"]) in judged for rank in one["ranks"]),
        }
        for one in compared.filter(is_slow_pair).iter_rows(named=True)
        if not slow & set(one["ranks"])
    ]
    healthy = ranks.filter(~pl.col("is_slow"))["score"].sort().to_list()
    return ProbeReport(
        source=probe.plan.source,
        kind=probe.kind,
        backend=backend,
        world_size=len(machines),
        hosts={host: hosts.count(host) for host in dict.fromkeys(hosts)},
        sizes=probe.sizes,
        rounds=probe.rounds,
        passes=len(results[0].passes),
        tolerance=tolerance,
        noise=max(noise["noise"].drop_nulls(), default=None),
        others=[healthy[0], median_low(healthy), healthy[-1]] if healthy else [],
        ranks=ranks.to_dicts(),
        links=sorted(links, key=lambda link: -link["ratio"]),
        compared=len(compared),
        alone=len(groups) - len(compared),
        not_judged=sorted({*range(len(machines))} - {*ranks["rank"]}),
    )


def group_times(probe: Probe, results: Sequence[RankResult]) -> list[list[int]]:
    """Return, by group, the ns in each pass from its first member's launch to its last member's end."""
    moments = {}
    for result in results:
        columns = b"".join(getattr(one, name) for name in ("launched", "completed") for one in result.passes)
        by_pass = np.frombuffer(columns, np.int64).reshape(2, len(result.passes), -1)
        moments[result.rank] = by_pass + result.offset_ns
    took = []
    for group in probe.groups:
        both = zip(group.members, group.indices, strict=True)
        launched, completed = np.stack([moments[rank][:, :, index] for rank, index in both], axis=1)
        took.append((completed.max(axis=0) - launched.min(axis=0)).tolist())
    return took


def _judge_ranks(compared: pl.DataFrame, hosts: Sequence[str], quick_of: Callable[[pl.Expr], pl.Expr]) -> pl.DataFrame:
    """Return a score for each rank, size and placement: the rows of `ProbeReport.ranks`, several for a rank."""
    kinds = (
        compared.explode("ranks")
        .rename({"ranks": "rank"})
        .group_by("rank", "bytes", "across_hosts", maintain_order=True)
        .agg(
            pl.max("limit"),
            score=quick_of(pl.col("ns") / pl.col("base")),
            groups=pl.len(),
            quick_us=quick_of(pl.col("us")),
        )
        .filter(pl.col("groups") >= _MIN_GROUPS)
        .with_columns(is_slow=(pl.col("score") > pl.col("limit")).fill_null(value=False))
        .sort(~pl.col("is_slow"), -pl.col("score"), "rank", maintain_order=True)
    )
    host = pl.Series(hosts, dtype=pl.String).gather(kinds["rank"])
    columns = ("rank", "host", "score", "bytes", "across_hosts", "groups", "quick_us", "is_slow")
    return kinds.with_columns(host=host).select(columns)


def _lower_quartile(values: pl.Expr) -> pl.Expr:
    return values.quantile(0.25, "lower")


_RANKS: Columns[Row] = (
    ("#rank", lambda one: one["rank"]),
    ("host", lambda one: one["host"]),
    ("#vs similar ranks", lambda one: f"{one['score']:.2f} x"),
    ("#fast groups us", lambda one: microseconds(one["quick_us"])),
    ("#size", lambda one: amount(one["bytes"])),
    ("#groups", lambda one: one["groups"]),
    ("", lambda one: "across hosts" if one["across_hosts"] else "on its host"),
)


def print_probe(report: ProbeReport) -> None:
    """Print the slow ranks and links, and their measurements."""
    sizes = " and ".join(amount(size) for size in report.sizes)
    print(
        f"{printable(report.source)}: probed {report.kind} of {report.world_size} ranks on "
        f"{plural(len(report.hosts), 'host')} with {report.backend}: {plural(report.compared, 'group')} in "
        f"{plural(report.rounds, 'round')} for each of its sizes ({sizes}), medians of {report.passes} pass(es)"
    )
    if report.alone:
        print(f"  {plural(report.alone, 'group')} have too few similar groups to compare")
    if report.not_judged:
        print(f"  of rank {rank_ranges(report.not_judged)} too few groups to judge it; --groups pairs has more")
    title = "Ranks, slowest first, by the fast groups of each rank"
    table_of(report.ranks[:_SHOWN], _RANKS).print(title)
    slow = report.slow_ranks
    others = f"; the others {report.others[0]:.2f} to {report.others[-1]:.2f}" if report.others else ""
    print()
    for host in dict.fromkeys(one["host"] for one in slow):
        mine = [one for one in slow if one["host"] == host]
        whole = len(mine) == report.hosts[host] and len(report.hosts) > 1
        ranks = rank_ranges([one["rank"] for one in mine])
        who = f"all {plural(len(mine), 'rank')} of" if whole else f"rank {ranks} on"
        most = max(one["score"] for one in mine)
        print(
            f"Slow: {who} {printable(host)}, up to {most:.2f} x similar ones (tolerance {report.tolerance:g}{others})"
        )
    for link in report.links[:_SHOWN]:
        print(
            f"Slow link: rank {link['ranks'][0]} ({printable(link['hosts'][0])}) with rank {link['ranks'][1]} "
            f"({printable(link['hosts'][1])}), {link['ratio']:.2f} x pairs like it with "
            f"{amount(link['bytes'])} ({microseconds(link['us'])} us)"
            + (", and neither of them with others" if link["ranks_are_well"] else ": the link, or one of the two")
        )
    if len(report.links) > _SHOWN:
        print(f"and {len(report.links) - _SHOWN:,} more links")
    if report.noise is None:
        print("One pass does not show how much these times change by chance: no rank or link is judged. Use --repeat 5")
    elif not slow and not report.links:
        limit = max(report.tolerance, report.noise)
        print(f"No compared rank or link is slower than {limit:.4g} x similar ones{others}")
    if report.noise is not None and report.noise > report.tolerance:
        print(
            f"Times of the same group change from pass to pass: chance explains up to {report.noise:.3g} x. "
            "More passes (--repeat) lower this; more ranks than cores on a host raise it"
        )
