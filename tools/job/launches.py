"""The launches of all ranks in columns: a call, or several that went out together, with what equal launches share.

What equal launches share (operation, group, sizes, place in the code) stands once, as a `CallKind`. Times are ns since
1970 on the clock of the file, 0 = not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from crossrank.comm import OPERATIONS, CommRecord, Locality, ends_of, has_size, is_p2p, total_bytes
from crossrank.dtypes import dtype_of
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.job.job import Job
from crossrank.tools.traces.rank_trace import IMPOSSIBLE, Interned

if TYPE_CHECKING:
    import polars as pl

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
    exchanged: int = -1
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
        return row is not None and row.releases_all and self.exchanged < 0

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


@dataclass(kw_only=True)
class Launches:
    """Columns over the launches of all ranks, rank after rank, in the order in which each made them."""

    kinds: list[CallKind]
    """Of all ranks, with the groups by their index in the job's."""
    rank: Ints
    kind: Ints
    id: Ints
    number: Ints
    """0 = not known, or not to be compared."""
    counted: Bools
    """Whether the number was counted from the begin of the file, for the files have none that all ranks share."""
    step: Ints
    called: Ints
    """0 = not known; so are `began` and `ended`."""
    began: Ints
    ended: Ints
    sent: dict[int, Counter[int]]
    """Rank -> rank -> bytes sent to it by batches of sends and by uneven all_to_alls, which the kinds do not have."""
    not_placed: int
    """Bytes of such calls of which it is not known to whom they go."""
    attributed: Counter[str]
    """How times were found -> calls or kernels, over all ranks."""
    unattributed: Counter[str]
    """What could not be given a time, or a call, and why -> how many, over all ranks."""

    @property
    def measured(self) -> Bools:
        """Launches of which begin and end are known."""
        return self.ended > 0

    def by_kind(self, fact: Callable[[CallKind], object], dtype: type = bool) -> NDArray[Any]:
        """A fact of each kind, which `kind` gives to each launch."""
        return np.array([fact(one) for one in self.kinds], dtype)


def reduce_by(ufunc: np.ufunc, of: Ints, values: Ints, count: int, start: int) -> Ints:
    """`ufunc` over the values of each of the `count` things that `of` numbers; `start` where a thing has none."""
    found = np.full(count, start)
    ufunc.at(found, of, values)
    return found


def launches(job: Job) -> Launches:
    """The launches of all ranks of a job, of which there is one."""
    import polars as pl

    found = _Found()
    columns = pl.concat([_RankLaunches(job, rank, found).columns() for rank in job.ranks])
    return Launches(**vars(found) | {"kinds": list(found.kinds)} | {one.name: one.to_numpy() for one in columns})


@dataclass
class _Found:
    """What is not by launch, as in `Launches`."""

    kinds: dict[CallKind, int] = field(default_factory=dict)
    sent: dict[int, Counter[int]] = field(default_factory=dict)
    not_placed: int = 0
    attributed: Counter[str] = field(default_factory=Counter)
    unattributed: Counter[str] = field(default_factory=Counter)


