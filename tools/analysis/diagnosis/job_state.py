"""A job when its ranks were last seen: the progress of each on every group, and what has finished on all."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from crossrank.comm import OPERATIONS, CommRecord, is_p2p, operation_of
from crossrank.tools.analysis.diagnosis.main_threads import (
    is_destroying_groups,
    may_wait,
    syncs,
    waits_elsewhere,
    waits_in_call,
)
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.job.job import Job
from crossrank.tools.traces.rank_trace import COMPLETED, GLOO, RETIRED, SCHEDULED, RankTrace

if TYPE_CHECKING:
    from typing_extensions import Self

    from crossrank.tools.traces.flight.dump import Frame

CLEARLY_STALE = 3
"""Ends that a rank must have missed before its GPU or its watchdog is called stuck: the last one may be just late."""

_SETTLED = 3_000_000_000
"""ns after which a call that has ended is sure to be noticed by a rank that notices anything, on a busy machine too."""

_AHEAD = 4000
"""Calls by which a host is ahead of its GPU at most: CUDA's queue of launches is full long before."""


def releases_all(op: str) -> bool:
    """Whether an operation ends on no rank before every rank has begun it."""
    operation = OPERATIONS.get(op)
    return operation is not None and operation.releases_all


def called_op(signature: CommRecord) -> str:
    """Return the operation that was called: gloo implements reduce_scatter as an all_reduce, which torch records."""
    called = operation_of(signature.c10d) if signature.op == "all_reduce" else None
    return signature.op if called is None or called.name == "barrier" else called.name


def reports_ends(trace: RankTrace) -> bool:
    """Whether a rank's file shows the ends of its calls; comms files and the dumps of gloo do not."""
    return trace.source == "flight" and trace.backend != GLOO and not trace.dump.ends_frozen


def ends_unknown(trace: RankTrace) -> bool:
    """Whether it is unknown which calls of a rank have finished: with NCCL they return before, and torch does not show
    it."""
    return "nccl" in trace.backend and (trace.source == "comms" or trace.dump.ends_frozen)


def is_torchs_own(trace: RankTrace) -> bool:
    """Whether it is a dump of NCCL's recorder that torch wrote itself: without stacks and the moment when it was taken,
    and without a call that waits for its communicator to be made."""
    of_torch = trace.source == "flight" and not trace.dump.of_log
    return of_torch and "nccl" in trace.backend and trace.ending.taken_at is None


