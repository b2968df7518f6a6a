"""Converts one rank's linked trace to a Chakra file. `convert` shows the order of the work."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from crossrank.comm import is_p2p
from crossrank.tools.graph.chakra.chakra_graph import ChakraNode, Comm, NumberedGroup, Options, number_groups
from crossrank.tools.graph.chakra.grow import CopiesOf
from crossrank.tools.graph.chakra.host_time import USER_SCOPE, cut_waits, wait_for_threads, with_pauses
from crossrank.tools.graph.chakra.lower import lower
from crossrank.tools.graph.chakra.order import in_order, is_in_order
from crossrank.tools.graph.chakra.simulate import RankGraph, in_group_order, rank_graph
from crossrank.tools.graph.chakra.steps import (
    convert_communications,
    convert_nodes,
    device_nodes,
    draw_dependencies,
    reduce_dependencies,
)
from crossrank.tools.graph.chakra.write import write_chakra, write_copies
from crossrank.tools.graph.linking import LinkedTrace


@dataclass(kw_only=True)
class Converted:
    """The result of a conversion."""

    nodes: dict[str, int] = field(default_factory=dict)
    """Number of nodes by kind: computation on the host or on a GPU, pause of the host, operation of a communication."""
    dependencies: dict[str, int] = field(default_factory=dict)
    """Kind -> number of written edges."""
    gpu_ns: int = 0
    """Time of the computations on a GPU."""
    counted_ns: int = 0
    """The part of `gpu_ns` with a number of floating-point operations."""
    implied: int = 0
    """Edges that are not written because the order of threads and streams implies them."""
    lowered: dict[str, int] = field(default_factory=dict)
    """What was replaced for ASTRA-sim -> how often."""
    begin_ns: int = 0
    """First start, in ns since 1970."""
    length_ns: int = 0
    """Measured time from the first start to the last end."""
    world_size: int | None = None
    """Ranks of the job, if the trace has this number."""
    groups: list[NumberedGroup] = field(default_factory=list)
    collectives: dict[str, list[str]] = field(default_factory=dict)
    """Number of a group -> operation and size of each collective, in order."""
    communications: list[Comm] = field(default_factory=list)
    """Communications as recorded, in order within each group."""
    warnings: list[str] = field(default_factory=list)
    size: int = 0
    """Bytes of the file."""
    graph: RankGraph | None = None
    """Graph for the simulation, if `keep_graph` is set."""


_DEFAULT_OPTIONS = Options()


def convert(
    trace: LinkedTrace,
    path: str | Path | None,
    options: Options = _DEFAULT_OPTIONS,
    *,
    keep_graph: bool = False,
    copies: CopiesOf | None = None,
) -> Converted:
    """Write `trace` to `path`, unless `path` is None. With `keep_graph`, keep its graph for a simulation. With
    `copies`, write each of the copies instead.

    Raise `CrossrankError` for a group without a definition, and for a cycle of dependencies that are facts."""
    groups = number_groups(trace)
    nodes = convert_nodes(trace)
    warnings: list[str] = []
    nodes_by_kernel = convert_communications(trace, nodes, groups, warnings)
    draw_dependencies(trace, nodes, nodes_by_kernel)
    wait_for_threads(nodes, {op.id for op in trace.host if op.scope == USER_SCOPE})
    # Break cycles before edges are removed: an edge of a cycle may be the only one that implies another edge.
    ordered, dropped = in_order(nodes, strict=options.strict)
    if options.nodes == "gpu":
        nodes = device_nodes(ordered)
        ordered = list(nodes.values())
    result = Converted(implied=reduce_dependencies(nodes), groups=sorted(groups.values(), key=lambda g: int(g.number)))
    if not is_in_order(ordered):
        ordered, _ = in_order(nodes, strict=True)
    result.warnings, result.world_size = trace.report.caveats + warnings + dropped, trace.world_size
    begin = min((node.start_ns for node in ordered), default=0)
    result.begin_ns = trace.base_ns + begin
    result.length_ns = max((node.start_ns + node.duration_ns for node in ordered), default=begin) - begin
    cut_waits(ordered)
    if options.pauses:
        ordered = with_pauses(ordered)
    communicates = [node for node in ordered if node.comm is not None]
    result.communications = [comm for _, comm in in_group_order(communicates)]
    for comm in result.communications:
        if not is_p2p(comm.record):
            # Members of an uneven all_to_all contribute different amounts.
            size = "" if comm.record.op == "all_to_all" else f" of {comm.record.bytes} B"
            result.collectives.setdefault(comm.group.number, []).append(comm.record.op + size)
    recorded = [node.comm for node in communicates if node.comm is not None]
    first = trace.rank or 0
    if copies is not None:
        first = copies.growth.copies[first][0]
        for node, comm in zip(communicates, recorded, strict=True):
            node.comm = copies.growth.comm(comm, first)
    if keep_graph:
        result.graph = rank_graph(ordered, first, result.begin_ns, result.length_ns)
    if options.lower:
        result.lowered = lower(ordered, first, roofline=options.roofline, messages=options.messages)
    if copies is not None and copies.folder is not None:
        # Lowering has turned some communications into computations.
        kept = [(comm, node.comm) for comm, node in zip(recorded, communicates, strict=True) if node.comm is not None]
        result.groups, result.size = write_copies(trace, ordered, kept, result.groups, copies, copies.folder, options)
    elif copies is None and path is not None:
        result.size = write_chakra(trace, ordered, result.groups, path, options)
    on_gpu = [node for node in ordered if node.comm is None and node.runs_on[0] == "stream"]
    result.gpu_ns = sum(node.duration_ns for node in on_gpu)
    result.counted_ns = sum(node.duration_ns for node in on_gpu if node.flop is not None)
    result.nodes = dict(Counter(_kind_of(node) for node in ordered))
    result.dependencies = dict(Counter(dependency.kind for node in ordered for dependency in node.dependencies))
    return result


def _kind_of(node: ChakraNode) -> str:
    if node.comm is not None:
        return node.comm.record.op
    if node.is_pause:
        return "pause of the host"
    return "computation on the host" if node.is_cpu else "computation on a GPU"
