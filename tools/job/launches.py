"""The launches of all ranks in columns. One launch is a single call or a coalesced batch.

Equal launches share one `CallKind` (operation, group, sizes, source line). Times are ns since 1970 on the clock of the
file; null if unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import polars as pl

from crossrank.comm import (
    OPERATIONS,
    UNKNOWN_STEP,
    CommRecord,
    Locality,
    ends_of,
    has_possible_size,
    has_size,
    is_p2p,
    total_bytes,
)
from crossrank.dtypes import dtype_of
from crossrank.tools import freed_memory
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.job.job import Job
from crossrank.tools.traces.rank_trace import IMPOSSIBLE, Calls, Interned

SEND_RECV = "send/recv"
"""Operation of a batch of sends and receives."""

TIMED_BY = {
    "nsight": "Nsight Systems: kernels launched inside NVTX ranges of crossrank or NCCL",
    "kineto": "Kineto traces: the kernels of each call, or the host range of its Work (gloo, MTIA)",
    "flight": "torch's flight recorder: durations measured by device events",
    "inspector": "NCCL Inspector: the kernel of a call",
    "replay": "a replay: medians of its passes",
    "work": "the recording (TRACING_TIMING=1): from the launch of a call to the end of its Work",
    "comms": "no communication times, only the times at which calls were made",
}
"""What measured the times of a rank."""

LEFT_OUT = "calls inside a node: counted, but not recorded (TRACING=CROSSNODE); TRACING=ALL records them"
UNTIMED = "calls without a measured time: not finished, not timed, or outside of the traced windows"
BEGIN_ALONE = "calls or batches with a start time only"
OTHER_ITERATION = "calls whose recorded size is from another step than their time: their size is unknown"
_RANKS_PER_CHUNK = 64
"""Ranks that are converted at once: the intermediate columns are several times as large as the launches."""
_FILE_COLUMNS = ("numbered", "numbered_pairs", "timed", "placed")
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
"""The smallest types that fit: there may be millions of rows."""
_COLUMNS = ("group", "signature", "number", "id", "batch", "called", "began", "ended", "took")
_FARTHEST: tuple[Locality, ...] = ("cross_node", "nvlink_domain", "unknown", "intra_node")


class CallKind(msgspec.Struct, frozen=True):
    """What equal launches have in common."""

    op: str
    """A key of `OPERATIONS`, `SEND_RECV`, or the file's own name."""
    group: int
    """Index into the groups of the job."""
    bytes: int
    """S of nccl-tests. For a batch the sum; for an all_to_all the larger of sent and received bytes."""
    recorded: int = 0
    """Sum of the recorded S of its calls."""
    exchanged: int = -1
    """The larger of the bytes that this rank sends to others and receives from them; -1 if the bus factor gives it."""
    ends: tuple[int, int] | None = None
    """Sender and receiver of a send or receive."""
    root: int | None = None
    source: str | None = None
    locality: Locality = "unknown"
    """For a batch, that of the farthest call."""
    recorded_by_locality: tuple[tuple[Locality, int], ...] = ()
    """`recorded` by locality, if the calls of the launch differ in it."""
    calls: int = 1
    """Number of calls in this launch."""
    together: int = 1
    """With `batches_apart`: the number of calls of its batch that have the same times."""
    whole: bool = True
    """All calls of the launch were recorded."""
    sized: bool = True
    """`bytes` is known. If not, it is the sum of the known calls."""

    @property
    def releases_all(self) -> bool:
        """Return whether it ends on no rank before every rank has started it."""
        row = OPERATIONS.get(self.op)
        return row is not None and row.releases_all and self.exchanged < 0

    @property
    def is_p2p(self) -> bool:
        row = OPERATIONS.get(self.op)
        return self.op == SEND_RECV or (row is not None and row.p2p)

    @property
    def label(self) -> str:
        """Return the operation for display: one name for send and receive, with a suffix for a batch."""
        op = SEND_RECV if self.is_p2p else self.op
        if self.calls == 1:
            return op
        return f"{op}, batched" if self.is_p2p else f"{op}, coalesced"