@dataclass
class JobState(Job):
    """A job, and the state of each rank when it was last seen."""

    clock_offset: dict[int, int] = field(default_factory=dict)
    """Rank -> what to add to its times, in ns, to bring the clocks of the ranks together."""

    @classmethod
    def match(cls, traces: Sequence[RankTrace], world_size: int | None = None, *, lanes: bool = True) -> Self:
        """As `Job.match`, after ranks have shared what the dumps of some of them do not show."""
        _share_what_dumps_leave_out(traces)
        _keep_backends_apart(traces)
        _doubt_returns(traces)
        return super().match(traces, world_size, lanes=lanes)

    @cached_property
    def releases_all(self) -> list[bool]:
        """For each signature, whether its operation releases all ranks."""
        return [releases_all(signature.op) for signature in self.signatures]

    @cached_property
    def open_rows(self) -> dict[int, list[int]]:
        """Rank -> rows of the calls that it is not done with itself."""
        return {
            rank: [row for row, state in enumerate(trace.calls.state) if state < RETIRED]
            for rank, trace in self.ranks.items()
        }

    @cached_property
    def all_enqueued(self) -> dict[int, dict[int, int | None]]:
        """Index of a group -> what `enqueued` gives for each of its members, in rising order."""
        return {group.index: {rank: self.enqueued(group, rank) for rank in group.ranks} for group in self.groups}

    @cached_property
    def made_by_all(self) -> dict[int, int]:
        """Index of a group -> the last of its collectives that every member is known to have made; 0 = none."""
        return {
            index: min((last or 0 for last in every.values()), default=0) for index, every in self.all_enqueued.items()
        }

    def enqueued(self, group: ProcessGroup, rank: int) -> int | None:
        """The last collective that `rank` is known to have called on `group`; None where nothing shows it."""
        trace, local, lane = self.ranks.get(rank), group.local_index.get(rank), group.lanes.get(rank)
        if trace is None:
            return None
        dump = trace.dump
        if local is not None:
            last = max(lane.numbers[-1] if lane is not None else 0, dump.collectives_seen.get(local, 0))
            if last or trace.leaves_out(trace.groups[local].group):
                return last or None
            progress = dump.progress.get(local)
            # P2P calls put their number in the same place, and gloo's are not even among the entries.
            if progress is not None and not group.has_p2p and not trace.is_gloo(local):
                return max(progress.last_enqueued_collective, 0)
            if progress is None and dump.all_joined:
                return 0  # a group has a status from its first call on
        return None if dump.active_only or dump.wrapped else 0

    def completed(self, group: ProcessGroup, rank: int) -> int:
        """The last collective of `group` that `rank` itself saw the end of; 0 = none that is known."""
        trace, lane, local = self.ranks[rank], group.lanes.get(rank), group.local_index.get(rank)
        best = self._last_in_state(group, rank, COMPLETED)
        if local is None or trace.is_gloo(local):  # gloo counts a collective that timed out as completed
            return best
        if trace.dump.active_only and lane is not None:
            best = max(best, lane.numbers[0] - 1)  # those before the first open one were left out
        progress = trace.dump.progress.get(local)
        if progress is not None and not group.has_p2p:  # P2P puts its own numbers there
            best = max(best, progress.last_completed_collective)
        return best

    @cached_property
    def held_in(self) -> dict[int, int]:
        """Rank -> row of its last call, in which its host is blocked, if nothing else shows which calls have finished.
        NCCL makes a communicator, or connects ranks, in the first call that needs it."""
        return {
            rank: len(trace.calls) - 1
            for rank, trace in self.ranks.items()
            if len(trace.calls) and ends_unknown(trace) and waits_in_call(trace.ending, *self._last_call(rank))
        }

    def waits_for_none(self, rank: int) -> bool:
        """Whether a rank is known to wait for none of its calls. On gloo its threads show it, because hosts wait for
        communication themselves. With NCCL, all its unfinished calls must be sends and receives without a wait."""
        trace = self.ranks[rank]
        if trace.backend == GLOO:
            # Another thread may do all of the training. One that only receives listens.
            listens = all(self.signature(rank, row).op == "recv" for row in trace.awaited)
            knows_calls = all(one.id is not None for one in trace.ending.waits or ())
            return listens and knows_calls and not may_wait(trace.ending)
        rows = self.open_rows[rank]
        return trace.source == "flight" and bool(rows) and trace.unawaited.issuperset(rows) and not syncs(trace.ending)

    def waits_unrecorded(self, rank: int) -> bool:
        """Whether the main thread of a rank hung inside torch.distributed in something other than its last call."""
        trace = self.ranks[rank]
        if ends_unknown(trace) and is_destroying_groups(trace.ending):  # it waits for the end of calls
            return False
        return waits_elsewhere(trace.ending, *self._last_call(rank))

    def _last_call(self, rank: int) -> tuple[tuple[Frame, ...], int]:
        """Where and when a rank made its last call; nowhere where it made none."""
        calls = self.ranks[rank].calls
        return (self.stack(rank, len(calls) - 1) if len(calls) else ()), max(calls.called, default=0)

    @cached_property
    def over(self) -> dict[int, int]:
        """Index of a group -> the last of its collectives that has finished on every rank."""
        return {group.index: self._released(group) for group in self.groups}

    def _released(self, group: ProcessGroup) -> int:
        """The last collective that finished on every rank, because one that no rank leaves early has ended somewhere.

        Collectives of one group end in order, so all before it have finished as well.
        """
        present = [rank for rank in group.ranks if rank in self.ranks]
        last = max((self.completed(group, rank) for rank in present), default=0)
        # A retired call may have timed out; but not where every member has made it.
        if present and len(present) == len(group.ranks):
            made_by_all = min(self.enqueued(group, rank) or 0 for rank in present)
            retired = max(self._last_in_state(group, rank, RETIRED) for rank in present)
            if all(self.ranks[rank].source == "comms" or ends_unknown(self.ranks[rank]) for rank in present):
                held = [self._held_on(group, rank) for rank in present]
                retired = min(
                    [made_by_all, *(number - 1 for number in held if number)]
                )  # nothing else says that one ended
            last = max(last, min(retired, made_by_all))
        while last > 0:
            op = next((self.signature(rank, row).op for rank, row in self.rows_of(group, last)), None)
            if op is None or (releases_all(op) and not OPERATIONS[op].by_pairs):
                break
            last -= 1
        return last

    def _held_on(self, group: ProcessGroup, rank: int) -> int | None:
        """The number of the collective of a group that the host of a rank is held in."""
        row = self.held_in.get(rank)
        if row is None or self.group_at(rank, row) is not group or is_p2p(self.signature(rank, row)):
            return None
        return self.ranks[rank].calls.number[row]

    @staticmethod
    def rows_of(group: ProcessGroup, number: int) -> Iterator[tuple[int, int]]:
        """(rank, row) of all ranks that made a collective."""
        rows = ((rank, lane.row(number)) for rank, lane in group.lanes.items())
        return ((rank, row) for rank, row in rows if row is not None)

    @cached_property
    def unnoticed(self) -> dict[int, list[int]]:
        """Rank -> rows of its finished collectives whose end it has not noticed; only ranks with such rows."""
        found: dict[int, list[int]] = {}
        for rank, trace in self.ranks.items():
            calls, own, taken_at = trace.calls, self.group_of[rank], trace.ending.taken_at
            # What was made just before the dump may have ended just after.
            last = len(calls) if taken_at is None else bisect_left(calls.called, taken_at - _SETTLED)
            rows = [
                row
                for row in self.open_rows[rank]
                if row < last
                and calls.number[row] <= self.over[own[calls.group[row]]]
                and not is_p2p(self.signature(rank, row))
                and not trace.is_gloo(calls.group[row])
            ]
            if rows and reports_ends(trace):
                found[rank] = rows
        return found

    def blind_until(self, rank: int) -> int:
        """The row before which nothing follows from a call that looks open: the rank notices no ends. 0 = it does."""
        rows = self.unnoticed.get(rank, [])
        return rows[-1] if len(rows) >= CLEARLY_STALE else 0

    def moment(self, rank: int, row: int) -> int:
        """When a call was made, in ns since 1970, on a clock that is that of all ranks as far as is known."""
        return self.ranks[rank].calls.called[row] + self.clock_offset.get(rank, 0)

    def _last_in_state(self, group: ProcessGroup, rank: int, state: int) -> int:
        """The last collective of the rank that has come as far as `state`; 0 = none."""
        lane, states = group.lanes.get(rank), self.ranks[rank].calls.state
        calls = zip(reversed(lane.rows), reversed(lane.numbers), strict=True) if lane is not None else ()
        return next((number for row, number in calls if states[row] >= state), 0)


