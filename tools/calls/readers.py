"""Reads one rank's file of each kind into `RankCalls`. Runs in worker processes, without torch."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from crossrank.comm import OPERATIONS, CommRecord, Group, operation_of
from crossrank.dtypes import dtype_of
from crossrank.errors import CrossrankError
from crossrank.recording import CommsFile
from crossrank.tools.calls.rank_calls import RankCalls, RecordedCall
from crossrank.tools.linking.communication_trace import read_communication_trace
from crossrank.tools.linking.communications import MARKERS, OURS
from crossrank.tools.linking.graph import Communication, LinkedTrace
from crossrank.tools.linking.inputs import RankInput
from crossrank.tools.linking.kernels import communication_kernel
from crossrank.tools.linking.link import link
from crossrank.tools.linking.read_linked import read_linked
from crossrank.tools.readers.flight_dump import Entry, FlightDump, read_flight_dump
from crossrank.tools.readers.kineto import DeviceEvent, HostEvent, read_kineto
from crossrank.tools.readers.param_comms import ParamComms, from_kineto, from_node, to_record

_HALF_HOUR = 1_800_000_000_000


@dataclass(frozen=True, kw_only=True)
class Input:
    """One file, with those beside it that say how long its calls took."""

    path: str
    rank: int | None
    window: int = 1
    linked: tuple[str, ...] = ()
    pairs: tuple[RankInput, ...] = ()
    """Windows that are not linked yet; linked here, in memory."""
    flight: str | None = None
    world_size: int | None = None
    steps: tuple[int, int] | None = None
    """Iterations from the first to before the second; None = all. Comms files alone know them."""


def read_comms(given: Input) -> RankCalls:
    """Our own records: every call, on groups with names."""
    file = CommsFile(given.path)
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
        rank=header.rank,
        world_size=header.world_size,
        calls=calls,
        skipped_calls=skipped_calls,
        skipped_bytes=skipped_bytes,
        groups=file.groups,
        dropped=dropped if isinstance(dropped := (file.end or {}).get("dropped"), int) else 0,
        p2p_by_pair=True,
        filtered=header.config.get("emit") == "CROSSNODE",
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
        _time_by_dump(calls, given.flight, found)
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
        if host is not None and host.start_ns is not None and host.duration_ns is not None:
            call.returned_ns = host.start_ns + host.duration_ns + self._base_ns - offset


def _time_by_dump(calls: list[RecordedCall], path: str, found: RankCalls) -> None:
    """Durations of the flight recorder beside a comms file, where it has any (NCCL)."""
    try:
        dump = read_flight_dump(path)
    except CrossrankError as error:
        found.notes.append(f"no durations from it: {error}")
        return
    moment = dump.moment
    if moment is None:
        return
    offset = moment.clock.get("wall", 0) - moment.clock.get("t", 0)
    entries: dict[str, list[Entry]] = defaultdict(list)
    for entry in dump.entries:
        if entry.time_discovered_completed_ns:
            entries[entry.process_group[0]].append(entry)
    launches: dict[str, dict[int, list[RecordedCall]]] = defaultdict(dict)
    for call in calls:
        batch = call.record.batch
        launches[call.record.pg].setdefault(call.record.id if batch is None else batch, []).append(call)
    for pg, rows in entries.items():
        at = 0
        for launch in launches[pg].values():
            # Both are in the order of the calls; torch notes a call within the launch that the record precedes.
            wall = launch[0].record.t + offset
            while at < len(rows) and rows[at].time_created_ns < wall:
                at += 1
            if at < len(rows) and rows[at].time_created_ns - wall < _SAME_CALL and _is_of(rows[at], launch):
                for call in launch:
                    _set_times(call, rows[at])
                at += 1


_SAME_CALL = 5_000_000
"""ns that may lie between our note of a call and torch's."""


def _is_of(entry: Entry, launch: Sequence[RecordedCall]) -> bool:
    """Whether an entry can be that of a launch: of one call, or of a batch, which one entry closes."""
    name = entry.profiling_name.partition(":")[2] or entry.profiling_name
    if is_closing(entry):
        return len(launch) > 1 or launch[0].record.batch is not None
    operation = operation_of(name.partition(" ")[0])
    return operation is not None and operation.name == launch[0].record.op


def is_closing(entry: Entry) -> bool:
    """Whether an entry stands for the launch of a batch, whose members have entries of their own without times."""
    name = entry.profiling_name.partition(":")[2] or entry.profiling_name
    return name == _CLOSING or (
        name.lower().endswith("_coalesced") and not entry.input_sizes and not entry.output_sizes
    )


def _set_times(call: RecordedCall, entry: Entry) -> None:
    began, ended = entry.time_discovered_started_ns, entry.time_discovered_completed_ns
    if entry.duration_ms is not None:
        call.took_ns = round(entry.duration_ms * 1e6)
    elif began and ended:
        call.took_ns = ended - began
    call.began_ns = began or entry.time_created_ns or None


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
        span=(trace.base_ns, trace.base_ns + _HALF_HOUR) if trace.base_ns else None,
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


