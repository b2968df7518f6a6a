"""Joins the execution trace and the Kineto trace of one rank, step by step, into one graph."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from crossrank.budget import Budget
from crossrank.comm import CommRecord, Group
from crossrank.errors import CrossrankError
from crossrank.recording import RANGE, CommsFile, Damage, read_chunks
from crossrank.tools.graph.linking import dependencies as draw
from crossrank.tools.graph.linking.activities import OUTSIDE, Launches, find_launches
from crossrank.tools.graph.linking.callers import correct_callers
from crossrank.tools.graph.linking.communications import Finder
from crossrank.tools.graph.linking.graph import Activity, Edge, EdgeKind, HostOp, LinkedTrace, MatchReport
from crossrank.tools.graph.linking.matching import HostMatch, doubts, match_hosts
from crossrank.tools.graph.linking.nesting import Nesting, is_work, nest
from crossrank.tools.graph.linking.ordered import ordered_by
from crossrank.tools.graph.linking.stream_waits import WAIT_EVENT, Surroundings, infer_stream_waits
from crossrank.tools.graph.linking.synchronisation import CLOCK_NS, Waits, find_waits
from crossrank.tools.traces.execution_trace import ExecutionTrace, read_execution_trace
from crossrank.tools.traces.kernels import communication_kernel
from crossrank.tools.traces.kineto import KinetoTrace, read_kineto

_NAMES = 5


def link(
    et: str | os.PathLike[str] | ExecutionTrace,
    kineto: str | os.PathLike[str] | KinetoTrace,
    comms: str | os.PathLike[str] | None = None,
    *,
    rank: int | None = None,
) -> LinkedTrace:
    """Link one rank's execution trace with its Kineto trace.

    `et` and `kineto` are paths, fsspec URLs, or traces that were read before; `comms` is the path of the rank's
    comms file, where there is one: it gives every communication its whole record. Times of the result are
    nanoseconds on the clock of the Kineto trace.

    Raises `CrossrankError` where a file cannot be used, or where the two are not of one run.
    """
    host_trace = et if isinstance(et, ExecutionTrace) else read_execution_trace(os.fspath(et))
    device_trace = kineto if isinstance(kineto, KinetoTrace) else read_kineto(os.fspath(kineto))
    match = match_hosts(host_trace, device_trace)
    doubt = doubts(host_trace, device_trace, match)
    if len(doubt) >= 2:
        raise CrossrankError(
            f"{host_trace.path} and {device_trace.path} are not of one run ({'; '.join(doubt)}); pair the files anew"
        )
    nesting = nest(device_trace.host, device_trace.calls)
    launches = find_launches(device_trace, match, nesting, host_trace.pid)
    host = _host_ops(host_trace, device_trace, match, nesting)
    corrections = correct_callers(host, match, nesting)
    next_id = host[-1].id + 1 if host else 1
    activities, index_of = _activities(host_trace, device_trace, launches, next_id)
    told = _read_comms(
        None if comms is None else os.fspath(comms), {op.node.name for op in host if op.node.name.startswith(RANGE)}
    )
    world_size = told.world_size if told.world_size is not None else device_trace.world_size
    finder = Finder(
        host,
        _groups(told.groups, host_trace.groups, device_trace.groups),
        world_size=world_size,
        records=told.records,
        event_args=_event_args(device_trace, match),
        budget=Budget.of(host_trace.path),
    )
    finder.search()
    alone = finder.attach(activities)
    finder.number()
    edges = [
        *draw.callers(host),
        *draw.program_order(host),
        *draw.forward_backward(host),
        *draw.inter_thread(host),
        *draw.launches(activities),
        *draw.stream_order(activities),
        *draw.group_order(finder.found),
    ]
    report = _report(host_trace, device_trace, match, launches)
    report.doubts = doubt
    report.damage = [
        *_said("execution trace", host_trace.damage),
        *_said("Kineto trace", device_trace.damage),
        *_said("comms file", told.damage),
    ]
    waits = find_waits(device_trace, launches.call)
    if not device_trace.syncs:
        around = _surroundings(device_trace, match, nesting, finder, index_of)
        infer_stream_waits(device_trace, launches.call, around, waits)
    blocked: dict[int, int] = {}
    edges += _wait_edges(waits, host_trace, device_trace, match, index_of, report, blocked)
    _set_blocked(host, blocked, device_trace, match, nesting)
    edges += draw.work_waits(host, finder.found, report.syncs_unresolved)
    report.communications = dict(Counter(communication.origin for communication in finder.found))
    report.communication_kernels_alone = alone
    report.edges = dict(Counter(f"inferred {edge.kind}" if edge.inferred else edge.kind for edge in edges))
    report.warnings += [*corrections, *finder.warnings]
    if nesting.overlaps:
        report.warnings.append(f"{nesting.overlaps} host event(s) begin inside another and end after it")
    return LinkedTrace(
        rank=next((r for r in (rank, told.rank, device_trace.rank) if r is not None), None),
        kineto_rank=device_trace.rank,
        world_size=world_size,
        schema=host_trace.schema,
        pid=host_trace.pid,
        time=host_trace.time,
        start_ts=host_trace.start_ts,
        finish_ts=host_trace.finish_ts,
        base_ns=device_trace.base_ns,
        inputs={host_trace.path: host_trace.sha256, device_trace.path: device_trace.sha256} | told.inputs,
        host=host,
        activities=activities,
        communications=finder.found,
        groups=sorted(finder.groups.values(), key=lambda group: group.pg),
        edges=edges,
        report=report,
    )


def _host_ops(et: ExecutionTrace, kineto: KinetoTrace, match: HostMatch, nesting: Nesting) -> list[HostOp]:
    host = []
    for node, index in zip(et.nodes, match.event_of, strict=True):
        if index < 0:
            host.append(HostOp(node, node.parent, is_work=is_work(node.name)))
            continue
        event = kineto.host[index]
        duration, exclusive = event.end - event.start, nesting.exclusive_ns[index]
        host.append(HostOp(node, node.parent, event.start, duration, exclusive, is_work=is_work(node.name)))
    return host


def _activities(
    et: ExecutionTrace, kineto: KinetoTrace, launches: Launches, next_id: int
) -> tuple[list[Activity], dict[int, int]]:
    """The activities of this trace in the order of starts, and the id of each by its position in the Kineto trace."""
    activities = []
    ids = {}
    device = kineto.device
    for index in sorted(range(len(device)), key=lambda index: (device[index].start, index)):
        event = device[index]
        node, method = launches.node[index], launches.method[index]
        if method in OUTSIDE:
            continue
        known = communication_kernel(event.name) if event.category == "kernel" else None
        ids[index] = next_id
        activities.append(
            Activity(
                id=next_id,
                name=event.name,
                category=event.category,
                device=event.device,
                stream=event.stream,
                start_ns=event.start,
                duration_ns=event.end - event.start,
                correlation=event.correlation,
                host=et.nodes[node].id if node >= 0 else None,
                unlinked=None if node >= 0 else method,
                args=event.args,
                library=known[0] if known else None,
            )
        )
        next_id += 1
    return activities, ids


@dataclass(kw_only=True)
class _Comms:
    """What a comms file says about one window."""

    rank: int | None = None
    world_size: int | None = None
    records: dict[int, CommRecord] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)


def _read_comms(path: str | None, ranges: Collection[str]) -> _Comms:
    """The records of the window's `ranges`; a job may have made millions of others."""
    if path is None:
        return _Comms()
    file = CommsFile(path)
    told = _Comms(
        records={record.id: record for record in file.records() if f"{RANGE}{record.id}" in ranges},
        groups=file.groups,
        damage=file.damage.problems,
    )
    if file.header is not None:
        told.rank, told.world_size = file.header.rank, file.header.world_size
    digest = hashlib.sha256()
    for chunk in read_chunks(path, Damage(path)):
        digest.update(chunk)
    told.inputs[path] = digest.hexdigest()
    return told


