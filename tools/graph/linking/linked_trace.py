"""The linked graph of one rank: host operations, GPU activities and communications, and why one waits for another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Annotated, Any, Literal

import msgspec

import crossrank
from crossrank.comm import MOST_RANKS, CommRecord, Group, Int, Number, is_p2p
from crossrank.privacy import Privacy
from crossrank.tools.traces.execution_trace import HostOp as HostOp

EdgeKind = Literal[
    "caller",
    "program_order",
    "launch",
    "stream",
    "inter_thread",
    "forward_backward",
    "sync",
    "stream_wait",
    "group_order",
]

EDGE_KINDS: dict[EdgeKind, str] = {
    "caller": "the host operation that called it",
    "program_order": "the previous operation of its thread",
    "launch": "the host operation that launched the GPU activity",
    "stream": "the previous activity on the same stream",
    "inter_thread": "the last operation of another thread before this thread started or continued after a pause",
    "forward_backward": "the forward operation of this gradient",
    "sync": "the GPU activity that the host waited for before it",
    "stream_wait": "the activity of another stream that its stream waits for",
    "group_order": "the previous communication of the same process group",
}


OTHER_ITERATIONS = (
    "the execution traces and the Kineto traces have different steps of one job: times are those of the Kineto "
    "traces, and a size is known only where all calls of an operation have the same"
)


class Edge(msgspec.Struct, frozen=True, gc=False):
    """`target` cannot start before `source` has ended. For `caller`, `program_order`, `launch`, `forward_backward` and
    `group_order`: before `source` has started."""

    source: int
    target: int
    kind: EdgeKind
    inferred: bool = False
    """Whether it was concluded from times and names, not recorded."""
    slack_ns: int | None = None
    """Time from the end of the source until what waited continued; small if it really waited. For a stream: from the
    end of the source or the launch of the target, the later one, to the start of the target."""


class Activity(msgspec.Struct, gc=False):
    """A kernel, copy or memset on a GPU."""

    id: int
    """Continues the numbers of the host nodes, ordered by start."""
    name: str
    category: str
    """kernel, gpu_memcpy or gpu_memset."""
    device: int | str | None
    stream: int | str | None
    start_ns: int
    duration_ns: int
    correlation: int | None
    host: int | None
    """Id of the innermost host node around the launch; None if there is none, see `unlinked`."""
    unlinked: str | None
    args: msgspec.Raw
    """As in the Kineto trace."""


class Communication(msgspec.Struct, gc=False, kw_only=True):
    """One collective or P2P call, from any source."""

    record: CommRecord
    """`t` is in ns on the clock of the trace, but on the rank's clock if the record is from its comms file."""
    group: Group | None = None
    origin: Annotated[str, Privacy.WORD]
    """The source of the record: a key of `communications.SOURCES`."""
    host: Number | None = None
    """Id of the host node of the record; None for a kernel without one."""
    activities: list[Number] = []
    """Ids of the communication kernels launched for it."""
    work: Number | None = None
    """Id of the host node that is the range of its Work, if a backend without GPU kernels ran it."""
    seq_counted: bool = False
    """Whether `seq` and `p2p_seq` were counted from the start of the trace, not recorded."""

    @property
    def order(self) -> tuple[object, ...]:
        """Key that is equal for communications in one order: those of a group. For P2P, peer and direction must be
        equal too."""
        record = self.record
        return (record.pg, record.op, record.peer) if is_p2p(record) else (record.pg,)


