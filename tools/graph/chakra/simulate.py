"""Plays converted traces of one or more ranks: what runs when, if nothing but their dependencies held it back.

A node begins when all that it waits for has ended. The members of a collective, and both sides of a send, begin
together when the last of them is ready, and take the shortest of their measured times: the longer ones contain the
waiting for the last. What a thread did between its nodes has nodes of its own.
Ranks begin when they began by their clocks, or all at 0 where these are too far apart to be of one window.

What if: `cost` says how long a communication takes on another network, `compute` by how much longer the computation
takes: that on GPUs, or, of a job without any, the operations on the host.
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
"""Group, source and destination of a P2P message, and its number: what all members of a communication have."""


class Transfer(msgspec.Struct, frozen=True, gc=False):
    """What a network has to do for a communication."""

    op: str
    size: int
    """Members of the group."""
    bytes: int
    """S of nccl-tests; of an uneven all_to_all the larger of what the rank sends and receives."""
    members: tuple[int, ...]
    """Global ranks: of a send or receive, its two ends."""
    locality: Locality


Cost = Callable[[Transfer], float | None]
"""ns of a communication; None where it is not known."""


class RankNode(msgspec.Struct, gc=False):
    """A node as the simulation takes it, and, after `transfer`, what the last one made of it."""

    name: str
    runs_on: str
    category: str
    start_ns: int
    """As measured, since the first start of the rank."""
    duration_ns: int
    """As measured."""
    sources: list[int]
    """Positions of the nodes that it waits for."""
    join: JoinKey | None
    transfer: Transfer | None = None
    """None for what is no communication."""
    spent_ns: int = 0
    """How long the simulation lets it run, before members of a communication are joined."""
    by_cost: bool = False
    """`spent_ns` was not measured."""
    ready: int = 0
    waits: int = 0
    """For how many nodes it still waits."""
    begin: int = -1
    end: int = 0
    dependents: list[RankNode] | None = None
    because: RankNode | None = None
    """The node whose end let it begin."""


class RankGraph(msgspec.Struct, gc=False, kw_only=True):
    """One rank's nodes, in an order in which all that a node waits for comes before it."""

    rank: int
    begin_ns: int
    """First start, since 1970."""
    end_ns: int
    """Last end as measured, since `begin_ns`."""
    nodes: list[RankNode]


