"""Converts a flight-recorder dump to a `RankTrace`: coalesced entries become one call, gloo's `retired` a completion.

It applies these rules of the recorder (measured on torch 2.13, and read in FlightRecorder.hpp):

* Members of a batch stay "scheduled"; a closing entry `coalesced` has the state and times of all of them. A batch of
  P2P stays separate calls; coalesced collectives become one call with members.
* gloo never reports a start or an end: a retired entry is finished.
* The status has a group's progress under the process-local `pg_id`, which entries map to a name. Groups without entries
  are mapped by order if that is unambiguous: both `pg_id` and torch's numeric names increase as groups are made.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from crossrank.comm import OPERATIONS, CommRecord, Group, has_possible_size, is_p2p, operation_of
from crossrank.dtypes import dtype_of
from crossrank.recording import name_in_epoch
from crossrank.tools.traces.call_numbers import mend_in, odd_ones
from crossrank.tools.traces.comms import WallClock, add_records, stack_of
from crossrank.tools.traces.flight.dump import (
    MOST_FRAMES,
    NCCL2,
    FlightDump,
    Frame,
    Moment,
    Progress,
    read_flight_dump,
    read_frame,
    whole,
)
from crossrank.tools.traces.flight.entries import Entry
from crossrank.tools.traces.param_comms import ParamComms, to_record
from crossrank.tools.traces.rank_trace import (
    COMPLETED,
    GLOO,
    RETIRED,
    SCHEDULED,
    STARTED,
    RankTrace,
    TraceBuilder,
    sort_by_time,
)

_STATES = {"scheduled": SCHEDULED, "started": STARTED, "completed": COMPLETED}
_P2P = re.compile(r"(?P<op>send|recv) (?:\d{1,8}(?:->|<-)(?P<peer>\d{1,8}))?")
_NUMBER = re.compile(r"[0-9]{1,9}")
_NUMBERS = (
    "record_id",
    "pg_id",
    "collective_seq_id",
    "p2p_seq_id",
    "time_created_ns",
    "time_discovered_started_ns",
    "time_discovered_completed_ns",
)
_NO_DTYPE = ("UNKNOWN_SCALAR", "Undefined")
_CLOSING = "coalesced"
_Shapes = list[list[int]]
_Column = NDArray[Any]
_OF_GLOO = f"{GLOO}:"
_UNNOTED = ("c10d", "root", "reduce", "in_split", "out_split")
"""Fields of a collective that torch's recorder does not record, or records less exactly."""
UNRECORDED = ("monitored_barrier_",)
"""Collectives of gloo that torch's recorder neither records nor counts."""
_OUT_OF_ORDER = 60_000_000_000
"""ns by which calls of several threads may be recorded out of order."""
_CLOCKS = 10_000_000
"""ns by which the clocks of host and device may differ within a call."""
_COMPARED = 8
"""Number of calls of a group whose times are compared."""
SAME_TIME = 50_000_000
"""Maximum ns between torch's and crossrank's record of one call: the launch is between them."""
_RECENT = 2_000_000_000
"""ns before a dump from which on a call of NCCL may just have begun."""
GLOO_ALONE = (
    "dumps of gloo lack sends, receives and the members of groups: the ranks with calls on a group are its members"
)


