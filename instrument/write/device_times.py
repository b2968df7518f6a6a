"""Durations of NCCL calls on the device: measured by torch's flight recorder, joined to the recorded calls.

If timing is on, torch measures every call by two events on the device and keeps the durations of the last calls in a
ring. A thread reads the ring before half of it is new, without stack traces, and with the compiled recorder without the
interpreter's lock. The thread may hang: torch queries the device about unfinished calls, and the query waits while
another thread has CUDA's lock. So only the end of a recording waits for this thread, for a second.

Alternatives: the completion hook of a process group takes the interpreter's lock for each call, has no sends and is
deprecated. Our own events would have to be on streams that only NCCL's process group knows.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from crossrank.errors import one_line
from crossrank.instrument import threads
from crossrank.instrument.hang.torch_recorder import SIZE, calls_kept
from crossrank.instrument.identity.gpu import cuda_is_in_use
from crossrank.instrument.log import log
from crossrank.instrument.record.recorder import Call
from crossrank.instrument.unpatched import threading, time
from crossrank.measured_launches import RecordedLaunch, RecordedLaunches
from crossrank.recording import Ran

_EVERY = 1.0
"""Seconds after which durations are read even if they are few."""
_LOOKS = 0.05
"""Seconds between two checks of the thread whether to read."""
_LAG = 0.15
"""Seconds after which torch has noticed the end of a call: its watchdog checks ten times per second."""
_PATIENCE = 1.0
"""Seconds that the end of a recording waits for the last durations."""
_MOST_IN_VAIN = 5
"""Reads without news after which the thread waits for new calls: a hung job must not be queried forever."""
_BACKEND = "nccl"
_CACHE = "TORCH_NCCL_CUDA_EVENT_CACHE"
"""If this is off, torch's recorder may query events of calls that no longer exist."""


class _Entry(msgspec.Struct, frozen=True, gc=False):
    """A call in the JSON of the flight recorder. An unknown time is 0."""

    record_id: int
    profiling_name: str
    process_group: tuple[str, str]
    time_created_ns: int
    time_discovered_completed_ns: int | None = 0
    duration_ms: float | None = 0.0


class _Recorder(msgspec.Struct):
    entries: list[_Entry] = []


Entries = list[_Entry]

_decode = msgspec.json.Decoder(_Recorder).decode


