"""One rank, from any kind of file: its calls in columns, its groups, its progress, and what could not be read.

A job has millions of calls. What calls share (operation, sizes, peer, source line) is stored once, as a `CommRecord`
without number and times. A call is a row of arrays. Readers make a `RankTrace` in a worker process and send it to the
process that matches the ranks.
"""

from __future__ import annotations

import pickle
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from crossrank.comm import (
    MOST,
    UNKNOWN_SIZE,
    UNKNOWN_STEP,
    CommRecord,
    Group,
    crosses_nodes,
    has_possible_size,
    has_size,
    is_p2p,
)
from crossrank.tools.traces.busy import Busy
from crossrank.tools.traces.ending import Ending
from crossrank.tools.traces.flight.dump import Frame, Progress

if TYPE_CHECKING:
    from typing_extensions import Self

SCHEDULED, STARTED, RETIRED, COMPLETED = range(4)
"""State of a call. RETIRED: its rank has finished it, or on gloo, it may have timed out."""
STATES = ("scheduled", "started", "retired", "completed")

GLOO = "gloo"


class _Columns:
    """Arrays of one length: one row of all arrays is one object."""

    def take(self, rows: Sequence[int]) -> Self:
        """These rows, in their order."""
        columns = {name: column for name, column in vars(self).items() if isinstance(column, array)}
        taken = {name: array(column.typecode, [column[row] for row in rows]) for name, column in columns.items()}
        return replace(self, **taken)  # type: ignore[type-var]


@dataclass
class Calls(_Columns):
    """Calls in the order in which their rank made them; one row of all columns is one call.

    Times are ns since 1970 on the rank's own clock, 0 = unknown.
    """

    group: array[int] = field(default_factory=lambda: array("I"))
    """Index into the rank's groups."""
    signature: array[int] = field(default_factory=lambda: array("I"))
    """Index into the rank's signatures."""
    number: array[int] = field(default_factory=lambda: array("q"))
    """n-th collective of the group, or n-th send or receive (see `RankTrace.numbered_pairs`); 0 = unknown, -1 = no
    number that can be compared with those of other calls."""
    id: array[int] = field(default_factory=lambda: array("q"))
    """Id of the comms record, record_id of the dump, or a running number."""
    batch: array[int] = field(default_factory=lambda: array("q"))
    """Id of the first call of its launch; -1 = it was launched alone."""
    step: array[int] = field(default_factory=lambda: array("i"))
    state: array[int] = field(default_factory=lambda: array("B"))
    called: array[int] = field(default_factory=lambda: array("q"))
    """When the CPU made the call."""
    began: array[int] = field(default_factory=lambda: array("q"))
    """When the communication started: its kernel, or on a backend without kernels, its Work."""
    ended: array[int] = field(default_factory=lambda: array("q"))
    took: array[int] = field(default_factory=lambda: array("q"))
    """ns from start to end, if measured separately; 0 = it was not."""
    stack: array[int] = field(default_factory=lambda: array("I"))
    """Index into the rank's stacks."""
    thread: array[int] = field(default_factory=lambda: array("q"))
    """System id of the thread that made the call, as the process has it; 0 = unknown."""

    def __len__(self) -> int:
        return len(self.signature)

    def append(
        self,
        *,
        group: int,
        signature: int,
        number: int,
        id: int,
        called: int,
        batch: int = -1,
        step: int = 0,
        state: int = COMPLETED,
        began: int = 0,
        ended: int = 0,
        took: int = 0,
        stack: int = 0,
        thread: int = 0,
    ) -> None:
        self.group.append(group)
        self.signature.append(signature)
        self.number.append(number)
        self.id.append(id)
        self.batch.append(batch)
        self.step.append(step)
        self.state.append(state)
        self.called.append(called)
        self.began.append(began)
        self.ended.append(ended)
        self.took.append(took)
        self.stack.append(stack)
        self.thread.append(thread)

    def extend(self, columns: Mapping[str, NDArray[Any]]) -> None:
        """Append calls that are already columns. Columns that are not given are 0."""
        count = len(columns["signature"])
        for one in fields(self):
            column = getattr(self, one.name)
            values = columns.get(one.name, np.zeros(count))
            column.frombytes(values.astype(np.dtype(column.typecode)).tobytes())