@dataclass(frozen=True, kw_only=True)
class Launches:
    """The launches of all ranks: rank after rank, each in the order of its calls."""

    job: Job
    kinds: list[CallKind]
    """The kinds of all ranks."""
    calls: pl.DataFrame
    """One row per launch, with these columns:

    * `rank`; `kind`, its index in `kinds`; `row` of its first call among the rank's calls; `id`; `step`;
    * `number`; `counted`, whether the number was counted from the start of the file, because the file has none;
    * `called_ns`, `began_ns`, `ended_ns`; `placed`, whether start and end are exact, not only a duration.
    """
    sent: dict[int, Counter[int]]
    """Rank -> receiver -> bytes that batches of sends and uneven all_to_alls send; `kinds` does not have these."""
    not_placed: int
    """Bytes of these calls whose receiver is unknown."""
    attributed: Counter[str]
    """How times were measured -> number of calls or kernels, over all ranks."""
    unattributed: Counter[str]
    """Reason why a call has no time, or a kernel no call -> number of them, over all ranks."""

    @cached_property
    def facts(self) -> pl.DataFrame:
        """Return one row per kind with what its launches share."""
        rows = [_facts(kind, self.job.groups[kind.group]) for kind in self.kinds]
        return pl.DataFrame(rows, schema=_FACTS, orient="row")

    def about(self, frame: pl.DataFrame, *names: str) -> pl.DataFrame:
        """Return `frame`, which has a column `kind`, with columns of `facts`."""
        return frame.hstack(self.facts.select(names)[frame["kind"]])


