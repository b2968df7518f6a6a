"""What a thread did that no trace has: waiting for another thread that it set going, and pauses between operations.

A caller of backward() waits for autograd's thread, and no trace says so. A thread that names nothing for a while, in
which another one begins, works and ends, is taken to wait for it: between two of its operations, and inside a range of
the user's (`## backward ##`), which is Python code around operations rather than work. Both edges are marked inferred.

The exclusive time of a caller lies before, between and after the operations that it calls. Only what lies before the
first is the caller's own run; the rest is a pause before what follows, unless that waited for something. Whoever plays
the nodes one after the other, with the pauses between them, then counts no time twice.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import count, pairwise

from crossrank.tools.graph.chakra.chakra_graph import PAUSE, ChakraNode, Dependency, RunsOn
from crossrank.tools.graph.linking.dependencies import PAUSE_NS

USER_SCOPE = 7
"""`at::RecordScope::USER_SCOPE`, of torch.profiler.record_function."""
_LEAST_NS = 1000
"""What a Chakra file can say; shorter pauses are added to the next one of their thread."""


def wait_for_threads(nodes: Mapping[int, ChakraNode], ranges: Collection[int]) -> None:
    """Add to what waits for a thread an edge from that thread's last node, and to the first of a thread that was set
    going one from what did that. `ranges` are the ids of ranges of the user's: one that waits is cut to the time until
    the other thread began."""
    threads: dict[RunsOn, list[ChakraNode]] = defaultdict(list)
    for node in nodes.values():
        if node.is_cpu:
            threads[node.runs_on].append(node)
    for members in threads.values():
        members.sort(key=_start)
    for runs_on, members in threads.items():
        others = [other for other_place, other in threads.items() if other_place != runs_on]
        for node, following in pairwise(members):
            ran = 0 if node.id in ranges else min(node.duration_ns, following.start_ns - node.start_ns)
            if following.start_ns - node.start_ns - ran > PAUSE_NS:
                _wait(node, following, node.start_ns + ran, others, is_range=node.id in ranges)


def _wait(
    node: ChakraNode, following: ChakraNode, since: int, others: Sequence[Sequence[ChakraNode]], *, is_range: bool
) -> None:
    """`node` and `following` are neighbours of a thread that names nothing from `since` on between them."""
    finished: list[tuple[int, int]] = []  # (end, id) of what each other thread finished last in that time
    for other in others:
        first = bisect_left(other, since, key=_start)
        for at in range(bisect_right(other, following.start_ns, key=_start) - 1, first - 1, -1):
            end = _end(other, at)
            if end <= following.start_ns:
                finished.append((end, other[at].id))
                break
        else:
            continue
        if not first or _end(other, first - 1) <= since:
            other[first].dependencies.append(Dependency(node.id, "inter_thread", inferred=True))
            if is_range:
                node.duration_ns = min(node.duration_ns, other[first].start_ns - node.start_ns)
    if finished:
        following.dependencies.append(Dependency(max(finished)[1], "inter_thread", inferred=True))


def _start(node: ChakraNode) -> int:
    return node.start_ns


def _end(thread: Sequence[ChakraNode], at: int) -> int:
    """When a node, without those that it calls, has run."""
    end = thread[at].start_ns + thread[at].duration_ns
    return min(end, thread[at + 1].start_ns) if at + 1 < len(thread) else end


def cut_waits(nodes: Sequence[ChakraNode]) -> None:
    """Cut the duration of every host node to what it ran before the next node of its thread began."""
    following: dict[RunsOn, int] = {}
    for node in reversed(nodes):
        if node.is_cpu:
            until_next = following.get(node.runs_on, node.start_ns + node.duration_ns) - node.start_ns
            node.duration_ns = max(0, min(node.duration_ns, until_next))
            following[node.runs_on] = node.start_ns


def with_pauses(nodes: Sequence[ChakraNode]) -> list[ChakraNode]:
    """`nodes`, which are in order and whose waits are cut, with a node for each pause before what follows it.

    A pause is what lies between the end of what a node waited for, on its own thread and elsewhere, and its start.
    It takes over all that the node waits for; the node waits for the pause.
    """
    ends = {node.id: node.start_ns + node.duration_ns for node in nodes}
    begin = min((node.start_ns for node in nodes), default=0)
    fresh = count(1 + max(ends, default=0))
    busy: dict[RunsOn, int] = {}  # when the last node of a thread ended; its pauses are no part of that
    owed: dict[RunsOn, int] = {}  # pauses too short for a node of their own
    result = []
    for node in nodes:
        if node.is_cpu:
            start, waited_until = node.start_ns, busy.get(node.runs_on, begin)
            busy[node.runs_on] = (start if start > waited_until else waited_until) + node.duration_ns
            for dependency in node.dependencies:
                end = ends.get(dependency.source, begin)
                if end > waited_until:
                    waited_until = end
            pause = owed.get(node.runs_on, 0)
            if start > waited_until:
                pause += start - waited_until
            owed[node.runs_on] = pause if pause < _LEAST_NS else 0
            if pause >= _LEAST_NS:
                result.append(_pause(node, next(fresh), pause))
        result.append(node)
    return result


def _pause(node: ChakraNode, pause_id: int, duration_ns: int) -> ChakraNode:
    begin = node.start_ns - duration_ns
    pause = ChakraNode(pause_id, PAUSE, node.runs_on, begin, duration_ns, is_cpu=True, is_pause=True)
    pause.dependencies = node.dependencies
    callers = [dependency for dependency in node.dependencies if dependency.kind == "caller"]
    node.dependencies = [*callers, Dependency(pause_id, "program_order")]
    return pause