def read_flight(path: str, rank: int | None = None, *, own_calls: bool = False, last: int | None = None) -> RankTrace:
    """Read the dump of `rank`: its last calls, on NCCL with their durations.

    gloo's recorder records the operations that a call consists of, and no sends. A dump of crossrank also has the calls
    that crossrank recorded. With `own_calls` these replace gloo's entries; otherwise they complete them. With `last`,
    read only the unfinished calls and that many calls before them. Raises `NoDumpError` if the file is unusable.
    """
    dump = read_flight_dump(path, last)
    moment = dump.moment
    rank = moment.rank if rank is None and moment is not None else rank
    trace = RankTrace(rank=rank, path=path, source="flight", version=dump.version, problems=list(dump.problems))
    trace.timed_by, trace.placed, trace.lost_after = "flight", False, dump.entries.lost_after
    backends = _backends(dump)
    trace.backend = next((backend for backend in backends if backend != GLOO), backends[0] if backends else "")
    trace.dump.active_only = _is_active_only(dump, trace.backend)
    trace.dump.left_out = dump.left_out
    trace.starts_late = dump.first_record > 0
    trace.dump.wrapped = trace.starts_late and not trace.dump.active_only
    if moment is None:
        trace.notes += [GLOO_ALONE] if trace.backend == GLOO else []
        # gloo's calls fail at once when a peer dies: a recent call there is not one in progress.
        trace.ending.written_at = _written_at(path, dump) if "nccl" in trace.backend else None
    else:
        trace.host, trace.world_size = moment.host, moment.world_size
        ending = trace.ending
        ending.taken_at, ending.reason, ending.stacks = moment.time_ns, moment.reason, list(moment.stacks)
        ending.waits, ending.activity = moment.waits, moment.activity
        ending.process, ending.groups_made = moment.process, moment.groups_made
        ending.failed_groups = frozenset(moment.failed_groups)
        ending.limited_groups = frozenset(moment.limited_groups)
        ending.note_callers(moment.calls)
        ending.take_exceptions(moment.exceptions, moment.error)
        trace.starts_late |= any(first.id > 0 for first in moment.calls[:1])
    if own_calls and moment is not None and moment.calls and trace.backend in ("", GLOO):
        builder, clock = TraceBuilder(trace, (*dump.groups, *moment.groups)), WallClock([moment.clock])
        for record in moment.calls:
            builder.add(record, called=clock.at(record.t))
        return trace
    if moment is not None and not len(dump.entries) and _was_off(moment):
        _take_recorded(trace, dump, moment)
        return trace
    if moment is not None and not trace.backend and _has_only_gloo(moment):
        trace.backend = GLOO  # a job with sends and receives alone, which torch's recorder does not record there
    reading = _Reading(dump, trace)
    reading.read()
    reading.join_progress()
    if moment is not None:
        _add_roots(reading.builder, moment)
        _add_unnoted(reading.builder, moment)
        if not any(map(is_p2p, trace.signatures)):
            _add_p2p(trace, moment)
        elif moment.waits is not None and moment.waited is not None:
            _join_p2p(reading.builder, moment, moment.waited)
        trace.dump.ends_frozen |= trace.backend == NCCL2 and any(
            frame.name == "destroy_process_group" for stack in moment.stacks for frame in stack.frames
        )
        # crossrank's dumps have all calls of the recorder: without an entry, the rank made no call.
        trace.dump.has_status = True
    return trace


def _written_at(path: str, dump: FlightDump) -> int | None:
    """When the file was last changed; None if that is before one of its calls, so the clocks differ."""
    try:
        changed = Path(path).stat().st_mtime_ns
    except OSError:
        return None
    return changed if changed >= max(dump.entries.columns["time_created_ns"], default=changed + 1) else None


def _was_off(moment: Moment) -> bool:
    """Whether a recorder without entries was off: the rank made calls that it records (on NCCL also sends and
    receives)."""
    backend_of = {group.pg: group.backend for group in moment.groups}
    return any(_is_noted(record) or "nccl" in backend_of.get(record.pg, "") for record in moment.calls)


def _has_only_gloo(moment: Moment) -> bool:
    """Return whether gloo is the backend of all groups, for each type of device: `cpu:gloo,cuda:gloo`."""
    each = (one for group in moment.groups for one in (group.backend or "").split(","))
    return {one.rpartition(":")[2] for one in each} == {GLOO}


def _is_noted(record: CommRecord) -> bool:
    """Whether torch's recorder records this call on every backend."""
    return not is_p2p(record) and record.c10d not in UNRECORDED


def _take_recorded(trace: RankTrace, dump: FlightDump, moment: Moment) -> None:
    """Use crossrank's records, because torch's recorder has none: it is off, or does not know the backend (gloo before
    torch 2.9). The dump is then the end of a comms file, with the state of the rank."""
    trace.source, trace.numbered_pairs, trace.dump.has_no_entries = "comms", True, True
    trace.backend = GLOO if _has_only_gloo(moment) else next((group.backend for group in moment.groups), "")
    builder, has_ended = TraceBuilder(trace, (*dump.groups, *moment.groups)), moment.reason in ("disable", "exit")
    last = None if has_ended else moment.calls[-1].id
    add_records(builder, moment.calls, WallClock([moment.clock]), last, is_cut=not has_ended)
    trace.ending.ended = has_ended


def _backends(dump: FlightDump) -> list[str]:
    """The backends of a dump's calls, in order: crossrank's dumps have the recorders of all backends."""
    names = (entry.profiling_name.partition(":") for entry in dump.entries.kinds.values())
    return list(dict.fromkeys(whole(backend) for backend, colon, _ in names if colon))


def _dtype(name: str) -> str | None:
    """The type with this name in torch; None without a tensor, as on the ranks of a gather that receive nothing."""
    known = dtype_of(name)
    return known.name if known is not None else None if name in _NO_DTYPE else whole(name)


