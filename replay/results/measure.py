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
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from crossrank.comm import OPERATIONS, CommRecord
from crossrank.replay.plan.plan import Plan, launches
from crossrank.replay.plan.schedule import Key, keys_of
from crossrank.tools.analysis.buckets import bucket_of


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


class CheckFailure(msgspec.Struct, kw_only=True):
    """A result that is not what it must be."""

    rank: int
    call: int
    """Id of the record."""
    op: str
    pg: str
    tensor: int
    """Which of the call's output tensors."""
    element: int
    """The first that is wrong."""
    elements: int
    """How many are."""
    expected: float
    got: float


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


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of `values` lie, between two of them by proportion.

    >>> percentile([1, 2, 3, 4, 5], 0.5), percentile([10, 20], 0.95)
    (3.0, 19.5)
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def percentiles_us(nanoseconds: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 in us."""
    return {name: round(percentile(nanoseconds, share) / 1000, 3) for name, share in _SHARES.items()}


class Row(msgspec.Struct, kw_only=True):
    """Calls of one operation, size and group. Times in us, bandwidths in GB/s (1e9 bytes)."""

    op: str
    pg: str
    ranks: int
    """Members of the group."""
    size_from: int
    """Sizes of the bucket in bytes, S of nccl-tests; both ends belong to it."""
    size_to: int
    calls: int
    bytes: int
    """Of all calls of one pass."""
    time_us: dict[str, float]
    issue_us: dict[str, float]
    completion_us: dict[str, float]
    waiting_us: dict[str, float]
    algbw_gb_per_s: dict[str, float] | None
    """p50, p95 and p99 of the time, so a smaller bandwidth stands at p95; None where there is none: of a barrier, of
    calls of a batch, of calls with a late end."""
    busbw_gb_per_s: dict[str, float] | None
    late_ends: int
    """Calls of which only a wait tells when they were over: their times are upper bounds."""


def table(measured: Sequence[Measured], plan: Plan) -> list[Row]:
    """One row per operation, group and size bucket, the one that takes longest first."""
    found: dict[tuple[str, str, tuple[int, int]], list[Measured]] = defaultdict(list)
    for call in measured:
        found[call.op, call.record.pg, bucket_of(call.bytes)].append(call)
    rows = [_row(op, pg, size, calls, plan) for (op, pg, size), calls in found.items()]
    return sorted(rows, key=lambda row: -row.time_us["p50"] * row.calls)


def _row(op: str, pg: str, size: tuple[int, int], calls: list[Measured], plan: Plan) -> Row:
    members = len(plan.group(pg).ranks or ())
    times = [time for call in calls for time in call.time]
    rates = [call.bytes / max(time, 1) for call in calls if call.has_rate for time in call.time]  # bytes/ns is GB/s
    factor = OPERATIONS[calls[0].record.op].bus_factor
    algbw = busbw = None
    if factor is not None and rates:
        algbw = {name: percentile(rates, 1 - share) for name, share in _SHARES.items()}
        busbw = {name: value * factor(members) for name, value in algbw.items()}
    return Row(
        op=op,
        pg=pg,
        ranks=members,
        size_from=size[0],
        size_to=size[1],
        calls=len(calls),
        bytes=sum(call.bytes for call in calls),
        time_us=percentiles_us(times),
        issue_us=percentiles_us(list(_flat(call.issue for call in calls))),
        completion_us=percentiles_us(list(_flat(call.completion for call in calls))),
        waiting_us=percentiles_us(list(_flat(call.waiting for call in calls))),
        algbw_gb_per_s=algbw,
        busbw_gb_per_s=busbw,
        late_ends=sum(call.late_end for call in calls),
    )


def _flat(columns: Iterator[dict[int, list[int]]]) -> Iterator[int]:
    for by_rank in columns:
        for values in by_rank.values():
            yield from values


def end_to_end_ns(results: Sequence[RankResult]) -> list[int]:
    """By pass: from the first rank's start to the last rank's end."""
    passes = len(results[0].passes) if results else 0
    return [
        max(one.passes[n].end + one.offset_ns for one in results)
        - min(one.passes[n].start + one.offset_ns for one in results)
        for n in range(passes)
    ]
