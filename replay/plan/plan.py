"""What is replayed: the calls of every rank with their waits and gaps, and what of the recording is left out.

A plan is data: it is made by `build_plan`, changed by `transform`, saved and loaded here, run by `worker`.
Nothing in it needs torch. On disk it is JSON, zstd-compressed where the name ends with `.zst`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

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
NOT_IN_STEPS = "not in --steps"


class PlannedCall(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One call of one rank."""

    record: CommRecord
    """As recorded, but for `pg`, which is the name of a group of the plan, the same on all ranks."""
    wait_before: Int
    """The rank waits for the call before it launches its call of this index: the next one = at once, the number of
    calls = at the end, `UNPLACED` = not recorded, to be placed by `schedule.place_waits`."""
    blocking: bool = False
    """The rank does not go on before the call is over; `wait_before` is then the next launch."""
    recorded_bytes: Count = 0
    """`record.bytes` as recorded, whatever a what-if made of them: what coverage counts."""
    recorded_calls: Count = 1
    """How many recorded calls coverage counts it for."""
    gap_ns: Count = 0
    """Recorded time before this launch, in ns, from the launch before; 0 within a batch."""
    gap_from_return: bool = False
    """The gap counts from when the rank could go on after the launch before: with no communication in it that the rank
    waited for there."""
    exposed_ns: Count = 0
    """Of a gap that counts from the launch before, the communication for which the rank waited in it, as far as its
    duration is recorded. What a device computed in the gap is at most the rest."""
    took_ns: Int | None = None
    """Recorded time from the begin of the communication to its end, on this rank; None where it is not recorded."""
    merged: list[Int] = []
    """Ids of recorded calls that it stands for beside its own."""

    @property
    def recorded_ids(self) -> list[int]:
        """Ids of the recorded calls that it stands for."""
        return [self.record.id, *self.merged]


class LeftOut(msgspec.Struct, kw_only=True):
    """Recorded calls that are not replayed, for one reason."""

    calls: Count = 0
    bytes: Count = 0
    """As far as they are known."""
    unsized: Count = 0
    """Calls of which the bytes are not known."""


def leave_out(rows: dict[str, LeftOut], reason: str, calls: int, size: int, unsized: int = 0) -> None:
    """Add to `rows` so many recorded calls, of `size` recorded bytes together; `unsized` of them do not say theirs."""
    row = rows.setdefault(reason, LeftOut())
    row.calls += calls
    row.bytes += size
    row.unsized += unsized


def copy_left_out(rows: dict[str, LeftOut]) -> dict[str, LeftOut]:
    """What a changed plan starts to count from."""
    return {reason: msgspec.structs.replace(row) for reason, row in rows.items()}


class RankPlan(msgspec.Struct, kw_only=True):
    """What one rank does."""

    rank: Int
    calls: list[PlannedCall]
    left_out: dict[str, LeftOut] = {}
    """By reason."""
    source: str = ""
    """The file that it was read from."""
    is_copy: bool = False
    """It was not recorded, and does what another rank did: its calls are none of the recording's."""
    compute: ComputePlan | None = None
    """What it computes between its calls, where that is replayed."""


def with_records(rank: RankPlan, records: Sequence[CommRecord | str]) -> RankPlan:
    """`rank` with these records instead of its own; a text leaves the call out for that reason."""
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
    """Set before which call each of `calls` is waited for; `before` has the new place of a call by its old one."""
    for position, call in enumerate(calls):
        if call.wait_before != UNPLACED:
            call.wait_before = max(before[call.wait_before], position + 1)


