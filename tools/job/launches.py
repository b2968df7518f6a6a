"""The launches of all ranks in columns: a call, or several that went out together, with what equal launches share.

What equal launches share (operation, group, sizes, place in the code) is a `CallKind`, which many rows name. Times are
ns since 1970 on the clock of the file; what is not known is null.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import polars as pl

from crossrank.comm import MOST, OPERATIONS, CommRecord, Locality, ends_of, has_size, is_p2p, total_bytes
from crossrank.dtypes import dtype_of
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.job.job import Job
from crossrank.tools.traces.rank_trace import IMPOSSIBLE, Calls, Interned

SEND_RECV = "send/recv"
"""Operation of several sends and receives that went out in one launch."""

TIMED_BY = {
    "nsight": "Nsight Systems: kernels launched inside NVTX ranges of crossrank or NCCL",
    "kineto": "Kineto: the kernels of a call, or its Work on a backend without kernels",
    "flight": "torch's flight recorder: durations measured by device events",
    "inspector": "NCCL Inspector: the kernel of a call",
    "replay": "a replay: medians of its passes",
    "work": "the recording (TRACING_TIMING=1): from the launch of a call to the end of its Work",
    "comms": "no communication times, only the times at which calls were made",
}
"""What measured the times of a rank."""

LEFT_OUT = "calls inside a node: counted, but not recorded (TRACING=CROSSNODE); TRACING=ALL records them"
UNTIMED = "calls outside the traced windows, or without a duration"
BEGIN_ALONE = "calls with a start time only"
OTHER_ITERATION = "calls whose recorded size is from another step than their time: their size is unknown"
_AT_ONCE = 64
"""Ranks whose calls become launches together: what is made on the way is several times as large as the launches."""
_OF_FILE = ("numbered", "numbered_pairs", "timed", "placed")
_CALLS = {
    "rank": pl.Int32(),
    "kind": pl.UInt32(),
    "row": pl.UInt32(),
    "id": pl.Int64(),
    "number": pl.Int64(),
    "counted": pl.Boolean(),
    "step": pl.Int32(),
    "called_ns": pl.Int64(),
    "began_ns": pl.Int64(),
    "ended_ns": pl.Int64(),
    "placed": pl.Boolean(),
}
"""Millions of rows: the smallest types that hold them."""
_COLUMNS = ("group", "signature", "number", "id", "batch", "step", "called", "began", "ended", "took")
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
    """Of a launch of several calls that of the farthest."""
    recorded_by_locality: tuple[tuple[Locality, int], ...] = ()
    """`recorded` of a launch whose calls go differently far."""
    calls: int = 1
    """That went out in this one launch."""
    together: int = 1
    """Where batches are taken apart: the calls of its batch that have the same times, as those of one launch do."""
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


@dataclass(frozen=True, kw_only=True)
class Launches:
    """The launches of all ranks, rank after rank, in the order in which each made them."""

    job: Job
    kinds: list[CallKind]
    """Of all ranks, with the groups by their index in the job's."""
    calls: pl.DataFrame
    """One row per launch. `rank`; `kind`, its place in `kinds`; `row`, of its first call among those of the rank; `id`;
    `number`; `counted`: the number was counted from the begin of the file, for the files have none that all ranks
    share; `step`; `called_ns`, `began_ns` and `ended_ns`; `placed`: begin and end are exact, not a duration alone."""
    sent: dict[int, Counter[int]]
    """Rank -> rank -> bytes sent to it by batches of sends and by uneven all_to_alls, which the kinds do not have."""
    not_placed: int
    """Bytes of such calls of which it is not known to whom they go."""
    attributed: Counter[str]
    """How times were found -> calls or kernels, over all ranks."""
    unattributed: Counter[str]
    """What could not be given a time, or a call, and why -> how many, over all ranks."""

    @cached_property
    def facts(self) -> pl.DataFrame:
        """What the launches of each kind share, one row per kind."""
        rows = [_facts(kind, self.job.groups[kind.group]) for kind in self.kinds]
        return pl.DataFrame(rows, schema=_FACTS, orient="row")

    def about(self, frame: pl.DataFrame, *names: str) -> pl.DataFrame:
        """`frame`, which has a `kind`, with facts of it."""
        return frame.hstack(self.facts.select(names)[frame["kind"]])