def _is_active_only(dump: FlightDump, backend: str) -> bool:
    """Whether completed calls were left out: the status counts some, and the entries have none.

    Without a status, gaps between the entries show it. If instead the completed calls fell out of the ring, the
    unfinished calls right after them are missing too.
    """
    if backend == GLOO or "completed" in dump.entries.columns["state"] or dump.left_out:
        return False
    if not dump.status:
        return any(two > one + 1 for one, two in pairwise(dump.entries.columns["record_id"]))
    seen: set[int] = set()
    for entry in dump.entries:
        if entry.profiling_name.startswith(_OF_GLOO):
            continue
        if entry.pg_id in seen or entry.is_p2p or entry.p2p_seq_id:
            continue
        seen.add(entry.pg_id)
        progress = dump.status.get(entry.pg_id)
        if progress is not None and entry.collective_seq_id > max(progress.last_completed_collective, 0) + 1:
            return False
    return any(progress.last_completed_collective > 0 for progress in dump.status.values())


class _Reading:
    """Converts the entries of one dump to columns."""

    def __init__(self, dump: FlightDump, trace: RankTrace) -> None:
        self._dump = dump
        self._trace = trace
        known = dump.groups + (dump.moment.groups if dump.moment is not None else [])
        self._known = {_raw_name(group): group for group in known} | {group.pg: group for group in known}
        self._is_mixed = trace.backend != GLOO and GLOO in _backends(dump)
        self.builder = TraceBuilder(trace)
        self._pg_ids: dict[int, int] = {}
        self._impossible: list[int] = []
        """Numbers of entries with impossible sizes, one of each kind of entry."""
        for group in known:
            if group.pg:
                self._group((group.pg, group.desc))
            elif group.ranks:  # gloo's only entry: no name, and all ranks or none
                trace.world_size = max(group.ranks) + 1

    def read(self) -> None:
        """Read every call of the dump, in order."""
        entries, trace = self._dump.entries, self._trace
        if not entries:
            return
        columns, kind = entries.columns, np.array(entries.kind)
        described = np.zeros((len(entries), 4), np.int64)
        described[list(entries.kinds)] = list(map(self._kind, entries.kinds.values()))
        group, signature, p2p, on_gloo = described[kind].T
        if self._impossible:
            trace.problems.append(
                f"entries with impossible sizes, which are unknown: the first is {self._impossible[0]}"
            )
        record_id, pg_id, seq, p2p_seq, called, began, ended = map(entries.numbers, _NUMBERS)
        mend_in(trace, seq, np.where(p2p == 0, pg_id, -1), record_id)
        group, signature, is_left = self._tell_apart(group, signature, kind, pg_id, np.where(p2p, -1, seq), called)
        took = np.rint(entries.numbers("duration_ms") * 1e6)
        strange = (ended > 0) & ((called > ended) | (began > ended))
        strange[[place for place in odd_ones(called) if abs(called[place] - called[place - 1]) > _OUT_OF_ORDER]] = True
        if lost := int(strange.sum()):
            called[strange & ((called > ended) | (ended == 0))] = 0
            began[strange] = ended[strange] = 0
            trace.problems.append(f"{lost:,} entries have times in an impossible order: they are unknown")
        # torch notices an end after it, so a call lasts no longer than from its launch to that.
        too_long = (ended > 0) & (called > 0) & (took > ended - called + _CLOCKS)
        if lost := int(too_long.sum()):
            took[too_long] = 0
            trace.problems.append(f"{lost:,} durations are longer than from the launch to the end: they are unknown")
        state_of = {value: _STATES.get(value, SCHEDULED) for value in set(columns["state"])}
        is_known = np.array([value in _STATES for value in columns["state"]])
        if lost := int((~is_known).sum()):
            trace.problems.append(f"{lost:,} entries have a state that crossrank does not know")
        state = np.array(list(map(state_of.__getitem__, columns["state"])))
        is_retired = np.array(columns["retired"], bool)
        state[~is_known & is_retired & (ended > 0)] = COMPLETED
        self._pg_ids = dict(zip(pg_id[::-1].tolist(), group[::-1].tolist(), strict=True))  # the first entry decides
        highest = np.zeros(len(trace.groups), np.int64)
        np.maximum.at(highest, group, seq)
        trace.dump.collectives_seen = {one: int(highest[one]) for one in set(group.tolist())}
        trace.dump.with_p2p = set(group[p2p_seq != 0].tolist())

        alone = len(set(zip(pg_id.tolist(), seq.tolist(), p2p_seq.tolist(), strict=True))) == len(entries)
        is_plain = alone and not trace.dump.active_only and not any(map(is_closing, entries.kinds.values()))
        whole_entries = [] if is_plain else list(entries)
        runs = _runs(whole_entries)
        keep, closing, batch = np.full(len(entries), True), np.arange(len(entries)), np.full(len(entries), -1)
        of_pairs = p2p == 1
        for last, members in _launches(whole_entries, runs).items():
            of_pairs[last] |= bool(members) and bool(p2p[members].all())
            closing[members] = last
            sent = [member for member in members if p2p[member]]
            if len(members) > 1:
                batch[sent] = record_id[members[0]]
            keep[list(set(members) - set(sent))] = False  # members of a coalesced collective
            launch = self._launch(last, members, [trace.signatures[signature[row]] for row in (last, *members)])
            keep[last] = launch is not None
            if launch is not None:
                signature[last] = self.builder.signatures.of(launch)
        seems_over = (state == COMPLETED) & ~is_retired & (on_gloo == 0) & (trace.backend != GLOO)
        closes = np.isin(kind, [row for row, entry in entries.kinds.items() if is_closing(entry)])
        launching = self._launching(pg_id, seq * ~of_pairs, p2p_seq * (of_pairs | closes), seems_over)
        state[launching], ended[launching] = SCHEDULED, 0
        if len(untold := self._never_enqueued(pg_id)):
            state[untold], trace.dump.ends_frozen, trace.dump.hosts_wait = RETIRED, True, True
        state = state[closing]
        retires = np.logical_or(self._retired_is_done(), on_gloo) & is_retired[closing]
        state[retires & (state != COMPLETED)] = RETIRED
        state[is_left & (state != COMPLETED)] = RETIRED
        if trace.dump.active_only:
            state[list(_over(self._dump, whole_entries, runs))] = COMPLETED
        found = {
            "group": group,
            "number": np.where(p2p, p2p_seq, seq),
            "signature": signature,
            "batch": batch,
            "state": state,
            "called": called,
            "began": began[closing],
            "ended": ended[closing],
            "took": took[closing],
            "stack": np.array(self._stacks()),
            "id": record_id,
        }
        trace.dump.launching = {int(record_id[entry]) for entry in launching}
        trace.calls.extend({name: values[keep] for name, values in found.items()})

    def _tell_apart(
        self, group: _Column, signature: _Column, kind: _Column, pg_id: _Column, number: _Column, called: _Column
    ) -> tuple[_Column, _Column, _Column]:
        """Separate the groups of one name that the rank had one after another. Return the group and the signature of
        each call, and whether the rank has left the group: a recorder does not note the end of such a call."""
        moment, groups, signatures = self._dump.moment, group.copy(), signature.copy()
        is_left = np.full(len(group), fill_value=False)
        made_by_name: dict[str, dict[int, Group]] = defaultdict(dict)
        for known in moment.groups if moment is not None else ():
            made_by_name[_raw_name(known)][known.epoch] = known
        for local in set(group.tolist()):
            of_one, found = group == local, self._trace.groups[local]
            parts = [np.flatnonzero(of_one & (pg_id == number)) for number in dict.fromkeys(pg_id[of_one].tolist())]
            name = _raw_name(found.group)
            made = made_by_name[name]
            one_by_one = all(before[-1] < after[0] for before, after in pairwise(parts))
            if (len(parts) < 2 and made.keys() <= {found.group.epoch}) or not one_by_one or not name:
                continue
            epochs = list(range(1 - len(parts), 1))  # the newest one keeps the name: rings end at the same calls
            if moment is not None and made:
                epochs = _epochs_of(parts, list(made.values()), moment, number, called)
            for epoch, rows in zip(epochs, parts, strict=True):
                its = made.get(epoch) or msgspec.structs.replace(found.group, pg=name_in_epoch(name, epoch))
                is_left[rows] = epoch < max(*epochs, *made)
                groups[rows] = index = self.builder.define(its, found.apart)
                for row in set(kind[rows].tolist()) if index != local else ():
                    record = self._record(self._dump.entries.kinds[row], index)
                    signatures[rows[kind[rows] == row]] = self.builder.signatures.of(record)
        return groups, signatures, is_left

    def _never_enqueued(self, pg_id: _Column) -> _Column:
        """Calls of groups in which torch has enqueued no call although it made several: their states mean nothing.

        With TORCH_NCCL_BLOCKING_WAIT=1 the host waits in each call, and no watchdog follows it.
        """
        status, of_nccl = self._dump.status, self._trace.backend not in ("", GLOO)
        found = [
            rows
            for group in set(pg_id.tolist())
            if of_nccl and max(msgspec.structs.astuple(status.get(group, Progress(0)))) < 0
            if len(rows := np.flatnonzero(pg_id == group)) > 1
        ]
        return np.concatenate(found) if found else np.array([], np.int64)

    def _launching(self, pg_id: _Column, seq: _Column, p2p_seq: _Column, seems_over: _Column) -> list[int]:
        """Calls that seem to be finished, but that their rank is still launching.

        NCCL may block in a launch until its peers arrive. torch then queries an end event that was never recorded,
        which answers "completed". But the call is not retired, and its number is not yet in the status of its group.
        Collectives and sends have separate numbers but share that field, so only the last call of a group can be one.
        """
        found = []
        for group in set(pg_id[seems_over].tolist()):
            progress = self._dump.status.get(group)
            if progress is not None:
                last = np.flatnonzero(pg_id == group)[-1]
                if seems_over[last] and progress.last_enqueued_collective not in (seq[last], p2p_seq[last]):
                    found.append(int(last))
        return found

    def _kind(self, entry: Entry) -> tuple[int, int, bool, bool]:
        """What entries of this kind share: group, signature, is P2P, is gloo's in a group with another backend."""
        on_gloo = self._is_mixed and entry.profiling_name.startswith(_OF_GLOO)
        # Each backend of a group counts its own calls.
        group = self._group(entry.process_group, GLOO if on_gloo else "")
        record = self._record(entry, group)
        if not has_possible_size(record):
            self._impossible.append(entry.record_id)
        return group, self.builder.signatures.of(record), is_p2p(record), on_gloo

    def _launch(self, closing: int, members: Sequence[int], records: list[CommRecord]) -> CommRecord | None:
        """The coalesced collectives that an entry closes, as one call. `records` are those of the entry and its
        members. None for a batch of P2P, whose members have its state, and if no member is left in the ring."""
        cut = 0 if self._trace.dump.wrapped else -1  # the launch of this entry may have lost its first members
        if closing == cut and self._dump.entries[closing].profiling_name.endswith(f":{_CLOSING}"):
            return None
        launch, *parts = records
        if parts and all(map(is_p2p, parts)):
            return None
        ops = {record.op for record in parts}
        return msgspec.structs.replace(
            launch,
            op=ops.pop() if launch.op not in OPERATIONS and len(ops) == 1 else launch.op,
            bytes=sum(record.bytes for record in parts),
            inputs=[],
            outputs=[],
            members=[] if cut in members[:1] else parts,
        )

    def join_progress(self) -> None:
        """Find the group of each `pg_id` of the status."""
        groups, status = self._trace.groups, self._dump.status
        joined = dict(self._pg_ids)
        names = [one.group.pg for one in groups]
        by_order: dict[int, int] = {}
        if not self._is_mixed and all(map(_NUMBER.fullmatch, names)):
            by_name = sorted(range(len(names)), key=lambda index: int(names[index]))
            if len(groups) == len(status):
                by_order = dict(zip(sorted(status), by_name, strict=True))
            elif all(pg_id < len(groups) for pg_id in status):
                by_order = dict(enumerate(by_name))
        if by_order and all(by_order.get(pg_id) == group for pg_id, group in joined.items()):
            joined = by_order
        state = self._trace.dump
        state.has_status = bool(status)
        state.all_joined = bool(status) and all(pg_id in joined for pg_id in status)
        state.progress = {group: status[pg_id] for pg_id, group in joined.items() if pg_id in status}

    def _retired_is_done(self) -> bool:
        backend = self._trace.backend
        states = set(self._dump.entries.columns["state"])
        # Another backend than NCCL that completes nothing in a whole ring does not report ends.
        return backend == GLOO or (backend != "nccl" and not states & {"started", "completed"})

    def _group(self, name_and_desc: tuple[str, str], apart: str = "") -> int:
        name, desc = map(whole, name_and_desc)
        # A rank is in only one group of a name; some of its entries may lack the description.
        known = self._known.get(name) or Group(pg=name, size=0)
        desc = known.desc if desc in ("", "undefined") else desc
        group = msgspec.structs.replace(known, desc="" if desc == "undefined" else desc)
        return self.builder.define(group, apart)

    def _record(self, entry: Entry, group: int) -> CommRecord:
        name = whole(entry.profiling_name.partition(":")[2] or entry.profiling_name)
        of_group = self._trace.groups[group].group
        members = of_group.ranks
        p2p = _P2P.match(name)
        peer = None
        if p2p is not None:
            name, peer = p2p["op"], None if p2p["peer"] is None else int(p2p["peer"])
            if members is not None and peer is not None and peer < len(members):
                peer = members[peer]
        inputs, outputs = list(map(list, entry.input_sizes)), list(map(list, entry.output_sizes))
        operation = operation_of(name)
        if operation is OPERATIONS["recv"]:
            inputs, outputs = [], outputs or inputs
        if operation is OPERATIONS["all_gather"] and entry.profiling_name.startswith(_OF_GLOO):
            inputs, outputs = _gathered(inputs, outputs, len(members or ()) or of_group.size)
        if operation is OPERATIONS["scatter"]:
            inputs, outputs = _scattered(inputs, outputs)
        into, out = (next(map(_dtype, types), None) for types in (entry.input_dtypes, entry.output_dtypes))
        comms = ParamComms(name=name, pg=of_group.pg, inputs=inputs, outputs=outputs, dtype=into or out)
        c10d = name if operation is not None else entry.profiling_name  # with its backend, it is the name of a dump
        record = to_record(comms, of_group, number=0, time=0, c10d=c10d)
        return msgspec.structs.replace(
            record,
            out_dtype=out if out != record.dtype else None,
            peer=peer,
            root=_root(record.op, inputs, outputs, self._trace.rank, members),
        )

    def _stacks(self) -> list[int]:
        """Number of the stack of each entry. Entries of one call site share their frames; others are compared as
        text."""
        number_of: dict[tuple[int, ...], int] = {}
        number_of_list: dict[int, int] = {}
        frame_of: dict[int, Frame | None] = {}
        column = self._dump.entries.columns["frames"]
        ids = list(map(id, column))
        for frames in dict(zip(ids, column, strict=True)).values():
            if type(frames) is not list:
                number_of_list[id(frames)] = 0
                continue
            key = tuple(map(id, frames[:MOST_FRAMES]))
            number = number_of.get(key)
            if number is None:
                frame_of |= {id(one): read_frame(one) for one in frames[:MOST_FRAMES] if id(one) not in frame_of}
                stack = tuple(filter(None, map(frame_of.__getitem__, key)))
                number = number_of[key] = self.builder.stacks.number(stack)
            number_of_list[id(frames)] = number
        return list(map(number_of_list.__getitem__, ids))


