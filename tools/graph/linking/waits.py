"""Who waits for the GPU: the host at synchronising calls, and a stream for another one's event.

CUPTI's `cuda_sync` events (`enable_cuda_sync_events=True`) say it, by kind:

- Context Sync (cudaDeviceSynchronize): the host waits for the last activity of every stream of the device.
- Stream Sync (cudaStreamSynchronize): for the last one of one stream.
- Event Sync (cudaEventSynchronize, cudaEventQuery): for the last one launched on the event's stream before the
  call that recorded the event.
- Stream Wait Event (cudaStreamWaitEvent): the next activity launched on the waiting stream waits for that one.

A trace without such events still has the calls, and what they waited for is inferred and marked so. A blocking call
waited for what ended last while it lasted. cudaStreamWaitEvent names neither stream nor event in such a trace, but
around a communication both are known: its own call lets the communication's stream wait for the stream that the caller
computes on, and a `wait` node of `record_param_comms`, which names the sequence number, lets that stream wait for the
communication. DDP's reducer waits for the all-reduces of its buckets in their order, on the thread that made them and
outside any operation. Any other call is counted and left alone: guessing by times draws edges that other ranks of the
same job refute.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from crossrank.comm import CommRecord
from crossrank.tools.graph.linking.ordered import Ordered, ordered_by
from crossrank.tools.traces.kineto import Id, KinetoTrace, RuntimeCall, SyncEvent
from crossrank.tools.traces.param_comms import ParamComms

CLOCK_NS = 2_000
"""Host and device clocks are joined, and times rounded, to about this much."""

_STREAM_WAIT = "Stream Wait Event"
_WAIT_EVENT = "StreamWaitEvent"
"""Part of the names of cudaStreamWaitEvent, hipStreamWaitEvent, …"""
_EVERY_STREAM = ("DeviceSynchronize", "CtxSynchronize")
_ONE_STREAM = ("StreamSynchronize", "EventSynchronize")
_ASYNC = "Async"


@dataclass(frozen=True)
class GpuWait:
    """Positions in `KinetoTrace.device` and `KinetoTrace.calls`."""

    source: int
    """The activity that is waited for."""
    call: int
    """The call that waits, or that makes a stream wait; -1 where it is not in the trace."""
    target: int = -1
    """The activity that waits; -1 where the host does."""
    inferred: bool = False
    slack_ns: int | None = None


@dataclass(kw_only=True)
class GpuWaits:
    """All waits of a trace."""

    waits: list[GpuWait] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    """Kind -> synchronisations looked at."""
    unresolved: Counter[str] = field(default_factory=Counter)
    """Reason -> synchronisations that gave no wait."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What is around the calls of a trace. Nodes and activities by their positions in the traces."""

    nodes_around: Callable[[int], Sequence[int]]
    """Gives the nodes around a call, the innermost first."""
    issuing: Mapping[int, tuple[CommRecord, Sequence[int]]]
    """Node -> the communication that it issues, with its kernels."""
    waiting: Mapping[int, ParamComms]
    """Node -> the arguments of a `wait` node."""


def find_waits(kineto: KinetoTrace, launch_call: Sequence[int], around: Surroundings | None = None) -> GpuWaits:
    """`launch_call` gives the launching call of each activity, -1 where it is not known; what streams wait for is
    inferred only with what is `around` the calls."""
    waits = GpuWaits()
    streams = _Streams(kineto, launch_call)
    if kineto.syncs:
        _add_recorded(kineto, streams, waits)
    else:
        _infer_host_waits(kineto, streams, waits)
        if around is not None:
            _infer_stream_waits(kineto, launch_call, streams, around, waits)
    return waits


class _Streams:
    """The activities of every (device, stream), by their start, their end, and their launch."""

    def __init__(self, kineto: KinetoTrace, launch_call: Sequence[int]) -> None:
        self.of = [(activity.device, activity.stream) for activity in kineto.device]
        self._device = kineto.device
        self._launched = [(index, kineto.calls[call].start) for index, call in enumerate(launch_call) if call >= 0]

    @cached_property
    def by_start(self) -> Mapping[tuple[Id, Id], Ordered]:
        return ordered_by((self.of[index], activity.start, index) for index, activity in enumerate(self._device))

    @cached_property
    def by_end(self) -> Mapping[tuple[Id, Id], Ordered]:
        return ordered_by((self.of[index], activity.end, index) for index, activity in enumerate(self._device))

    @cached_property
    def by_launch(self) -> Mapping[tuple[Id, Id], Ordered]:
        return ordered_by((self.of[index], start, index) for index, start in self._launched)

    @cached_property
    def launch_time(self) -> dict[int, int]:
        """When every activity was launched; its start where that is not known."""
        return {index: activity.start for index, activity in enumerate(self._device)} | dict(self._launched)


