"""Adds host time that no trace has: waits for another thread, and pauses between operations.

A caller of backward() waits for autograd's thread, but no trace shows it. A thread waits for another one if it has no
operation for a while in which the other thread starts, works and ends. This holds between two of its operations, and
inside a range of the user (`## backward ##`), which is Python code around operations. Both edges are inferred.

A caller's exclusive time is before, between and after the operations that it calls. Only the time before the first one
is the caller's own. The rest is a pause before the next node, unless that node waited for something. So a simulation
that runs the nodes and pauses one after the other counts no time twice.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import count, pairwise

from crossrank.tools.graph.chakra.chakra_graph import PAUSE, ChakraNode, Dependency, RunsOn
from crossrank.tools.graph.linking.dependencies import PAUSE_NS

USER_SCOPE = 7
"""`at::RecordScope::USER_SCOPE`, the scope of torch.profiler.record_function."""
_MIN_PAUSE_NS = 1000
"""Resolution of a Chakra file. A shorter pause is added to the next one of its thread."""


def wait_for_threads(nodes: Mapping[int, ChakraNode], ranges: Collection[int]) -> None:
    """Add inferred edges from the last node of a thread to the node that waited for it. Add inferred edges from the
    node that started a thread to its first node. `ranges` are the ids of ranges of the user. A range that waits is cut
    to the time until the other thread started."""
    threads: dict[RunsOn, list[ChakraNode]] = defaultdict(list)
    for node in nodes.values():
        if node.is_cpu:
            threads[node.runs_on].append(node)
    for members in threads.values():
        members.sort(key=_start_of)
    for runs_on, members in threads.items():
        others = [other for other_place, other in threads.items() if other_place != runs_on]
        for node, following in pairwise(members):
            ran = 0 if node.id in ranges else min(node.duration_ns, following.start_ns - node.start_ns)
            if following.start_ns - node.start_ns - ran > PAUSE_NS:
                _add_wait_edges(node, following, node.start_ns + ran, others, is_range=node.id in ranges)


def _add_wait_edges(
    node: ChakraNode, following: ChakraNode, since: int, others: Sequence[Sequence[ChakraNode]], *, is_range: bool
) -> None:
    """Add the edges for `node` and `following`, neighbors on a thread without operations in between from `since` on."""
    finished: list[tuple[int, int]] = []  # (end, id) of the last node that each other thread finished
    for other in others:
        first = bisect_left(other, since, key=_start_of)
        for at in range(bisect_right(other, following.start_ns, key=_start_of) - 1, first - 1, -1):
            end = _end_of(other, at)
            if end <= following.start_ns:
                finished.append((end, other[at].id))
                break
        else:
            continue
        if not first or _end_of(other, first - 1) <= since:
            other[first].dependencies.append(Dependency(node.id, "inter_thread", inferred=True))
            if is_range:
                node.duration_ns = min(node.duration_ns, other[first].start_ns - node.start_ns)
    if finished:
        following.dependencies.append(Dependency(max(finished)[1], "inter_thread", inferred=True))


def _start_of(node: ChakraNode) -> int:
    return node.start_ns


def _end_of(thread: Sequence[ChakraNode], at: int) -> int:
    """Return the end of a node, without the operations that it calls."""
    end = thread[at].start_ns + thread[at].duration_ns
    return min(end, thread[at + 1].start_ns) if at + 1 < len(thread) else end


def cut_waits(nodes: Sequence[ChakraNode]) -> None:
    """Cut the duration of each host node at the start of the next node of its thread."""
    following: dict[RunsOn, int] = {}
    for node in reversed(nodes):
        if node.is_cpu:
            until_next = following.get(node.runs_on, node.start_ns + node.duration_ns) - node.start_ns
            node.duration_ns = max(0, min(node.duration_ns, until_next))
            following[node.runs_on] = node.start_ns


def with_pauses(nodes: Sequence[ChakraNode]) -> list[ChakraNode]:
    """Return `nodes` with a node for each pause. `nodes` are in order, and their waits are cut.

    A pause of a node starts when all that the node waited for has ended, and ends when the node starts. The pause takes
    over the dependencies of the node, and the node waits for the pause.
    """
    ends = {node.id: node.start_ns + node.duration_ns for node in nodes}
    begin = min((node.start_ns for node in nodes), default=0)
    next_ids = count(1 + max(ends, default=0))
    busy: dict[RunsOn, int] = {}  # end of the last node of a thread, without its pauses
    short_pauses: dict[RunsOn, int] = {}  # sum of pauses that are too short for a node
    result = []
    for node in nodes:
        if node.is_cpu:
            start, waited_until = node.start_ns, busy.get(node.runs_on, begin)
            busy[node.runs_on] = (start if start > waited_until else waited_until) + node.duration_ns
            for dependency in node.dependencies:
                end = ends.get(dependency.source, begin)
                if end > waited_until:
                    waited_until = end
            pause = short_pauses.get(node.runs_on, 0)
            if start > waited_until:
                pause += start - waited_until
            short_pauses[node.runs_on] = pause if pause < _MIN_PAUSE_NS else 0
            if pause >= _MIN_PAUSE_NS:
                result.append(_make_pause(node, next(next_ids), pause))
        result.append(node)
    return result


def _make_pause(node: ChakraNode, pause_id: int, duration_ns: int) -> ChakraNode:
    begin = node.start_ns - duration_ns
    pause = ChakraNode(pause_id, PAUSE, node.runs_on, begin, duration_ns, is_cpu=True, is_pause=True)
    pause.dependencies = node.dependencies
    callers = [dependency for dependency in node.dependencies if dependency.kind == "caller"]
    node.dependencies = [*callers, Dependency(pause_id, "program_order")]
    return pause