@dataclass(kw_only=True)
class Simulation:
    """What came out. Times are nanoseconds."""

    makespan_ns: int
    measured_ns: int
    """From the first measured start of any rank to the last end."""
    by_clocks: bool = True
    """Whether the ranks began when they began by their clocks; otherwise all began at 0."""
    busy_ns: dict[tuple[int, str], int] = field(default_factory=dict)
    """(rank, thread or stream) -> time in which it ran something."""
    critical_ns: dict[str, int] = field(default_factory=dict)
    """What the critical path consists of -> time."""
    waiting_ns: dict[int, int] = field(default_factory=dict)
    """Rank -> time in which its communications were ready and waited for other ranks."""
    joined: int
    """Collectives and messages of which several members were played together."""
    alone: int
    """Communications that one rank played alone: the others are not there, or never came."""
    runs_ns: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Rank -> when each node begins, and how long it runs."""
    measured_ops: dict[str, int] = field(default_factory=dict)
    """Operations of which `cost` knew nothing, and which take their measured times -> communications of ranks."""

    @property
    def error(self) -> float:
        """Share by which the simulated makespan differs from the measured one."""
        return self.makespan_ns / self.measured_ns - 1 if self.measured_ns else 0.0


def rank_graph(nodes: Sequence[ChakraNode], rank: int, begin_ns: int, length_ns: int) -> RankGraph:
    """A rank's nodes, which are in order, as the simulation takes them.

    `begin_ns` is their first start since 1970, `length_ns` how long they took as measured.
    """
    position = {node.id: index for index, node in enumerate(nodes)}
    begin = min((node.start_ns for node in nodes), default=0)
    joins: dict[int, JoinKey] = {}
    transfers: dict[int, Transfer] = {}
    numbers: Counter[str] = Counter()
    for node, comm in in_group_order(nodes):
        record, group = comm.record, comm.group.number
        transfers[node.id] = _transfer(comm, rank)
        if is_p2p(record):
            joins[node.id] = (group, message_ends(record, rank), record.p2p_seq)
        else:
            numbers[group] += 1
            joins[node.id] = (group, None, numbers[group])
    played = [
        RankNode(
            node.name,
            _runs_on_text(node.runs_on),
            _category(node),
            node.start_ns - begin,
            node.duration_ns,
            [position[dependency.source] for dependency in node.dependencies],
            joins.get(node.id),
            transfers.get(node.id),
        )
        for node in nodes
    ]
    return RankGraph(rank=rank, begin_ns=begin_ns, end_ns=length_ns, nodes=played)


def _transfer(comm: Comm, rank: int) -> Transfer:
    record, members = comm.record, tuple(comm.group.ranks)
    if is_p2p(record):
        members = (rank,) if record.peer is None else (rank, record.peer)
    size, dtype = record.bytes, dtype_of(record.dtype) if record.dtype is not None else None
    if record.op == "all_to_all" and record.out_split is not None and dtype is not None:
        size = max(size, total_bytes(record.outputs, dtype.size))
    return Transfer(record.op, len(members), size, members, record.locality)


def _category(node: ChakraNode) -> str:
    if node.comm is not None:
        return COMMUNICATION
    return PAUSE if node.is_pause else HOST if node.is_cpu else GPU


@lru_cache
def _runs_on_text(runs_on: RunsOn) -> str:
    kind, place = runs_on
    if isinstance(place, tuple):
        return f"device {place[0]} stream {place[1]}"
    return f"thread {place}" if kind == "thread" else "communication outside streams"


def in_group_order(nodes: Iterable[ChakraNode]) -> list[tuple[ChakraNode, Comm]]:
    """The communications, those of one group by their sequence numbers where these are known, else by their starts."""
    found = [(node, node.comm) for node in nodes if node.comm is not None]
    return sorted(found, key=lambda entry: (entry[1].record.seq or 0, entry[0].start_ns, entry[0].id))


def offsets(spans: Sequence[tuple[int, int]]) -> tuple[list[int], bool]:
    """When each rank begins after the first one, and whether their clocks say so. `spans` are (begin, length)."""
    first = min(begin for begin, _ in spans)
    late = [begin - first for begin, _ in spans]
    if max(late) > max(length for _, length in spans):
        return [0] * len(late), False
    return late, True


@paused_gc()
def simulate(graphs: Sequence[RankGraph], cost: Cost | None = None, compute: float = 1.0) -> Simulation:
    """Play all ranks together."""
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
        _prepare(graph, offset, duration)
    runs = [run for graph in graphs for run in graph.nodes]
    joined = _play(runs)
    # Of those that end last together, the last.
    last = max(reversed(runs), key=lambda run: run.end, default=None)
    result = Simulation(
        makespan_ns=last.end if last else 0,
        measured_ns=max(graph.end_ns + offset for graph, offset in zip(graphs, late, strict=True)),
        by_clocks=by_clocks,
        critical_ns=_critical_path(last),
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


def _prepare(graph: RankGraph, offset: int, duration: Callable[[RankNode], tuple[int, bool]]) -> None:
    """Let every node of a rank wait for its sources, and for `offset` ns."""
    dependents: list[list[RankNode]] = []
    for node in graph.nodes:
        sources = set(node.sources)
        node.spent_ns, node.by_cost = duration(node)
        node.ready, node.begin, node.because, node.waits = offset, -1, None, len(sources)
        dependents.append([])
        node.dependents = dependents[-1]
        for source in sources:
            dependents[source].append(node)


def _play(runs: Sequence[RankNode]) -> list[int]:
    """Let all begin and end. Returns of how many members each communication was played."""
    members: dict[JoinKey, list[RankNode]] = {}
    arrived: Counter[JoinKey] = Counter()
    queue: deque[RankNode] = deque()
    joined: list[int] = []
    for run in runs:
        if run.join is not None:
            members.setdefault(run.join, []).append(run)

    def begin(together: Sequence[RankNode]) -> None:
        last = max(together, key=lambda run: run.ready)
        # Measured times of all but the last to arrive contain waiting for it. Else the busiest member says how long.
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
            # Members that never come: the ranks disagree, or the trace of one is cut. The others go on without.
            join(next(iter(arrived)))
        ended = queue.popleft()
        for run in ended.dependents or ():
            if ended.end >= run.ready:
                run.ready, run.because = ended.end, ended
            run.waits -= 1
            if not run.waits:
                is_ready(run)
    return joined


def _critical_path(at: RankNode | None) -> dict[str, int]:
    """The chain that ends with `at`, by what its time was spent on."""
    spent: Counter[str] = Counter()
    while at is not None:
        before = at.because
        # A member of a collective that waited for another one: the path goes through that one, at the same time.
        if before is None or at.join is None or before.begin != at.begin:
            spent[at.category] += at.end - at.begin
            if before is None and at.ready:
                spent[LATE] += at.ready
        at = before
    return dict(spent.most_common())
