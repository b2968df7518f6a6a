"""The launches of all ranks in columns: a call, or several that went out together, with what equal launches share.

What equal launches share (operation, group, sizes, place in the code) stands once, as a `CallKind`. Times are ns since
1970 on the clock of the file, 0 = not known.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from crossrank.comm import OPERATIONS, CommRecord, Locality, ends_of, has_size, is_p2p, total_bytes
from crossrank.dtypes import dtype_of
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.job.job import Job
from crossrank.tools.traces.rank_trace import IMPOSSIBLE, RankTrace

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SEND_RECV = "send/recv"
"""Operation of several sends and receives that went out in one launch."""

TIMED_BY = {
    "nsight": "Nsight Systems: kernels that were launched within our markers or NCCL's",
    "kineto": "Kineto: the kernels of a call, or on a backend without kernels its Work",
    "flight": "torch's flight recorder: durations that its events measured",
    "replay": "a replay: medians over its passes",
    "comms": "no times of the communication itself, only when calls were made",
}
"""What measured the times of a rank."""

LEFT_OUT = "calls inside a node, which were counted and not recorded (TRACING=CROSSNODE); TRACING=ALL records them"
UNTIMED = "calls outside the windows that were traced, or without a duration"
BEGIN_ALONE = "calls of which only the begin is recorded"
_MOST_BYTES = 1 << 50
"""More than any call moves: what is above it is a mistake in the file, and would drown all sums."""
_FARTHEST: tuple[Locality, ...] = ("cross_node", "nvlink_domain", "unknown", "intra_node")


class CallKind(msgspec.Struct, frozen=True):
    """What equal launches share."""

    op: str
    """A key of `OPERATIONS`, `SEND_RECV`, or what the file calls it."""
    group: int
    """Index into the groups of the job."""
    bytes: int
    """S of nccl-tests; of a launch of several calls the sum, of an all_to_all the larger of sent and received."""
    recorded: int = 0
    """Sum of S of its calls as they were recorded."""
    moved: int = -1
    """Bytes that this rank sends to others or receives from them, the larger; -1 where the bus factor tells them."""
    ends: tuple[int, int] | None = None
    """Sender and receiver of a send or receive."""
    root: int | None = None
    source: str | None = None
    locality: Locality = "unknown"
    calls: int = 1
    """That went out in this one launch."""
    whole: bool = True
    """All calls of the launch are known: some may not have been recorded."""
    sized: bool = True
    """`bytes` is known; else it is 0, or of a launch of several calls what is known of it."""

    @property
    def releases_all(self) -> bool:
        """Whether it ends on no rank before every rank has begun it."""
        row = OPERATIONS.get(self.op)
        return row is not None and row.releases_all and self.moved < 0

    @property
    def is_p2p(self) -> bool:
        row = OPERATIONS.get(self.op)
        return self.op == SEND_RECV or (row is not None and row.p2p)

    @property
    def label(self) -> str:
        """The operation for people: a send and its receive are one; with a word where several went out together."""
        op = SEND_RECV if self.is_p2p else self.op
        if self.calls == 1:
            return op
        return f"{op}, batched" if self.is_p2p else f"{op}, coalesced"


def _none() -> Ints:
    return np.empty(0, np.int64)


@dataclass
class Launches:
    """Columns over the launches of all ranks, rank after rank, in the order in which each made them."""

    kinds: list[CallKind] = field(default_factory=list)
    rank: Ints = field(default_factory=_none)
    kind: Ints = field(default_factory=_none)
    id: Ints = field(default_factory=_none)
    number: Ints = field(default_factory=_none)
    """0 = not known, or not to be compared."""
    counted: Bools = field(default_factory=lambda: _none() > 0)
    """Whether the number was counted from the begin of the file, for the files have none that all ranks share."""
    step: Ints = field(default_factory=_none)
    called: Ints = field(default_factory=_none)
    began: Ints = field(default_factory=_none)
    ended: Ints = field(default_factory=_none)
    sent: dict[int, Counter[int]] = field(default_factory=dict)
    """Rank -> rank -> bytes sent to it by batches of sends and by uneven all_to_alls, which the kinds do not have."""
    not_placed: int = 0
    """Bytes of such calls of which it is not known to whom they go."""
    attributed: Counter[str] = field(default_factory=Counter)
    """How times were found -> calls or kernels, over all ranks."""
    unattributed: Counter[str] = field(default_factory=Counter)
    """What could not be given a time, or a call, and why -> how many, over all ranks."""


def launches(job: Job) -> Launches:
    """The launches of all ranks of a job, of which there is one."""
    kinds: dict[CallKind, int] = {}
    found = Launches()
    columns = []
    for rank, trace in job.ranks.items():
        found.attributed.update(trace.attributed)
        found.unattributed.update(trace.unattributed)
        columns.append(_RankLaunches(job, rank, trace, kinds, found).columns())
    names = ("rank", "kind", "id", "number", "counted", "step", "called", "began", "ended")
    for name, parts in zip(names, zip(*columns, strict=True), strict=True):
        setattr(found, name, np.concatenate(parts))
    found.kinds = list(kinds)
    return found


class _RankLaunches:
    """The launches of one rank."""

    def __init__(self, job: Job, rank: int, trace: RankTrace, kinds: dict[CallKind, int], found: Launches) -> None:
        self._job, self._rank, self._trace, self._kinds, self._found = job, rank, trace, kinds, found
        self._sent = found.sent.setdefault(rank, Counter())

    def columns(self) -> tuple[Ints | Bools, ...]:
        """As `Launches` has them, from `rank` to `ended`."""
        trace, calls = self._trace, self._trace.calls
        first, size, kind = self._launch_rows()
        rows = np.repeat(np.arange(len(first)), size)  # launch of each of the calls, which are in order of launches
        order = self._order
        began, ended = self._times()
        timed = (ended > 0)[order]
        low, high = np.full(len(first), np.iinfo(np.int64).max), np.zeros(len(first), np.int64)
        # Members of one launch share its kernel, or follow each other: the span of them all is the launch's.
        np.minimum.at(low, rows[timed], began[order][timed])
        np.maximum.at(high, rows[timed], ended[order][timed])
        low[high == 0] = 0
        self._count(size, high)
        p2p = np.array([one.is_p2p for one in self._kinds] or [False])[kind]
        batched = np.array([one.op == SEND_RECV for one in self._kinds] or [False])[kind]
        known = np.array([one.op in OPERATIONS for one in self._kinds] or [False])[kind]
        lanes: dict[object, int] = {}
        lane = np.array(
            [lanes.setdefault((one.group, one.ends, one.op == SEND_RECV), len(lanes)) for one in self._kinds] or [0],
            np.int64,
        )[kind]
        numbered = np.full(len(first), trace.numbered)
        # torch numbers the sends and receives of a group, our records those of each pair.
        numbered &= ~p2p | trace.numbered_pairs
        given = _ints(calls.number)[first]
        count = _running_number(lane)
        number = np.where((given == 0) | (~numbered & (given >= 0)) | batched, count, given)
        number[(number < 0) | ~(known | batched | trace.numbered)] = 0
        return (
            np.full(len(first), self._rank, np.int64),
            kind,
            _ints(calls.id)[first],
            number,
            ~numbered,
            np.frombuffer(calls.step, np.int32).astype(np.int64)[first] if len(calls) else np.empty(0, np.int64),
            _ints(calls.called)[first] if trace.timed else np.zeros(len(first), np.int64),
            low,
            high,
        )

    def _times(self) -> tuple[Ints, Ints]:
        """(begin, end) of each call, 0 where one of them is not known."""
        calls = self._trace.calls
        called, began, ended, took = (_ints(column) for column in (calls.called, calls.began, calls.ended, calls.took))
        began = np.where((took > 0) & (began == 0), called, began)
        ended = np.where(took > 0, began + took, np.where(began > 0, ended, 0))
        return np.where(ended > 0, began, 0), ended

    def _count(self, size: Ints, ended: Ints) -> None:
        """Count what has times, where the reader has not, and what has none."""
        trace, found = self._trace, self._found
        timed = int(size[ended > 0].sum())
        if timed and not trace.attributed:
            found.attributed[TIMED_BY[trace.timed_by]] += timed
        if trace.left_out:
            found.unattributed[LEFT_OUT] += trace.left_out
        if trace.timed_by == "comms" and len(trace):
            found.unattributed[BEGIN_ALONE] += len(size)
        elif trace.timed_by != "nsight" and (timed or trace.attributed) and int(size.sum()) > timed:
            found.unattributed[UNTIMED] += int(size.sum()) - timed

    def _launch_rows(self) -> tuple[Ints, Ints, Ints]:
        """(row of the first call, number of calls, kind) of each launch; sets `_order`, the rows launch by launch."""
        calls = self._trace.calls
        batch, count = _ints(calls.batch), len(calls)
        # A batch stands where its first call does.
        own = np.where(batch < 0, -1 - np.arange(count), batch)
        _, firsts, inverse = np.unique(own, return_index=True, return_inverse=True)
        place = firsts[inverse]
        self._order = np.lexsort((np.arange(count), place))
        first, size = np.unique(place, return_counts=True)
        signature = np.frombuffer(calls.signature, np.uint32) if count else np.empty(0, np.uint32)
        group = np.frombuffer(calls.group, np.uint32) if count else np.empty(0, np.uint32)
        kind = np.zeros(len(first), np.int64)
        alone = np.flatnonzero(size == 1)
        pairs, inverse, times = np.unique(
            np.stack([signature[first[alone]], group[first[alone]]]), axis=1, return_inverse=True, return_counts=True
        )
        of_pair = [
            self._kind_of(self._job.signatures[number].members or [self._job.signatures[number]], local, often)
            for number, local, often in zip(*pairs.tolist(), times.tolist(), strict=True)
        ]
        kind[alone] = np.array(of_pair or [0], np.int64)[inverse.reshape(-1)] if len(alone) else 0
        ends = np.cumsum(size)
        known: dict[object, list[int]] = {}
        for launch in np.flatnonzero(size > 1).tolist():
            rows = self._order[ends[launch] - size[launch] : ends[launch]]
            whole = _is_whole([calls.id[row] for row in rows.tolist()], int(batch[rows[0]]))
            known.setdefault((signature[rows].tobytes(), group[rows].tobytes(), whole), []).append(launch)
        for (*_, whole), same in known.items():  # type: ignore[misc]
            rows = self._order[ends[same[0]] - size[same[0]] : ends[same[0]]].tolist()
            records = [self._job.signatures[int(signature[row])] for row in rows]
            kind[same] = self._kind_of(records, int(group[rows[0]]), len(same), whole=whole)
        return first, size, kind

    def _kind_of(self, records: Sequence[CommRecord], local: int, times: int, *, whole: bool = True) -> int:
        """Number of the kind of a launch that was made so many times; notes to whom it sends."""
        if records[0].batch is not None:
            whole = _is_whole([record.id for record in records], records[0].batch)
        group = self._job.groups[self._job.group_of[self._rank][local]]
        records = [self._possible(record, times) for record in records]
        self._count_sent(records, group, times)
        kind = _kind(records, group, self._rank, whole)
        return self._kinds.setdefault(kind, len(self._kinds))

    def _possible(self, record: CommRecord, times: int) -> CommRecord:
        """The record without impossible sizes."""
        splits = [count for split in (record.in_split, record.out_split) for count in split or ()]
        extents = [extent for shape in (*record.inputs, *record.outputs) for extent in shape] if splits else []
        sizes = [record.bytes]
        if splits:
            sizes += [total_bytes(record.inputs, 16), total_bytes(record.outputs, 16)]
        if min([0, *splits, *extents]) >= 0 and all(0 <= count <= _MOST_BYTES for count in [*sizes, *splits]):
            return record
        self._found.unattributed[IMPOSSIBLE] += times
        return msgspec.structs.replace(record, bytes=0, in_split=None, out_split=None, inputs=[], outputs=[])

    def _count_sent(self, records: Sequence[CommRecord], group: ProcessGroup, times: int) -> None:
        for record in records:
            split = record.in_split
            if record.op == "send" and len(records) > 1:
                if record.peer is None:
                    self._found.not_placed += record.bytes * times
                else:
                    self._sent[record.peer] += record.bytes * times
            elif record.op == "all_to_all" and (split is not None or record.out_split is not None):
                if split is None or len(group.members) != len(split) or group.inferred:
                    self._found.not_placed += record.bytes * times
                elif rows := sum(split):
                    for to, count in zip(group.members, split, strict=True):
                        self._sent[to] += round(count * record.bytes / rows) * times
        del self._sent[self._rank]


def _is_whole(ids: Sequence[int], batch: int) -> bool:
    """Whether all calls of a launch are there: the first gives the batch its id, and their ids follow each other."""
    return ids[0] == batch and list(ids) == list(range(batch, batch + len(ids)))


def _kind(records: Sequence[CommRecord], group: ProcessGroup, rank: int, whole: bool) -> CallKind:
    first = records[0]
    size, moved, ends, op, locality = sum(record.bytes for record in records), -1, None, first.op, first.locality
    recorded = size
    if len(records) == 1 and is_p2p(first):
        ends = None if first.peer is None else ends_of(first.op, rank, first.peer)
    elif len(records) == 1:
        size, moved = _exchanged(first, group, rank)
    elif any(map(is_p2p, records)):
        far = {record.locality for record in records}
        op, locality = SEND_RECV, next((name for name in _FARTHEST if name in far), locality)
        # What a rank sends to itself leaves it as little as what it receives from itself comes to it.
        size = moved = max(
            sum(record.bytes for record in records if record.op == way and record.peer != rank)
            for way in ("send", "recv")
        )
    return CallKind(
        op=op,
        group=group.index,
        bytes=size,
        recorded=recorded,
        moved=moved,
        ends=ends,
        root=first.root if op != SEND_RECV else None,
        source=first.source,
        locality=locality,
        calls=len(records),
        whole=whole,
        sized=all(map(has_size, records)),
    )


def _exchanged(record: CommRecord, group: ProcessGroup, rank: int) -> tuple[int, int]:
    """(S, bytes exchanged with others) of a collective; of an uneven all_to_all both are the larger direction's."""
    if record.op != "all_to_all" or (record.in_split is None and record.out_split is None):
        return record.bytes, -1
    sizes = []
    for split, shapes in ((record.in_split, record.inputs), (record.out_split, record.outputs)):
        dtype = dtype_of(record.dtype) if record.dtype is not None else None
        if split is None or dtype is None:
            continue
        total, rows, own = total_bytes(shapes, dtype.size), sum(split), 0
        if rank in group.members and not group.inferred:
            own = split[place] if (place := group.members.index(rank)) < len(split) else 0
        sizes.append((total, total - (total * own // rows if rows else 0)))
    if not sizes:
        return record.bytes, -1
    return max(total for total, _ in sizes), max(others for _, others in sizes)


def _ints(column: array[int]) -> Ints:
    return np.frombuffer(column, np.int64) if len(column) else np.empty(0, np.int64)


def _running_number(lane: Ints) -> Ints:
    """How often the lane of each row stood until there, itself included."""
    order = np.argsort(lane, kind="stable")
    ordered = lane[order]
    first = np.concatenate(([True], ordered[1:] != ordered[:-1])) if len(ordered) else np.empty(0, bool)
    begins = np.maximum.accumulate(np.where(first, np.arange(len(ordered)), 0))
    number = np.empty(len(lane), np.int64)
    number[order] = np.arange(len(ordered)) - begins + 1
    return number
