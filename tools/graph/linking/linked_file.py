"""Linked traces as files: an execution trace with times, GPU activities, communications and dependencies added.

The layout is the one that Chakra's converter reads, so its fields keep their names and units (`ts`,
`inclusive_dur`, `exclusive_dur` in microseconds, here with all three decimals); ids of host nodes are those of the
execution trace and GPU activities continue them. Beside those fields a node has

- `deps`: list of `{"id", "kind"}`, with `"inferred": true` and `slack_ns` where that holds (the caller is
  `ctrl_deps`); the kinds are those of `graph.EDGE_KINDS`;
- `comm`, on the host node of a communication: its record, group, origin and the ids of its kernels, or of its Work.
  `record.t` is in nanoseconds: of the rank's monotonic clock where `origin` is "comms file", else of the trace;
- `comm_host`, on a communication kernel: the id of that host node;
- `blocked_dur`, on a host node: the part of `exclusive_dur` that it waited for the GPU, as far as `deps` say for what;
- `device`, `correlation`, `args` of an activity as in the Kineto trace, `unlinked`: why it has no host node.

The object `crossrank` says which version linked which inputs, and what matched.
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
"""Nodes of a line."""
_MOST_US = Decimal(1 << 52)
_NO_HOST = HostOp(id=0, name="", caller=0, rf_id=0, tid=0)
_EMPTY = msgspec.Raw(b"[]")
_NO_ARGS = msgspec.Raw(b"{}")


class IncomingEdge(msgspec.Struct, gc=False, omit_defaults=True):
    """One entry of `deps`: an edge, without the node it belongs to."""

    id: Number
    kind: EdgeKind
    inferred: bool = False
    slack_ns: Number | None = None


class Node(msgspec.Struct, gc=False, kw_only=True, omit_defaults=True):
    """A host operation, or a GPU activity, which has `cat`. Times are microseconds."""

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
    """The whole file."""

    schema: Annotated[str, Privacy.VERSION] = ""
    pid: Annotated[Count, Privacy.NUMBER] | None = None
    time: Annotated[str, Privacy.DAY] | None = None
    start_ts: Annotated[Count, Privacy.NUMBER] | None = None
    finish_ts: Annotated[Count, Privacy.NUMBER] | None = None
    crossrank: Provenance | None = None
    nodes: list[Node] = []


_SHAPE = Shape(what="a linked trace of crossrank", content=LinkedFile, rows="nodes", row=Node, hashed=False)


def write_linked(trace: LinkedTrace, path: str | Path) -> None:
    """Write `trace` to `path`, compressed as its name says: whole or not at all. The same trace gives the same
    bytes."""
    encode = msgspec.json.Encoder().encode
    nodes = map(encode, _nodes(trace))
    with whole_file(path) as temporary, temporary.open("wb") as file, compressed(file, path) as stream:
        stream.write(encode(_head(trace)).removesuffix(b"]}"))
        separator = b""
        while line := b",".join(islice(nodes, _BATCH)):
            stream.write(separator + line)
            separator = b",\n"
        stream.write(b"]}\n")


def _head(trace: LinkedTrace) -> LinkedFile:
    return LinkedFile(
        # Flat nodes were lifted into the next layout, so that is what the file now has.
        schema=FIRST_NESTED_SCHEMA if trace.schema.startswith(FLAT_SCHEMA) else trace.schema,
        pid=trace.pid,
        time=trace.time,
        start_ts=trace.start_ts,
        finish_ts=trace.finish_ts,
        crossrank=Provenance(**{name: getattr(trace, name) for name in Provenance.__struct_fields__}),
    )


def _nodes(trace: LinkedTrace) -> Iterator[Node]:
    deps: dict[int, list[IncomingEdge]] = defaultdict(list)
    for edge in trace.edges:
        if edge.kind != "caller":
            deps[edge.target].append(IncomingEdge(edge.source, edge.kind, edge.inferred, edge.slack_ns))
    by_host = {c.host: c for c in trace.communications}
    by_activity = {activity: c for c in trace.communications for activity in c.activities}
    for op in trace.host:
        yield _host_node(op, deps.pop(op.id, []), by_host.get(op.id))
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


def _host_node(op: HostOp, deps: list[IncomingEdge], communication: Communication | None) -> Node:
    out = Node(
        id=op.id,
        name=op.name,
        ctrl_deps=op.caller or op.id,  # torch's own root is its own parent
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
    """Nanoseconds as JSON text in microseconds, with no digit lost, which a double would from 2^53 ns on.

    >>> bytes(microseconds(1694128201435418123)), bytes(microseconds(4000))
    (b'1694128201435418.123', b'4')
    """
    sign = b"-" if ns < 0 else b""
    whole, rest = divmod(abs(ns), 1000)
    return msgspec.Raw(b"%b%d.%03d" % (sign, whole, rest) if rest else b"%b%d" % (sign, whole))


@paused_gc()
def read_linked(path: str) -> LinkedTrace:
    """The graph in a linked trace, plain, gzip or zstd.

    Raises `CrossrankError` where the file is damaged or is no linked trace: dependencies of a part would mislead.
    """
    graph = _Graph(path)
    document = Document(path, _SHAPE, graph.take)
    file, head = document.content, document.content.crossrank
    if head is None:
        raise CrossrankError(f"{path}: is no linked trace of crossrank; make one with `crossrank link`")
    if document.damage:
        raise CrossrankError(f"{path}: {document.damage[0]}; link it anew")
    graph.check()
    return LinkedTrace(
        **msgspec.structs.asdict(head),
        pid=file.pid,
        time=file.time,
        start_ts=file.start_ts,
        finish_ts=file.finish_ts,
        host=graph.host,
        activities=graph.activities,
        communications=_in_order(graph),
        edges=graph.edges,
    )


def _in_order(graph: _Graph) -> list[Communication]:
    """The communications as they were linked: calls by their numbers, and a kernel without a call by its own time."""
    starts: dict[int | None, int | None] = {op.id: op.start_ns for op in graph.host}
    starts |= {activity.id: activity.start_ns for activity in graph.activities}
    calls = sorted(graph.communications, key=lambda one: (one.host is None, one.record.id))
    return by_begin((starts.get(one.activities[0] if one.host is None else one.host), one) for one in calls)


class _Graph:
    """What the nodes of a file make up, as they come."""

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
        """Whether all that is named is there."""
        for edge in self.edges:
            if edge.source not in self._ids or edge.source == edge.target:
                self._refuse(f"node {edge.target} depends on {edge.source}, which is no other node of the file")
        for communication in self.communications:
            for named in (*communication.activities, communication.work, communication.host):
                if named is not None and named not in self._ids:
                    self._refuse(
                        f"the {communication.record.op} of node {communication.host} names node {named}, which is not "
                        "there"
                    )

    def _refuse(self, why: str) -> None:
        raise CrossrankError(f"{self._path}: {why}; link it anew")


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
        op.start_ns, op.duration_ns = _ns(node.ts), _ns(node.inclusive_dur)
        op.exclusive_ns, op.blocked_ns = _ns(node.exclusive_dur), _ns(node.blocked_dur)
    return op


def _read_activity(node: Node, category: str) -> Activity:
    return Activity(
        id=node.id,
        name=node.name,
        category=category,
        device=node.device,
        stream=node.stream,
        start_ns=_ns(node.ts),
        duration_ns=_ns(node.inclusive_dur),
        correlation=node.correlation,
        host=node.ctrl_deps if node.unlinked is None else None,
        unlinked=node.unlinked,
        args=node.args,
    )


def _ns(us: msgspec.Raw | UnsetType) -> int:
    """Raises an error of `BROKEN` for what is no number, or none that 64 bits hold in ns."""
    if us is UNSET:
        return 0
    text = bytes(us).decode()
    try:
        time = Decimal(text)
        if -_MOST_US < time < _MOST_US:
            return int(time * 1000)
    except ArithmeticError:  # no number
        pass
    raise ValueError(f"invalid time {text[:40]} us")
