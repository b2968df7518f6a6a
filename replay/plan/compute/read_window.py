"""Reads the computation of one rank in a window, with its calls at their positions. Runs in worker processes."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

import msgspec

from crossrank.comm import CommRecord
from crossrank.errors import CrossrankError
from crossrank.replay.plan.compute.compute_plan import (
    NO_SCHEMA,
    ComputeOperation,
    ComputePlan,
    flat_results,
    slots_in,
)
from crossrank.replay.plan.compute.index_ranges import IndexRanges
from crossrank.replay.plan.compute.outermost import Outermost, WindowOps, outermost
from crossrank.replay.plan.compute.step_times import StepTimes, step_times
from crossrank.replay.plan.compute.streams import place_on_streams
from crossrank.replay.plan.compute.tensors import StandInError, Storage, Tensors
from crossrank.replay.plan.schedule import returns_early
from crossrank.tools.graph.linking.current import read_current
from crossrank.tools.graph.linking.linked_trace import Communication, HostOp, LinkedTrace
from crossrank.tools.graph.linking.window_files import RankInput
from crossrank.tools.job.read_rank import RankSources, of_linked
from crossrank.tools.paused_gc import paused_gc
from crossrank.tools.traces.execution_trace import IO, io
from crossrank.tools.traces.rank_trace import RankTrace, waits_of

_AS_STRIDED = (
    "aten::as_strided(Tensor(a) self, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) -> Tensor(a)"
)
_SHORTEST_SHARE = 0.1
"""The shortest gaps are this share of all gaps."""
_MIN_GAPS = 20
"""The fewest gaps of a kind for an estimate."""
_CLOCKS_NS = 2_000
"""The largest difference between the clock of the comms file and that of the trace."""


@dataclass(kw_only=True)
class RankWindow:
    """The calls and the computation of one rank in a window."""

    trace: RankTrace
    compute: ComputePlan


@paused_gc()
def read_window(given: RankInput) -> RankWindow:
    """Read the window of one rank. Raises `CrossrankError` if its files cannot be used."""
    window = read_current(given)
    communications = _with_unique_ids(window.communications)
    window.communications = communications
    source = RankSources(kind="linked", path=given.linked or given.et, rank=given.rank)
    trace = of_linked(window, source)
    decoded: dict[int, tuple[IO, IO]] = {}

    def sides(op: HostOp) -> tuple[IO, IO]:
        if op.id not in decoded:
            decoded[op.id] = io(op.inputs), io(op.outputs)
        return decoded[op.id]

    ops = outermost(window.host, communications, window.activities, sides)
    if not ops.found:
        raise CrossrankError(f"{source.path}: has no operations; record a window with a training step")
    times = step_times(given.comms, window.base_ns, given.window)
    if times.has_other_sizes:
        trace.notes.append(
            f"{source.path}: no step outside the window moved as many bytes as one of the window; it is compared with "
            "those that made the same operations"
        )
    compute = _PlanBuilder(window, ops, sides, times, _find_awaited(trace)).plan()
    _place_waits(trace, compute)
    return RankWindow(trace=trace, compute=compute)


def _with_unique_ids(communications: Sequence[Communication]) -> list[Communication]:
    """Return the communications, with new ids for their records if they have none of their own (other recorders)."""
    if len({one.record.id for one in communications}) == len(communications):
        return list(communications)
    return [
        msgspec.structs.replace(one, record=msgspec.structs.replace(one.record, id=number))
        for number, one in enumerate(communications)
    ]


class _PlanBuilder:
    """Makes the plan of one rank's computation."""

    def __init__(
        self,
        window: LinkedTrace,
        ops: WindowOps,
        sides: Callable[[HostOp], tuple[IO, IO]],
        times: StepTimes,
        awaited: set[int],
    ) -> None:
        self.window = window
        self.ops = ops
        self.found = ops.found
        self.sides = sides
        self.times = times
        self.awaited = awaited
        """Ids of the calls that the trace waits for, before an unknown operation."""
        self.tensors = Tensors()
        self.ranges = IndexRanges()
        self.schemas: dict[str, int] = {}
        self.records: dict[int, CommRecord] = {one.record.id: one.record for one in window.communications}
        hosts = {op.id: op for op in window.host}
        works = ((one.record.id, hosts.get(one.work or 0)) for one in window.communications)
        self.over = {call: work.end_ns for call, work in works if work is not None and work.start_ns is not None}
        """Id of a call -> end of its Work."""
        self.operations: list[ComputeOperation] = []
        self.in_flight: dict[int, list[Extent]] = {}
        """Id of an unfinished call -> memory of its tensors."""
        self.last_use: dict[int, int] = {}
        """Slot -> position of the last operation that takes it."""
        self.made_at: dict[int, int] = {}
        self.place: dict[int, int] = {}
        """Position among the outermost nodes -> position among the operations."""

    def plan(self) -> ComputePlan:
        gaps = gaps_before(self.found)
        due = self._find_recorded_waits()
        for number, one in enumerate(self.found):
            self._add_operation(one, due.get(number, ()))
            self.place[number] = len(self.operations) - 1
            self.operations[-1].took_ns = one.device_ns or one.op.duration_ns
            self.operations[-1].on_device = one.device_ns > 0
            self.operations[-1].ranges, self.operations[-1].split = one.ranges, one.split
        exposed, unseen = self._set_gaps(gaps)
        self._set_streams()
        self._set_frees()
        self.ranges.settle()
        for operation in self.operations:
            given = set(flat_results(operation.results)) if operation.filled else ()
            highest = [(slot, self.tensors.storage_of[slot].high) for slot, _ in operation.filled if slot in given]
            operation.filled = [(slot, -1 if high is None else max(high, 0)) for slot, high in highest]
        return ComputePlan(
            operations=self.operations,
            schemas=list(self.schemas),
            slots=self.tensors.slots,
            blocks=self.tensors.finished_blocks(),
            range_ns=_estimate_range_cost(self.operations),
            last_waits=list(self.in_flight),
            steps=[self.place[at] for at in self.ops.steps],
            bytes=self._compute_peak_bytes(),
            threads=self.times.threads,
            unprofiled_ns=self.times.unprofiled_ns,
            own_ns=self._estimate_own_ns(unseen),
            other_steps=self.times.others,
            profiled_ns=self.times.profiled_ns,
            exposed_ns=exposed,
        )

    def _find_recorded_waits(self) -> dict[int, list[int]]:
        """Return the calls for which a wait was recorded before each node, by its position."""
        if not any(one.op.start_ns for one in self.found):
            return {}
        ordered = list(accumulate((one.op.start_ns or 0 for one in self.found), max))
        due: dict[int, list[int]] = {}
        for call, began in self.times.waits.items():
            if call in self.records:
                due.setdefault(bisect_left(ordered, began - _CLOCKS_NS), []).append(call)
        return due

    def _add_operation(self, one: Outermost, due: Iterable[int]) -> None:
        node, position = one.op, len(self.operations)
        operation = ComputeOperation(node=node.id, name=node.name)
        inputs, outputs = self.sides(one.op)
        try:
            if one.call < 0 and not one.schema:
                raise StandInError(NO_SCHEMA)
            bound = self.tensors.bind(position, inputs, outputs)
        except (StandInError, ValueError, TypeError) as error:
            operation.reason = (
                str(error) if isinstance(error, StandInError) else "its arguments do not match its schema"
            )
            made, used = self.tensors.forget(position, outputs), []
            operation.results = list(made)
        else:
            made, used = bound.made, bound.used
            for slot, whole in bound.views:
                position = self._add_view(slot, whole)
            operation.arguments, operation.results = bound.arguments, bound.results
            if one.call < 0:
                operation.schema = self.schemas.setdefault(one.schema, len(self.schemas))
                operation.beyond = self.ranges.note(node.name, bound, self.tensors, one.integers)
                operation.filled = [(slot, 0) for slot in self.ranges.gives_no_values(node.name, bound, self.tensors)]
        if one.call >= 0:
            operation.call = one.call
            sides = [slots_in(value) for value in operation.arguments]
            given = [side for side in sides if side]
            # c10d's ops have their outputs before their inputs; in place, both are the same.
            operation.outputs, operation.inputs = (given[0], given[-1]) if given else ([], [])
        touched = [self.tensors.extent(slot) for slot in (*used, *made)]
        waits = [call for call in due if call in self.in_flight]
        reads_elements = not _is_view(one, used, made, self.tensors.storage_of)
        for call, extents in self.in_flight.items():
            # An operation that touched the tensors of a running call did not wait for it. A view alone needs no wait,
            # but the first view after the end of the call shows where the rank had waited.
            is_over = call in self.over and one.op.start_ns is not None and self.over[call] <= one.op.start_ns
            may_wait = call not in self.times.waits and (reads_elements or is_over)
            if may_wait and call not in waits and _overlap(extents, touched):
                waits.append(call)
        for call in waits:
            del self.in_flight[call]
        operation.waits = waits
        if one.call >= 0 and self._returns_early(one.call):
            self.in_flight[one.call] = touched
        for slot in used:
            self.last_use[slot] = position
        for slot in made:
            self.made_at[slot] = position
        self.operations.append(operation)

    def _returns_early(self, call: int) -> bool:
        """Return whether the rank continued before the call ended."""
        return call in self.times.waits or call in self.awaited or returns_early(self.records[call])

    def _add_view(self, slot: int, whole: int) -> int:
        view = self.tensors.slots[slot]
        position = len(self.operations)
        self.operations.append(
            ComputeOperation(
                name="aten::as_strided",
                schema=self.schemas.setdefault(_AS_STRIDED, len(self.schemas)),
                arguments=[{"slot": whole}, view.shape, view.strides, view.offset],
                results=[slot],
            )
        )
        self.last_use[whole], self.made_at[slot] = position, position
        return position + 1

    def _estimate_own_ns(self, unseen: int) -> int | None:
        """Return the time of a typical unprofiled step without waits. Waits of the window that are not recorded
        (`unseen`) are assumed to be the same share of each step."""
        times = self.times
        if not (times.unprofiled_ns and times.profiled_ns) or any(one.on_device for one in self.operations):
            return None
        share = unseen / sum(times.profiled_ns)
        return max(0, round(median(times.own_ns) - share * median(times.unprofiled_ns)))

    def _set_gaps(self, gaps: Sequence[int | None]) -> tuple[int, int]:
        """Set the time before each operation. Return how long the host waited for communication, in total and for calls
        without recorded waits."""
        exposed = unseen = 0
        blocking = -1
        for number, (one, gap) in enumerate(zip(self.found, gaps, strict=True)):
            operation = self.operations[self.place[number]]
            if gap is not None and gap > 0 and one.op.start_ns is not None:
                began = one.op.start_ns - gap
                ends = [self.over[call] for call in (*operation.waits, blocking) if call in self.over]
                waited = max(0, min(max(ends, default=began), one.op.start_ns) - began)
                exposed += waited
                if not any(call in self.times.waits for call in (*operation.waits, blocking)):
                    unseen += waited
                operation.gap_ns = gap - waited
            blocking = one.call if one.call >= 0 and not self._returns_early(one.call) else -1
        return exposed, unseen

    def _set_streams(self) -> None:
        calls = {number for number, one in enumerate(self.found) if one.call >= 0}
        placed = place_on_streams(self.window.activities, self.window.edges, self.ops.positions, calls)
        for number, (stream, after) in placed.items():
            operation = self.operations[self.place[number]]
            operation.stream, operation.after = stream, [self.place[at] for at in after]
        # Some waits are not recorded. The maker of a tensor runs before the operation that takes it.
        stream, streams = 0, []
        for position, operation in enumerate(self.operations if placed else ()):
            stream = operation.stream if operation.stream >= 0 else stream
            streams.append(stream)
            makers = {self.made_at.get(slot, position) for slot in slots_in(operation.arguments)}
            needed = {at for at in makers if at < position and streams[at] != stream}
            operation.after = sorted(needed.union(operation.after))

    def _set_frees(self) -> None:
        """Free every tensor after the last operation that takes it, and the tensors of a batch after its last call."""
        batches: dict[int, list[ComputeOperation]] = {}
        ends: dict[int, int] = {}
        for position, one in enumerate(self.operations):
            batch = self.records[one.call].batch if one.call >= 0 else None
            if batch is not None:
                batches.setdefault(batch, []).append(one)
                ends[batch] = position
        for batch, calls in batches.items():
            for slot in (slot for one in calls for slot in (*one.inputs, *one.outputs)):
                self.last_use[slot] = max(self.last_use.get(slot, -1), ends[batch])
        for slot, made in self.made_at.items():
            last = self.last_use.get(slot, -1)
            if last >= 0:
                self.operations[last].frees.append(slot)
            else:
                self.operations[made].results = _remove_slot(self.operations[made].results, slot)

    def _compute_peak_bytes(self) -> int:
        blocks = sum(one.bytes for one in self.tensors.blocks)
        changes: Counter[int] = Counter()
        seen: dict[int, Storage] = {id(one): one for one in self.tensors.storage_of if one.block < 0}
        for one in seen.values():
            changes[one.first] += one.bytes
            changes[one.last + 1] -= one.bytes
        return blocks + max(accumulate(changes[at] for at in sorted(changes)), default=0)


