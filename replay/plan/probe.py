"""Plans that find a slow rank, host or link (`crossrank probe`): recorded sizes on small groups of ranks, many at once.

Groups of one round share no rank and no network card: a round has at most as many pairs across hosts as each host has
cards. All ranks meet in a barrier before each round, so that rounds do not overlap. Only groups with equal size, equal
bytes and equal placement (one host or several) are compared.

* `pairs`: every rank with every other, both ways at once. N - 1 rounds, more if hosts have few cards.
* `ring`: every rank with its two neighbours, both ways at once. 2 or 3 rounds, more if hosts have few cards.
* `bisect`: the ranks in quarters, eighths and so on with an all_reduce in each, and last as in `ring`. It makes few
  calls, and has fewer groups than ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import msgspec

from crossrank.comm import CommRecord, Group
from crossrank.errors import CrossrankError
from crossrank.replay.plan.plan import Plan, PlannedCall, RankPlan

PROBES = ("pairs", "bisect", "ring")
_ALL = "all ranks"
LEAST_ALIKE = 3
"""The fewest groups to compare: two cannot show which one is slow."""
_MOST_CALLS = 4_000_000
"""Calls of all ranks in a pass."""
Members = tuple[int, ...]


class Machine(msgspec.Struct, frozen=True):
    """The host of a rank."""

    host: str
    network_cards: int


class ProbeGroup(msgspec.Struct, frozen=True):
    """Ranks that communicate with each other once in a pass."""

    members: Members
    bytes: int
    across_hosts: bool
    indices: Members
    """By member: its first call."""

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Return what must be equal for two groups to be compared."""
        return len(self.members), self.bytes, self.across_hosts


class Probe(msgspec.Struct, frozen=True):
    """The plan of a probe, and the groups to compare."""

    kind: str
    plan: Plan
    groups: list[ProbeGroup]
    sizes: list[int]
    """S of the recorded calls that are tried, in bytes."""
    rounds: int
    """Per size."""


def make_probe(plan: Plan, kind: str, machines: Sequence[Machine]) -> Probe:
    """Return the probe of that `kind` with call sizes of `plan`; `machines` has the host of each rank.

    Raises `CrossrankError` for fewer than 3 ranks, for groups that cannot be compared, and for too many calls.
    """
    count = len(machines)
    if count < 3:
        raise CrossrankError(f"a probe compares groups of ranks, and {count} rank(s) make one at most; use 3 or more")
    order = sorted(range(count), key=lambda rank: (machines[rank].host, rank))
    rounds = [part for one in _make_rounds(kind, order) for part in _split_by_network_cards(one, machines)]
    sizes = sizes_of(plan)
    total = len(sizes) * len(rounds) * count * 3
    if total > _MOST_CALLS:
        raise CrossrankError(
            f"--groups {kind} of {count} ranks would be {len(rounds):,} rounds, about {total:,} calls; use "
            "--groups bisect or ring, or fewer ranks"
        )
    calls: list[list[PlannedCall]] = [[] for _ in range(count)]
    groups: list[ProbeGroup] = []
    subgroups: dict[Members, Group] = {}
    for size, one in product(sizes, rounds):
        for own in calls:
            # The first call uses the group of all ranks: this creates its communicator.
            _append_call(own, "barrier", "barrier", pg=_ALL)
        for members in one:
            across = len({machines[rank].host for rank in members}) > 1
            groups.append(ProbeGroup(members, size, across, tuple(len(calls[rank]) for rank in members)))
            reduces = kind == "bisect" and len(members) > 2
            if reduces and members not in subgroups:
                name = f"probe {len(subgroups) + 1}"
                subgroups[members] = Group(pg=name, size=len(members), ranks=list(members))
            for rank in members:
                if reduces:
                    _append_reduction(calls[rank], subgroups[members].pg, size)
                else:
                    _append_exchange(calls[rank], sum(members) - rank, size)
    if max(Counter(group.kind for group in groups).values()) < LEAST_ALIKE:
        raise CrossrankError(
            f"--groups {kind} of {count} ranks on {len({one.host for one in machines})} hosts has no {LEAST_ALIKE} "
            "similar groups to compare; use --groups pairs, or more ranks"
        )
    probe_plan = Plan(
        source=plan.source,
        kind=plan.kind,
        world_size=count,
        groups=[Group(pg=_ALL, size=count, ranks=list(range(count))), *subgroups.values()],
        ranks=[RankPlan(rank=rank, calls=own) for rank, own in enumerate(calls)],
        notes=plan.notes,
    )
    return Probe(kind=kind, plan=probe_plan, groups=groups, sizes=sizes, rounds=len(rounds))


