"""Attaches each GPU activity to the host operation that launched it.

An activity and the runtime call that launched it have the same correlation id. Any call may launch: kernels, copies,
memsets, graphs, cooperative launches, driver API, HIP. The launching operation is the innermost one that encloses the
call on its thread. If the call is not in the trace, the external id replaces it: an activity then shares this id with
its operation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from crossrank.tools.graph.linking.event_matching import HostMatch, nearest_nodes
from crossrank.tools.graph.linking.linked_trace import Activity
from crossrank.tools.graph.linking.nesting import Nesting
from crossrank.tools.traces.execution_trace import ExecutionTrace
from crossrank.tools.traces.kineto import KinetoTrace

BY_CORRELATION = "correlation id"
BY_EXTERNAL_ID = "external id"
OUTSIDE = ("launched before or after the execution trace", "launched before the Kineto trace")
"""Reasons why an activity does not belong to this trace."""


@dataclass(kw_only=True)
class LaunchLookup:
    """The activities of a trace and their launches."""

    activities: list[Activity] = field(default_factory=list)
    """Activities that belong to the trace, ordered by start."""
    id_of: dict[int, int] = field(default_factory=dict)
    """Position in `KinetoTrace.device` -> id."""
    call: list[int]
    """Position of each activity's launch in `KinetoTrace.calls`; -1 if there is none."""
    linked: Counter[str] = field(default_factory=Counter)
    """How the host node was found -> number of activities."""
    unlinked: Counter[str] = field(default_factory=Counter)
    """Why no host node was found -> number of activities."""
    warnings: list[str] = field(default_factory=list)


def find_launches(et: ExecutionTrace, kineto: KinetoTrace, match: HostMatch, nesting: Nesting) -> LaunchLookup:
    """Find the launch and the launching node of each activity."""
    matched = [kineto.host[event] for event in match.event_of if event >= 0]
    processes = {event.pid for event in matched} or {et.pid}
    begin, end = min((event.start for event in matched), default=0), max((event.end for event in matched), default=0)
    calls: dict[int | None, list[int]] = defaultdict(list)
    for index, call in enumerate(kineto.calls):
        if call.correlation:
            calls[call.correlation].append(index)
    doubled = [correlation for correlation, indices in calls.items() if correlation and len(indices) > 1]
    first = min((call.correlation for call in kineto.calls if call.correlation), default=0)
    by_external_id: dict[int | None, int] = {
        event.external_id: index
        for index, event in enumerate(kineto.host)
        if event.external_id and event.pid in processes
    }
    nearest = nearest_nodes(match, nesting)
    launches = LaunchLookup(call=[-1] * len(kineto.device))
    if doubled:
        launches.warnings.append(
            f"{len(doubled)} correlation id(s) belong to several calls (first: {min(doubled)}); "
            "crossrank uses the last one of this process before the activity"
        )
    first_id = et.nodes[-1].id + 1
    for position in sorted(range(len(kineto.device)), key=lambda position: kineto.device[position].start):
        activity = kineto.device[position]
        candidates = calls.get(activity.correlation, [-1])
        index = candidates[0]
        if len(candidates) > 1:
            launching = [kineto.calls[one] for one in candidates]
            ranked = [(call.pid in processes, call.start <= activity.start, call.start) for call in launching]
            index = candidates[ranked.index(max(ranked))]
        event = nesting.around_call[index] if index >= 0 else -1
        method = BY_CORRELATION
        if event < 0 and activity.external_id != activity.correlation:
            method = BY_EXTERNAL_ID
            event = by_external_id.get(activity.external_id, -1)
            if event >= 0 and kineto.host[event].start > activity.start:
                event = -1
        node = nearest[event] if event >= 0 else -1
        at = kineto.calls[index].start if index >= 0 else activity.start
        if node < 0:
            if index >= 0 and kineto.calls[index].pid not in processes:
                method = "launched by another process"
            elif not begin <= at <= end:
                method = OUTSIDE[0]
            elif (activity.correlation or first) < first:
                method = OUTSIDE[1]  # correlation ids increase
            elif event >= 0:
                method = "no operation at its launch is in the execution trace"
            elif index >= 0:
                method = "no operation encloses its launch"
            elif activity.correlation is None:
                method = "it has no correlation id"
            else:
                method = "no launch call has its correlation id"
        launches.call[position] = index
        (launches.linked if node >= 0 else launches.unlinked)[method] += 1
        if method in OUTSIDE:
            continue
        launches.id_of[position] = number = first_id + len(launches.id_of)
        launches.activities.append(
            Activity(
                id=number,
                name=activity.name,
                category=activity.category,
                device=activity.device,
                stream=activity.stream,
                start_ns=activity.start,
                duration_ns=activity.end - activity.start,
                correlation=activity.correlation,
                host=et.nodes[node].id if node >= 0 else None,
                unlinked=None if node >= 0 else method,
                args=activity.args,
            )
        )
    return launches
