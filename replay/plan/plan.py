"""The plan of a replay: the calls of every rank with their waits and gaps, and the recorded calls that it skips.

`build_plan` makes a plan, `transform` changes it, `worker` runs it. It is data and needs no torch. On disk it is JSON,
compressed with zstd if the name ends with `.zst`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import zstandard

from crossrank.atomic_file import whole_file
from crossrank.comm import MOST_RANKS, CommRecord, Count, Group, Int, has_size, is_p2p
from crossrank.errors import CrossrankError, one_line
from crossrank.recording import ReadIssues, read_chunks
from crossrank.replay.plan.compute.compute_plan import ComputePlan, contradictions
from crossrank.replay.plan.shapes import BrokenError, LeftOutError, complete
from crossrank.tools.traces.replayed import Coverage

SCHEMA = "crossrank-plan 1"
UNPLACED = -1
Streams = Literal["per rank", "per group", "per thread"]
"""Which recorded threads of a rank make their calls as one thread, on one stream (`streams.SHARINGS`)."""
PER_RANK: Streams = "per rank"
PER_GROUP: Streams = "per group"
PER_THREAD: Streams = "per thread"
NOT_IN_STEPS = "not in --steps"


class PlannedCall(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One call of one rank."""

    record: CommRecord
    """As recorded, except `pg`: the name of a group of the plan, the same on all ranks."""
    wait_before: Int
    """The index of the call before whose launch the rank waits for this one. The next index: at once. The number of
    calls: at the end. `UNPLACED`: not recorded, `schedule.place_waits` decides."""
    blocking: bool = False
    """The rank waits for the call at once; `wait_before` is then the next launch."""
    recorded_bytes: Count = 0
    """`record.bytes` as recorded, before any what-if. Coverage counts these."""
    recorded_calls: Count = 1
    """The number of recorded calls that coverage counts for it."""
    gap_ns: Count = 0
    """Recorded time between the previous launch and this one, in ns; 0 within a batch."""
    gap_from_return: bool = False
    """The gap starts when the rank could continue after the previous launch: it contains no wait for communication."""
    exposed_ns: Count = 0
    """If the gap starts at the previous launch: the recorded communication in it for which the rank waited. The
    computation in the gap takes at most the rest."""
    took_ns: Int | None = None
    """Recorded duration of the communication on this rank, in ns; None if it is not recorded."""
    merged: list[Int] = []
    """Ids of the other recorded calls that it represents."""

    @property
    def recorded_ids(self) -> list[int]:
        """Return the ids of all recorded calls that it represents."""
        return [self.record.id, *self.merged]


class LeftOut(msgspec.Struct, kw_only=True):
    """Recorded calls that the replay skips for one reason."""

    calls: Count = 0
    bytes: Count = 0
    """The sum of the known sizes."""
    unsized: Count = 0
    """The number of calls without a known size."""


def leave_out(rows: dict[str, LeftOut], reason: str, calls: int, size: int, unsized: int = 0) -> None:
    """Add `calls` skipped calls with `size` recorded bytes in total to `rows`; `unsized` of them have no known size."""
    row = rows.setdefault(reason, LeftOut())
    row.calls += calls
    row.bytes += size
    row.unsized += unsized


def copy_left_out(rows: dict[str, LeftOut]) -> dict[str, LeftOut]:
    """Copy the counts of skipped calls, so that a changed plan can add to them."""
    return {reason: msgspec.structs.replace(row) for reason, row in rows.items()}


class RankPlan(msgspec.Struct, kw_only=True):
    """The calls of one rank."""

    rank: Int
    calls: list[PlannedCall]
    left_out: dict[str, LeftOut] = {}
    """Skipped calls by reason."""
    source: str = ""
    """The file that it was read from."""
    is_copy: bool = False
    """It was not recorded and repeats another rank's calls. Coverage does not count them."""
    compute: ComputePlan | None = None
    """The computation between its calls, if the replay runs it."""