class Plan(msgspec.Struct, kw_only=True):
    """What all ranks do."""

    schema: str = SCHEMA
    source: str
    """The path that was given."""
    kind: str
    """What was read: a key of `replay_inputs.KINDS`."""
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    groups: list[Group]
    """Every group that is used, once. All ranks make them in this order."""
    ranks: list[RankPlan]
    """By rank, one for each rank of the world."""
    notes: list[str] = []
    """What was inferred or changed on the way here."""
    damage: list[str] = []
    """What of the files could not be read: nobody knows how many calls that were."""
    left_out: dict[str, LeftOut] = {}
    """What ranks did that were recorded and are not among `ranks`, by reason."""

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
        """The computation of every rank that was recorded."""
        return [rank.compute for rank in self.ranks if rank.compute is not None and not rank.is_copy]

    @property
    def calls(self) -> int:
        """Calls of one pass, over all ranks, as they are made."""
        return sum(len(rank.calls) for rank in self.ranks)

    @property
    def bytes(self) -> int:
        """S of all calls of one pass, as they are made."""
        return sum(call.record.bytes for rank in self.ranks for call in rank.calls)

    def group(self, pg: str) -> Group:
        """The group of that name. Raises KeyError for a name that the plan lacks."""
        for group in self.groups:
            if group.pg == pg:
                return group
        raise KeyError(pg)


def launches(calls: Sequence[PlannedCall]) -> list[tuple[int, int]]:
    """(first, one past the last) of the calls that go out as one launch: one call, or those of one batch in a row.

    >>> def call(id, batch=None):
    ...     record = CommRecord(id=id, op="send", c10d="send", pg="0", bytes=4, t=0, batch=batch)
    ...     return PlannedCall(record=record, wait_before=3)
    >>> launches([call(0), call(1, batch=1), call(2, batch=1)])
    [(0, 1), (1, 3)]
    """
    found: list[tuple[int, int]] = []
    for index, call in enumerate(calls):
        batch = call.record.batch
        if found and batch is not None and calls[found[-1][0]].record.batch == batch:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found


def check_world_size(size: int, path: str) -> None:
    """Raise `CrossrankError` where `size`, of the files at `path`, is no number of ranks that a job has."""
    if not 1 <= size <= MOST_RANKS:
        raise CrossrankError(
            f"{path}: {size} is not a number of ranks from 1 to {MOST_RANKS}; record it again, or give it with "
            "--world-size"
        )


def number_of(record: CommRecord) -> int | None:
    """The recorded number of a call: among those with its peer, or among those of its group."""
    return record.p2p_seq if is_p2p(record) else record.seq


def waited_before(calls: Sequence[PlannedCall], spans: Sequence[tuple[int, int]]) -> list[int]:
    """For each launch of `spans`, before which launch it is waited for; their number = at the end.

    A batch is waited for as a whole, where the last of its calls is.
    """
    launch_of = {index: position for position, (first, end) in enumerate(spans) for index in range(first, end)}
    return [
        max(position + 1, *(launch_of.get(calls[index].wait_before, len(spans)) for index in range(first, end)))
        for position, (first, end) in enumerate(spans)
    ]


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write `plan` to `path`. Raises `CrossrankError` where that fails."""
    data = msgspec.json.encode(plan)
    if str(path).endswith(".zst"):
        data = zstandard.compress(data)
    try:
        with whole_file(Path(path)) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise CrossrankError(f"{path}: the plan cannot be written ({one_line(error)}); name another file") from error


def load_plan(path: str) -> Plan:
    """The plan in `path`, plain, gzip or zstd. Raises `CrossrankError` where it holds none."""
    issues = ReadIssues(path)
    data = b"".join(read_chunks(path, issues))
    if issues.problems:
        raise CrossrankError(f"{path}: {issues.problems[0]}; save the plan anew")
    try:
        plan = msgspec.json.decode(data, type=Plan)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CrossrankError(f"{path}: is no plan of crossrank ({one_line(error)}); save the plan anew") from error
    if plan.schema != SCHEMA:
        raise CrossrankError(f"{path}: written as {plan.schema!r}, read as {SCHEMA!r}; make the plan anew")
    check_plan(plan, path)
    return plan


def check_plan(plan: Plan, path: str) -> None:
    """Raise `CrossrankError` where `plan`, which may have been written by hand, contradicts itself."""
    for problem in _contradictions(plan):
        raise CrossrankError(f"{path}: {problem}; make the plan anew")


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
