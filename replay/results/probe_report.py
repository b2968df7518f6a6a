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

from collections import defaultdict
from collections.abc import Sequence
from statistics import median, median_low

import msgspec
import numpy as np

import crossrank
from crossrank.comm import Int
from crossrank.replay.plan.probe import LEAST_ALIKE, Machine, Probe, ProbeGroup
from crossrank.replay.results.measure import RankResult
from crossrank.text import amount, microseconds, plural, printable, rank_ranges
from crossrank.tools.output.console import print_table

_SHOWN = 20
_LEAST_OF_RANK = 2
"""Groups of a rank that it is judged by."""


class ProbedRank(msgspec.Struct, kw_only=True):
    """One rank beside the others."""

    rank: Int
    host: str
    score: float
    """That of its quick groups, for the size and place at which it is largest."""
    bytes: int
    """That size."""
    across_hosts: bool
    """Whether it is of groups across hosts."""
    groups: int
    """How many they are."""
    quick_us: float
    """Time of the quick ones among them."""
    is_slow: bool


class ProbedLink(msgspec.Struct, kw_only=True):
    """Two ranks that are slow with each other alone."""

    ranks: list[Int]
    hosts: list[str]
    bytes: int
    ratio: float
    us: float
    ranks_are_well: bool
    """Both ranks were judged by such groups and are not slow; else it is the link or one of them."""


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
    ranks: list[ProbedRank]
    """The slowest first."""
    links: list[ProbedLink]
    """Those that are slow, the slowest first."""
    compared: int
    """Groups that others are like."""
    alone: int
    """Groups with too few like them to compare, which count for nothing."""
    not_judged: list[Int]
    """Ranks with too few groups to be judged by."""
    schema: str = "crossrank-probe 1"
    crossrank: str = crossrank.__version__

    @property
    def slow_ranks(self) -> list[ProbedRank]:
        return [one for one in self.ranks if one.is_slow]


def judge(
    probe: Probe, results: Sequence[RankResult], machines: Sequence[Machine], backend: str, tolerance: float
) -> ProbeReport:
    """Who is slower than `tolerance` times the others like them."""
    took = group_times(probe, results)
    typical = [median(one) for one in took]
    alike: dict[tuple[int, int, bool], list[int]] = defaultdict(list)
    for number, group in enumerate(probe.groups):
        alike[group.kind].append(number)
    base: dict[int, float] = {}
    for numbers in alike.values():
        if len(numbers) >= LEAST_ALIKE:
            base |= dict.fromkeys(numbers, max(_quick([typical[number] for number in numbers]), 1.0))
    judged = _judged(probe, typical, base, machines, tolerance)
    ranks = sorted(
        (max(mine.values(), key=lambda one: one.score) for mine in judged.values()), key=lambda one: -one.score
    )
    slow = {one.rank for one in ranks if one.is_slow}
    links = [
        ProbedLink(
            ranks=list(group.members),
            hosts=[machines[rank].host for rank in group.members],
            bytes=group.bytes,
            ratio=typical[number] / base[number],
            us=typical[number] / 1000,
            ranks_are_well=all((group.bytes, group.across_hosts) in judged.get(rank, {}) for rank in group.members),
        )
        for number, group in enumerate(probe.groups)
        if number in base
        and len(group.members) == 2
        and not slow & set(group.members)
        and min(took[number]) > tolerance * base[number]
    ]
    healthy = sorted(one.score for one in ranks if not one.is_slow)
    return ProbeReport(
        source=probe.plan.source,
        kind=probe.kind,
        backend=backend,
        world_size=len(machines),
        hosts={host: sum(one.host == host for one in machines) for host in dict.fromkeys(one.host for one in machines)},
        sizes=probe.sizes,
        rounds=probe.rounds,
        passes=len(results[0].passes),
        tolerance=tolerance,
        others=[healthy[0], median_low(healthy), healthy[-1]] if healthy else [],
        ranks=ranks,
        links=sorted(links, key=lambda link: -link.ratio),
        compared=len(base),
        alone=len(probe.groups) - len(base),
        not_judged=[rank for rank in range(len(machines)) if rank not in judged],
    )