def _add_recorded(kineto: KinetoTrace, streams: _Streams, waits: GpuWaits) -> None:
    call_of: dict[int | None, int] = {
        call.correlation: index for index, call in enumerate(kineto.calls) if call.correlation
    }
    for sync in kineto.syncs:
        waits.kinds[sync.kind] += 1
        waits.waits.extend(_of_sync(sync, call_of, kineto.calls, streams, waits.unresolved))


def _of_sync(
    sync: SyncEvent,
    call_of: Mapping[int | None, int],
    calls: Sequence[RuntimeCall],
    streams: _Streams,
    unresolved: Counter[str],
) -> Iterator[GpuWait]:
    call = call_of.get(sync.correlation, -1)
    if sync.record_correlation is None and sync.kind in ("Context Sync", "Stream Sync"):
        every = sync.kind == "Context Sync"
        waited_for = [
            streams.by_start[stream]
            for stream in (tuple(streams.by_start) if every else ((sync.device, sync.stream),))
            if stream[0] == sync.device
        ]
        sources = [source for stream in waited_for if (source := stream.last_until(sync.end)) >= 0]
        if not sources:
            unresolved["nothing ran on the stream before"] += 1
        yield from (GpuWait(source, call) for source in sources)
        return
    record = call_of.get(sync.record_correlation, -1)
    if record < 0:
        unresolved["the call that recorded the event is not in the trace"] += 1
        return
    source = streams.by_launch[sync.device, sync.wait_on_stream].last_until(calls[record].start)
    at = calls[call].start if call >= 0 else sync.start
    target = streams.by_launch[sync.device, sync.stream].first_from(at) if sync.kind == _STREAM_WAIT else -1
    if source < 0:
        unresolved["nothing was launched on the stream before its event"] += 1
    elif sync.kind == _STREAM_WAIT and target < 0:
        unresolved["nothing was launched on the waiting stream after"] += 1
    else:
        yield GpuWait(source, call, target)


def _infer_host_waits(kineto: KinetoTrace, streams: _Streams, waits: GpuWaits) -> None:
    device = kineto.device
    copies = {
        activity.correlation: index
        for index, activity in enumerate(device)
        if activity.category == "gpu_memcpy" and activity.correlation
    }
    for index, call in enumerate(kineto.calls):
        if call.name.endswith((*_EVERY_STREAM, *_ONE_STREAM)):
            ended = [stream.last_until(call.end + CLOCK_NS) for stream in streams.by_end.values()]
            sources = [source for source in ended if source >= 0]
            if call.name.endswith(_ONE_STREAM):
                inside = [source for source in sources if device[source].end >= call.start]
                sources = [max(inside, key=lambda source: device[source].end)] if inside else []
        elif "Memcpy" in call.name and call.correlation in copies:
            copy = copies[call.correlation]
            # A copy that its call outlives, or that is synchronous by name, blocked the host.
            if _ASYNC in call.name and device[copy].end > call.end + CLOCK_NS:
                continue
            sources = [copy]
        else:
            continue
        waits.kinds[call.name] += 1
        if not sources:
            waits.unresolved["nothing ended while the call lasted"] += 1
        for source in sources:
            waits.waits.append(GpuWait(source, index, inferred=True, slack_ns=max(0, call.end - device[source].end)))


