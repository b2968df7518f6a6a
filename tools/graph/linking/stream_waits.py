"""Infers what streams wait for where the trace has no `cuda_sync` events, from the communications alone.

cudaStreamWaitEvent names neither stream nor event in such a trace, but around a communication both are known: its
own call lets the communication's stream wait for the stream that the caller computes on, and a `wait` node of
`record_param_comms`, which names the sequence number, lets that stream wait for the communication. DDP's reducer
waits for the all-reduces of its buckets in their order, on the thread that made them and outside any operation. Any
other call is counted and left alone: guessing by times draws edges that other ranks of the same job refute.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crossrank.tools.graph.linking.graph import Communication
from crossrank.tools.graph.linking.ordered import Ordered, ordered_by
from crossrank.tools.graph.linking.synchronisation import Wait, Waits
from crossrank.tools.traces.kineto import Id, KinetoTrace
from crossrank.tools.traces.param_comms import ParamComms

WAIT_EVENT = "StreamWaitEvent"
Lane = tuple[Id, Id]
"""Device and stream."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What is around the calls of a trace. Nodes and activities by their positions in the traces."""

    nodes_around: Mapping[int, list[int]]
    """Call -> the nodes around it, the innermost first."""
    issuing: Mapping[int, Communication]
    """Node -> the communication that it issues."""
    waiting: Mapping[int, ParamComms]
    """Node -> what a `wait` node says."""
    kernels: Mapping[int, Sequence[int]]
    """Id of a communication's host node -> its kernels."""


def infer_stream_waits(
    kineto: KinetoTrace, launch_call: Sequence[int], surroundings: Surroundings, waits: Waits
) -> None:
    """Add to `waits` what the calls of cudaStreamWaitEvent (hipStreamWaitEvent, …) mean."""
    launched = _Launches(kineto, launch_call, {k for kernels in surroundings.kernels.values() for k in kernels})
    by_number: dict[int | None, list[Communication]] = defaultdict(list)
    for communication in surroundings.issuing.values():
        record = communication.record
        by_number[record.seq if record.seq is not None else record.p2p_seq].append(communication)
    buckets = _Buckets(kineto, launch_call, surroundings, by_number)
    for index in sorted(range(len(kineto.calls)), key=lambda index: kineto.calls[index].start):
        call = kineto.calls[index]
        if WAIT_EVENT not in call.name:
            continue
        waits.kinds[call.name] += 1
        nodes = surroundings.nodes_around.get(index, [])
        if not nodes and (kernels := buckets.next(index)):
            _after(index, kernels, kineto, launched, waits)
            continue
        for node in nodes:
            if node in surroundings.issuing:
                kernels = surroundings.kernels.get(surroundings.issuing[node].host or 0, ())
                _before(index, kernels, kineto, launched, waits)
                break
            if node in surroundings.waiting:
                kernels = _named(surroundings.waiting[node], by_number, surroundings)
                _after(index, kernels, kineto, launched, waits)
                break
        else:
            waits.unresolved["a stream waits for an event, but the trace does not say which"] += 1


def _before(index: int, kernels: Sequence[int], kineto: KinetoTrace, launched: _Launches, waits: Waits) -> None:
    """The communication's stream waits for what its caller computes."""
    call = kineto.calls[index]
    target = next((kernel for kernel in kernels if launched.time[kernel] >= call.start), -1)
    if target < 0:
        waits.unresolved["it is a communication's own, after its launch"] += 1
        return
    source = launched.computing_lane(index).last_before(call.start)
    _add(source, index, target, kineto, launched, waits)


def _named(
    wait: ParamComms, by_number: Mapping[int | None, list[Communication]], surroundings: Surroundings
) -> Sequence[int]:
    """The kernels of the communication that a `wait` node names."""
    named = by_number.get(wait.seq, [])
    named = [c for c in named if c.record.pg == wait.pg] or named
    return surroundings.kernels.get(named[0].host or 0, ()) if len(named) == 1 else ()


class _Buckets:
    """The all-reduces of each thread that no `wait` node names, in the order of their launches."""

    def __init__(
        self,
        kineto: KinetoTrace,
        launch_call: Sequence[int],
        surroundings: Surroundings,
        by_number: Mapping[int | None, list[Communication]],
    ) -> None:
        self._kineto = kineto
        waited_for = {
            kernel for wait in surroundings.waiting.values() for kernel in _named(wait, by_number, surroundings)
        }
        self._pending: dict[tuple[Id, Id], deque[tuple[int, Sequence[int]]]] = defaultdict(deque)
        entries = []
        for communication in surroundings.issuing.values():
            kernels = surroundings.kernels.get(communication.host or 0, ())
            if communication.record.op != "all_reduce" or not kernels or waited_for.intersection(kernels):
                continue
            if launch_call[kernels[0]] >= 0:
                entries.append((kineto.calls[launch_call[kernels[0]]], kernels))
        for call, kernels in sorted(entries, key=lambda entry: entry[0].start):
            self._pending[call.pid, call.tid].append((call.start, kernels))

    def next(self, index: int) -> Sequence[int]:
        """The kernels of the first all-reduce that the thread of a call made before it and has not waited for."""
        call = self._kineto.calls[index]
        pending = self._pending.get((call.pid, call.tid))
        if not pending or pending[0][0] > call.start:
            return ()
        return pending.popleft()[1]


def _after(index: int, kernels: Sequence[int], kineto: KinetoTrace, launched: _Launches, waits: Waits) -> None:
    """The stream that the caller computes on waits for a communication."""
    if not kernels:
        waits.unresolved["the communication that it waits for is not in the trace"] += 1
        return
    target = launched.computing_lane(index).first_from(kineto.calls[index].start)
    for kernel in kernels:
        _add(kernel, index, target, kineto, launched, waits)


def _add(source: int, index: int, target: int, kineto: KinetoTrace, launched: _Launches, waits: Waits) -> None:
    if source < 0 or target < 0 or source == target:
        waits.unresolved["nothing runs on the stream before or after"] += 1
        return
    over = max(kineto.device[source].end, launched.time[target])
    slack = max(0, kineto.device[target].start - over)
    waits.waits.append(Wait(source, index, target, inferred=True, slack_ns=slack))


class _Launches:
    """When every activity was launched, by stream and by thread."""

    def __init__(self, kineto: KinetoTrace, launch_call: Sequence[int], communicate: set[int]) -> None:
        self._kineto = kineto
        launched = [(index, kineto.calls[call]) for index, call in enumerate(launch_call) if call >= 0]
        self.time = {index: activity.start for index, activity in enumerate(kineto.device)}
        self.time |= {index: call.start for index, call in launched}
        self.by_lane = ordered_by((self._lane(index), call.start, index) for index, call in launched)
        computes = [(index, call) for index, call in launched if index not in communicate]
        self._by_thread = ordered_by(((call.pid, call.tid), call.start, index) for index, call in computes)
        counts = Counter(self._lane(index) for index, _ in computes)
        self._busiest = counts.most_common(1)[0][0] if counts else None

    def _lane(self, index: int) -> Lane:
        return (self._kineto.device[index].device, self._kineto.device[index].stream)

    def computing_lane(self, call: int) -> Ordered:
        """What is launched on the stream that the thread of a call computes on then; on the trace's busiest where the
        thread has none yet."""
        thread = self._kineto.calls[call]
        last = self._by_thread[thread.pid, thread.tid].last_until(thread.start)
        lane = self._lane(last) if last >= 0 else self._busiest
        return self.by_lane[lane] if lane is not None else Ordered()
