"""Plays converted traces of one or more ranks: what runs when, if nothing but their dependencies held it back.

A node begins when all that it waits for has ended. The members of a collective, and both sides of a send, begin
together when the last of them is ready, and take the shortest of their measured times: the longer ones contain the
waiting for the last. What a thread did between its nodes has nodes of its own.
Ranks begin when they began by their clocks, or all at 0 where these are too far apart to be of one window.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from crossrank.comm import is_p2p
from crossrank.tools.graph.chakra.chakra_graph import LATE, PAUSE, ChakraNode, Comm, Lane
from crossrank.tools.graph.chakra.write import message_ends

HOST = "operations on the host"
GPU = "computation on a GPU"
COMMUNICATION = "communication"
JoinKey = tuple[str, str, int, int, int]
"""Group, kind, source and destination of a P2P message, and its number."""


class RankGraph(msgspec.Struct, gc=False, kw_only=True):
    """One rank's nodes by position, in an order in which all that a node waits for comes before it."""

    rank: int
    names: list[str]
    lanes: list[str]
    lane: list[int]
    """Position in `lanes`."""
    category: list[str]
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
    lanes: dict[str, int] = {}
    begin = min((node.start_ns for node in nodes), default=0)
    joins: dict[int, JoinKey] = {}
    numbers: Counter[str] = Counter()
    for node, comm in in_group_order(nodes):
        record, group = comm.record, comm.group.number
        if is_p2p(record):
            joins[position[node.id]] = (group, "message", *message_ends(record, rank), record.p2p_seq or 0)
        else:
            numbers[group] += 1
            joins[position[node.id]] = (group, "collective", -1, -1, numbers[group])
    return RankGraph(
        rank=rank,
        names=[node.name for node in nodes],
        lane=[lanes.setdefault(_lane_name(node.lane), len(lanes)) for node in nodes],
        lanes=list(lanes),
        category=[_category(node) for node in nodes],
        begin_ns=begin_ns,
        end_ns=length_ns,
        start_ns=[node.start_ns - begin for node in nodes],
        duration_ns=[node.duration_ns for node in nodes],
        sources=[[position[dependency.source] for dependency in node.dependencies] for node in nodes],
        joins=joins,
    )


def _category(node: ChakraNode) -> str:
    if node.comm is not None:
        return COMMUNICATION
    return PAUSE if node.is_pause else HOST if node.is_cpu else GPU


def _lane_name(lane: Lane) -> str:
    kind, place = lane
    if kind == "stream" and isinstance(place, tuple):
        return f"device {place[0]} stream {place[1]}"
    return f"thread {place}" if kind == "thread" else "communication outside streams"


def in_group_order(nodes: Iterable[ChakraNode]) -> list[tuple[ChakraNode, Comm]]:
    """The communications, those of one group by their sequence numbers where these are known, else by their starts."""
    found = [(node, node.comm) for node in nodes if node.comm is not None]
    return sorted(found, key=lambda entry: (entry[1].record.seq or 0, entry[0].start_ns, entry[0].id))


def simulate(graphs: Sequence[RankGraph]) -> Simulation:
    """Play all ranks together."""
    late, by_clocks = offsets([(graph.begin_ns, graph.end_ns) for graph in graphs])
    run = _Run(graphs, late)
    run.play()
    result = Simulation(
        makespan_ns=max(run.end, default=0),
        measured_ns=max((graph.end_ns + offset for graph, offset in zip(graphs, late, strict=True)), default=0),
        by_clocks=by_clocks,
        critical_ns=run.critical_path(),
        joined=run.joined,
        alone=run.alone,
    )
    first = 0
    for graph in graphs:
        of_rank = slice(first, first + len(graph.names))
        first = of_rank.stop
        begin, ready = run.begin[of_rank], run.ready[of_rank]
        ran = [end - start for start, end in zip(begin, run.end[of_rank], strict=True)]
        busy: Counter[int] = Counter()
        for lane, category, duration in zip(graph.lane, graph.category, ran, strict=True):
            if category != PAUSE:
                busy[lane] += duration
        result.busy_ns |= {(graph.rank, graph.lanes[lane]): total for lane, total in sorted(busy.items())}
        result.waiting_ns[graph.rank] = sum(begin[index] - ready[index] for index in graph.joins)
        result.begin_ns[graph.rank], result.run_ns[graph.rank] = begin, ran
    return result


