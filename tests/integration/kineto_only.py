"""An execution trace for a Kineto trace that has none: one node for each host event, called by the event around it."""

from __future__ import annotations

from typing import Any

from tests.unit.graph.linking.small_traces import nested_node

_ROOT, _USER_SCOPE = 1, 7
_HOST = {"cpu_op": 0, "user_annotation": _USER_SCOPE}


def execution_trace(kineto: dict[str, Any]) -> dict[str, Any]:
    """What an execution trace of the same window would have: names, threads, callers and record-function ids."""
    events = [event for event in kineto["traceEvents"] if event.get("cat") in _HOST and event["ph"] == "X"]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    threads = {tid: number for number, tid in enumerate(dict.fromkeys(event["tid"] for event in events), start=1)}
    nodes = [nested_node(_ROOT, "[pytorch|profiler|execution_trace|process]", _ROOT, tid=0, scope=_USER_SCOPE)]
    for number in threads.values():
        name = "[pytorch|profiler|execution_trace|thread]"
        nodes.append(nested_node(_ROOT + number, name, _ROOT, tid=number, scope=_USER_SCOPE))
    around: dict[int, list[tuple[float, int]]] = {number: [] for number in threads.values()}
    for event in events:
        tid = threads[event["tid"]]
        while around[tid] and around[tid][-1][0] <= event["ts"]:
            around[tid].pop()
        caller = around[tid][-1][1] if around[tid] else _ROOT + tid
        node_id, rf_id = 1 + len(nodes), event["args"]["Record function id"]
        nodes.append(nested_node(node_id, event["name"], caller, rf_id, tid=tid, scope=_HOST[event["cat"]]))
        around[tid].append((event["ts"] + event["dur"], node_id))
    head = {"schema": "1.1.1-chakra.0.0.4", "pid": events[0]["pid"], "time": "", "start_ts": 1, "finish_ts": 2}
    return head | {"nodes": nodes}
