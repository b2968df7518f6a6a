"""A flight-recorder dump as evidence: coalesced entries become one call, gloo's `retired` a completion.

Rules of the recorder (measured on torch 2.13 and read in FlightRecorder.hpp) that this module knows:

* Members of a batch stay "scheduled"; a closing entry `coalesced` carries state and times for all of them. A batch of
  P2P stays as many calls; coalesced collectives become one call with members.
* gloo never reports a start or an end: an entry that is retired is done.
* A group's progress stands under the process-local `pg_id`, which entries join to a name. Groups without entries are
  joined by order where that is unambiguous: both `pg_id` and torch's numeric names rise as groups are made.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from crossrank.comm import OPERATIONS, operation_of
from crossrank.dtypes import dtype_of
from crossrank.tools.analysis.diagnosis.evidence import (
    COMPLETED,
    GLOO,
    RETIRED,
    SCHEDULED,
    STARTED,
    GroupClaim,
    RankEvidence,
    Signature,
    Table,
)
from crossrank.tools.analysis.diagnosis.from_comms import add_p2p, add_roots
from crossrank.tools.traces.flight_recorder import MOST_FRAMES, Entry, FlightDump, Frame, frames_of, whole

_STATES = {"scheduled": SCHEDULED, "started": STARTED, "completed": COMPLETED}
_P2P = re.compile(r"(?P<op>send|recv) \d{1,8}(?:->|<-)(?P<peer>\d{1,8})")
_CLOSING = "coalesced"
_OF_GLOO = f"{GLOO}:"


def evidence_from_flight(dump: FlightDump, rank: int) -> RankEvidence:
    """What the dump of `rank` says."""
    moment = dump.moment
    evidence = RankEvidence(
        rank=rank, path=dump.path, source="flight", version=dump.version, problems=list(dump.problems)
    )
    backends = _backends(dump)
    evidence.backend = next((backend for backend in backends if backend != GLOO), backends[0] if backends else "")
    evidence.active_only = _is_active_only(dump, evidence.backend)
    evidence.wrapped = not evidence.active_only and bool(dump.entries) and dump.entries[0].record_id > 0
    reading = _Reading(dump, evidence)
    reading.read()
    reading.join_progress()
    if moment is not None:
        evidence.taken_at, evidence.reason, evidence.host = moment.time_ns, moment.reason, moment.host
        evidence.take_exceptions(moment.exceptions, moment.error)
        evidence.own_stacks, evidence.world_size = list(moment.stacks), moment.world_size
        offset = moment.clock.get("wall", 0) - moment.clock.get("t", 0)
        add_roots(evidence, moment.calls, offset)
        if not any(signature.is_p2p for signature in evidence.signatures):
            add_p2p(evidence, moment.calls, offset)
        # Our dump without an entry is that of a rank that made no call: the recorder was asked.
        evidence.has_status = True
    return evidence


def _backends(dump: FlightDump) -> list[str]:
    """What the calls of a dump were made by, in order: crossrank's dumps hold the recorders of all backends."""
    names = dict.fromkeys(entry.profiling_name for entry in dump.entries)
    return list(dict.fromkeys(whole(backend) for backend, colon, _ in (name.partition(":") for name in names) if colon))


