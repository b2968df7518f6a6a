"""Sorts nodes so that each follows its dependencies, and breaks cycles."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from crossrank.errors import CrossrankError
from crossrank.tools.graph.chakra.chakra_graph import ChakraNode, Dependency

# A cycle is broken at its least certain edge: (kind, inferred). Kinds that are not listed are facts of the trace.
WEAKEST_FIRST = (
    ("inter_thread", True),
    ("sync", True),
    ("stream_wait", True),
    ("group_order", False),
    ("forward_backward", False),
)
_SHOWN = 6


def in_order(nodes: Mapping[int, ChakraNode], *, strict: bool = False) -> tuple[list[ChakraNode], list[str]]:
    """Return the nodes in order, the earliest first among those that can start, and the edges that were dropped.

    Raise `CrossrankError` for a cycle of facts, and with `strict` for any cycle. The error names its nodes and kinds.
    """
    dropped: list[str] = []
    while True:
        ordered = _sort_nodes(nodes)
        if len(ordered) == len(nodes):
            return ordered, dropped
        cycle = _find_cycle(nodes, {node.id for node in ordered})
        found = _describe_cycle(nodes, cycle)
        weakest = min(cycle, key=lambda edge: _weakness(edge[1]))
        if strict or _weakness(weakest[1]) == len(WEAKEST_FIRST):
            why = "--strict refuses to break it" if strict else "all its edges are certain, so crossrank drops none"
            raise CrossrankError(f"dependencies form a cycle: {found}; {why}")
        node, dependency = weakest
        nodes[node].dependencies.remove(dependency)
        dropped.append(f"dropped the {_kind(dependency)} edge {dependency.source} -> {node} of a cycle: {found}")


def is_in_order(nodes: Iterable[ChakraNode]) -> bool:
    """Return whether each node follows its dependencies."""
    before: set[int] = set()
    for node in nodes:
        for dependency in node.dependencies:
            if dependency.source not in before:
                return False
        before.add(node.id)
    return True


def _sort_nodes(nodes: Mapping[int, ChakraNode]) -> list[ChakraNode]:
    """Return Kahn's order, earliest start first, without nodes on cycles and nodes that wait for them."""
    waits: dict[int, int] = {}
    dependents: dict[int, list[int]] = {}
    ready = []
    for node in nodes.values():
        sources = {dependency.source for dependency in node.dependencies}
        waits[node.id] = len(sources)
        for source in sources:
            dependents.setdefault(source, []).append(node.id)
        if not sources:
            ready.append((node.start_ns, node.id))
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, node_id = heapq.heappop(ready)
        ordered.append(nodes[node_id])
        for dependent in dependents.get(node_id, ()):
            waits[dependent] -= 1
            if waits[dependent] == 0:
                heapq.heappush(ready, (nodes[dependent].start_ns, dependent))
    return ordered


def _find_cycle(nodes: Mapping[int, ChakraNode], done: set[int]) -> list[tuple[int, Dependency]]:
    """Return one cycle among the nodes that are not `done`, as (node, what it waits for)."""
    at = next(node_id for node_id in nodes if node_id not in done)
    path: list[tuple[int, Dependency]] = []
    place: dict[int, int] = {}
    while at not in place:
        place[at] = len(path)
        dependency = next(d for d in nodes[at].dependencies if d.source not in done)
        path.append((at, dependency))
        at = dependency.source
    return path[place[at] :]


def _weakness(dependency: Dependency) -> int:
    key = (dependency.kind, dependency.inferred)
    return WEAKEST_FIRST.index(key) if key in WEAKEST_FIRST else len(WEAKEST_FIRST)


def _kind(dependency: Dependency) -> str:
    return f"inferred {dependency.kind}" if dependency.inferred else dependency.kind


def _describe_cycle(nodes: Mapping[int, ChakraNode], cycle: list[tuple[int, Dependency]]) -> str:
    steps = [
        f"{node} ({nodes[node].name[:40]}) waits by {_kind(dependency)} for" for node, dependency in cycle[:_SHOWN]
    ]
    more = f" … {len(cycle) - _SHOWN} more … " if len(cycle) > _SHOWN else " "
    return " ".join(steps) + more + str(cycle[0][0])
