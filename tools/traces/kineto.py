"""Kineto traces (the JSON that `torch.profiler` exports), of 2023 to now, for CUDA and for ROCm.

Times in the file are microseconds with up to three decimals, since `baseTimeNanoseconds` or, without that field, since
1970. Here all times are whole nanoseconds on the file's own clock. For times since 1970, a double has a precision of a
quarter of a microsecond.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from crossrank.comm import Group, Int, Number
from crossrank.errors import BROKEN, CrossrankError
from crossrank.privacy import Privacy
from crossrank.text import plural
from crossrank.tools.traces.device_times import (
    UNKNOWN,
    Column,
    EventTimes,
    described,
    impossible_ranges,
    impossible_times,
)
from crossrank.tools.traces.group_config import read_groups
from crossrank.tools.traces.json_document import Document, Shape

HOST_CATEGORIES = frozenset(("cpu_op", "user_annotation"))
ACTIVITY_CATEGORIES = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_KERNELS = frozenset(("mtia_ccp_events", "hpu_op", "collective_comm"))
"""Kineto's `ActivityType`s for devices of Meta and Intel. Here they are kernels."""
_NO_WORK = frozenset(
    ("Trace", "ac2g", "cpu_instant_event", "cuda_profiler_range", "external_correlation", "fwdbwd", "gpu_pm_counter")
    + ("gpu_user_annotation", "mtia_counters", "mtia_insight", "overhead", "python_function")
)
"""Other categories of Kineto: no device ran anything for their events."""
_WINDOW_CATEGORY = "Trace"
"""Category of the one event that lasts as long as the profiler recorded."""
SYNC_CATEGORY = "cuda_sync"
_CALL_SUFFIXES = ("_runtime", "_driver")
_STEP = "ProfilerStep#"

Id = Int | str | None


class HostEvent(msgspec.Struct, gc=False):
    """A range on the host: an operator or a user's annotation."""

    name: str
    pid: Id
    tid: Id
    start: int
    end: int
    rf_id: int | None
    """Id of the RecordFunction, the same as in the execution trace; None before 2024."""
    external_id: int | None
    seq_id: int
    """Autograd's sequence number; -1 = none."""
    args: msgspec.Raw
    """As in the file if they describe a collective, else empty."""


class RuntimeCall(msgspec.Struct, gc=False):
    """A call of the GPU's runtime or driver API. Any of them may launch: the correlation id shows it."""

    name: str
    pid: Id
    tid: Id
    start: int
    end: int
    correlation: int | None


class DeviceEvent(msgspec.Struct, gc=False):
    """A kernel, a copy or a memset on a GPU."""

    name: str
    category: str
    device: Id
    stream: Id
    start: int
    end: int
    correlation: int | None
    external_id: int | None
    context: Id
    """Streams of several contexts may have the same number."""
    args: msgspec.Raw


class SyncEvent(msgspec.Struct, gc=False):
    """A synchronisation that CUPTI recorded; `tools/graph/linking/waits.py` explains its kinds."""

    kind: str
    device: Id
    stream: Id
    start: int
    end: int
    correlation: int | None
    """Correlation id of the runtime call that waits."""
    wait_on_stream: Id
    record_correlation: int | None
    """Correlation id of the call that recorded the awaited event."""


_Range = TypeVar("_Range", HostEvent, RuntimeCall)
_Doubled = TypeVar("_Doubled", HostEvent, DeviceEvent)


