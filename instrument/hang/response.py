"""What happens when this rank communicates no more.

Every rank writes its dump. One of the job waits for the dumps of the others, diagnoses the job and prints the verdict
into the training log, while the job hangs: rank 0, or another rank of its node where that does not notice, or another
node. A verdict that is newer than a rank's dump takes that into account, so whoever finds one does nothing more.

With `TRACING_ON_HANG=abort` every rank ends when the verdict says that a rank waits for another one.

A rank that others wait for may evaluate, or save. While its main thread moves it is called slow, and the job is said to
hang when the silence has lasted five times as long. `expect_pause` says beforehand that it will take long.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import sys
import time
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
from crossrank.instrument.write.flight_dump import Dumped, FlightDumps, completed
from crossrank.recording import COMMS, DIAGNOSING, FLIGHT, OVER, PAUSING, SLOW, VERDICT, file_name, rank_folder
from crossrank.text import rank_ranges

EXIT_CODE = 79
"""Of a process that `TRACING_ON_HANG=abort` ended: the first behind those of sysexits.h."""
_LOOK = 0.1
_LOOK_PER_RANK = 4e-4
"""Seconds between two looks at the folder: all ranks together look at it 2,500 times a second at most."""
_AFTER_RANK_0 = 1.0
"""Seconds by which rank 0 comes before the other ranks of its node, whose logs are read less."""
_AFTER_NODE_0, _AFTER_NODE = 8.0, 1.0
"""Seconds by which its node comes before the next one, and that one before the one after it."""
_MOST_NODES = 30
_FEW_CALLS = 4
"""Calls that are made and over after a verdict when the job is taken to go on."""
_SETTLED = 1.5
"""Seconds without a new dump after which no more are expected: ranks do not look for hangs at the same moment."""
_LATEST = 30.0
_ENDS_AFTER = 2.0
"""Seconds from the verdict to the end of all ranks: they end together, for what one of them leaves raises in others."""
_LATEST_END = 15.0
"""Seconds that the files may take to be closed."""
_FAR = 5.0
"""Times the patience after which a rank that moves is taken for one that hangs, in a loop without end."""
_OF_TIMEOUT = 0.8
"""But at such a share of the timeout of a process group, which aborts the job."""


class Watched(Dumped, Closable, Protocol):
    """What responds to a hang sees of its session."""

    dumps: FlightDumps

    def current_world(self) -> object | None:
        """The process group that is recorded, where it is there and the default one."""


class Hangs:
    """Watches one session for hangs."""

    def __init__(self, session: Watched) -> None:
        self._session = session
        self._watch: HangWatch | None = None
        self._main_thread = MainThread()
        self._pauses: list[float] = []
        """Until when each pause of this rank is announced, in seconds since 1970."""
        self._was_pausing = False
        self._said: tuple[Path, int, int] | None = None
        """The verdict that this rank has said, and how many calls were made and over then."""

    def watch(self) -> None:
        """Watch from now on, where that is asked for."""
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
        """What the main thread of this rank was seen to do since its last call."""
        return {"moves": self._main_thread.moves, "busy": self._main_thread.busy}

    @contextlib.contextmanager
    def expect_pause(self, seconds: float) -> Iterator[None]:
        """No rank reports a hang before the block ends, or `seconds` are over."""
        until = time.time() + seconds
        self._pauses.append(until)
        self._announce_pause()
        try:
            yield
        finally:
            self._pauses.remove(until)
            self._announce_pause()

    def _announce_pause(self) -> None:
        """Tell the other ranks until when this one pauses, of several pauses within each other the longest."""
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
        """No hang is noticed after this."""
        if self._watch is not None:
            self._watch.stop()

    def _patience(self) -> float:
        """Seconds without communication that are taken for a hang.

        At most half of the shortest timeout of a process group: at the timeout itself the job is aborted.
        """
        timeout = self._session.groups.shortest_timeout()
        seconds = self._session.facts.config.hang_seconds
        return seconds if timeout is None else min(seconds, timeout / 2)

    def _on_hang(self, seconds: float) -> float | None:
        """Respond to a silence of so many seconds. Returns after how many to do so again, where it is none yet."""
        session = self._session
        if session.files is None:
            return COUNT_ANEW if session.writer is not None else None
        pausing, was_pausing = _pausing(session.files.recording), self._was_pausing
        self._was_pausing = bool(pausing)
        if pausing or was_pausing:  # every rank has its patience once more after a pause
            log.info("crossrank: rank %s announced a pause, so no hang is reported", rank_ranges(pausing))
            return COUNT_ANEW
        session.dumps.write("hang")
        if session.current_world() is None:  # it has destroyed its group: those that wait see to the verdict
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
        """Say that the verdict which this rank has said is over, where calls since then are over too.

        One that failed looks completed, and so may what the script does about it: a few have to be.
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
    """One time during which this rank communicates nothing."""

    def __init__(self, session: Watched, folder: Path, seconds: float, far: float) -> None:
        self._session = session
        self._folder = folder
        self._seconds = seconds
        self._far = far
        self._calls, self._completed = session.recorder.calls(), completed()
        self._dumped = _changed(self._file(FLIGHT, session.facts.rank)) or time.time_ns()
        self._since = self._dumped - round(seconds * 1e9)
        self._look = max(_LOOK, session.facts.world_size * _LOOK_PER_RANK)
        self.has_said = False
        """Whether this rank has said that the job hangs, or that others wait for a slow rank."""

    @property
    def may_go_on(self) -> bool:
        """Whether the verdict is that the job may go on, or that evidence is missing."""
        found = verdict.read(self._folder / VERDICT)
        return found is not None and found.verdict in (SLOW, "incomplete")

    def respond(self) -> None:
        """See that there is a verdict, and do what it asks for."""
        begun, turn = time.monotonic(), self._turn()
        while not self._is_over() and not self._has_verdict():
            # One process of a node at a time; the next one may find that its verdict is there.
            if time.monotonic() - begun >= turn:
                with self._alone_on_node() as is_alone:
                    if is_alone and not self._has_verdict() and not self._report():
                        return
            time.sleep(self._look)
        if self._session.facts.config.on_hang == "abort":
            self._abort()

    @contextlib.contextmanager
    def _alone_on_node(self) -> Iterator[bool]:
        """Whether no other process of this node diagnoses the job, until the block ends.

        Containers have a network namespace each, so the lock of a socket is one within a container. They share the
        folder: a file in it, of this node, holds between them.
        """
        socket = take_lock(f"diagnoses {self._folder}")
        if socket is None:
            yield False
            return
        path = self._folder / f"{DIAGNOSING}{hashlib.sha256(node_of_this_machine().encode()).hexdigest()[:12]}"
        with contextlib.closing(socket), contextlib.ExitStack() as opened:
            is_alone = True
            with contextlib.suppress(OSError):  # where no file can be made the socket has to do
                is_alone = opened.enter_context(lock_file(path)) is not None
                if is_alone:
                    opened.callback(path.unlink, missing_ok=True)
            yield is_alone

    def _turn(self) -> float:
        """Seconds after which this rank diagnoses the job, where no other one has."""
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
        """Whether communication goes on, or the recording has ended."""
        return self._session.closing or self._session.recorder.calls() != self._calls

    def _has_verdict(self) -> bool:
        changed = _changed(self._folder / VERDICT)
        return changed is not None and changed >= self._dumped

    def _report(self) -> bool:
        """Diagnose the job, and say what is found unless it has been said; whether there is a verdict."""
        session, folder = self._session, self._folder
        self._wait_for_dumps()
        if self._is_over():
            return False
        path = folder / VERDICT
        earlier = verdict.read(path) if (_changed(path) or 0) > self._since else None
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
        """Raise where other nodes write to folders of their own: their ranks would seem to be missing."""
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
        """Wait until the other ranks have written what they did last, as long as more come."""
        missing = set(range(self._session.facts.world_size)) - {self._session.facts.rank}
        begun = latest = time.monotonic()
        while missing and not self._is_over() and (looked := time.monotonic()) - begun < _LATEST:
            written = {rank for rank in missing if (_changed(self._file(FLIGHT, rank)) or 0) > self._since}
            missing -= written
            if written:
                latest = time.monotonic()
            elif time.monotonic() - latest > _SETTLED:
                return
            time.sleep(max(_LOOK, time.monotonic() - looked))  # the file systems of clusters take long over a look

    def _file(self, kind: str, rank: int) -> Path:
        return self._folder / rank_folder(rank, self._session.facts.world_size) / file_name(kind, rank)

    def _abort(self) -> None:
        """End this process, where the verdict is that the job hangs, together with the others."""
        path = self._folder / VERDICT
        found, given = verdict.read(path), _changed(path) or 0
        if found is None or not found.is_hang or self._is_over() or completed() != self._completed:
            return
        log.error(
            "crossrank: rank %d ends with exit code %d because the job hangs (TRACING_ON_HANG=abort)",
            *(self._session.facts.rank, EXIT_CODE),
        )
        latest = max(_ENDS_AFTER, 2 * self._look)  # by then every rank has looked
        # A script that goes on after all, and ends meanwhile, ends so as well: it is said, and the others end so.
        exits.end_with(EXIT_CODE, _LATEST_END + latest)
        # On a thread each: a disk may be stuck, and the lock of a stream be held by a thread that hangs.
        works = (lambda: self._session.close("abort"), sys.stdout.flush, sys.stderr.flush)
        ending = [thread for work in works if (thread := threads.start("abort", work)) is not None]
        until = time.monotonic() + _LATEST_END
        for thread in ending:
            thread.join(max(0.0, until - time.monotonic()))
        time.sleep(max(0.0, min(latest, given / 1e9 + latest - time.time())))
        os._exit(EXIT_CODE)


def _pausing(folder: Path) -> list[int]:
    """The ranks that said that the others will wait for them, and still do."""
    found = []
    with contextlib.suppress(OSError):  # a file system that is away
        for path in folder.glob(f"{PAUSING}*"):
            with contextlib.suppress(OSError, ValueError, BudgetError):
                if float(read_small(path)) > time.time():
                    found.append(int(path.name.removeprefix(PAUSING)))
    return sorted(found)


def _changed(path: Path) -> int | None:
    """When a file was written, ns since 1970; None where there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