def _infer_stream_waits(
    kineto: KinetoTrace, launch_call: Sequence[int], streams: _Streams, around: Surroundings, waits: GpuWaits
) -> None:
    by_number: dict[int | None, list[tuple[str, Sequence[int]]]] = defaultdict(list)
    for record, kernels in around.issuing.values():
        by_number[record.seq if record.seq is not None else record.p2p_seq].append((record.pg, kernels))
    waited_for = {node: _named(wait, by_number.get(wait.seq, [])) for node, wait in around.waiting.items()}
    buckets = _buckets(kineto, launch_call, around, {kernel for named in waited_for.values() for kernel in named})
    communicate = {kernel for _, kernels in around.issuing.values() for kernel in kernels}
    computing = _Computing(kineto, launch_call, streams, communicate)
    for index, call in sorted(enumerate(kineto.calls), key=lambda entry: entry[1].start):
        if _WAIT_EVENT not in call.name:
            continue
        waits.kinds[call.name] += 1
        nodes = around.nodes_around(index)
        bucket = buckets[call.pid, call.tid]
        node = next((node for node in nodes if node in around.issuing or node in waited_for), None)
        if node is not None and node in around.issuing:
            # The communication's stream waits for what its caller computes.
            _, kernels = around.issuing[node]
            target = next((kernel for kernel in kernels if streams.launch_time[kernel] >= call.start), -1)
            if target < 0:
                waits.unresolved["it is a communication's own, after its launch"] += 1
                continue
            pairs = [(computing.stream_of(call).last_before(call.start), target)]
        elif node is not None or (not nodes and bucket and bucket[0][0] <= call.start):
            # The stream that the caller computes on waits for a communication.
            kernels = waited_for[node] if node is not None else bucket.popleft()[1]
            if not kernels:
                waits.unresolved["the communication that it waits for is not in the trace"] += 1
            target = computing.stream_of(call).first_from(call.start)
            pairs = [(kernel, target) for kernel in kernels]
        else:
            waits.unresolved["a stream waits for an event, but the trace does not say which"] += 1
            continue
        for source, target in pairs:
            if source < 0 or target < 0 or source == target:
                waits.unresolved["nothing runs on the stream before or after"] += 1
                continue
            begins = max(kineto.device[source].end, streams.launch_time[target])
            slack = max(0, kineto.device[target].start - begins)
            waits.waits.append(GpuWait(source, index, target, inferred=True, slack_ns=slack))


def _named(wait: ParamComms, numbered: Sequence[tuple[str, Sequence[int]]]) -> Sequence[int]:
    """The kernels of the communication that a `wait` node names, of those with its number."""
    kernels = [kernels for pg, kernels in numbered if pg == wait.pg] or [kernels for _, kernels in numbered]
    return kernels[0] if len(kernels) == 1 else ()


def _buckets(
    kineto: KinetoTrace, launch_call: Sequence[int], around: Surroundings, waited_for: set[int]
) -> dict[tuple[Id, Id], deque[tuple[int, Sequence[int]]]]:
    """By thread: the all-reduces that no `wait` node names, as (launch, kernels) in the order of their launches."""
    launched = []
    for record, kernels in around.issuing.values():
        if record.op == "all_reduce" and kernels and launch_call[kernels[0]] >= 0 and waited_for.isdisjoint(kernels):
            launched.append((kineto.calls[launch_call[kernels[0]]], kernels))
    buckets: dict[tuple[Id, Id], deque[tuple[int, Sequence[int]]]] = defaultdict(deque)
    for call, kernels in sorted(launched, key=lambda entry: entry[0].start):
        buckets[call.pid, call.tid].append((call.start, kernels))
    return buckets


class _Computing:
    """Which stream every thread computes on."""

    def __init__(
        self, kineto: KinetoTrace, launch_call: Sequence[int], streams: _Streams, communicate: set[int]
    ) -> None:
        self._streams = streams
        computes = [index for index, call in enumerate(launch_call) if call >= 0 and index not in communicate]
        calls = [kineto.calls[launch_call[index]] for index in computes]
        self._by_thread = ordered_by(
            ((call.pid, call.tid), call.start, index) for call, index in zip(calls, computes, strict=True)
        )
        self._busiest = Counter(streams.of[index] for index in computes).most_common(1)

    def stream_of(self, call: RuntimeCall) -> Ordered:
        """What is launched on the stream that the thread of a call computes on then; on the trace's busiest where the
        thread has none yet."""
        last = self._by_thread[call.pid, call.tid].last_until(call.start)
        if last >= 0:
            return self._streams.by_launch[self._streams.of[last]]
        return self._streams.by_launch[self._busiest[0][0]] if self._busiest else Ordered()