def group_times(probe: Probe, results: Sequence[RankResult]) -> list[list[int]]:
    """By group: ns in each pass, from its first member's launch to its last member's end."""
    by_rank = {result.rank: result for result in results}
    columns = {
        (result.rank, name): np.stack([np.frombuffer(getattr(one, name), np.int64) for one in result.passes])
        + result.offset_ns
        for result in results
        for name in ("launched", "completed")
    }
    assert len(by_rank) == probe.plan.world_size

    def column(group: ProbeGroup, name: str) -> np.ndarray:
        both = zip(group.members, group.indices, strict=True)
        return np.stack([columns[rank, name][:, index] for rank, index in both])

    return [
        (column(group, "completed").max(axis=0) - column(group, "launched").min(axis=0)).tolist()
        for group in probe.groups
    ]


def _judged(
    probe: Probe, typical: Sequence[float], base: dict[int, float], machines: Sequence[Machine], tolerance: float
) -> dict[int, dict[tuple[int, bool], ProbedRank]]:
    """Rank -> (bytes, across hosts) -> what its groups of that kind say of it."""
    of_rank: dict[tuple[int, tuple[int, bool]], list[int]] = defaultdict(list)
    for number in base:
        group = probe.groups[number]
        for rank in group.members:
            of_rank[rank, (group.bytes, group.across_hosts)].append(number)
    quick = min if probe.kind == "bisect" else _quick
    found: dict[int, dict[tuple[int, bool], ProbedRank]] = defaultdict(dict)
    for (rank, kind), numbers in of_rank.items():
        if len(numbers) >= _LEAST_OF_RANK:
            score = quick([typical[number] / base[number] for number in numbers])
            found[rank][kind] = ProbedRank(
                rank=rank,
                host=machines[rank].host,
                score=score,
                bytes=kind[0],
                across_hosts=kind[1],
                groups=len(numbers),
                quick_us=quick([typical[number] for number in numbers]) / 1000,
                is_slow=score > tolerance,
            )
    return found


def _quick(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.25, method="lower"))


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
    rows = [
        (
            str(one.rank),
            one.host,
            f"{one.score:.2f} x",
            microseconds(one.quick_us),
            amount(one.bytes),
            str(one.groups),
            "across hosts" if one.across_hosts else "on its host",
        )
        for one in report.ranks[:_SHOWN]
    ]
    columns = ("#rank", "host", "#against those like it", "#its quick groups us", "#size", "#groups", "")
    print_table("Ranks, the slowest first: the quick ones of a rank's groups tell of the rank itself", columns, rows)
    slow = report.slow_ranks
    others = f"; the others {report.others[0]:.2f} to {report.others[-1]:.2f}" if report.others else ""
    print()
    for host in dict.fromkeys(one.host for one in slow):
        mine = [one for one in slow if one.host == host]
        whole = len(mine) == report.hosts[host] and len(report.hosts) > 1
        who = f"all {plural(len(mine), 'rank')} of" if whole else f"rank {rank_ranges([one.rank for one in mine])} on"
        most = max(one.score for one in mine)
        print(
            f"Slow: {who} {printable(host)}, up to {most:.2f} x those like it (tolerance {report.tolerance:g}{others})"
        )
    for link in report.links[:_SHOWN]:
        print(
            f"Slow link: rank {link.ranks[0]} ({printable(link.hosts[0])}) with rank {link.ranks[1]} "
            f"({printable(link.hosts[1])}), {link.ratio:.2f} x pairs like it with "
            f"{amount(link.bytes)} ({microseconds(link.us)} us)"
            + (", and neither of them with others" if link.ranks_are_well else ": the link, or one of the two")
        )
    if len(report.links) > _SHOWN:
        print(f"and {len(report.links) - _SHOWN:,} more links")
    if not slow and not report.links:
        print(f"No rank and no link that was compared is slower than {report.tolerance:g} x those like it{others}")