@dataclass(kw_only=True)
class MatchReport:
    """What matched by which method, what did not, and why. All counts are of this rank and trace."""

    host_nodes: int = 0
    """Nodes of the execution trace that have a RecordFunction, and so could have an event."""
    host_matched: dict[str, int] = field(default_factory=dict)
    """Method -> number of nodes."""
    host_unmatched: dict[str, int] = field(default_factory=dict)
    """Reason -> number of nodes."""
    host_unmatched_names: dict[str, int] = field(default_factory=dict)
    """The most frequent names of unmatched nodes."""
    kineto_unmatched: dict[str, int] = field(default_factory=dict)
    """Reason -> number of host events in the Kineto trace without a node."""
    activities: dict[str, int] = field(default_factory=dict)
    """Category -> number of GPU activities in the Kineto trace."""
    activities_linked: dict[str, int] = field(default_factory=dict)
    """Method -> number of activities with a host node."""
    activities_unlinked: dict[str, int] = field(default_factory=dict)
    """Reason -> number of activities of this trace without a host node. The graph has them."""
    activities_outside: dict[str, int] = field(default_factory=dict)
    """Reason -> number of activities that do not belong to this trace. The graph does not have them."""
    communications: dict[str, int] = field(default_factory=dict)
    """Source -> number of communications."""
    communication_kernels_alone: int = 0
    """Communication kernels without a call around them."""
    syncs: dict[str, int] = field(default_factory=dict)
    """Kind of synchronization -> number of events, or of calls if inferred."""
    syncs_unresolved: dict[str, int] = field(default_factory=dict)
    """Reason -> number of synchronizations without an edge."""
    edges: dict[str, int] = field(default_factory=dict)
    """Kind of edge, with the prefix `inferred ` if it is -> number of edges."""
    of_other_iterations: int = 0
    """Operations whose times are from another step than the execution trace."""
    doubts: list[str] = field(default_factory=list)
    """Signs that the two files are not of the same run."""
    damage: list[str] = field(default_factory=list)
    """Damaged parts of the files, which were skipped."""
    unread: dict[str, int] = field(default_factory=dict)
    """Category -> number of Kineto events that are not part of the graph."""
    warnings: list[str] = field(default_factory=list)

    @property
    def caveats(self) -> list[str]:
        """Caveats for every number from this trace."""
        left_out = [f"{count} GPU activities {reason} are skipped" for reason, count in self.activities_outside.items()]
        return [OTHER_ITERATIONS, *left_out] if self.of_other_iterations else left_out

    @property
    def host_rate(self) -> float:
        return sum(self.host_matched.values()) / self.host_nodes if self.host_nodes else 1.0

    @property
    def activity_rate(self) -> float:
        linked = sum(self.activities_linked.values())
        total = linked + sum(self.activities_unlinked.values())
        return linked / total if total else 1.0


class Provenance(msgspec.Struct, kw_only=True):
    """The origin of a linked trace, as its file has it."""

    version: Annotated[str, Privacy.VERSION] = crossrank.__version__
    rank: Number | None
    world_size: Number | None
    schema: Annotated[str, Privacy.VERSION] = msgspec.field(name="et_schema")
    """Schema of the execution trace."""
    base_ns: Annotated[Int, Privacy.WALL] = msgspec.field(name="base_time_ns")
    """ns since 1970 at time 0 of the trace."""
    iterations: list[tuple[Number, Annotated[Int, Privacy.WALL]]] = msgspec.field(
        name="iterations_ns", default_factory=list
    )
    """(step, its start on the clock of the trace) as the profiler marked them, and the end of the last step."""
    inputs: dict[Annotated[str, Privacy.FILE], Annotated[str, Privacy.DIGEST]]
    """File name -> SHA-256 of its uncompressed content."""
    groups: list[Group]
    report: Annotated[MatchReport, Privacy.MIXED] = msgspec.field(name="match")

    def __post_init__(self) -> None:
        if self.world_size is not None and not 0 < self.world_size <= MOST_RANKS:
            self.report.doubts.append(f"the trace gives the job {self.world_size} ranks, which is not valid")
            self.world_size = None


class LinkedTrace(Provenance, kw_only=True):
    """Everything that one rank did in one window, as one graph."""

    kineto_rank: int | None = None
    """The rank in the Kineto trace's `distributedInfo`."""
    pid: int | None
    time: str | None
    start_ts: int | None
    finish_ts: int | None
    host: list[HostOp]
    """Ordered by id."""
    activities: list[Activity]
    """Ordered by id and by start."""
    communications: list[Communication]
    edges: list[Edge]
    text: str = ""
    """Why the trace is empty, if nothing was linked."""

    @classmethod
    def nothing(cls, rank: int, why: str) -> LinkedTrace:
        """Return an empty graph with the reason `why`."""
        none: dict[str, Any] = dict.fromkeys(("world_size", "pid", "time", "start_ts", "finish_ts"))
        empty: dict[str, Any] = {name: [] for name in ("groups", "host", "activities", "communications", "edges")}
        return cls(**none, **empty, rank=rank, schema="", base_ns=0, inputs={}, report=MatchReport(), text=why)

    def __repr__(self) -> str:
        if self.text:
            return self.text
        counts = (len(self.host), "host nodes"), (len(self.activities), "activities"), (len(self.edges), "edges")
        things = ", ".join(f"{count:,} {what}" for count, what in counts)
        return f"<LinkedTrace of rank {self.rank}: {things}, {len(self.communications):,} communications>"


def by_begin(calls: Iterable[tuple[int | None, Communication]]) -> list[Communication]:
    """Order communications by their times in ns. `calls` is in the order of the calls, with kernels without a call
    last. A communication without a time gets the time of the one before it."""
    begun, time = [], 0
    for start, communication in calls:
        time = time if start is None else start
        begun.append((time, communication))
    return [communication for _, communication in sorted(begun, key=itemgetter(0))]
