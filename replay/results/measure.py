"""What a replay measured: the times of every call on every rank, and what follows from all ranks together.

For one call of one pass, with arrivals a and ends e over the ranks that take part, all on rank 0's clock:

* issue: the time until the launch returned, on each rank; the host's own work.
* completion: e - a of a rank, waiting for others included.
* waiting: from a rank's arrival to the last rank's, the part of its completion that others cost it.
* time: from the last arrival to the last end: the collective itself. A call that is launched while others of its group
  are under way arrives when the backend is free for it. algbw = S / time, busbw = algbw x factor, with S
  and the factor of nccl-tests (`crossrank.comm.OPERATIONS`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from crossrank.comm import OPERATIONS, CommRecord
from crossrank.replay.plan.plan import Plan, launches
from crossrank.replay.plan.schedule import Key, keys_of
from crossrank.tools.analysis.buckets import bucket_of
from crossrank.tools.traces.replayed import CheckFailure, Percentiles, Row

if TYPE_CHECKING:
    import polars as pl


@dataclass
class Times:
    """One pass of one rank. All are nanoseconds of the monotonic clock, by call; calls of one launch share them."""

    launched: array[int]
    """The host made the call."""
    issued: array[int]
    """The launch had returned: the host could go on."""
    began: array[int]
    """As `launched`, but on a GPU when its stream came to the call."""
    completed: array[int]
    start: int
    end: int


class Pass(msgspec.Struct, kw_only=True):
    """The times of one rank in one pass, in ns of its monotonic clock; columns of int64 in the machine's order."""

    launched: bytes
    issued: bytes
    began: bytes
    completed: bytes
    start: int
    end: int

    @classmethod
    def of(cls, times: Times) -> Pass:
        return cls(
            launched=times.launched.tobytes(),
            issued=times.issued.tobytes(),
            began=times.began.tobytes(),
            completed=times.completed.tobytes(),
            start=times.start,
            end=times.end,
        )


class RankResult(msgspec.Struct, kw_only=True):
    """What one rank hands in."""

    rank: int
    host: str
    device: str
    offset_ns: int
    """To add to its clock to have rank 0's."""
    offset_error_ns: int
    passes: list[Pass]
    cpu_s: float
    """Of all measured passes."""
    late_ends: list[int]
    """Calls of which only the wait tells when they were over: at the latest then."""
    said: dict[str, int]
    """What differs from the recording -> calls."""
    check_failures: list[CheckFailure] | None
    """None where nothing was checked."""
    checked: int
    versions: dict[str, str]


@dataclass
class Measured:
    """One call over its ranks and all passes. Times in ns; a call of another rank has its own `records`."""

    key: Key
    records: dict[int, tuple[int, CommRecord]] = field(default_factory=dict)
    """Rank -> (index of the call, its record)."""
    time: list[int] = field(default_factory=list)
    """By pass."""
    batched: bool = False
    """It went out together with other calls: its times are those of all of them."""
    late_end: bool = False
    """On some rank only the wait tells when it was over: its times are upper bounds."""
    completion: dict[int, list[int]] = field(default_factory=dict)
    """By rank, by pass; so are the following."""
    waiting: dict[int, list[int]] = field(default_factory=dict)
    issue: dict[int, list[int]] = field(default_factory=dict)

    @property
    def record(self) -> CommRecord:
        """Of its first rank."""
        return next(iter(self.records.values()))[1]

    @property
    def op(self) -> str:
        op = "send/recv" if self.key[0] == "p2p" else self.record.op
        return f"{op}, batched" if self.batched else op

    @property
    def has_rate(self) -> bool:
        """Whether its bytes and its time belong together."""
        return self.bytes > 0 and not self.batched and not self.late_end

    @property
    def bytes(self) -> int:
        """S of nccl-tests; of an uneven all_to_all the largest of its ranks'."""
        return max(record.bytes for _, record in self.records.values())


def measure(plan: Plan, results: Sequence[RankResult]) -> list[Measured]:
    """Put the ranks' times side by side, in the order in which rank 0 and the others make their calls."""
    calls: dict[Key, Measured] = {}
    columns = {result.rank: [_columns(one, result.offset_ns) for one in result.passes] for result in results}
    late = {result.rank: set(result.late_ends) for result in results}
    for rank in plan.ranks:
        keys = keys_of(rank)
        for first, end in launches(rank.calls):
            for index in range(first, end):
                measured = calls.setdefault(keys[index], Measured(keys[index]))
                measured.records[rank.rank] = (index, rank.calls[index].record)
                measured.batched |= end - first > 1
                measured.late_end |= index in late[rank.rank]
    passes = len(results[0].passes) if results else 0
    for measured in calls.values():
        for rank_number in measured.records:
            measured.completion[rank_number], measured.waiting[rank_number] = [], []
            measured.issue[rank_number] = []
        for number in range(passes):
            arrivals, ends = {}, {}
            for rank_number, (index, _) in measured.records.items():
                launched, issued, began, completed = columns[rank_number][number]
                arrivals[rank_number], ends[rank_number] = began[index], completed[index]
                measured.issue[rank_number].append(issued[index] - launched[index])
            last = max(arrivals.values())
            measured.time.append(max(ends.values()) - last)
            for rank_number, arrival in arrivals.items():
                completion = ends[rank_number] - arrival
                measured.completion[rank_number].append(completion)
                measured.waiting[rank_number].append(min(last - arrival, completion))
    return list(calls.values())


