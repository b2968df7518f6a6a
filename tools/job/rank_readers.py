"""Reads one rank's file of each kind into `RankCalls`. Runs in worker processes, without torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from crossrank.comm import CommRecord
from crossrank.errors import CrossrankError
from crossrank.recording import CommsFile
from crossrank.tools.graph.linking.communication_trace import read_communication_trace
from crossrank.tools.graph.linking.communications import OURS
from crossrank.tools.graph.linking.graph import Communication, LinkedTrace
from crossrank.tools.graph.linking.link import link
from crossrank.tools.graph.linking.read_linked import read_linked
from crossrank.tools.job.kineto_calls import HALF_HOUR
from crossrank.tools.traces.flight_calls import time_by_dump
from crossrank.tools.traces.param_comms import ParamComms, from_node
from crossrank.tools.traces.rank_calls import Input, RankCalls, RecordedCall


def read_comms(given: Input) -> RankCalls:
    """Our own records: every call, on groups with names."""
    file = CommsFile(given.path, given.rank)
    calls: list[RecordedCall] = []
    skipped_calls = skipped_bytes = 0
    for record in file.records():
        if given.steps is None or given.steps[0] <= record.step < given.steps[1]:
            calls.append(RecordedCall(record=record))
        else:
            skipped_calls += 1
            skipped_bytes += max(record.bytes, 0)
    header = file.header
    if header is None:
        raise CrossrankError(f"{given.path}: {'; '.join(file.damage.problems)}; record it again")
    offset = header.clock.get("wall", 0) - header.clock.get("t", 0)
    ends = [line["wall"] for line in file.clocks if "wall" in line] + [offset + call.record.t for call in calls[-1:]]
    found = RankCalls(
        path=given.path,
        rank=given.rank if given.rank is not None else header.rank,
        world_size=header.world_size,
        calls=calls,
        skipped_calls=skipped_calls,
        skipped_bytes=skipped_bytes,
        groups=file.groups,
        dropped=dropped if isinstance(dropped := (file.end or {}).get("dropped"), int) else 0,
        p2p_by_pair=True,
        filtered=header.leaves_out_calls,
        left_out=left_out if isinstance(left_out := (file.end or {}).get("filtered"), int) else 0,
        # Of a file without an end nobody knows how long the run went on.
        span=(header.clock["wall"], max(ends, default=0)) if "wall" in header.clock and file.end is not None else None,
        offset=offset,
        clock=header.boot_id or header.host,
        about={name: version for name, version in header.versions.items() if version}
        | {"TRACING": str(header.config.get("emit", ""))},
        node=header.node,
        steps=[(line["step"], line["t"] + offset) for line in file.steps if "step" in line and "t" in line],
        problems=list(file.damage.problems),
    )
    if file.end is None:
        found.notes.append(f"{given.path}: has no end: the process died, or still runs")
    by_id = {call.record.id: call for call in calls}
    for trace in _traces(given, found):
        _count_matched(trace, found)
        times = _Times(trace)
        for communication in trace.communications:
            call = by_id.get(communication.record.id)
            if call is not None and communication.origin in OURS:
                times.give(call, communication, offset)
    found.origins["kineto"] = sum(call.took_ns is not None for call in calls)
    if given.flight is not None and not found.origins["kineto"]:
        time_by_dump(calls, given.flight, found)
        found.origins["flight"] = sum(call.took_ns is not None for call in calls)
    return found


def _count_matched(trace: LinkedTrace, found: RankCalls) -> None:
    report = trace.report
    activities = sum(report.activities_linked.values())
    for what, matched, total in (
        ("host operations", sum(report.host_matched.values()), report.host_nodes),
        ("GPU activities", activities, activities + sum(report.activities_unlinked.values())),
    ):
        before = found.matched.get(what, (0, 0))
        if total:
            found.matched[what] = before[0] + matched, before[1] + total


def _traces(given: Input, found: RankCalls) -> Iterator[LinkedTrace]:
    """The linked traces of a rank's windows; one that cannot be used is told."""
    windows: list[Callable[[], LinkedTrace]] = [partial(read_linked, path) for path in given.linked]
    windows += [partial(link, pair.et, pair.kineto, pair.comms, rank=pair.rank) for pair in given.pairs]
    for window in windows:
        try:
            yield window()
        except CrossrankError as error:
            found.notes.append(f"no durations from it: {error}")