def _raw_name(group: Group) -> str:
    """Return the name that torch has for a group of `with_epoch`."""
    return group.pg.removesuffix(name_in_epoch("", group.epoch))


def _epochs_of(
    parts: Sequence[_Column], made: Sequence[Group], moment: Moment, number: _Column, called: _Column
) -> list[int]:
    """Return the epoch of each part of the entries of one name: the groups in `made` had that name, in their order. -1:
    before the first of them.

    crossrank's records of the calls show it: those with the number of an entry, and their times. But the wall clock may
    have been set since. So if crossrank recorded two calls of the newest group, the last part is of that group: torch
    has recorded at least the first of them.
    """
    clock = WallClock([moment.clock])
    place_of = {group.pg: place for place, group in enumerate(made)}
    counted = [one for one in moment.calls if one.seq is not None and one.c10d not in UNRECORDED and one.pg in place_of]

    def place(row: int) -> int:
        """Return the place of the group of a call; -1 if none was made before it."""
        time, seq = int(called[row]), int(number[row])
        # Two groups may have that number within the accuracy of the clocks: a record before the call is more likely.
        records = [(clock.at(one.t), place_of[one.pg]) for one in counted if one.seq == seq]
        found = [(at <= time, at, its) for at, its in records if at - SAME_TIME <= time]
        made_before = (its for its, group in enumerate(made) if clock.at(group.t) - SAME_TIME <= time)
        return max(found)[2] if found else max(made_before, default=-1)

    is_newest = sum(place_of[one.pg] == len(made) - 1 for one in counted) > 1
    places = [len(made) - 1 if is_newest else place(parts[-1][-1])]
    for rows in reversed(parts[:-1]):
        places.append(min(place(rows[0]), places[-1] - 1))
    return [made[place].epoch if place >= 0 else -1 for place in reversed(places)]


