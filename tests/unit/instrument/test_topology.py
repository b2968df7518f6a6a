"""Locality from what the ranks published: uneven nodes, odd placements, NVLink domains, silent ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from crossrank.comm import Locality
from crossrank.instrument.identity import topology as topology_module
from crossrank.instrument.identity.topology import Topology


def exchanged(places: list[tuple[str, str | None] | None]) -> list[Topology | None]:
    """The topologies of all ranks after each that records has published; None is a rank that does not."""
    store = dist.HashStore()
    world = len(places)
    topologies = [None if place is None else Topology(rank, world, *place) for rank, place in enumerate(places)]
    threads = [
        threading.Thread(target=topology.exchange, args=(lambda: store, 0))
        for topology in topologies
        if topology is not None
    ]
    for thread in threads:
        thread.start()
    for topology in topologies:
        if topology is not None:
            topology.settled.wait(1.0)
            topology.stop()
    for thread in threads:
        thread.join()
    return topologies


@pytest.mark.parametrize(
    ("places", "ranks", "expected"),
    [
        # Uneven nodes: three ranks on one, one on the other.
        ([("a", None), ("a", None), ("a", None), ("b", None)], [0, 1, 2], "intra_node"),
        ([("a", None), ("a", None), ("a", None), ("b", None)], [2, 3], "cross_node"),
        # Round-robin placement, as mpirun does it.
        ([("a", None), ("b", None), ("a", None), ("b", None)], [0, 2], "intra_node"),
        ([("a", None), ("b", None), ("a", None), ("b", None)], [0, 1], "cross_node"),
        # Two nodes of one NVLink domain, and a third outside it.
        ([("a", "f:1"), ("b", "f:1"), ("c", "f:2")], [0, 1], "nvlink_domain"),
        ([("a", "f:1"), ("b", "f:1"), ("c", "f:2")], [0, 1, 2], "cross_node"),
        ([("a", "f:1"), ("b", None)], [0, 1], "cross_node"),
        # A group of one.
        ([("a", None), ("b", None)], [1], "intra_node"),
    ],
)
def test_nodes_give_locality(places: list[tuple[str, str | None] | None], ranks: list[int], expected: Locality) -> None:
    for topology in exchanged(places):
        assert topology is not None
        assert topology.settled.is_set()
        assert topology.locality(ranks) == expected


def test_a_rank_that_does_not_record_is_unknown_and_blocks_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology_module, "_STANDSTILL", 0.05)
    first, silent, third = exchanged([("a", None), None, ("b", None)])
    assert silent is None
    assert first is not None
    assert third is not None
    assert first.locality([0, 1]) == "unknown"
    assert first.locality([0, 2]) == "cross_node"
    assert third.locality([0, 1, 2]) == "cross_node"  # whatever rank 1 is
    assert first.locality(None) == "unknown"


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), st.data())
def test_a_group_without_nvlink_crosses_nodes_only_if_it_has_two(nodes: list[str], data: st.DataObject) -> None:
    topology = Topology(0, len(nodes), nodes[0])
    topology.places = {rank: (node, None) for rank, node in enumerate(nodes)}
    ranks = data.draw(st.lists(st.integers(0, len(nodes) - 1), min_size=1))
    expected = "intra_node" if len({nodes[rank] for rank in ranks}) == 1 else "cross_node"
    assert topology.locality(ranks) == expected


def test_the_exchange_makes_few_store_requests_per_rank_at_any_world_size() -> None:
    def requests_per_rank(world: int) -> float:
        store = dist.HashStore()
        requests = 0
        counting = threading.Lock()

        class Counted(dist.Store):
            def __getattribute__(self, name: str) -> Callable[..., Any]:
                def ask(*arguments: Any) -> Any:
                    nonlocal requests
                    with counting:
                        requests += 1
                    return getattr(store, name)(*arguments)

                return ask

        topologies = [Topology(rank, world, f"node {rank // 8}") for rank in range(world)]
        for topology in topologies:
            topology.publish(Counted())
        for topology in topologies:
            topology.collect(Counted())
        assert all(topology.locality([0, world - 1]) == "cross_node" for topology in topologies)
        assert all(not topology.missing() for topology in topologies)
        return requests / world

    assert requests_per_rank(512) <= requests_per_rank(16) <= 3.5  # the collector makes four more


def _on_a_store(world: int) -> tuple[dist.Store, list[Topology]]:
    """The ranks of a job and a store that raises where one of TCP would wait for a key."""
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=1))
    return store, [Topology(rank, world, f"node {rank}") for rank in range(world)]


def test_a_rank_that_publishes_twice_does_not_block_the_collector() -> None:
    store, (collector, twice, _) = _on_a_store(3)
    for topology in (collector, twice, twice):
        topology.publish(store)
    collector.collect(store)
    assert collector.locality([0, 1]) == "cross_node"
    assert collector.locality([2]) == "unknown"


def test_one_rank_replaces_a_collector_that_leaves_early(monkeypatch: pytest.MonkeyPatch) -> None:
    store, topologies = _on_a_store(4)
    for topology in topologies:
        topology.publish(store)
    monkeypatch.setattr(topology_module, "_PATIENCE", 0.0)
    for _ in range(2):  # who finds that nothing is there takes over, and looks at the next time
        for topology in topologies[1:]:
            topology.collect(store)
    assert [topology.locality([0, 2]) for topology in topologies[1:]] == ["cross_node"] * 3
    assert [topology._collects for topology in topologies] == [True, True, False, False]


def test_stop_waits_for_the_pending_answer_and_ends_store_requests() -> None:
    """A thread that comes back from C++ while the interpreter shuts down ends the process."""
    store, (topology, _) = _on_a_store(2)
    asked, answered = threading.Event(), threading.Event()
    looks = 0

    def find_store() -> dist.Store:
        nonlocal looks
        looks += 1
        asked.set()
        assert answered.wait(20)
        return store

    exchange = threading.Thread(target=topology.exchange, args=(find_store, 0))
    ends = threading.Thread(target=topology.stop, kwargs={"wait": True})
    exchange.start()
    assert asked.wait(20)
    ends.start()
    ends.join(0.1)
    assert ends.is_alive()
    answered.set()
    for thread in (ends, exchange):
        thread.join(20)
        assert not thread.is_alive()
    assert looks == 1
    assert topology.settled.is_set()


def test_the_shared_places_stay_small_with_thousands_of_ranks() -> None:
    store, topologies = _on_a_store(16_384)
    first = topologies[0]
    first.publish(store)
    for topology in topologies[1:]:
        store.set(str(topology.rank), f'["{topology_module._short(str(topology.rank // 8))}",null]')
        store.add("published", 1)
    first.collect(store)
    assert not first.missing()
    assert len(store.get("places")) < 40_000