def _dtype(name: str) -> str:
    known = dtype_of(name)
    return known.name if known is not None else whole(name)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _is_active_only(dump: FlightDump, backend: str) -> bool:
    """Whether completed calls were left out: the status knows of some and the entries do not.

    Without a status, gaps between the entries show it. A ring in which all is open because the rest fell out lacks
    open calls as well: those after the last completed one.
    """
    if backend == GLOO or any(entry.state == "completed" for entry in dump.entries):
        return False
    if not dump.status:
        return any(two.record_id > one.record_id + 1 for one, two in pairwise(dump.entries))
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
    """One dump on its way into columns."""

    def __init__(self, dump: FlightDump, evidence: RankEvidence) -> None:
        self._dump = dump
        self._evidence = evidence
        known = dump.groups + (dump.moment.groups if dump.moment is not None else [])
        self._known = {group.pg: group for group in known}
        self._groups: list[GroupClaim] = []
        self._index_of: dict[tuple[str, str], int] = {}
        self._is_mixed = evidence.backend != GLOO and GLOO in _backends(dump)
        self._signatures: Table[Signature] = Table()
        self._stacks: Table[tuple[Frame, ...]] = Table(())
        self._stack_of: dict[tuple[int, ...], int] = {}
        self._pg_ids: dict[int, int] = {}
        evidence.groups, evidence.signatures, evidence.stacks = (
            self._groups,
            self._signatures.rows,
            self._stacks.rows,
        )
        for group in known:
            if group.pg:
                self._group((group.pg, group.desc))
            elif group.ranks:  # gloo's only entry: no name, and everyone or nobody
                evidence.world_size = max(group.ranks) + 1

    def read(self) -> None:
        """Every call of the dump, in order."""
        entries = self._dump.entries
        append = self._evidence.calls.append
        retired_is_done = self._retired_is_done()
        closed_by, members_of = _launches(entries)
        over = _over(self._dump) if self._evidence.active_only else set()
        cut = 0 if self._evidence.wrapped else -1  # the launch that holds this entry may have lost its first members
        groups: dict[tuple[object, ...], int] = {}
        known: dict[tuple[object, ...], tuple[int, bool]] = {}
        seen, with_p2p = self._evidence.collectives_seen, self._evidence.with_p2p
        for index, entry in enumerate(entries):
            on_gloo = self._is_mixed and entry.profiling_name.startswith(_OF_GLOO)
            # Backends of one group count its calls each for itself.
            key = (*entry.process_group, GLOO) if on_gloo else entry.process_group
            group = groups.get(key)
            if group is None:
                group = groups[key] = self._group(entry.process_group, GLOO if on_gloo else "")
            if entry.pg_id not in self._pg_ids:
                self._pg_ids[entry.pg_id] = group
            seen[group] = max(seen.get(group, 0), entry.collective_seq_id)
            if entry.p2p_seq_id:
                with_p2p.add(group)
            text = (group, entry.profiling_name, entry.input_sizes, entry.output_sizes, entry.input_dtypes)
            found = known.get(text)
            if found is None:
                signature = self._signature(entry, group)
                found = known[text] = self._signatures.number(signature), signature.is_p2p
            signature_number, is_p2p = found
            closing = entry
            if closed_by or members_of:
                if index in closed_by:
                    if not is_p2p:
                        continue  # it is a member of a collective that comes later
                    closing = entries[closed_by[index]]
                elif index in members_of:
                    if index == cut and entry.profiling_name.endswith(f":{_CLOSING}"):
                        continue  # of what, the ring no longer knows
                    members = [self._signature(entries[member], group) for member in members_of[index]]
                    if members and all(member.is_p2p for member in members):
                        continue  # its state has gone to its members
                    whole = _coalesced(self._signature(entry, group), members)
                    if members_of[index][:1] == [cut]:
                        whole = msgspec.structs.replace(whole, members=())
                    signature_number = self._signatures.number(whole)
            state = _STATES.get(closing.state, SCHEDULED)
            if (retired_is_done or on_gloo) and closing.retired and state != COMPLETED:
                state = RETIRED
            if index in over:
                state = COMPLETED
            append(
                group=group,
                seq=entry.p2p_seq_id if is_p2p else entry.collective_seq_id,
                signature=signature_number,
                state=state,
                created=entry.time_created_ns,
                started=closing.time_discovered_started_ns or 0,
                completed=closing.time_discovered_completed_ns or 0,
                stack=self._stack(entry.frames),
                record=entry.record_id,
            )

    def join_progress(self) -> None:
        """Find the group that each `pg_id` of the status stands for."""
        groups, status = self._groups, self._dump.status
        joined = dict(self._pg_ids)
        numeric = [index for index, group in enumerate(groups) if len(group.name) < 10 and _is_number(group.name)]
        by_order: dict[int, int] = {}
        if not self._is_mixed and numeric and len(numeric) == len(groups):
            by_name = sorted(numeric, key=lambda index: int(groups[index].name))
            if len(groups) == len(status):
                by_order = dict(zip(sorted(status), by_name, strict=True))
            elif status and max(status) < len(groups):
                by_order = dict(enumerate(by_name))
        if by_order and all(by_order.get(pg_id) == group for pg_id, group in joined.items()):
            joined = by_order
        self._evidence.has_status = bool(status)
        self._evidence.all_joined = bool(status) and all(pg_id in joined for pg_id in status)
        self._evidence.progress = {group: status[pg_id] for pg_id, group in joined.items() if pg_id in status}

    def _retired_is_done(self) -> bool:
        backend = self._evidence.backend
        states = {entry.state for entry in self._dump.entries}
        # A backend other than NCCL that completes nothing in a whole ring is one that cannot.
        return backend == GLOO or (backend != "nccl" and not states & {"started", "completed"})

    def _group(self, name_and_desc: tuple[str, str], apart: str = "") -> int:
        name, desc = map(whole, name_and_desc)
        known = self._known.get(name)
        # A rank is in one group of a name; the description may be missing in some of its entries.
        found = self._index_of.get((name, apart))
        if found is None:
            if desc in ("", "undefined"):
                desc = known.desc if known is not None else ""
            ranks = None if known is None or known.ranks is None else tuple(known.ranks)
            found = self._index_of[name, apart] = len(self._groups)
            self._groups.append(GroupClaim(name, "" if desc == "undefined" else desc, ranks, apart))
        return found

    def _signature(self, entry: Entry, group: int) -> Signature:
        name = whole(entry.profiling_name.partition(":")[2] or entry.profiling_name)
        members = self._groups[group].ranks
        p2p = _P2P.match(name)
        peer = None
        if p2p is not None:
            name, peer = p2p["op"], int(p2p["peer"])
            if members is not None and peer < len(members):
                peer = members[peer]
        row = operation_of(name)
        op = row.name if row is not None else name
        return Signature(
            op=op,
            name=name,
            inputs=entry.input_sizes,
            outputs=entry.output_sizes,
            in_dtypes=tuple(map(_dtype, entry.input_dtypes)),
            out_dtypes=tuple(map(_dtype, entry.output_dtypes)),
            peer=peer,
            root=_root(op, entry, self._evidence.rank, members),
        )

    def _stack(self, frames: object) -> int:
        if not frames or not isinstance(frames, list):
            return 0
        # Entries of one call site share their frames; where they do not, the text decides.
        key = tuple(map(id, frames[:MOST_FRAMES]))
        found = self._stack_of.get(key)
        if found is None:
            found = self._stack_of[key] = self._stacks.number(frames_of(frames))
        return found


