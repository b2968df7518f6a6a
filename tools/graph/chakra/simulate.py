"""Plays converted traces of one or more ranks: what runs when, if nothing but their dependencies held it back.

A node begins when all that it waits for has ended. The members of a collective, and both sides of a send, begin
together when the last of them is ready, and take the shortest of their measured times: the longer ones contain the
waiting for the last. What a thread did between its nodes has nodes of its own.
Ranks begin when they began by their clocks, or all at 0 where these are too far apart to be of one window.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from crossrank.comm import is_p2p
from crossrank.tools.graph.chakra.graph import LATE, PAUSE, ChakraNode, Lane
from crossrank.tools.graph.chakra.write import message_ends

HOST = "operations on the host"
GPU = "computation on a GPU"
COMMUNICATION = "communication"
CATEGORIES = (HOST, GPU, COMMUNICATION, PAUSE)
JoinKey = tuple[str, str, int, int, int]
"""Group, kind, source and destination of a P2P message, and its number."""


class RankGraph(msgspec.Struct, gc=False, kw_only=True):
    """One rank's nodes by position, in an order in which all that a node waits for comes before it."""

    rank: int
    lanes: list[str]
    lane: list[int]
    category: list[int]
    """Position in `CATEGORIES`."""
    begin_ns: int
    """First start, since 1970."""
    end_ns: int
    """Last end as measured, since `begin_ns`."""
    start_ns: list[int]
    """As measured, since `begin_ns`."""
    duration_ns: list[int]
    sources: list[list[int]]
    joins: dict[int, JoinKey]
    """Position of a communication -> what its other members have as well."""
    names: list[str]


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
    joined: int = 0
    """Collectives and messages of which several members were played together."""
    alone: int = 0
    """Communications that one rank played alone: the others are not there, or never came."""
    begin_ns: dict[int, list[int]] = field(default_factory=dict)
    """Rank -> when each node begins."""
    run_ns: dict[int, list[int]] = field(default_factory=dict)
    """Rank -> how long each node runs."""

    @property
    def error(self) -> float:
        """Share by which the simulated makespan differs from the measured one."""
        return self.makespan_ns / self.measured_ns - 1 if self.measured_ns else 0.0


def rank_graph(nodes: Sequence[ChakraNode], rank: int, begin_ns: int, length_ns: int) -> RankGraph:
    """A rank's nodes, which are in order, as the simulation takes them.

    `begin_ns` is their first start since 1970, `length_ns` how long they took as measured.
    """
    position = {node.id: index for index, node in enumerate(nodes)}
    lanes: dict[Lane, int] = {}
    begin = min((node.start_ns for node in nodes), default=0)
    graph = RankGraph(
        rank=rank,
        lanes=[],
        lane=[],
        category=[],
        begin_ns=begin_ns,
        end_ns=length_ns,
        start_ns=[node.start_ns - begin for node in nodes],
        duration_ns=[node.duration_ns for node in nodes],
        sources=[[position[dependency.source] for dependency in node.dependencies] for node in nodes],
        joins={},
        names=[node.name for node in nodes],
    )
    numbers: Counter[str] = Counter()
    place: dict[int, int] = {}
    for node in in_group_order(nodes):
        if node.comm is not None and not is_p2p(node.comm.record):
            numbers[node.comm.group.number] += 1
            place[node.id] = numbers[node.comm.group.number]
    for index, node in enumerate(nodes):
        lane = ("communication", "") if node.lane[0] == "communication" else node.lane
        graph.lane.append(lanes.setdefault(lane, len(lanes)))
        graph.category.append(CATEGORIES.index(_category(node)))
        if node.comm is not None:
            graph.joins[index] = _join_key(node, rank, place.get(node.id, 0))
    graph.lanes = [_lane_name(lane) for lane in lanes]
    return graph


def _category(node: ChakraNode) -> str:
    if node.comm is not None:
        return COMMUNICATION
    return PAUSE if node.is_pause else HOST if node.is_cpu else GPU


def _lane_name(lane: Lane) -> str:
    kind, place = lane
    if kind == "stream" and isinstance(place, tuple):
        return f"device {place[0]} stream {place[1]}"
    return f"thread {place}" if kind == "thread" else "communication outside streams"


def _join_key(node: ChakraNode, rank: int, place: int) -> JoinKey:
    assert node.comm is not None
    record, group = node.comm.record, node.comm.group.number
    if is_p2p(record):
        return (group, "message", *message_ends(record, rank), record.p2p_seq or 0)
    return (group, "collective", -1, -1, place)


def in_group_order(nodes: Iterable[ChakraNode]) -> list[ChakraNode]:
    """The communications, those of one group by their sequence numbers where these are known, else by their starts."""
    return sorted((node for node in nodes if node.comm is not None), key=_sequence)


def _sequence(node: ChakraNode) -> tuple[int, int, int]:
    assert node.comm is not None
    return (node.comm.record.seq or 0, node.start_ns, node.id)


