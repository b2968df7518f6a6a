"""Calls and durations from dumps of torch's flight recorder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from crossrank.comm import OPERATIONS, Group, operation_of
from crossrank.dtypes import dtype_of
from crossrank.errors import CrossrankError
from crossrank.tools.traces.flight_recorder import Entry, FlightDump, read_flight_dump
from crossrank.tools.traces.param_comms import ParamComms, to_record
from crossrank.tools.traces.rank_calls import Input, RankCalls, RecordedCall

_CLOSING = "coalesced"
_SAME_CALL = 5_000_000
"""ns that may lie between our note of a call and torch's."""


def time_by_dump(calls: list[RecordedCall], path: str, found: RankCalls) -> None:
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
        rank=given.rank if given.rank is not None else dump.rank,
        world_size=moment.world_size if moment is not None else None,
        calls=calls,
        groups=known,
        groups_by_use=backend == "gloo",
        starts_late=first > 0 or lost,
        problems=list(dump.problems),
        notes=_GLOO_NOTES if backend == "gloo" and moment is None else [],
    )


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