def _said(file: str, problems: Iterable[str]) -> list[str]:
    return [f"{file}: {problem}" for problem in problems]


def _groups(*sources: Iterable[Group]) -> dict[str, Group]:
    """Groups by name; earlier sources are trusted more."""
    groups: dict[str, Group] = {}
    for source in sources:
        for group in source:
            groups.setdefault(group.pg, group)
    return groups


def _event_args(kineto: KinetoTrace, match: HostMatch) -> Callable[[int], msgspec.Raw | None]:
    def args(position: int) -> msgspec.Raw | None:
        index = match.event_of[position]
        return kineto.host[index].args if index >= 0 else None

    return args


def _surroundings(
    kineto: KinetoTrace, match: HostMatch, nesting: Nesting, finder: Finder, ids: dict[int, int]
) -> Surroundings:
    nodes_around: dict[int, list[int]] = {}
    for index, call in enumerate(kineto.calls):
        if WAIT_EVENT in call.name:
            event = nesting.around_call[index]
            nodes_around[index] = []
            while event >= 0:
                if match.node_of[event] >= 0:
                    nodes_around[index].append(match.node_of[event])
                event = nesting.parent[event]
    index_of = {activity: index for index, activity in ids.items()}
    return Surroundings(
        nodes_around=nodes_around,
        issuing=finder.at(),
        waiting=finder.waits,
        kernels={c.host: [index_of[activity] for activity in c.activities] for c in finder.found if c.host is not None},
    )


