"""Finds every communication of a rank and takes its record from the most trusted source.

One call appears at several depths: a functional op calls a c10d op, inside it is crossrank's range `crossrank#N`, and
inside that NCCL writes `record_param_comms`. The first source of `SOURCES` that has a call gives its record. Nodes
above or below it in the same chain of callers are the same call and are not counted again.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import msgspec

from crossrank.budget import Budget
from crossrank.comm import CommRecord, Group, is_p2p, operation_of
from crossrank.recording import RANGE
from crossrank.tools.graph.linking.linked_trace import Activity, Communication, by_begin
from crossrank.tools.traces.execution_trace import HostOp, io
from crossrank.tools.traces.json_document import parse
from crossrank.tools.traces.kernels import communication_kernel
from crossrank.tools.traces.param_comms import ParamComms, from_kineto, from_node, from_op, named_by_address, to_record

ADDRESS_AS_NAME = "has an address as its name"
"""Part of the warnings about such groups. Once all ranks are matched by members, the warnings are obsolete."""
SOURCES = {
    "comms file": "crossrank's record of the call, by its id",
    "crossrank range": "the text of crossrank's range in the execution trace",
    "record_param_comms": "torch's node for the call of a backend",
    "c10d op": "the arguments of a c10d op",
    "functional op": "the arguments of a functional collective",
    "kineto kernel": "the arguments that Kineto stores with the kernel",
    "kernel name": "only the name of the kernel",
}

OURS = ("comms file", "crossrank range")
"""Origins whose records crossrank itself wrote. They are not changed."""

_RANGE = re.compile(rf"{RANGE}(\d{{1,18}})$")
C10D = "c10d::"
FUNCTIONAL = ("_c10d_functional::", "c10d_functional::", "_c10d_functional_autograd::")
COMMUNICATING = ("record_param_comms", C10D, *FUNCTIONAL, RANGE)
"""Prefixes of the names of all nodes that communicate."""
MARKERS = frozenset(
    (
        *("wait", "init", "coalesced", "start_coalescing", "end_coalescing", "startcoalescing", "endcoalescing"),
        "batch_op_issue",  # ProcessGroupNCCL2's
    )
)
"""Names of `record_param_comms` nodes that are no communication of their own."""

_BATCH_RANGES = ("nccl:coalesced", "batch_op_issue")
"""Ranges in which torch launches the calls of a batch, by NCCL's process groups."""
_MAX_CALL_DEPTH = 16
"""Upper bound for the nodes between the outermost and the innermost node of one call."""
_MAX_STARTS_BEFORE_WORK = 16
"""Between a call and its Work, fewer RecordFunctions than this start."""


def find_communications(
    host: Sequence[HostOp],
    activities: Iterable[Activity],
    groups: Mapping[str, Group],
    *,
    world_size: int | None,
    budget: Budget,
    records: Mapping[int, CommRecord] = MappingProxyType({}),
    event_args: Callable[[int], msgspec.Raw | None] = lambda _: None,
) -> Communications:
    """Find the communications of one rank, source by source.

    `groups` by name, from the most trusted source. `records` of the comms file by id. `event_args` returns the Kineto
    arguments of a host node by its position. `budget` is the execution trace's. Sets `HostOp.caller` of the range of
    each Work.
    """
    found = Communications(groups=dict(groups), host=host, records=records, event_args=event_args, budget=budget)
    communicating = [position for position, op in enumerate(host) if op.name.startswith(COMMUNICATING)]
    ranges, params, c10d, functional = (
        [position for position in communicating if host[position].name.startswith(prefix)]
        for prefix in (RANGE, "record_param_comms", C10D, FUNCTIONAL)
    )
    for position in ranges:
        found.take_range(position)
    found.cover_ops_around(sorted((*ranges, *c10d, *functional), key=lambda at: host[at].rf_id))
    found.take(params, "record_param_comms", from_node)
    found.take([p for p in c10d if operation_of(host[p].name)], "c10d op", from_op)
    found.take([p for p in functional if operation_of(host[p].name)], "functional op", from_op)
    found.find_works()
    found.name_pointers(world_size)
    for activity in activities:
        found.attach(activity)
    found.sort()
    return found


