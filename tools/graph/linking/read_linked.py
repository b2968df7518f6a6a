"""Reads linked traces back, as `linked_file` writes them."""

from __future__ import annotations

from decimal import Decimal

import msgspec
from msgspec import UNSET, UnsetType

from crossrank.errors import BROKEN, CrossrankError, one_line
from crossrank.tools.graph.linking.graph import Activity, Communication, Edge, HostOp, LinkedTrace
from crossrank.tools.graph.linking.linked_file import LinkedFile, Node
from crossrank.tools.graph.linking.nesting import is_work
from crossrank.tools.traces.execution_trace import HostNode, read_attributes
from crossrank.tools.traces.json_document import Shape, read_document
from crossrank.tools.traces.kernels import communication_kernel

_NO_ARGS = msgspec.Raw(b"{}")
_MOST_US = 1 << 52
_SHAPE = Shape(what="a linked trace of crossrank", content=LinkedFile, rows="nodes", row=Node)


def read_linked(path: str) -> LinkedTrace:
    """The graph in a linked trace, plain, gzip or zstd.

    Raises `CrossrankError` where the file is damaged or is no linked trace: dependencies of a part would mislead.
    """
    graph = _Graph(path)
    document = read_document(path, _SHAPE, graph.take)
    file, head = document.content, document.content.crossrank
    if head is None:
        raise CrossrankError(f"{path}: is no linked trace of crossrank; make one with `crossrank link`")
    if document.damage:
        raise CrossrankError(f"{path}: {document.damage[0]}; link it anew")
    graph.check()
    return LinkedTrace(
        rank=head.rank,
        kineto_rank=None,
        world_size=head.world_size,
        schema=head.et_schema,
        pid=file.pid,
        time=file.time,
        start_ts=file.start_ts,
        finish_ts=file.finish_ts,
        base_ns=head.base_time_ns,
        inputs=head.inputs,
        host=graph.host,
        activities=graph.activities,
        communications=sorted(graph.communications, key=lambda communication: communication.record.id),
        groups=head.groups,
        edges=graph.edges,
        report=head.match,
    )


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
            try:
                self._add(node)
            except BROKEN as error:
                self._refuse(f"node {node.id} ({node.name[:60]!r}): {one_line(error)}")

    def _add(self, node: Node) -> None:
        if node.deps is not UNSET:
            self.edges += [Edge(d.id, node.id, d.kind, d.inferred, d.slack_ns) for d in node.deps]
        if node.comm is not UNSET:
            self.communications.append(node.comm)
        if node.cat is not UNSET:
            self.activities.append(_activity(node, node.cat))
            return
        op = _host_op(node)
        self.host.append(op)
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


def _host_op(node: Node) -> HostOp:
    caller = 0 if node.ctrl_deps == node.id else node.ctrl_deps
    given = HostNode(
        id=node.id,
        name=node.name,
        parent=caller,
        rf_id=0,
        tid=0,
        inputs=node.inputs,
        outputs=node.outputs,
        attributes=node.attrs,
    )
    read_attributes(given)
    if node.ts is UNSET:
        return HostOp(given, caller, is_work=is_work(node.name))
    times = _ns(node.ts), _ns(node.inclusive_dur), _ns(node.exclusive_dur), _ns(node.blocked_dur)
    return HostOp(given, caller, *times, is_work(node.name))


def _activity(node: Node, category: str) -> Activity:
    known = communication_kernel(node.name) if category == "kernel" else None
    is_linked = node.unlinked is UNSET
    return Activity(
        id=node.id,
        name=node.name,
        category=category,
        device=None if node.device is UNSET else node.device,
        stream=None if node.stream is UNSET else node.stream,
        start_ns=_ns(node.ts),
        duration_ns=_ns(node.inclusive_dur),
        correlation=None if node.correlation is UNSET else node.correlation,
        host=node.ctrl_deps if is_linked else None,
        unlinked=None if node.unlinked is UNSET else node.unlinked,
        args=_NO_ARGS if node.args is UNSET else node.args,
        library=known[0] if known else None,
    )


def _ns(us: msgspec.Raw | UnsetType) -> int:
    """Raises an error of `BROKEN` for what is no number, or none that 64 bits hold in ns."""
    if us is UNSET:
        return 0
    text = bytes(us).decode()
    try:
        time = Decimal(text)
    except ArithmeticError:
        time = Decimal("NaN")
    if not time.is_finite() or abs(time) >= _MOST_US:
        raise ValueError(f"invalid time {text[:40]} us")
    return int(time * 1000)
