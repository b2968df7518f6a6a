"""Turns what a simulator cannot run into what it runs.

ASTRA-sim's `Workload.cc` runs all_reduce, all_gather, all_to_all, reduce_scatter, sends and receives on its network and
plays a broadcast for as long as its node says. At anything else it stops, or ends without a word with ranks that did
not finish; so it does at a collective of a group of one rank, at a message of 0 bytes or of a rank to itself, and
where a rank that has host nodes ends with a message, at which its statistics throw with nobody to catch it. An
all_gather of fewer bytes than the chunks that the system file asks for (`preferred-dataset-splits`) never ends, nor
does a collective into which the members put different amounts: its messages are those of the amount of each.

Of one rank it runs one host node, one GPU computation and one communication at a time (`HardwareResource.cc`, which
exempts receives). What ran at the same time on two threads or streams would so take its time twice.

With `roofline-enabled` it stops at a computation on a GPU that has no `num_ops` or `tensor_size`; those of the host it
plays for as long as they took (`Workload.cc`).
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
"""Operation -> the one with the nearest traffic: each rank passes on (n-1)/n of S, as on the busiest link of the first.
All members then wait for each other, also where only the root would."""
LEAST_BYTES = {"all_gather": 64, "send": 1, "recv": 1}
"""Operation -> bytes that one rank puts in at least; the first suffices for up to 64 chunks."""
_AFTER_MESSAGES = 1 << 19
"""A number that messages of the job have not: those of an all_to_all are counted from it."""


def lower(
    nodes: list[ChakraNode], rank: int | None, *, roofline: bool = False, messages: bool = False
) -> dict[str, int]:
    """Change the `nodes` of `rank`, which are in order, to what ASTRA-sim runs, with its `roofline` or without. Returns
    what was changed, and how often. With `messages` an all_to_all with splits is its sends and receives."""
    changed = Counter({"shorter by what another thread or stream ran at the same time": _take_turns(nodes)})
    if messages and rank is not None:
        changed["all_to_all with splits as its sends and receives"] += _exchange(nodes, rank)
    for node in nodes if roofline else ():
        if node.comm is None and not node.is_cpu and not (node.flop and node.tensor_bytes):
            node.is_cpu = True
            changed["computation on a GPU without a count, as one of the host, which keeps its time"] += 1
    for node in nodes:
        if node.comm is None:
            continue
        record, members = node.comm.record, len(node.comm.group.ranks)
        run = _runs_as(record, members)
        to_itself = record.peer is not None and record.peer == rank
        if members == 1 or to_itself:
            alone = "of a rank to itself" if to_itself else "of a group of one rank"
            changed[f"{record.op} {alone} as a computation"] += 1
            node.comm = None
        elif run != record:
            least = "" if run.bytes == record.bytes else f" of {run.bytes} B"
            changed[f"{record.op} as {run.op}{least}"] += 1
            node.comm = msgspec.structs.replace(node.comm, runs_as=run)
    after_messages = _after_messages(nodes)
    changed["a node of no time after messages that nothing waits for"] += len(after_messages)
    nodes += after_messages
    return dict((+changed).most_common())


def _exchange(nodes: list[ChakraNode], rank: int) -> int:
    """Put sends and receives of what each member gets in the place of every all_to_all with splits, and a computation
    of no time that waits for them in its own. Returns how many there were.

    What one member sends another is what that one receives from it, so ranks agree without knowing of each other.
    """
    fresh = 1 + max((node.id for node in nodes), default=0)
    calls: Counter[str] = Counter()
    made: list[ChakraNode] = []
    for node in nodes:
        if node.comm is not None and (parts := _messages(node.comm, rank, calls)) is not None:
            # Where ASTRA-sim plays what was measured: receives run side by side, sends one after the other.
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


def _messages(comm: Comm, rank: int, calls: Counter[str]) -> list[CommRecord] | None:
    """The messages of an all_to_all with splits, or of lists, to and from every other member that gets anything; None
    for any other call, and where the sizes are not known. `calls` counts those of each group."""
    record, ranks = comm.record, comm.group.ranks
    dtype = dtype_of(record.dtype) if record.dtype is not None else None
    if record.op != "all_to_all" or dtype is None or rank not in ranks:
        return None
    sent = _parts(record.in_split, record.inputs, dtype.size, len(ranks))
    received = _parts(record.out_split, record.outputs, dtype.size, len(ranks))
    if sent is None or received is None:
        return None
    calls[comm.group.number] += 1
    number = _AFTER_MESSAGES + calls[comm.group.number]
    given: dict[str, Any] = {"in_split": None, "out_split": None, "seq": None, "p2p_seq": number}
    return [
        msgspec.structs.replace(record, op=op, peer=peer, bytes=size, **given)
        for op, sizes in (("send", sent), ("recv", received))
        for peer, size in zip(ranks, sizes, strict=True)
        if peer != rank and size > 0
    ]


def _parts(split: list[int] | None, shapes: Sequence[Sequence[int]], item: int, members: int) -> list[int] | None:
    """Bytes for each member; None where nothing tells them apart."""
    if split is not None and len(split) == members:
        row = total_bytes(shapes, item) // max(1, sum(split))
        return [count * row for count in split]
    return [total_bytes([shape], item) for shape in shapes] if len(shapes) == members > 1 else None


def _take_turns(nodes: Sequence[ChakraNode]) -> int:
    """Leave to every node only the time that it ran after the end of those before it that use the same: the host, the
    GPU or the network. Returns how many nodes that made shorter."""
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


def _after_messages(nodes: Collection[ChakraNode]) -> list[ChakraNode]:
    """A host node that waits for each send and receive that no other node waits for, where that is needed."""
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


def _runs_as(record: CommRecord, members: int) -> CommRecord:
    op = RUNS_AS.get(record.op, record.op)
    least = LEAST_BYTES.get(op, 0) * (members if op == "all_gather" else 1)
    return msgspec.structs.replace(record, op=op, bytes=max(record.bytes, least))