Extent = tuple[int, int, int]
"""(storage, first byte, one past the last)"""


def _overlap(some: Sequence[Extent], others: Sequence[Extent]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in some for b in others)


def _find_awaited(trace: RankTrace) -> set[int]:
    """Return the ids of the calls that the trace itself waits for."""
    if trace.waits is None:
        return set()
    return {identity for identity, before in zip(trace.calls.id, trace.waits.before, strict=True) if before >= 0}


def gaps_before(found: Sequence[Outermost]) -> list[int | None]:
    """Return the ns between the end of all earlier nodes and the start of each; None if times are unknown.
    It is negative if the node began before another thread's node ended."""
    gaps: list[int | None] = []
    latest: int | None = None
    for one in found:
        start = one.op.start_ns
        gaps.append(None if start is None or latest is None else start - latest)
        if start is not None:
            latest = max(latest or 0, one.op.end_ns)
    return gaps


def _estimate_range_cost(operations: Sequence[ComputeOperation]) -> int:
    """Estimate the profiler overhead of a node without a schema: how much it lengthens the shortest gaps."""
    gaps_without_ranges = sorted(one.gap_ns for one in operations if one.gap_ns and not one.ranges and not one.split)
    others = [one for one in operations if one.gap_ns and one.ranges and not one.split]
    if len(gaps_without_ranges) < _MIN_GAPS or len(others) < _MIN_GAPS:
        return 0
    shortest_gap = gaps_without_ranges[int(len(gaps_without_ranges) * _SHORTEST_SHARE)]
    cost_per_range = sorted((one.gap_ns - shortest_gap) / one.ranges for one in others)
    return max(0, round(cost_per_range[int(len(cost_per_range) * _SHORTEST_SHARE)]))


