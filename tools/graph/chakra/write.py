"""Writes the nodes of one rank as a Chakra file that both generations of ASTRA-sim's feeder accept.

The attributes have the kinds that the older feeder reads without looking (`comm_type`, `comm_size` and `num_ops` as
int64, `tensor_size` as uint64, `comm_src`, `comm_dst` and `comm_tag` as int32, `is_cpu_op` as bool, `pg_name` as a
string of an integer); the newer one converts. `comm_size` is what ASTRA-sim's collective algorithms take (Ring.cc):
the bytes that one rank puts in, so all_gather has its shard and reduce_scatter the whole.

ASTRA-sim begins all ranks at 0. So the first node of a file that has host nodes is one for the time until its rank
began, and every node that waits for nothing else waits for it. How long that is shows when all ranks are converted,
and `delay_start` writes it then.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import fsspec
import msgspec

import crossrank
from crossrank.atomic_file import whole_file
from crossrank.comm import OPERATIONS, CommRecord
from crossrank.errors import CrossrankError, one_line
from crossrank.tools.graph.chakra import et_def_pb2 as pb
from crossrank.tools.graph.chakra.chakra_graph import LATE, ChakraNode, Comm, Lane, Options
from crossrank.tools.graph.chakra.framing import read_trace, write_message
from crossrank.tools.graph.chakra.group_numbers import NumberedGroup
from crossrank.tools.graph.linking import LinkedTrace
from crossrank.tools.traces.execution_trace import io_texts

SCHEMA_VERSION = "0.0.4"
"""Of the Chakra schema, as torch names it in an execution trace's own version."""

COLLECTIVE_TYPES = {
    "all_reduce": pb.ALL_REDUCE,
    "reduce": pb.REDUCE,
    "all_gather": pb.ALL_GATHER,
    "gather": pb.GATHER,
    "scatter": pb.SCATTER,
    "broadcast": pb.BROADCAST,
    "all_to_all": pb.ALL_TO_ALL,
    "reduce_scatter": pb.REDUCE_SCATTER,
    "barrier": pb.BARRIER,
}
P2P_TYPES = {"send": pb.COMM_SEND_NODE, "recv": pb.COMM_RECV_NODE}
# Operations whose S of nccl-tests counts every member's part, while a simulator wants one rank's.
_PER_MEMBER = frozenset(("all_gather", "gather", "scatter"))
_BATCH = 4096
"""Nodes after which templates are made anew: a message keeps every text that was ever set in it."""
_CALLER = frozenset(("caller",))
_ORDER_KINDS = frozenset(("caller", "program_order"))


def comm_size(record: CommRecord, group_size: int) -> int:
    """Bytes that one rank puts into the operation.

    >>> record = CommRecord(id=0, op="all_gather", c10d="", pg="0", bytes=800, t=0)
    >>> comm_size(record, 8)
    100
    """
    return record.bytes // group_size if record.op in _PER_MEMBER and group_size else record.bytes


def write_chakra(
    trace: LinkedTrace,
    nodes: Sequence[ChakraNode],
    groups: Sequence[NumberedGroup],
    path: str | Path,
    options: Options,
) -> int:
    """Write the metadata and `nodes`, which are in order, to `path`: whole or not at all.

    Returns the number of bytes."""
    fresh = 1 + max((node.id for node in nodes), default=0)
    start = fresh if any(node.is_cpu for node in nodes) else None
    with whole_file(path) as temporary, temporary.open("wb") as file:
        write_message(file, _metadata(trace, groups).SerializeToString())
        if start is not None:
            write_message(file, _start_node(start).SerializeToString())
        if options.group_node:
            write_message(file, _group_node(fresh + 1, groups).SerializeToString())
        for number, node in enumerate(nodes):
            if number % _BATCH == 0:
                templates = _templates()
            try:
                message = _encode(node, templates, trace, options.deps, start)
            except (ValueError, TypeError, OverflowError) as error:
                raise CrossrankError(
                    f"node {node.id} ({node.name[:60]}) does not fit into a Chakra node ({one_line(error)})"
                ) from error
            write_message(file, message)
        return file.tell()


def _metadata(trace: LinkedTrace, groups: Sequence[NumberedGroup]) -> pb.GlobalMetadata:
    metadata = pb.GlobalMetadata(version=SCHEMA_VERSION)
    add = metadata.attr.add
    add(name="schema", string_val=trace.schema)
    add(name="pid", uint64_val=trace.pid or 0)
    add(name="time", string_val=trace.time or "")
    add(name="start_ts", uint64_val=trace.start_ts or 0)
    add(name="finish_ts", uint64_val=trace.finish_ts or 0)
    add(name="converter", string_val=f"crossrank {crossrank.__version__}")
    if trace.rank is not None:
        add(name="rank", int64_val=trace.rank)
    if trace.world_size is not None:
        add(name="world_size", int64_val=trace.world_size)
    add(name="base_time_ns", int64_val=trace.base_ns)
    add(name="process_groups", string_val=msgspec.json.encode(list(groups)).decode())
    inputs = {os.path.basename(path): digest for path, digest in trace.inputs.items()}
    add(name="inputs", string_val=msgspec.json.encode(inputs).decode())
    add(name="match", string_val=msgspec.json.encode(trace.report).decode())
    return metadata


def _start_node(node_id: int) -> pb.Node:
    node = pb.Node(id=node_id, name=LATE, type=pb.COMP_NODE)
    node.attr.add(name="is_cpu_op", bool_val=True)
    return node


def delay_start(path: str | Path, late_ns: int) -> None:
    """Let the rank of a written file begin `late_ns` after the first one. Nothing changes in a file without host
    nodes, or for less than a microsecond."""
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


