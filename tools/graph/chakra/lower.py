"""Replaces nodes that ASTRA-sim cannot run with nodes that it can run.

ASTRA-sim (`Workload.cc`) runs all_reduce, all_gather, all_to_all, reduce_scatter, sends and receives on its network. It
plays a broadcast for the time in its node. At any other operation it stops, or it ends silently with unfinished ranks.
It does the same for a collective of one rank, a message of 0 bytes, and a message of a rank to itself. If a rank with
host nodes ends with a message, its statistics throw an exception that it does not catch. Two kinds of collectives never
end: an all_gather of fewer bytes than the chunks of the system file (`preferred-dataset-splits`), and a collective with
different amounts of its members, since a message has its sender's amount.

Each rank runs one host node, one GPU computation and one communication at a time, except receives
(`HardwareResource.cc`). So the time of two threads or streams that ran together would count twice.

With `roofline-enabled`, ASTRA-sim stops at a GPU computation without `num_ops` or `tensor_size`. It plays host nodes
for their measured time (`Workload.cc`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from crossrank.comm import CommRecord, is_p2p, total_bytes
from crossrank.dtypes import dtype_of
from crossrank.tools.graph.chakra.chakra_graph import MESSAGES_END, ChakraNode, Comm, Dependency

RUNS_AS = {"barrier": "all_reduce", "reduce": "reduce_scatter", "gather": "all_gather", "scatter": "reduce_scatter"}
"""Operation -> the one with the nearest traffic: each rank passes on (n-1)/n of S, as the busiest link does. All
members then wait for each other, even if the original makes only the root wait."""
LEAST_BYTES = {"all_gather": 64, "send": 1, "recv": 1}
"""Operation -> least bytes of one rank. Those of all_gather suffice for up to 64 chunks."""
_FIRST_EXCHANGE_NUMBER = 1 << 19
"""Above the numbers of all recorded messages. Messages of an all_to_all count from here."""


def lower(
    nodes: list[ChakraNode], rank: int | None, *, roofline: bool = False, messages: bool = False
) -> dict[str, int]:
    """Change the `nodes` of `rank`, which are in order, to what ASTRA-sim runs, with or without its `roofline`. With
    `messages`, an all_to_all with splits becomes sends and receives. Return what was changed, and how often."""
    changed = Counter({"shortened by the time of other threads or streams that overlap": _cut_overlaps(nodes)})
    if messages and rank is not None:
        changed["all_to_all with splits as its sends and receives"] += _replace_all_to_alls(nodes, rank)
    for node in nodes if roofline else ():
        if node.comm is None and not node.is_cpu and not (node.flop and node.tensor_bytes):
            node.is_cpu = True
            changed["computation on a GPU without num_ops, as one of the host, which keeps its time"] += 1
    for node in nodes:
        if node.comm is None:
            continue
        record, members = node.comm.record, len(node.comm.group.ranks)
        run = _nearest_runnable(record, members)
        to_itself = record.peer is not None and record.peer == rank
        if members == 1 or to_itself:
            alone = "of a rank to itself" if to_itself else "of a group of one rank"
            changed[f"{record.op} {alone} as a computation"] += 1
            node.comm = None
        elif run != record:
            least = "" if run.bytes == record.bytes else f" of {run.bytes} B"
            changed[f"{record.op} as {run.op}{least}"] += 1
            node.comm = msgspec.structs.replace(node.comm, runs_as=run)
    after_messages = _make_last_wait(nodes)
    changed["a node without time after messages without a dependent node"] += len(after_messages)
    nodes += after_messages
    return dict((+changed).most_common())


def _replace_all_to_alls(nodes: list[ChakraNode], rank: int) -> int:
    """Replace each all_to_all with splits by sends and receives, and by a computation of no time that waits for them.
    Return how many there were.

    A rank sends to another exactly what that one receives from it. So ranks agree without knowledge of each other.
    """
    fresh = 1 + max((node.id for node in nodes), default=0)
    calls: Counter[str] = Counter()
    made: list[ChakraNode] = []
    for node in nodes:
        if node.comm is not None and (parts := _make_messages(node.comm, rank, calls)) is not None:
            # If ASTRA-sim plays measured times, receives run side by side, and sends one after the other.
            receives = any(record.op == "recv" for record in parts)
            sources = list(node.dependencies)
            for index, record in enumerate(parts):
                time = node.duration_ns if (record.op == "recv" if receives else index == 0) else 0
                comm = msgspec.structs.replace(node.comm, record=record)
                made.append(ChakraNode(fresh, record.op, node.runs_on, node.start_ns, time, comm=comm))
                made[-1].dependencies = list(sources)
                node.dependencies.append(Dependency(fresh, "sync", inferred=True))
                fresh += 1
            node.comm, node.duration_ns = None, 0
        made.append(node)
    nodes[:] = made
    return calls.total()


def _make_messages(comm: Comm, rank: int, calls: Counter[str]) -> list[CommRecord] | None:
    """Return the messages of an all_to_all with splits or lists, to and from each other member with data. None for any
    other call, and if sizes are unknown. `calls` counts these calls of each group."""
    record, ranks = comm.record, comm.group.ranks
    dtype = dtype_of(record.dtype) if record.dtype is not None else None
    if record.op != "all_to_all" or dtype is None or rank not in ranks:
        return None
    sent = _split_bytes(record.in_split, record.inputs, dtype.size, len(ranks))
    received = _split_bytes(record.out_split, record.outputs, dtype.size, len(ranks))
    if sent is None or received is None:
        return None
    calls[comm.group.number] += 1
    number = _FIRST_EXCHANGE_NUMBER + calls[comm.group.number]
    given: dict[str, Any] = {"in_split": None, "out_split": None, "seq": None, "p2p_seq": number}
    return [
        msgspec.structs.replace(record, op=op, peer=peer, bytes=size, **given)
        for op, sizes in (("send", sent), ("recv", received))
        for peer, size in zip(ranks, sizes, strict=True)
        if peer != rank and size > 0
    ]


def _split_bytes(split: list[int] | None, shapes: Sequence[Sequence[int]], item: int, members: int) -> list[int] | None:
    """Return the bytes for each member; None if neither splits nor shapes show them."""
    if split is not None and len(split) == members:
        row = total_bytes(shapes, item) // max(1, sum(split))
        return [count * row for count in split]
    return [total_bytes([shape], item) for shape in shapes] if len(shapes) == members > 1 else None


def _cut_overlaps(nodes: Sequence[ChakraNode]) -> int:
    """Cut from each node the time in which an earlier node used the same resource: host, GPU or network. Return the
    number of nodes that became shorter."""
    busy: dict[str, int] = {}
    shorter = 0
    for node in sorted(nodes, key=lambda node: (node.start_ns, node.id)):
        if node.comm is not None and node.comm.record.op == "recv":
            continue
        uses = "network" if node.comm is not None else "host" if node.is_cpu else "gpu"
        end = node.start_ns + node.duration_ns
        free = max(node.start_ns, busy.get(uses, node.start_ns))
        shorter += free > node.start_ns
        node.duration_ns = max(0, end - free)
        busy[uses] = max(free, end)
    return shorter


def _make_last_wait(nodes: Collection[ChakraNode]) -> list[ChakraNode]:
    """Return a host node that waits for each message that no other node waits for; empty if ASTRA-sim needs none."""
    waited_for = {dependency.source for node in nodes for dependency in node.dependencies}
    open_ends = [
        node for node in nodes if node.comm is not None and is_p2p(node.comm.record) and node.id not in waited_for
    ]
    host = next((node for node in nodes if node.is_cpu), None)
    if host is None or not open_ends:
        return []
    fresh = 1 + max(node.id for node in nodes)
    begin = max(node.start_ns + node.duration_ns for node in open_ends)
    waits = [Dependency(node.id, "sync", inferred=True) for node in open_ends]
    return [ChakraNode(fresh, MESSAGES_END, host.runs_on, begin, 0, is_cpu=True, dependencies=waits)]


def _nearest_runnable(record: CommRecord, members: int) -> CommRecord:
    op = RUNS_AS.get(record.op, record.op)
    least = LEAST_BYTES.get(op, 0) * (members if op == "all_gather" else 1)
    return msgspec.structs.replace(record, op=op, bytes=max(record.bytes, least))