@dataclass(kw_only=True)
class KinetoTrace:
    """The Kineto trace of one rank; events are in the order of the file."""

    path: str
    sha256: str = ""
    base_ns: int = 0
    """Nanoseconds since 1970 at time 0 of the trace."""
    host: list[HostEvent] = field(default_factory=list)
    calls: list[RuntimeCall] = field(default_factory=list)
    device: list[DeviceEvent] = field(default_factory=list)
    syncs: list[SyncEvent] = field(default_factory=list)
    groups: tuple[Group, ...] = ()
    """Groups in `distributedInfo`."""
    rank: int | None = None
    world_size: int | None = None
    unread: Counter[str] = field(default_factory=Counter)
    """Category that is not read -> number of its events."""
    damage: list[str] = field(default_factory=list)
    """Parts of the file that could not be read, or cannot be right."""
    untimed: list[DeviceEvent] = field(default_factory=list)
    """Device events whose times are unusable: their calls are calls all the same. Start and end are 0."""
    window: tuple[int, int] | None = None
    """Start and end of what the profiler recorded, if the trace has them."""
    _bad: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """What is wrong -> names of the events."""

    @property
    def iterations(self) -> list[tuple[int, int]]:
        """See `profiler_iterations`; times are on the clock of the trace."""
        return profiler_iterations((event.name, event.start, event.end) for event in self.host)

    def take(self, rows: list[Event]) -> None:
        """Add every event to the list for its kind."""
        for event in rows:
            if event.ph == "X" and event.cat:
                if not event.name:
                    self._bad["have no name"].append(f"{event.cat} at {event.ts}")
                self._take(event)
            elif event.ph in ("X", ""):
                self._bad["lack a phase or a category and were skipped"].append(event.name)
            # Metadata and arrows only repeat correlation ids and sequence numbers.
            elif event.ph not in ("M", "s", "t", "f"):
                self.unread[f"{event.cat or '(none)'}, phase {event.ph!r}"] += 1

    def _take(self, event: Event) -> None:
        duration = event.dur
        has_start = event.ts is not None and -_MOST_US <= event.ts < _MOST_US
        has_duration = duration is not None and 0 <= duration < _MOST_US
        start = _nanoseconds(event.ts) if has_start and event.ts is not None else 0
        try:
            if not (has_start and has_duration) and _ran_on_device(event):
                self._bad["of devices have no valid time or duration: both are unknown"].append(event.name)
                self._sort(event, 0, 0)
                self.untimed.append(self.device.pop())
                return
            if not has_start:
                self._bad["have no valid time and were skipped"].append(event.name)
                return
            if duration is None or not has_duration:
                self._bad["have no valid duration; 0 is used"].append(event.name)
                duration = 0
            self._sort(event, start, start + _nanoseconds(duration))
        except BROKEN:
            self._bad["have arguments that cannot be read"].append(event.name)
            self._take(msgspec.structs.replace(event, args=_NO_ARGS))

    def _sort(self, event: Event, start: int, end: int) -> None:
        category, name = event.cat, sys.intern(event.name)
        if category in HOST_CATEGORIES:
            host = _host_args(event.args)
            args = _NO_ARGS if host.collective is UNSET else event.args.copy()
            numbers = host.rf_id, host.external_id, host.seq_id
            self.host.append(HostEvent(name, event.pid, event.tid, start, end, *numbers, args))
        elif category.endswith(_CALL_SUFFIXES):
            of = _device_args(event.args)
            self.calls.append(RuntimeCall(name, event.pid, event.tid, start, end, of.correlation))
        elif category == SYNC_CATEGORY:
            of = _device_args(event.args)
            device = event.pid if of.device is None else of.device
            waits_for = of.correlation, of.wait_on_stream, of.record_correlation
            self.syncs.append(SyncEvent(of.kind or name, device, of.stream, start, end, *waits_for))
        elif category == _WINDOW_CATEGORY and end > start:
            first, last = self.window or (start, end)
            self.window = min(first, start), max(last, end)
        elif _ran_on_device(event):
            of = _device_args(event.args)
            category = category if category in ACTIVITY_CATEGORIES else "kernel"
            device = event.pid if of.device is None else of.device
            stream = event.tid if of.stream is None else of.stream
            ids = of.correlation, of.external_id, of.context
            args = event.args.copy()
            self.device.append(DeviceEvent(name, category, device, stream, start, end, *ids, args))
        else:
            self.unread[category or "(none)"] += 1

    def leave_out_impossible(self) -> None:
        """Take the events away that the file repeats or whose times cannot be right; `damage` says how many."""
        self.host = self._without_doubles(self.host, "rf_id", "host range")
        self.device = self._without_doubles(self.device, "correlation", "device event")
        self.host = self._without_impossible(self.host, "host range")
        self.calls = self._without_impossible(self.calls, "runtime call")
        wrong = impossible_times(*self._device_times(), self.window or self._widest_window())
        if wrong:
            self.damage += described(wrong, lambda index: self.device[index].name)
            self.untimed += [msgspec.structs.replace(self.device[index], start=0, end=0) for index in sorted(wrong)]
            self.device = [one for index, one in enumerate(self.device) if index not in wrong]

    def _without_doubles(self, events: list[_Doubled], key: str, what: str) -> list[_Doubled]:
        """Return the events that differ from all others in a field. `key`: name of a field that most have and few
        share."""
        ids = [getattr(one, key) for one in events]
        shared = {number for number, count in Counter(ids).items() if count > 1 and number is not None}
        seen: set[tuple[object, ...]] = set()
        doubled: set[int] = set()
        for place in [place for place, number in enumerate(ids) if number in shared] if shared else []:
            fields = _fields(events[place])
            if fields in seen and events[place].end > events[place].start:
                doubled.add(place)
            seen.add(fields)
        if not doubled:
            return events
        first = events[min(doubled)].name
        self.damage.append(f"left out: {plural(len(doubled), what)} that the file has twice (first: {first!r})")
        return [one for index, one in enumerate(events) if index not in doubled]

    def _without_impossible(self, ranges: list[_Range], what: str) -> list[_Range]:
        start, end = (np.array([getattr(one, name) for one in ranges], np.int64) for name in ("start", "end"))
        wrong = impossible_ranges(start, end, self.window)
        if not wrong:
            return ranges
        self.damage += described(wrong, lambda index: ranges[index].name, what)
        for index in [
            index for index in wrong if self.window and self.window[0] <= ranges[index].start < self.window[1]
        ]:
            ranges[index].end = ranges[index].start  # its end is unknown
            del wrong[index]
        return [one for index, one in enumerate(ranges) if index not in wrong]

    def _device_times(self) -> tuple[EventTimes, dict[int, Column]]:
        """Return (the device events, the synchronizations of each process), as `impossible_times` takes them."""
        launch_of = {one.correlation: one for one in self.calls if one.correlation is not None}
        streams: dict[tuple[Id, ...], int] = {}
        devices: dict[Id, int] = {}
        processes = {pid: number for number, pid in enumerate(dict.fromkeys(one.pid for one in self.calls))}
        rows: list[tuple[int, ...]] = []
        for one in self.device:
            launch = None if one.correlation is None else launch_of.get(one.correlation)
            pid = None if launch is None else launch.pid
            stream = streams.setdefault((one.device, one.stream, one.context, pid), len(streams))
            device = devices.setdefault(one.device, len(devices))
            correlation = UNKNOWN if one.correlation is None else one.correlation
            of_launch = (UNKNOWN,) * 3 if launch is None else (processes[pid], launch.start, launch.end)
            rows.append((one.start, one.end, device, stream, correlation, *of_launch))
        syncs: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for call in self.calls:
            if call.name in _DEVICE_SYNCS:
                syncs[processes[call.pid]].append((call.start, call.end))
        columns = np.array(rows, np.int64).reshape(-1, 8).T
        return EventTimes(*columns), {number: np.array(sorted(spans), np.int64) for number, spans in syncs.items()}

    def _widest_window(self) -> tuple[int, int] | None:
        """Return a window for a trace that lacks its own. It is three times as long as what the host did: the profiler
        waits for the devices at its end."""
        ranges: list[HostEvent | RuntimeCall] = [*self.host, *self.calls]
        if not ranges:
            return None
        first, last = min(one.start for one in ranges), max(one.end for one in ranges)
        return 2 * first - last, 2 * last - first