@dataclass(kw_only=True)
class Communications:
    """The communications of a rank found so far."""

    host: Sequence[HostOp]
    records: Mapping[int, CommRecord]
    event_args: Callable[[int], msgspec.Raw | None]
    budget: Budget
    groups: dict[str, Group]
    communications: list[Communication] = field(default_factory=list)
    """Ordered by start."""
    at: dict[int, Communication] = field(default_factory=dict)
    """Position of the host node -> communication."""
    waits: dict[int, ParamComms] = field(default_factory=dict)
    """Position of a node that waits for a communication -> its arguments."""
    unknown: list[str] = field(default_factory=list)
    """Names of communications that are not in the table of operations, one entry for each communication."""
    kernels_alone: int = 0
    """Communication kernels without a call around them. Each becomes a communication of its own."""
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._position: dict[int | None, int] = {op.id: position for position, op in enumerate(self.host)}
        self._group_ranks: dict[int, int] = {}
        """Position in `communications` -> root or peer, as a rank within the group."""
        self._covered: set[int] = set()
        """Positions of the nodes of, and above, a communication."""
        self._batch_calls: dict[int, list[tuple[int, Communication]]] | None = None
        """Thread -> (number of the range, call) for the calls of batches, ordered by number."""
        self._range_of_batch: dict[tuple[int, int], int] = {}
        """Thread and batch -> position of the range that launched the batch."""

    def take_range(self, position: int) -> None:
        op = self.host[position]
        match = _RANGE.match(op.name)
        if match is None:
            return
        number = int(match[1])
        if number in self.records:
            self._add_call(position, self.records[number], "comms file")
            return
        values = io(op.inputs).values
        given = parse(values[0], dict[str, Any]) if values else None
        try:
            record = msgspec.convert({"id": number, "t": op.start_ns or 0, **(given or {})}, CommRecord)
        except (msgspec.MsgspecError, TypeError):
            self.warnings.append(f"node {op.id} ({op.name}) has no record; read as its c10d op")
            return
        self._add_call(position, record, "crossrank range")

    def cover_ops_around(self, positions: Iterable[int]) -> None:
        """Cover the ops that contain crossrank's ranges although the trace names another caller.

        The trace does so when a Work ends (see `event_matching`). The ops are a c10d op and a functional op of the same
        operation that started last before the range on its thread. `positions` are ranges, c10d ops and functional ops,
        ordered by start.
        """
        before: dict[int, list[int]] = {}
        for position in positions:
            open_ops = before.setdefault(self.host[position].tid, [])
            if position not in self.at:
                open_ops.append(position)
                continue
            operation = operation_of(self.at[position].record.op)
            for prefixes in ((C10D,), FUNCTIONAL):
                name = self.host[open_ops[-1]].name if open_ops else ""
                if name.startswith(prefixes) and operation_of(name) == operation:
                    self._covered.add(open_ops.pop())
            open_ops.clear()

    def take(self, positions: Iterable[int], source: str, read: Callable[[HostOp], ParamComms | None]) -> None:
        """Add the outermost of the nodes at `positions`, except calls that a better source has."""
        candidates = set(positions)
        unreadable = 0
        for position in sorted(candidates):
            above = list(self._callers(position))
            if position in self._covered or any(at in self.at or at in candidates for at in above):
                continue
            comms, args = read(self.host[position]), self.event_args(position)
            kineto = from_kineto(args) if args is not None else None
            if comms is not None and kineto is not None:
                _fill_from_kineto(comms, kineto)
            comms = comms or kineto
            if comms is None:
                unreadable += 1
            elif comms.name == "wait":
                self.waits[position] = comms
            elif operation_of(comms.name) is not None:
                group = self._find_group(comms)
                if comms.rank is not None:
                    self._group_ranks[len(self.communications)] = comms.rank
                names = (self.host[at].name for at in (position, *above))
                c10d = next((name.removeprefix(C10D) for name in names if name.startswith(C10D)), comms.name)
                time = self.host[position].start_ns or 0
                self._add_call(position, to_record(comms, group, number=0, time=time, c10d=c10d), source)
            elif comms.name not in MARKERS:
                self.unknown.append(comms.name)
        if unreadable:
            self.warnings.append(f"{unreadable} {source} node(s) have arguments with an unknown layout and are skipped")

    def _callers(self, position: int, depth: int = _MAX_CALL_DEPTH) -> Iterator[int]:
        """Yield the positions of the nodes above, as far up as the nodes of one call can be."""
        for _ in range(depth):
            above = self._position.get(self.host[position].caller)
            if above is None:
                return
            yield above
            position = above

    def _add_call(self, position: int, record: CommRecord, source: str) -> None:
        communication = Communication(
            record=record, group=self.groups.get(record.pg), origin=source, host=self.host[position].id
        )
        self.at[position] = communication
        self._covered.update((position, *self._callers(position)))
        self.communications.append(communication)

    def _find_group(self, comms: ParamComms) -> Group | None:
        if not comms.pg and len(self.groups) == 1:
            comms.pg = next(iter(self.groups))  # the op has no group, and this is the only one
        group = self.groups.get(comms.pg)
        if group is None and comms.pg and (comms.ranks or comms.group_size):
            size = comms.group_size or len(comms.ranks or ())
            ranks = None if comms.ranks is None else self.budget.ranks(comms.ranks)
            group = self.groups[comms.pg] = Group(pg=comms.pg, size=size, ranks=ranks, desc=comms.desc)
        return group

    def find_works(self) -> None:
        """Assign to each communication the range of its Work: the first one that its thread starts after the call.

        The caller that the trace names for this range is not reliable, see `event_matching`.
        """
        last: dict[int, tuple[int, Communication]] = {}
        involved = [position for position, op in enumerate(self.host) if op.is_work or position in self.at]
        for position in sorted(involved, key=lambda position: self.host[position].rf_id):
            op = self.host[position]
            if position in self.at:
                last[op.tid] = (op.rf_id, self.at[position])
            else:
                rf_id, communication = last.get(op.tid, (-_MAX_STARTS_BEFORE_WORK, None))
                if communication is not None and op.rf_id - rf_id < _MAX_STARTS_BEFORE_WORK:
                    op.caller = communication.host or op.caller
                    if communication.work is None:
                        communication.work = op.id

    def name_pointers(self, world_size: int | None) -> None:
        """Find the members of groups that old traces name by an address. A group of the world's size is the world."""
        sizes: Counter[str] = Counter()
        for communication in self.communications:
            record = communication.record
            if communication.group is None and named_by_address(record.pg):
                sizes[record.pg] = max(sizes[record.pg], len(record.in_split or ()), len(record.out_split or ()))
        for pg, size in sizes.items():
            if size and size == world_size:
                group = self.groups[pg] = Group(pg=pg, size=size, ranks=self.budget.ranks(range(size)), desc="")
                self._set_group(pg, group)
                self.warnings.append(
                    f"group {pg} {ADDRESS_AS_NAME}, which differs between ranks: match it by its members"
                )
            else:
                self.warnings.append(f"group {pg} {ADDRESS_AS_NAME}, and its members are not recorded")

    def _set_group(self, pg: str, group: Group) -> None:
        for number, communication in enumerate(self.communications):
            record = communication.record
            operation = operation_of(record.op)
            if record.pg != pg:
                continue
            communication.group = group
            changes: dict[str, int] = {}
            if operation is not None and operation.payload.endswith("per_member"):
                changes["bytes"] = record.bytes * group.size
            place = self._group_ranks.get(number)
            if operation is not None and place is not None and place in (group.ranks or ()):
                changes |= {"root": place} if operation.rooted else {"peer": place} if operation.p2p else {}
            communication.record = msgspec.structs.replace(record, **changes)

    def attach(self, activity: Activity) -> None:
        """Assign a kernel to its communication. A kernel without a call around it becomes a communication."""
        if activity.category != "kernel":
            return
        described, known = from_kineto(activity.args), communication_kernel(activity.name)
        if described is None and known is None:
            return
        position = self._position.get(activity.host)
        around = () if position is None else (position, *self._callers(position, 63))
        communication = next((self.at[at] for at in around if at in self.at), None)
        if communication is not None:
            communication.activities.append(activity.id)
            if described is not None and communication.origin not in OURS:
                described.pg = communication.record.pg or described.pg
                communication.group = communication.group or self._find_group(described)
                communication.record = msgspec.structs.replace(communication.record, pg=described.pg)
            return
        if batch := self._batch_launched_in(around):
            for one in batch:
                one.activities.append(activity.id)
            return
        self.kernels_alone += 1
        source = "kernel name" if described is None else "kineto kernel"
        if described is None:
            described = ParamComms(name=(known[1] if known else None) or activity.name.split("(")[0])
        group = self._find_group(described)
        record = to_record(described, group, number=0, time=activity.start_ns, c10d="")
        self.communications.append(
            Communication(record=record, group=group, origin=source, host=None, activities=[activity.id])
        )

    def _batch_launched_in(self, around: Sequence[int]) -> list[Communication]:
        """Return the calls of the batch that a kernel belongs to; empty if no node `around` it launches a batch. NCCL
        launches a batch in a range of its own, after its last call. Only crossrank's records say what is a batch."""
        end = next((at for at in around if self.host[at].name in _BATCH_RANGES), None)
        if end is None:
            return []
        if self._batch_calls is None:
            self._batch_calls = {}
            for position, one in sorted(self.at.items(), key=lambda item: self.host[item[0]].rf_id):
                if one.record.batch is not None:
                    node = self.host[position]
                    self._batch_calls.setdefault(node.tid, []).append((node.rf_id, one))
        node = self.host[end]
        calls = self._batch_calls.get(node.tid, [])
        last = bisect_left(calls, node.rf_id, key=itemgetter(0))
        if not last:
            return []
        batch = calls[last - 1][1].record.batch
        if self._range_of_batch.setdefault((node.tid, batch or 0), end) != end:
            return []
        same = takewhile(lambda one: one[1].record.batch == batch, (calls[at] for at in range(last - 1, -1, -1)))
        return [one for _, one in same][::-1]

    def sort(self) -> None:
        """Order the communications by start. Number those that crossrank did not record. Count the calls of each group
        whose source has no sequence number."""
        calls: list[tuple[int, int | None, Communication]] = []
        for communication in self.communications:
            op = self.host[self._position[communication.host]] if communication.host is not None else None
            by_order = (op.rf_id, op.start_ns) if op is not None else (sys.maxsize, communication.record.t)
            calls.append((*by_order, communication))
        self.communications = by_begin((start, one) for _, start, one in sorted(calls, key=itemgetter(0)))
        counts: Counter[tuple[object, ...]] = Counter()
        own_ids = (one.record.id for one in self.communications if one.origin in OURS)
        next_id = count(max(own_ids, default=-1) + 1)
        for communication in self.communications:
            record = communication.record
            counts[communication.order] += 1
            changes = {} if communication.origin in OURS else {"id": next(next_id)}
            number = "p2p_seq" if is_p2p(record) else "seq"
            if getattr(record, number) is None:
                changes[number] = counts[communication.order]
                communication.seq_counted = True
            communication.record = msgspec.structs.replace(record, **changes)


def _fill_from_kineto(comms: ParamComms, kineto: ParamComms) -> None:
    """Fill in from Kineto what the node lacks."""
    comms.pg = comms.pg if comms.pg and not named_by_address(comms.pg) else kineto.pg or comms.pg
    for name in ("desc", "ranks", "group_size", "dtype", "in_split", "out_split"):
        setattr(comms, name, getattr(comms, name) or getattr(kineto, name))
    for name in ("in_elements", "out_elements", "is_async"):
        if getattr(comms, name) is None:
            setattr(comms, name, getattr(kineto, name))
