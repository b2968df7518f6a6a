"""Putting nodes in order, and breaking cycles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrank.errors import CrossrankError
from crossrank.tools.graph.chakra.chakra_graph import ChakraNode, Dependency
from crossrank.tools.graph.chakra.order import in_order, is_in_order


def graph(edges: dict[int, list[Dependency]]) -> dict[int, ChakraNode]:
    return {
        number: ChakraNode(number, f"n{number}", ("thread", number), number, 1, is_cpu=True, dependencies=[*sources])
        for number, sources in edges.items()
    }


def test_a_chain_of_a_hundred_thousand_nodes_is_ordered() -> None:
    count = 100_000
    nodes = graph({i: [Dependency(i + 1, "stream")] if i < count else [] for i in range(1, count + 1)})
    ordered, dropped = in_order(nodes)
    assert [node.id for node in ordered] == list(range(count, 0, -1))
    assert dropped == []


def test_the_least_certain_edge_of_a_cycle_is_dropped() -> None:
    nodes = graph(
        {
            1: [Dependency(3, "sync", inferred=True)],
            2: [Dependency(1, "launch")],
            3: [Dependency(2, "inter_thread", inferred=True)],
        }
    )
    ordered, dropped = in_order(nodes)
    assert [node.id for node in ordered] == [3, 1, 2]
    assert dropped == [
        "dropped the inferred inter_thread edge 2 -> 3 of a cycle: 1 (n1) waits by inferred sync for "
        "3 (n3) waits by inferred inter_thread for 2 (n2) waits by launch for 1"
    ]


edges = st.dictionaries(st.integers(0, 12), st.lists(st.integers(0, 12), max_size=4), min_size=1, max_size=13)


@given(edges)
def test_ordered_nodes_follow_all_their_dependencies(drawn: dict[int, list[int]]) -> None:
    nodes = graph(
        {
            node: [
                Dependency(source, "inter_thread", inferred=True)
                for source in sources
                if source in drawn and source != node
            ]
            for node, sources in drawn.items()
        }
    )
    ordered, dropped = in_order(nodes)
    place = {node.id: index for index, node in enumerate(ordered)}
    assert set(place) == set(nodes)
    assert all(place[d.source] < place[node.id] for node in ordered for d in node.dependencies)
    if all(source < node for node, sources in drawn.items() for source in sources):
        assert dropped == []  # what has no cycle loses nothing


def test_a_cycle_of_facts_names_its_nodes_and_kinds() -> None:
    waits = (
        "1 (n1) waits by launch for 2 (n2) waits by launch for 3 (n3) waits by launch for 4 (n4) waits by launch for "
    )
    shown = waits + "5 (n5) waits by launch for 6 (n6) waits by launch for"
    for count, rest in ((6, " 1"), (8, " … 2 more … 1")):
        nodes = graph({i: [Dependency(i % count + 1, "launch")] for i in range(1, count + 1)})
        with pytest.raises(CrossrankError) as error:
            in_order(nodes)
        why = "all its edges are certain, so crossrank drops none"
        assert str(error.value) == f"dependencies form a cycle: {shown}{rest}; {why}"


def test_nodes_are_in_order_if_each_follows_its_dependencies() -> None:
    nodes = list(graph({1: [], 2: [Dependency(1, "launch")]}).values())
    assert is_in_order(nodes)
    assert not is_in_order(nodes[::-1])
