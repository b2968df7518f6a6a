"""On which stream of a GPU each operation ran, and for which operations of other streams it waited there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from crossrank.tools.graph.linking.linked_trace import Activity, Edge


def place_on_streams(
    activities: Iterable[Activity], edges: Iterable[Edge], positions: Mapping[int, int], calls: Collection[int]
) -> dict[int, tuple[int, list[int]]]:
    """For all that ran on a device: position -> (number of its stream, positions of the operations of other streams for
    which that stream waited, the last of each). Stream 0 is the one that most ran on. Nothing where all ran on one.

    `positions` has the operation that each host node belongs to, by the node's id; `calls` those of them that
    communicate. A call runs on a stream of its communicator: it was launched on the one that this stream waits for.
    """
    ran: dict[int, tuple[int, Activity]] = {}
    stream_of: dict[int, object] = {}
    for one in activities:
        if one.host is not None and (at := positions.get(one.host)) is not None:
            ran[one.id] = at, one
            if at not in calls:
                stream_of.setdefault(at, (one.device, one.stream))
    waits: dict[int, dict[object, int]] = {}
    for edge in edges:
        if edge.kind == "stream_wait" and edge.source in ran and edge.target in ran:
            source, target = ran[edge.source][0], ran[edge.target][0]
            # Waits for communication have rules of their own.
            if source not in calls and source < target:
                latest = waits.setdefault(target, {})
                stream = stream_of[source]
                latest[stream] = max(latest.get(stream, source), source)
    numbers = {stream: number for number, (stream, _) in enumerate(Counter(stream_of.values()).most_common())}
    if len(numbers) < 2:
        return {}
    placed = {
        at: (numbers[stream], sorted(source for other, source in waits.get(at, {}).items() if other != stream))
        for at, stream in stream_of.items()
    }
    return placed | {at: (numbers[stream_of[max(waits[at].values())]], []) for at in calls if waits.get(at)}
