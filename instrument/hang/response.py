"""The response to a hang: a question to all ranks, a verdict, and the end of the job if `TRACING_ON_HANG=abort`.

A rank that has been silent for a while asks all ranks what they do, shortly before its limit. One rank waits for the
answers, diagnoses the job and prints the verdict into the training log while the job hangs. This is rank 0. If rank 0
is not silent, it is another rank of its node or of another node. A verdict newer than the question includes the answer
of a rank, so that rank does nothing more.

With `TRACING_ON_HANG=abort` the rank that made the verdict also decides, once, whether the job ends. It ends at the
limit if it is proven that no rank can release those that wait, and much later if they wait for one that is late. The
others obey (`answers`).
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from crossrank.atomic_file import whole_file
from crossrank.budget import BudgetError, read_small
from crossrank.errors import CrossrankError
from crossrank.instrument.hang import verdict
from crossrank.instrument.hang.answers import Answers, Watched, between_looks, change_time
from crossrank.instrument.hang.questions import Questions
from crossrank.instrument.hang.verdict import NO_VERDICT, Verdict
from crossrank.instrument.hang.watch import COUNT_ANEW, HangWatch
from crossrank.instrument.identity.topology import node_of_this_machine
from crossrank.instrument.locks import lock_file, take_lock
from crossrank.instrument.log import ONE_RANK, log
from crossrank.instrument.record.recorder import CurrentWait
from crossrank.instrument.store_requests import StoreRequests
from crossrank.instrument.unpatched import threading, time
from crossrank.instrument.write.flight_dump import completed
from crossrank.recording import COMMS, DIAGNOSING, FLIGHT, OVER, PAUSING, SEEN, SLOW, VERDICT
from crossrank.text import rank_ranges

_INITIALIZES = getattr(inspect.unwrap(dist.init_process_group), "__code__", None)
_STORE_OF_LAUNCHER = "TORCHELASTIC_USE_AGENT_STORE"
"""Variable that torchrun sets to `True` if its own process serves the store."""
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
_HEARD = 1.5
"""Seconds in which every rank that runs hears a question."""
_SETTLED = 1.5
"""Seconds without a new answer after which no more are expected."""
_LATEST = 30.0
_AGAIN = 2.0
"""Multiple of the time without communication after which the job is diagnosed again, if the verdict may change."""
_OF_TIMEOUT = 0.8
"""Share of the shortest timeout of a process group after which a job ends whose ranks wait for one that is late."""


class Hangs:
    """Watches one session for hangs."""

    def __init__(self, session: Watched) -> None:
        self._session = session
        self._watch: HangWatch | None = None
        self._questions: Questions | None = None
        self._requests = StoreRequests()
        self._answers: Answers | None = None
        self._responded_at: float | None = None
        """When this rank responded last since its last call, on the monotonic clock."""
        self._pauses: list[float] = []
        """End of each announced pause of this rank, in seconds since 1970."""
        self._was_pausing = False
        self._said: tuple[Path, int, int, CurrentWait | None] | None = None
        """Path of the verdict that this rank has printed, the numbers of calls made and finished at that time, and the
        wait that it is about if the rank communicates during it."""

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
                on_look=self._on_look,
                early=lambda: between_looks(self._patience()) + _HEARD,
                on_early=self._ask,
            )
            self._watch.start()

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
        """Stop to watch and to ask. The thread that watches may be about to ask for the first time."""
        if self._watch is not None:
            self._watch.stop()
        if self._questions is not None:
            self._questions.stop()
        self._requests.end()

    def end_well(self) -> None:
        """The script of this rank has ended without an exception: what it waited for has come. Withdraw a verdict that
        this rank has printed."""
        if self._answers is not None:
            self._answers.announce_movement()
        if self._said is not None:
            self._take_back()

    def abandon(self) -> None:
        """In a forked child: leave everything to the parent."""
        if self._watch is not None:
            self._watch.stop()

    def _patience(self) -> float:
        """Return after how many seconds without communication the job is diagnosed.

        At most half of the shortest timeout of a process group: the timeout itself aborts the job.
        """
        timeout = self._session.groups.shortest_timeout()
        seconds = self._session.facts.config.hang_seconds
        return seconds if timeout is None else min(seconds, timeout / 2)

    def _find_answers(self) -> Answers | None:
        """Return the answers of this rank in the folder that it writes to now; None without one."""
        files, session = self._session.files, self._session
        if files is not None and (self._answers is None or self._answers.folder != files.recording):
            if self._questions is not None:
                self._questions.stop()
            lasts = os.environ.get(_STORE_OF_LAUNCHER) == "True"  # else rank 0 serves it, and may end first
            find_store = session.store_of_world if lasts else lambda: None
            size, calls = session.facts.world_size, session.recorder.calls
            self._questions = Questions(files.recording, size, find_store, calls, self._requests, self._look_now)
            self._questions.start()
            self._answers = Answers(session, files.recording, self._questions)
        return self._answers

    def _look_now(self) -> None:
        if self._watch is not None:
            self._watch.wake()

    def _on_look(self) -> None:
        if (answers := self._find_answers()) is not None:
            answers.look(self._patience())

    def _ask(self, seconds: float) -> None:
        """Ask all ranks, unless one has asked in the `seconds` since the last call of this rank."""
        if self._answers is None or self._questions is None or not self._takes_part():
            return
        if self._answers.heard_at < time.monotonic() - seconds:
            self._questions.ask()

    def _takes_part(self) -> bool:
        """Return whether this rank is in the job: it has its process group, or is initializing the next one."""
        if self._session.current_world() is not None:
            return True
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and frame.f_code is not _INITIALIZES:
            frame = frame.f_back
        return frame is not None

    def _on_hang(self, seconds: float, wait: CurrentWait | None) -> float | None:
        """Respond to `seconds` without communication, or to a wait of this length during other communication. Return
        after how many seconds to respond again, if ever."""
        session, answers = self._session, self._find_answers()
        if session.files is None or answers is None or self._questions is None:
            return COUNT_ANEW if session.writer is not None else None
        pausing, was_pausing = _pausing(answers.folder), self._was_pausing
        self._was_pausing = bool(pausing)
        if pausing or was_pausing:  # after a pause, every rank waits for its full patience again
            log.info("crossrank: rank %s announced a pause, so no hang is reported", rank_ranges(pausing))
            return COUNT_ANEW
        if not self._takes_part():  # the waiting ranks make the verdict
            session.dumps.write("hang")
            return None
        self._ask(seconds if self._responded_at is None else time.monotonic() - self._responded_at)
        self._responded_at = time.monotonic()
        silence = _Silence(session, answers, self._questions.asked_at(), seconds, self._patience(), wait)
        silence.respond()
        if silence.has_said:
            self._said = answers.folder / VERDICT, session.recorder.calls(), completed(), wait
        again = seconds * _AGAIN
        return min([again, *(one for one in silence.ends_late() if one > seconds)]) if silence.may_go_on else None

    def _on_calls(self) -> None:
        self._responded_at = None
        if self._said is not None:
            _, calls, over, wait = self._said
            if wait is not None and wait in self._session.recorder.waits_under_way():
                return
            # A failed call looks completed, and so may the calls with which the script handles it.
            if self._session.recorder.calls() - calls >= _FEW_CALLS and completed() - over >= _FEW_CALLS:
                self._take_back()

    def _take_back(self) -> None:
        """Withdraw the verdict of this rank."""
        path = self._said[0] if self._said is not None else None
        self._said = None
        if path is not None and verdict.replace(path, OVER):
            log.warning(
                "crossrank: communication continues, so the verdict above no longer applies; %s is updated",
                path,
                extra=ONE_RANK,
            )


class _Silence:
    """One period in which this rank, or one of its waits, makes no progress."""

    def __init__(
        self,
        session: Watched,
        answers: Answers,
        asked_at: int,
        seconds: float,
        limit: float,
        wait: CurrentWait | None = None,
    ) -> None:
        self._session = session
        self._wait = wait
        self._answers = answers
        self._folder = answers.folder
        self._asked_at = asked_at
        self._seconds = seconds
        # The clock of the folder, which may be that of a file server, is known at the moment of the question.
        heard_before = time.monotonic() - answers.heard_at if answers.heard_at else 0.0
        self._since = asked_at + round((heard_before - seconds) * 1e9)
        """When this rank communicated last, in ns since 1970 on the clock of the folder."""
        self._limit = limit
        self._calls, self._completed = session.recorder.calls(), completed()
        self._look = max(_LOOK, session.facts.world_size * _LOOK_PER_RANK)
        self.has_said = False
        """Whether this rank has printed that the job hangs, or that others wait for a late rank."""

    @property
    def may_go_on(self) -> bool:
        """Whether the verdict says that the job may continue, or that evidence is missing."""
        found = verdict.read(self._folder / VERDICT)
        return found is not None and not found.is_hang and found.verdict not in (OVER, NO_VERDICT)

    def ends_late(self) -> tuple[float, float]:
        """Return after how many seconds a job ends whose ranks wait for one that runs, and for one that does not."""
        timeout = self._session.groups.shortest_timeout(of_limited=False)
        own = self._session.facts.config.late_seconds
        runs = math.inf if timeout is None else timeout * _OF_TIMEOUT
        return runs, own or runs

    def respond(self) -> None:
        """Make or await the verdict."""
        begun, turn = time.monotonic(), self._turn()
        while not self._is_over() and not self._has_verdict():
            # One process of a node at a time: the next one may find a verdict.
            if time.monotonic() - begun >= turn:
                with self._alone_on_node() as is_alone:
                    if is_alone and not self._has_verdict() and not self._report():
                        return
            self._pause(self._look)

    def _pause(self, seconds: float) -> None:
        """Sleep, and answer the questions of other ranks meanwhile."""
        self._answers.look(self._limit)
        time.sleep(seconds)

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
        """Return whether this rank makes calls again, its wait has ended, or the recording has ended."""
        recorder = self._session.recorder
        if self._wait is not None:
            return self._session.closing or self._wait not in recorder.waits_under_way()
        return self._session.closing or recorder.calls() != self._calls

    def _has_moved(self) -> bool:
        return self._is_over() or (self._wait is None and completed() != self._completed)

    def _has_verdict(self) -> bool:
        changed = change_time(self._folder / VERDICT)
        return changed is not None and changed >= self._asked_at

    def _report(self) -> bool:
        """Diagnose the job and print new findings; return whether there is a verdict."""
        session, folder = self._session, self._folder
        path = folder / VERDICT
        earlier = verdict.read(path) if (change_time(path) or 0) > self._since else None
        what = "no communication" if self._wait is None else "a thread waits"
        silence = f"{what} on rank {session.facts.rank} for {self._seconds:.3g} s"
        try:
            self._refuse_part_of_job()
            self._wait_for_answers()
            if self._is_over():
                return False
            text, content = verdict.diagnose(folder, session.facts.world_size)
            found = verdict.parse(content)
            verdict.publish(path, content)
        except CrossrankError as error:
            log.warning(
                "crossrank: %s: %s; run `crossrank diagnose %s` to see which rank waits for which",
                *(silence, error, folder),
                extra=ONE_RANK,
            )
            verdict.write_none(path)
            return False
        is_over = self._has_moved()
        if earlier is None or not found.says_as(earlier):
            self._print(found, silence, text, is_over=is_over)
        # A rank that communicates during its wait could not withdraw the decision.
        if session.facts.config.on_hang == "abort" and not is_over and self._wait is None:
            self._decide(found, content)
        return True

    def _print(self, found: Verdict, silence: str, text: str, *, is_over: bool) -> None:
        path = self._folder / VERDICT
        if found.is_hang:
            state = "hung, and continues" if is_over else "hangs"
            log.warning("crossrank: the job %s: %s. Verdict (%s):\n%s", state, silence, path, text, extra=ONE_RANK)
        elif is_over or (self._wait is not None and found.proof != "late"):
            return  # a thread may listen for long while its rank trains
        elif found.proof == "late":
            log.warning("crossrank: %s: %s. Verdict (%s):\n%s", found.summary, silence, path, text, extra=ONE_RANK)
        else:
            log.warning(
                "crossrank: %s, and %s; %s has the last calls of every rank (verdict: %s)",
                *(silence, found.summary or "no rank waits for another", self._folder, found.verdict),
                extra=ONE_RANK,
            )
        self.has_said = not is_over and (found.is_hang or found.proof == "late")

    def _decide(self, found: Verdict, content: bytes) -> None:
        """Decide that the job ends, if the verdict proves a hang, or the ranks that others wait for are late by far."""
        if not found.is_hang and not (found.proof == "late" and self._seconds >= self._end_of_late(found)):
            return
        ranks = found.involved()
        if self._answers.anyone_moved(ranks, self._asked_at) or self._has_moved():
            log.warning("crossrank: the job is not ended, because a rank of the hang moves again", extra=ONE_RANK)
            return
        verdict.publish(self._folder / VERDICT, content, ends=ranks)

    def _end_of_late(self, found: Verdict) -> float:
        runs, does_nothing = self.ends_late()
        return runs if found.verdict == SLOW else does_nothing

    def _refuse_part_of_job(self) -> None:
        """Raise an error if other nodes write to their own folders: their ranks would seem to be missing."""
        topology = self._session.facts.topology
        places = dict(topology.places) if topology is not None else {}
        here: set[str] = set()
        for rank, (node, _) in places.items():
            if node not in here and self._answers.file(COMMS, rank).exists():
                here.add(node)
        if apart := sorted(rank for rank, place in places.items() if place[0] not in here):
            raise CrossrankError(
                f"{self._folder} has no files of rank {rank_ranges(apart)}: copy the files of the other nodes into it, "
                "or use a folder that all nodes share"
            )

    def _wait_for_answers(self) -> None:
        """Wait for an answer of every rank, or for what its neighbours see of it, as long as new ones arrive."""
        missing = set(range(self._session.facts.world_size))
        begun = latest = time.monotonic()
        patience = 2 * between_looks(self._limit) + _HEARD + _SETTLED
        while missing and not self._is_over() and (looked := time.monotonic()) - begun < patience + _LATEST:
            written = {rank for rank in missing if self._is_told(rank)}
            missing -= written
            if written:
                latest = time.monotonic()
            elif time.monotonic() - begun > patience and time.monotonic() - latest > _SETTLED:
                return
            self._pause(max(_LOOK, time.monotonic() - looked))  # a look is slow on the file system of a cluster

    def _is_told(self, rank: int) -> bool:
        """Return whether it is known what a rank does since the question."""
        return any((change_time(self._answers.file(kind, rank)) or 0) >= self._asked_at for kind in (FLIGHT, SEEN))


def _pausing(folder: Path) -> list[int]:
    """Return the ranks with an announced pause that has not ended."""
    found = []
    with contextlib.suppress(OSError):  # the file system is not reachable
        for path in folder.glob(f"{PAUSING}*"):
            with contextlib.suppress(OSError, ValueError, BudgetError):
                if float(read_small(path)) > time.time():
                    found.append(int(path.name.removeprefix(PAUSING)))
    return sorted(found)
