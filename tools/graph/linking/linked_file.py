"""Linked traces as files: an execution trace with times, GPU activities, communications and dependencies added.

Chakra's converter reads this layout, so its fields keep their names and units: `ts`, `inclusive_dur`, `exclusive_dur`
in microseconds, here with all three decimals. Host nodes have the ids of the execution trace; GPU activities continue
them. A node also has these fields:

- `deps`: list of `{"id", "kind"}`, with `"inferred": true` and `slack_ns` if they apply. The kinds are those of
  `graph.EDGE_KINDS`; the caller is `ctrl_deps` instead.
- `comm`, on the host node of a communication: its record, group, origin and the ids of its kernels, or of its Work.
  Its `record.t` is in ns: of the rank's monotonic clock if `origin` is "comms file", else of the trace.
- `comm_host`, on a communication kernel: the id of that host node.
- `blocked_dur`, on a host node: the part of `exclusive_dur` in which it waited for the GPU activities in `deps`.
- `device`, `correlation`, `args` of an activity as in the Kineto trace. `unlinked`: why it has no host node.

The object `crossrank` has the version that linked, the inputs, and the report of what matched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from crossrank.atomic_file import compressed, whole_file
from crossrank.comm import Count, Int, Number
from crossrank.errors import BROKEN, CrossrankError, one_line
from crossrank.privacy import Privacy
from crossrank.tools.graph.linking.linked_trace import (
    Activity,
    Communication,
    Edge,
    EdgeKind,
    LinkedTrace,
    Provenance,
    by_begin,
)
from crossrank.tools.graph.linking.nesting import is_work
from crossrank.tools.paused_gc import paused_gc
from crossrank.tools.traces.execution_trace import (
    FIRST_NESTED_SCHEMA,
    FLAT_SCHEMA,
    HostOp,
    attribute_text,
    is_thread_root,
    read_attributes,
)
from crossrank.tools.traces.json_document import Document, Shape

_BATCH = 2048
"""Nodes in one line of the file."""
_MOST_US = Decimal(1 << 52)
_NO_HOST = HostOp(id=0, name="", caller=0, rf_id=0, tid=0)
_EMPTY = msgspec.Raw(b"[]")
_NO_ARGS = msgspec.Raw(b"{}")


class IncomingEdge(msgspec.Struct, gc=False, omit_defaults=True):
    """One entry of `deps`: an edge without its target."""

    id: Number
    kind: EdgeKind
    inferred: bool = False
    slack_ns: Number | None = None


class Node(msgspec.Struct, gc=False, kw_only=True, omit_defaults=True):
    """A host operation, or a GPU activity, which has `cat`. Times are in microseconds."""

    id: Number
    name: Annotated[str, Privacy.EVENT]
    ctrl_deps: Number
    inputs: Annotated[msgspec.Raw, Privacy.MIXED] = _EMPTY
    outputs: Annotated[msgspec.Raw, Privacy.MIXED] = _EMPTY
    attrs: Annotated[msgspec.Raw, Privacy.MIXED] = _EMPTY
    inclusive_dur: Annotated[msgspec.Raw, Privacy.NUMBER] | UnsetType = UNSET
    exclusive_dur: Annotated[msgspec.Raw, Privacy.NUMBER] | UnsetType = UNSET
    blocked_dur: Annotated[msgspec.Raw, Privacy.NUMBER] | UnsetType = UNSET
    ts: Annotated[msgspec.Raw, Privacy.WALL] | UnsetType = UNSET
    inter_thread_dep: Number | UnsetType | None = UNSET
    sync_dep: list[Number] = []
    cat: Annotated[str, Privacy.CATEGORY] | None = None
    ph: Annotated[str, Privacy.PHASE] | None = None
    device: Annotated[Int | str, Privacy.LABEL] | None = None
    stream: Annotated[Int | str, Privacy.LABEL] | None = None
    correlation: Number | None = None
    pg_name: Annotated[str, Privacy.GROUP] | None = None
    unlinked: Annotated[str, Privacy.REASON] | None = None
    args: Annotated[msgspec.Raw, Privacy.MIXED] = _NO_ARGS
    comm: Communication | None = None
    comm_host: Number | None = None
    deps: list[IncomingEdge] = []


class LinkedFile(msgspec.Struct, kw_only=True):
    """The content of the file."""

    schema: Annotated[str, Privacy.VERSION] = ""
    pid: Annotated[Count, Privacy.NUMBER] | None = None
    time: Annotated[str, Privacy.DAY] | None = None
    start_ts: Annotated[Count, Privacy.NUMBER] | None = None
    finish_ts: Annotated[Count, Privacy.NUMBER] | None = None
    crossrank: Provenance | None = None
    nodes: list[Node] = []


_SHAPE = Shape(what="a linked trace of crossrank", content=LinkedFile, rows="nodes", row=Node, hashed=False)


def write_linked(trace: LinkedTrace, path: str | Path) -> None:
    """Write `trace` to `path`, compressed as its name says. The file is complete or does not exist. Equal traces give
    equal bytes."""
    encode = msgspec.json.Encoder().encode
    nodes = map(encode, _make_nodes(trace))
    with whole_file(path) as temporary, temporary.open("wb") as file, compressed(file, path) as stream:
        stream.write(encode(_make_head(trace)).removesuffix(b"]}"))
        separator = b""
        while line := b",".join(islice(nodes, _BATCH)):
            stream.write(separator + line)
            separator = b",\n"
        stream.write(b"]}\n")


def _make_head(trace: LinkedTrace) -> LinkedFile:
    return LinkedFile(
        # The reader converts flat nodes to the next layout, so the file has that schema.
        schema=FIRST_NESTED_SCHEMA if trace.schema.startswith(FLAT_SCHEMA) else trace.schema,
        pid=trace.pid,
        time=trace.time,
        start_ts=trace.start_ts,
        finish_ts=trace.finish_ts,
        crossrank=Provenance(**{name: getattr(trace, name) for name in Provenance.__struct_fields__}),
    )


def _make_nodes(trace: LinkedTrace) -> Iterator[Node]:
    deps: dict[int, list[IncomingEdge]] = defaultdict(list)
    for edge in trace.edges:
        if edge.kind != "caller":
            deps[edge.target].append(IncomingEdge(edge.source, edge.kind, edge.inferred, edge.slack_ns))
    by_host = {c.host: c for c in trace.communications}
    by_activity = {activity: c for c in trace.communications for activity in c.activities}
    for op in trace.host:
        yield _make_host_node(op, deps.pop(op.id, []), by_host.get(op.id))
    hosts = {op.id: op for op in trace.host}
    root = next((op.id for op in trace.host if is_thread_root(op)), trace.host[0].id)
    for activity in trace.activities:
        host = _NO_HOST if activity.host is None else hosts[activity.host]
        communication = by_activity.get(activity.id)
        alone = communication is not None and communication.host is None
        duration = microseconds(activity.duration_ns)
        yield Node(
            id=activity.id,
            name=activity.name,
            ctrl_deps=host.id or root,
            inputs=host.inputs,
            outputs=host.outputs,
            attrs=attribute_text(host),
            inclusive_dur=duration,
            exclusive_dur=duration,
            ts=microseconds(activity.start_ns),
            inter_thread_dep=None,
            cat=activity.category,
            ph="X",
            device=activity.device,
            stream=activity.stream,
            correlation=activity.correlation,
            pg_name=communication.record.pg if communication else None,
            unlinked=activity.unlinked,
            args=activity.args,
            comm=communication if alone else None,
            comm_host=communication.host if communication else None,
            deps=deps.pop(activity.id, []),
        )


def _make_host_node(op: HostOp, deps: list[IncomingEdge], communication: Communication | None) -> Node:
    out = Node(
        id=op.id,
        name=op.name,
        ctrl_deps=op.caller or op.id,  # torch's root is its own parent
        inputs=op.inputs,
        outputs=op.outputs,
        attrs=attribute_text(op),
        sync_dep=[one.id for one in deps if one.kind == "sync"],
        comm=communication,
        pg_name=communication.record.pg if communication else None,
        deps=deps,
    )
    if op.start_ns is not None:
        out.inclusive_dur = microseconds(op.duration_ns)
        out.exclusive_dur = microseconds(op.exclusive_ns)
        out.blocked_dur = microseconds(op.blocked_ns) if op.blocked_ns else UNSET
        out.ts = microseconds(op.start_ns)
        out.inter_thread_dep = next((one.id for one in reversed(deps) if one.kind == "inter_thread"), None)
    return out


def microseconds(ns: int) -> msgspec.Raw:
    """Return nanoseconds as JSON text in microseconds, with all digits. A double would lose some from 2^53 ns on.

    >>> bytes(microseconds(1694128201435418123)), bytes(microseconds(4000))
    (b'1694128201435418.123', b'4')
    """
    sign = b"-" if ns < 0 else b""
    whole, rest = divmod(abs(ns), 1000)
    return msgspec.Raw(b"%b%d.%03d" % (sign, whole, rest) if rest else b"%b%d" % (sign, whole))


@paused_gc()
def read_linked(path: str) -> LinkedTrace:
    """Read the graph of a linked trace: plain, gzip or zstd.

    Raise `CrossrankError` if the file is damaged or no linked trace: dependencies of a part would mislead.
    """
    graph = _GraphBuilder(path)
    document = Document(path, _SHAPE, graph.take)
    file, head = document.content, document.content.crossrank
    if head is None:
        raise CrossrankError(f"{path}: is not a linked trace of crossrank; create one with `crossrank link`")
    if document.damage:
        raise CrossrankError(f"{path}: {document.damage[0]}; link it again")
    graph.check()
    return LinkedTrace(
        **msgspec.structs.asdict(head),
        pid=file.pid,
        time=file.time,
        start_ts=file.start_ts,
        finish_ts=file.finish_ts,
        host=graph.host,
        activities=graph.activities,
        communications=_sort_communications(graph),
        edges=graph.edges,
    )


def _sort_communications(graph: _GraphBuilder) -> list[Communication]:
    """Return the communications as they were linked: calls by number, kernels without a call by their own time."""
    starts: dict[int | None, int | None] = {op.id: op.start_ns for op in graph.host}
    starts |= {activity.id: activity.start_ns for activity in graph.activities}
    calls = sorted(graph.communications, key=lambda one: (one.host is None, one.record.id))
    return by_begin((starts.get(one.activities[0] if one.host is None else one.host), one) for one in calls)


class _GraphBuilder:
    """Collects the graph from the nodes of a file."""

    def __init__(self, path: str) -> None:
        self.host: list[HostOp] = []
        self.activities: list[Activity] = []
        self.communications: list[Communication] = []
        self.edges: list[Edge] = []
        self._path = path
        self._ids: set[int] = set()

    def take(self, nodes: list[Node]) -> None:
        for node in nodes:
            if node.id in self._ids:
                self._refuse(f"two nodes have the id {node.id}, the second is {node.name[:60]!r}")
            self._ids.add(node.id)
            self.edges += [Edge(d.id, node.id, d.kind, d.inferred, d.slack_ns) for d in node.deps]
            if node.comm is not None:
                self.communications.append(node.comm)
            try:
                if node.cat is not None:
                    self.activities.append(_read_activity(node, node.cat))
                    continue
                self.host.append(op := _read_host_op(node))
            except BROKEN as error:
                self._refuse(f"node {node.id} ({node.name[:60]!r}): {one_line(error)}")
            if op.caller:
                self.edges.append(Edge(op.caller, op.id, "caller"))

    def check(self) -> None:
        """Raise `CrossrankError` if an edge or a communication names a missing node."""
        for edge in self.edges:
            if edge.source not in self._ids or edge.source == edge.target:
                self._refuse(f"node {edge.target} depends on {edge.source}, which is not another node of the file")
        for communication in self.communications:
            for named in (*communication.activities, communication.work, communication.host):
                if named is not None and named not in self._ids:
                    self._refuse(
                        f"the {communication.record.op} of node {communication.host} names node {named}, which does "
                        "not exist"
                    )

    def _refuse(self, why: str) -> None:
        raise CrossrankError(f"{self._path}: {why}; link it again")


def _read_host_op(node: Node) -> HostOp:
    op = HostOp(
        id=node.id,
        name=node.name,
        caller=0 if node.ctrl_deps == node.id else node.ctrl_deps,
        rf_id=0,
        tid=0,
        inputs=node.inputs,
        outputs=node.outputs,
        attributes=node.attrs,
        is_work=is_work(node.name),
    )
    read_attributes(op)
    if node.ts is not UNSET:
        op.start_ns, op.duration_ns = _parse_ns(node.ts), _parse_ns(node.inclusive_dur)
        op.exclusive_ns, op.blocked_ns = _parse_ns(node.exclusive_dur), _parse_ns(node.blocked_dur)
    return op


def _read_activity(node: Node, category: str) -> Activity:
    return Activity(
        id=node.id,
        name=node.name,
        category=category,
        device=node.device,
        stream=node.stream,
        start_ns=_parse_ns(node.ts),
        duration_ns=_parse_ns(node.inclusive_dur),
        correlation=node.correlation,
        host=node.ctrl_deps if node.unlinked is None else None,
        unlinked=node.unlinked,
        args=node.args,
    )


def _parse_ns(us: msgspec.Raw | UnsetType) -> int:
    """Return a time in ns. Raise an error of `BROKEN` for text that is no number, or a number above 64 bits in ns."""
    if us is UNSET:
        return 0
    text = bytes(us).decode()
    try:
        time = Decimal(text)
        if -_MOST_US < time < _MOST_US:
            return int(time * 1000)
    except ArithmeticError:  # not a number
        pass
    raise ValueError(f"invalid time {text[:40]} us")