def _keep_backends_apart(traces: Sequence[RankTrace]) -> None:
    """Count a rank that used only gloo of a group's backends like the ranks that also used another one."""
    if not any(group.apart == GLOO for one in traces for group in one.groups):
        return
    for one in traces:
        if one.backend == GLOO:
            one.groups = [group if group.apart else msgspec.structs.replace(group, apart=GLOO) for group in one.groups]


def _doubt_returns(traces: Sequence[RankTrace]) -> None:
    """Open the calls with NCCL that are only recorded as returned: with NCCL they return before they finish.

    Where hosts wait for calls, one that has ended its wait is past the call.

    The calls of the other ranks show whether they have finished, so all of those must be known.
    """
    known = {one.rank for one in traces}
    for one in traces:
        if not ends_unknown(one):
            continue
        members = [group.group.ranks if "nccl" in group.group.backend else None for group in one.groups]
        in_group = [ranks is not None and known.issuperset(ranks) for ranks in members]
        is_open = [not is_p2p(signature) or signature.peer in known for signature in one.signatures]
        calls = one.calls
        for row in range(max(len(calls) - _AHEAD, 0), len(calls)):
            if one.dump.hosts_wait and row in one.waited:
                continue
            if calls.state[row] == RETIRED and in_group[calls.group[row]] and is_open[calls.signature[row]]:
                calls.state[row] = SCHEDULED


def _share_what_dumps_leave_out(traces: Sequence[RankTrace]) -> None:
    """All ranks of a job dump alike: where one leaves completed calls out, so does one that does not show it."""
    if not any(one.dump.active_only for one in traces):
        return
    for one in traces:
        if reports_ends(one) and COMPLETED not in one.calls.state and one.groups:
            one.dump.active_only, one.dump.wrapped = True, False
