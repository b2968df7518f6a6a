"""What a probe found: how long each group of ranks took beside those like it, and which rank or link that blames.

A group's time in a pass is from its first member's launch to its last member's end, for all come from a barrier; the
median over the passes counts. Its ratio is that time over the lower quartile of the groups like it (as many ranks, the
same bytes, on one host or across several), so that many slow ones are told from few quick ones.

A rank is in several groups, and one slow partner slows a group: what tells of the rank itself is the quarter of its
groups that is quickest, in a bisection the quickest, for there it is with the same partners again and again. Groups
across hosts and within one are judged apart, since a slow network card slows the first alone; the score of a rank is
the largest. It takes two groups to judge a rank by. A link is blamed where a pair is slow in every pass and no rank of
it is to blame.
"""

from __future__ import annotations

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
_LEAST_OF_RANK = 2
"""Groups of a rank that it is judged by."""


class ProbeReport(msgspec.Struct, kw_only=True):
    """`probe.json`."""

    source: str
    kind: str
    backend: str
    world_size: int
    hosts: dict[str, int]
    sizes: list[int]
    rounds: int
    passes: int
    tolerance: float
    others: list[float]
    """Least, median and largest score of the ranks that are not slow."""
    ranks: list[Row]
    """The slowest first: `rank`, `host`, `score` (that of its quick groups, for the `bytes` and the place,
    `across_hosts` or not, at which it is largest), `groups` (how many those are), `quick_us` (time of the quick ones
    among them) and `is_slow`."""
    links: list[Row]
    """Pairs that are slow with each other alone, the slowest first: `ranks`, `hosts`, `bytes`, `ratio`, `us` and
    `ranks_are_well` (both were judged by such groups and are not slow; else it is the link or one of them)."""
    compared: int
    """Groups that others are like."""
    alone: int
    """Groups with too few like them to compare, which count for nothing."""
    not_judged: list[Int]
    """Ranks with too few groups to be judged by."""
    schema: str = "crossrank-probe 1"
    crossrank: str = crossrank.__version__

    @property
    def slow_ranks(self) -> list[Row]:
        return [one for one in self.ranks if one["is_slow"]]


def judge(
    probe: Probe, results: Sequence[RankResult], machines: Sequence[Machine], backend: str, tolerance: float
) -> ProbeReport:
    """Who is slower than `tolerance` times the others like them."""
    took = group_times(probe, results)
    groups = pl.DataFrame(
        {
            "ranks": [list(one.members) for one in probe.groups],
            "bytes": [one.bytes for one in probe.groups],
            "across_hosts": [one.across_hosts for one in probe.groups],
            "ns": [float(median(one)) for one in took],
            "us": [median(one) / 1000 for one in took],
            "least": list(map(min, took)),
        }
    )
    alike = (pl.col("ranks").list.len(), "bytes", "across_hosts")
    compared = groups.filter(pl.len().over(*alike) >= LEAST_ALIKE)
    compared = compared.with_columns(base=_quick(pl.col("ns")).clip(1.0).over(*alike))
    hosts = [one.host for one in machines]
    kinds = _judged(compared, hosts, pl.Expr.min if probe.kind == "bisect" else _quick, tolerance)
    judged = set(kinds.select("rank", "bytes", "across_hosts").iter_rows())
    ranks = kinds.unique("rank", keep="first", maintain_order=True)
    slow = set(ranks.filter("is_slow")["rank"])
    is_slow_pair = (pl.col("ranks").list.len() == 2) & (pl.col("least") > tolerance * pl.col("base"))
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
        others=[healthy[0], median_low(healthy), healthy[-1]] if healthy else [],
        ranks=ranks.to_dicts(),
        links=sorted(links, key=lambda link: -link["ratio"]),
        compared=len(compared),
        alone=len(groups) - len(compared),
        not_judged=sorted({*range(len(machines))} - {*ranks["rank"]}),
    )


def group_times(probe: Probe, results: Sequence[RankResult]) -> list[list[int]]:
    """By group: ns in each pass, from its first member's launch to its last member's end."""
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


def _judged(
    compared: pl.DataFrame, hosts: Sequence[str], quick: Callable[[pl.Expr], pl.Expr], tolerance: float
) -> pl.DataFrame:
    """What the groups of a rank of one size and place say of it: the rows of `ProbeReport.ranks`, several of a rank."""
    kinds = (
        compared.explode("ranks")
        .rename({"ranks": "rank"})
        .group_by("rank", "bytes", "across_hosts", maintain_order=True)
        .agg(score=quick(pl.col("ns") / pl.col("base")), groups=pl.len(), quick_us=quick(pl.col("us")))
        .filter(pl.col("groups") >= _LEAST_OF_RANK)
        .sort(-pl.col("score"), "rank", maintain_order=True)
    )
    host = pl.Series(hosts, dtype=pl.String).gather(kinds["rank"])
    columns = ("rank", "host", "score", "bytes", "across_hosts", "groups", "quick_us", "is_slow")
    return kinds.with_columns(host=host, is_slow=pl.col("score") > tolerance).select(columns)


def _quick(values: pl.Expr) -> pl.Expr:
    return values.quantile(0.25, "lower")


_RANKS: Columns[Row] = (
    ("#rank", lambda one: one["rank"]),
    ("host", lambda one: one["host"]),
    ("#against those like it", lambda one: f"{one['score']:.2f} x"),
    ("#its quick groups us", lambda one: microseconds(one["quick_us"])),
    ("#size", lambda one: amount(one["bytes"])),
    ("#groups", lambda one: one["groups"]),
    ("", lambda one: "across hosts" if one["across_hosts"] else "on its host"),
)


def print_probe(report: ProbeReport) -> None:
    """Who is slow, and by what that is known."""
    sizes = " and ".join(amount(size) for size in report.sizes)
    print(
        f"{printable(report.source)}: probed {report.kind} of {report.world_size} ranks on "
        f"{plural(len(report.hosts), 'host')} with {report.backend}: {plural(report.compared, 'group')} in "
        f"{plural(report.rounds, 'round')} for each of its sizes ({sizes}), medians of {report.passes} pass(es)"
    )
    if report.alone:
        print(f"  {plural(report.alone, 'group')} had too few like them to be compared, and say nothing")
    if report.not_judged:
        print(
            f"  of rank {rank_ranges(report.not_judged)} there were too few groups to judge it; --groups pairs has more"
        )
    title = "Ranks, the slowest first: the quick ones of a rank's groups tell of the rank itself"
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
            f"Slow: {who} {printable(host)}, up to {most:.2f} x those like it (tolerance {report.tolerance:g}{others})"
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
    if not slow and not report.links:
        print(f"No rank and no link that was compared is slower than {report.tolerance:g} x those like it{others}")
