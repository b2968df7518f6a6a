"""Writes the nodes of one rank as a Chakra file that both generations of ASTRA-sim's feeder accept.

`comm_size` is the bytes that one rank contributes, as in ASTRA-sim's collective algorithms (Ring.cc): the shard of an
all_gather, the whole of a reduce_scatter.

ASTRA-sim starts all ranks at 0. So the first node of a file with host nodes represents the time until its rank started.
Each node without dependencies waits for it. This time is only known once all ranks are converted; `delay_start` then
writes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import fsspec
import msgspec

import crossrank
from crossrank.atomic_file import join, whole_file
from crossrank.comm import OPERATIONS, CommRecord, is_p2p
from crossrank.errors import CrossrankError, one_line
from crossrank.tools.graph.chakra import et_def_pb2 as pb
from crossrank.tools.graph.chakra.chakra_graph import LATE, ChakraNode, Comm, NumberedGroup, Options, RunsOn
from crossrank.tools.graph.chakra.framing import KINDS, read_trace, write_message
from crossrank.tools.graph.chakra.grow import CopiesOf
from crossrank.tools.graph.linking import LinkedTrace
from crossrank.tools.traces.execution_trace import io_texts
from crossrank.tools.varint import varint

SCHEMA_VERSION = "0.0.4"
"""Version of the Chakra schema, as torch names it in an execution trace's own version."""

P2P_TYPES = {"send": pb.COMM_SEND_NODE, "recv": pb.COMM_RECV_NODE}
COLLECTIVE_TYPES = {op: pb.CollectiveCommType.Value(op.upper()) for op in OPERATIONS if op not in P2P_TYPES}
# Operations whose S in nccl-tests counts the part of every member. A simulator needs that of one rank.
_PER_MEMBER_OPERATIONS = frozenset(("all_gather", "gather", "scatter"))
_NODES_PER_TEMPLATE = 4096
"""Nodes for which a template is used: a message keeps every text that was ever set in it."""
_KIND_OF_TYPE = {bool: "bool_val", int: "int64_val", str: "string_val", list: "int64_list"}
_CTRL_DEP_KINDS = {"all": ("caller",), "data": ("caller", "program_order")}
"""Mode -> kinds of dependencies that are in `ctrl_deps`."""


def chakra_name(rank: int, window: int) -> str:
    """Return the name of a rank's file. ASTRA-sim appends `.RANK.et` to a prefix from the user.

    >>> chakra_name(3, 1), chakra_name(3, 2)
    ('chakra.3.et', 'chakra-w2.3.et')
    """
    return f"chakra.{rank}.et" if window == 1 else f"chakra-w{window}.{rank}.et"


def comm_size(record: CommRecord, group_size: int) -> int:
    """Return the bytes that one rank contributes to the operation.

    >>> record = CommRecord(id=0, op="all_gather", c10d="", pg="0", bytes=800, t=0)
    >>> comm_size(record, 8)
    100
    """
    return record.bytes // group_size if record.op in _PER_MEMBER_OPERATIONS else record.bytes


def write_chakra(
    trace: LinkedTrace,
    nodes: Sequence[ChakraNode],
    groups: Sequence[NumberedGroup],
    path: str | Path,
    options: Options,
) -> int:
    """Write the metadata and `nodes`, which are in order, to `path`. The file is complete or does not exist.

    Return the number of bytes."""
    with whole_file(path) as temporary, temporary.open("wb") as file:
        write_message(file, _metadata(trace, groups, trace.rank, trace.world_size))
        for message in _encode_first_nodes(nodes, groups, options, 0):
            write_message(file, message)
        for head, node, tail in _encode_nodes(trace, nodes, options):
            write_message(file, head + _encode_comm(node.comm, trace.rank) + tail)
        return file.tell()


def write_copies(
    trace: LinkedTrace,
    nodes: Sequence[ChakraNode],
    comms: Sequence[tuple[Comm, Comm]],
    groups: Sequence[NumberedGroup],
    copies: CopiesOf,
    folder: str,
    options: Options,
) -> tuple[list[NumberedGroup], int]:
    """Write `nodes` into `folder` once for each rank that does what the rank of `trace` does. Return the groups of all
    these ranks, and the number of written bytes.

    `comms` has each communication as recorded, and as it is on the first of these ranks. With `dedupe`, equal files are
    one file with several names (hard links), and none of them contains its rank.
    """
    parts: list[bytes] = []
    between = bytearray()
    for head, node, tail in _encode_nodes(trace, nodes, options):
        if node.comm is None:
            between += varint(len(head) + len(tail)) + head + tail
        else:
            parts += [bytes(between), head, tail]
            between.clear()
    parts.append(bytes(between))
    growth, dedupe = copies.growth, copies.dedupe
    all_groups: dict[str, NumberedGroup] = {}
    written: dict[bytes, str] = {}
    size = 0
    for rank in growth.copies[trace.rank or 0]:
        path = join(folder, chakra_name(rank, copies.window))
        own = {group.number: group for group in (growth.group(group, rank) for group in groups)}
        all_groups |= own
        calls = [msgspec.structs.replace(growth.comm(call, rank), runs_as=first.runs_as) for call, first in comms]
        messages = [_encode_comm(call, None if dedupe and not is_p2p(call.record) else rank) for call in calls]
        content = hashlib.sha256(b"\0".join((",".join(own).encode(), *messages))).digest() if dedupe else b""
        if content in written:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            os.link(written[content], path)
            continue
        with whole_file(path) as temporary, temporary.open("wb") as file:
            write_message(file, _metadata(trace, list(own.values()), None if dedupe else rank, growth.written.size))
            for message in _encode_first_nodes(nodes, list(own.values()), options, copies.late_ns):
                write_message(file, message)
            for place, message in enumerate(messages):
                before, head, tail = parts[3 * place : 3 * place + 3]
                file.write(before)
                write_message(file, head + message + tail)
            file.write(parts[-1])
            size += file.tell()
        if dedupe:
            written[content] = path
    return list(all_groups.values()), size