def _runs(entries: Sequence[Entry]) -> list[list[int]]:
    """Entries with the same group and sequence numbers: one call, or the members of a launch and its closing entry."""
    runs: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        runs[entry.pg_id, entry.collective_seq_id, entry.p2p_seq_id].append(index)
    return list(runs.values())


def _launches(entries: Sequence[Entry], runs: list[list[int]]) -> dict[int, list[int]]:
    """Closing entry of each launch -> its members. A launch of collectives in progress has no closing entry; its last
    member is used instead."""
    members_of: dict[int, list[int]] = {}
    for run in runs:
        members: list[int] = []
        for index in run:
            if is_closing(entries[index]):
                members_of[index], members = members, []
            else:
                members.append(index)
        if len(members) > 1 and not entries[members[0]].is_p2p:
            members_of[members[-1]] = members
    return members_of


def _over(dump: FlightDump, entries: Sequence[Entry], runs: list[list[int]]) -> set[int]:
    """Finished entries of a dump of active calls: members of batches, which never have the state "completed". Other
    finished calls are left out of the dump.

    A batch is finished if the status of its group has its number, or if its closing entry is missing although later
    entries exist.
    """
    found: set[int] = set()
    records = {entry.record_id for entry in entries}
    last_record = max(records)
    newest = {entry.pg_id: entry.p2p_seq_id for entry in entries if entry.is_p2p}
    for run in runs:
        first, last = entries[run[0]], entries[run[-1]]
        if is_closing(last):
            continue
        progress = dump.status.get(first.pg_id)
        if first.is_p2p and progress is not None:
            # Collectives put their numbers in the same field: this one must be that of a P2P call.
            of_p2p = first.collective_seq_id == 0 or progress.last_enqueued_collective == newest[first.pg_id]
            if of_p2p and progress.last_completed_collective >= first.p2p_seq_id:
                found.update(run)
                continue
        if len(run) > 1 and last.record_id + 1 not in records and last_record > last.record_id:
            found.update(run)
    return found


