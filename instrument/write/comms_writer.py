"""The comms file of one rank, written by a thread that empties the recorder's ring.

The recorder puts one row per call into the ring. Several times a second, the writer thread turns these rows into JSON
lines, compresses them into one complete zstd frame and appends it to the file. So a killed process loses at most its
last half second, and the file stays readable. If the ring is full, the newest calls are dropped and counted. If a write
fails, the file is cut back to its last complete frame and the lost records are counted.

Until the nodes of the other ranks are known, each frame replaces the one before, and the thread keeps the calls:
otherwise a locality of `unknown` would be final.
"""

from __future__ import annotations

import contextlib
import os
import sys
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
from crossrank.instrument.unpatched import threading, time
from crossrank.instrument.write.device_times import DeviceTimes
from crossrank.instrument.write.rank_files import create
from crossrank.recording import Ran, Wait

TICK = 0.25
"""Seconds between two frames. Well below 0.5, so that a kill loses at most 0.5 s on a busy node too."""
_GLANCE = 0.05
"""Seconds between two checks whether the ring fills up or the session closes."""
_MOMENT = 0.002
_CHUNK = 64
_PAUSE = 0.0005
"""Seconds for which this thread releases the interpreter's lock after every `_CHUNK` lines, so that training never
waits long: Python would switch threads only after 5 ms. While the ring fills up, there is no pause."""
_FRAME = 512
"""Calls taken from the ring at once, to limit memory."""
_CLOCK_EVERY = 10.0
_LEVEL = 3
_MOST_OWED = 10_000
_RECENT = 512
"""Calls kept for a dump, written or not."""
_TOPOLOGY_PATIENCE = 2.0
"""Seconds from the start during which records wait for the localities of the job."""

# A call, a time span of a call, or another line; a callable returns its line when it is written.
Item = Call | Wait | Ran | bytes | Callable[[], bytes]


class Counts(msgspec.Struct):
    """Counts of written and lost records of this rank."""

    calls: int = 0
    records: int = 0
    """Written to the file."""
    dropped: int = 0
    """Lost because the ring was full."""
    unwritten: int = 0
    """Lost because a write failed."""
    spans: int = 0
    """Waits and durations written to the file."""
    spans_dropped: int = 0
    """Lost because the ring was full or a write failed."""
    errors: int = 0
    """Failures inside the recorder; the calls themselves were made."""