def read_kineto_trace(given: Input) -> RankCalls:
    """A Kineto trace: what its kernels, or where it has none its host events, say of the communication."""
    trace = read_kineto(given.path)
    groups = {group.pg: group for group in trace.groups}
    launched = {call.correlation: call for call in trace.calls if call.correlation is not None}
    rows: list[tuple[int, DeviceEvent | HostEvent, ParamComms]] = []
    for event in trace.device:
        described = from_kineto(event.args) if event.category == "kernel" else None
        if described is not None:
            call = launched.get(event.correlation) if event.correlation is not None else None
            rows.append((call.start if call is not None else event.start, event, described))
    if not rows:
        for host in trace.host:
            described = from_kineto(host.args)
            if described is not None:
                rows.append((host.start, host, described))
    if not rows:  # before 2023 Kineto gave nothing but the names of kernels
        for event in trace.device:
            known = communication_kernel(event.name) if event.category == "kernel" else None
            if known is not None and known[1] is not None:
                rows.append((event.start, event, ParamComms(name=known[1])))
    rows.sort(key=lambda row: row[0])
    calls = []
    for number, (start, source, described) in enumerate(rows):
        group = groups.get(described.pg)
        if group is None and described.ranks:
            group = groups[described.pg] = Group(
                pg=described.pg, size=len(described.ranks), ranks=described.ranks, desc=described.desc
            )
        if operation_of(described.name) is None and described.name in MARKERS:
            continue
        shapes_from_elements(described)
        time = start + trace.base_ns
        record = to_record(described, group, number=number, time=time, c10d="")
        is_kernel = isinstance(source, DeviceEvent)
        calls.append(
            RecordedCall(
                record=record,
                took_ns=source.end - source.start if is_kernel else None,
                began_ns=source.start + trace.base_ns if is_kernel else None,
            )
        )
    return RankCalls(
        path=given.path,
        rank=given.rank if given.rank is not None else trace.rank,
        world_size=trace.world_size,
        calls=calls,
        groups=list(groups.values()),
        numbered=False,
        span=(trace.base_ns, trace.base_ns + _HALF_HOUR) if trace.base_ns else None,
        problems=list(trace.damage),
    )


def shapes_from_elements(comms: ParamComms) -> None:
    """Kineto counts elements: one tensor of that many, on each side that has any."""
    if not comms.inputs and comms.in_elements:
        comms.inputs = [[comms.in_elements]]
    if not comms.outputs and comms.out_elements:
        comms.outputs = [[comms.out_elements]]


def read_flight(given: Input) -> RankCalls:
    """A dump of the flight recorder: the last calls of a rank, on NCCL with their durations.

    gloo's recorder notes what a call is made of and no sends; our own dumps carry the calls themselves beside it.
    """
    dump = read_flight_dump(given.path)
    moment = dump.moment
    backend = dump.entries[0].profiling_name.partition(":")[0] if dump.entries else ""
    known = dump.groups + (moment.groups if moment is not None else [])
    if moment is not None and moment.calls and backend in ("", "gloo"):
        calls = [RecordedCall(record=record) for record in moment.calls]
    else:
        calls = _of_entries(dump, {group.pg: group for group in known})
    first = dump.entries[0].record_id if dump.entries else 0
    lost = moment is not None and bool(moment.calls) and moment.calls[0].id > 0
    return RankCalls(
        path=given.path,
        rank=given.rank if given.rank is not None else (moment.rank if moment is not None else None),
        world_size=moment.world_size if moment is not None else None,
        calls=calls,
        groups=known,
        groups_by_use=backend == "gloo",
        starts_late=first > 0 or lost,
        problems=list(dump.problems),
        notes=_GLOO_NOTES if backend == "gloo" and moment is None else [],
    )


_CLOSING = "coalesced"
_GLOO_NOTES = [
    "gloo's own dumps know neither sends and receives nor the members of groups: those who call on a name are taken",
]


def _of_entries(dump: FlightDump, groups: dict[str, Group]) -> list[RecordedCall]:
    calls: list[RecordedCall] = []
    open_batch: dict[str, list[tuple[int, Entry]]] = defaultdict(list)
    for entry in dump.entries:
        pg, desc = entry.process_group
        name = entry.profiling_name.partition(":")[2] or entry.profiling_name
        if is_closing(entry):
            # The members of a batch come before the entry that closes it, and share its number.
            members = [index for index, one in open_batch.pop(pg, []) if _shares_number(one, entry)]
            for index in members:
                record = calls[index].record
                calls[index].record = msgspec.structs.replace(record, batch=calls[members[0]].record.id)
                _set_times(calls[index], entry)
            continue
        op, _, ends = name.partition(" ")
        operation = operation_of(op)
        peer = None
        if operation is not None and operation.p2p:
            arrow = "->" if "->" in ends else "<-"
            other = ends.partition(arrow)[2]
            peer = int(other) if other.isdecimal() and len(other) < 8 else None
        dtypes = entry.input_dtypes or entry.output_dtypes
        dtype = dtype_of(dtypes[0]) if dtypes else None
        p2p = operation is not None and operation.p2p
        comms = ParamComms(
            name=op,
            pg=pg,
            desc=desc,
            rank=peer,
            inputs=[] if operation is OPERATIONS["recv"] else [list(shape) for shape in entry.input_sizes],
            outputs=[list(shape) for shape in entry.output_sizes],
            dtype=dtype.name if dtype is not None else (dtypes[0] if dtypes else None),
            seq=entry.p2p_seq_id if p2p else entry.collective_seq_id,
        )
        record = to_record(comms, groups.get(pg), number=len(calls), time=entry.time_created_ns, c10d="")
        call = RecordedCall(record=record)
        _set_times(call, entry)
        if not entry.time_discovered_completed_ns:
            open_batch[pg].append((len(calls), entry))
        calls.append(call)
    return calls


def _shares_number(member: Entry, closing: Entry) -> bool:
    if member.is_p2p or "->" in member.profiling_name or "<-" in member.profiling_name:
        return member.p2p_seq_id == closing.p2p_seq_id
    return member.collective_seq_id == closing.collective_seq_id