def _encode_first_nodes(
    nodes: Sequence[ChakraNode], groups: Sequence[NumberedGroup], options: Options, late_ns: int
) -> Iterator[bytes]:
    """Yield the nodes before those of the trace: the time until the rank started, and the groups."""
    fresh = 1 + max((node.id for node in nodes), default=0)
    if _has_start(nodes):
        late = (late_ns + 500) // 1000
        yield _encode_attributes(pb.Node(id=fresh, name=LATE, type=pb.COMP_NODE, duration_micros=late), _ON_HOST)
    if options.group_node:
        yield _encode_group_node(fresh + 1, groups)


def _has_start(nodes: Sequence[ChakraNode]) -> bool:
    return any(node.is_cpu for node in nodes)


def _encode_nodes(
    trace: LinkedTrace, nodes: Sequence[ChakraNode], options: Options
) -> Iterator[tuple[bytes, ChakraNode, bytes]]:
    """Yield each node with the part of its message before its communication, and the part after it.

    Concatenated messages are one message, with the attributes of both."""
    start = [1 + max((node.id for node in nodes), default=0)] if _has_start(nodes) else []
    for number, node in enumerate(nodes):
        if number % _NODES_PER_TEMPLATE == 0:
            templates = {key: _Template(*key) for key in product((False, True), repeat=2)}
        try:
            head = _encode_node(node, templates[node.rf_id != 0, node.op is not None], trace, options.deps, start)
        except (ValueError, TypeError, OverflowError) as error:
            raise CrossrankError(
                f"node {node.id} ({node.name[:60]}) does not fit into a Chakra node ({one_line(error)})"
            ) from error
        tail = _encode_common(node.runs_on, node.is_cpu, node.tensor_bytes, node.flop, node.comm is not None)
        yield head, node, tail


def _encode_comm(comm: Comm | None, rank: int | None) -> bytes:
    try:
        return b"" if comm is None else _encode_attributes(pb.Node(), _comm_attributes(comm, rank))
    except (ValueError, TypeError, OverflowError) as error:
        raise CrossrankError(
            f"a call of {comm and comm.record.op} does not fit into a Chakra node ({one_line(error)})"
        ) from error


def _encode_attributes(message: pb.Node | pb.GlobalMetadata, values: Mapping[str, object]) -> bytes:
    """Return `message` as bytes, with those of `values` that are not None."""
    for name, value in values.items():
        kind = KINDS.get(name) or _KIND_OF_TYPE.get(type(value))
        if kind is not None and value is not None:
            given: Any = {"values": value} if isinstance(value, list) else value
            message.attr.add(name=name, **{kind: given})
    return message.SerializeToString()


def _metadata(trace: LinkedTrace, groups: Sequence[NumberedGroup], rank: int | None, world_size: int | None) -> bytes:
    inputs = {os.path.basename(path): digest for path, digest in trace.inputs.items()}
    values = {
        "schema": trace.schema,
        "pid": trace.pid or 0,
        "time": trace.time or "",
        "start_ts": trace.start_ts or 0,
        "finish_ts": trace.finish_ts or 0,
        "converter": f"crossrank {crossrank.__version__}",
        "rank": rank,
        "world_size": world_size,
        "base_time_ns": trace.base_ns,
        "process_groups": msgspec.json.encode(list(groups)).decode(),
        "inputs": msgspec.json.encode(inputs).decode(),
        "match": msgspec.json.encode(trace.report).decode(),
    }
    return _encode_attributes(pb.GlobalMetadata(version=SCHEMA_VERSION), values)