def of_collectives(calls: pl.DataFrame, facts: pl.DataFrame, /, **aggregates: pl.Expr) -> pl.DataFrame:
    """Return one row per `collective` of the launches, with aggregates of `facts`, which has one row per kind."""
    # Launches of a collective usually share one kind, so the intermediate table is small.
    pair = pl.col("collective").cast(pl.Int64) * len(facts) + pl.col("kind")
    pairs = calls.select(pair).to_series().unique()
    kinds = facts[pairs % len(facts)].with_columns(collective=pairs // len(facts))
    return kinds.group_by("collective").agg(**aggregates).sort("collective")


# Categories take 4 bytes per row.
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
    """Return the bus factor; None if it has no meaning: for a barrier, a group of one, an unknown operation."""
    if op == SEND_RECV:
        return 1.0
    row = OPERATIONS.get(op)
    if row is None or row.bus_factor is None or (size < 2 and not row.p2p):
        return None
    return row.bus_factor(size)


def launches(job: Job, *, batches_apart: bool = False, release: bool = False) -> Launches:
    """Return the launches of all ranks of a job, which has at least one.

    With `release` the job drops the times of its calls to save memory, unless it has batches, which may be read again.
    With `batches_apart` each send and receive of a batch gets its own row, with the times of the batch. This applies
    only to files that number sends and receives per pair: counted numbers may be shifted, and a batch cannot show it.
    """
    return _LaunchBuilder(job, batches_apart, release).launches()


class _LaunchBuilder:
    """Converts the calls of all ranks to launches."""

    def __init__(self, job: Job, batches_apart: bool, release: bool) -> None:
        self._job = job
        self._release = release and all(max(trace.calls.batch, default=-1) < 0 for trace in job.ranks.values())
        self._apart = np.array([batches_apart and is_p2p(one) and not one.members for one in job.signatures], bool)
        """Signature -> whether its calls get their own rows, also in a batch."""
        self._kinds: dict[CallKind, int] = {}
        self._sent: dict[int, Counter[int]] = {rank: Counter() for rank in job.ranks}
        self._not_placed = 0
        self._attributed = Counter[str]()
        self._unattributed = Counter[str]()

    def launches(self) -> Launches:
        ranks = list(self._job.ranks)
        frames = [pl.DataFrame(schema=_CALLS)]
        for first in range(0, len(ranks), _RANKS_PER_CHUNK):
            some = ranks[first : first + _RANKS_PER_CHUNK]
            made = self._build(some)
            self._count(some, made)
            frames.append(self._number(made))
            del made
            if self._release:
                for trace in map(self._job.ranks.__getitem__, some):
                    calls = trace.calls
                    trace.calls = Calls(group=calls.group, signature=calls.signature, id=calls.id)
                del calls
                freed_memory.return_small_pieces()
        return Launches(
            job=self._job,
            kinds=list(self._kinds),
            # Column by column, so that only one column is in memory twice.
            calls=pl.DataFrame(
                {name: pl.concat([one.drop_in_place(name) for one in frames]).rechunk() for name in _CALLS}
            ),
            sent=self._sent,
            not_placed=self._not_placed,
            attributed=self._attributed,
            unattributed=self._unattributed,
        )

    def _number(self, made: pl.DataFrame) -> pl.DataFrame:
        """Return the columns of `Launches.calls`, with the final numbers."""
        rows = [(one.op == SEND_RECV, one.op in OPERATIONS, one.is_p2p) for one in self._kinds]
        of_kind = pl.DataFrame(rows, schema=dict.fromkeys(("batched", "known", "p2p"), pl.Boolean), orient="row")
        batched, numbered, given = pl.col("batched"), pl.col("numbered"), pl.col("number")
        # torch numbers sends and receives per group, crossrank per pair.
        counted = ~numbered | (pl.col("p2p") & ~pl.col("numbered_pairs"))
        own = (given == 0) | counted | batched
        # In a file with numbers, a call without one is damaged: counting would give it the number of another call.
        is_damaged = (given == 0) & ~counted & ~batched & (given > 0).any().over("rank")
        without = (given < 0) | ~(pl.col("known") | numbered | batched) | is_damaged
        return made.hstack(of_kind[made["kind"]]).select(
            *(pl.col(name).cast(_CALLS[name]) for name in ("rank", "kind", "row", "id")),
            number=pl.when(without).then(None).when(own).then("running").otherwise(given),
            counted=counted,
            step=pl.when(pl.col("step") != UNKNOWN_STEP).then("step"),
            called_ns=pl.when(pl.col("timed") & (pl.col("called") > 0)).then("called"),
            began_ns=pl.when(pl.col("ended") > 0).then("began"),
            ended_ns=pl.when(pl.col("ended") > 0).then("ended"),
            placed=pl.col("placed") & (pl.col("took") == 0),
        )

    def _build(self, ranks: Sequence[int]) -> pl.DataFrame:
        """Return one row per launch, rank after rank: kind, number of calls, and columns of its file. The column
        `running` counts the rank's launches on the group, or on the pair of ranks, from 1.

        A batch takes the position of its first call. Its time is from the first start to the last end.
        """
        began, ended, took, batch, id = map(pl.col, ("began", "ended", "took", "batch", "id"))
        traces = [self._job.ranks[rank] for rank in ranks]
        count = list(map(len, traces))
        given = {name: np.concatenate([getattr(one.calls, name) for one in traces]) for name in _COLUMNS}
        given["step"] = np.concatenate([one.call_steps for one in traces])
        given |= {name: np.repeat([getattr(one, name) for one in traces], count) for name in _FILE_COLUMNS}
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
        first = ("order", "row", "id", "number", "step", "called", *_FILE_COLUMNS)
        one = pl.lit(1, pl.UInt32)
        columns = ("rank", *first, "began", "ended", "took", "signature", "group")
        alone = rows.filter(batch < 0).select(*columns, whole=True, calls=one, together=one)
        alike = pl.len().over("rank", "batch", "began", "ended")
        # The id of a batch is that of its first call, and ids in a batch are consecutive.
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
        """Replace the signatures and groups of each launch by its `kind`."""
        keys = ("rank", "signature", "group", "whole", "together")
        alike = made.with_row_index("place").group_by(keys, maintain_order=True).agg("place", times=pl.len())
        kinds = [self._kind_of(*row) for row in alike.select(*keys, "times").iter_rows()]
        of_kind = alike.select("place", kind=pl.Series(kinds, dtype=pl.Int64)).explode("place").sort("place")
        return made.drop(keys[1:]).with_columns(of_kind["kind"])

    def _count(self, ranks: Sequence[int], made: pl.DataFrame) -> None:
        """Count calls with times, if the reader did not, and calls without."""
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
                # A recording may have times of Works and times measured by device events.
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
        """Return the number of the kind of a launch, and count what `times` such launches send.

        For a launch of one call, `signatures` and `groups` are single numbers.
        """
        signatures = [signatures] if isinstance(signatures, int) else signatures
        local = groups if isinstance(groups, int) else groups[0]
        records: Sequence[CommRecord] = [self._job.signatures[one] for one in signatures]
        if len(records) == 1 and records[0].members:
            records = records[0].members
            batch = records[0].batch
            whole = batch is None or all(one.id == batch + place for place, one in enumerate(records))
        group = self._job.groups[self._job.group_of[rank][local]]
        records = [self._drop_impossible_sizes(record, times) for record in records]
        kind = _kind(records, group, rank, whole, together)
        if kind.locality == "unknown":
            kind = msgspec.structs.replace(kind, locality=self._job.locality_of(group, kind.ends))
        if any(record.op in self._job.ranks[rank].sizes_of_others for record in records):
            self._unattributed[OTHER_ITERATION] += times
            # Keep the sign of `exchanged`: it shows whether the call has splits.
            kind = msgspec.structs.replace(kind, bytes=0, recorded=0, exchanged=min(kind.exchanged, 0), sized=False)
        else:
            self._count_sent(rank, records, group, times)
        return self._kinds.setdefault(kind, len(self._kinds))

    def _drop_impossible_sizes(self, record: CommRecord, times: int) -> CommRecord:
        """Return the record without sizes if any of them is impossible."""
        if has_possible_size(record):
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
        # Bytes that a rank sends to itself do not leave it.
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
    """Return (S, bytes exchanged with others) of a collective; for an uneven all_to_all, of the larger direction."""
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