class _RankLaunches:
    """The launches of one rank."""

    def __init__(self, job: Job, rank: int, found: _Found) -> None:
        self._job, self._rank, self._trace, self._found = job, rank, job.ranks[rank], found
        self._sent = found.sent.setdefault(rank, Counter())

    def columns(self) -> pl.DataFrame:
        """The columns of `Launches`, from `rank` to `ended`."""
        import polars as pl

        trace, made = self._trace, self._rows()
        self._count(made)
        kind = np.zeros(len(made), np.int64)
        alike = made.with_row_index("row").group_by("signature", "group", "whole", maintain_order=True).agg("row")
        for signatures, groups, whole, rows in alike.iter_rows():
            kind[rows] = self._kind_of([self._job.signatures[one] for one in signatures], groups[0], len(rows), whole)
        kinds, lanes = self._found.kinds, Interned[object]()
        lane = np.array([lanes.number((one.group, one.ends, one.op == SEND_RECV)) for one in kinds], np.int64)
        batched = np.array([one.op == SEND_RECV for one in kinds], bool)
        known = np.array([one.op in OPERATIONS or trace.numbered for one in kinds], bool) | batched
        # torch numbers the sends and receives of a group, our records those of each pair.
        counted = np.array([not trace.numbered or (one.is_p2p and not trace.numbered_pairs) for one in kinds], bool)
        given, count = pl.col("number"), pl.int_range(1, pl.len() + 1).over(pl.lit(pl.Series(lane[kind])))
        own = (given == 0) | (pl.Series(counted[kind]) & (given > 0)) | pl.Series(batched[kind])
        return made.select(
            pl.lit(self._rank, pl.Int64).alias("rank"),
            pl.Series("kind", kind),
            "id",
            pl.when((given < 0) | ~pl.Series(known[kind]))
            .then(0)
            .when(own)
            .then(count)
            .otherwise(given)
            .alias("number"),
            pl.Series("counted", counted[kind]),
            pl.col("step").cast(pl.Int64),
            pl.col("called") * int(trace.timed),
            "began",
            "ended",
        )

    def _rows(self) -> pl.DataFrame:
        """One row per launch, with the signatures and groups of its calls.

        A batch stands where its first call does. Members of one launch share its kernel, or follow each other: the span
        of them all is the launch's.
        """
        import polars as pl

        calls, (began, ended, took, batch, id) = (
            self._trace.calls,
            map(pl.col, ("began", "ended", "took", "batch", "id")),
        )
        columns = {one.name: np.asarray(getattr(calls, one.name)) for one in fields(calls)}
        rows = (
            pl.DataFrame(columns)
            .with_row_index("row")
            .with_columns(began=pl.when((took > 0) & (began == 0)).then("called").otherwise(began))
            .with_columns(ended=pl.when(took > 0).then(began + took).otherwise(ended * (began > 0)))
            .with_columns(began=pl.when(ended > 0).then(began))
        )
        alone = rows.filter(batch < 0).select(
            *("row", "id", "number", "step", "called", "began", "ended"),
            pl.concat_list("signature").alias("signature"),
            pl.concat_list("group").alias("group"),
            whole=True,
            calls=pl.lit(1, pl.UInt32),
        )
        batches = (
            rows.filter(batch >= 0)
            .group_by("batch", maintain_order=True)
            .agg(
                *(pl.col(name).first() for name in ("row", "id", "number", "step", "called")),
                began.min(),
                ended.max(),
                pl.col("signature", "group"),
                # The first call gives the batch its id, and their ids follow each other.
                whole=(pl.len() == 1) | ((id.first() == batch.first()) & (id.last() - id.first() == pl.len() - 1)),
                calls=pl.len(),
            )
            .drop("batch")
        )
        return pl.concat([alone, batches]).sort("row").drop("row").with_columns(began.fill_null(0))

    def _count(self, made: pl.DataFrame) -> None:
        """Count what has times, where the reader has not, and what has none."""
        trace, found = self._trace, self._found
        found.attributed.update(trace.attributed)
        found.unattributed.update(trace.unattributed)
        timed = int(made.filter(made["ended"] > 0)["calls"].sum())
        if timed and not trace.attributed:
            found.attributed[TIMED_BY[trace.timed_by]] += timed
        if trace.left_out:
            found.unattributed[LEFT_OUT] += trace.left_out
        if trace.timed_by == "comms" and len(trace):
            found.unattributed[BEGIN_ALONE] += len(made)
        elif trace.timed_by != "nsight" and (timed or trace.attributed) and len(trace) > timed:
            found.unattributed[UNTIMED] += len(trace) - timed

    def _kind_of(self, records: Sequence[CommRecord], local: int, times: int, whole: bool) -> int:
        """Number of the kind of a launch that was made so many times; notes to whom it sends."""
        if len(records) == 1 and records[0].members:
            records = records[0].members
            batch = records[0].batch
            whole = batch is None or all(one.id == batch + place for place, one in enumerate(records))
        group = self._job.groups[self._job.group_of[self._rank][local]]
        records = [self._possible(record, times) for record in records]
        self._count_sent(records, group, times)
        kind = _kind(records, group, self._rank, whole)
        return self._found.kinds.setdefault(kind, len(self._found.kinds))

    def _possible(self, record: CommRecord, times: int) -> CommRecord:
        """The record without impossible sizes."""
        splits = [count for split in (record.in_split, record.out_split) for count in split or ()]
        numbers = [record.bytes, *splits]
        for shapes in (record.inputs, record.outputs) if splits else ():
            numbers += [total_bytes(shapes, 16), *(extent for shape in shapes for extent in shape)]
        if all(0 <= number <= _MOST_BYTES for number in numbers):
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


def _kind(records: Sequence[CommRecord], group: ProcessGroup, rank: int, whole: bool) -> CallKind:
    first = records[0]
    size, exchanged, ends, op, locality = sum(record.bytes for record in records), -1, None, first.op, first.locality
    recorded = size
    if len(records) == 1 and is_p2p(first):
        ends = None if first.peer is None else ends_of(first.op, rank, first.peer)
    elif len(records) == 1:
        size, exchanged = _exchanged(first, group, rank)
    elif any(map(is_p2p, records)):
        far = {record.locality for record in records}
        op, locality = SEND_RECV, next((name for name in _FARTHEST if name in far), locality)
        # What a rank sends to itself leaves it as little as what it receives from itself comes to it.
        size = exchanged = max(
            sum(record.bytes for record in records if record.op == way and record.peer != rank)
            for way in ("send", "recv")
        )
    return CallKind(
        op=op,
        group=group.index,
        bytes=size,
        recorded=recorded,
        exchanged=exchanged,
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
    if record.op != "all_to_all":
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