def _over(dump: FlightDump) -> set[int]:
    """Entries of a dump of active calls that are over: members of a batch never say so, and what did is left out.

    A batch is over where the status of its group has its number, or where its closing entry is not there although
    later ones are.
    """
    entries = dump.entries
    found: set[int] = set()
    records = {entry.record_id for entry in entries}
    last_record = max(records, default=0)
    newest: dict[int, int] = {}
    for entry in entries:
        if entry.is_p2p:
            newest[entry.pg_id] = max(newest.get(entry.pg_id, 0), entry.p2p_seq_id)
    runs: dict[tuple[int, int, int], list[int]] = {}
    for index, entry in enumerate(entries):
        runs.setdefault((entry.pg_id, entry.collective_seq_id, entry.p2p_seq_id), []).append(index)
    for run in runs.values():
        first, last = entries[run[0]], entries[run[-1]]
        if _closes(last):
            continue
        progress = dump.status.get(first.pg_id)
        if first.is_p2p and progress is not None:
            # Collectives put their numbers in the same place: this one must be that of a P2P call.
            of_p2p = first.collective_seq_id == 0 or progress.last_enqueued_collective == newest[first.pg_id]
            if of_p2p and progress.last_completed_collective >= first.p2p_seq_id:
                found.update(run)
                continue
        if len(run) > 1 and last.record_id + 1 not in records and last_record > last.record_id:
            found.update(run)
    return found


def _launches(entries: Sequence[Entry]) -> tuple[dict[int, int], dict[int, list[int]]]:
    """Which entries are one launch: member -> its closing entry, and closing entry -> its members.

    The members of a launch stand in a row, with one pair of sequence numbers. A launch that is still being made has
    no closing entry; its last member then closes it.
    """
    closed_by: dict[int, int] = {}
    members_of: dict[int, list[int]] = {}
    runs: dict[int, list[int]] = {}

    def close(run: list[int], closing: int) -> None:
        members_of[closing] = run
        closed_by.update((member, closing) for member in run if member != closing)

    def close_unfinished(run: list[int]) -> None:
        if len(run) > 1 and not entries[run[0]].is_p2p:
            close(run, run[-1])

    for index, entry in enumerate(entries):
        run = runs.get(entry.pg_id)
        if run is not None:
            first = entries[run[0]]
            same = first.collective_seq_id == entry.collective_seq_id and first.p2p_seq_id == entry.p2p_seq_id
            if same and _closes(entry):
                close(runs.pop(entry.pg_id), index)
                continue
            if same:
                run.append(index)
                continue
            close_unfinished(run)
        if _closes(entry):
            members_of[index] = []
        else:
            runs[entry.pg_id] = [index]
    for run in runs.values():
        close_unfinished(run)
    return closed_by, members_of


def _closes(entry: Entry) -> bool:
    return _CLOSING in entry.profiling_name and not entry.input_sizes and not entry.output_sizes


def _coalesced(closing: Signature, members: list[Signature]) -> Signature:
    ops = {member.op for member in members}
    op = closing.op
    if op not in OPERATIONS and len(ops) == 1:
        op = ops.pop()
    return msgspec.structs.replace(closing, op=op, inputs=(), outputs=(), members=tuple(members))


def _root(op: str, entry: Entry, rank: int, members: tuple[int, ...] | None) -> int | None:
    """The recorder names no root, but in gather and scatter the root alone holds the other side."""
    if members is None or len(members) < 2:
        return None
    side = {"gather": entry.output_sizes, "scatter": entry.input_sizes}.get(op, ())
    return rank if len(side) == len(members) else None
