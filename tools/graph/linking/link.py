"""Joins the execution trace and the Kineto trace of one rank into one graph."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePosixPath

import msgspec

from crossrank.budget import Budget
from crossrank.comm import Group
from crossrank.errors import CrossrankError
from crossrank.recording import RANGE, CommsFile, ReadIssues, read_chunks
from crossrank.tools.graph.linking import dependencies as draw
from crossrank.tools.graph.linking.activities import OUTSIDE, find_launches
from crossrank.tools.graph.linking.communications import Communications, find_communications
from crossrank.tools.graph.linking.event_matching import HostMatch, correct_callers, doubts, match_hosts
from crossrank.tools.graph.linking.linked_trace import Edge, EdgeKind, LinkedTrace, MatchReport
from crossrank.tools.graph.linking.nesting import is_work, nest
from crossrank.tools.graph.linking.waits import CLOCK_NS, GpuWaits, find_waits
from crossrank.tools.paused_gc import paused_gc
from crossrank.tools.traces.execution_trace import ExecutionTrace, read_execution_trace
from crossrank.tools.traces.kineto import KinetoTrace, RuntimeCall, read_kineto

_MAX_NAMES = 5


@paused_gc()
def link(
    et: str | os.PathLike[str],
    kineto: str | os.PathLike[str],
    comms: str | os.PathLike[str] | None = None,
    *,
    rank: int | None = None,
) -> LinkedTrace:
    """Link one rank's execution trace with its Kineto trace.

    All are paths or fsspec URLs. `comms` is the rank's comms file, if there is one. It gives each communication its
    complete record. Times of the result are ns on the clock of the Kineto trace.

    Raise `CrossrankError` if a file is unusable, or if the two are not of the same run.
    """
    traces = read_execution_trace(os.fspath(et)), read_kineto(os.fspath(kineto))
    return _Linking(*traces, None if comms is None else os.fspath(comms)).link(rank)


class _Linking:
    """One rank's traces and what is known about them so far. Positions are those in the lists of the traces."""

    def __init__(self, et: ExecutionTrace, kineto: KinetoTrace, comms: str | None) -> None:
        self.et = et
        self.kineto = kineto
        self.match = match_hosts(et, kineto)
        self.doubts = doubts(et, kineto, self.match)
        if len(self.doubts) >= 2:
            raise CrossrankError(
                f"{et.path} and {kineto.path} are not of the same run ({'; '.join(self.doubts)}); give files of one run"
            )
        self.nesting = nest(kineto.host, kineto.calls)
        self.launches = find_launches(et, kineto, self.match, self.nesting)
        self.host = et.nodes
        for op, index in zip(et.nodes, self.match.event_of, strict=True):
            op.is_work = is_work(op.name)
            if index >= 0:
                event = kineto.host[index]
                op.start_ns, op.duration_ns = event.start, event.end - event.start
                op.exclusive_ns = self.nesting.exclusive_ns[index]
        self.comms = None if comms is None else CommsFile(comms)
        ranges = {node.name for node in et.nodes if node.name.startswith(RANGE)}
        # Other records are skipped: a job may have made millions of calls outside the window.
        made = self.comms.records() if self.comms else ()
        self.records = {record.id: record for record in made if f"{RANGE}{record.id}" in ranges}

    def link(self, rank: int | None) -> LinkedTrace:
        corrections = correct_callers(self.et, self.match, self.nesting)
        activities, ids = self.launches.activities, self.launches.id_of
        header = self.comms.header if self.comms else None
        world_size = header.world_size if header else self.kineto.world_size
        found = find_communications(
            self.host,
            activities,
            _merge_groups(self._recorded_groups(), self.et.groups, self.kineto.groups),
            world_size=world_size,
            records=self.records,
            event_args=self._event_args,
            budget=Budget.of(self.et.path),
        )
        index_of = {activity: index for index, activity in ids.items()}
        waits = find_waits(
            self.kineto,
            self.launches.call,
            self._nodes_around,
            issuing={node: (c.record, [index_of[one] for one in c.activities]) for node, c in found.at.items()},
            waiting=found.waits,
        )
        ordered = draw.in_program_order(self.host)
        edges = [
            *(Edge(op.caller, op.id, "caller") for op in self.host if op.caller),
            *draw.program_order(ordered),
            *draw.forward_backward(ordered),
            *draw.inter_thread(ordered),
            *(Edge(one.host, one.id, "launch") for one in activities if one.host is not None),
            *draw.stream_order(activities),
            *draw.group_order(found.communications),
            *self._wait_edges(waits, ids),
            *draw.work_waits(self.host, ordered, found.communications, waits.unresolved),
        ]
        inputs = {self.et.path: self.et.sha256, self.kineto.path: self.kineto.sha256}
        inputs |= {self.comms.path: content_hash(self.comms.path)} if self.comms else {}
        return LinkedTrace(
            rank=next((r for r in (rank, header.rank if header else None, self.kineto.rank) if r is not None), None),
            kineto_rank=self.kineto.rank,
            world_size=world_size,
            schema=self.et.schema,
            pid=self.et.pid,
            time=self.et.time,
            start_ts=self.et.start_ts,
            finish_ts=self.et.finish_ts,
            base_ns=self.kineto.base_ns,
            iterations=self.kineto.iterations,
            inputs={PurePosixPath(path).name: digest for path, digest in inputs.items()},
            host=self.host,
            activities=activities,
            communications=found.communications,
            groups=sorted(found.groups.values(), key=lambda group: group.pg),
            edges=edges,
            report=self._make_report(found, waits, edges, corrections),
        )

    def _recorded_groups(self) -> list[Group]:
        """Return the groups of the comms file that existed in the window."""
        epochs = {record.epoch for record in self.records.values()}
        groups = self.comms.groups if self.comms else []
        return [group for group in groups if not epochs or group.epoch in epochs]

    def _nodes_around(self, call: int) -> list[int]:
        """Return the positions of the nodes around a runtime call, the innermost first."""
        return [node for event in self.nesting.upwards(call) if (node := self.match.node_of[event]) >= 0]

    def _event_args(self, position: int) -> msgspec.Raw | None:
        index = self.match.event_of[position]
        return self.kineto.host[index].args if index >= 0 else None

    def _wait_edges(self, waits: GpuWaits, ids: dict[int, int]) -> list[Edge]:
        """Return the edges of `waits`. Set `blocked_ns` of the operations around the waiting calls."""
        kineto = self.kineto
        edges: dict[tuple[int, int, EdgeKind], Edge] = {}
        blocked: dict[int, int] = {}
        for wait in waits.waits:
            call = kineto.calls[wait.call] if wait.call >= 0 else None
            kind: EdgeKind = "stream_wait" if wait.target >= 0 else "sync"
            if kind == "stream_wait":
                target, start_ns = ids.get(wait.target), kineto.device[wait.target].start
            else:
                target, start_ns = self._find_next_op(call) if call is not None else (None, 0)
            ended = kineto.device[wait.source].end
            if wait.source not in ids:
                waits.unresolved["the activity was launched outside the execution trace"] += 1
            elif target is None:
                waits.unresolved["no operation after the wait in the execution trace"] += 1
            elif ended > start_ns + CLOCK_NS:
                waits.unresolved["contradicts the times"] += 1
            else:
                source = ids[wait.source]
                edges.setdefault((source, target, kind), Edge(source, target, kind, wait.inferred, wait.slack_ns))
                if kind == "sync" and call is not None:
                    blocked[wait.call] = max(min(ended, call.end) - call.start, blocked.get(wait.call, 0))
        for index, waited in blocked.items():
            event = self.nesting.around_call[index]
            if event >= 0 and self.match.node_of[event] >= 0:
                op = self.host[self.match.node_of[event]]
                op.blocked_ns = min(op.blocked_ns + waited, op.exclusive_ns)
        return list(edges.values())

    def _find_next_op(self, call: RuntimeCall) -> tuple[int | None, int]:
        """Return id and start of the next operation that the thread of a call starts after it."""
        events = self.nesting.threads.get((call.pid, call.tid), [])
        at = bisect_left(events, call.end, key=lambda event: self.kineto.host[event].start)
        for event in map(events.__getitem__, range(at, len(events))):
            if (node := self.match.node_of[event]) >= 0:
                return self.host[node].id, self.kineto.host[event].start
        return None, 0

    def _make_report(
        self, found: Communications, waits: GpuWaits, edges: Iterable[Edge], corrections: Iterable[str]
    ) -> MatchReport:
        et, kineto, match, launches = self.et, self.kineto, self.match, self.launches
        unlinked = launches.unlinked.copy()
        outside = {reason: unlinked.pop(reason) for reason in OUTSIDE if reason in unlinked}
        names = Counter(et.nodes[position].name for position in match.unmatched)
        report = MatchReport(
            host_nodes=match.matched + len(match.unmatched),
            host_matched={match.method: match.matched} if match.matched else {},
            host_unmatched=dict(Counter(match.unmatched.values())),
            host_unmatched_names=dict(names.most_common(_MAX_NAMES)),
            kineto_unmatched=_count_unmatched_events(kineto, match),
            activities=dict(Counter(event.category for event in kineto.device)),
            activities_linked=dict(launches.linked),
            activities_unlinked=dict(unlinked),
            activities_outside=outside,
            communications=dict(Counter(communication.origin for communication in found.communications)),
            communication_kernels_alone=found.kernels_alone,
            syncs=dict(waits.kinds),
            syncs_unresolved=dict(waits.unresolved),
            edges=dict(Counter(f"inferred {edge.kind}" if edge.inferred else edge.kind for edge in edges)),
            of_other_iterations=match.of_other_iterations,
            doubts=self.doubts,
            damage=[
                *_with_file(et.path, et.damage),
                *_with_file(kineto.path, kineto.damage),
                *(_with_file(self.comms.path, self.comms.issues.problems) if self.comms else ()),
            ],
            unread=dict(sorted(kineto.unread.items())),
            warnings=[
                *_with_file("execution trace", et.warnings),
                *match.warnings,
                *launches.warnings,
                *corrections,
                *found.warnings,
            ],
        )
        if self.nesting.overlaps:
            report.warnings.append(f"{self.nesting.overlaps} host event(s) start inside another one and end after it")
        return report


def content_hash(path: str) -> str:
    """Return the SHA-256 of the uncompressed content of a file."""
    digest = hashlib.sha256()
    for chunk in read_chunks(path, ReadIssues(path)):
        digest.update(chunk)
    return digest.hexdigest()


def _with_file(file: str, problems: Iterable[str]) -> list[str]:
    return [f"{file}: {problem}" for problem in problems]


def _merge_groups(*sources: Iterable[Group]) -> dict[str, Group]:
    """Return groups by name. Earlier sources are trusted more."""
    return {group.pg: group for source in reversed(sources) for group in reversed(list(source))}


def _count_unmatched_events(kineto: KinetoTrace, match: HostMatch) -> dict[str, int]:
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
