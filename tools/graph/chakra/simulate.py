"""Simulates converted traces of one or more ranks: when each node runs if only its dependencies delay it.

A node starts when all its dependencies have ended. The members of a collective, and both ends of a transfer, start
together when the last of them is ready. They take the shortest of their measured times, since the longer ones contain
the wait for the last rank. The host's pauses are nodes too. Ranks start at the time of their clocks, or all at 0 if
these are too far apart for one window.

What if: `cost` returns the duration of a communication on another network. `compute` is the factor for computation on
GPUs or, in a job without GPUs, for operations on the host.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from crossrank.comm import Locality, is_p2p, total_bytes
from crossrank.dtypes import dtype_of
from crossrank.tools.graph.chakra.chakra_graph import LATE, PAUSE, ChakraNode, Comm, RunsOn
from crossrank.tools.graph.chakra.write import message_ends
from crossrank.tools.paused_gc import paused_gc

HOST = "operations on the host"
GPU = "computation on a GPU"
COMMUNICATION = "communication"
JoinKey = tuple[str, tuple[int, int] | None, int | None]
"""Group, ends of a P2P transfer, and number. All members of a communication have the same key."""


class Transfer(msgspec.Struct, frozen=True, gc=False):
    """A communication, as input to a network model."""

    op: str
    bytes: int
    """S of nccl-tests; for an uneven all_to_all, the larger of what the rank sends and receives."""
    members: tuple[int, ...]
    """Global ranks; for a send or receive, its two ends."""
    locality: Locality


Cost = Callable[[Transfer], float | None]
"""Returns the ns of a communication; None if unknown."""


class RankNode(msgspec.Struct, gc=False):
    """A node of the simulation. The fields after `transfer` are results of the last simulation."""

    name: str
    runs_on: str
    category: str
    start_ns: int
    """Measured, since the first start of the rank."""
    duration_ns: int
    """Measured."""
    sources: list[int]
    """Positions of the nodes that it waits for."""
    join: JoinKey | None
    transfer: Transfer | None = None
    """None for a node that is no communication."""
    spent_ns: int = 0
    """Duration in the simulation, before the members of a communication are joined."""
    by_cost: bool = False
    """Whether `spent_ns` comes from `cost`, not from a measurement."""
    ready: int = 0
    waits: int = 0
    """Number of nodes that it still waits for."""
    begin: int = -1
    end: int = 0
    dependents: list[RankNode] | None = None
    because: RankNode | None = None
    """The node whose end allowed this one to start."""


class RankGraph(msgspec.Struct, gc=False, kw_only=True):
    """One rank's nodes. Each follows the nodes that it waits for."""

    rank: int
    begin_ns: int
    """First start, in ns since 1970."""
    end_ns: int
    """Last measured end, since `begin_ns`."""
    nodes: list[RankNode]