def with_records(rank: RankPlan, records: Sequence[CommRecord | str]) -> RankPlan:
    """Return `rank` with these records instead of its own. A string in place of a record skips the call for that
    reason."""
    changed = msgspec.structs.replace(rank, calls=[], left_out=copy_left_out(rank.left_out))
    kept_before = [0]
    for call, record in zip(rank.calls, records, strict=True):
        if isinstance(record, str):
            leave_out(changed.left_out, record, 1, call.recorded_bytes, not has_size(call.record))
        else:
            changed.calls.append(msgspec.structs.replace(call, record=record))
        kept_before.append(len(changed.calls))
    move_waits(changed.calls, kept_before)
    return changed


def move_waits(calls: Sequence[PlannedCall], before: Sequence[int]) -> None:
    """Update `wait_before` of `calls`; `before` maps the old index of a call to its new one."""
    for position, call in enumerate(calls):
        if call.wait_before != UNPLACED:
            call.wait_before = max(before[call.wait_before], position + 1)


class Plan(msgspec.Struct, kw_only=True):
    """The calls of all ranks."""

    schema: str = SCHEMA
    source: str
    """The path that the user gave."""
    kind: str
    """The kind of files that were read: a key of `replay_inputs.KINDS`."""
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    groups: list[Group]
    """Every used group once. All ranks create them in this order."""
    ranks: list[RankPlan]
    """By rank, one for each rank of the world."""
    notes: list[str] = []
    """What crossrank inferred or changed while it made the plan."""
    damage: list[str] = []
    """What could not be read of the files. The number of lost calls is unknown."""
    left_out: dict[str, LeftOut] = {}
    """Skipped calls of recorded ranks that are not among `ranks`, by reason."""

    def coverage(self) -> Coverage:
        recorded = [rank for rank in self.ranks if not rank.is_copy]
        kept = [call.recorded_bytes for rank in recorded for call in rank.calls]
        calls = sum(call.recorded_calls for rank in recorded for call in rank.calls)
        left = [row for rows in (self.left_out, *(rank.left_out for rank in recorded)) for row in rows.items()]
        reasons: Counter[str] = Counter()
        for reason, row in left:
            reasons[reason] += row.calls
        return Coverage(
            calls=calls,
            recorded_calls=calls + reasons.total(),
            bytes=sum(kept),
            recorded_bytes=sum(kept) + sum(row.bytes for _, row in left),
            unsized=sum(row.unsized for _, row in left),
            reasons=dict(reasons.most_common()),
            damaged=bool(self.damage),
        )

    def recorded_computation(self) -> list[ComputePlan]:
        """Return the computation of every recorded rank."""
        return [rank.compute for rank in self.ranks if rank.compute is not None and not rank.is_copy]

    @property
    def calls(self) -> int:
        """Return the number of calls that all ranks make in one pass."""
        return sum(len(rank.calls) for rank in self.ranks)

    @property
    def bytes(self) -> int:
        """Return the bytes (S of nccl-tests) of all calls of one pass."""
        return sum(call.record.bytes for rank in self.ranks for call in rank.calls)

    def group(self, pg: str) -> Group:
        """Return the group with this name. Raises `KeyError` if the plan lacks it."""
        for group in self.groups:
            if group.pg == pg:
                return group
        raise KeyError(pg)


def launches(calls: Sequence[PlannedCall]) -> list[tuple[int, int]]:
    """Return (first, one past the last) for each launch of `calls`: one call, or the consecutive calls of a batch.

    >>> def call(id, batch=None):
    ...     record = CommRecord(id=id, op="send", c10d="send", pg="0", bytes=4, t=0, batch=batch)
    ...     return PlannedCall(record=record, wait_before=3)
    >>> launches([call(0), call(1, batch=1), call(2, batch=1)])
    [(0, 1), (1, 3)]
    """
    spans: list[tuple[int, int]] = []
    for index, call in enumerate(calls):
        batch = call.record.batch
        if spans and batch is not None and calls[spans[-1][0]].record.batch == batch:
            spans[-1] = (spans[-1][0], index + 1)
        else:
            spans.append((index, index + 1))
    return spans