def sort_by_time(trace: RankTrace) -> None:
    """Put the calls in the order in which they were made."""
    called = trace.calls.called
    order = sorted(range(len(called)), key=called.__getitem__)
    new_of = {old: new for new, old in enumerate(order)}
    trace.unawaited, trace.waited, trace.awaited = (
        {new_of[old] for old in rows} for rows in (trace.unawaited, trace.waited, trace.awaited)
    )
    trace.row_of_thread = {thread: new_of[old] for thread, old in trace.row_of_thread.items()}
    trace.calls = trace.calls.take(order)


Thing = TypeVar("Thing")


class Interned(Generic[Thing]):
    """Distinct things, numbered in the order of their first occurrence."""

    def __init__(self, *first: Thing, key: Callable[[Thing], Hashable] = lambda thing: thing) -> None:
        """`key` returns what equal things share, for things that cannot be compared themselves."""
        self.rows: list[Thing] = list(first)
        self._key = key
        self._numbers = {key(thing): number for number, thing in enumerate(first)}

    def number(self, thing: Thing) -> int:
        key = self._key(thing)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.rows)
            self.rows.append(thing)
        return found


_OWN: dict[str, Any] = dict.fromkeys(("id", "t", "step", "epoch"), 0)
_OWN |= dict.fromkeys(("seq", "p2p_seq", "batch", "thread"))
"""Fields that may differ between equal calls."""


class Signatures(Interned[CommRecord]):
    """Records without `_OWN`. They have lists, so they are compared as encoded bytes."""

    def __init__(self, *first: CommRecord) -> None:
        super().__init__(*first, key=msgspec.msgpack.Encoder().encode)

    def of(self, record: CommRecord) -> int:
        """Number of a call's signature. An impossible size, from the extents in a damaged file, becomes `MOST + 1`
        without extents: it fits into 64 bits, and every sum skips it."""
        if not has_possible_size(record) and record.bytes != UNKNOWN_SIZE:
            nothing: dict[str, Any] = {"in_split": None, "out_split": None, "inputs": [], "outputs": []}
            record = msgspec.structs.replace(record, bytes=MOST + 1, **nothing)
        return self.number(msgspec.structs.replace(record, **_OWN))


@dataclass
class Waits(_Columns):
    """How the host waited for its calls, by row, for replay. Only sources that record waits have it."""

    before: array[int] = field(default_factory=lambda: array("q"))
    """The row before whose launch the rank waited for the call (`len(calls)`: at the end); -1 = unknown."""
    blocking: array[int] = field(default_factory=lambda: array("b"))
    """1 = the call blocked the rank until it finished, 0 = it did not, -1 = unknown."""
    returned: array[int] = field(default_factory=lambda: array("q"))
    """ns since 1970 when the launch returned; a wait for the end comes later. 0 = unknown, or the host does not follow
    the communication (on a GPU, except for barriers)."""
    recorded: int = 0
    """Recorded waits whose call is known."""
    without_call: int = 0
    """Recorded waits for calls that began before the trace."""


@dataclass
class HostWaits(_Columns):
    """Waits of a thread of the rank for a call; one row of all columns is one wait. Times are as in `Calls`."""

    row: array[int] = field(default_factory=lambda: array("q"))
    """Row of the call; -1 = unknown, or of a step that was not requested."""
    began: array[int] = field(default_factory=lambda: array("q"))
    ended: array[int] = field(default_factory=lambda: array("q"))
    waited_in: array[int] = field(default_factory=lambda: array("B"))
    """Index into `recording.WAITED_IN`."""

    def __len__(self) -> int:
        return len(self.row)


class RankGroup(msgspec.Struct, frozen=True):
    """A process group as one rank knows it, or a part of its calls that is counted separately."""

    group: Group
    apart: str = ""
    """Which calls are counted separately: `monitored_barrier_`, which torch's recorder neither records nor counts;
    `gloo` in a group with another backend; an operation (NCCL Inspector). Empty = the others."""

    def __reduce__(self) -> tuple[object, ...]:
        # Groups may have thousands of members, and ranks share them: equal groups from workers become one object.
        return _shared_group, (pickle.dumps((self.group, self.apart)),)


