"""The comms file of one rank: a thread that empties the recorder's ring.

The recorder leaves a row and goes on. The writer thread turns what has gathered into JSON lines, compresses them
into one complete zstd frame and appends that to the file, several times a second, so a killed process loses no
more than its last half second and what is on disk stays readable. When the ring is full the newest calls are dropped
and counted; when the disk refuses, the file is cut back to its last whole frame and the loss is counted.

Until it is known which nodes the other ranks are on, the frame is written as it stands but the calls stay in the ring,
and the next frame takes its place: a locality that reads `unknown` would be final otherwise.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson
import zstandard

from crossrank.comm import Locality
from crossrank.instrument import threads
from crossrank.instrument.identity.topology import Topology
from crossrank.instrument.log import report
from crossrank.instrument.record.recorder import Call, Recorder
from crossrank.instrument.write.device_times import DeviceTimes
from crossrank.instrument.write.rank_files import create
from crossrank.recording import Ran, Wait

TICK = 0.25
"""Seconds between two frames. Well below a half, so that a kill loses no more than that on a busy machine too."""
_GLANCE = 0.05
"""Seconds between two looks at whether the ring fills up or the session closes."""
_MOMENT = 0.002
_CHUNK = 64
_PAUSE = 0.0005
"""Training gets the interpreter for `_PAUSE` seconds after every `_CHUNK` lines, so that it never waits long for
this thread: Python itself would take the lock away only after 5 ms. While the ring fills up that has to do."""
_FRAME = 512
"""Calls that are taken from the ring at once, so that little is held beside it."""
_CLOCK_EVERY = 10.0
_LEVEL = 3
_MOST_OWED = 10_000
_RECENT = 512
"""Calls that are kept for a dump, whether or not they are written to the file."""
_TOPOLOGY_PATIENCE = 2.0
"""Seconds from the start that records may still get the localities of the job."""

# A call, a time of one, or a line of another kind; a callable makes its line when it is written.
Item = Call | Wait | Ran | bytes | Callable[[], bytes]


class Counts(msgspec.Struct):
    """What became of the calls of this rank."""

    calls: int = 0
    records: int = 0
    """Written to the file."""
    dropped: int = 0
    """Lost because the ring was full."""
    unwritten: int = 0
    """Lost because the disk refused them."""
    spans: int = 0
    """Waits, and times that communication took, that were written to the file."""
    spans_dropped: int = 0
    """Lost because the ring was full, or the disk refused them."""
    errors: int = 0
    """Failures inside the recorder; the call itself went through."""


class CommsWriter:
    """Writes the comms file. All of it belongs to the writer's thread until `close`, but for `line`."""

    def __init__(
        self,
        open_folder: Callable[[], Path | None],
        *,
        topology: Topology,
        recorder: Recorder,
        ring_capacity: int,
        header: dict[str, Any],
        on_look: Callable[[], None],
        times: DeviceTimes | None = None,
    ) -> None:
        """`open_folder` gives the path of the file, or None where it cannot be written. It is called by the writer's
        thread, because a network's file system may take seconds. `times`: of the calls on NCCL, where they are to be
        recorded."""
        self.path = "the comms file"
        self._open_folder = open_folder
        self._is_open = False  # the file is there, or cannot be
        self.counts = Counts()
        self.topology = topology
        self._recorder = recorder
        self._lines: deque[bytes | Callable[[], bytes]] = deque([encode_line("header", header)])
        self._hurry_at = ring_capacity // 2
        self._most_rounds = 1 + ring_capacity // _FRAME
        self._on_look = on_look
        self._times = times
        self._closing = False
        self._lock = threading.Lock()
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self._next_clock = time.monotonic() + _CLOCK_EVERY
        self._complained = False
        self._size = 0  # bytes of the frames that stand for good
        self._end = 0  # bytes of the file
        self._owed: list[bytes] = []
        self._taken: deque[Item] = deque()  # from the recorder, not in the file for good
        self._recent: deque[Call] = deque(maxlen=_RECENT)
        self._waited: deque[int | None] = deque(maxlen=_RECENT)
        self._started = time.monotonic()
        self._file = -1
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to write, unless that is so; where no thread can be started, `close` does the work."""
        if self._thread is None:
            self._thread = threads.start("writer", self._run)
            if self._thread is None:
                self._open()

    def _open(self) -> None:
        try:
            path = self._open_folder()
            if path is not None:
                self._file, self.path = create(path), str(path)
        except OSError as error:
            self._fail("the comms file is missing", error)
        finally:
            self._is_open = True
            if self._file < 0:  # there is nothing to write to: the thread ends
                self._closing = True

    def wait_until_open(self, seconds: float) -> bool:
        """Wait until the file is there, or cannot be; whether that is so. No Event: see `_run`."""
        until = time.monotonic() + seconds
        while not self._is_open and self._thread is not None and self._thread.is_alive() and time.monotonic() < until:
            time.sleep(_MOMENT)
        return self._is_open

    def follow(self, topology: Topology) -> None:
        """Take localities from now on from `topology`, that of a process group that was made again."""
        self.topology = topology
        self._started = time.monotonic()

    def line(self, kind: str, content: object) -> None:
        """Append a line that is not a record: `{kind: content}`. A callable is called when it is written."""
        self._lines.append((lambda: encode_line(kind, content())) if callable(content) else encode_line(kind, content))

    def close(self, end: Callable[[], dict[str, Any]], timeout: float = 10.0) -> None:
        """Write what is left and the `end` line, then close the file. Does nothing the second time."""
        if self._closing:
            return
        self._closing = True
        if self._thread is None and not self._is_open:
            self._open()
        self.topology.settled.wait(max(0.0, self._started + _TOPOLOGY_PATIENCE - time.monotonic()))
        if self._times is not None:
            self._times.finish(self._recorder.waiting)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        if not self._lock.acquire(timeout=timeout):  # the thread is stuck in the disk
            self._fail("the end of the comms file is not written", TimeoutError(f"writing {self.path} takes too long"))
            return
        try:
            if not self._is_open:
                self._fail("the comms file is missing", TimeoutError("its folder takes too long to open"))
            elif self._file >= 0:
                self._drain(for_good=True)
                self._append([encode_line("clock", clock()), encode_line("end", end())])
                self._close_file()
        finally:
            self._lock.release()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's file without a trace in it."""
        self._closing = True
        if self._times is not None:
            self._times.stop()
        self._lines.clear()
        if self._file >= 0:
            self._close_file()

    def _close_file(self) -> None:
        os.close(self._file)
        self._file = -1

    def _run(self) -> None:
        self._open()
        last = -TICK
        while not self._closing:
            now = time.monotonic()
            if now - last >= TICK or self._recorder.waiting >= self._hurry_at:
                last = now
                try:
                    self._on_look()
                    with self._lock:
                        if self._file >= 0:
                            self._drain(for_good=self._localities_are_final())
                except Exception as error:
                    self._fail("lines are missing in the comms file", error)
            # No Event to wait for: its lock could be held by what a signal handler, which closes us, interrupts.
            time.sleep(_GLANCE)

    def _localities_are_final(self) -> bool:
        return (
            self.topology.settled.is_set()
            or time.monotonic() - self._started >= _TOPOLOGY_PATIENCE
            or len(self._taken) + self._recorder.waiting >= self._hurry_at
        )

    def _drain(self, *, for_good: bool) -> None:
        """Write what the ring holds now, in frames of about `_FRAME` calls so that little is held at once.

        If not `for_good`, it is one frame that the next one replaces.
        """
        moment = clock()  # whatever is called later may be missing
        times = self._times
        entries = times.take(self._recorder.waiting) if times else None
        waiting, rounds = self._recorder.waiting, self._most_rounds
        is_last = False
        while not is_last:
            is_full = self._take(_FRAME if for_good else sys.maxsize)
            waiting, rounds = waiting - _FRAME, rounds - 1
            # Waits have to keep up as well, however many there are for each call; while it is open, for so long.
            is_last = not for_good or (waiting <= 0 and not (is_full and (self._closing or rounds > 0)))
            if is_last:  # only now no call from before the moment is missing, and none that an entry may be of
                if times:
                    self._taken.extend(times.join(entries, moment["wall"] - moment["t"]))
                if time.monotonic() >= self._next_clock:
                    self._next_clock = time.monotonic() + _CLOCK_EVERY
                    self._taken.append(encode_line("clock", moment))
            if not for_good:
                self._append(self._encode(self._taken)[0], moment=moment, for_good=False)
                return
            items = list(self._taken)
            self._taken.clear()
            lines, context, errors = self._encode(items)
            written = self._append(lines, context, moment if is_last else None)
            spans = sum(isinstance(item, Wait | Ran) for item in items)
            records = len(lines) - len(context) - spans
            self.counts.errors += errors
            if written:
                self.counts.records += records
                self.counts.spans += spans
            else:
                self.counts.unwritten += records
                self.counts.spans_dropped += spans

    def _take(self, most: int) -> bool:
        """Take over so much of what has gathered; whether there may be more.

        The lines come before the calls, which need those of their groups, and the calls before their times.
        """
        spans = self._recorder.take_spans(most)
        calls = self._recorder.take(most)
        self._taken.extend(self._lines.popleft() for _ in range(len(self._lines)))
        self._taken.extend(calls)
        self._taken.extend(spans)
        self._recent.extend(calls)
        self._waited.extend(span.id for span in spans if isinstance(span, Wait) and span.stood != "launch")
        if self._times is not None:
            now = clock()
            self._times.note(calls, now["wall"] - now["t"])
        return most in (len(calls), len(spans))

    def _encode(self, items: Iterable[Item]) -> tuple[list[bytes], list[bytes], int]:
        """The lines of `items`, those of them without which later records cannot be read, and records that failed."""
        context: list[bytes] = []
        lines: list[bytes] = []
        errors = 0
        for item in items:
            if isinstance(item, Wait | Ran):
                name = b"wait" if isinstance(item, Wait) else b"ran"
                lines.append(b'{"%b":%b}\n' % (name, msgspec.json.encode(item)))
            elif not isinstance(item, tuple):
                context.append(item if isinstance(item, bytes) else item())
                lines.append(context[-1])
                continue
            else:
                try:
                    lines.append(_record_line(item, item[0].locality(self.topology)))
                except Exception as error:
                    errors += 1
                    self._fail("a record could not be written", error)
            if len(lines) % _CHUNK == 0 and not self._closing and self._recorder.waiting < self._hurry_at // 2:
                time.sleep(_PAUSE)
        return lines, context, errors

    def recent(self) -> list[orjson.Fragment]:
        """The last calls as they stand, or will stand, in the file. Waits a moment for the writer's thread."""
        if self._lock.acquire(timeout=_GLANCE * 10):  # not where that is stuck in the disk: then without the newest
            try:
                self._take(sys.maxsize)
            finally:
                self._lock.release()
        return [orjson.Fragment(_record_line(call, call[0].locality(self.topology))) for call in list(self._recent)]

    def waited(self) -> list[int]:
        """Ids of the calls that were waited for last, of those that `recent` has taken."""
        return sorted({call for call in list(self._waited) if call is not None})

    def _append(
        self,
        lines: list[bytes],
        context: Sequence[bytes] = (),
        moment: dict[str, int] | None = None,
        *,
        for_good: bool = True,
    ) -> bool:
        """Write lines as one complete frame, or nothing at all. If not `for_good`, the next frame takes its place.

        Behind it comes a frame with the `moment` up to which no call is missing, which the next frame always replaces:
        it distinguishes a rank without progress from one whose file ends early. Where the disk refuses, the lines of
        `context` (header, groups), without which later records cannot be read, are owed, and go before the next ones.
        """
        frame = self._compressor.compress(b"".join(self._owed + lines)) if lines or self._owed else b""
        behind = self._compressor.compress(encode_line("clock", moment)) if moment is not None else b""
        try:
            self._write_at_end(memoryview(frame + behind))
        except OSError as error:
            if for_good:
                self._owed = [*self._owed, *context][:_MOST_OWED]
            self._fail(f"cannot write {self.path}", error)
            with contextlib.suppress(OSError):  # the reader names the torn frame at the end
                os.ftruncate(self._file, self._size)
                self._end = self._size
            return False
        if for_good:
            self._size += len(frame)
            self._owed = []
        return True

    def _write_at_end(self, content: memoryview) -> None:
        """Write behind the frames that stand for good, in place of what is there."""
        written = 0
        while written < len(content):
            written += os.pwrite(self._file, content[written:], self._size + written)
        if self._end > self._size + written:
            os.ftruncate(self._file, self._size + written)
        self._end = self._size + written

    def _fail(self, what: str, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            report(f"{what}; training continues, and the loss is counted", error)


def _record_line(entry: Call, locality: Locality) -> bytes:
    """The record of one call as a line of the file."""
    descriptor, record_id, seq, t, step, batch, tag, thread = entry
    name = "p2p_seq" if descriptor.reader.is_p2p else "seq"
    extra = b""
    if tag is not None:
        extra += b',"tag":%d' % tag
    if batch is not None:
        extra += b',"batch":%d' % batch
    head = f'{{"id":{record_id},"{name}":{seq},"t":{t},"step":{step},"thread":{thread}'.encode()
    return head + extra + descriptor.tail(locality)


def encode_line(kind: str, content: object) -> bytes:
    return orjson.dumps({kind: content}, default=msgspec.to_builtins, option=orjson.OPT_APPEND_NEWLINE)


def clock() -> dict[str, int]:
    """One moment on both clocks, in nanoseconds: `t` monotonic, `wall` since 1970.

    Of three, that between whose readings least time passed: another thread may get the interpreter there.
    """
    found = []
    for _ in range(3):
        t, wall = time.monotonic_ns(), time.time_ns()
        found.append((time.monotonic_ns() - t, t, wall))
    _, t, wall = min(found)
    return {"t": t, "wall": wall}
