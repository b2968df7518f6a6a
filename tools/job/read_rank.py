"""Reads what the files of one rank say into a `RankTrace`. Runs in worker processes, without torch.

A comms file has the calls. Their durations are from a dump of the flight recorder next to it, or from traced windows,
which are linked here if necessary.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from crossrank.comm import CommRecord, is_p2p
from crossrank.errors import CrossrankError
from crossrank.measured_launches import RecordedLaunch, RecordedLaunches
from crossrank.recording import COMMS, EXECUTION_TRACE, FLIGHT, KINETO, LINKED
from crossrank.tools.graph.linking.communication_trace import read_communication_trace
from crossrank.tools.graph.linking.communications import ADDRESS_AS_NAME, OURS
from crossrank.tools.graph.linking.current import read_current
from crossrank.tools.graph.linking.linked_file import read_linked
from crossrank.tools.graph.linking.linked_trace import Communication, HostOp, LinkedTrace
from crossrank.tools.graph.linking.window_files import RankInput
from crossrank.tools.job.kineto_calls import HALF_HOUR, read_kineto_trace
from crossrank.tools.job.traced_windows import take_linked
from crossrank.tools.traces.call_numbers import mostly_numbered
from crossrank.tools.traces.comms import read_comms
from crossrank.tools.traces.discover import INSPECTOR, Files
from crossrank.tools.traces.flight.calls import read_flight
from crossrank.tools.traces.flight.dump import read_flight_dump
from crossrank.tools.traces.nccl_inspector import read_inspector
from crossrank.tools.traces.param_comms import ParamComms, from_node
from crossrank.tools.traces.rank_trace import RankTrace, TraceBuilder, waits_of

_OF_WINDOW = (LINKED, EXECUTION_TRACE, KINETO)


@dataclass(frozen=True, kw_only=True)
class RankSources:
    """One file, and the files next to it that have the durations of its calls, or the calls themselves."""

    kind: str
    """A key of `READERS`, or `NSIGHT`."""
    path: str
    rank: int | None
    windows: tuple[RankInput, ...] = ()
    """Windows with both traces, a linked trace, or all three."""
    flight: str | None = None
    comms: tuple[tuple[int, str], ...] = ()
    """(rank, comms file) for an export of Nsight Systems, which may have several ranks."""
    world_size: int | None = None
    also: str = ""
    """Regular expression for the names of other kernels that communicate."""
    steps: tuple[int, int] | None = None
    """Iterations from the first to before the second; None = all. Comms files alone know them."""


def comms_with_times(rank: int | None, files: Files) -> RankSources:
    """The comms file of a rank, with the files next to it that have the durations of its calls."""
    flight = files[FLIGHT][0].path if FLIGHT in files else None
    windows = windows_of_rank(rank, files)
    return RankSources(kind=COMMS, path=files[COMMS][0].path, rank=rank, windows=windows, flight=flight)


def windows_of_rank(rank: int | None, files: Files) -> tuple[RankInput, ...]:
    """The windows of a rank that have both traces, or a linked trace."""
    linked, ets, kinetos = ({one.window: one.path for one in files.get(kind, ())} for kind in _OF_WINDOW)
    comms = files[COMMS][0].path if COMMS in files else None
    both = ets.keys() & kinetos.keys()
    return tuple(
        RankInput(
            rank=rank,
            window=one,
            et=ets[one] if one in both else "",
            kineto=kinetos[one] if one in both else "",
            comms=comms,
            linked=linked.get(one),
        )
        for one in sorted(both | linked.keys())
    )


def read_comms_and_times(given: RankSources) -> RankTrace:
    """crossrank's own records: every call, on groups with names, and the times in the files next to them."""
    trace = read_comms(given.path, given.rank, steps=given.steps)
    calls = trace.calls
    # Times that are added here are not for others who read the file.
    times = {name: getattr(calls, name)[:] for name in ("began", "ended", "took", "state")}
    trace = replace(trace, calls=replace(calls, **times), notes=trace.notes[:])
    row_of = {identity: row for row, identity in enumerate(trace.calls.id)}
    in_windows = False
    for window in _windows(given, trace):
        _count_matched(window, trace)
        take_linked(trace, window)
        ours = [one for one in window.communications if one.origin in OURS and one.record.id in row_of]
        in_windows |= _give_times(window, trace, ((row_of[one.record.id], one) for one in ours))
    if trace.timed_by == "work":  # of all calls, where a window knows those of some
        return trace
    if in_windows:
        trace.timed_by = "kineto"
    elif trace.timed_by == "comms" and given.flight is not None:
        _time_by_dump(trace, given.flight)
        trace.timed_by = "flight" if any(trace.calls.took) else "comms"
    trace.placed = trace.timed_by != "flight"
    return trace


