"""Reads linked traces back, as `linked_file` writes them."""

from __future__ import annotations

from decimal import Decimal

import msgspec

from crossrank.comm import CommRecord, Count, Group, Int
from crossrank.errors import CrossrankError
from crossrank.tools.graph.linking.graph import Activity, Communication, Edge, HostOp, LinkedTrace
from crossrank.tools.graph.linking.linked_file import Dependency, Provenance
from crossrank.tools.graph.linking.nesting import is_work
from crossrank.tools.traces.execution_trace import HostNode, read_attributes
from crossrank.tools.traces.json_document import Shape, read_document
from crossrank.tools.traces.kernels import communication_kernel

_EMPTY = msgspec.Raw(b"[]")
_NO_ARGS = msgspec.Raw(b"{}")


_MOST_US = 1 << 52


class _Communication(msgspec.Struct, gc=False):
    record: CommRecord
    origin: str
    group: Group | None = None
    host: Int | None = None
    activities: list[Int] = []
    work: Int | None = None
    seq_counted: bool = False


class _Node(msgspec.Struct, gc=False):
    id: Int
    name: str
    ctrl_deps: Int
    inputs: msgspec.Raw = _EMPTY
    outputs: msgspec.Raw = _EMPTY
    attrs: msgspec.Raw = _EMPTY
    inclusive_dur: Decimal | None = None
    exclusive_dur: Decimal | None = None
    blocked_dur: Decimal | None = None
    ts: Decimal | None = None
    cat: str | None = None
    device: Int | str | None = None
    stream: Int | str | None = None
    correlation: Int | None = None
    unlinked: str | None = None
    args: msgspec.Raw = _NO_ARGS
    comm: _Communication | None = None
    deps: list[Dependency] = []


class _File(msgspec.Struct):
    nodes: list[_Node]
    schema: str = ""
    pid: Count | None = None
    time: str | None = None
    start_ts: Count | None = None
    finish_ts: Count | None = None
    crossrank: Provenance | None = None


_SHAPE = Shape(what="a linked trace of crossrank", content=_File, rows="nodes", row=_Node)


def read_linked(path: str) -> LinkedTrace:
    """The graph in a linked trace, plain, gzip or zstd.

    Raises `CrossrankError` where the file is damaged or is no linked trace: dependencies of a part would mislead.
    """
    document = read_document(path, _SHAPE)
    file = document.content
    head = file.crossrank
    if head is None:
        raise CrossrankError(f"{path}: is no linked trace of crossrank; make one with `crossrank link`")
    if document.damage:
        raise CrossrankError(f"{path}: {document.damage[0]}; link it anew")
    host, activities, communications, edges = [], [], [], []
    for node in file.nodes:
        try:
            edges += [Edge(d.id, node.id, d.kind, d.inferred, d.slack_ns) for d in node.deps]
            if node.comm is not None:
                communications.append(
                    Communication(**{name: getattr(node.comm, name) for name in _Communication.__struct_fields__})
                )
            if node.cat is not None:
                activities.append(_activity(node, node.cat))
                continue
            op = _host_op(node)
            host.append(op)
            if op.caller:
                edges.append(Edge(op.caller, op.id, "caller"))
        except ValueError as error:
            raise CrossrankError(f"{path}: node {node.id} ({node.name[:60]!r}): {error}; link it anew") from error
    _check_ids(path, file.nodes, communications, edges)
    communications.sort(key=lambda communication: communication.record.id)
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
        host=host,
        activities=activities,
        communications=communications,
        groups=head.groups,
        edges=edges,
        report=head.match,
    )


def _check_ids(path: str, nodes: list[_Node], communications: list[Communication], edges: list[Edge]) -> None:
    ids: set[int] = set()
    for node in nodes:
        if node.id in ids:
            raise CrossrankError(
                f"{path}: id {node.id} stands twice, the second time at {node.name[:60]!r}; link it anew"
            )
        ids.add(node.id)
    for edge in edges:
        if edge.source not in ids or edge.source == edge.target:
            raise CrossrankError(f"{path}: node {edge.target} depends on {edge.source}, which cannot be; link it anew")
    for communication in communications:
        for named in (*communication.activities, communication.work, communication.host):
            if named is not None and named not in ids:
                raise CrossrankError(
                    f"{path}: the {communication.record.op} of node {communication.host} names node {named}, "
                    "which is not there; link it anew"
                )


def _host_op(node: _Node) -> HostOp:
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
    timed = node.ts is not None
    return HostOp(
        given,
        caller,
        _ns(node.ts) if timed else None,
        _ns(node.inclusive_dur) if timed else None,
        _ns(node.exclusive_dur) if timed else None,
        _ns(node.blocked_dur),
        is_work(node.name),
    )


def _activity(node: _Node, category: str) -> Activity:
    known = communication_kernel(node.name) if category == "kernel" else None
    return Activity(
        id=node.id,
        name=node.name,
        category=category,
        device=node.device,
        stream=node.stream,
        start_ns=_ns(node.ts),
        duration_ns=_ns(node.inclusive_dur),
        correlation=node.correlation,
        host=None if node.unlinked is not None else node.ctrl_deps,
        unlinked=node.unlinked,
        args=node.args,
        library=known[0] if known else None,
    )


def _ns(us: Decimal | None) -> int:
    """Raises `ValueError` for what is no number, or none that 64 bits hold in ns."""
    if us is None:
        return 0
    if not us.is_finite() or abs(us) >= _MOST_US:
        raise ValueError(f"a time of {us:.3e} us cannot be")
    return int(us * 1000)