def _columns(one: Pass, offset: int) -> tuple[array[int], ...]:
    columns = []
    for data in (one.launched, one.issued, one.began, one.completed):
        column = array("q", data)
        columns.append(array("q", (value + offset for value in column)) if offset else column)
    return tuple(columns)


def frame(measured: Sequence[Measured], plan: Plan) -> pl.DataFrame:
    """One row per call, rank and pass; times in ns. `call` numbers calls over the ranks, `index` those of a rank.

    `once` is set on one row of each call, `first` on one of each pass of it. `recorded` is null where the recording has
    no duration.
    """
    import polars as pl

    rows = []
    for number, call in enumerate(measured):
        size_from, size_to = bucket_of(call.bytes)
        of_call = {
            "call": number,
            "op": call.op,
            "record_op": call.record.op,
            "pg": call.record.pg,
            "size_from": size_from,
            "size_to": size_to,
            "bytes": call.bytes,
            "members": len(call.records),
            "has_rate": call.has_rate,
            "late_end": call.late_end,
            "releases_all": OPERATIONS[call.record.op].releases_all,
            "time": call.time,
        }
        for place, (rank, (index, _)) in enumerate(call.records.items()):
            own = {"issue": call.issue[rank], "completion": call.completion[rank], "waiting": call.waiting[rank]}
            recorded = plan.ranks[rank].calls[index].took_ns or None
            first = {"first": place == 0, "once": [place == 0] + [False] * (len(call.time) - 1)}
            rows.append({**of_call, **own, **first, "rank": rank, "index": index, "recorded": recorded})
    return pl.DataFrame(rows, schema_overrides={"recorded": pl.Int64}, infer_schema_length=1).explode(
        "time", "issue", "completion", "waiting", "once"
    )


_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def percentiles_us(nanoseconds: Sequence[float]) -> Percentiles:
    """Percentiles in us."""
    return Percentiles(**{name: round(float(np.quantile(nanoseconds, q)) / 1000, 3) for name, q in _SHARES.items()})


def table(times: pl.DataFrame, plan: Plan) -> list[Row]:
    """One row per operation, group and size bucket, the one that takes longest first."""
    import polars as pl

    def spread(values: pl.Expr) -> pl.Expr:
        return pl.struct((values.quantile(q, "linear") / 1000).round(3).alias(name) for name, q in _SHARES.items())

    rate = (pl.col("bytes") / pl.col("time").clip(1)).filter(pl.col("first") & pl.col("has_rate"))  # bytes/ns is GB/s
    rows = times.group_by("op", "pg", "size_from", "size_to", maintain_order=True).agg(
        calls=pl.col("once").sum(),
        bytes=pl.col("bytes").filter("once").sum(),
        time_us=spread(pl.col("time").filter("first")),
        issue_us=spread(pl.col("issue")),
        completion_us=spread(pl.col("completion")),
        waiting_us=spread(pl.col("waiting")),
        late_ends=(pl.col("once") & pl.col("late_end")).sum(),
        record_op=pl.col("record_op").first(),
        rates=pl.struct(rate.quantile(1 - q, "linear").alias(name) for name, q in _SHARES.items()),
    )
    found = [_row(plan, **row) for row in rows.to_dicts()]
    return sorted(found, key=lambda row: -row.time_us.p50 * row.calls)


def _row(plan: Plan, *, record_op: str, rates: dict[str, float | None], **columns: Any) -> Row:
    members = len(plan.group(columns["pg"]).ranks or ())
    factor = OPERATIONS[record_op].bus_factor
    known = {} if factor is None else {name: value for name, value in rates.items() if value is not None}
    scale = factor(members) if factor is not None else 0.0
    columns |= {name: Percentiles(**value) for name, value in columns.items() if name.endswith("_us")}
    return Row(
        ranks=members,
        algbw_gb_per_s=Percentiles(**known) if known else None,
        busbw_gb_per_s=Percentiles(**{name: value * scale for name, value in known.items()}) if known else None,
        **columns,
    )


def end_to_end_ns(results: Sequence[RankResult]) -> list[int]:
    """By pass: from the first rank's start to the last rank's end."""
    passes = len(results[0].passes) if results else 0
    return [
        max(one.passes[n].end + one.offset_ns for one in results)
        - min(one.passes[n].start + one.offset_ns for one in results)
        for n in range(passes)
    ]
