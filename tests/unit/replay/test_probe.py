"""Who is probed with whom at the same time, and whom the times blame."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrank.comm import CommRecord
from crossrank.errors import CrossrankError
from crossrank.replay.plan.build_plan import settle
from crossrank.replay.plan.probe import PROBES, Machine, Probe, ProbeGroup, all_pairs, make_probe, sizes_of
from crossrank.replay.results.probe_report import ProbeReport, judge, print_probe
from tests.unit.replay.plans import built, record
from tests.unit.replay.ranks import result


def job(ranks: int, *sizes: int) -> list[list[CommRecord]]:
    return [[record("all_reduce", inputs=[[size]], bytes=4 * size) for size in sizes or (256,)]] * ranks


def probe_of(kind: str, ranks: int, per_host: int = 8, cards: int = 8) -> tuple[Probe, list[Machine]]:
    machines = [Machine(f"host{rank // per_host:02d}", cards) for rank in range(ranks)]
    plan = built(*job(ranks))
    return make_probe(plan, kind, machines), machines


def rounds(probe: Probe) -> list[list[ProbeGroup]]:
    """Groups by the barrier before them."""
    found: dict[int, list[ProbeGroup]] = {}
    for group in probe.groups:
        calls = probe.plan.ranks[group.members[0]].calls[: group.indices[0]]
        found.setdefault(sum(call.record.op == "barrier" for call in calls), []).append(group)
    return list(found.values())


@given(st.integers(1, 40))
def test_every_pair_occurs_once_and_no_rank_twice_in_a_round(count: int) -> None:
    found = list(all_pairs(range(count)))
    assert sorted(tuple(sorted(pair)) for one in found for pair in one) == list(combinations(range(count), 2))
    assert all(max(Counter(rank for pair in one for rank in pair).values(), default=0) <= 1 for one in found)
    assert len(found) == max(count - 1 + count % 2, 0)


@pytest.mark.parametrize("kind", PROBES)
@pytest.mark.parametrize(("ranks", "per_host", "cards"), [(3, 8, 1), (8, 8, 1), (13, 4, 2), (16, 4, 1), (16, 4, 4)])
def test_groups_of_a_round_have_separate_ranks_and_network_cards(
    kind: str, ranks: int, per_host: int, cards: int
) -> None:
    probe, machines = probe_of(kind, ranks, per_host, cards)
    for one in rounds(probe):
        assert max(Counter(rank for group in one for rank in group.members).values()) == 1
        used = Counter(
            host for group in one if group.across_hosts for host in {machines[rank].host for rank in group.members}
        )
        assert max(used.values(), default=0) <= cards
    settle(probe.plan)  # every call fits those of the other ranks, and all come to their end
    assert {rank for group in probe.groups for rank in group.members} == set(range(ranks))


def test_a_bisection_has_few_groups_and_ends_with_neighbours() -> None:
    probe, _ = probe_of("bisect", 32, per_host=32)
    assert Counter(len(group.members) for group in probe.groups) == {8: 4, 4: 8, 2: 32}
    assert probe.rounds == 4
    assert len(probe.plan.groups) == 1 + 4 + 8  # pairs need none of their own
    ops = Counter(call.record.op for call in probe.plan.ranks[0].calls)
    assert ops == {"barrier": 4, "all_reduce": 2, "send": 2, "recv": 2}


def test_probe_sizes_are_those_with_most_calls_and_most_bytes() -> None:
    assert sizes_of(built(*job(2, 1, 1, 1, 500, 600))) == [4, 2400]
    assert sizes_of(built(*job(2, 7))) == [28]
    with pytest.raises(CrossrankError, match="no call moves anything"):
        sizes_of(built([record("barrier")], [record("barrier")]))
    with pytest.raises(CrossrankError, match="use 3 or more"):
        probe_of("pairs", 2)


def judged(
    probe: Probe,
    machines: list[Machine],
    slow: dict[frozenset[int], float],
    tolerance: float = 1.5,
    passes: int = 3,
    spread: float = 0.0,
) -> ProbeReport:
    """What is found where a group takes 100 us, and longer where `slow` has some of its ranks. `spread` is the standard
    deviation of the logarithm of each time."""
    chance = random.Random(1)
    noise = {
        (group.members, group.bytes, number): math.exp(chance.gauss(0, spread))
        for group in probe.groups
        for number in range(passes)
    }
    results = []
    for rank in range(probe.plan.world_size):
        every = []
        for number in range(passes):
            calls = [(1_000_000 * index,) * 3 for index in range(len(probe.plan.ranks[rank].calls))]
            for group in probe.groups:
                if rank in group.members:
                    factor = max((by for ranks, by in slow.items() if ranks <= set(group.members)), default=1.0)
                    factor *= noise[group.members, group.bytes, number]
                    calls[group.indices[group.members.index(rank)]] = (0, 0, round(100_000 * factor))
            every.append(calls)
        results.append(result(rank, *every, host=machines[rank].host))
    return judge(probe, results, machines, "gloo", tolerance)


@pytest.mark.parametrize("passes", [2, 5, 20])
@pytest.mark.parametrize("kind", PROBES)
def test_times_that_change_by_chance_blame_nothing(kind: str, passes: int) -> None:
    probe, machines = probe_of(kind, 32, per_host=32)
    report = judged(probe, machines, {}, passes=passes, spread=0.7)
    assert (report.slow_ranks, report.links) == ([], [])
    # The 90th percentile of a difference of two times is 1.645 of its standard deviations.
    assert report.noise == pytest.approx(math.exp(1.645 * math.sqrt(2) * 0.7 * 1.6 / math.sqrt(passes)), rel=0.4)


def test_a_rank_is_found_that_is_slower_than_chance_explains() -> None:
    probe, machines = probe_of("pairs", 16, per_host=16)
    slow = {frozenset([3]): 4.0}
    assert judged(probe, machines, slow, passes=2, spread=0.7).slow_ranks == []
    report = judged(probe, machines, slow, passes=20, spread=0.7)
    assert [one["rank"] for one in report.slow_ranks] == [3]


def test_one_pass_judges_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    probe, machines = probe_of("pairs", 16, per_host=16)
    report = judged(probe, machines, {frozenset([3]): 4.0, frozenset([8, 9]): 4.0}, passes=1)
    assert (report.slow_ranks, report.links, report.noise) == ([], [], None)
    print_probe(report)
    assert capsys.readouterr().out.splitlines()[-1].endswith("no rank or link is judged. Use --repeat 5")


@pytest.mark.parametrize("kind", PROBES)
@pytest.mark.parametrize(
    ("ranks", "slow"), [(3, {1}), (4, {3}), (5, {0}), (16, {6}), (16, {2, 9}), (17, {16}), (64, {5}), (130, {21})]
)
def test_slow_ranks_are_reported_without_their_peers(kind: str, ranks: int, slow: set[int]) -> None:
    probe, machines = probe_of(kind, ranks, per_host=256)
    report = judged(probe, machines, {frozenset([rank]): 2.0 for rank in slow})
    assert {one["rank"] for one in report.slow_ranks} == slow
    assert [one["score"] for one in report.slow_ranks] == [2.0] * len(slow)
    assert (report.links, report.not_judged) == ([], [])
    assert judged(probe, machines, {frozenset([rank]): 2.0 for rank in slow}, tolerance=2.5).slow_ranks == []


@pytest.mark.parametrize("kind", PROBES)
def test_a_slow_link_does_not_blame_its_ranks(kind: str) -> None:
    probe, machines = probe_of(kind, 16, per_host=16)
    report = judged(probe, machines, {frozenset([4, 5]): 3.0})
    assert report.slow_ranks == []
    assert [(one["ranks"], one["ratio"], one["ranks_are_well"]) for one in report.links] == [([4, 5], 3.0, True)]


def across(machines: list[Machine], factor: float, *hosts: str, rank: int | None = None) -> dict[frozenset[int], float]:
    """Pairs across hosts that are slow: those of one of `hosts`, or of `rank`."""
    found = {}
    for pair in combinations(range(len(machines)), 2):
        ends = {machines[one].host for one in pair}
        if len(ends) > 1 and (ends & set(hosts) or rank in pair):
            found[frozenset(pair)] = factor
    return found


@pytest.mark.parametrize(
    ("ranks", "factor", "hosts", "slow_rank", "named"),
    [
        (16, 5.0, ("host00",), None, {}),  # all pairs across hosts are alike: they are compared with each other alone
        (16, 4.0, (), 3, {3: 4.0}),
        (24, 4.0, (), 3, {3: 4.0}),
        (32, 3.0, ("host01",), None, dict.fromkeys(range(8, 16), 3.0)),  # its network card is slow
    ],
)
def test_ranks_slow_only_across_hosts_are_reported(
    ranks: int, factor: float, hosts: tuple[str, ...], slow_rank: int | None, named: dict[int, float]
) -> None:
    probe, machines = probe_of("pairs", ranks)
    report = judged(probe, machines, across(machines, factor, *hosts, rank=slow_rank))
    assert {one["rank"]: one["score"] for one in report.slow_ranks} == named
    assert all(one["across_hosts"] for one in report.slow_ranks)
    assert {one["score"] for one in report.ranks if one["rank"] not in named} == {1.0}
    assert report.links == []


def test_a_slow_ring_edge_means_a_slow_link_or_a_slow_rank() -> None:
    probe, machines = probe_of("ring", 64)
    report = judged(probe, machines, {frozenset([15]): 3.0})
    # Within its host rank 15 has one neighbour, across hosts another: one group of each kind does not judge it.
    assert report.slow_ranks == []
    assert [(one["ranks"], one["ranks_are_well"]) for one in report.links] == [([14, 15], False), ([15, 16], False)]
    assert report.not_judged == sorted(rank for rank in range(64) if rank % 8 in (0, 7))


def test_a_probe_without_similar_groups_is_refused() -> None:
    with pytest.raises(CrossrankError, match="4 ranks on 2 hosts has no 3 similar groups to compare"):
        probe_of("ring", 4, per_host=2)


def test_the_last_line_reports_slow_ranks_and_links(capsys: pytest.CaptureFixture[str]) -> None:
    probe, machines = probe_of("pairs", 16, per_host=16)
    for slow, said in (
        ((), "No compared rank or link is slower than 1.5 x similar ones; the others 1.00 to 1.00"),
        ((1,), "Slow: rank 1 on host00, up to 2.00 x similar ones (tolerance 1.5; "),
        ((4, 5), "Slow link: rank 4 (host00) with rank 5 (host00), 2.00 x pairs like it with 1.02 kB (200.0 us)"),
    ):
        print_probe(judged(probe, machines, {frozenset(slow): 2.0}))
        assert capsys.readouterr().out.splitlines()[-1].startswith(said)