def _wait_edges(
    waits: Waits,
    et: ExecutionTrace,
    kineto: KinetoTrace,
    match: HostMatch,
    ids: dict[int, int],
    report: MatchReport,
    blocked: dict[int, int],
) -> list[Edge]:
    """The edges of `waits`. `blocked` gets, for each call, how long it waited for what its edges name."""
    begun = ordered_by(
        ((kineto.host[index].pid, kineto.host[index].tid), kineto.host[index].start, et.nodes[position].id)
        for position, index in enumerate(match.event_of)
        if index >= 0
    )
    ends = {ids[index]: event.end for index, event in enumerate(kineto.device) if index in ids}
    starts = {ids[index]: event.start for index, event in enumerate(kineto.device) if index in ids}
    starts |= {
        et.nodes[position].id: kineto.host[index].start for position, index in enumerate(match.event_of) if index >= 0
    }
    report.syncs = dict(waits.kinds)
    unresolved = waits.unresolved
    edges: dict[tuple[int, int, EdgeKind], Edge] = {}
    for wait in waits.waits:
        source = ids.get(wait.source)
        if source is None:
            unresolved["the activity waited for was launched outside the execution trace"] += 1
            continue
        if wait.target >= 0:
            target = ids.get(wait.target, -1)
            kind: EdgeKind = "stream_wait"
        else:
            waiter = kineto.calls[wait.call] if wait.call >= 0 else None
            target = begun[waiter.pid, waiter.tid].first_from(waiter.end) if waiter else -1
            kind = "sync"
        if target < 0:
            unresolved["nothing follows the wait in the execution trace"] += 1
            continue
        if ends[source] > starts[target] + CLOCK_NS:
            unresolved["the times contradict it"] += 1
            continue
        if kind == "sync":
            call = kineto.calls[wait.call]
            waited = min(ends[source], call.end) - call.start
            blocked[wait.call] = max(waited, blocked.get(wait.call, 0))
        edges.setdefault((source, target, kind), Edge(source, target, kind, wait.inferred, wait.slack_ns))
    report.syncs_unresolved = dict(unresolved)
    return list(edges.values())


def _set_blocked(
    host: Sequence[HostOp], blocked: Mapping[int, int], kineto: KinetoTrace, match: HostMatch, nesting: Nesting
) -> None:
    for call, waited in blocked.items():
        event = nesting.around_call[call]
        position = match.node_of[event] if event >= 0 else -1
        if position >= 0:
            op = host[position]
            op.blocked_ns = min(op.blocked_ns + max(0, waited), op.exclusive_ns or 0)


def _report(et: ExecutionTrace, kineto: KinetoTrace, match: HostMatch, launches: Launches) -> MatchReport:
    methods = Counter(method for method, node in zip(launches.method, launches.node, strict=True) if node >= 0)
    unlinked = Counter(method for method, node in zip(launches.method, launches.node, strict=True) if node < 0)
    outside = {reason: unlinked.pop(reason) for reason in OUTSIDE if reason in unlinked}
    names = Counter(et.nodes[position].name for position in match.unmatched)
    return MatchReport(
        host_nodes=match.matched + len(match.unmatched),
        host_matched={match.method: match.matched} if match.matched else {},
        host_unmatched=dict(Counter(match.unmatched.values())),
        host_unmatched_names=dict(names.most_common(_NAMES)),
        kineto_unmatched=_kineto_unmatched(kineto, match),
        activities=dict(Counter(event.category for event in kineto.device)),
        activities_linked=dict(methods),
        activities_unlinked=dict(unlinked),
        activities_outside=outside,
        unread=kineto.unread,
        warnings=[
            *_said("execution trace", et.warnings),
            *_said("Kineto trace", kineto.warnings),
            *match.warnings,
            *launches.warnings,
        ],
    )


def _kineto_unmatched(kineto: KinetoTrace, match: HostMatch) -> dict[str, int]:
    starts = [kineto.host[index].start for index in match.event_of if index >= 0]
    if not starts:
        return {"no node of the execution trace matched": len(kineto.host)} if kineto.host else {}
    first, last = min(starts), max(starts)
    reasons = Counter(
        "within the execution trace" if first <= event.start <= last else "before or after the execution trace"
        for event, node in zip(kineto.host, match.node_of, strict=True)
        if node < 0
    )
    return dict(reasons)