def is_closing(entry: Entry) -> bool:
    """Whether an entry is the launch of a batch, whose members have separate entries without times."""
    return _CLOSING in entry.profiling_name and not entry.input_sizes and not entry.output_sizes


_NO_TENSOR: _Shapes = [[0]]
"""The shapes of an undefined tensor."""


def _root(op: str, inputs: _Shapes, outputs: _Shapes, rank: int | None, members: Sequence[int] | None) -> int | None:
    """The root of a gather or scatter, from the shapes: only the root has the outputs or inputs of all ranks."""
    if members is None or len(members) < 2:
        return None
    side = {"gather": outputs, "scatter": inputs}.get(op, [])
    return rank if len(side) == len(members) else None


def _scattered(inputs: _Shapes, noted: _Shapes) -> tuple[_Shapes, _Shapes]:
    """Inputs and outputs of a scatter. ProcessGroupNCCL notes them the other way round, with an empty tensor on ranks
    that are not the root (`scatter` calls `collective(outputs, inputs)` in ProcessGroupNCCL.cpp)."""
    if noted == _NO_TENSOR:
        return [], inputs
    return (noted, inputs) if len(noted) > max(1, len(inputs)) else (inputs, noted)


def _gathered(inputs: _Shapes, noted: _Shapes, size: int) -> tuple[_Shapes, _Shapes]:
    """Inputs and outputs of gloo's all_gather. For a coalesced one, which DTensor makes for one tensor, the recorder
    has the number of inputs and the shape of the first one in place of the output shapes. If the number of ranks is
    unknown, return no shapes: inputs alone would look like a mismatch."""
    if not inputs or noted != [[len(inputs), *inputs[0]]]:
        return inputs, noted
    return (inputs, [[size, *shape] for shape in inputs]) if size else ([], [])