def profiler_iterations(ranges: Iterable[tuple[str, int, int]]) -> list[tuple[int, int]]:
    """(step, start) as torch's profiler marks steps on the host. The last row is the end of the last step.

    `ranges` are (name, start, end).
    """
    marked = []
    for name, begin, end in ranges:
        number = name.removeprefix(_STEP)
        if number != name and number.isdecimal() and len(number) < 10:
            marked.append((begin, end, int(number)))
    steps = [(number, begin) for begin, _, number in sorted(marked)]
    last_begin, last_end, last = max(marked, default=(0, 0, 0))
    # If the duration of the last step is unknown, all that is known of it is the end of the step before.
    return [*steps, (last + 1, last_end)] if last_end > last_begin else steps


class DistributedInfo(msgspec.Struct, frozen=True):
    rank: Number | None = None
    world_size: Number | None = None
    pg_config: Annotated[Any, Privacy.MIXED] = None


_NO_ARGS = msgspec.Raw(b"{}")


class Event(msgspec.Struct, gc=False):
    ph: Annotated[str, Privacy.PHASE] = ""
    cat: Annotated[str, Privacy.CATEGORY] = ""
    name: Annotated[str, Privacy.EVENT] = ""
    pid: Annotated[Id, Privacy.LABEL] = None
    tid: Annotated[Id, Privacy.LABEL] = None
    ts: Annotated[int | float, Privacy.WALL] | None = None
    dur: Annotated[int | float, Privacy.NUMBER] | None = None
    args: Annotated[msgspec.Raw, Privacy.MIXED] = _NO_ARGS


