"""Where a thread waits for another one that it set going: a caller of backward() for autograd's thread.

No trace says so. A thread that names nothing for a while, during which another one begins, works and ends, is taken to
wait for it: between two of its operations, and inside a range of the user's (`## backward ##`), which is Python code
around operations rather than work. Both edges are marked inferred.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from crossrank.tools.graph.chakra.graph import ChakraNode, Dependency, Lane
from crossrank.tools.graph.linking.dependencies import PAUSE_NS

USER_SCOPE = 7
"""`at::RecordScope::USER_SCOPE`, of torch.profiler.record_function."""


def wait_for_threads(nodes: Mapping[int, ChakraNode], ranges: Collection[int]) -> None:
    """Add to what waits for a thread an edge from that thread's last node, and to the first of a thread that was set
    going one from what did that. `ranges` are the ids of ranges of the user's: one that waits is cut to the time until
    the other thread began."""
    threads: dict[Lane, list[ChakraNode]] = defaultdict(list)
    for node in nodes.values():
        if node.is_cpu:
            threads[node.lane].append(node)
    for members in threads.values():
        members.sort(key=_start)
    for lane, members in threads.items():
        others = [other for other_lane, other in threads.items() if other_lane != lane]
        for node, following in pairwise(members):
            ran = 0 if node.id in ranges else min(node.duration_ns, following.start_ns - node.start_ns)
            if others and following.start_ns - node.start_ns - ran > PAUSE_NS:
                _wait(node, following, node.start_ns + ran, others, is_range=node.id in ranges)


def _wait(
    node: ChakraNode, following: ChakraNode, since: int, others: Sequence[Sequence[ChakraNode]], *, is_range: bool
) -> None:
    """`node` and `following` are neighbours of a thread that names nothing from `since` on between them."""
    waited_for: tuple[int, int] | None = None  # (end, id) of what other threads finished last in that time
    for other in others:
        first = bisect_left(other, since, key=_start)
        for at in range(bisect_right(other, following.start_ns, key=_start) - 1, first - 1, -1):
            end = _end(other, at)
            if end <= following.start_ns:
                waited_for = max(waited_for or (0, 0), (end, other[at].id))
                break
        else:
            continue
        if not first or _end(other, first - 1) <= since:
            other[first].dependencies.append(Dependency(node.id, "inter_thread", inferred=True))
            if is_range:
                node.duration_ns = min(node.duration_ns, other[first].start_ns - node.start_ns)
    if waited_for is not None:
        following.dependencies.append(Dependency(waited_for[1], "inter_thread", inferred=True))


def _start(node: ChakraNode) -> int:
    return node.start_ns


def _end(thread: Sequence[ChakraNode], at: int) -> int:
    """When a node, without those that it calls, has run."""
    end = thread[at].start_ns + thread[at].duration_ns
    return min(end, thread[at + 1].start_ns) if at + 1 < len(thread) else end