class _Times:
    """The times of a linked trace, by the nodes of a communication."""

    def __init__(self, trace: LinkedTrace) -> None:
        self._base_ns = trace.base_ns
        self._activities = {activity.id: activity for activity in trace.activities}
        self._hosts = {op.id: op for op in trace.host}

    def launched_ns(self, communication: Communication) -> int | None:
        """When the host made the call, ns since 1970; None where the trace does not say."""
        host = self._hosts.get(communication.host or -1)
        return host.start_ns + self._base_ns if host is not None and host.start_ns is not None else None

    def give(self, call: RecordedCall, communication: Communication, offset: int) -> None:
        """Set the times of `call`; `offset` is to be taken from ns since 1970 to have the record's clock."""
        kernels = [self._activities[number] for number in communication.activities if number in self._activities]
        if kernels:
            begin = min(kernel.start_ns for kernel in kernels)
            call.took_ns = max(kernel.start_ns + kernel.duration_ns for kernel in kernels) - begin
            call.began_ns = begin + self._base_ns
        work = self._hosts.get(communication.work or -1)
        if not kernels and work is not None and work.start_ns is not None:
            call.took_ns = work.duration_ns
            call.began_ns = work.start_ns + self._base_ns
        host = self._hosts.get(communication.host or -1)
        # The host goes on while a GPU communicates, but for a barrier.
        follows = not kernels or call.record.op == "barrier"
        if follows and host is not None and host.start_ns is not None and host.duration_ns is not None:
            call.returned_ns = host.start_ns + host.duration_ns + self._base_ns - offset


def read_linked_trace(given: Input) -> RankCalls:
    """A linked trace: calls with their times, and the waits that its execution trace has."""
    return _of_linked(read_linked(given.path), given)


def read_pair(given: Input) -> RankCalls:
    """The execution trace and the Kineto trace of a rank, linked in memory."""
    (pair,) = given.pairs
    return _of_linked(link(pair.et, pair.kineto, pair.comms, rank=pair.rank), given)


def _of_linked(trace: LinkedTrace, given: Input) -> RankCalls:
    calls = [RecordedCall(record=one.record) for one in trace.communications]
    times = _Times(trace)
    for call, communication in zip(calls, trace.communications, strict=True):
        # Records from a comms file are on that file's clock: here all go on the trace's.
        launched = times.launched_ns(communication)
        if launched is not None:
            call.record = msgspec.structs.replace(call.record, t=launched)
        times.give(call, communication, 0)
    found = RankCalls(
        path=given.path,
        rank=given.rank if given.rank is not None else trace.rank,
        world_size=trace.world_size,
        calls=calls,
        groups=trace.groups,
        numbered=not any(one.seq_counted for one in trace.communications),
        p2p_by_pair=all(one.origin in OURS for one in trace.communications),
        span=(trace.base_ns, trace.base_ns + HALF_HOUR) if trace.base_ns else None,
    )
    _count_matched(trace, found)
    waits = []
    launches = sorted(call.record.t for call in calls)
    for op in trace.host:
        if op.node.name == "record_param_comms" and op.start_ns is not None:
            said = from_node(op.node)
            if said is not None and said.name == "wait":
                waits.append((bisect_left(launches, op.start_ns + trace.base_ns), said))
    _place_recorded_waits(found, sorted(waits, key=lambda wait: wait[0]))
    return found


def read_et(given: Input) -> RankCalls:
    """An execution trace of any schema. It has no times: calls have their order and, on NCCL, their waits."""
    trace = read_communication_trace(given.path, given.world_size)
    if given.world_size is None and trace.warnings:
        # Old traces name groups by addresses. The splits of an all_to_all then tell the size of the world.
        splits = [len(one.record.in_split or ()) for one in trace.communications]
        if max(splits, default=0) > 1:
            trace = read_communication_trace(given.path, max(splits))
    calls = [RecordedCall(record=one.record) for one in trace.communications]
    found = RankCalls(
        path=given.path,
        rank=given.rank,
        calls=calls,
        groups=trace.groups,
        numbered=False,
        timed=False,
        problems=trace.damage,
        # `build` joins groups that are named by addresses by their members, or refuses them.
        notes=[f"{given.path}: {warning}" for warning in trace.warnings if "named by an address" not in warning],
    )
    _place_recorded_waits(found, trace.waits)
    # What is no operation that is known, or cannot be read, is left out later, and counted.
    for name in trace.unknown:
        calls.append(RecordedCall(record=CommRecord(id=-1, op=name, c10d=name, pg="", bytes=0, t=0), blocking=True))
    return found


def _place_recorded_waits(found: RankCalls, waits: Sequence[tuple[int, ParamComms]]) -> None:
    """`waits`: (number of calls begun before it, what is waited for). In a trace that has any, a call without one did
    not return before it was over."""
    for before, wait in waits:
        # The last call of that number before the wait: numbers repeat between groups in old traces.
        for index in range(before - 1, -1, -1):
            call = found.calls[index]
            number = call.record.p2p_seq if call.record.p2p_seq is not None else call.record.seq
            same_group = wait.pg in ("", "0") or wait.pg == call.record.pg
            if number == wait.seq and same_group and call.wait_before is None:
                call.wait_before, call.blocking = before, False
                found.waits += 1
                break
        else:
            found.waits_without_call += 1
    if waits:
        for call in found.calls:
            call.blocking = call.wait_before is None
