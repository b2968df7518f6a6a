"""How long NCCL's calls took on the device: what torch's flight recorder measured, joined to the recorded calls.

torch measures every call by two events on the device, where it is told to, and keeps the durations of the last calls in
a ring. A thread of its own reads that before half of it is new, without stack traces, and with the compiled kernel
without the interpreter's lock. The thread may stand there for good: torch asks the device about calls that are not
over, which waits where another thread holds the lock of CUDA. So nobody waits for it but the end, for a second.

What else could tell: the completion hook of a process group takes the interpreter's lock for each call, knows no sends
and is deprecated; events of our own would have to be put on streams that only NCCL's process group knows.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from threading import Thread

import msgspec

from crossrank.errors import one_line
from crossrank.instrument import threads
from crossrank.instrument.hang.torch_recorder import SIZE, calls_kept
from crossrank.instrument.identity.gpu import cuda_is_in_use
from crossrank.instrument.log import log
from crossrank.instrument.record.recorder import Call
from crossrank.measured_launches import RecordedLaunch, RecordedLaunches
from crossrank.recording import Ran

_EVERY = 1.0
"""Seconds after which durations are read however few they are."""
_LOOKS = 0.05
"""Seconds between two looks of the thread at whether it is to read."""
_LAG = 0.15
"""Seconds after which torch has noticed that a call is over: its watchdog looks ten times a second."""
_PATIENCE = 1.0
"""Seconds that the end of a recording waits for the last durations."""
_MOST_IN_VAIN = 5
"""Reads without news before it is left be until there are new calls: of a job that hangs nothing is asked for ever."""
_BACKEND = "nccl"
_CACHE = "TORCH_NCCL_CUDA_EVENT_CACHE"
"""Where it is off torch's recorder may ask for events of calls that are gone."""


class _Entry(msgspec.Struct, frozen=True, gc=False):
    """A call as the flight recorder's JSON has it. A time that is not known is 0."""

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
    """The durations of the calls on NCCL's groups, each once.

    Of the writer's thread; the thread that reads leaves what it found. `take` comes before the calls are taken from the
    recorder's ring, `note` after it, then `join`: so no entry is newer than its call.
    """

    def __init__(self, dump: Callable[[], bytes], entries: int | None = None) -> None:
        """`dump` gives NCCL's flight recorder as JSON, of so many `entries` at most."""
        self._dump = dump
        self._most = calls_kept() if entries is None else entries
        self._launches = RecordedLaunches[int]()
        self._batches: dict[int, RecordedLaunch[int]] = {}
        self._open: dict[int, RecordedLaunch[int]] = {}  # launches that are not over, by the id of the entry
        self._next: int | None = None  # id of the first entry that was not read yet
        self._any = False
        self._new = 0  # calls noted since the last reading was asked for
        self._noted = 0  # and since the last one was joined
        self._entries_per_call = 1.0
        self._in_vain = 0
        self._read_at = time.monotonic()
        self._complained = False
        self._thread: Thread | None = None
        # Plain fields: a lock may be held by what a signal handler interrupts.
        self._asked = self._answered = 0
        self._stopped = False
        self._found: deque[Entries] = deque()

    def take(self, waiting: int) -> Entries | None:
        """What the thread has read since the last time; tells it to read again where it is time to, with so many calls
        in the recorder's ring."""
        late = time.monotonic() - self._read_at > _EVERY
        goes_on = bool(self._new) or (bool(self._open) and self._in_vain < _MOST_IN_VAIN)
        many = 2 * (self._new + waiting) * self._entries_per_call >= self._most
        if self._any and self._asked == self._answered and ((late and goes_on) or (many and self._new)):
            self._read()
        entries = self._found.pop() if self._found else None
        self._found.clear()
        return entries

    def finish(self, waiting: int) -> None:
        """Let torch notice the end of calls that are over by now, and read them: `take` gives them, if in time.

        `waiting` calls are not noted yet: of a job that ends within the first moments that is all of them.
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
        """End the thread, if it does not stand in torch."""
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
                except Exception as error:  # of CUDA, where that is gone already, or of a format that is not known
                    self._complain("torch's flight recorder cannot be read: %s", one_line(error))
                self._answered = asked
            time.sleep(_LOOKS)

    def note(self, calls: Iterable[Call], wall_offset: int) -> None:
        """Take in calls; `wall_offset`: ns to add to their times for those since 1970."""
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
        """The durations of calls that are over, and were not before; `entries` is what `take` gave."""
        if entries is None:
            return []
        self._in_vain += 1
        if not entries:
            if self._any and (self._in_vain >= _MOST_IN_VAIN or self._stopped):
                self._complain("torch's flight recorder has none of them; %s=2000 makes it keep calls", SIZE)
            return []
        first, last = entries[0].record_id, entries[-1].record_id
        if self._next is not None and last < self._next - 1:  # torch has begun a new recorder
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
            if not ended or not took or (over := self._open.pop(entry.record_id, None)) is None:
                continue
            ns = round(took * 1e6)
            began = max(entry.time_created_ns, ended - ns) - wall_offset
            found += [Ran(id=one, t=began, took=ns, on_device=True) for one in over.calls]
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