def _note_doubts(window: LinkedTrace, trace: RankTrace) -> None:
    """Say of the times what linking found out about them."""
    report = window.report
    trace.notes += [*report.doubts, *report.caveats]
    if report.of_other_iterations:
        sizes: dict[str, set[int]] = {}
        for one in window.communications:
            sizes.setdefault(one.record.op, set()).add(one.record.bytes)
        trace.sizes_of_others |= {op for op, of_op in sizes.items() if len(of_op) > 1}


def _count_matched(window: LinkedTrace, trace: RankTrace) -> None:
    report = window.report
    activities = sum(report.activities_linked.values())
    for what, matched, total in (
        ("host operations", sum(report.host_matched.values()), report.host_nodes),
        ("GPU activities", activities, activities + sum(report.activities_unlinked.values())),
    ):
        if total:
            before = trace.matched.get(what, (0, 0))
            trace.matched[what] = before[0] + matched, before[1] + total


def _windows(given: RankSources, trace: RankTrace) -> Iterator[LinkedTrace]:
    """The linked traces of a rank's windows; one that cannot be used, or that lost a part, is noted."""
    for window in given.windows:
        try:
            linked = read_current(window)
        except CrossrankError as error:
            trace.notes.append(f"its durations are not used: {error}")
        else:
            trace.notes += linked.report.damage
            _note_doubts(linked, trace)
            yield linked


def _give_times(window: LinkedTrace, trace: RankTrace, calls_of: Iterable[tuple[int, Communication]]) -> bool:
    """Set the times of calls, given by their rows, to those of the nodes of their communications; whether there are
    any."""
    has_times = False
    activities = {activity.id: activity for activity in window.activities}
    hosts, base, calls = _hosts(window), window.base_ns, trace.calls
    for row, communication in calls_of:
        kernels = [activities[number] for number in communication.activities if number in activities]
        host, work = hosts.get(communication.host), hosts.get(communication.work)
        if kernels:
            calls.took[row] = 0
            calls.began[row] = base + min(kernel.start_ns for kernel in kernels)
            calls.ended[row] = base + max(kernel.start_ns + kernel.duration_ns for kernel in kernels)
        elif work is not None and work.start_ns is not None and work.duration_ns is not None:
            calls.took[row] = 0
            calls.began[row] = base + work.start_ns
            calls.ended[row] = calls.began[row] + work.duration_ns
        has_times |= bool(kernels) or (work is not None and work.start_ns is not None)
        # The host continues while a GPU communicates, except in a barrier.
        follows = not kernels or communication.record.op == "barrier"
        if follows and host is not None and host.start_ns is not None and host.duration_ns is not None:
            waits_of(trace).returned[row] = base + host.start_ns + host.duration_ns
    return has_times


def _hosts(window: LinkedTrace) -> dict[int | None, HostOp]:
    return {op.id: op for op in window.host}


def read_kineto_with_pair(given: RankSources) -> RankTrace:
    """A Kineto trace: calls with the times of their kernels. It is linked in memory if it has an execution trace."""
    return read_linked_window(given) if given.windows else read_kineto_trace(given.path, given.rank)


def read_linked_window(given: RankSources) -> RankTrace:
    """The chosen window of a rank, linked in memory if it is not; without one, the linked trace at `path`."""
    window = next(iter(given.windows), None)
    return of_linked(read_linked(given.path) if window is None else read_current(window), given)


def of_linked(window: LinkedTrace, given: RankSources) -> RankTrace:
    """A linked trace: calls with their times, and the waits that its execution trace has."""
    counted = [one.seq_counted for one in window.communications if not is_p2p(one.record)]
    trace = RankTrace(
        rank=given.rank if given.rank is not None else window.rank,
        path=given.path,
        source="linked",
        timed_by="kineto",
        world_size=window.world_size,
        numbered=mostly_numbered(counted),
        numbered_pairs=all(one.origin in OURS for one in window.communications),
        span=(window.base_ns, window.base_ns + HALF_HOUR) if window.base_ns else None,
    )
    builder, hosts = TraceBuilder(trace, window.groups), _hosts(window)
    for communication in window.communications:
        # Records from a comms file are on that file's clock: here all go on the trace's.
        host, record = hosts.get(communication.host), communication.record
        if trace.numbered and communication.seq_counted and not is_p2p(record):
            record = msgspec.structs.replace(record, seq=None)
        began = None if host is None else host.start_ns
        builder.add(record, called=record.t if began is None else began + window.base_ns)
    _give_times(window, trace, enumerate(window.communications))
    _note_doubts(window, trace)
    _count_matched(window, trace)
    take_linked(trace, window)
    launches = sorted(trace.calls.called)
    waits = [
        (bisect_left(launches, op.start_ns + window.base_ns), wait)
        for op in window.host
        if op.name == "record_param_comms" and op.start_ns is not None
        if (wait := from_node(op)) is not None and wait.name == "wait"
    ]
    _place_recorded_waits(trace, sorted(waits, key=lambda one: one[0]))
    return trace