@dataclass(kw_only=True)
class Simulation:
    """The result of a simulation. Times are ns."""

    makespan_ns: int
    measured_ns: int
    """From the first measured start of any rank to the last measured end."""
    by_clocks: bool = True
    """Whether the ranks started at the time of their clocks; otherwise all started at 0."""
    busy_ns: dict[tuple[int, str], int] = field(default_factory=dict)
    """(rank, thread or stream) -> time in which it ran nodes."""
    critical_ns: dict[str, int] = field(default_factory=dict)
    """Category of nodes on the critical path -> time."""
    waiting_ns: dict[int, int] = field(default_factory=dict)
    """Rank -> time in which its communications were ready and waited for other ranks."""
    joined: int
    """Collectives and transfers with several members."""
    alone: int
    """Communications with one member: the other ranks are missing, or never made the call."""
    runs_ns: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Rank -> (start, duration) of each node."""
    measured_ops: dict[str, int] = field(default_factory=dict)
    """Operation without a result of `cost`, which takes its measured time -> number of calls."""

    @property
    def error(self) -> float | None:
        """Share by which the simulated makespan differs from the measured one; None if that is unknown."""
        return self.makespan_ns / self.measured_ns - 1 if self.measured_ns else None


def rank_graph(nodes: Sequence[ChakraNode], rank: int, begin_ns: int, length_ns: int) -> RankGraph:
    """Return a rank's nodes, which are in order, as input of the simulation.

    `begin_ns` is their first start since 1970, `length_ns` their measured duration.
    """
    position = {node.id: index for index, node in enumerate(nodes)}
    begin = min((node.start_ns for node in nodes), default=0)
    joins: dict[int, JoinKey] = {}
    transfers: dict[int, Transfer] = {}
    numbers: Counter[str] = Counter()
    for node, comm in in_group_order(nodes):
        record, group = comm.record, comm.group.number
        transfers[node.id] = _make_transfer(comm, rank)
        if is_p2p(record):
            joins[node.id] = (group, message_ends(record, rank), record.p2p_seq)
        else:
            numbers[group] += 1
            joins[node.id] = (group, None, numbers[group])
    played = [
        RankNode(
            node.name,
            _describe_runs_on(node.runs_on),
            _category_of(node),
            node.start_ns - begin,
            node.duration_ns,
            [position[dependency.source] for dependency in node.dependencies],
            joins.get(node.id),
            transfers.get(node.id),
        )
        for node in nodes
    ]
    return RankGraph(rank=rank, begin_ns=begin_ns, end_ns=length_ns, nodes=played)


def _make_transfer(comm: Comm, rank: int) -> Transfer:
    record, members = comm.record, tuple(comm.group.ranks)
    if is_p2p(record):
        members = (rank,) if record.peer is None else (rank, record.peer)
    size, dtype = record.bytes, dtype_of(record.dtype) if record.dtype is not None else None
    if record.op == "all_to_all" and record.out_split is not None and dtype is not None:
        size = max(size, total_bytes(record.outputs, dtype.size))
    return Transfer(record.op, size, members, record.locality)


def _category_of(node: ChakraNode) -> str:
    if node.comm is not None:
        return COMMUNICATION
    return PAUSE if node.is_pause else HOST if node.is_cpu else GPU


@lru_cache
def _describe_runs_on(runs_on: RunsOn) -> str:
    kind, place = runs_on
    if isinstance(place, tuple):
        return f"device {place[0]} stream {place[1]}"
    return f"thread {place}" if kind == "thread" else "communication without a stream"


def in_group_order(nodes: Iterable[ChakraNode]) -> list[tuple[ChakraNode, Comm]]:
    """Return the communications, ordered by sequence number; those without one by their starts."""
    found = [(node, node.comm) for node in nodes if node.comm is not None]
    return sorted(found, key=lambda entry: (entry[1].record.seq or 0, entry[0].start_ns, entry[0].id))


def offsets(spans: Sequence[tuple[int, int]]) -> tuple[list[int], bool]:
    """Return each rank's delay after the first rank, and whether it comes from clocks. `spans`: (begin, length)."""
    first = min(begin for begin, _ in spans)
    late = [begin - first for begin, _ in spans]
    if max(late) > max(length for _, length in spans):
        return [0] * len(late), False
    return late, True


