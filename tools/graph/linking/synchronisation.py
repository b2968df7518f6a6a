"""Who waits for the GPU: the host at synchronising calls, and a stream for another one's event.

CUPTI's `cuda_sync` events (`enable_cuda_sync_events=True`) say it, by kind:

- Context Sync (cudaDeviceSynchronize): the host waits for the last activity of every stream of the device.
- Stream Sync (cudaStreamSynchronize): for the last one of one stream.
- Event Sync (cudaEventSynchronize, cudaEventQuery): for the last one launched on the event's stream before the
  call that recorded the event.
- Stream Wait Event (cudaStreamWaitEvent): the next activity launched on the waiting stream waits for that one.

A trace without such events still has the calls. A blocking call then waited for what ended last while it lasted:
that is inferred and marked so, with the time from the end of the activity to the end of the wait. What streams wait
for is inferred in `stream_waits`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from crossrank.tools.graph.linking.ordered import ordered_by
from crossrank.tools.traces.kineto import Call, KinetoTrace, SyncEvent

STREAM_WAIT = "Stream Wait Event"
CLOCK_NS = 2_000
"""Host and device clocks are joined, and times rounded, to about this much."""

_EVERY_STREAM = ("DeviceSynchronize", "CtxSynchronize")
_ONE_STREAM = ("StreamSynchronize", "EventSynchronize")
_ASYNC = "Async"


@dataclass(frozen=True)
class Wait:
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
class Waits:
    """All waits of a trace."""

    waits: list[Wait] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    """Kind -> synchronisations looked at."""
    unresolved: Counter[str] = field(default_factory=Counter)
    """Reason -> synchronisations that gave no wait."""


def find_waits(kineto: KinetoTrace, launch_call: Sequence[int]) -> Waits:
    """`launch_call` gives the launching call of each activity, -1 where it is not known."""
    lanes = _Lanes(kineto, launch_call)
    return _recorded(kineto, lanes) if kineto.syncs else _inferred(kineto, lanes)


class _Lanes:
    """Streams of devices: their activities by their start, by their end, and by their launch."""

    def __init__(self, kineto: KinetoTrace, launch_call: Sequence[int]) -> None:
        device = list(enumerate(kineto.device))
        self.by_start = ordered_by(((e.device, e.stream), e.start, index) for index, e in device)
        self.by_end = ordered_by(((e.device, e.stream), e.end, index) for index, e in device)
        self.by_launch = ordered_by(
            ((e.device, e.stream), kineto.calls[launch_call[index]].start, index)
            for index, e in device
            if launch_call[index] >= 0
        )


def _recorded(kineto: KinetoTrace, lanes: _Lanes) -> Waits:
    found = Waits()
    call_of: dict[int | None, int] = {
        call.correlation: index for index, call in enumerate(kineto.calls) if call.correlation
    }
    for sync in kineto.syncs:
        found.kinds[sync.kind] += 1
        call = call_of.get(sync.correlation, -1)
        waits = list(_of_sync(sync, call, call_of, kineto.calls, lanes, found.unresolved))
        found.waits.extend(waits)
    return found


def _of_sync(
    sync: SyncEvent,
    call: int,
    call_of: dict[int | None, int],
    calls: Sequence[Call],
    lanes: _Lanes,
    unresolved: Counter[str],
) -> Iterable[Wait]:
    if sync.record_correlation is None and sync.kind in ("Context Sync", "Stream Sync"):
        own = [(sync.device, sync.stream)]
        of_sync = [lane for lane in lanes.by_start if lane[0] == sync.device] if sync.kind == "Context Sync" else own
        sources = [lanes.by_start[lane].last_until(sync.end) for lane in of_sync]
        if max(sources, default=-1) < 0:
            unresolved["nothing ran on the stream before"] += 1
        yield from (Wait(source, call) for source in sources if source >= 0)
        return
    record = call_of.get(sync.record_correlation, -1)
    if record < 0:
        unresolved["the call that recorded the event is not in the trace"] += 1
        return
    source = lanes.by_launch[sync.device, sync.wait_on_stream].last_until(calls[record].start)
    if source < 0:
        unresolved["nothing was launched on the stream before its event"] += 1
        return
    if sync.kind != STREAM_WAIT:
        yield Wait(source, call)
        return
    at = calls[call].start if call >= 0 else sync.start
    target = lanes.by_launch[sync.device, sync.stream].first_from(at)
    if target < 0:
        unresolved["nothing was launched on the waiting stream after"] += 1
        return
    yield Wait(source, call, target)


def _inferred(kineto: KinetoTrace, lanes: _Lanes) -> Waits:
    found = Waits()
    copies = {
        activity.correlation: index
        for index, activity in enumerate(kineto.device)
        if activity.category == "gpu_memcpy" and activity.correlation
    }
    for index, call in enumerate(kineto.calls):
        name = call.name
        if name.endswith((*_EVERY_STREAM, *_ONE_STREAM)):
            ended = [lane.last_until(call.end + CLOCK_NS) for lane in lanes.by_end.values()]
            sources = [source for source in ended if source >= 0]
            if name.endswith(_ONE_STREAM):
                inside = [source for source in sources if kineto.device[source].end >= call.start]
                sources = [max(inside, key=lambda source: kineto.device[source].end)] if inside else []
            _infer(found, kineto, index, name, sources)
        elif "Memcpy" in name and call.correlation in copies:
            copy = copies[call.correlation]
            # A copy that its call outlives, or that is synchronous by name, blocked the host.
            if _ASYNC not in name or kineto.device[copy].end <= call.end + CLOCK_NS:
                _infer(found, kineto, index, name, [copy])
    return found


def _infer(found: Waits, kineto: KinetoTrace, call: int, name: str, sources: list[int]) -> None:
    found.kinds[name] += 1
    if not sources:
        found.unresolved["nothing ended while the call lasted"] += 1
    end = kineto.calls[call].end
    for source in sources:
        found.waits.append(Wait(source, call, inferred=True, slack_ns=max(0, end - kineto.device[source].end)))
