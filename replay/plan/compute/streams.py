"""Finds the GPU stream of each operation, and the operations of other streams that it waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from crossrank.tools.graph.linking.linked_trace import Activity, Edge


def place_on_streams(
    activities: Iterable[Activity], edges: Iterable[Edge], positions: Mapping[int, int], calls: Collection[int]
) -> dict[int, tuple[int, list[int]]]:
    """Return, for each operation on a device: (number of its stream, operations of other streams that it waited for).
    Each other stream is listed once, with its last operation. Stream 0 ran most operations. Empty for only one stream.

    `positions` maps the id of a host node to its operation; `calls` has the operations that communicate. A call runs on
    a stream of its communicator, so it counts for the stream on which it was launched.
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
            # Waits for communication follow their own rules.
            if source not in calls and source < target:
                latest = waits.setdefault(target, {})
                stream = stream_of[source]
                latest[stream] = max(latest.get(stream, source), source)
    number_of_stream = {stream: number for number, (stream, _) in enumerate(Counter(stream_of.values()).most_common())}
    if len(number_of_stream) < 2:
        return {}
    placed = {
        at: (number_of_stream[stream], sorted(source for other, source in waits.get(at, {}).items() if other != stream))
        for at, stream in stream_of.items()
    }
    return placed | {at: (number_of_stream[stream_of[max(waits[at].values())]], []) for at in calls if waits.get(at)}