@lru_cache(maxsize=1 << 14)
def _shared_group(pickled: bytes) -> RankGroup:
    return RankGroup(*pickle.loads(pickled))


@dataclass
class DumpState:
    """What a flight-recorder dump has in addition to its entries, and what its entries lack."""

    progress: dict[int, Progress] = field(default_factory=dict)
    """Index of the group -> progress of the rank on it, if the dump has it."""
    has_status: bool = False
    """The dump has the progress of some group, whether or not the group was found."""
    all_joined: bool = False
    """The group of every status was found, so a group without a status was never used."""
    collectives_seen: dict[int, int] = field(default_factory=dict)
    """Index of the group -> the highest collective_seq_id on any of its entries, those of P2P included."""
    with_p2p: set[int] = field(default_factory=set)
    """Groups with P2P calls, whether or not these are among the entries."""
    launching: set[int] = field(default_factory=set)
    """Ids of the calls that the rank is launching: NCCL may block there until the other ranks arrive."""
    waits_for_unknown: bool = False
    """It waits in a call whose other ranks are unknown."""
    of_log: bool = False
    """It is what lines of a log say of the rank, not a dump."""
    active_only: bool = False
    """Completed calls were left out of the dump."""
    wrapped: bool = False
    """Earlier calls fell out of the ring."""
    left_out: int = 0
    """Number of entries that were not requested."""
    has_no_entries: bool = False
    """The calls are those that crossrank recorded: torch recorded none."""
    ends_frozen: bool = False
    """Ends are not recorded: with TORCH_NCCL_BLOCKING_WAIT=1, or once the rank is in `destroy_process_group`, for
    which `ProcessGroupNCCL2` stops the thread that records them."""
    hosts_wait: bool = False
    """Hosts wait for each call to finish: with TORCH_NCCL_BLOCKING_WAIT=1."""
    recorded_from: dict[str, int] = field(default_factory=dict)
    """Name of a group -> number of its collectives before number 1 of the comms file."""