def delay_start(path: str | Path, late_ns: int) -> None:
    """Let the rank of a written file start `late_ns` after the first rank. A file without host nodes does not change,
    nor does a difference below 1 µs."""
    late = (late_ns + 500) // 1000
    _, nodes = read_trace(str(path))
    at, node = next(nodes, (0, pb.Node()))
    if node.name != LATE or node.duration_micros == late:
        return
    behind, _ = next(nodes)
    node.duration_micros = late
    with whole_file(path) as temporary, temporary.open("wb") as file, fsspec.open(str(path), "rb") as written:
        file.write(written.read(at))
        write_message(file, node.SerializeToString())
        written.seek(behind)
        shutil.copyfileobj(written, file)


def _encode_group_node(node_id: int, groups: Sequence[NumberedGroup]) -> bytes:
    """Return the groups as the feeder parses them: a JSON list between `['` and `']`."""
    listed = [{"pg_name": group.number, "pg_desc": group.desc, "ranks": group.ranks} for group in groups]
    node = pb.Node(id=node_id, name="## process_group:init ##", type=pb.METADATA_NODE)
    node.inputs.values = f"['{msgspec.json.encode(listed).decode()}']"
    return _encode_attributes(node, _ON_HOST)


_ON_HOST = {"is_cpu_op": True}


class _Template:
    """A reusable message, which is several times as fast as a new one for each node."""

    def __init__(self, has_rf_id: bool, has_io: bool) -> None:
        self.message = pb.Node()
        names = ("start_ns", "duration_ns", "rf_id") if has_rf_id else ("start_ns", "duration_ns")
        self.numbers = [self.message.attr.add(name=name) for name in names]
        self.inputs, self.outputs = self.message.inputs, self.message.outputs
        self.ctrl_deps, self.data_deps = self.message.ctrl_deps, self.message.data_deps


def _encode_node(node: ChakraNode, template: _Template, trace: LinkedTrace, mode: str, start: list[int]) -> bytes:
    """Return one node as a message, without its communication. A node without dependencies waits for `start`."""
    ctrl_deps: list[int] = []
    data_deps = [] if node.dependencies else start
    in_ctrl_deps = _CTRL_DEP_KINDS[mode]
    for dependency in node.dependencies:
        deps = ctrl_deps if dependency.kind in in_ctrl_deps else data_deps
        if dependency.source not in deps:
            deps.append(dependency.source)
    message, comm, op = template.message, node.comm, node.op
    message.id = node.id
    message.name = node.name
    message.type = pb.COMP_NODE if comm is None else P2P_TYPES.get(comm.record.op, pb.COMM_COLL_NODE)
    template.ctrl_deps[:] = ctrl_deps
    template.data_deps[:] = data_deps
    message.start_time_micros = max(0, trace.base_ns + node.start_ns) // 1000
    message.duration_micros = (node.duration_ns + 500) // 1000
    if op is not None:
        given, made = template.inputs, template.outputs
        given.values, given.shapes, given.types = io_texts(op.inputs)
        made.values, made.shapes, made.types = io_texts(op.outputs)
    for attribute, value in zip(template.numbers, (node.start_ns, node.duration_ns, node.rf_id), strict=False):
        attribute.int64_val = value
    return message.SerializeToString()


@lru_cache(maxsize=1 << 14)
def _encode_common(runs_on: RunsOn, is_cpu: bool, tensor_bytes: int, flop: int | None, communicates: bool) -> bytes:
    """Return the attributes that are equal for many nodes."""
    values: dict[str, object] = {"is_cpu_op": is_cpu}
    kind, place = runs_on
    if kind == "thread":
        values["tid"] = _as_int(place)
    elif isinstance(place, tuple):
        values |= {"device": _as_int(place[0]), "stream": _as_int(place[1])}
    if not is_cpu and not communicates:
        # A roofline needs these. Unknown values are absent.
        values |= {"num_ops": flop, "tensor_size": tensor_bytes or None}
    return _encode_attributes(pb.Node(), values)


def _comm_attributes(comm: Comm, rank: int | None) -> dict[str, object]:
    record, run = comm.record, comm.runs_as or comm.record
    values: dict[str, object] = {
        "comm_size": comm_size(run, len(comm.group.ranks)),
        "pg_name": comm.group.number,
        "comm_op": record.op,
        "dtype": record.dtype or None,
        "in_split": record.in_split or None,
        "out_split": record.out_split or None,
    }
    if record.op in P2P_TYPES:
        source, target = message_ends(record, -1 if rank is None else rank)
        return values | {"comm_src": source, "comm_dst": target, "comm_tag": _make_tag(record, comm.group)}
    return values | {"comm_type": COLLECTIVE_TYPES[run.op], "root": record.root, "seq": record.seq}


def message_ends(record: CommRecord, rank: int) -> tuple[int, int]:
    """Return source and destination of a send or receive of `rank`; -1 for an unknown peer."""
    peer = -1 if record.peer is None else record.peer
    return (rank, peer) if record.op == "send" else (peer, rank)


def _make_tag(record: CommRecord, group: NumberedGroup) -> int:
    """Return a tag that both sides compute: from the group and the count of the pair's messages in this direction."""
    return (int(group.number) % 1024) << 20 | (record.p2p_seq or 0) % (1 << 20)


def _as_int(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return -1
