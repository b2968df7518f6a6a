"""How long every host node itself ran, and what its thread did before it that no node has.

The exclusive time of a caller lies before, between and after the operations that it calls. Only what lies before the
first is the caller's own run; the rest is a pause before what follows, unless that waited for something: a caller of
backward() mostly waits for autograd's thread. Whoever plays the nodes one after the other, with the pauses between
them, then counts no time twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from crossrank.tools.graph.chakra.graph import PAUSE, ChakraNode, Dependency, Lane

_LEAST_NS = 1000
"""What a Chakra file can say; shorter pauses are added to the next one of their thread."""


def cut_waits(nodes: Sequence[ChakraNode]) -> None:
    """Cut the duration of every host node to what it ran before the next node of its thread began."""
    following: dict[Lane, int] = {}
    for node in reversed(nodes):
        if node.is_cpu:
            until_next = following.get(node.lane, node.start_ns + node.duration_ns) - node.start_ns
            node.duration_ns = max(0, min(node.duration_ns, until_next))
            following[node.lane] = node.start_ns


def with_pauses(nodes: Sequence[ChakraNode]) -> list[ChakraNode]:
    """`nodes`, which are in order and whose waits are cut, with a node for each pause before what follows it.

    A pause is what lies between the end of what a node waited for, on its own thread and elsewhere, and its start.
    It takes over all that the node waits for; the node waits for the pause.
    """
    ends = {node.id: node.start_ns + node.duration_ns for node in nodes}
    begin = min((node.start_ns for node in nodes), default=0)
    fresh = count(1 + max(ends, default=0))
    busy: dict[Lane, int] = {}  # when the last node of a thread ended; its pauses are no part of that
    owed: dict[Lane, int] = {}  # pauses too short for a node of their own
    result = []
    for node in nodes:
        if node.is_cpu:
            start, waited_until = node.start_ns, busy.get(node.lane, begin)
            busy[node.lane] = (start if start > waited_until else waited_until) + node.duration_ns
            for dependency in node.dependencies:
                end = ends.get(dependency.source, begin)
                if end > waited_until:
                    waited_until = end
            pause = owed.get(node.lane, 0)
            if start > waited_until:
                pause += start - waited_until
            owed[node.lane] = pause if pause < _LEAST_NS else 0
            if pause >= _LEAST_NS:
                result.append(_pause(node, next(fresh), pause))
        result.append(node)
    return result


def _pause(node: ChakraNode, pause_id: int, duration_ns: int) -> ChakraNode:
    pause = ChakraNode(
        id=pause_id,
        name=PAUSE,
        lane=node.lane,
        start_ns=node.start_ns - duration_ns,
        duration_ns=duration_ns,
        is_cpu=True,
        dependencies=node.dependencies,
        is_pause=True,
    )
    callers = [dependency for dependency in node.dependencies if dependency.kind == "caller"]
    node.dependencies = [*callers, Dependency(pause_id, "program_order")]
    return pause