@dataclass
class RankTrace:
    """One rank."""

    rank: int | None
    """None if neither the name of the file nor its content has it."""
    path: str
    source: str
    """Kind of the file: a key of `discover.WHAT`, or `plan`."""
    calls: Calls = field(default_factory=Calls)
    signatures: list[CommRecord] = field(default_factory=list)
    groups: list[RankGroup] = field(default_factory=list)
    stacks: list[tuple[Frame, ...]] = field(default_factory=lambda: [()])
    """Innermost frame first. The first stack is that of calls without a stack."""
    group_rank: dict[int, int] = field(default_factory=dict)
    """Index of a group -> rank within the group, if the file has no global ranks."""
    waits: Waits | None = None
    host_waits: HostWaits = field(default_factory=HostWaits)
    busy: Busy = field(default_factory=Busy)

    world_size: int | None = None
    version: str = ""
    """Version of the file's format, as in the file."""
    host: str = ""
    node: str = ""
    backend: str = ""
    clock: str = ""
    """Ranks with the same text have the same clock; empty = unknown."""
    about: dict[str, str] = field(default_factory=dict)
    """Versions and settings, as the header has them."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """(step, its start in ns since 1970), in order. The last one has no end."""
    profiler_steps: frozenset[int] | None = None
    """Steps in which the profiler of a window started or stopped on this rank; None = unknown."""
    records_steps: bool = False
    """Whether each call has its step in the file."""
    span: tuple[int, int] | None = None
    """Start and end of the run, in ns since 1970; None = unknown."""

    numbered: bool = True
    """Whether numbers are the same on all ranks; otherwise calls are counted from the start of the file."""
    numbered_pairs: bool = False
    """Whether sends and receives are numbered per pair of ranks, as in comms files, not per group."""
    timed: bool = True
    """Whether `called` is the time of the call."""
    timed_by: str = "comms"
    """What measured starts and ends: a key of `launches.TIMED_BY`."""
    placed: bool = True
    """Whether starts and ends are exact, except for calls with `took`; otherwise only durations are."""
    comparable: bool = True
    """Whether collectives can be compared with those of the other ranks. gloo's recorder records the operations that a
    call consists of (an all_reduce for a reduce_scatter). With such dumps, only root and reduction of a comms file can
    be compared."""
    filtered: bool = False
    """Calls inside a node were not recorded (TRACING=CROSSNODE of earlier versions)."""
    left_out: int = 0
    """Number of these calls."""
    dropped: int = 0
    """Number of calls that the recorder itself could not keep."""
    lost_after: int | None = None
    """Id of the call before the last row that may be a call and cannot be read; -1 = it is before all calls, None = all
    rows can be read."""
    is_copy: bool = False
    """The file is of another rank, whose calls replace those of this rank."""
    starts_late: bool = False
    """The file has only the last calls of the rank."""
    skipped: tuple[int, int] = (0, 0)
    """(calls, bytes) of steps that were not requested."""
    until: int | None = None
    """Time of the first call after the requested steps, in ns since 1970; None = there is none."""
    unawaited: set[int] = field(default_factory=set)
    """Rows of sends and receives that do not block later calls of their rank."""
    waited: set[int] = field(default_factory=set)
    """Rows of sends and receives for which the rank has waited, to the end of the wait."""
    awaited: set[int] = field(default_factory=set)
    """Rows of calls that a thread of the rank waited for when its dump was taken."""
    row_of_thread: dict[int, int] = field(default_factory=dict)
    """Thread -> row of the call that it waited for then."""

    log_lines: list[str] = field(default_factory=list)
    """Lines of logs about the rank, as `file:line: text`."""
    ending: Ending = field(default_factory=Ending)
    dump: DumpState = field(default_factory=DumpState)
    attributed: Counter[str] = field(default_factory=Counter)
    """How calls got their times -> number of calls or kernels."""
    unattributed: Counter[str] = field(default_factory=Counter)
    """What has no time or no call, and why -> how many."""
    unattributed_ns: int = 0
    """Time of the communication kernels without a call."""
    sizes_of_others: frozenset[str] = frozenset()
    """Operations with sizes that are from another step than their times, and that differ between calls. To compare
    sizes with times, these sizes count as unknown."""
    matched: dict[str, tuple[int, int]] = field(default_factory=dict)
    """What was linked -> (matched, total)."""
    problems: list[str] = field(default_factory=list)
    """Parts of the file that could not be read."""
    notes: list[str] = field(default_factory=list)

    @property
    def named_problems(self) -> list[str]:
        """The problems, each with the file."""
        return [f"{self.path}: {problem}" for problem in self.problems]

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def numbers(self) -> NDArray[np.int64]:
        """A unique number for each call: its id in the file, or its row if the ids are not unique."""
        ids = np.frombuffer(self.calls.id, np.int64)
        has_own = len(np.unique(ids)) == len(ids) and not (ids < 0).any()
        return ids if has_own else np.arange(len(ids))

    @property
    def call_steps(self) -> NDArray[np.int32]:
        """The step of each call, as recorded, else by the time at which the host made it; `UNKNOWN_STEP` = unknown."""
        if self.records_steps:
            return np.frombuffer(self.calls.step, np.int32)
        called = np.frombuffer(self.calls.called, np.int64)
        numbers, begins = np.array([*self.steps, (UNKNOWN_STEP, _LATEST)], np.int64).T
        place = np.searchsorted(begins, called, side="right") - 1
        is_known = (place >= 0) & (place < len(self.steps) - 1) & self.timed
        return np.where(is_known, numbers[place], UNKNOWN_STEP).astype(np.int32)

    def lose_after(self, call: int) -> None:
        """Note that what follows the call with this id, or the call itself, cannot be read."""
        self.lost_after = max(call, call if self.lost_after is None else self.lost_after)

    def may_lack_calls(self, rows: Sequence[int]) -> bool:
        """Return whether the file may have had a call after those of `rows` that it does not show."""
        if self.dropped or self.lost_after is None:
            return bool(self.dropped)
        return self.lost_after >= max((self.calls.id[row] for row in rows), default=-1)

    @property
    def step_spans(self) -> list[tuple[int, int, int]]:
        """(step, start, end) of each step whose end is known: it is the start of the next one, so the last one has
        none, nor has one before a gap."""
        return [(step, begin, end) for (step, begin), (other, end) in pairwise(self.steps) if other == step + 1]

    @property
    def ended_steps(self) -> int:
        """The number of steps with a start and an end."""
        return len(self.step_spans)

    def knows_size(self, record: CommRecord) -> bool:
        """Whether the size of a call is known, and from the same step as its time."""
        return has_size(record) and record.op not in self.sizes_of_others

    def record(self, row: int) -> CommRecord:
        """A call as a record. `t` is its time in ns since 1970."""
        calls, signature = self.calls, self.signatures[self.calls.signature[row]]
        number = calls.number[row] or None
        p2p = is_p2p(signature)
        return msgspec.structs.replace(
            signature,
            id=calls.id[row],
            t=calls.called[row],
            seq=None if p2p else number,
            p2p_seq=number if p2p else None,
            batch=None if calls.batch[row] < 0 else calls.batch[row],
            step=calls.step[row],
            thread=calls.thread[row] or None,
        )

    def took(self, row: int) -> int | None:
        """ns from the start of a call's communication to its end; None = unknown."""
        calls = self.calls
        if calls.took[row]:
            return calls.took[row]
        return calls.ended[row] - calls.began[row] if calls.ended[row] and calls.began[row] else None

    def records(self) -> Iterator[CommRecord]:
        """All calls as records, in their order."""
        return map(self.record, range(len(self.calls)))

    def is_gloo(self, group: int | None) -> bool:
        """Whether the calls on one of its groups are gloo's, which reports no ends."""
        return self.backend == GLOO or (group is not None and self.groups[group].apart == GLOO)

    def leaves_out(self, group: Group) -> bool:
        """Whether calls on such a group were not recorded because they stay inside a node."""
        return self.filtered and not crosses_nodes(group.locality)


