"""Finds every communication of a rank and gives it its record, from the most trusted source that has it.

One call shows at several depths: a functional op calls a c10d op, in which our range `crossrank#N` stands, in which
NCCL writes `record_param_comms`. The first source of `SOURCES` that a call has gives its record; what lies above or
below it in the same chain of callers is the same call and is not counted again.
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

SOURCES = {
    "comms file": "our record of the call, found by its id",
    "crossrank range": "the text of our range in the execution trace",
    "record_param_comms": "the node that torch writes for a backend's call",
    "c10d op": "the arguments of a c10d op",
    "functional op": "the arguments of a functional collective",
    "kineto kernel": "the arguments that Kineto gives with the kernel",
    "kernel name": "nothing but the name of the kernel",
}

OURS = ("comms file", "crossrank range")
"""Origins whose records are our own and stand as they are."""

_RANGE = re.compile(rf"{RANGE}(\d{{1,18}})$")
C10D = "c10d::"
FUNCTIONAL = ("_c10d_functional::", "c10d_functional::", "_c10d_functional_autograd::")
COMMUNICATING = ("record_param_comms", C10D, *FUNCTIONAL, RANGE)
"""How the names of all nodes begin that communicate."""
MARKERS = frozenset(
    (
        *("wait", "init", "coalesced", "start_coalescing", "end_coalescing", "startcoalescing", "endcoalescing"),
        "batch_op_issue",  # ProcessGroupNCCL2's
    )
)
"""Names under which `record_param_comms` notes what is no communication by itself."""

_TOGETHER = ("nccl:coalesced", "batch_op_issue")
"""Ranges of torch in which it launches calls that go out together, by the process group of NCCL."""
_DEPTH = 16
"""More than the nodes between the outermost and the innermost node of one call."""
_WORK_FOLLOWS = 16
"""Fewer RecordFunctions than this begin between a call and its Work."""


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

    `groups` by name, as the most trusted source has them; `records` of the comms file by id; `event_args` gives the
    Kineto arguments of a host node by its position; `budget` is that of the execution trace. Sets `HostOp.caller` of
    ranges of a Work.
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
    """What a rank communicated, as far as it is found."""

    host: Sequence[HostOp]
    records: Mapping[int, CommRecord]
    event_args: Callable[[int], msgspec.Raw | None]
    budget: Budget
    groups: dict[str, Group]
    communications: list[Communication] = field(default_factory=list)
    """In the order in which they began."""
    at: dict[int, Communication] = field(default_factory=dict)
    """By the position of their host node."""
    waits: dict[int, ParamComms] = field(default_factory=dict)
    """Positions of the nodes that wait for a communication, with what they say of it."""
    unknown: list[str] = field(default_factory=list)
    """Names of communications that are no operation of the table, one entry each."""
    kernels_alone: int = 0
    """Communication kernels without a call around them, each a communication of its own."""
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._position: dict[int | None, int] = {op.id: position for position, op in enumerate(self.host)}
        self._places: dict[int, int] = {}
        """Position in `communications` -> root or peer as a rank within the group."""
        self._covered: set[int] = set()
        """Positions of the nodes above a communication."""
        self._batched: dict[int, list[tuple[int, Communication]]] | None = None
        """Thread -> calls that went out with others, with the number of their range, in its order."""
        self._launched_in: dict[tuple[int, int], int] = {}
        """Thread and batch -> position of the range in which it was launched."""

    def take_range(self, position: int) -> None:
        op = self.host[position]
        match = _RANGE.match(op.name)
        if match is None:
            return
        number = int(match[1])
        if number in self.records:
            self._add(position, self.records[number], "comms file")
            return
        values = io(op.inputs).values
        given = parse(values[0], dict[str, Any]) if values else None
        try:
            record = msgspec.convert({"id": number, "t": op.start_ns or 0, **(given or {})}, CommRecord)
        except (msgspec.MsgspecError, TypeError):
            self.warnings.append(f"node {op.id} ({op.name}) does not carry a record; read as its c10d op")
            return
        self._add(position, record, "crossrank range")

    def cover_ops_around(self, positions: Iterable[int]) -> None:
        """Cover the ops that our ranges ran in where the trace names another caller, which it does beside a Work that
        ends (see `event_matching`): a c10d op and a functional one that began just before on the thread for the same
        call.

        `positions` are those of ranges, c10d and functional ops in the order in which they began.
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
        """Add the outermost of the nodes at `positions` whose call no better source has."""
        candidates = set(positions)
        unreadable = 0
        for position in sorted(candidates):
            above = list(self._callers(position))
            if position in self._covered or any(at in self.at or at in candidates for at in above):
                continue
            comms, args = read(self.host[position]), self.event_args(position)
            kineto = from_kineto(args) if args is not None else None
            if comms is not None and kineto is not None:
                _fill(comms, kineto)
            comms = comms or kineto
            if comms is None:
                unreadable += 1
            elif comms.name == "wait":
                self.waits[position] = comms
            elif operation_of(comms.name) is not None:
                group = self._group(comms)
                if comms.rank is not None:
                    self._places[len(self.communications)] = comms.rank
                names = (self.host[at].name for at in (position, *above))
                c10d = next((name.removeprefix(C10D) for name in names if name.startswith(C10D)), comms.name)
                time = self.host[position].start_ns or 0
                self._add(position, to_record(comms, group, number=0, time=time, c10d=c10d), source)
            elif comms.name not in MARKERS:
                self.unknown.append(comms.name)
        if unreadable:
            self.warnings.append(f"{unreadable} {source} node(s) have arguments of an unknown layout and were left out")

    def _callers(self, position: int, depth: int = _DEPTH) -> Iterator[int]:
        """Positions of the nodes above, as far up as one call's nodes can stand."""
        for _ in range(depth):
            above = self._position.get(self.host[position].caller)
            if above is None:
                return
            yield above
            position = above

    def _add(self, position: int, record: CommRecord, source: str) -> None:
        communication = Communication(
            record=record, group=self.groups.get(record.pg), origin=source, host=self.host[position].id
        )
        self.at[position] = communication
        self._covered.update((position, *self._callers(position)))
        self.communications.append(communication)

    def _group(self, comms: ParamComms) -> Group | None:
        if not comms.pg and len(self.groups) == 1:
            comms.pg = next(iter(self.groups))  # the op does not say, and there is no other
        group = self.groups.get(comms.pg)
        if group is None and comms.pg and (comms.ranks or comms.group_size):
            size = comms.group_size or len(comms.ranks or ())
            ranks = None if comms.ranks is None else self.budget.ranks(comms.ranks)
            group = self.groups[comms.pg] = Group(pg=comms.pg, size=size, ranks=ranks, desc=comms.desc)
        return group

    def find_works(self) -> None:
        """Give every communication the range of its Work: the first that its thread began after the call.

        The caller that the trace names for it is not reliable, see `event_matching`.
        """
        last: dict[int, tuple[int, Communication]] = {}
        involved = [position for position, op in enumerate(self.host) if op.is_work or position in self.at]
        for position in sorted(involved, key=lambda position: self.host[position].rf_id):
            op = self.host[position]
            if position in self.at:
                last[op.tid] = (op.rf_id, self.at[position])
            else:
                rf_id, communication = last.get(op.tid, (-_WORK_FOLLOWS, None))
                if communication is not None and op.rf_id - rf_id < _WORK_FOLLOWS:
                    op.caller = communication.host or op.caller
                    if communication.work is None:
                        communication.work = op.id

    def name_pointers(self, world_size: int | None) -> None:
        """Find the members of groups that old traces name by an address: one of the world's size is the world."""
        sizes: Counter[str] = Counter()
        for communication in self.communications:
            record = communication.record
            if communication.group is None and named_by_address(record.pg):
                sizes[record.pg] = max(sizes[record.pg], len(record.in_split or ()), len(record.out_split or ()))
        for pg, size in sizes.items():
            if size and size == world_size:
                group = self.groups[pg] = Group(pg=pg, size=size, ranks=self.budget.ranks(range(size)), desc="")
                self._regroup(pg, group)
                self.warnings.append(
                    f"group {pg} is named by an address, which differs between ranks: join ranks by its members"
                )
            else:
                self.warnings.append(f"group {pg} is named by an address and its members are not recorded")

    def _regroup(self, pg: str, group: Group) -> None:
        for number, communication in enumerate(self.communications):
            record = communication.record
            operation = operation_of(record.op)
            if record.pg != pg:
                continue
            communication.group = group
            changes: dict[str, int] = {}
            if operation is not None and operation.payload.endswith("per_member"):
                changes["bytes"] = record.bytes * group.size
            place = self._places.get(number)
            if operation is not None and place is not None and place in (group.ranks or ()):
                changes |= {"root": place} if operation.rooted else {"peer": place} if operation.p2p else {}
            communication.record = msgspec.structs.replace(record, **changes)

    def attach(self, activity: Activity) -> None:
        """Give a communication its kernel; one without a call around it becomes a communication of its own."""
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
                communication.group = communication.group or self._group(described)
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
        group = self._group(described)
        record = to_record(described, group, number=0, time=activity.start_ns, c10d="")
        self.communications.append(
            Communication(record=record, group=group, origin=source, host=None, activities=[activity.id])
        )

    def _batch_launched_in(self, around: Sequence[int]) -> list[Communication]:
        """The calls that went out together: NCCL launches them in a range of its own, when the last of them was made.
        Empty where none of the nodes `around` a kernel is such a range. Only our records say what went out together."""
        end = next((at for at in around if self.host[at].name in _TOGETHER), None)
        if end is None:
            return []
        if self._batched is None:
            self._batched = {}
            for position, one in sorted(self.at.items(), key=lambda item: self.host[item[0]].rf_id):
                if one.record.batch is not None:
                    node = self.host[position]
                    self._batched.setdefault(node.tid, []).append((node.rf_id, one))
        node = self.host[end]
        calls = self._batched.get(node.tid, [])
        last = bisect_left(calls, node.rf_id, key=itemgetter(0))
        if not last:
            return []
        batch = calls[last - 1][1].record.batch
        if self._launched_in.setdefault((node.tid, batch or 0), end) != end:
            return []
        same = takewhile(lambda one: one[1].record.batch == batch, (calls[at] for at in range(last - 1, -1, -1)))
        return [one for _, one in same][::-1]

    def sort(self) -> None:
        """Put the communications in the order in which they began. Number those that are not ours, and the calls of
        each group whose source has no sequence number."""
        calls: list[tuple[int, int | None, Communication]] = []
        for communication in self.communications:
            op = self.host[self._position[communication.host]] if communication.host is not None else None
            by_order = (op.rf_id, op.start_ns) if op is not None else (sys.maxsize, communication.record.t)
            calls.append((*by_order, communication))
        self.communications = by_begin((start, one) for _, start, one in sorted(calls, key=itemgetter(0)))
        counts: Counter[tuple[object, ...]] = Counter()
        ours = (one.record.id for one in self.communications if one.origin in OURS)
        next_id = count(max(ours, default=-1) + 1)
        for communication in self.communications:
            record = communication.record
            counts[communication.order] += 1
            changes = {} if communication.origin in OURS else {"id": next(next_id)}
            number = "p2p_seq" if is_p2p(record) else "seq"
            if getattr(record, number) is None:
                changes[number] = counts[communication.order]
                communication.seq_counted = True
            communication.record = msgspec.structs.replace(record, **changes)


def _fill(comms: ParamComms, kineto: ParamComms) -> None:
    """Take from Kineto what the node does not say."""
    comms.pg = comms.pg if comms.pg and not named_by_address(comms.pg) else kineto.pg or comms.pg
    for name in ("desc", "ranks", "group_size", "dtype", "in_split", "out_split"):
        setattr(comms, name, getattr(comms, name) or getattr(kineto, name))
    for name in ("in_elements", "out_elements", "is_async"):
        if getattr(comms, name) is None:
            setattr(comms, name, getattr(kineto, name))