def _remove_slot(results: list[object], slot: int) -> list[object]:
    return [_remove_slot(one, slot) if isinstance(one, list) else (None if one == slot else one) for one in results]


def _is_view(one: Outermost, used: Sequence[int], made: Sequence[int], storage_of: Sequence[Storage]) -> bool:
    """Return whether an operation reads no element: it returns only views of its arguments."""
    if one.call >= 0 or not made or "!" in one.schema or one.op.name.endswith("wait_tensor"):
        return False
    taken = {id(storage_of[slot]) for slot in used}
    return all(id(storage_of[slot]) in taken for slot in made)


def _place_waits(trace: RankTrace, compute: ComputePlan) -> None:
    """Set before which of its calls the rank waited for each call, from the waits between its operations."""
    row_of = {identity: row for row, identity in enumerate(trace.calls.id)}
    waits = waits_of(trace)
    count = len(trace)
    waits.before, waits.blocking, waits.recorded = array("q", [-1]) * count, array("b", [-1]) * count, 0
    launched = 0
    for operation in compute.operations:
        for call in operation.waits:
            waits.before[row_of[call]], waits.blocking[row_of[call]] = max(launched, row_of[call] + 1), 0
            waits.recorded += 1
        if operation.call >= 0:
            launched = row_of[operation.call] + 1
    for call in compute.last_waits:
        waits.before[row_of[call]], waits.blocking[row_of[call]] = len(trace), 0