def launch_of(records: Sequence[CommRecord]) -> CommRecord:
    """The calls of one launch as one record; a single call is its own launch."""
    first = records[0]
    if len(records) == 1:
        return first
    return msgspec.structs.replace(first, bytes=sum(one.bytes for one in records), members=list(records))


def waits_of(trace: RankTrace) -> Waits:
    """The waits of a trace. If it has none, they are added as unknown."""
    if trace.waits is None:
        count = len(trace)
        trace.waits = Waits(array("q", [-1]) * count, array("b", [-1]) * count, array("q", [0]) * count)
    return trace.waits


IMPOSSIBLE = "calls with impossible numbers or times, which are unknown"
_LATEST = 1 << 62
_MOST_STEPS = 1 << 31


def _with_shared_ranks(group: Group) -> Group:
    """Return the group with a list of ranks that equal groups of other traces have too: each rank of a large job lists
    all ranks of its groups."""
    return group if group.ranks is None else msgspec.structs.replace(group, ranks=_shared_list(tuple(group.ranks)))


@lru_cache(maxsize=4096)
def _shared_list(ranks: tuple[int, ...]) -> list[int]:
    return list(ranks)


class TraceBuilder:
    """Appends calls to a `RankTrace`, which has each group, signature and stack once."""

    def __init__(self, trace: RankTrace, groups: Iterable[Group] = ()) -> None:
        self.trace = trace
        self.signatures = Signatures(*trace.signatures)
        self.stacks: Interned[tuple[Frame, ...]] = Interned(*trace.stacks)
        trace.signatures, trace.stacks = self.signatures.rows, self.stacks.rows
        self._groups = {(one.group.pg, one.apart): index for index, one in enumerate(trace.groups)}
        for group in groups:
            self.define(group)

    def define(self, group: Group, apart: str = "", *, anew: bool = False) -> int:
        """Index of a group. The first definition of a name counts, or with `anew` the last one."""
        found = self._groups.get((group.pg, apart))
        if found is None:
            found = self._groups[group.pg, apart] = len(self.trace.groups)
            self.trace.groups.append(RankGroup(_with_shared_ranks(group), apart))
        elif anew:
            self.trace.groups[found] = RankGroup(_with_shared_ranks(group), apart)
        return found

    def group(self, pg: str) -> int:
        """Index of the group with this name, which is added if it is not defined."""
        found = self._groups.get((pg, ""))
        return self.define(Group(pg=pg, size=0)) if found is None else found

    def add(
        self,
        record: CommRecord,
        *,
        called: int,
        began: int = 0,
        ended: int = 0,
        took: int = 0,
        state: int = COMPLETED,
        stack: tuple[Frame, ...] = (),
        group: int | None = None,
    ) -> int:
        """Append a call and return its row. Times are ns since 1970; `record.t` may be on another clock.

        A call with impossible numbers is counted, and they are unknown.
        """
        number = (record.p2p_seq if is_p2p(record) else record.seq) or 0
        has_step = record.step == UNKNOWN_STEP or 0 <= record.step < _MOST_STEPS
        has_ids = abs(record.id) < _LATEST and abs(record.thread or 0) < _LATEST
        if not (all(0 <= value < _LATEST for value in (called, began, ended, took, number)) and has_step and has_ids):
            self.trace.unattributed[IMPOSSIBLE] += 1
            if not all(0 <= moment < _LATEST for moment in (called, began, ended, took)):
                called = began = ended = took = 0
            record = msgspec.structs.replace(
                record,
                step=record.step if has_step else UNKNOWN_STEP,
                id=record.id if abs(record.id) < _LATEST else -1,
                thread=record.thread if abs(record.thread or 0) < _LATEST else None,
            )
            number = number if 0 <= number < _LATEST else 0
        calls = self.trace.calls
        calls.append(
            group=self.group(record.pg) if group is None else group,
            signature=self.signatures.of(record),
            number=number,
            id=record.id,
            batch=-1 if record.batch is None else record.batch,
            step=record.step,
            state=state,
            called=called,
            began=began,
            ended=ended,
            took=took,
            stack=self.stacks.number(stack) if stack else 0,
            thread=record.thread or 0,
        )
        return len(calls) - 1

    def add_all(self, records: Sequence[CommRecord], called: Sequence[int], state: Sequence[int]) -> None:
        """Append calls without starts and ends, as `add` does for one call."""
        signature = list(map(self.signatures.of, records))
        p2p = list(map(is_p2p, self.signatures.rows))
        number = [(one.p2p_seq if p2p[kind] else one.seq) or 0 for one, kind in zip(records, signature, strict=True)]
        id, step, thread = ([getattr(one, name) or 0 for one in records] for name in ("id", "step", "thread"))
        least, most = min((0, *called, *number)), max(map(abs, (0, *called, *number, *id, *thread)))
        if least < 0 or most >= _LATEST or min((0, *step)) < 0 or max((0, *step)) >= _MOST_STEPS:
            for record, moment, one in zip(records, called, state, strict=True):
                self.add(record, called=moment, state=one)
            return
        columns = {
            "group": [self.group(one.pg) for one in records],
            "batch": [-1 if one.batch is None else one.batch for one in records],
            "signature": signature,
            "number": number,
            "id": id,
            "step": step,
            "thread": thread,
            "called": called,
            "state": state,
        }
        self.trace.calls.extend({name: np.array(values, np.int64) for name, values in columns.items()})


