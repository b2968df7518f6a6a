"""Attaches every GPU activity to the host operation that launched it.

An activity and the runtime call that launched it have the same correlation id; any call may launch (kernels,
copies, memsets, graphs, cooperative, driver API, HIP). The launching operation is the innermost one on the thread
of the call that encloses it. Where the call is not in the trace, the external id, which an activity then shares
with its operation, takes its place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from crossrank.tools.graph.linking.matching import HostMatch
from crossrank.tools.graph.linking.nesting import Nesting
from crossrank.tools.traces.kineto import Call, DeviceEvent, Id, KinetoTrace

BY_CORRELATION = "correlation id"
BY_EXTERNAL_ID = "external id"
OUTSIDE = ("launched before or after the execution trace", "launched before the Kineto trace")
"""Reasons for which an activity has no part in this trace at all."""


@dataclass(kw_only=True)
class Launches:
    """By positions in `KinetoTrace.device`; -1 where there is none."""

    call: list[int]
    """The launch call, as a position in `KinetoTrace.calls`."""
    node: list[int]
    """The host node, as a position in `ExecutionTrace.nodes`."""
    method: list[str]
    """How the node was found, or why there is none."""
    warnings: list[str] = field(default_factory=list)


def find_launches(kineto: KinetoTrace, match: HostMatch, nesting: Nesting, pid: Id) -> Launches:
    """Find the launch and the launching node of every activity. `pid` is the process of the execution trace."""
    count = len(kineto.device)
    launches = Launches(call=[-1] * count, node=[-1] * count, method=[""] * count)
    calls = _calls_by_correlation(kineto.calls)
    processes = {kineto.host[event].pid for event in match.event_of if event >= 0} or {pid}
    first = min(calls, default=0)
    pick = _Picker(kineto, calls, processes, launches)
    enclosing = _matched_encloser(match, nesting)
    by_external_id = _events_by_external_id(kineto, processes)
    spans = [(kineto.host[event].start, kineto.host[event].end) for event in match.event_of if event >= 0]
    begin = min((start for start, _ in spans), default=0)
    end = max((end for _, end in spans), default=0)
    for index, activity in enumerate(kineto.device):
        call = pick(activity)
        launches.call[index] = call
        event = nesting.around_call[call] if call >= 0 else -1
        method = BY_CORRELATION
        if event < 0 and activity.external_id != activity.correlation:
            event = by_external_id.get(activity.external_id, -1)
            if event >= 0 and kineto.host[event].start > activity.start:
                event = -1
            method = BY_EXTERNAL_ID
        node = enclosing(event) if event >= 0 else -1
        launches.node[index] = node
        if node >= 0:
            launches.method[index] = method
            continue
        at = kineto.calls[call].start if call >= 0 else activity.start
        if call >= 0 and kineto.calls[call].pid not in processes:
            launches.method[index] = "launched by another process"
        elif not begin <= at <= end:
            launches.method[index] = OUTSIDE[0]
        elif call < 0 and (activity.correlation or first) < first:
            launches.method[index] = OUTSIDE[1]  # correlation ids rise
        elif event >= 0:
            launches.method[index] = "no operation around its launch is in the execution trace"
        elif call >= 0:
            launches.method[index] = "no operation encloses its launch"
        elif activity.correlation is None:
            launches.method[index] = "it has no correlation id"
        else:
            launches.method[index] = "no launch call has its correlation id"
    return launches


def _calls_by_correlation(calls: list[Call]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for index, call in enumerate(calls):
        if call.correlation:
            found.setdefault(call.correlation, []).append(index)
    return found


class _Picker:
    """Chooses the launch call of an activity among the calls with its correlation id.

    Processes number their calls alike, so a trace of several holds an id more than once. Then the external id
    decides, then whose context the activity runs in, then that a call is ours, then that it is the last before it.
    """

    def __init__(self, kineto: KinetoTrace, calls: dict[int, list[int]], ours: set[Id], launches: Launches) -> None:
        self._kineto = kineto
        self._calls = calls
        self._ours = ours
        self._doubled = {correlation for correlation, indices in calls.items() if len(indices) > 1}
        self._users = self._users_of_contexts() if self._doubled else {}
        if self._doubled:
            launches.warnings.append(
                f"{len(self._doubled)} correlation id(s) belong to several calls (first: {min(self._doubled)}); "
                "the call was chosen by external id, process and time"
            )

    def __call__(self, activity: DeviceEvent) -> int:
        candidates: Sequence[int] = self._calls.get(activity.correlation or 0, ())
        if len(candidates) <= 1:
            return candidates[0] if candidates else -1
        calls = self._kineto.calls
        candidates = [index for index in candidates if calls[index].start <= activity.start] or candidates
        if activity.external_id is not None and activity.external_id != activity.correlation:
            same = [index for index in candidates if calls[index].external_id == activity.external_id]
            candidates = same or candidates
        users = self._users.get((activity.device, activity.context), set())
        elsewhere = bool(users) and not users & self._ours and self._ours_have_contexts
        prefer = users if elsewhere else self._ours
        return max(candidates, key=lambda index: (calls[index].pid in prefer, calls[index].start, -index))

    def _users_of_contexts(self) -> dict[tuple[Id, int | None], set[Id]]:
        """The processes that use each context, by the activities that leave no choice."""
        users: dict[tuple[Id, int | None], set[Id]] = defaultdict(set)
        for activity in self._kineto.device:
            candidates = self._calls.get(activity.correlation or 0, ())
            if len(candidates) == 1:
                users[activity.device, activity.context].add(self._kineto.calls[candidates[0]].pid)
        self._ours_have_contexts = any(pids & self._ours for pids in users.values())
        return users


def _events_by_external_id(kineto: KinetoTrace, ours: set[Id]) -> dict[int | None, int]:
    return {
        event.external_id: index for index, event in enumerate(kineto.host) if event.external_id and event.pid in ours
    }


def _matched_encloser(match: HostMatch, nesting: Nesting) -> Callable[[int], int]:
    """The node of the innermost event around an event, itself included, that has one."""
    node_of, parent = match.node_of, nesting.parent
    # Parents come first in the order of starts, so one pass settles all.
    nearest = list(node_of)
    for event in nesting.order:
        if nearest[event] < 0 and parent[event] >= 0:
            nearest[event] = nearest[parent[event]]
    return nearest.__getitem__