def _group_node(node_id: int, groups: Sequence[NumberedGroup]) -> pb.Node:
    """The groups as the feeder parses them: a JSON list between `['` and `']`."""
    listed = [{"pg_name": group.number, "pg_desc": group.desc, "ranks": group.ranks} for group in groups]
    node = pb.Node(id=node_id, name="## process_group:init ##", type=pb.METADATA_NODE)
    node.inputs.values = f"['{msgspec.json.encode(listed).decode()}']"
    node.attr.add(name="is_cpu_op", bool_val=True)
    return node


class _Template:
    """A message to be filled again and again, which is several times as fast as a new one for each node."""

    def __init__(self, *attributes: str, has_io: bool) -> None:
        self.message = pb.Node()
        self.numbers = [self.message.attr.add(name=name) for name in attributes]
        self.io = (self.message.inputs, self.message.outputs) if has_io else ()


_Templates = dict[tuple[bool, bool], _Template]
"""By whether there are an `rf_id`, and inputs and outputs."""


def _templates() -> _Templates:
    usual = ("start_ns", "duration_ns")
    return {(False, io): _Template(*usual, has_io=io) for io in (False, True)} | {
        (True, io): _Template(*usual, "rf_id", has_io=io) for io in (False, True)
    }


def _encode(
    node: ChakraNode, templates: _Templates, trace: LinkedTrace, mode: Literal["all", "data"], start: int | None
) -> bytes:
    """One node as a message. With mode "all" `data_deps` hold every dependency and `ctrl_deps` the caller; with
    "data" what is only the order of a thread stands in `ctrl_deps` alone. `start` is what a node without dependencies
    waits for."""
    in_order = _ORDER_KINDS if mode == "data" else _CALLER
    ctrl_deps: list[int] = []
    data_deps: list[int] = [] if start is None or node.dependencies else [start]
    for dependency in node.dependencies:
        deps = ctrl_deps if dependency.kind in in_order else data_deps
        if dependency.source not in deps:
            deps.append(dependency.source)
    template = templates[node.rf_id != 0, node.op is not None]
    message = template.message
    message.id = node.id
    message.name = node.name
    message.type = pb.COMP_NODE if node.comm is None else P2P_TYPES.get(node.comm.record.op, pb.COMM_COLL_NODE)
    message.ctrl_deps[:] = ctrl_deps
    message.data_deps[:] = data_deps
    message.start_time_micros = max(0, trace.base_ns + node.start_ns) // 1000
    message.duration_micros = (node.duration_ns + 500) // 1000
    if node.op is not None:
        for given, text in zip(template.io, (node.op.inputs, node.op.outputs), strict=True):
            given.values, given.shapes, given.types = io_texts(text)
    for attribute, value in zip(template.numbers, (node.start_ns, node.duration_ns, node.rf_id), strict=False):
        attribute.int64_val = value
    if node.comm is not None:
        message = pb.Node()
        message.CopyFrom(template.message)
        _add_comm(message, node.comm, trace.rank)
    # Messages one after the other are one message, with the attributes of both.
    return message.SerializeToString() + _usual_attributes(
        node.lane, node.is_cpu, node.tensor_bytes, node.comm is not None
    )


@lru_cache(maxsize=1 << 14)
def _usual_attributes(lane: Lane, is_cpu: bool, tensor_bytes: int, communicates: bool) -> bytes:
    """The attributes that many nodes have alike."""
    message = pb.Node()
    add = message.attr.add
    add(name="is_cpu_op", bool_val=is_cpu)
    kind, place = lane
    if kind == "thread":
        add(name="tid", int64_val=_as_int(place))
    elif kind == "stream" and isinstance(place, tuple):
        add(name="device", int64_val=_as_int(place[0]))
        add(name="stream", int64_val=_as_int(place[1]))
    if not is_cpu and not communicates:
        # A roofline needs both and no size of 0. The operations are not known: 1 stands for that.
        add(name="num_ops", int64_val=1)
        add(name="tensor_size", uint64_val=max(1, tensor_bytes))
    return message.SerializeToString()


def _add_comm(message: pb.Node, comm: Comm, rank: int | None) -> None:
    record, run = comm.record, comm.runs_as or comm.record
    add = message.attr.add
    add(name="comm_size", int64_val=comm_size(run, len(comm.group.ranks)))
    add(name="pg_name", string_val=comm.group.number)
    add(name="comm_op", string_val=record.op)
    if record.dtype:
        add(name="dtype", string_val=record.dtype)
    for name, splits in (("in_split", record.in_split), ("out_split", record.out_split)):
        if splits:
            add(name=name).int64_list.values.extend(splits)
    if record.op in P2P_TYPES:
        source, target = message_ends(record, -1 if rank is None else rank)
        add(name="comm_src", int32_val=source)
        add(name="comm_dst", int32_val=target)
        add(name="comm_tag", int32_val=_tag(record, comm.group))
        return
    add(name="comm_type", int64_val=COLLECTIVE_TYPES[run.op])
    if record.root is not None:
        add(name="root", int64_val=record.root)
    if record.seq is not None:
        add(name="seq", int64_val=record.seq)


def message_ends(record: CommRecord, rank: int) -> tuple[int, int]:
    """Source and destination of a send or receive of `rank`; -1 stands for a peer that is not known."""
    peer = -1 if record.peer is None else record.peer
    return (rank, peer) if record.op == "send" else (peer, rank)


def _tag(record: CommRecord, group: NumberedGroup) -> int:
    """The same number on both sides: from the group, and the count of this pair's messages in this direction."""
    return (int(group.number) % 1024) << 20 | (record.p2p_seq or 0) % (1 << 20)


def _as_int(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return -1


assert set(COLLECTIVE_TYPES) | set(P2P_TYPES) == set(OPERATIONS)