class DeviceTimes:
    """The durations of NCCL calls, each once.

    Only the writer thread uses this. Call `take` before the calls are taken from the recorder's ring, then `note`, then
    `join`: so no entry is newer than its call.
    """

    def __init__(self, dump: Callable[[], bytes], entries: int | None = None) -> None:
        """`dump` returns the NCCL flight recorder as JSON, with at most `entries` entries."""
        self._dump = dump
        self._most = calls_kept() if entries is None else entries
        self._launches = RecordedLaunches[int]()
        self._batches: dict[int, RecordedLaunch[int]] = {}
        self._open: dict[int, RecordedLaunch[int]] = {}  # unfinished launches, by the id of the entry
        self._next: int | None = None  # id of the first entry that is not read yet
        self._any = False
        self._new = 0  # calls noted since the last reading was asked for
        self._noted = 0  # and since the last one was joined
        self._entries_per_call = 1.0
        self._in_vain = 0
        self._read_at = time.monotonic()
        self._complained = False
        self._thread: threading.Thread | None = None
        # No lock: a signal handler may interrupt the thread that has it.
        self._asked = self._answered = 0
        self._stopped = False
        self._found: deque[Entries] = deque()

    def take(self, waiting: int) -> Entries | None:
        """Return the entries that the thread has read since the last time. Start a new read if it is time, with
        `waiting` calls in the recorder's ring."""
        late = time.monotonic() - self._read_at > _EVERY
        may_change = bool(self._new) or (bool(self._open) and self._in_vain < _MOST_IN_VAIN)
        many = 2 * (self._new + waiting) * self._entries_per_call >= self._most
        if self._any and self._asked == self._answered and ((late and may_change) or (many and self._new)):
            self._read()
        entries = self._found.pop() if self._found else None
        self._found.clear()
        return entries

    def finish(self, waiting: int) -> None:
        """Let torch notice the end of finished calls, and read them: `take` returns them, if they come in time.

        `waiting` calls are not noted yet: in a very short job, these are all calls.
        """
        may_be_timed = self._thread is not None or cuda_is_in_use()
        if not may_be_timed or not (self._new or self._open or waiting):
            self._stopped = True
            return
        until = time.monotonic() + _PATIENCE
        time.sleep(_LAG)
        self._read()
        while self._answered < self._asked and time.monotonic() < until:
            time.sleep(_LOOKS / 5)
        if self._answered < self._asked:
            self._complain("torch's flight recorder did not answer within %g s at the end", _PATIENCE)
        self._stopped = True

    def stop(self) -> None:
        """End the thread, unless it hangs in torch."""
        self._stopped = True

    def _read(self) -> None:
        self._read_at, self._new = time.monotonic(), 0
        self._asked += 1
        if self._thread is None:
            self._thread = threads.start("durations", self._run)

    def _run(self) -> None:
        while not self._stopped:
            asked = self._asked
            if self._answered < asked:
                try:
                    content = self._dump()
                    self._found.append(_decode(content).entries if content else [])
                except Exception as error:  # CUDA is gone already, or the format is unknown
                    self._complain("torch's flight recorder cannot be read: %s", one_line(error))
                self._answered = asked
            time.sleep(_LOOKS)

    def note(self, calls: Iterable[Call], wall_offset: int) -> None:
        """Add calls; `wall_offset`: ns from their times to times since 1970."""
        for descriptor, record_id, _, t, _, batch, _, _ in calls:
            group = descriptor.state.group
            if _BACKEND not in group.backend:
                continue
            if not self._most:
                self._complain("torch's flight recorder is off (%s=0)", SIZE)
                return
            if os.environ.get(_CACHE) == "0":
                self._complain("torch's flight recorder cannot be read safely with %s=0", _CACHE)
                return
            self._any = True
            self._new += 1
            self._noted += 1
            if batch is not None and batch in self._batches:
                self._batches[batch].calls.append(record_id)
                continue
            op, is_batch = descriptor.reader.op, batch is not None
            launch = RecordedLaunch(began=t + wall_offset, op=op, is_batch=is_batch, calls=[record_id])
            self._launches.add(group.pg, launch)
            if batch is not None:
                self._batches = {batch: launch}  # one thread's batches follow each other
        self._launches.keep_last(self._most)

    def join(self, entries: Entries | None, wall_offset: int) -> list[Ran]:
        """Return the durations of calls that have finished since the last time; `entries` is the result of `take`."""
        if entries is None:
            return []
        self._in_vain += 1
        if not entries:
            if self._any and (self._in_vain >= _MOST_IN_VAIN or self._stopped):
                self._complain("torch's flight recorder has none of them; %s=2000 makes it keep calls", SIZE)
            return []
        first, last = entries[0].record_id, entries[-1].record_id
        if self._next is not None and last < self._next - 1:  # torch has started a new recorder
            self._next = None
            self._open.clear()
        if self._next is not None and first > self._next:
            self._complain(
                "%d entries left torch's flight recorder of %d before they were read; %s=%d keeps more",
                *(first - self._next, self._most, SIZE, 10 * self._most),
            )
        if self._next is not None and self._noted:
            self._entries_per_call = max(1.0, (last + 1 - self._next) / self._noted)
        self._noted = 0
        found: list[Ran] = []
        for entry in entries:
            if self._next is None or entry.record_id >= self._next:
                launch = self._launches.take(entry.process_group[0], entry.profiling_name, entry.time_created_ns)
                if launch is not None:
                    self._open[entry.record_id] = launch
            ended, took = entry.time_discovered_completed_ns, entry.duration_ms
            if not ended or not took or (launch := self._open.pop(entry.record_id, None)) is None:
                continue
            ns = round(took * 1e6)
            began = max(entry.time_created_ns, ended - ns) - wall_offset
            found += [Ran(id=one, t=began, took=ns, on_device=True) for one in launch.calls]
        self._next = last + 1
        for lost in [one for one in self._open if one < first]:
            del self._open[lost]
        if found:
            self._in_vain = 0
        return found

    def _complain(self, why: str, *values: object) -> None:
        if not self._complained:
            self._complained = True
            log.warning("crossrank: durations are missing for some NCCL calls: " + why, *values)