def offsets(spans: Sequence[tuple[int, int]]) -> tuple[list[int], bool]:
    """When each rank begins after the first one, and whether their clocks say so. `spans` are (begin, length)."""
    first = min((begin for begin, _ in spans), default=0)
    late = [begin - first for begin, _ in spans]
    if max(late, default=0) > max((length for _, length in spans), default=0):
        return [0] * len(late), False
    return late, True


class _Run:
    """The state of one play: when every node is ready, begins and ends. Nodes are counted through all ranks."""

    def __init__(self, graphs: Sequence[RankGraph], late: Sequence[int]) -> None:
        self.ready: list[int] = []
        self.because: dict[int, int] = {}
        """Node -> the node whose end let it begin."""
        self.joined = self.alone = 0
        self._category: list[str] = []
        self._duration: list[int] = []
        self._waits: list[int] = []
        """For how many nodes each still waits."""
        self._dependents: list[list[int]] = []
        self._key: dict[int, JoinKey] = {}
        self._members: dict[JoinKey, list[int]] = defaultdict(list)
        self._arrived: dict[JoinKey, int] = defaultdict(int)
        self._queue: deque[int] = deque()
        for graph, offset in zip(graphs, late, strict=True):
            first = len(self.ready)
            self.ready += [offset] * len(graph.names)
            self._category += graph.category
            self._duration += graph.duration_ns
            self._dependents += ([] for _ in graph.names)
            for index, sources in enumerate(map(set, graph.sources), start=first):
                self._waits.append(len(sources))
                for source in sources:
                    self._dependents[first + source].append(index)
            for index, key in sorted(graph.joins.items()):
                self._key[first + index] = key
                self._members[key].append(first + index)
        self.begin = [-1] * len(self.ready)
        self.end = [0] * len(self.ready)

    def play(self) -> None:
        for index in [index for index, count in enumerate(self._waits) if not count]:
            self._is_ready(index)
        while True:
            while self._queue:
                self._finish(self._queue.popleft())
            # Members that never come: the ranks disagree, or the trace of one is cut. The others go on without.
            stuck = next((key for key, count in self._arrived.items() if count), None)
            if stuck is None:
                return
            self._join(stuck, [i for i in self._members[stuck] if not self._waits[i] and self.begin[i] < 0])

    def _is_ready(self, index: int) -> None:
        key = self._key.get(index)
        if key is None:
            self.begin[index] = self.ready[index]
            self.end[index] = self.begin[index] + self._duration[index]
            self._queue.append(index)
            return
        self._arrived[key] += 1
        if self._arrived[key] == len(self._members[key]):
            self._join(key, self._members[key])

    def _join(self, key: JoinKey, joined: list[int]) -> None:
        self._arrived[key] = 0
        if len(joined) > 1:
            self.joined += 1
        else:
            self.alone += 1
        last = max(joined, key=self.ready.__getitem__)
        duration = min(self._duration[index] for index in joined)
        for index in joined:
            self.begin[index], self.end[index] = self.ready[last], self.ready[last] + duration
            if index != last:
                self.because[index] = last
        self._queue.extend(joined)

    def _finish(self, index: int) -> None:
        end = self.end[index]
        for dependent in self._dependents[index]:
            if end >= self.ready[dependent]:
                self.ready[dependent] = end
                self.because[dependent] = index
            self._waits[dependent] -= 1
            if not self._waits[dependent]:
                self._is_ready(dependent)

    def critical_path(self) -> dict[str, int]:
        """The chain that ends last, by what its time was spent on."""
        spent: Counter[str] = Counter()
        at = max(range(len(self.end)), key=lambda index: (self.end[index], index), default=None)
        while at is not None:
            before = self.because.get(at)
            # A member of a collective that waited for another one: the path goes through that one, at the same time.
            if before is None or at not in self._key or self.begin[before] != self.begin[at]:
                spent[self._category[at]] += self.end[at] - self.begin[at]
                if before is None and (late := self.ready[at]):
                    spent[LATE] += late
            at = before
        return dict(spent.most_common())
