"""Finds the Kineto event of each node of the execution trace.

Since 2024 both have the id of the RecordFunction. For older traces, each thread's sequence of names is aligned with
that of the Kineto thread that has most names in common: `name_alignment`.

An execution trace names wrong callers near an asynchronous range. torch keeps one stack per thread and takes the caller
from its top. A call pushes the range of its gloo Work on this stack. When the Work ends, another thread pops what is
then on top. So for a while the top is an operation that ended long ago. Later, a running operation is missing, and
the one around it is named as the caller instead. Kineto's times show which operations ran around another one;
`correct_callers` takes the innermost.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

from crossrank.text import plural
from crossrank.tools.graph.linking.name_alignment import aligned
from crossrank.tools.graph.linking.nesting import Nesting, events_by_thread
from crossrank.tools.traces.execution_trace import ExecutionTrace, HostOp, is_thread_root
from crossrank.tools.traces.kineto import HostEvent, KinetoTrace

BY_RF_ID = "record function id"
BY_SEQUENCE = "sequence of names"
# Local times of the execution trace and the Kineto trace may be in any two time zones.
_SECONDS_BETWEEN_ZONES = 26 * 3600


@dataclass(kw_only=True)
class HostMatch:
    """Pairs of nodes and events by their positions in `ExecutionTrace.nodes` and `KinetoTrace.host`; -1 is no match."""

    event_of: list[int]
    node_of: list[int]
    method: str
    unmatched: dict[int, str] = field(default_factory=dict)
    """Position of a node with a RecordFunction -> why it has no event."""
    warnings: list[str] = field(default_factory=list)
    of_other_iterations: int = 0
    """Operations with another autograd number in the Kineto trace, which then holds another step."""

    @property
    def matched(self) -> int:
        return len(self.event_of) - self.event_of.count(-1)

    @property
    def rate(self) -> float:
        """Share of the nodes with a RecordFunction that have an event."""
        total = self.matched + len(self.unmatched)
        return self.matched / total if total else 1.0

    def pair(self, node: int, event: int) -> None:
        self.event_of[node] = event
        self.node_of[event] = node


def match_hosts(et: ExecutionTrace, kineto: KinetoTrace) -> HostMatch:
    """Match the host's operations with events. Give a reason for each operation without an event."""
    by_id = any(event.rf_id is not None for event in kineto.host)
    method, find = (BY_RF_ID, _match_by_id) if by_id else (BY_SEQUENCE, _match_by_sequence)
    match = HostMatch(event_of=[-1] * len(et.nodes), node_of=[-1] * len(kineto.host), method=method)
    find(et, kineto.host, match)
    return match


def doubts(et: ExecutionTrace, kineto: KinetoTrace, match: HostMatch) -> list[str]:
    """Return signs that the two files are not of the same run. One sign can be an accident, two hardly."""
    found = []
    pids = {event.pid for event in kineto.host}
    if et.pid is not None and kineto.host and et.pid not in pids:
        found.append(f"process {et.pid} in the one, {', '.join(sorted(map(str, pids))[:3])} in the other")
    seconds = _read_written_time(et)
    if seconds is not None and kineto.host:
        start = (kineto.base_ns + min(event.start for event in kineto.host)) // 10**9
        if abs(seconds - start) > _SECONDS_BETWEEN_ZONES:
            found.append(f"written {et.time} in the one, {_format_time(start)} in the other")
    # Few matches can also mean that the two files cover different times of one run.
    if match.rate < 0.5 and found:
        found.append(f"only {match.matched} of {match.matched + len(match.unmatched)} operations match by name")
    return found


def _format_time(seconds: int) -> str:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{seconds} s after 1970"