def check_world_size(size: int, path: str) -> None:
    """Raise `CrossrankError` if `size`, read from `path`, is not a possible number of ranks."""
    if not 1 <= size <= MOST_RANKS:
        raise CrossrankError(
            f"{path}: {size} is not a number of ranks from 1 to {MOST_RANKS}; record it again, or give it with "
            "--world-size"
        )


def number_of(record: CommRecord) -> int | None:
    """Return the recorded number of a call, counted per peer (P2P) or per group (collectives)."""
    return record.p2p_seq if is_p2p(record) else record.seq


def waited_before(calls: Sequence[PlannedCall], spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return, for each launch of `spans`, the launch before which the rank waits for it; `len(spans)`: at the end.

    A batch is waited for as a whole, at the latest wait of its calls.
    """
    launch_of = {index: position for position, (first, end) in enumerate(spans) for index in range(first, end)}
    return [
        max(position + 1, *(launch_of.get(calls[index].wait_before, len(spans)) for index in range(first, end)))
        for position, (first, end) in enumerate(spans)
    ]


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write `plan` to `path`. Raises `CrossrankError` if that fails."""
    data = msgspec.json.encode(plan)
    if str(path).endswith(".zst"):
        data = zstandard.compress(data)
    try:
        with whole_file(Path(path)) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise CrossrankError(f"{path}: cannot be written ({one_line(error)}); choose another file") from error


def load_plan(path: str) -> Plan:
    """Read a plan from `path`: plain, gzip or zstd. Raises `CrossrankError` if it holds none."""
    issues = ReadIssues(path)
    data = b"".join(read_chunks(path, issues))
    if issues.problems:
        raise CrossrankError(f"{path}: {issues.problems[0]}; save the plan again")
    try:
        plan = msgspec.json.decode(data, type=Plan)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CrossrankError(f"{path}: is not a plan of crossrank ({one_line(error)}); save the plan again") from error
    if plan.schema != SCHEMA:
        raise CrossrankError(f"{path}: written as {plan.schema!r}, read as {SCHEMA!r}; save the plan again")
    check_plan(plan, path)
    return plan


def check_plan(plan: Plan, path: str) -> None:
    """Raise `CrossrankError` if `plan` contradicts itself. A user may have written it by hand."""
    for problem in _contradictions(plan):
        raise CrossrankError(f"{path}: {problem}; save the plan again")


def _contradictions(plan: Plan) -> Iterator[str]:
    for rank in plan.ranks:
        for problem in contradictions(rank.compute) if rank.compute is not None else ():
            yield f"rank {rank.rank}: {problem}"
    members: dict[str, Group] = {}
    for group in plan.groups:
        ranks = group.ranks or []
        if group.pg in members:
            yield f"group {group.pg!r} stands twice"
        if not ranks or len(set(ranks)) != len(ranks):
            yield f"group {group.pg!r} has no members, or one of them twice"
        if not all(0 <= rank < plan.world_size for rank in ranks):
            yield f"group {group.pg!r} has a member outside the {plan.world_size} ranks"
        members[group.pg] = group
    if len(plan.ranks) != plan.world_size or any(rank.rank != number for number, rank in enumerate(plan.ranks)):
        yield f"its ranks are not 0 to {plan.world_size - 1}"
    for rank in plan.ranks:
        for index, call in enumerate(rank.calls):
            what = f"call {index} of rank {rank.rank} ({call.record.op})"
            try:
                if complete(call.record, members.get(call.record.pg), rank.rank) != call.record:
                    yield f"{what} does not say all of its tensors, or other bytes than they have"
            except (LeftOutError, BrokenError) as error:
                yield f"{what}: {error}"
            if call.wait_before != UNPLACED and not index < call.wait_before <= len(rank.calls):
                yield f"{what} is waited for before call {call.wait_before}, which is not after it"
