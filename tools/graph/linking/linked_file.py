"""Writes a linked trace: an execution trace with times, GPU activities, communications and dependencies added.

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

import io
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal, cast

import msgspec
import zstandard
from msgspec import UNSET, UnsetType

import crossrank
from crossrank.atomic_file import gzip_writer, whole_file
from crossrank.comm import Count, Group, Int
from crossrank.tools.graph.linking.graph import Activity, Communication, EdgeKind, HostOp, LinkedTrace, MatchReport
from crossrank.tools.traces.execution_trace import (
    FIRST_NESTED_SCHEMA,
    FLAT_SCHEMA,
    HostNode,
    attribute_text,
    is_thread_root,
)

Compression = Literal["zst", "gz", "none"]

_LEVEL = 3
_BATCH = 2048
_NO_HOST = HostNode(id=0, name="", parent=0, rf_id=0, tid=0)
_EMPTY = msgspec.Raw(b"[]")


class Dependency(msgspec.Struct, gc=False, omit_defaults=True):
    """One entry of `deps`: an edge, without the node it belongs to."""

    id: Int
    kind: EdgeKind
    inferred: bool = False
    slack_ns: Int | None = None


class Node(msgspec.Struct, gc=False, kw_only=True):
    """A host operation, or a GPU activity, which has `cat`. Times are microseconds."""

    id: Int
    name: str
    ctrl_deps: Int
    inputs: msgspec.Raw = _EMPTY
    outputs: msgspec.Raw = _EMPTY
    attrs: msgspec.Raw = _EMPTY
    inclusive_dur: msgspec.Raw | UnsetType = UNSET
    exclusive_dur: msgspec.Raw | UnsetType = UNSET
    blocked_dur: msgspec.Raw | UnsetType = UNSET
    ts: msgspec.Raw | UnsetType = UNSET
    inter_thread_dep: Int | UnsetType | None = UNSET
    sync_dep: list[Int] | UnsetType = UNSET
    cat: str | UnsetType = UNSET
    ph: str | UnsetType = UNSET
    device: Int | str | UnsetType | None = UNSET
    stream: Int | str | UnsetType | None = UNSET
    correlation: Int | UnsetType = UNSET
    pg_name: str | UnsetType = UNSET
    unlinked: str | UnsetType = UNSET
    args: msgspec.Raw | UnsetType = UNSET
    comm: Communication | UnsetType = UNSET
    comm_host: Int | UnsetType = UNSET
    deps: list[Dependency] | UnsetType = UNSET


class Provenance(msgspec.Struct, kw_only=True):
    """Where a linked trace comes from."""

    version: str
    rank: Int | None
    world_size: Int | None
    et_schema: str
    base_time_ns: Int
    inputs: dict[str, str]
    """File name -> SHA-256 of its uncompressed content."""
    groups: list[Group]
    match: MatchReport


class LinkedFile(msgspec.Struct, kw_only=True):
    """The whole file."""

    schema: str = ""
    pid: Count | None = None
    time: str | None = None
    start_ts: Count | None = None
    finish_ts: Count | None = None
    crossrank: Provenance | None = None
    nodes: list[Node] = []


def write_linked(trace: LinkedTrace, path: str | Path, compression: Compression = "zst") -> None:
    """Write `trace` to `path`, whole or not at all. The same trace gives the same bytes."""
    with whole_file(path) as temporary, temporary.open("wb") as file, _compressor(file, compression) as stream:
        for piece in _pieces(trace):
            stream.write(piece)


def _compressor(file: BinaryIO, compression: Compression) -> BinaryIO:
    if compression == "zst":
        return cast(BinaryIO, zstandard.ZstdCompressor(level=_LEVEL).stream_writer(file, closefd=False))
    if compression == "gz":
        return gzip_writer(file)
    return cast(BinaryIO, io.BufferedWriter(io.FileIO(file.fileno(), "wb", closefd=False)))


def _pieces(trace: LinkedTrace) -> Iterator[bytes | bytearray]:
    encoder = msgspec.json.Encoder()
    yield encoder.encode(_head(trace)).removesuffix(b"]}")
    buffer = bytearray()
    end = 0
    for count, node in enumerate(_nodes(trace), start=1):
        encoder.encode_into(node, buffer, end)
        buffer += b","
        end = len(buffer)
        if count % _BATCH == 0:
            yield buffer
            buffer, end = bytearray(), 0
            yield b"\n"
    # The last comma closes the list.
    yield (buffer[:-1] if buffer else b"") + b"]}\n"


def _head(trace: LinkedTrace) -> LinkedFile:
    return LinkedFile(
        # Flat nodes were lifted into the next layout, so that is what the file now has.
        schema=FIRST_NESTED_SCHEMA if trace.schema.startswith(FLAT_SCHEMA) else trace.schema,
        pid=trace.pid,
        time=trace.time,
        start_ts=trace.start_ts,
        finish_ts=trace.finish_ts,
        crossrank=Provenance(
            version=crossrank.__version__,
            rank=trace.rank,
            world_size=trace.world_size,
            et_schema=trace.schema,
            base_time_ns=trace.base_ns,
            inputs={PurePosixPath(path).name: digest for path, digest in trace.inputs.items()},
            groups=trace.groups,
            match=trace.report,
        ),
    )


def _nodes(trace: LinkedTrace) -> Iterator[Node]:
    deps: dict[int, list[Dependency]] = defaultdict(list)
    for edge in trace.edges:
        if edge.kind != "caller":
            deps[edge.target].append(Dependency(edge.source, edge.kind, edge.inferred, edge.slack_ns))
    by_host = {c.host: c for c in trace.communications}
    by_activity = {activity: c for c in trace.communications for activity in c.activities}
    for op in trace.host:
        yield _host_node(op, deps.get(op.id, []), by_host.get(op.id))
    hosts = {op.id: op.node for op in trace.host}
    root = next((op.id for op in trace.host if is_thread_root(op.node)), trace.host[0].id if trace.host else 0)
    for activity in trace.activities:
        host = _NO_HOST if activity.host is None else hosts[activity.host]
        yield _activity_node(activity, host, root, deps.get(activity.id), by_activity.get(activity.id))


def _host_node(op: HostOp, deps: list[Dependency], communication: Communication | None) -> Node:
    out = Node(
        id=op.id,
        name=op.node.name,
        ctrl_deps=op.caller or op.id,  # torch's own root is its own parent
        inputs=op.node.inputs,
        outputs=op.node.outputs,
        attrs=attribute_text(op.node),
        sync_dep=[one.id for one in deps if one.kind == "sync"] or UNSET,
        comm=communication or UNSET,
        pg_name=communication.record.pg if communication else UNSET,
        deps=deps or UNSET,
    )
    if op.start_ns is not None and op.duration_ns is not None and op.exclusive_ns is not None:
        out.inclusive_dur = microseconds(op.duration_ns)
        out.exclusive_dur = microseconds(op.exclusive_ns)
        out.blocked_dur = microseconds(op.blocked_ns) if op.blocked_ns else UNSET
        out.ts = microseconds(op.start_ns)
        out.inter_thread_dep = next((one.id for one in reversed(deps) if one.kind == "inter_thread"), None)
    return out


def _activity_node(
    activity: Activity,
    host: HostNode,
    root: int,
    deps: list[Dependency] | None,
    communication: Communication | None,
) -> Node:
    duration = microseconds(activity.duration_ns)
    return Node(
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
        correlation=UNSET if activity.correlation is None else activity.correlation,
        pg_name=communication.record.pg if communication else UNSET,
        unlinked=UNSET if activity.unlinked is None else activity.unlinked,
        args=activity.args,
        comm=communication if communication and communication.host is None else UNSET,
        comm_host=communication.host if communication and communication.host is not None else UNSET,
        deps=deps or UNSET,
    )


def microseconds(ns: int) -> msgspec.Raw:
    """Nanoseconds as JSON text in microseconds, with no digit lost, which a double would from 2^53 ns on.

    >>> bytes(microseconds(1694128201435418123)), bytes(microseconds(4000))
    (b'1694128201435418.123', b'4')
    """
    sign = b"-" if ns < 0 else b""
    whole, rest = divmod(abs(ns), 1000)
    return msgspec.Raw(b"%b%d.%03d" % (sign, whole, rest) if rest else b"%b%d" % (sign, whole))
