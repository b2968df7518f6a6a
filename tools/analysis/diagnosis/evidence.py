"""What one rank left behind, in columns: a flight-recorder dump or a comms file, read into the same form.

A worker process makes one `RankEvidence` per rank and sends it to the process that compares the ranks. A job has
millions of calls, so a call is a row over arrays of about 50 bytes, and what calls have in common (operation, sizes,
peer: `Signature`; stack frames) stands once in a table.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import msgspec

from crossrank.comm import OPERATIONS, CommRecord
from crossrank.tools.traces.flight_recorder import Frame, OwnStack, Progress, Raised

SCHEDULED, STARTED, RETIRED, COMPLETED = range(4)
"""State of a call. RETIRED: its rank is done with it, which on gloo is also what a call that timed out looks like."""
STATES = ("scheduled", "started", "retired", "completed")

LEFT = ("exit", "disable", "SIGINT", "SIGTERM", "SIGABRT")
"""Reasons of our dumps after which a rank makes no more calls that are seen."""

CUT_SHORT = ("SIGTERM", "SIGINT", "SIGABRT")
"""Those of them that end a rank wherever it is, so that its last call may not be over."""

MAIN_THREAD = "MainThread"

_GOES_ON = ("", "hang", "SIGUSR1", "window", "disable")
"""Reasons after which a rank may still make calls, seen or not."""

RECORDER = "/crossrank/instrument/"
"""Part of the paths of the recorder's own frames."""

_STOPPED_BY_USER = re.compile(r"KeyboardInterrupt\b")
_COMMUNICATION_FAILED = re.compile(
    r"(RuntimeError|Dist\w*Error)\b.*("
    r"connection (closed|reset|refused|was|lost)|broken pipe|(read|write) error|timed? ?out|socket|gloo/transport"
    r"|monitoredBarrier|ncclRemoteError|remote process exited|(was|been) aborted)",
    re.IGNORECASE | re.DOTALL,
)
"""An exception that a rank gets because another one has left, or never came."""

_OF_A_BACKEND = re.compile(
    r"^Dist\w*Error\b|gloo|nccl|ucc_|c10d|monitoredBarrier|ProcessGroup|TCPStore|Operation timed out!", re.IGNORECASE
)
"""What no library but torch.distributed writes into its exceptions."""

_COMMUNICATES = re.compile(r"[/\\]torch[/\\](distributed|autograd|nn[/\\]parallel)[/\\]|[/\\]torch[/\\]_tensor\.py$")
"""Files whose functions communicate, or wait for communication."""

GLOO = "gloo"

Source = Literal["flight", "comms"]


class Signature(msgspec.Struct, frozen=True):
    """What a call is, apart from when and on which group: equal calls of a rank share one."""

    op: str
    """A key of `OPERATIONS`, or the name as it was recorded where that is none."""
    name: str
    """As it was recorded, without the backend."""
    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    in_dtypes: tuple[str, ...] = ()
    out_dtypes: tuple[str, ...] = ()
    peer: int | None = None
    """Global rank at the other end of a send or receive; None where it is not known."""
    root: int | None = None
    reduce: str | None = None
    tag: int | None = None
    members: tuple[Signature, ...] = ()
    """The calls that were coalesced into this one launch."""
    comparable: bool = True
    """False where it was noted by other means than the other ranks' calls: gloo's recorder notes what a call is made of
    (a reduce_scatter is an all_reduce there), so that only root and reduction can be compared."""

    @property
    def is_p2p(self) -> bool:
        row = OPERATIONS.get(self.op)
        return row is not None and row.p2p

    def dtype(self) -> str | None:
        for side in (self.in_dtypes, self.out_dtypes):
            if side:
                return side[0]
        return self.members[0].dtype() if self.members else None