def simulate(graphs: Sequence[RankGraph]) -> Simulation:
    """Play all ranks together."""
    members: dict[JoinKey, list[tuple[int, int]]] = defaultdict(list)
    for r, graph in enumerate(graphs):
        for index, key in graph.joins.items():
            members[key].append((r, index))
    late, by_clocks = offsets([(graph.begin_ns, graph.end_ns) for graph in graphs])
    run = _Run(graphs, members, late)
    run.play()
    result = Simulation(
        makespan_ns=max((max(end, default=0) for end in run.end), default=0),
        measured_ns=max((graph.end_ns + offset for graph, offset in zip(graphs, late, strict=True)), default=0),
        by_clocks=by_clocks,
        joined=run.joined,
        alone=run.alone,
        begin_ns={graph.rank: begin for graph, begin in zip(graphs, run.begin, strict=True)},
        run_ns={
            graph.rank: [end - begin for begin, end in zip(begins, ends, strict=True)]
            for graph, begins, ends in zip(graphs, run.begin, run.end, strict=True)
        },
    )
    for r, graph in enumerate(graphs):
        busy: Counter[int] = Counter()
        for index, lane in enumerate(graph.lane):
            if CATEGORIES[graph.category[index]] != PAUSE:
                busy[lane] += run.end[r][index] - run.begin[r][index]
        for lane, total in sorted(busy.items()):
            result.busy_ns[graph.rank, graph.lanes[lane]] = total
        result.waiting_ns[graph.rank] = sum(run.begin[r][i] - run.ready[r][i] for i in graph.joins)
    result.critical_ns = run.critical_path()
    return result


def offsets(spans: Sequence[tuple[int, int]]) -> tuple[list[int], bool]:
    """When each rank begins after the first one, and whether their clocks say so. `spans` are (begin, length)."""
    first = min((begin for begin, _ in spans), default=0)
    late = [begin - first for begin, _ in spans]
    if max(late, default=0) > max((length for _, length in spans), default=0):
        return [0] * len(late), False
    return late, True


class _Run:
    """The state of one play: per rank and node, when it is ready, begins and ends."""

    def __init__(
        self, graphs: Sequence[RankGraph], members: Mapping[JoinKey, list[tuple[int, int]]], late: Sequence[int]
    ) -> None:
        self.graphs = graphs
        self.members = members
        self.ready = [[offset] * len(graph.lane) for graph, offset in zip(graphs, late, strict=True)]
        self.begin = [[-1] * len(graph.lane) for graph in graphs]
        self.end = [[0] * len(graph.lane) for graph in graphs]
        self.because: list[dict[int, tuple[int, int]]] = [{} for _ in graphs]
        """Node -> the node whose end let it begin."""
        self.joined = 0
        self.alone = 0
        self._waits = [[len(set(sources)) for sources in graph.sources] for graph in graphs]
        self._dependents: list[list[list[int]]] = []
        for graph in graphs:
            dependents: list[list[int]] = [[] for _ in graph.lane]
            for index, sources in enumerate(graph.sources):
                for source in set(sources):
                    dependents[source].append(index)
            self._dependents.append(dependents)
        self._arrived: dict[JoinKey, int] = defaultdict(int)
        self._queue: deque[tuple[int, int]] = deque()

    def play(self) -> None:
        for r, waits in enumerate(self._waits):
            for index, count in enumerate(waits):
                if not count:
                    self._is_ready(r, index)
        while True:
            while self._queue:
                self._finish(*self._queue.popleft())
            # Members that never come: the ranks disagree, or the trace of one is cut. The others go on without.
            stuck = next((key for key, count in self._arrived.items() if count), None)
            if stuck is None:
                return
            self._join(
                stuck, [(r, i) for r, i in self.members[stuck] if not self._waits[r][i] and self.begin[r][i] < 0]
            )

    def _is_ready(self, r: int, index: int) -> None:
        key = self.graphs[r].joins.get(index)
        if key is None:
            self.begin[r][index] = self.ready[r][index]
            self.end[r][index] = self.begin[r][index] + self.graphs[r].duration_ns[index]
            self._queue.append((r, index))
            return
        self._arrived[key] += 1
        if self._arrived[key] == len(self.members[key]):
            self._join(key, self.members[key])

    def _join(self, key: JoinKey, joined: list[tuple[int, int]]) -> None:
        self._arrived[key] = 0
        if len(joined) > 1:
            self.joined += 1
        else:
            self.alone += 1
        begin = max(self.ready[r][i] for r, i in joined)
        last = next((r, i) for r, i in joined if self.ready[r][i] == begin)
        duration = min(self.graphs[r].duration_ns[i] for r, i in joined)
        for r, i in joined:
            self.begin[r][i], self.end[r][i] = begin, begin + duration
            if (r, i) != last:
                self.because[r][i] = last
            self._queue.append((r, i))

    def _finish(self, r: int, index: int) -> None:
        end = self.end[r][index]
        for dependent in self._dependents[r][index]:
            if end >= self.ready[r][dependent]:
                self.ready[r][dependent] = end
                self.because[r][dependent] = (r, index)
            self._waits[r][dependent] -= 1
            if not self._waits[r][dependent]:
                self._is_ready(r, dependent)

    def critical_path(self) -> dict[str, int]:
        """The chain that ends last, by what its time was spent on."""
        last = max(
            ((end, r, index) for r, ends in enumerate(self.end) for index, end in enumerate(ends)), default=(0, -1, -1)
        )
        spent: Counter[str] = Counter()
        at: tuple[int, int] | None = (last[1], last[2]) if last[1] >= 0 else None
        while at is not None:
            r, index = at
            graph = self.graphs[r]
            before = self.because[r].get(index)
            # A member of a collective that waited for another one: the path goes through that one, at the same time.
            if before is not None and index in graph.joins and self.begin[before[0]][before[1]] == self.begin[r][index]:
                at = before
                continue
            spent[CATEGORIES[graph.category[index]]] += self.end[r][index] - self.begin[r][index]
            if before is None and (late := self.ready[r][index]):
                spent[LATE] += late
            at = before
        return dict(spent.most_common())