# --- what crossrank's dumps add to torch's entries --------------------------------------------------------------------


def _add_roots(builder: TraceBuilder, moment: Moment) -> None:
    """Add what torch's recorder does not record of a collective: root, reduction, splits, source line.

    torch counts from the start of the process, crossrank from `enable()`. The last call of a group, which must be the
    same operation, shows the difference. The last few calls must also have the same times. Their median decides,
    because the host may be delayed between the two records of one or two calls.
    """
    trace, signatures = builder.trace, builder.signatures
    calls, recorded_from, clock = trace.calls, trace.dump.recorded_from, WallClock([moment.clock])
    awaited, waiting = trace.ending.awaited, trace.ending.thread_of_call
    # It is unknown whether the rank has waited for older calls.
    waited = {*(moment.waited or ()), *waiting} if trace.backend != GLOO and moment.waits is not None else set()
    known_from = min(waited, default=sys.maxsize)
    by_number: dict[tuple[str, int], int] = {}
    last: dict[str, int] = {}
    names = [None if one.apart else one.group.pg for one in trace.groups]
    p2p = list(map(is_p2p, signatures.rows))
    for row, (group, number) in enumerate(zip(calls.group, calls.number, strict=True)):
        name = names[group]
        if name is not None and not p2p[calls.signature[row]]:
            by_number[name, number] = row
            last[name] = row
    collectives = [(record.pg, record.seq, record) for record in moment.calls if record.seq is not None]
    of_group: dict[str, list[tuple[int, CommRecord]]] = defaultdict(list)
    for pg, seq, record in collectives:
        of_group[pg].append((seq, record))
    for pg, row in last.items():
        if pg not in of_group:
            continue
        seq, record = of_group[pg][-1]
        op = signatures.rows[calls.signature[row]].op
        # gloo implements reduce_scatter as an all_reduce, and torch's recorder has that
        same = op == record.op or (op, record.op) == ("all_reduce", "reduce_scatter")
        before = calls.number[row] - seq
        apart = [
            abs(calls.called[by_number[pg, number + before]] - clock.at(one.t))
            for number, one in of_group[pg][-_COMPARED:]
            if (pg, number + before) in by_number
        ]
        # A call that crossrank recorded later than torch's last one is not among torch's.
        if same and clock.at(record.t) < calls.called[row] + SAME_TIME and median_low(apart) < SAME_TIME:
            recorded_from[pg] = before
    for pg, seq, record in collectives:
        if pg not in recorded_from or (pg, seq + recorded_from[pg]) not in by_number:
            continue
        row = by_number[pg, seq + recorded_from[pg]]
        known = signatures.rows[calls.signature[row]]
        unnoted = {name: getattr(record, name) for name in _UNNOTED}
        calls.signature[row] = signatures.of(msgspec.structs.replace(known, **unnoted))
        if not calls.stack[row]:
            calls.stack[row] = builder.stacks.number(stack_of(record))
        if record.id in awaited:
            trace.awaited.add(row)
        if record.id in waiting:
            trace.row_of_thread[waiting[record.id]] = row
        # The stream waits for a call without `async_op=True`; a recent one may just have begun. The calls of a backward
        # pass have no name of a user's function: another thread waits for them.
        may_go_on = record.is_async is not False or moment.time_ns - calls.called[row] < _RECENT
        if may_go_on and record.api and record.id >= known_from and waited.isdisjoint((record.id, record.batch)):
            trace.unawaited.add(row)


