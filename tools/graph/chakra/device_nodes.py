"""Leaves out the host: GPU and communication nodes only, with the dependencies that ran through the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from crossrank.tools.graph.chakra.chakra_graph import ChakraNode, Dependency, Lane


def device_nodes(nodes: Sequence[ChakraNode]) -> dict[int, ChakraNode]:
    """The nodes of `nodes`, which are in order, that no thread runs, by id.

    Each waits for what it waited for itself, and for the nodes that its chain of host nodes waited for: a kernel
    launched after the host has waited for another one waits for that one. Of what the host waited for on one stream
    only the last is kept, and nothing that another one of them waits for.
    """
    kept: dict[int, ChakraNode] = {}
    waits: dict[int, dict[int, Dependency]] = {}
    place: dict[int, int] = {}
    for at, node in enumerate(nodes):
        place[node.id] = at
        found = {dependency.source: dependency for dependency in node.dependencies if dependency.source in kept}
        for dependency in node.dependencies:
            if dependency.source not in kept:
                for source, through in waits[dependency.source].items():
                    found.setdefault(source, through)
        latest = _latest(found, kept, place)
        waits[node.id] = latest
        if not node.is_cpu:
            node.dependencies = list(latest.values())
            kept[node.id] = node
    return kept


def _latest(found: dict[int, Dependency], kept: dict[int, ChakraNode], place: dict[int, int]) -> dict[int, Dependency]:
    if len(found) < 2:
        return found
    last: dict[Lane, int] = {}
    for source in found:
        lane = kept[source].lane
        if lane not in last or place[source] > place[last[lane]]:
            last[lane] = source
    implied = _sources(kept[source] for source in last.values())
    return {source: found[source] for source in last.values() if source not in implied}


def _sources(nodes: Iterable[ChakraNode]) -> set[int]:
    return {dependency.source for node in nodes for dependency in node.dependencies}