def read_execution_trace_alone(given: RankSources) -> RankTrace:
    """An execution trace of any schema. It has no times: calls have their order and, on NCCL, their waits."""
    found = read_communication_trace(given.path, given.world_size)
    if given.world_size is None and found.warnings:
        # Old traces name groups by addresses. The splits of an all_to_all then tell the size of the world.
        splits = [len(one.record.in_split or ()) for one in found.communications]
        if max(splits, default=0) > 1:
            found = read_communication_trace(given.path, max(splits))
    trace = RankTrace(
        rank=given.rank,
        path=given.path,
        source="et",
        numbered=False,
        timed=False,
        problems=found.damage,
        # Groups that are named by addresses are joined by their members, or refused, with those of the other ranks.
        notes=[f"{given.path}: {warning}" for warning in found.warnings if ADDRESS_AS_NAME not in warning],
    )
    builder = TraceBuilder(trace, found.groups)
    for communication in found.communications:
        builder.add(communication.record, called=0)
    # What is no operation that is known, or cannot be read, is left out later, and counted.
    for name in found.unknown:
        builder.add(CommRecord(id=-1, op=name, c10d=name, pg="", bytes=0, t=0), called=0)
    _place_recorded_waits(trace, found.waits)
    return trace


def _place_recorded_waits(trace: RankTrace, recorded: Sequence[tuple[int, ParamComms]]) -> None:
    """`recorded`: (number of calls started before the wait, the call that it is for). In a trace with waits, a call
    without one returned only after it had finished; but torch writes no wait for a barrier."""
    calls, waits = trace.calls, waits_of(trace)
    for before, wait in recorded:
        # The last call of that number before the wait: numbers repeat between groups in old traces.
        for row in range(before - 1, -1, -1):
            same_group = wait.pg in ("", "0") or wait.pg == trace.groups[calls.group[row]].group.pg
            if calls.number[row] == wait.seq and same_group and waits.before[row] < 0:
                waits.before[row], waits.blocking[row] = before, 0
                waits.recorded += 1
                break
        else:
            waits.without_call += 1
    if recorded:
        is_barrier = [signature.op == "barrier" for signature in trace.signatures]
        waits.blocking = array(
            "b",
            [
                -1 if before == -1 and is_barrier[signature] else before == -1
                for before, signature in zip(waits.before, calls.signature, strict=True)
            ],
        )


# --- durations of the flight recorder, for a comms file ---------------------------------------------------------------


def _time_by_dump(trace: RankTrace, path: str) -> None:
    """Take the durations that the rank's dump has (NCCL)."""
    try:
        dump = read_flight_dump(path, None)
    except CrossrankError as error:
        trace.notes.append(f"its durations are not used: {error}")
        return
    if dump.moment is None:
        return
    calls, launches = trace.calls, RecordedLaunches[int]()
    batches: dict[int, RecordedLaunch[int]] = {}
    for row, batch in enumerate(calls.batch):
        if batch in batches:
            batches[batch].calls.append(row)
            continue
        op = trace.signatures[calls.signature[row]].op
        launch = RecordedLaunch(began=calls.called[row], op=op, is_batch=batch >= 0, calls=[row])
        launches.add(trace.groups[calls.group[row]].group.pg, launch)
        if batch >= 0:
            batches[batch] = launch
    entries = dump.entries
    names = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns", "duration_ms")
    for kind, created, started, ended, ms in zip(entries.kind, *map(entries.columns.__getitem__, names), strict=True):
        if not ended or not (trace.until is None or created < trace.until):
            continue
        noted = entries.kinds[kind]
        found = launches.take(noted.process_group[0], noted.profiling_name, created)
        for row in found.calls if found is not None else ():
            calls.began[row], calls.ended[row] = started or created, ended
            calls.took[row] = round((ms or 0) * 1e6) or calls.ended[row] - calls.began[row]


READERS: dict[str, Callable[[RankSources], RankTrace]] = {
    COMMS: read_comms_and_times,
    LINKED: read_linked_window,
    EXECUTION_TRACE: read_execution_trace_alone,
    KINETO: read_kineto_with_pair,
    FLIGHT: lambda given: read_flight(given.path, given.rank, own_calls=True),
    INSPECTOR: lambda given: read_inspector(given.path),
}
"""By the kind of a rank's file."""