def _read_written_time(et: ExecutionTrace) -> float | None:
    try:
        return datetime.strptime(et.time or "", "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None


def _match_by_id(et: ExecutionTrace, events: Sequence[HostEvent], match: HostMatch) -> None:
    event_of_id: dict[int, int] = {}
    doubled = 0
    # A trace of several processes has the same ids in each.
    known = any(event.pid == et.pid for event in events)
    for index, event in enumerate(events):
        if event.rf_id is not None and (event.pid == et.pid or not known):
            doubled += event_of_id.setdefault(event.rf_id, index) != index
    if doubled:
        match.warnings.append(
            f"{doubled} Kineto event(s) repeat a record function id; crossrank uses the first of each"
        )
    first, last = min(event_of_id, default=0), max(event_of_id, default=0)
    for position, node in enumerate(et.nodes):
        if node.rf_id <= 0:
            continue
        index_or_none = event_of_id.get(node.rf_id)
        if index_or_none is None:
            outside = not first <= node.rf_id <= last
            match.unmatched[position] = "outside the Kineto trace" if outside else "no Kineto event with its id"
        elif events[index_or_none].name != node.name:
            match.unmatched[position] = "the Kineto event with its id has another name"
        elif match.node_of[index_or_none] >= 0:
            match.unmatched[position] = "its id was used before"
        else:
            match.pair(position, index_or_none)


def _match_by_sequence(et: ExecutionTrace, events: Sequence[HostEvent], match: HostMatch) -> None:
    nodes = et.nodes
    positions_of: dict[int, list[int]] = defaultdict(list)
    for position in sorted(range(len(nodes)), key=lambda position: nodes[position].rf_id):
        if nodes[position].rf_id > 0:
            positions_of[nodes[position].tid].append(position)
    threads = events_by_thread(events)
    if any(pid == et.pid for pid, _ in threads):
        threads = {thread: indices for thread, indices in threads.items() if thread[0] == et.pid}
    names = {thread: Counter(events[index].name for index in indices) for thread, indices in threads.items()}
    for tid, positions in sorted(positions_of.items(), key=lambda item: -len(item[1])):
        wanted = Counter(nodes[position].name for position in positions)
        common = {thread: sum((wanted & counts).values()) for thread, counts in names.items()}
        thread = max(common, key=lambda thread: common[thread], default=None)
        if thread is None or not common[thread]:
            match.unmatched.update(dict.fromkeys(positions, "its thread is not in the Kineto trace"))
            continue
        ours, theirs = [nodes[p] for p in positions], [events[i] for i in threads[thread]]
        place_of, places = aligned(ours, theirs)
        if places > 1:
            match.warnings.append(
                f"thread {tid}: its names match the Kineto trace at {places} places equally well; the first is used, "
                "so times may be those of another iteration"
            )
        steps: Counter[int] = Counter()
        inside = [index for index, place in enumerate(place_of) if place >= 0]
        for index, (position, node, place) in enumerate(zip(positions, ours, place_of, strict=True)):
            if place < 0:
                is_outside = not inside or not inside[0] < index < inside[-1]
                match.unmatched[position] = (
                    "outside the Kineto trace" if is_outside else "no Kineto event at its position"
                )
                continue
            event = theirs[place]
            match.pair(position, threads[thread][place])
            if node.seq_id >= 0 <= event.seq_id:
                steps[event.seq_id - node.seq_id] += 1
        step, count = steps.most_common(1)[0] if steps else (0, 0)
        if step:
            match.of_other_iterations += count
            match.warnings.append(
                f"thread {tid}: autograd's sequence numbers differ by {step} ({count} of {steps.total()} operations):"
                " the two files have different steps of one job, and times are of the steps in the Kineto trace"
            )
        del names[thread]


def nearest_nodes(match: HostMatch, nesting: Nesting) -> list[int]:
    """Return for each event the node of the innermost event around it, or of the event itself, that has a node."""
    nearest = list(match.node_of)
    for event in nesting.order:
        if nearest[event] < 0 and nesting.parent[event] >= 0:
            nearest[event] = nearest[nesting.parent[event]]
    return nearest


def correct_callers(et: ExecutionTrace, match: HostMatch, nesting: Nesting) -> list[str]:
    """Correct the caller of each operation if the recorded caller did not run around it or is not in the file, or if
    another ran in between.

    Changes `HostOp.caller` in place. Returns a warning about it.
    """
    host = et.nodes
    op_of = {op.id: op for op in host}
    roots = {op.tid: op.id for op in reversed(host) if is_thread_root(op)}
    nearest = nearest_nodes(match, nesting)
    corrected = []
    for position, op in enumerate(host):
        caller = op_of.get(op.caller)
        if op.is_work or op.start_ns is None:
            continue
        event = nesting.parent[match.event_of[position]]
        around = host[nearest[event]] if event >= 0 and nearest[event] >= 0 else None
        if op.id in et.orphans:
            if around is None or around.is_work or around.tid != op.tid:
                continue
            op.caller = around.id
        elif caller is None or caller.start_ns is None or around is caller:
            continue
        elif caller.is_work or not caller.start_ns <= op.start_ns <= caller.end_ns:
            op.caller = around.id if around is not None else roots.get(op.tid, 0)
        elif around is not None and _is_between(caller, around, op):
            op.caller = around.id
        else:
            continue
        corrected.append(op.id)
    if not corrected:
        return []
    return [
        f"the execution trace names a wrong caller for {plural(len(corrected), 'operation')}; crossrank uses "
        "the caller in the Kineto trace"
    ]


def _is_between(caller: HostOp, around: HostOp, op: HostOp) -> bool:
    """Return whether `around` ran inside `caller`, and `op` inside `around`, not at its edge: times may be rounded."""
    starts = [one.start_ns or 0 for one in (around, op)]
    return caller.tid == around.tid and starts[0] < starts[1] and op.end_ns < around.end_ns <= caller.end_ns
