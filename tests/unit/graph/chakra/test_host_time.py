"""Waiting for other threads, the time that host nodes keep, and pauses, to the nanosecond."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from crossrank.tools.graph.chakra.chakra_graph import PAUSE, ChakraNode, Dependency
from crossrank.tools.graph.chakra.host_time import cut_waits, wait_for_threads, with_pauses

MS = 1_000_000


def on_thread(tid: int, node_id: int, start: int, duration: int, *dependencies: Dependency) -> ChakraNode:
    waits = list(dependencies)
    return ChakraNode(node_id, "op", ("thread", tid), start, duration, is_cpu=True, dependencies=waits)


@pytest.mark.parametrize(
    ("main", "other", "begins_it", "waits_for"),
    [
        ([(50, 6), (70, 1)], [(57, 5)], 0, 10),
        ([(50, 6), (57.1, 1)], [(56.1, 0.1)], 0, 10),
        ([(50, 6), (56.9, 1)], [(56.1, 0.1)], None, None),  # idle for less than a millisecond
        ([(50, 6), (70, 1)], [(51, 3)], None, None),  # begun and done while the first ran
        ([(50, 6), (70, 1)], [(40, 11), (57, 5)], 1, 11),  # done with what it did before
        ([(50, 6), (70, 1)], [(40, 1), (51, 8), (60, 1)], None, 12),  # busy already
        ([(50, 6), (70, 1)], [(57, 23), (60, 15)], 0, 10),  # of two that call each other the outer, cut at its call
    ],
)  # fmt: skip
def test_an_idle_thread_waits_for_a_thread_that_works_meanwhile(
    main: list[tuple[float, float]], other: list[tuple[float, float]], begins_it: int | None, waits_for: int | None
) -> None:
    threads = [(1, 1, main), (2, 10, other)]
    nodes = {
        first + i: on_thread(tid, first + i, int(start * MS), int(duration * MS))
        for tid, first, rows in threads
        for i, (start, duration) in enumerate(rows)
    }
    wait_for_threads(nodes, ())
    found = {node.id: node.dependencies for node in nodes.values() if node.dependencies}
    expected = {} if begins_it is None else {10 + begins_it: [Dependency(1, "inter_thread", inferred=True)]}
    assert found == expected | (
        {} if waits_for is None else {2: [Dependency(waits_for, "inter_thread", inferred=True)]}
    )


def test_a_range_waits_for_a_thread_that_starts_with_it() -> None:
    nodes = {1: on_thread(1, 1, 50, 5 * MS), 2: on_thread(1, 2, 50 + 6 * MS, 1), 3: on_thread(2, 3, 50, MS)}
    wait_for_threads(nodes, {1})
    assert [node.duration_ns for node in nodes.values()] == [0, 1, MS]
    assert [node.id for node in nodes.values() if node.dependencies] == [2, 3]


def test_a_node_keeps_its_time_before_the_next_node() -> None:
    nodes = [on_thread(1, 1, 100, 50), on_thread(1, 2, 80, 50), on_thread(1, 3, 110, 50)]
    cut_waits(nodes)
    assert [node.duration_ns for node in nodes] == [0, 30, 50]


def test_pauses_fill_the_gaps_between_nodes_and_take_their_dependencies() -> None:
    order = [Dependency(number, "program_order") for number in (1, 2, 3)]
    caller = Dependency(1, "caller")
    nodes = [
        on_thread(1, 1, 100, 50),
        on_thread(1, 2, 750, 50, order[0]),  # 600 ns are too short for a node
        on_thread(1, 3, 1300, 100, caller, order[1]),
        on_thread(1, 4, 2400, 10, order[2]),
    ]
    before = [replace(node) for node in nodes]
    first = ChakraNode(5, PAUSE, ("thread", 1), 200, 1100, is_cpu=True, is_pause=True, dependencies=[caller, order[1]])
    second = ChakraNode(6, PAUSE, ("thread", 1), 1400, 1000, is_cpu=True, is_pause=True, dependencies=[order[2]])
    assert with_pauses(nodes) == [
        *before[:2],
        first,
        replace(before[2], dependencies=[caller, Dependency(5, "program_order")]),
        second,
        replace(before[3], dependencies=[Dependency(6, "program_order")]),
    ]


def test_a_pause_begins_when_the_node_before_on_the_thread_ends() -> None:
    nodes = [on_thread(1, 1, 100, 50), on_thread(2, 2, 120, 2), on_thread(1, 3, 2000, 500), on_thread(1, 4, 2600, 10)]
    pauses = [(node.start_ns, node.duration_ns) for node in with_pauses(nodes) if node.is_pause]
    assert pauses == [(150, 1850)]
