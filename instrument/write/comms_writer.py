"""The comms file of one rank: a ring that training fills and a thread that empties it.

Training appends a tuple and goes on. The writer thread turns what has gathered into JSON lines, compresses them
into one complete zstd frame and appends that to the file, several times a second, so a killed process loses no
more than its last half second and what is on disk stays readable. When the ring is full the newest calls are dropped
and counted; when the disk refuses, the file is cut back to its last whole frame and the loss is counted.

Until it is known which nodes the other ranks are on, the frame is written as it stands but the calls stay in the ring,
and the next frame takes its place: a locality that reads `unknown` would be final otherwise.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import orjson
import zstandard

from crossrank.comm import Locality
from crossrank.errors import one_line
from crossrank.instrument import threads
from crossrank.instrument.identity.topology import Topology
from crossrank.instrument.record.descriptor import Descriptor
from crossrank.instrument.write.rank_files import create

log = logging.getLogger("crossrank")

TICK = 0.25
"""Seconds between two frames. Well below a half, so that a kill loses no more than that on a busy machine too."""
_GLANCE = 0.05
"""Seconds between two looks at whether the ring fills up or the session closes."""
_CHUNK = 64
_PAUSE = 0.0005
"""Training gets the interpreter for `_PAUSE` seconds after every `_CHUNK` records, so that it never waits long for
this thread: Python itself would take the lock away only after 5 ms."""
_FRAME = 8192
_CLOCK_EVERY = 10.0
_LEVEL = 3
_MOST_OWED = 10_000
_RECENT = 512
"""Calls that are kept for a dump, whether or not they are written to the file."""
_TOPOLOGY_PATIENCE = 2.0
"""Seconds from the start that records may still get the localities of the job."""

# (descriptor, id, sequence number, time, step, batch, tag)
Entry = tuple[Descriptor, int, int, int, int, int | None, int | None]
# all lines, and those of them without which later records cannot be read
Lines = tuple[list[bytes], list[bytes]]


class Counts(msgspec.Struct):
    """What became of the calls of this rank."""

    calls: int = 0
    records: int = 0
    """Written to the file."""
    dropped: int = 0
    """Lost because the ring was full."""
    unwritten: int = 0
    """Lost because the disk refused them."""
    errors: int = 0
    """Failures inside the recorder; the call itself went through."""


class CommsWriter:
    """Writes the comms file. Everything but `ring` belongs to the writer's thread until `close`."""

    def __init__(
        self,
        path: str,
        *,
        topology: Topology,
        ring_capacity: int,
        header: dict[str, Any],
        on_tick: Callable[[], None],
    ) -> None:
        self.path = path
        self.ring: deque[Entry | bytes | Callable[[], bytes]] = deque()
        self.counts = Counts()
        self.counting = threading.RLock()  # a signal handler that closes the file may have interrupted a change
        """Held while `counts` is changed: training threads and the writer's do so."""
        self.topology = topology
        self._hurry_at = ring_capacity // 2
        self._header = header
        self._on_tick = on_tick
        self._closing = False
        self._lock = threading.Lock()
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self._next_clock = time.monotonic() + _CLOCK_EVERY
        self._complained = False
        self._size = 0  # bytes of the frames that stand for good
        self._end = 0  # bytes of the file
        self._owed: list[bytes] = []
        self._taken: deque[Entry | bytes | Callable[[], bytes]] = deque()  # out of the ring, not in the file for good
        self._recent: deque[Entry] = deque(maxlen=_RECENT)
        self._started = time.monotonic()
        self._file = create(Path(path))
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threads.start("writer", self._run)
        if self._thread is None:  # `close` does the work
            self._begin_file()

    def follow(self, topology: Topology) -> None:
        """Take localities from now on from `topology`, that of a process group that was made again."""
        self.topology = topology
        self._started = time.monotonic()

    def line(self, kind: str, content: object) -> None:
        """Append a line that is not a record: `{kind: content}`. A callable is asked when it is written."""
        if callable(content):
            self.ring.append(lambda: encode_line(kind, content()))
        else:
            self.ring.append(encode_line(kind, content))

    def close(self, end: Callable[[], dict[str, Any]], timeout: float = 10.0) -> None:
        """Write what is left and the `end` line, then close the file. Does nothing the second time."""
        if self._closing:
            return
        self._closing = True
        self.topology.settled.wait(max(0.0, self._started + _TOPOLOGY_PATIENCE - time.monotonic()))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        if not self._lock.acquire(timeout=timeout):  # the thread is stuck in the disk
            self._fail("the end of the comms file is not written", TimeoutError(f"{self.path} does not take it"))
            return
        try:
            if self._file < 0:
                return
            self._drain(for_good=True)
            self._append(([encode_line("clock", clock()), encode_line("end", end())], []))
            os.close(self._file)
            self._file = -1
        finally:
            self._lock.release()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's file without a trace in it."""
        self._closing = True
        self.ring.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _begin_file(self) -> None:
        try:
            with self._lock:
                header = encode_line("header", self._header)
                self._append(([header], [header]))
        except Exception as error:
            self._fail("cannot describe this rank in the header", error)

    def _run(self) -> None:
        self._begin_file()
        last = time.monotonic()
        while not self._closing:
            # No Event to wait for: its lock could be held by what a signal handler, which closes us, interrupts.
            time.sleep(_GLANCE)
            now = time.monotonic()
            if now - last < TICK and len(self.ring) < self._hurry_at:
                continue
            last = now
            try:
                self._on_tick()
                with self._lock:
                    if self._file >= 0:
                        self._drain(for_good=self._localities_are_final())
            except Exception as error:
                self._fail("lines are missing in the comms file", error)

    def _localities_are_final(self) -> bool:
        return (
            self.topology.settled.is_set()
            or time.monotonic() - self._started >= _TOPOLOGY_PATIENCE
            or len(self._taken) + len(self.ring) >= self._hurry_at
        )

    def _drain(self, *, for_good: bool) -> None:
        """Write what the ring holds now, in frames of at most `_FRAME` lines so that little is held at once.

        If not `for_good`, it is one frame that the next one replaces.
        """
        moment = clock()  # whatever is called later may be missing
        if time.monotonic() >= self._next_clock:
            self._next_clock = time.monotonic() + _CLOCK_EVERY
            self.line("clock", moment)
        for _ in range(len(self.ring)):
            entry = self.ring.popleft()
            self._taken.append(entry)
            if isinstance(entry, tuple):
                self._recent.append(entry)
        if not for_good:
            self._append(self._encode(self._taken, Counts()), moment, for_good=False)
            return
        if not self._taken:
            self._append(([], []), moment)
        while self._taken:
            entries = [self._taken.popleft() for _ in range(min(len(self._taken), _FRAME))]
            self._write_frame(entries, moment if not self._taken else None)

    def _write_frame(
        self, entries: Iterable[Entry | bytes | Callable[[], bytes]], moment: dict[str, int] | None
    ) -> None:
        counts = Counts()
        lines = self._encode(entries, counts)
        written = self._append(lines, moment)
        with self.counting:
            self.counts.errors += counts.errors
            if written:
                self.counts.records += counts.records
            else:
                self.counts.unwritten += counts.records

    def _encode(self, entries: Iterable[Entry | bytes | Callable[[], bytes]], counts: Counts) -> Lines:
        """The lines of `entries`. What becomes of each record is added to `counts`, as if they were written."""
        context: list[bytes] = []
        lines: list[bytes] = []
        for entry in entries:
            if not isinstance(entry, tuple):
                context.append(entry if isinstance(entry, bytes) else entry())
                lines.append(context[-1])
                continue
            try:
                lines.append(_record_line(entry, entry[0].locality(self.topology)))
            except Exception as error:
                counts.errors += 1
                self._fail("a record could not be written", error)
                continue
            counts.records += 1
            if counts.records % _CHUNK == 0 and not self._closing:
                time.sleep(_PAUSE)
        return lines, context

    def recent(self) -> list[orjson.Fragment]:
        """The last calls as they stand, or would stand, in the file."""
        # Each is copied in one step, in which nobody appends.
        entries = [entry for entry in (*self._recent, *self.ring) if isinstance(entry, tuple)][-_RECENT:]
        # While the thread moves a call from the one to the other it may be met in both.
        once = {entry[1]: entry for entry in entries}
        return [orjson.Fragment(_record_line(entry, entry[0].locality(self.topology))) for entry in once.values()]

    def _append(self, lines: Lines, moment: dict[str, int] | None = None, *, for_good: bool = True) -> bool:
        """Write lines as one complete frame, or nothing at all. If not `for_good`, the next frame takes its place.

        Behind it comes a frame with the `moment` up to which no call is missing, which the next frame always replaces:
        it distinguishes a rank without progress from one whose file ends early. Where the disk refuses, the lines
        without which later records cannot be read (header, groups) are owed, and go before the next ones.
        """
        content, context = lines
        frame = b""
        if content or self._owed:
            frame = self._compressor.compress(b"".join(self._owed + content))
        behind = self._compressor.compress(encode_line("clock", moment)) if moment is not None else b""
        try:
            self._write_at_end(memoryview(frame + behind))
        except OSError as error:
            if for_good:
                self._owed = (self._owed + context)[:_MOST_OWED]
            self._fail(f"cannot write {self.path}", error)
            self._cut()
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

    def _cut(self) -> None:
        """Cut the file back to the last frame that stands for good."""
        try:
            os.ftruncate(self._file, self._size)
            self._end = self._size
        except OSError:
            pass  # the reader names the torn frame at the end

    def _fail(self, what: str, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            log.warning("crossrank: %s: %s; training goes on, the loss is counted", what, one_line(error))


def _record_line(entry: Entry, locality: Locality) -> bytes:
    """The record of one call as a line of the file."""
    descriptor, record_id, seq, t, step, batch, tag = entry
    name = "p2p_seq" if descriptor.reader.is_p2p else "seq"
    extra = b""
    if tag is not None:
        extra += b',"tag":%d' % tag
    if batch is not None:
        extra += b',"batch":%d' % batch
    head = f'{{"id":{record_id},"{name}":{seq},"t":{t},"step":{step}'.encode()
    return head + extra + descriptor.tail(locality)


def encode_line(kind: str, content: object) -> bytes:
    return orjson.dumps({kind: content}, default=msgspec.to_builtins, option=orjson.OPT_APPEND_NEWLINE)


def clock() -> dict[str, int]:
    """One moment on both clocks, in nanoseconds: `t` monotonic, `wall` since 1970."""
    return {"t": time.monotonic_ns(), "wall": time.time_ns()}