class KinetoFile(msgspec.Struct):
    traceEvents: list[Event]
    baseTimeNanoseconds: Annotated[Int, Privacy.WALL] = 0
    distributedInfo: DistributedInfo = DistributedInfo()


class HostArgs(msgspec.Struct, gc=False):
    rf_id: Number | None = msgspec.field(name="Record function id", default=None)
    external_id: Number | None = msgspec.field(name="External id", default=None)
    seq_id: Number = msgspec.field(name="Sequence number", default=-1)
    collective: Annotated[msgspec.Raw, Privacy.API] | UnsetType = msgspec.field(name="Collective name", default=UNSET)


class DeviceArgs(msgspec.Struct, gc=False):
    device: Annotated[Id, Privacy.NUMBER] = None
    stream: Annotated[Id, Privacy.NUMBER] = None
    context: Annotated[Id, Privacy.NUMBER] = None
    correlation: Number | None = None
    external_id: Number | None = msgspec.field(name="External id", default=None)
    kind: Annotated[str, Privacy.SYNC] = msgspec.field(name="cuda_sync_kind", default="")
    wait_on_stream: Annotated[Id, Privacy.NUMBER] = None
    record_correlation: Number | None = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=None)


_SHAPE = Shape(what="a Kineto trace", content=KinetoFile, rows="traceEvents", row=Event, bare_list=True, lenient=True)
_MOST_US = float(1 << 53)
"""285 years."""
_DEVICE_SYNCS = ("cudaDeviceSynchronize", "hipDeviceSynchronize", "cuCtxSynchronize")

_host_args = msgspec.json.Decoder(HostArgs, strict=False).decode
_device_args = msgspec.json.Decoder(DeviceArgs, strict=False).decode


def _fields(event: HostEvent | DeviceEvent) -> tuple[object, ...]:
    return (*msgspec.structs.astuple(event)[:-1], bytes(event.args))


def read_kineto(path: str) -> KinetoTrace:
    """Read one rank's Kineto trace. Raises `CrossrankError` if nothing of it can be used."""
    trace = KinetoTrace(path=path)
    document = Document(path, _SHAPE, trace.take)
    if not (trace.host or trace.calls or trace.device or trace.unread):
        raise CrossrankError(f"{path}: has no events; record a window with a training step")
    trace.sha256, file = document.sha256, document.content
    trace.base_ns, info = file.baseTimeNanoseconds, file.distributedInfo
    trace.groups = tuple(read_groups(info.pg_config, document.budget))
    trace.rank, trace.world_size = info.rank, info.world_size
    trace.damage += document.damage
    trace.damage += (f"{len(names):,} event(s) {what} (first: {names[0]!r})" for what, names in trace._bad.items())
    trace.leave_out_impossible()
    return trace


def _nanoseconds(us: float) -> int:
    if type(us) is int:
        return us * 1000
    # A product of the whole number would be rounded once more.
    whole = int(us)
    return whole * 1000 + round((us - whole) * 1000)


def _ran_on_device(event: Event) -> bool:
    """Whether a device ran the event. In an unknown category, only such events have a stream."""
    if event.cat in HOST_CATEGORIES or event.cat == SYNC_CATEGORY or event.cat.endswith(_CALL_SUFFIXES):
        return False
    if event.cat in ACTIVITY_CATEGORIES or event.cat in _KERNELS:
        return True
    return bool(event.cat) and event.cat not in _NO_WORK and _device_args(event.args).stream is not None
