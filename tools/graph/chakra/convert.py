"""Converts one rank's linked trace to a Chakra file: the steps in their order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from crossrank.comm import is_p2p
from crossrank.tools.graph.chakra.chakra_graph import ChakraNode, Comm, Options
from crossrank.tools.graph.chakra.group_numbers import NumberedGroup, number_groups
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
from crossrank.tools.paused_gc import paused_gc


@dataclass(kw_only=True)
class Converted:
    """What a conversion gave."""

    nodes: dict[str, int] = field(default_factory=dict)
    """computation on the host or on a GPU, pause of the host, or the operation of a communication -> nodes."""
    dependencies: dict[str, int] = field(default_factory=dict)
    """Kind -> edges written."""
    gpu_ns: int = 0
    """Time of the computations on a GPU."""
    counted_ns: int = 0
    """Of it, what has a number of floating-point operations."""
    implied: int = 0
    """Edges left out because the order of threads and streams implies them."""
    lowered: dict[str, int] = field(default_factory=dict)
    """What was turned into something else that ASTRA-sim runs -> how often."""
    begin_ns: int = 0
    """First start, since 1970."""
    length_ns: int = 0
    """From there to the last end, as measured."""
    world_size: int | None = None
    """Ranks of the job, where the trace says so."""
    groups: list[NumberedGroup] = field(default_factory=list)
    collectives: dict[str, list[str]] = field(default_factory=dict)
    """Number of a group -> its collectives in order, each as its operation and size."""
    communications: list[Comm] = field(default_factory=list)
    """As recorded, those of one group in their order."""
    warnings: list[str] = field(default_factory=list)
    size: int = 0
    """Bytes of the file."""
    graph: RankGraph | None = None
    """For the simulation, where it is asked for."""


_DEFAULT = Options()


@paused_gc()
def convert(
    trace: LinkedTrace,
    path: str | Path | None,
    options: Options = _DEFAULT,
    *,
    keep_graph: bool = False,
    copies: CopiesOf | None = None,
) -> Converted:
    """Write `trace` to `path`, unless that is None, and keep its graph for a simulation where that is wanted. With
    `copies` write each of those in its place.

    Raises `CrossrankError` for a group that nobody defines and a cycle of facts."""
    groups = number_groups(trace)
    nodes = convert_nodes(trace)
    warnings: list[str] = []
    several = convert_communications(trace, nodes, groups, warnings)
    draw_dependencies(trace, nodes, several)
    wait_for_threads(nodes, {op.id for op in trace.host if op.scope == USER_SCOPE})
    # Cycles are broken before edges are left out: one that goes may be all that implied another.
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
            # Members of an uneven all_to_all put in different amounts.
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
        # Lowering has made computations of some.
        kept = [(comm, node.comm) for comm, node in zip(recorded, communicates, strict=True) if node.comm is not None]
        result.groups, result.size = write_copies(trace, ordered, kept, result.groups, copies, copies.folder, options)
    elif copies is None and path is not None:
        result.size = write_chakra(trace, ordered, result.groups, path, options)
    on_gpu = [node for node in ordered if node.comm is None and node.runs_on[0] == "stream"]
    result.gpu_ns = sum(node.duration_ns for node in on_gpu)
    result.counted_ns = sum(node.duration_ns for node in on_gpu if node.flop is not None)
    result.nodes = dict(Counter(_kind(node) for node in ordered))
    result.dependencies = dict(Counter(dependency.kind for node in ordered for dependency in node.dependencies))
    return result


def _kind(node: ChakraNode) -> str:
    if node.comm is not None:
        return node.comm.record.op
    if node.is_pause:
        return "pause of the host"
    return "computation on the host" if node.is_cpu else "computation on a GPU"
