"""Converts a linked trace to the nodes of a Chakra file, step by step.

Nodes: a host operation becomes a computation on its thread. It takes its exclusive time without waits for the GPU,
since its dependencies represent these. A GPU activity becomes a computation on its stream. A communication becomes one
node: its kernel, or the range of its Work if the backend has no kernels, or else its call. A kernel for a batch of
sends and receives becomes one node for each of them. Roots of processes and threads are removed. They wait for nothing,
so no dependency is lost.

Dependencies: each node on a thread or stream follows the one before it. All other edges of the linked trace stay unless
this order implies them. If the host is removed, waits through host nodes become direct edges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, product

import msgspec

from crossrank.comm import is_p2p, operation_of
from crossrank.errors import CrossrankError
from crossrank.tools.graph.chakra.chakra_graph import ChakraNode, Comm, Dependency, NumberedGroup, RunsOn
from crossrank.tools.graph.chakra.operation_counts import counts_by_activity
from crossrank.tools.graph.linking import Communication, EdgeKind, HostOp, LinkedTrace
from crossrank.tools.graph.linking.dependencies import in_program_order
from crossrank.tools.traces.execution_trace import io, is_group_node
from crossrank.tools.traces.param_comms import tensor_bytes


def convert_nodes(trace: LinkedTrace) -> dict[int, ChakraNode]:
    """Return one node by id for each operation and activity, without dependencies."""
    nodes: dict[int, ChakraNode] = {}
    begin = min((op.start_ns for op in trace.host if op.start_ns is not None), default=0)
    last_start: dict[int, int] = {}
    sides = {op.id: (op.inputs, op.outputs) for op in trace.host}
    counts = counts_by_activity(trace)
    for op in in_program_order(trace.host):
        if is_group_node(op.name):
            continue  # the groups are in a metadata node
        # An operation without a time starts with the one before it.
        start = op.start_ns if op.start_ns is not None else last_start.get(op.tid, begin)
        last_start[op.tid] = start
        nodes[op.id] = ChakraNode(
            id=op.id,
            name=op.name,
            runs_on=("thread", op.tid),
            start_ns=start,
            duration_ns=max(0, op.exclusive_ns - op.blocked_ns),
            is_cpu=True,
            rf_id=op.rf_id,
            op=op,
        )
    for activity in trace.activities:
        nodes[activity.id] = ChakraNode(
            id=activity.id,
            name=activity.name,
            runs_on=("stream", (activity.device, activity.stream)),
            start_ns=activity.start_ns,
            duration_ns=activity.duration_ns,
            tensor_bytes=sum(tensor_bytes(io(side).values) for side in sides.get(activity.host or 0, ())),
            flop=counts.get(activity.id),
        )
    return nodes


def convert_communications(
    trace: LinkedTrace, nodes: dict[int, ChakraNode], groups: Mapping[str, NumberedGroup], warnings: list[str]
) -> dict[int, list[int]]:
    """Turn the kernels, Works or calls of communications into communication nodes.

    Return kernel -> its nodes, one for each call, for kernels of a batch.
    """
    new_ids = count(1 + max([0, *(op.id for op in trace.host), *(activity.id for activity in trace.activities)]))
    ops = {op.id: op for op in trace.host}
    several: dict[int, list[int]] = {}
    batch: list[Communication] = []  # sends and receives whose kernel has not appeared yet
    unknown = 0
    launched: dict[int, list[Communication]] = defaultdict(list)  # kernel -> the calls that it runs
    for communication in trace.communications:
        if communication.activities:
            launched[communication.activities[0]].append(communication)

    def add(communication: Communication) -> None:
        op = ops.get(communication.work or 0)
        node = _make_node(communication, op, op.id if op else next(new_ids), nodes.get(communication.host or 0))
        node.comm = _make_comm(communication, groups)
        nodes[node.id] = node

    for communication in trace.communications:
        operation = operation_of(communication.record.op)
        if communication.activities:
            known = operation is not None and not (communication.host is None and communication.group is None)
            calls = launched.pop(communication.activities[0], [])
            if not calls:
                continue  # the node of the first call has become one for each call
            calls = calls if known else []
            if not known or (operation is not None and operation.p2p):
                calls, batch = batch + calls, []
            unknown += not calls
            run = nodes[communication.activities[0]]
            several[run.id] = [run.id, *(next(new_ids) for _ in calls[1:])]
            for node_id, call in zip(several[run.id], calls, strict=False):
                nodes[node_id] = msgspec.structs.replace(
                    run,
                    id=node_id,
                    name=run.name if len(calls) == 1 else _name_of(call),
                    runs_on=run.runs_on if node_id == run.id else _own_place(node_id),
                    dependencies=[],
                    comm=_make_comm(call, groups),
                )
        elif communication.work is None and operation is None:
            unknown += 1
        elif communication.work is None and is_p2p(communication.record) and communication.record.batch is not None:
            batch.append(communication)
        else:
            add(communication)
    for communication in batch:
        add(communication)
    if unknown:
        warnings.append(
            f"{unknown} communication(s) with unknown operation or group are written as computations: "
            "link with the rank's comms file, or a trace with record_param_comms"
        )
    return several


def _make_node(communication: Communication, op: HostOp | None, node_id: int, call: ChakraNode | None) -> ChakraNode:
    """Return a communication that `op` ran. If only the `call` is known, it takes no time."""
    start = call.start_ns if call is not None else communication.record.t
    node = ChakraNode(
        id=node_id,
        name=_name_of(communication),
        runs_on=_own_place(node_id),
        start_ns=start,
        duration_ns=0,
        dependencies=[],
    )
    if op is not None:
        node.name, node.rf_id, node.duration_ns = op.name, op.rf_id, op.duration_ns
        node.start_ns = op.start_ns if op.start_ns is not None else start
    elif call is not None:
        node.dependencies.append(Dependency(call.id, "launch"))
    return node


def _name_of(communication: Communication) -> str:
    return communication.record.c10d or communication.record.op


def _own_place(node_id: int) -> RunsOn:
    """Return a place of its own: a communication outside the streams follows others only by its edges."""
    return ("communication", node_id)


def _make_comm(communication: Communication, groups: Mapping[str, NumberedGroup]) -> Comm:
    record = communication.record
    group = groups.get(record.pg)
    if group is None:
        raise CrossrankError(
            f"communication {record.op} of node {communication.host} is on process group {record.pg!r}, which no file "
            "defines; link with the rank's comms file, or a trace with '## process_group:init ##'"
        )
    return Comm(record, group)


def draw_dependencies(
    trace: LinkedTrace, nodes: Mapping[int, ChakraNode], several: Mapping[int, Sequence[int]]
) -> None:
    """Add the dependencies of every node.

    A kernel that became several nodes passes its dependencies to each, and its dependents wait for each. Edges from
    roots are dropped: roots wait for nothing. Communications of one group that ran at the same time (a gloo group has
    several threads) get no edge: a dependency means that the source has ended.
    """
    for edge in trace.edges:
        ends: Iterable[tuple[int, int]] = ((edge.source, edge.target),)
        if edge.source in several or edge.target in several:
            ends = product(several.get(edge.source, (edge.source,)), several.get(edge.target, (edge.target,)))
        for source_id, target_id in ends:
            source, target = nodes.get(source_id), nodes.get(target_id)
            if source is None or target is None or source is target:
                continue
            # Communications of a group that ran at the same time do not wait for each other.
            if edge.kind != "group_order" or source.start_ns + source.duration_ns <= target.start_ns:
                # The caller launches what does not run on its thread.
                kind: EdgeKind = "launch" if edge.kind == "caller" and not target.is_cpu else edge.kind
                target.dependencies.append(Dependency(source_id, kind, edge.inferred))


def reduce_dependencies(nodes: Mapping[int, ChakraNode]) -> int:
    """Remove duplicate edges, and edges that the order of threads and streams implies. Return their number.

    Along a thread or stream each node waits for the one before it. So among several edges from one thread or stream,
    the last source implies the others. An edge of an earlier node of the target's implies the same edge of a later one.
    """
    places: dict[int, tuple[RunsOn, int]] = {}
    in_order: dict[RunsOn, list[ChakraNode]] = defaultdict(list)
    # On a thread, order by the start of the RecordFunction.
    for node in sorted(nodes.values(), key=lambda n: (n.rf_id,) if n.is_cpu else (n.start_ns, n.id)):
        places[node.id] = node.runs_on, len(in_order[node.runs_on])
        in_order[node.runs_on].append(node)
    dropped = 0
    for runs_on, members in in_order.items():
        reached: dict[RunsOn, int] = {}
        for place, node in enumerate(members):
            best: dict[RunsOn, tuple[int, Dependency]] = {}
            callers: list[Dependency] = []
            # The caller is often the node before, and a caller edge alone does not state the order.
            kept = [Dependency(members[place - 1].id, _ORDER_OF[runs_on[0]])] if place else []
            for dependency in node.dependencies:
                other, at = places[dependency.source]
                if dependency.kind == "caller":
                    callers.append(dependency)
                elif other != runs_on:
                    if other not in best or at > best[other][0]:
                        best[other] = at, dependency
                elif at > place:
                    kept.append(dependency)  # against the order; the search for cycles reports it
            for other, (at, dependency) in best.items():
                if at > reached.get(other, -1):
                    reached[other] = at
                    kept.append(dependency)
            dropped += max(0, len(node.dependencies) - len(kept) - len(callers))
            node.dependencies = callers + sorted(kept, key=lambda dependency: dependency.source)
    return dropped


_ORDER_OF: dict[str, EdgeKind] = {"thread": "program_order", "stream": "stream"}


def device_nodes(nodes: Sequence[ChakraNode]) -> dict[int, ChakraNode]:
    """Return the nodes that no thread runs, by id. `nodes` are in order.

    Each waits for its own dependencies, and for those of its chain of host nodes: a kernel that is launched after the
    host waited for another kernel waits for that kernel. For each stream that the host waited for, only the last node
    stays, and none that another one of these waits for.
    """
    kept: dict[int, ChakraNode] = {}
    waits: dict[int, dict[int, Dependency]] = {}
    place: dict[int, int] = {}
    for at, node in enumerate(nodes):
        place[node.id] = at
        found = {dependency.source: dependency for dependency in node.dependencies if dependency.source in kept}
        for dependency in node.dependencies:
            if dependency.source not in kept:
                for source, through in waits[dependency.source].items():
                    found.setdefault(source, through)
        if len(found) > 1:
            last = {kept[source].runs_on: source for source in sorted(found, key=place.__getitem__)}.values()
            implied = {dependency.source for source in last for dependency in kept[source].dependencies}
            found = {source: found[source] for source in last if source not in implied}
        waits[node.id] = found
        if not node.is_cpu:
            node.dependencies = list(found.values())
            kept[node.id] = node
    return kept