@paused_gc()
def simulate(graphs: Sequence[RankGraph], cost: Cost | None = None, compute: float = 1.0) -> Simulation:
    """Simulate all ranks together."""
    late, by_clocks = offsets([(graph.begin_ns, graph.end_ns) for graph in graphs])
    scaled = GPU if any(node.category == GPU for graph in graphs for node in graph.nodes) else HOST
    measured_ops: Counter[str] = Counter()

    def duration(node: RankNode) -> tuple[int, bool]:
        if node.transfer is not None and cost is not None:
            spent = cost(node.transfer)
            if spent is not None:
                return round(spent), True
            measured_ops[node.transfer.op] += 1
        return round(node.duration_ns * compute) if node.category == scaled else node.duration_ns, False

    for graph, offset in zip(graphs, late, strict=True):
        _reset_nodes(graph, offset, duration)
    runs = [run for graph in graphs for run in graph.nodes]
    joined = _run_nodes(runs)
    # If several end last together, take the last one.
    last = max(reversed(runs), key=lambda run: run.end, default=None)
    result = Simulation(
        makespan_ns=last.end if last else 0,
        measured_ns=max(graph.end_ns + offset for graph, offset in zip(graphs, late, strict=True)),
        by_clocks=by_clocks,
        critical_ns=_sum_critical_path(last),
        joined=sum(members > 1 for members in joined),
        alone=joined.count(1),
        measured_ops=dict(measured_ops.most_common()),
    )
    for graph in graphs:
        for run in graph.nodes:
            runs_on = (graph.rank, run.runs_on)
            spent = 0 if run.category == PAUSE else run.end - run.begin
            result.busy_ns[runs_on] = result.busy_ns.get(runs_on, 0) + spent
        result.waiting_ns[graph.rank] = sum(run.begin - run.ready for run in graph.nodes if run.join)
        result.runs_ns[graph.rank] = [(run.begin, run.end - run.begin) for run in graph.nodes]
    return result


def _reset_nodes(graph: RankGraph, offset: int, duration: Callable[[RankNode], tuple[int, bool]]) -> None:
    """Let each node of a rank wait for its sources, and for `offset` ns."""
    dependents: list[list[RankNode]] = []
    for node in graph.nodes:
        sources = set(node.sources)
        node.spent_ns, node.by_cost = duration(node)
        node.ready, node.begin, node.because, node.waits = offset, -1, None, len(sources)
        dependents.append([])
        node.dependents = dependents[-1]
        for source in sources:
            dependents[source].append(node)


def _run_nodes(runs: Sequence[RankNode]) -> list[int]:
    """Run all nodes. Return for each communication the number of its members."""
    members: dict[JoinKey, list[RankNode]] = {}
    arrived: Counter[JoinKey] = Counter()
    queue: deque[RankNode] = deque()
    joined: list[int] = []
    for run in runs:
        if run.join is not None:
            members.setdefault(run.join, []).append(run)

    def begin(together: Sequence[RankNode]) -> None:
        last = max(together, key=lambda run: run.ready)
        # All measured times but the last rank's contain waiting, so take the shortest. With `cost`, take the busiest.
        of_members = max if together[0].by_cost else min
        duration = of_members(run.spent_ns for run in together)
        for run in together:
            run.begin, run.end = last.ready, last.ready + duration
            if run is not last:
                run.because = last
        queue.extend(together)

    def is_ready(run: RankNode) -> None:
        key = run.join
        if key is None:
            begin([run])
            return
        arrived[key] += 1
        if arrived[key] == len(members[key]):
            join(key)

    def join(key: JoinKey) -> None:
        del arrived[key]
        together = [run for run in members[key] if not run.waits and run.begin < 0]
        joined.append(len(together))
        begin(together)

    for run in runs:
        if not run.waits:
            is_ready(run)
    while queue or arrived:
        if not queue:
            # The ranks disagree, or one trace is cut: some members never come. The others continue without them.
            join(next(iter(arrived)))
        ended = queue.popleft()
        for run in ended.dependents or ():
            if ended.end >= run.ready:
                run.ready, run.because = ended.end, ended
            run.waits -= 1
            if not run.waits:
                is_ready(run)
    return joined


def _sum_critical_path(at: RankNode | None) -> dict[str, int]:
    """Return the time by category along the chain of nodes that ends with `at`."""
    spent: Counter[str] = Counter()
    while at is not None:
        before = at.because
        # If a member of a collective waited for another, the path continues at that member, at the same time.
        if before is None or at.join is None or before.begin != at.begin:
            spent[at.category] += at.end - at.begin
            if before is None and at.ready:
                spent[LATE] += at.ready
        at = before
    return dict(spent.most_common())