@dataclass
class Calls:
    """Calls in the order in which their rank made them; one row over all columns is one call."""

    group: array[int] = field(default_factory=lambda: array("I"))
    """Index into the rank's groups."""
    seq: array[int] = field(default_factory=lambda: array("q"))
    """collective_seq_id, or p2p_seq_id for P2P; the calls of one P2P batch share it."""
    signature: array[int] = field(default_factory=lambda: array("I"))
    state: bytearray = field(default_factory=bytearray)
    created: array[int] = field(default_factory=lambda: array("q"))
    """ns since 1970 when the CPU made the call; so are `started` and `completed`, 0 = not known."""
    started: array[int] = field(default_factory=lambda: array("q"))
    completed: array[int] = field(default_factory=lambda: array("q"))
    stack: array[int] = field(default_factory=lambda: array("I"))
    record: array[int] = field(default_factory=lambda: array("q"))
    """record_id of the dump, or id of the comms record."""

    def __len__(self) -> int:
        return len(self.seq)

    def append(
        self,
        *,
        group: int,
        seq: int,
        signature: int,
        state: int,
        created: int,
        started: int = 0,
        completed: int = 0,
        stack: int = 0,
        record: int = 0,
    ) -> None:
        self.group.append(group)
        self.seq.append(seq)
        self.signature.append(signature)
        self.state.append(state)
        self.created.append(created)
        self.started.append(started)
        self.completed.append(completed)
        self.stack.append(stack)
        self.record.append(record)

    def in_order(self, rows: list[int]) -> Calls:
        """The same calls with `rows[0]` first."""
        return Calls(
            group=array("I", (self.group[row] for row in rows)),
            seq=array("q", (self.seq[row] for row in rows)),
            signature=array("I", (self.signature[row] for row in rows)),
            state=bytearray(self.state[row] for row in rows),
            created=array("q", (self.created[row] for row in rows)),
            started=array("q", (self.started[row] for row in rows)),
            completed=array("q", (self.completed[row] for row in rows)),
            stack=array("I", (self.stack[row] for row in rows)),
            record=array("q", (self.record[row] for row in rows)),
        )


class GroupClaim(msgspec.Struct, frozen=True):
    """A process group as one rank knows it, or those of its calls that are counted apart."""

    name: str
    desc: str
    ranks: tuple[int, ...] | None
    """Global ranks in the group's order; None where the rank's files do not say."""
    apart: str = ""
    """Of what calls it is: `monitored_barrier_`, which torch's recorder neither notes nor counts, or `gloo` beside
    another backend of the same group."""