def sizes_of(plan: Plan) -> list[int]:
    """Return the most frequent size and the one that moves most bytes, ascending. Raises `CrossrankError` if there is
    none."""
    calls = Counter(call.record.bytes for rank in plan.ranks for call in rank.calls if call.record.bytes)
    if not calls:
        raise CrossrankError(f"{plan.source}: no call moves anything, so there is no size to probe with")
    return sorted({max(calls, key=lambda size: (calls[size], size)), max(calls, key=lambda size: calls[size] * size)})


def _make_rounds(kind: str, order: Sequence[int]) -> Iterator[Sequence[Members]]:
    """Yield rounds of groups that share no rank."""
    if kind == "pairs":
        yield from all_pairs(order)
        return
    if kind == "bisect":
        blocks = [tuple(order)]
        while min(map(len, blocks)) >= 6:  # both halves are larger than a pair
            blocks = [half for one in blocks for half in (one[: len(one) // 2], one[len(one) // 2 :])]
            if len(blocks) > 2:  # two blocks cannot show which one is slow
                yield blocks
    count = len(order)
    edges = [(order[at], order[(at + 1) % count]) for at in range(count)]
    even = count - count % 2
    yield edges[0:even:2]
    yield edges[1:even:2]
    if count % 2:
        yield edges[-1:]


def all_pairs(ranks: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield every pair once, in rounds in which each rank has at most one partner: the circle method of tournaments.

    >>> list(all_pairs([0, 1, 2, 3]))
    [[(0, 3), (1, 2)], [(0, 2), (3, 1)], [(0, 1), (2, 3)]]
    """
    circle: list[int | None] = [*ranks, *[None] * (len(ranks) % 2)]
    for _ in range(len(circle) - 1):
        both = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True)
        yield [(one, other) for one, other in both if one is not None and other is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def _split_by_network_cards(groups: Sequence[Members], machines: Sequence[Machine]) -> Iterator[list[Members]]:
    """Return rounds in which each group across hosts has a network card of its own on each host."""
    rounds: list[tuple[list[Members], Counter[str]]] = []
    for members in groups:
        hosts = {machines[rank].host: machines[rank].network_cards for rank in members}
        uses = Counter(hosts.keys() if len(hosts) > 1 else ())
        for placed, used in rounds:
            if all(used[host] < max(hosts[host], 1) for host in uses):
                placed.append(members)
                used.update(uses)
                break
        else:
            rounds.append(([members], uses))
    return (placed for placed, _ in rounds)


def _append_reduction(calls: list[PlannedCall], pg: str, size: int) -> None:
    shapes = [[max(size // 4, 1)]]
    moved: dict[str, Any] = {"inputs": shapes, "outputs": shapes, "bytes": 4 * shapes[0][0], "dtype": "float32"}
    _append_call(calls, "all_reduce", "allreduce_", pg=pg, reduce="sum", **moved)


def _append_exchange(calls: list[PlannedCall], peer: int, size: int) -> None:
    batch = len(calls)
    for op, c10d, side in (("send", "send", "inputs"), ("recv", "recv_", "outputs")):
        moved: dict[str, Any] = {"bytes": size, "dtype": "uint8", side: [[size]]}
        _append_call(calls, op, c10d, until=batch + 2, pg=_ALL, peer=peer, batch=batch, **moved)


def _append_call(
    calls: list[PlannedCall], op: str, c10d: str, *, until: int | None = None, bytes: int = 0, **fields: Any
) -> None:
    """Append a call whose wait comes before the call `until`, by default before the next one."""
    index = len(calls)
    record = CommRecord(id=index, op=op, c10d=c10d, bytes=bytes, t=0, **fields)
    calls.append(PlannedCall(record=record, wait_before=until or index + 1, blocking=True, recorded_calls=0))