def of_collectives(calls: pl.DataFrame, facts: pl.DataFrame, /, **aggregates: pl.Expr) -> pl.DataFrame:
    """A row for each `collective` of the launches: aggregates of `facts`, which has a row for each kind."""
    # Most often all launches of a collective are of one kind: what is made on the way is small.
    pair = pl.col("collective").cast(pl.Int64) * len(facts) + pl.col("kind")
    pairs = calls.select(pair).to_series().unique()
    kinds = facts[pairs % len(facts)].with_columns(collective=pairs // len(facts))
    return kinds.group_by("collective").agg(**aggregates).sort("collective")


# As categories texts cost 4 bytes a row.
_FACTS = {
    "op": pl.Categorical,
    "label": pl.Categorical,
    "group": pl.Int64,
    "root": pl.Int64,
    "locality": pl.Categorical,
    "source": pl.Categorical,
    "source_rank": pl.Int64,
    "destination_rank": pl.Int64,
    "is_p2p": pl.Boolean,
    "calls": pl.Int64,
    "together": pl.Int64,
    "whole": pl.Boolean,
    "sized": pl.Boolean,
    "bytes": pl.Int64,
    "exchanged": pl.Int64,
    "bus_factor": pl.Float64,
    "releases_all": pl.Boolean,
    "late_ends": pl.Boolean,
    "guessed": pl.Boolean,
    "participants": pl.Int64,
}


def _facts(kind: CallKind, group: ProcessGroup) -> tuple[object, ...]:
    return (
        *(kind.op, kind.label, kind.group, kind.root, kind.locality, kind.source),
        *(kind.ends or (None, None)),
        *(kind.is_p2p, kind.calls, kind.together, kind.whole, kind.sized, kind.bytes),
        None if kind.exchanged < 0 else kind.exchanged,
        _bus_factor(kind.op, group.size),
        *(kind.releases_all, kind.is_p2p and group.late_ends, group.guessed),
        group.size if kind.ends is None else len(set(kind.ends)),
    )


def _bus_factor(op: str, size: int) -> float | None:
    """None where a bandwidth means nothing: a barrier, a group of one, an operation that is not known."""
    if op == SEND_RECV:
        return 1.0
    row = OPERATIONS.get(op)
    if row is None or row.bus_factor is None or (size < 2 and not row.p2p):
        return None
    return row.bus_factor(size)


def launches(job: Job, *, batches_apart: bool = False, release: bool = False) -> Launches:
    """The launches of all ranks of a job, of which there is one. With `release` the job keeps of its calls what they
    are, and not when they were, unless there are batches, which may be looked at once more.

    With `batches_apart` sends and receives of a batch are a row each, with the times of their launch, where the rank's
    files number those of each pair: counted numbers may be shifted, and nothing of a batch would tell.
    """
    return _Found(job, batches_apart, release).launches()


class _Found:
    """What is found while the calls of all ranks become launches."""

    def __init__(self, job: Job, batches_apart: bool, release: bool) -> None:
        self._job = job
        self._release = release and all(max(trace.calls.batch, default=-1) < 0 for trace in job.ranks.values())
        self._apart = np.array([batches_apart and is_p2p(one) and not one.members for one in job.signatures], bool)
        """Of each signature: calls of it stand by themselves, also in a batch."""
        self._node_of = {rank: trace.node for rank, trace in job.ranks.items() if trace.node}
        self._locality_of: dict[object, Locality] = {}
        self._kinds: dict[CallKind, int] = {}
        self._sent: dict[int, Counter[int]] = {rank: Counter() for rank in job.ranks}
        self._not_placed = 0
        self._attributed = Counter[str]()
        self._unattributed = Counter[str]()

    def launches(self) -> Launches:
        ranks = list(self._job.ranks)
        frames = [pl.DataFrame(schema=_CALLS)]
        for first in range(0, len(ranks), _AT_ONCE):
            some = ranks[first : first + _AT_ONCE]
            made = self._made(some)
            self._count(some, made)
            frames.append(self._numbered(made))
            del made
            if self._release:
                for trace in map(self._job.ranks.__getitem__, some):
                    calls = trace.calls
                    trace.calls = Calls(group=calls.group, signature=calls.signature, id=calls.id)
                del calls
                _return_freed_memory()
        return Launches(
            job=self._job,
            kinds=list(self._kinds),
            # Column by column: nothing else is there twice.
            calls=pl.DataFrame(
                {name: pl.concat([one.drop_in_place(name) for one in frames]).rechunk() for name in _CALLS}
            ),
            sent=self._sent,
            not_placed=self._not_placed,
            attributed=self._attributed,
            unattributed=self._unattributed,
        )

    def _numbered(self, made: pl.DataFrame) -> pl.DataFrame:
        """The columns of `Launches.calls`."""
        rows = [(one.op == SEND_RECV, one.op in OPERATIONS, one.is_p2p) for one in self._kinds]
        of_kind = pl.DataFrame(rows, schema=dict.fromkeys(("batched", "known", "p2p"), pl.Boolean), orient="row")
        batched, numbered, given = pl.col("batched"), pl.col("numbered"), pl.col("number")
        # torch numbers the sends and receives of a group, our records those of each pair.
        counted = ~numbered | (pl.col("p2p") & ~pl.col("numbered_pairs"))
        without = (given < 0) | ~(pl.col("known") | numbered | batched)
        own = (given == 0) | counted | batched
        return made.hstack(of_kind[made["kind"]]).select(
            *(pl.col(name).cast(_CALLS[name]) for name in ("rank", "kind", "row", "id")),
            number=pl.when(without).then(None).when(own).then("running").otherwise(given),
            counted=counted,
            step="step",
            called_ns=pl.when(pl.col("timed") & (pl.col("called") > 0)).then("called"),
            began_ns=pl.when(pl.col("ended") > 0).then("began"),
            ended_ns=pl.when(pl.col("ended") > 0).then("ended"),
            placed=pl.col("placed") & (pl.col("took") == 0),
        )

    def _made(self, ranks: Sequence[int]) -> pl.DataFrame:
        """One row per launch, rank after rank: its kind, how many calls it is of, the how many-th it is of its rank on
        its group, or between its two ends (`running`, from 1), and what its file says of it.

        A batch stands where its first call does. Members of one launch share its kernel, or follow each other: the span
        of them all is the launch's.
        """
        began, ended, took, batch, id = map(pl.col, ("began", "ended", "took", "batch", "id"))
        traces = [self._job.ranks[rank] for rank in ranks]
        count = list(map(len, traces))
        given = {name: np.concatenate([getattr(one.calls, name) for one in traces]) for name in _COLUMNS}
        given |= {name: np.repeat([getattr(one, name) for one in traces], count) for name in _OF_FILE}
        given["rank"] = np.repeat(np.array(ranks, np.int32), count)
        given["row"] = np.concatenate([np.arange(one, dtype=np.uint32) for one in count])
        rows = (
            pl.DataFrame(given)
            .with_row_index("order")
            .with_columns(began=pl.when((took > 0) & (began == 0)).then("called").otherwise(began))
            .with_columns(ended=pl.when(took > 0).then(began + took).otherwise(ended * (began > 0)))
            .with_columns(began=pl.when(ended > 0).then(began))
        )
        apart = pl.lit(pl.Series(self._apart[rows["signature"].to_numpy()]))
        rows = rows.with_columns(apart=apart & pl.col("numbered_pairs"))
        first = ("order", "row", "id", "number", "step", "called", *_OF_FILE)
        one = pl.lit(1, pl.UInt32)
        columns = ("rank", *first, "began", "ended", "took", "signature", "group")
        alone = rows.filter(batch < 0).select(*columns, whole=True, calls=one, together=one)
        alike = pl.len().over("rank", "batch", "began", "ended")
        # The first call gives the batch its id, and their ids follow each other.
        is_whole = (id.first() == batch.first()) & (id.last() - id.first() == pl.len() - 1)
        together = pl.when(is_whole.over("rank", "batch")).then(alike).otherwise(alike.clip(2))
        parted = rows.filter((batch >= 0) & pl.col("apart")).select(*columns, whole=True, calls=one, together=together)
        batches = (
            rows.filter((batch >= 0) & ~pl.col("apart"))
            .group_by("rank", "batch", maintain_order=True)
            .agg(
                *(pl.col(name).first() for name in first),
                began.min(),
                ended.max(),
                took.max(),
                pl.col("signature", "group"),
                whole=(pl.len() == 1) | is_whole,
                calls=pl.len(),
                together=one,
            )
            .drop("batch")
        )
        made = pl.concat(map(self._with_kinds, (alone, parted, batches))).sort("order")
        lanes = Interned[object]()
        lane = np.array([lanes.number((one.group, one.ends, one.op == SEND_RECV)) for one in self._kinds], np.int64)
        running = pl.int_range(1, pl.len() + 1).over("rank", pl.Series(lane[made["kind"].to_numpy()]))
        return made.with_columns(began.fill_null(0), running=running)

    def _with_kinds(self, made: pl.DataFrame) -> pl.DataFrame:
        """Launches with the number of their kind in the place of the signatures and groups of their calls."""
        keys = ("rank", "signature", "group", "whole", "together")
        alike = made.with_row_index("place").group_by(keys, maintain_order=True).agg("place", times=pl.len())
        kinds = [self._kind_of(*row) for row in alike.select(*keys, "times").iter_rows()]
        of_kind = alike.select("place", kind=pl.Series(kinds, dtype=pl.Int64)).explode("place").sort("place")
        return made.drop(keys[1:]).with_columns(of_kind["kind"])

    def _count(self, ranks: Sequence[int], made: pl.DataFrame) -> None:
        """Count what has times, where the reader has not, and what has none."""
        timed_calls = pl.col("calls").filter(pl.col("ended") > 0).sum()
        by_events = pl.col("calls").filter((pl.col("ended") > 0) & (pl.col("took") > 0)).sum().alias("by_events")
        found = made.group_by("rank").agg(timed_calls, by_events, pl.len())
        counts = {rank: counted for rank, *counted in found.iter_rows()}
        for rank in ranks:
            trace = self._job.ranks[rank]
            timed, by_events_alone, count = counts.get(rank, (0, 0, 0))
            self._attributed.update(trace.attributed)
            self._unattributed.update(trace.unattributed)
            if timed and not trace.attributed:
                # A recording has both the times of works and those that events measured on the device.
                by_device = by_events_alone if trace.source == "comms" else 0
                others = "work" if trace.source == "comms" and trace.timed_by == "flight" else trace.timed_by
                self._attributed[TIMED_BY["flight"]] += by_device
                self._attributed[TIMED_BY[others]] += timed - by_device
                self._attributed = +self._attributed
            if trace.left_out:
                self._unattributed[LEFT_OUT] += trace.left_out
            if trace.timed_by == "comms" and len(trace):
                self._unattributed[BEGIN_ALONE] += count
            elif trace.timed_by != "nsight" and (timed or trace.attributed) and len(trace) > timed:
                self._unattributed[UNTIMED] += len(trace) - timed

    def _kind_of(
        self,
        rank: int,
        signatures: int | Sequence[int],
        groups: int | Sequence[int],
        whole: bool,
        together: int,
        times: int,
    ) -> int:
        """Number of the kind of a launch that was made so many times; notes to whom it sends.

        A launch of one call has its signature and group by themselves.
        """
        signatures = [signatures] if isinstance(signatures, int) else signatures
        local = groups if isinstance(groups, int) else groups[0]
        records: Sequence[CommRecord] = [self._job.signatures[one] for one in signatures]
        if len(records) == 1 and records[0].members:
            records = records[0].members
            batch = records[0].batch
            whole = batch is None or all(one.id == batch + place for place, one in enumerate(records))
        group = self._job.groups[self._job.group_of[rank][local]]
        records = [self._possible(record, times) for record in records]
        kind = _kind(records, group, rank, whole, together)
        if kind.locality == "unknown":
            kind = msgspec.structs.replace(kind, locality=self._locality(kind, group))
        if any(record.op in self._job.ranks[rank].sizes_of_others for record in records):
            self._unattributed[OTHER_ITERATION] += times
            # Whether it has splits is no size.
            kind = msgspec.structs.replace(kind, bytes=0, recorded=0, exchanged=min(kind.exchanged, 0), sized=False)
        else:
            self._count_sent(rank, records, group, times)
        return self._kinds.setdefault(kind, len(self._kinds))

    def _locality(self, kind: CallKind, group: ProcessGroup) -> Locality:
        """Where the ranks of a call are, by the nodes that their files name."""
        if not self._node_of or (group.guessed and self._job.missing):
            return "unknown"
        key = (group.index, kind.ends)
        if key not in self._locality_of:
            nodes = {self._node_of.get(rank, "") for rank in kind.ends or group.members}
            where: Locality = "intra_node" if len(nodes) == 1 else "cross_node"
            self._locality_of[key] = where if nodes and "" not in nodes else "unknown"
        return self._locality_of[key]

    def _possible(self, record: CommRecord, times: int) -> CommRecord:
        """The record without impossible sizes."""
        splits = [count for split in (record.in_split, record.out_split) for count in split or ()]
        numbers = [record.bytes, *splits]
        for shapes in (record.inputs, record.outputs) if splits else ():
            numbers += [total_bytes(shapes, 16), *(extent for shape in shapes for extent in shape)]
        if all(0 <= number <= MOST for number in numbers):
            return record
        self._unattributed[IMPOSSIBLE] += times
        return msgspec.structs.replace(record, bytes=0, in_split=None, out_split=None, inputs=[], outputs=[])

    def _count_sent(self, rank: int, records: Sequence[CommRecord], group: ProcessGroup, times: int) -> None:
        sent = self._sent[rank]
        for record in records:
            split = record.in_split
            if record.op == "send" and len(records) > 1:
                if record.peer is None:
                    self._not_placed += record.bytes * times
                else:
                    sent[record.peer] += record.bytes * times
            elif record.op == "all_to_all" and (split is not None or record.out_split is not None):
                if split is None or len(group.members) != len(split) or group.inferred:
                    self._not_placed += record.bytes * times
                elif rows := sum(split):
                    for to, count in zip(group.members, split, strict=True):
                        sent[to] += round(count * record.bytes / rows) * times
        del sent[rank]


def _return_freed_memory() -> None:
    """To the system: what was freed are small pieces between others, which glibc keeps."""
    with suppress(AttributeError, OSError, TypeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _kind(records: Sequence[CommRecord], group: ProcessGroup, rank: int, whole: bool, together: int) -> CallKind:
    first = records[0]
    size, exchanged, ends, op, locality = sum(record.bytes for record in records), -1, None, first.op, first.locality
    recorded, recorded_by_locality = size, Counter[Locality]()
    if len(records) == 1 and is_p2p(first):
        ends = None if first.peer is None else ends_of(first.op, rank, first.peer)
    elif len(records) == 1:
        size, exchanged = _exchanged(first, group, rank)
    elif any(map(is_p2p, records)):
        for record in records:
            recorded_by_locality[record.locality] += record.bytes
        op, locality = SEND_RECV, next((name for name in _FARTHEST if name in recorded_by_locality), locality)
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
        recorded_by_locality=tuple(recorded_by_locality.items()) if len(recorded_by_locality) > 1 else (),
        calls=len(records),
        together=together,
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