@dataclass
class RankEvidence:
    """All that is known of one rank."""

    rank: int
    path: str
    source: Source
    version: str = ""
    backend: str = ""
    host: str = ""
    world_size: int | None = None
    """As the rank's own header says it."""
    groups: list[GroupClaim] = field(default_factory=list)
    calls: Calls = field(default_factory=Calls)
    signatures: list[Signature] = field(default_factory=list)
    stacks: list[tuple[Frame, ...]] = field(default_factory=lambda: [()])
    """Innermost frame first; the first one is that of calls without a stack."""
    collectives_seen: dict[int, int] = field(default_factory=dict)
    """Index of the group -> the highest collective_seq_id on any of its entries, those of P2P included."""
    with_p2p: set[int] = field(default_factory=set)
    """Groups on which there have been P2P calls, whether or not they are among the entries."""
    progress: dict[int, Progress] = field(default_factory=dict)
    """Index of the group -> how far the rank came on it, where the dump says so."""
    has_status: bool = False
    """The dump says how far some group came, whether or not that could be joined to a group."""
    all_joined: bool = False
    """Every status of the dump was joined to a group, so a group without one was never used."""
    active_only: bool = False
    """Completed calls were left out of the dump."""
    filtered: bool = False
    """A comms file that leaves out what stays inside a node (TRACING=CROSSNODE)."""
    inside_node: set[str] = field(default_factory=set)
    """Names of the groups whose calls it leaves out."""
    wrapped: bool = False
    """Calls from before the first one fell out of the ring."""
    recorded_from: dict[str, int] = field(default_factory=dict)
    """Name of a group -> how many collectives there were on it before those that comms files number from 1."""
    unawaited: set[int] = field(default_factory=set)
    """Rows of sends and receives that did not keep their rank from going on to later calls."""
    numbered_pairs: bool = False
    """`seq` of P2P counts the calls to that peer from 1, as in comms files, instead of all P2P of the group."""
    taken_at: int | None = None
    """ns since 1970 when the dump was taken; None where it does not say."""
    reason: str = ""
    error: str | None = None
    """The exception that ended the process."""
    ended: bool = False
    """The rank ended its recording properly."""
    causes: tuple[str, ...] = ()
    """Texts of the exceptions that it was raised from, the direct cause first."""
    traceback: tuple[Frame, ...] = ()
    """Where the exception that ended the process was raised, innermost frame first."""
    of_threads: list[Raised] = field(default_factory=list)
    """Exceptions that ended other threads than the main one; the process goes on."""
    own_stacks: list[OwnStack] = field(default_factory=list)
    """Where the threads were when the dump was taken."""
    problems: list[str] = field(default_factory=list)

    def is_gloo(self, local: int | None) -> bool:
        """Whether the rank's calls on one of its groups are gloo's, which reports no ends."""
        return self.backend == GLOO or (local is not None and self.groups[local].apart == GLOO)

    def take_exceptions(self, exceptions: Sequence[Raised], error: str | None = None) -> None:
        """Note what ended the process and its threads; `error` is what is known of a file that lists none."""
        main = next((one for one in exceptions if one.thread == MAIN_THREAD), None)
        if main is not None:
            self.error, self.traceback, self.causes = main.error, tuple(main.frames), tuple(main.causes)
        elif error is not None and not exceptions:
            self.error = error
        self.of_threads = [one for one in exceptions if one.thread != MAIN_THREAD] or self.of_threads

    @property
    def is_gone(self) -> bool:
        """Whether its process ended: what it had not done by then it never did."""
        return self.reason not in _GOES_ON or self.error is not None

    @property
    def is_final(self) -> bool:
        """Whether it made no call after its dump, as far as its dump goes: it ended, or hangs."""
        return self.is_gone or self.reason == "hang"

    @property
    def died_unseen(self) -> bool:
        """Whether nothing but an unfinished comms file is left: its last calls may not have reached the disk."""
        return self.source == "comms" and not self.ended

    @property
    def was_terminated(self) -> bool:
        """Whether somebody outside ended its process: a scheduler, the launcher, its user."""
        return self.reason in ("SIGTERM", "SIGINT") and not self.has_raised

    @property
    def has_raised(self) -> bool:
        """Whether its process ended by an exception of its own."""
        error = self.error
        return error is not None and not self.has_failed and _STOPPED_BY_USER.match(error) is None

    @property
    def has_failed(self) -> bool:
        """Whether its process ended by a communication that failed: because of others, as far as is known."""
        if self.error is None:
            return False
        if any(_is_of_communication(text) for text in (self.error, *self.causes)):
            return True
        # Other libraries' connections break and time out as well.
        inner = next((frame for frame in self.traceback if RECORDER not in frame.filename), None)
        in_torch = inner is None or _COMMUNICATES.search(inner.filename) is not None
        return in_torch and _COMMUNICATION_FAILED.search(self.error) is not None

    @property
    def has_left(self) -> bool:
        """Whether its process ended by its own doing, not because others had ended it or theirs."""
        return self.has_raised or (self.reason == "exit" and self.error is None)


def _is_of_communication(text: str) -> bool:
    return _COMMUNICATION_FAILED.search(text) is not None and _OF_A_BACKEND.search(text) is not None


Thing = TypeVar("Thing", bound=Hashable)


class Table(Generic[Thing]):
    """Things, each once, numbered in the order in which they are first met."""

    def __init__(self, *first: Thing) -> None:
        self.rows: list[Thing] = list(first)
        self._numbers = {thing: number for number, thing in enumerate(first)}

    def number(self, thing: Thing) -> int:
        found = self._numbers.get(thing)
        if found is None:
            found = self._numbers[thing] = len(self.rows)
            self.rows.append(thing)
        return found


def signature_of_record(record: CommRecord) -> Signature:
    """The signature of a call as a comms file has it."""
    dtypes = (record.dtype,) if record.dtype else ()
    return Signature(
        op=record.op,
        name=record.c10d,
        inputs=tuple(map(tuple, record.inputs)),
        outputs=tuple(map(tuple, record.outputs)),
        in_dtypes=dtypes,
        out_dtypes=dtypes,
        peer=record.peer,
        root=record.root,
        reduce=record.reduce,
        tag=record.tag,
    )