def with_records(trace: RankTrace, records: Iterable[tuple[CommRecord, int]]) -> RankTrace:
    """`trace` with other calls. Each has the times and waits of the row that is given with it."""
    given = list(records)
    rows = [row for _, row in given]
    signatures = Signatures()
    calls = replace(
        trace.calls.take(rows),
        signature=array("I", [signatures.of(record) for record, _ in given]),
        id=array("q", [record.id for record, _ in given]),
        batch=array("q", [-1 if record.batch is None else record.batch for record, _ in given]),
    )
    waits = trace.waits
    if waits is not None:
        first_of = {row: place for place, row in reversed(list(enumerate(rows)))} | {-1: -1, len(trace): len(rows)}
        waits = waits.take(rows)
        waits.before = array("q", map(first_of.__getitem__, waits.before))
    return replace(trace, calls=calls, signatures=signatures.rows, waits=waits)


def with_members(trace: RankTrace) -> RankTrace:
    """`trace` with each coalesced collective as the calls that it consists of, in one batch."""
    if not any(one.members for one in trace.signatures):
        return trace
    return with_records(
        trace,
        [
            (msgspec.structs.replace(member, id=record.id, t=record.t, seq=record.seq, batch=record.id), row)
            if record.members
            else (record, row)
            for row, record in enumerate(trace.records())
            for member in record.members or [record]
        ],
    )