def _add_unnoted(builder: TraceBuilder, moment: Moment) -> None:
    """Add the last collective of a group if torch has not recorded it: the rank is inside this call.

    torch records a call after it has made the communicator, which blocks until all members arrive. Before torch 2.9 it
    records no calls of gloo, so groups that also have gloo are skipped.
    """
    trace, calls, clock = builder.trace, builder.trace.calls, WallClock([moment.clock])
    notes_gloo = any(group.apart == GLOO for group in trace.groups)
    backend_of = {group.pg: group.backend or "" for group in moment.groups}
    noted: dict[str, int] = defaultdict(int)
    for group, called in zip(calls.group, calls.called, strict=True):
        name = trace.groups[group].group.pg
        noted[name] = max(noted[name], called)
    newest = {record.pg: record for record in moment.calls if record.seq is not None and record.c10d not in UNRECORDED}
    for pg, record in newest.items():
        backend, called = backend_of.get(pg, ""), clock.at(record.t)
        is_of_nccl = "nccl" in backend and (notes_gloo or GLOO not in backend)
        if is_of_nccl and called > noted[pg] + SAME_TIME:
            number = (record.seq or 0) + trace.dump.recorded_from.get(pg, 0)
            record = msgspec.structs.replace(record, seq=number)
            builder.add(record, called=called, state=SCHEDULED, stack=stack_of(record))
            if trace.backend == "":
                trace.backend = "nccl"


def _join_p2p(builder: TraceBuilder, moment: Moment, were_awaited: Sequence[int]) -> None:
    """Find which sends and receives of NCCL the rank has waited for, and add the source lines of all. No stream of the
    rank depends on the others yet.

    The last ones of a kind in the dump are the last ones that crossrank recorded.
    """
    trace = builder.trace
    waited, waiting = {*were_awaited, *trace.ending.awaited}, trace.ending.thread_of_call.keys()
    rows: defaultdict[tuple[str, str, int | None], list[int]] = defaultdict(list)
    for row, (group, number) in enumerate(zip(trace.calls.group, trace.calls.signature, strict=True)):
        signature = trace.signatures[number]
        if is_p2p(signature):
            rows[trace.groups[group].group.pg, signature.op, signature.peer].append(row)
    for record in reversed(list(filter(is_p2p, moment.calls))):
        if not (of_kind := rows[record.pg, record.op, record.peer]):
            continue
        row = of_kind.pop()
        if not trace.calls.stack[row]:
            trace.calls.stack[row] = builder.stacks.number(stack_of(record))
        if record.api and waited.isdisjoint((record.id, record.batch)):
            trace.unawaited.add(row)
        elif record.api and waiting.isdisjoint((record.id, record.batch)):
            trace.waited.add(row)


def _add_p2p(trace: RankTrace, moment: Moment) -> None:
    """Add the sends and receives that crossrank recorded to a dump that has none, ordered by time."""
    records = list(filter(is_p2p, moment.calls))
    if records:
        trace.numbered_pairs = True
        first, waited = len(trace), {*(moment.waited or ())}.difference(trace.ending.awaited)
        add_records(TraceBuilder(trace), records, WallClock([moment.clock]), moment.calls[-1].id, is_cut=True)
        trace.waited |= {row for row, one in enumerate(records, first) if not waited.isdisjoint((one.id, one.batch))}
        sort_by_time(trace)
