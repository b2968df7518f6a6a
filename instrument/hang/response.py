"""The response to a hang: dumps, a verdict, and the end of the job if `TRACING_ON_HANG=abort`.

Every rank writes its dump. One rank waits for the dumps of the others, diagnoses the job and prints the verdict into
the training log while the job hangs. This is rank 0. If rank 0 does not notice the hang, it is another rank of its node
or of another node. A verdict newer than the dump of a rank includes that dump, so that rank does nothing more.

With `TRACING_ON_HANG=abort` every rank ends when the verdict says that a rank waits for another one.

A rank that others wait for may be evaluating or saving. While its main thread moves, the verdict calls it slow. The
verdict is a hang only after five times the usual time. `expect_pause` announces such a pause.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from crossrank.atomic_file import whole_file
from crossrank.budget import BudgetError, read_small
from crossrank.errors import CrossrankError
from crossrank.instrument import threads
from crossrank.instrument.hang import verdict
from crossrank.instrument.hang.main_thread import MainThread
from crossrank.instrument.hang.watch import COUNT_ANEW, HangWatch
from crossrank.instrument.hooks import exits
from crossrank.instrument.hooks.exits import Closable
from crossrank.instrument.identity.topology import node_of_this_machine
from crossrank.instrument.locks import lock_file, take_lock
from crossrank.instrument.log import ONE_RANK, log
from crossrank.instrument.unpatched import time
from crossrank.instrument.write.flight_dump import Dumped, FlightDumps, completed
from crossrank.recording import COMMS, DIAGNOSING, FLIGHT, OVER, PAUSING, SLOW, VERDICT, file_name, rank_folder
from crossrank.text import rank_ranges

EXIT_CODE = 79
"""Exit code of a process that `TRACING_ON_HANG=abort` ended: the first one after those of sysexits.h."""
_LOOK = 0.1
_LOOK_PER_RANK = 4e-4
"""Seconds between two looks at the folder: together, all ranks look at most 2,500 times per second."""
_AFTER_RANK_0 = 1.0
"""Seconds by which the other ranks of the node of rank 0 wait longer than rank 0, whose log is read most."""
_AFTER_NODE_0, _AFTER_NODE = 8.0, 1.0
"""Seconds by which the second node waits longer than the node of rank 0, and each further node than the one before."""
_MOST_NODES = 30
_FEW_CALLS = 4
"""Calls that must be made and finished after a verdict before the verdict is withdrawn."""
_SETTLED = 1.5
"""Seconds without a new dump after which no more are expected. Ranks notice a hang at different moments."""
_LATEST = 30.0
_ENDS_AFTER = 2.0
"""Seconds from the verdict to the end of all ranks. They end together: the end of one raises an error in others."""
_LATEST_END = 15.0
"""Longest time to close the files, in seconds."""
_FAR = 5.0
"""Multiple of the patience after which a rank that moves counts as hung: it may be in an endless loop."""
_OF_TIMEOUT = 0.8
"""Share of the timeout of a process group that limits this time: the timeout aborts the job."""


class Watched(Dumped, Closable, Protocol):
    """The part of a session that the response to a hang uses."""

    dumps: FlightDumps

    def current_world(self) -> object | None:
        """Return the recorded process group if it still is the default one."""


class Hangs:
    """Watches one session for hangs."""

    def __init__(self, session: Watched) -> None:
        self._session = session
        self._watch: HangWatch | None = None
        self._main_thread = MainThread()
        self._pauses: list[float] = []
        """End of each announced pause of this rank, in seconds since 1970."""
        self._was_pausing = False
        self._said: tuple[Path, int, int] | None = None
        """Path of the verdict that this rank has printed, and the numbers of calls made and finished at that time."""

    def watch(self) -> None:
        """Start to watch, if the settings ask for it."""
        config = self._session.facts.config
        if self._watch is None and config.hang_seconds > 0 and config.flight:
            self._watch = HangWatch(
                self._patience,
                calls=self._session.recorder.calls,
                completed=completed,
                on_hang=self._on_hang,
                waits=self._session.recorder.waits_under_way,
                on_calls=self._on_calls,
                on_silence=self._main_thread.look,
            )
            self._watch.start()

    def main_thread(self) -> dict[str, Any]:
        """Return whether the main thread has moved since the last call of this rank, and its share of CPU time."""
        return {"moves": self._main_thread.moves, "busy": self._main_thread.busy}

    @contextlib.contextmanager
    def expect_pause(self, seconds: float) -> Iterator[None]:
        """No rank reports a hang until the block ends or `seconds` have passed."""
        until = time.time() + seconds
        self._pauses.append(until)
        self._announce_pause()
        try:
            yield
        finally:
            self._pauses.remove(until)
            self._announce_pause()

    def _announce_pause(self) -> None:
        """Tell the other ranks until when this rank pauses; of nested pauses, the longest counts."""
        files, longest = self._session.files, max(list(self._pauses), default=None)
        if files is None:
            return
        path = files.recording / f"{PAUSING}{self._session.facts.rank}"
        with self._session.failures.reported("a pause is not known to the other ranks"):
            if longest is None:
                path.unlink(missing_ok=True)
            else:
                with whole_file(path) as part:
                    part.write_text(str(longest))

    def stop(self) -> None:
        """Stop to watch."""
        if self._watch is not None:
            self._watch.stop()

    def _patience(self) -> float:
        """Return after how many seconds without communication the job counts as hung.

        At most half of the shortest timeout of a process group: the timeout itself aborts the job.
        """
        timeout = self._session.groups.shortest_timeout()
        seconds = self._session.facts.config.hang_seconds
        return seconds if timeout is None else min(seconds, timeout / 2)

    def _on_hang(self, seconds: float) -> float | None:
        """Respond to `seconds` without communication. Return after how many seconds to respond again, if ever."""
        session = self._session
        if session.files is None:
            return COUNT_ANEW if session.writer is not None else None
        pausing, was_pausing = _pausing(session.files.recording), self._was_pausing
        self._was_pausing = bool(pausing)
        if pausing or was_pausing:  # after a pause, every rank waits for its full patience again
            log.info("crossrank: rank %s announced a pause, so no hang is reported", rank_ranges(pausing))
            return COUNT_ANEW
        session.dumps.write("hang")
        if session.current_world() is None:  # this rank has destroyed its group: the waiting ranks make the verdict
            return None
        timeout = session.groups.shortest_timeout()
        far = min(self._patience() * _FAR, math.inf if timeout is None else timeout * _OF_TIMEOUT)
        silence = _Silence(session, session.files.recording, seconds, far)
        silence.respond()
        if silence.has_said:
            self._said = session.files.recording / VERDICT, session.recorder.calls(), completed()
        return far if silence.may_go_on else None

    def _on_calls(self) -> None:
        self._main_thread.forget()
        self._take_back()

    def _take_back(self) -> None:
        """Withdraw the verdict of this rank if calls since then have finished.

        A failed call looks completed, and so may the calls with which the script handles it. So a few must finish.
        """
        if self._said is None:
            return
        path, calls, over = self._said
        if self._session.recorder.calls() - calls < _FEW_CALLS or completed() - over < _FEW_CALLS:
            return
        self._said = None
        if verdict.replace(path, OVER):
            log.warning(
                "crossrank: communication continues, so the verdict above no longer applies; %s is updated",
                path,
                extra=ONE_RANK,
            )


class _Silence:
    """One period in which this rank makes no progress."""

    def __init__(self, session: Watched, folder: Path, seconds: float, far: float) -> None:
        self._session = session
        self._folder = folder
        self._seconds = seconds
        self._far = far
        self._calls, self._completed = session.recorder.calls(), completed()
        self._dumped = _read_change_time(self._file(FLIGHT, session.facts.rank)) or time.time_ns()
        self._since = self._dumped - round(seconds * 1e9)
        self._look = max(_LOOK, session.facts.world_size * _LOOK_PER_RANK)
        self.has_said = False
        """Whether this rank has printed that the job hangs, or that others wait for a slow rank."""

    @property
    def may_go_on(self) -> bool:
        """Whether the verdict says that the job may continue, or that evidence is missing."""
        found = verdict.read(self._folder / VERDICT)
        return found is not None and found.verdict in (SLOW, "incomplete")

    def respond(self) -> None:
        """Make or await the verdict, and abort if the settings ask for it."""
        begun, turn = time.monotonic(), self._turn()
        while not self._is_over() and not self._has_verdict():
            # One process of a node at a time: the next one may find a verdict.
            if time.monotonic() - begun >= turn:
                with self._alone_on_node() as is_alone:
                    if is_alone and not self._has_verdict() and not self._report():
                        return
            time.sleep(self._look)
        if self._session.facts.config.on_hang == "abort":
            self._abort()

    @contextlib.contextmanager
    def _alone_on_node(self) -> Iterator[bool]:
        """Yield whether no other process of this node diagnoses the job, until the block ends.

        Each container has its own network namespace, so the socket locks only within a container. Containers share the
        folder, so a lock file of this node locks between them.
        """
        socket = take_lock(f"diagnoses {self._folder}")
        if socket is None:
            yield False
            return
        path = self._folder / f"{DIAGNOSING}{hashlib.sha256(node_of_this_machine().encode()).hexdigest()[:12]}"
        with contextlib.closing(socket), contextlib.ExitStack() as opened:
            is_alone = True
            with contextlib.suppress(OSError):  # without a lock file, use only the socket
                is_alone = opened.enter_context(lock_file(path)) is not None
                if is_alone:
                    opened.callback(path.unlink, missing_ok=True)
            yield is_alone

    def _turn(self) -> float:
        """Return after how many seconds this rank diagnoses the job, if no other rank has."""
        session = self._session
        places = session.facts.topology.places if session.facts.topology is not None else {}
        after_rank_0 = 0.0 if session.facts.rank == 0 else _AFTER_RANK_0
        first_of = {place[0]: rank for rank, place in sorted(places.items(), reverse=True)}
        own = first_of.get(places[session.facts.rank][0], 0) if session.facts.rank in places else 0
        if own == 0 or 0 not in places:
            return after_rank_0
        before = sum(rank < own for rank in first_of.values())
        return _AFTER_NODE_0 + _AFTER_NODE * min(before, _MOST_NODES)

    def _is_over(self) -> bool:
        """Return whether this rank makes calls again or the recording has ended."""
        return self._session.closing or self._session.recorder.calls() != self._calls

    def _has_verdict(self) -> bool:
        changed = _read_change_time(self._folder / VERDICT)
        return changed is not None and changed >= self._dumped

    def _report(self) -> bool:
        """Diagnose the job and print new findings; return whether there is a verdict."""
        session, folder = self._session, self._folder
        self._wait_for_dumps()
        if self._is_over():
            return False
        path = folder / VERDICT
        earlier = verdict.read(path) if (_read_change_time(path) or 0) > self._since else None
        silence = f"no communication on rank {session.facts.rank} for {self._seconds:.3g} s"
        try:
            self._refuse_part_of_job()
            text, content = verdict.diagnose(folder, session.facts.world_size)
            found = verdict.parse(content)
            doubt = found.doubt() if found.is_hang and self._seconds < self._far else ""
            verdict.publish(path, content, SLOW if doubt else None)
        except CrossrankError as error:
            log.warning(
                "crossrank: %s: %s; run `crossrank diagnose %s` to see which rank waits for which",
                *(silence, error, folder),
                extra=ONE_RANK,
            )
            verdict.write_none(path)
            return False
        is_over = self._is_over() or completed() != self._completed
        if earlier is not None and found.says_as(earlier):
            return True
        if doubt and not is_over:
            self.has_said = True
            log.warning(
                "crossrank: %s: %s; crossrank reports a hang after %.3g s:\n%s",
                *(doubt, silence, self._far, text),
                extra=ONE_RANK,
            )
        elif found.is_hang:
            state = "hung, and continues" if is_over else "hangs"
            self.has_said = not is_over
            log.warning("crossrank: the job %s: %s. Verdict (%s):\n%s", state, silence, path, text, extra=ONE_RANK)
        elif not is_over:
            log.warning(
                "crossrank: %s, and no rank waits for another; %s has the last calls of every rank (verdict: %s)",
                *(silence, folder, found.verdict),
                extra=ONE_RANK,
            )
        return True

    def _refuse_part_of_job(self) -> None:
        """Raise an error if other nodes write to their own folders: their ranks would seem to be missing."""
        topology = self._session.facts.topology
        places = dict(topology.places) if topology is not None else {}
        here: set[str] = set()
        for rank, (node, _) in places.items():
            if node not in here and self._file(COMMS, rank).exists():
                here.add(node)
        if apart := sorted(rank for rank, place in places.items() if place[0] not in here):
            raise CrossrankError(
                f"{self._folder} has no files of rank {rank_ranges(apart)}: copy the files of the other nodes into it, "
                "or use a folder that all nodes share"
            )

    def _wait_for_dumps(self) -> None:
        """Wait for the dumps of the other ranks, as long as new ones arrive."""
        missing = set(range(self._session.facts.world_size)) - {self._session.facts.rank}
        begun = latest = time.monotonic()
        while missing and not self._is_over() and (looked := time.monotonic()) - begun < _LATEST:
            written = {rank for rank in missing if (_read_change_time(self._file(FLIGHT, rank)) or 0) > self._since}
            missing -= written
            if written:
                latest = time.monotonic()
            elif time.monotonic() - latest > _SETTLED:
                return
            time.sleep(max(_LOOK, time.monotonic() - looked))  # a look is slow on the file system of a cluster

    def _file(self, kind: str, rank: int) -> Path:
        return self._folder / rank_folder(rank, self._session.facts.world_size) / file_name(kind, rank)

    def _abort(self) -> None:
        """If the verdict is a hang, end this process at the same time as the others."""
        path = self._folder / VERDICT
        found, given = verdict.read(path), _read_change_time(path) or 0
        if found is None or not found.is_hang or self._is_over() or completed() != self._completed:
            return
        log.error(
            "crossrank: rank %d ends with exit code %d because the job hangs (TRACING_ON_HANG=abort)",
            *(self._session.facts.rank, EXIT_CODE),
        )
        latest = max(_ENDS_AFTER, 2 * self._look)  # by then every rank has read the verdict
        # A script that continues and ends meanwhile gets this exit code too: it is logged, and the other ranks end.
        exits.end_with(EXIT_CODE, _LATEST_END + latest)
        # One thread each: a disk may be stuck, and a thread that hangs may have the lock of a stream.
        works = (lambda: self._session.close("abort"), sys.stdout.flush, sys.stderr.flush)
        ending = [thread for work in works if (thread := threads.start("abort", work)) is not None]
        until = time.monotonic() + _LATEST_END
        for thread in ending:
            thread.join(max(0.0, until - time.monotonic()))
        time.sleep(max(0.0, min(latest, given / 1e9 + latest - time.time())))
        os._exit(EXIT_CODE)


def _pausing(folder: Path) -> list[int]:
    """Return the ranks with an announced pause that has not ended."""
    found = []
    with contextlib.suppress(OSError):  # the file system is not reachable
        for path in folder.glob(f"{PAUSING}*"):
            with contextlib.suppress(OSError, ValueError, BudgetError):
                if float(read_small(path)) > time.time():
                    found.append(int(path.name.removeprefix(PAUSING)))
    return sorted(found)


def _read_change_time(path: Path) -> int | None:
    """Return when a file was written, in ns since 1970; None if there is no file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