class CommsWriter:
    """Writes the comms file. Until `close`, only the writer thread may use its methods, except `line`."""

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
        """`open_folder` returns the path of the file, or None if it cannot be written. The writer thread calls it,
        because a network file system may take seconds. `times`: the durations of NCCL calls, if they are recorded."""
        self.path = "the comms file"
        self._open_folder = open_folder
        self._is_open = False  # the file exists, or cannot be created
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
        self._size = 0  # bytes of the final frames
        self._end = 0  # bytes of the file
        self._owed: list[bytes] = []
        self._taken: deque[Item] = deque()  # from the recorder, not yet in a final frame
        self._recent: deque[Call] = deque(maxlen=_RECENT)
        self._waited: deque[int | None] = deque(maxlen=_RECENT)
        self._started = time.monotonic()
        self._file = -1
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the writer thread unless it runs. If no thread can be started, `close` does the work."""
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
            if self._file < 0:  # no file: the thread ends
                self._closing = True

    def wait_until_open(self, seconds: float) -> bool:
        """Wait until the file exists or cannot be created; return whether this is decided. No Event: see `_run`."""
        until = time.monotonic() + seconds
        while not self._is_open and self._thread is not None and self._thread.is_alive() and time.monotonic() < until:
            time.sleep(_MOMENT)
        return self._is_open

    def follow(self, topology: Topology) -> None:
        """Use the localities of `topology` from now on: the process group was created again."""
        self.topology = topology
        self._started = time.monotonic()

    def line(self, kind: str, content: object) -> None:
        """Append a line that is not a record: `{kind: content}`. A callable returns the content when it is written."""
        self._lines.append((lambda: encode_line(kind, content())) if callable(content) else encode_line(kind, content))

    def close(self, end: Callable[[], dict[str, Any]], timeout: float = 10.0) -> None:
        """Write the remaining records and the `end` line, then close the file. No effect the second time."""
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
        """In a forked child: close the parent's file without writing to it."""
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
            # No Event: a signal handler that closes us may interrupt the thread that has its lock.
            time.sleep(_GLANCE)

    def _localities_are_final(self) -> bool:
        return (
            self.topology.settled.is_set()
            or time.monotonic() - self._started >= _TOPOLOGY_PATIENCE
            or len(self._taken) + self._recorder.waiting >= self._hurry_at
        )

    def _drain(self, *, for_good: bool) -> None:
        """Write the content of the ring, in frames of about `_FRAME` calls.

        If not `for_good`, write one frame, which the next frame replaces.
        """
        moment = clock()  # later calls may be missing
        times = self._times
        entries = times.take(self._recorder.waiting) if times else None
        waiting, rounds = self._recorder.waiting, self._most_rounds
        is_last = False
        while not is_last:
            is_full = self._take(_FRAME if for_good else sys.maxsize)
            waiting, rounds = waiting - _FRAME, rounds - 1
            # Write all waits too, even if a call has many; while the session is open, with a limit of rounds.
            is_last = not for_good or (waiting <= 0 and not (is_full and (self._closing or rounds > 0)))
            if is_last:  # only now are all calls from before the moment here, and so the call of each entry
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
        """Take up to `most` calls and spans from the recorder; return whether there may be more.

        Lines come before calls, because calls need the lines of their groups. Calls come before their spans.
        """
        spans = self._recorder.take_spans(most)
        calls = self._recorder.take(most)
        self._taken.extend(self._lines.popleft() for _ in range(len(self._lines)))
        self._taken.extend(calls)
        self._taken.extend(spans)
        self._recent.extend(calls)
        self._waited.extend(span.id for span in spans if isinstance(span, Wait) and span.waited_in != "launch")
        if self._times is not None:
            now = clock()
            self._times.note(calls, now["wall"] - now["t"])
        return most in (len(calls), len(spans))

    def _encode(self, items: Iterable[Item]) -> tuple[list[bytes], list[bytes], int]:
        """Return the lines of `items`, those of them that later records need, and the number of failures."""
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
        """Return the last calls in the form that the file has. Waits a moment for the writer thread."""
        if self._lock.acquire(timeout=_GLANCE * 10):  # if the thread is stuck in a write: without the newest
            try:
                self._take(sys.maxsize)
            finally:
                self._lock.release()
        return [orjson.Fragment(_record_line(call, call[0].locality(self.topology))) for call in list(self._recent)]

    def waited(self) -> list[int]:
        """Return the ids of the calls that threads waited for last, of those that `recent` has taken."""
        return sorted({call for call in list(self._waited) if call is not None})

    def _append(
        self,
        lines: list[bytes],
        context: Sequence[bytes] = (),
        moment: dict[str, int] | None = None,
        *,
        for_good: bool = True,
    ) -> bool:
        """Write lines as one complete frame, or nothing. If not `for_good`, the next frame replaces it.

        A second frame has the `moment` up to which no call is missing. The next frame always replaces it. It
        distinguishes a rank without progress from one whose file ends early. If a write fails, the lines of `context`
        (header, groups), which later records need, are written before the next ones.
        """
        frame = self._compressor.compress(b"".join(self._owed + lines)) if lines or self._owed else b""
        behind = self._compressor.compress(encode_line("clock", moment)) if moment is not None else b""
        try:
            self._write_at_end(memoryview(frame + behind))
        except OSError as error:
            if for_good:
                self._owed = [*self._owed, *context][:_MOST_OWED]
            self._fail(f"cannot write {self.path}", error)
            with contextlib.suppress(OSError):  # the reader reports the torn frame at the end
                os.ftruncate(self._file, self._size)
                self._end = self._size
            return False
        if for_good:
            self._size += len(frame)
            self._owed = []
        return True

    def _write_at_end(self, content: memoryview) -> None:
        """Write after the final frames, over the current content."""
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
    """Return the record of one call as a line of the file."""
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
    """Return one moment on both clocks, in nanoseconds: `t` monotonic, `wall` since 1970.

    The best of three: another thread may run between the two readings of a pair.
    """
    found = []
    for _ in range(3):
        t, wall = time.monotonic_ns(), time.time_ns()
        found.append((time.monotonic_ns() - t, t, wall))
    _, t, wall = min(found)
    return {"t": t, "wall": wall}
