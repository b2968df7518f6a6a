"""Finds waits for the GPU: of the host in synchronizing calls, and of a stream for another stream's event.

CUPTI's `cuda_sync` events (`enable_cuda_sync_events=True`) have one of these kinds:

- Context Sync (cudaDeviceSynchronize): the host waits for the last activity of each stream of the device.
- Stream Sync (cudaStreamSynchronize): the host waits for the last activity of one stream.
- Event Sync (cudaEventSynchronize, cudaEventQuery): the host waits for the last activity that was launched on the
  event's stream before the call that recorded the event.
- Stream Wait Event (cudaStreamWaitEvent): the next activity launched on the waiting stream waits for that activity.

A trace without such events still has the calls. What they waited for is then inferred, and marked as inferred. A
blocking call waited for the activity that ended last during the call. The trace has neither stream nor event of a
cudaStreamWaitEvent, but both are known near a communication. Within the call of a communication, its stream waits for
the stream that the caller computes on. Within a `wait` node of `record_param_comms`, which has the sequence number,
that stream waits for the communication. DDP's reducer waits for the all-reduces of its buckets in their order, on the
thread that called them and outside any operation. Other calls are counted but get no edge: edges guessed from times
contradict other ranks of the same job.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from crossrank.comm import CommRecord
from crossrank.tools.graph.linking.dependencies import Ordered, ordered_by
from crossrank.tools.traces.kineto import Id, KinetoTrace, RuntimeCall
from crossrank.tools.traces.param_comms import ParamComms

CLOCK_NS = 2_000
"""Host and device clocks agree to about this much, and times are rounded to it."""

_StreamOrThread = tuple[Id, Id]
"""A stream of a device, or a thread of a process."""
_WAIT_EVENT = "StreamWaitEvent"
"""Part of the names of cudaStreamWaitEvent, hipStreamWaitEvent, …"""
_ALL_STREAMS = ("DeviceSynchronize", "CtxSynchronize")
_ONE_STREAM = ("StreamSynchronize", "EventSynchronize")


@dataclass(frozen=True)
class GpuWait:
    """One wait. Numbers are positions in `KinetoTrace.device` and `KinetoTrace.calls`."""

    source: int
    """The activity that is waited for."""
    call: int
    """The call that waits, or that makes a stream wait; -1 if it is not in the trace."""
    target: int = -1
    """The activity that waits; -1 if the host waits."""
    inferred: bool = False
    slack_ns: int | None = None


def find_waits(
    kineto: KinetoTrace,
    launch_call: Sequence[int],
    nodes_around: Callable[[int], Sequence[int]] = lambda _: (),
    issuing: Mapping[int, tuple[CommRecord, Sequence[int]]] = MappingProxyType({}),
    waiting: Mapping[int, ParamComms] = MappingProxyType({}),
) -> GpuWaits:
    """Find all waits. Nodes, activities and calls are positions in the traces. `launch_call` has each activity's
    launching call, -1 if unknown; `nodes_around` returns the nodes around a call, the innermost first; `issuing` maps a
    node to the communication that it issues and its kernels; `waiting` maps a `wait` node to its arguments."""
    search = GpuWaits(
        kineto=kineto, launch_call=launch_call, nodes_around=nodes_around, issuing=issuing, waiting=waiting
    )
    if kineto.syncs:
        search.take_recorded()
    else:
        search.infer_host_waits()
        search.infer_stream_waits()
    return search


@dataclass(kw_only=True)
class GpuWaits:
    """The waits of a trace found so far."""

    kineto: KinetoTrace
    launch_call: Sequence[int]
    nodes_around: Callable[[int], Sequence[int]]
    issuing: Mapping[int, tuple[CommRecord, Sequence[int]]]
    waiting: Mapping[int, ParamComms]
    waits: list[GpuWait] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    """Kind -> number of synchronizations."""
    unresolved: Counter[str] = field(default_factory=Counter)
    """Reason -> number of synchronizations without a wait."""

    def __post_init__(self) -> None:
        self._stream_of = [(activity.device, activity.stream) for activity in self.kineto.device]
        calls = self.kineto.calls
        self._launched = {index: calls[call].start for index, call in enumerate(self.launch_call) if call >= 0}

    def _by_stream(self, times: Iterable[tuple[int, int]]) -> Mapping[_StreamOrThread, Ordered]:
        return ordered_by((self._stream_of[index], time, index) for index, time in times)

    @cached_property
    def _by_launch(self) -> Mapping[_StreamOrThread, Ordered]:
        return self._by_stream(self._launched.items())

    def _launch_time(self, index: int) -> int:
        """Return when an activity was launched; its start if that is unknown."""
        return self._launched.get(index, self.kineto.device[index].start)

    def take_recorded(self) -> None:
        kineto, by_launch = self.kineto, self._by_launch
        by_start = self._by_stream((index, activity.start) for index, activity in enumerate(kineto.device))
        call_of: dict[int | None, int] = {
            call.correlation: index for index, call in enumerate(kineto.calls) if call.correlation
        }
        for sync in kineto.syncs:
            self.kinds[sync.kind] += 1
            call = call_of.get(sync.correlation, -1)
            if sync.record_correlation is None and sync.kind in ("Context Sync", "Stream Sync"):
                of_one = sync.kind == "Stream Sync"
                ended = [
                    entries.last_until(sync.end)
                    for (device, stream), entries in by_start.items()
                    if device == sync.device and (stream == sync.stream or not of_one)
                ]
                sources = [source for source in ended if source >= 0]
                if not sources:
                    self.unresolved["no activity on the stream before"] += 1
                self.waits += [GpuWait(source, call) for source in sources]
                continue
            record = call_of.get(sync.record_correlation, -1)
            if record < 0:
                self.unresolved["the call that recorded the event is not in the trace"] += 1
                continue
            source = by_launch[sync.device, sync.wait_on_stream].last_until(kineto.calls[record].start)
            at = kineto.calls[call].start if call >= 0 else sync.start
            of_stream = sync.kind == "Stream Wait Event"
            target = by_launch[sync.device, sync.stream].first_from(at) if of_stream else -1
            if source < 0:
                self.unresolved["no launch on the stream before its event"] += 1
            elif of_stream and target < 0:
                self.unresolved["no launch on the waiting stream after it"] += 1
            else:
                self.waits.append(GpuWait(source, call, target))

    def infer_host_waits(self) -> None:
        device = self.kineto.device
        by_end = self._by_stream((index, activity.end) for index, activity in enumerate(device))
        launched = {activity.correlation: index for index, activity in enumerate(device) if activity.correlation}
        for index, call in enumerate(self.kineto.calls):
            if call.name.endswith((*_ALL_STREAMS, *_ONE_STREAM)):
                ended = [stream.last_until(call.end + CLOCK_NS) for stream in by_end.values()]
                sources = [source for source in ended if source >= 0]
                if call.name.endswith(_ONE_STREAM):
                    inside = [source for source in sources if device[source].end >= call.start]
                    sources = [max(inside, key=lambda source: device[source].end)] if inside else []
            elif "Memcpy" in call.name and call.correlation in launched:
                sources = [launched[call.correlation]]
                # A copy that ends before its call, or whose name is not Async, blocked the host.
                if "Async" in call.name and device[sources[0]].end > call.end + CLOCK_NS:
                    continue
            else:
                continue
            self.kinds[call.name] += 1
            if not sources:
                self.unresolved["no activity ended during the call"] += 1
            for source in sources:
                slack = max(0, call.end - device[source].end)
                self.waits.append(GpuWait(source, index, inferred=True, slack_ns=slack))

    def infer_stream_waits(self) -> None:
        by_number: dict[int | None, list[tuple[str, Sequence[int]]]] = defaultdict(list)
        for record, kernels in self.issuing.values():
            by_number[record.seq if record.seq is not None else record.p2p_seq].append((record.pg, kernels))
        waited_for = {node: _find_kernels(wait, by_number.get(wait.seq, [])) for node, wait in self.waiting.items()}
        buckets = self._find_buckets({kernel for named in waited_for.values() for kernel in named})
        computing = self._find_computing_stream({kernel for _, kernels in self.issuing.values() for kernel in kernels})
        for index, call in sorted(enumerate(self.kineto.calls), key=lambda entry: entry[1].start):
            if _WAIT_EVENT not in call.name:
                continue
            self.kinds[call.name] += 1
            nodes, bucket = self.nodes_around(index), buckets[call.pid, call.tid]
            node = next((node for node in nodes if node in self.issuing or node in waited_for), None)
            if node is not None and node in self.issuing:
                # The communication's stream waits for what its caller computes.
                kernels = self.issuing[node][1]
                target = next((kernel for kernel in kernels if self._launch_time(kernel) >= call.start), -1)
                if target < 0:
                    self.unresolved["it belongs to a communication, after its launch"] += 1
                    continue
                edges = [(computing(call).last_until(call.start), target)]
            elif node is not None or (not nodes and bucket and bucket[0][0] <= call.start):
                # The stream that the caller computes on waits for a communication.
                kernels = waited_for[node] if node is not None else bucket.popleft()[1]
                if not kernels:
                    self.unresolved["the communication that it waits for is not in the trace"] += 1
                target = computing(call).first_from(call.start)
                edges = [(kernel, target) for kernel in kernels]
            else:
                self.unresolved["a stream waits for an event that the trace does not name"] += 1
                continue
            for source, target in edges:
                if source < 0 or target < 0 or source == target:
                    self.unresolved["no activity on the stream before or after"] += 1
                    continue
                begins = max(self.kineto.device[source].end, self._launch_time(target))
                slack = max(0, self.kineto.device[target].start - begins)
                self.waits.append(GpuWait(source, index, target, inferred=True, slack_ns=slack))

    def _find_buckets(self, waited_for: set[int]) -> Mapping[_StreamOrThread, deque[tuple[int, Sequence[int]]]]:
        """Return, for each thread, the all-reduces that no `wait` node names: (launch, kernels), ordered by launch."""
        buckets: dict[_StreamOrThread, deque[tuple[int, Sequence[int]]]] = defaultdict(deque)
        reduces = [kernels for record, kernels in self.issuing.values() if record.op == "all_reduce"]
        launched = [kernels for kernels in reduces if kernels and kernels[0] in self._launched]
        for kernels in sorted(launched, key=lambda kernels: self._launched[kernels[0]]):
            if waited_for.isdisjoint(kernels):
                call = self.kineto.calls[self.launch_call[kernels[0]]]
                buckets[call.pid, call.tid].append((call.start, kernels))
        return buckets

    def _find_computing_stream(self, communicate: set[int]) -> Callable[[RuntimeCall], Ordered]:
        """Return a function from a call to the activities of the stream that its thread computes on at that time. If
        the thread has launched nothing yet, it takes the busiest stream of the trace."""
        calls = self.kineto.calls
        computes = {index: calls[self.launch_call[index]] for index in self._launched if index not in communicate}
        by_thread = ordered_by(((call.pid, call.tid), call.start, index) for index, call in computes.items())
        busiest = Counter(self._stream_of[index] for index in computes).most_common(1)

        def stream_of(call: RuntimeCall) -> Ordered:
            last = by_thread[call.pid, call.tid].last_until(call.start)
            if last >= 0:
                return self._by_launch[self._stream_of[last]]
            return self._by_launch[busiest[0][0]] if busiest else Ordered()

        return stream_of


def _find_kernels(wait: ParamComms, numbered: Sequence[tuple[str, Sequence[int]]]) -> Sequence[int]:
    """Return the kernels of the communication that a `wait` node names, among those with its number."""
    kernels = [kernels for pg, kernels in numbered if pg == wait.pg] or [kernels for _, kernels in numbered]
    return kernels[0] if len(kernels) == 1 else ()
