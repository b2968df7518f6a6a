"""Answers of this rank to the questions of others, what it sees of its neighbours, and its obedience to a decision.

An answer is a dump with what the process did between two looks. So a rank answers at the second look, which is at least
a second after it heard the question, and a tenth of the time without communication after which the job is looked at.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch.distributed as dist
import zstandard

from crossrank.atomic_file import whole_file
from crossrank.instrument import threads
from crossrank.instrument.hang import activity, neighbours, verdict
from crossrank.instrument.hang.activity import Communicated, Look
from crossrank.instrument.hang.questions import Questions
from crossrank.instrument.hooks import exits
from crossrank.instrument.hooks.exits import Closable
from crossrank.instrument.log import log
from crossrank.instrument.unpatched import time
from crossrank.instrument.write.flight_dump import Dumped, FlightDumps
from crossrank.recording import COMMS, FLIGHT, MOVED, OVER, SEEN, VERDICT, file_name, rank_folder

EXIT_CODE = 79
"""Exit code of a process that `TRACING_ON_HANG=abort` ended: the first one after those of sysexits.h."""
_LEAST_BETWEEN = 1.0
_OF_LIMIT = 0.1
"""Shortest time between two looks, in seconds, and as a share of the limit."""
_OF_PAUSE = 0.4
"""Share of this time after which a rank answers that moves: more cannot change the answer."""
_BETWEEN_SIGHTS = 0.7
"""Share of this time between two looks at a rank that has not answered: the answers of all come within two seconds."""
_CLOSES_AFTER, _ENDS_AFTER = 1.5, 2.5
"""Seconds from the decision to the end of the recording, and to the end of all processes. They end together: the end of
one raises an error in others."""
_LATEST_END = 15.0
"""Longest time to close the files, in seconds."""


class Watched(Dumped, Closable, Protocol):
    """The part of a session that the watch for hangs uses."""

    dumps: FlightDumps

    def current_world(self) -> object | None:
        """Return the recorded process group if it still is the default one."""

    def store_of_world(self) -> dist.Store | None:
        """Return the store of the recorded process group, while that is the current one."""


def between_looks(limit: float) -> float:
    """Return the seconds between the two looks of an answer, where a rank may be silent for `limit` seconds."""
    return max(_LEAST_BETWEEN, limit * _OF_LIMIT)


class Answers:
    """The answers of one rank. Only the thread of the watch uses it."""

    def __init__(self, session: Watched, folder: Path, questions: Questions) -> None:
        self._session = session
        self.folder = folder
        self._questions = questions
        self._asked_at = 0
        """When the last question was asked, in ns since 1970."""
        self.heard_at = 0.0
        """When this rank heard it, on the monotonic clock."""
        self._first: Look | None = None
        """The first look for the question that is not answered yet."""
        self._still: Communicated | None = None
        """The progress at the last answer, if nothing was communicated between its looks."""
        self._sights: dict[int, neighbours.Sight | None] = {}
        """Rank of this node that has not answered -> what was seen of it first."""
        self._look_again_at: float | None = None
        """When to look again at the ranks of this node that have not answered."""
        self._obeyed = 0

    def look(self, limit: float) -> None:
        """Do what is due: hear a question, answer it, look at the neighbours, announce a movement, obey a decision."""
        now, pause = time.monotonic(), between_looks(limit)
        self._session.recorder.beat()
        if self._questions.hear():
            self._asked_at, self.heard_at = self._questions.asked_at(), now
            self._first = self._first or activity.look(self._session.recorder)
        if self._first is not None and now - self._first.at >= (pause * _OF_PAUSE if self._moves() else pause):
            self._answer(self._first)
            self._first, self._sights, self._look_again_at = None, self._see_neighbours(), now + pause * _BETWEEN_SIGHTS
        elif self._look_again_at is not None and now >= self._look_again_at:
            self._look_again_at = None
            self._write_sights()
        if self._asked_at and self._session.facts.config.on_hang == "abort":
            self.announce_movement()
            self._obey()

    def _moves(self) -> bool:
        """Return whether this rank has communicated since the first look, and no thread waited all the time."""
        if self._first is None:
            return False
        first, now = self._first.progress, activity.progress(self._session.recorder)
        return first != now and first.waits.isdisjoint(now.waits)

    def _answer(self, first: Look) -> None:
        """Write a dump. The second look comes first, so that what happens meanwhile counts as movement."""
        last = activity.look(self._session.recorder)
        self._session.recorder.note_answer(self._asked_at)
        self._still = last.progress if last.progress == first.progress else None
        self._session.dumps.write("hang" if self._still else "asked", activity=activity.between(first, last))

    # --- neighbours --------------------------------------------------------------------------------------------------

    def _see_neighbours(self) -> dict[int, neighbours.Sight | None]:
        """Return what is visible of the ranks of this node that have not answered. The first rank that did looks."""
        facts = self._session.facts
        places = dict(facts.topology.places) if facts.topology is not None else {}
        here = sorted(rank for rank, place in places.items() if place[0] == places.get(facts.rank, ("",))[0])
        if any(self._has_answered(rank) for rank in here if rank < facts.rank):
            return {}
        return {rank: neighbours.see(self.file(COMMS, rank)) for rank in here if not self._has_answered(rank)}

    def _write_sights(self) -> None:
        for rank, first in self._sights.items():
            last = neighbours.see(self.file(COMMS, rank))
            if first is not None and last is not None and not self._has_answered(rank):
                seen = neighbours.compare(rank, self._session.facts.rank, first, last)
                with contextlib.suppress(OSError), whole_file(self.file(SEEN, rank)) as part:
                    part.write_bytes(zstandard.compress(msgspec.json.encode(seen)))

    def _has_answered(self, rank: int) -> bool:
        return rank == self._session.facts.rank or (change_time(self.file(FLIGHT, rank)) or 0) >= self._asked_at

    def file(self, kind: str, rank: int) -> Path:
        return self.folder / rank_folder(rank, self._session.facts.world_size) / file_name(kind, rank)

    # --- the end of the job ------------------------------------------------------------------------------------------

    def has_moved(self) -> bool:
        """Return whether this rank has communicated since its last answer, or during it."""
        return self._still != activity.progress(self._session.recorder)

    def announce_movement(self) -> None:
        """Tell the others once that this rank moves, if its last answer said that it does not."""
        if self._still is not None and self.has_moved():
            self._still = None
            with contextlib.suppress(OSError):
                (self.folder / f"{MOVED}{self._session.facts.rank}").touch()

    def anyone_moved(self, ranks: list[int], since: int) -> bool:
        """Return whether one of these ranks has announced a movement since a moment, in ns since 1970."""
        return any((change_time(self.folder / f"{MOVED}{rank}") or 0) >= since for rank in ranks)

    def _obey(self) -> None:
        """End this process if one rank has decided so, and no rank that cannot move has moved since."""
        path = self.folder / VERDICT
        given = change_time(path) or 0
        if given <= max(self._asked_at, self._obeyed):
            return
        self._obeyed = given
        found = verdict.read(path)
        if found is None or not found.ends or found.verdict == OVER:
            return
        rank = self._session.facts.rank
        log.error(
            "crossrank: rank %d ends with exit code %d because %s (TRACING_ON_HANG=abort)",
            *(rank, EXIT_CODE, found.reason()),
        )
        asked_at = self._asked_at
        while time.time() < given / 1e9 + _CLOSES_AFTER:
            self.announce_movement()
            if self._session.closing or self.anyone_moved(found.ends, asked_at):
                log.warning("crossrank: rank %d does not end: a rank of the hang moves again", rank)
                return
            time.sleep(0.05)
        self._end(given / 1e9 + _ENDS_AFTER)

    def _end(self, at: float) -> None:
        """Close the files and end this process at a time, in seconds since 1970, or when the files are closed."""
        # A script that continues and ends meanwhile gets this exit code too: it is logged, and the other ranks end.
        exits.end_with(EXIT_CODE, _LATEST_END)
        # One thread each: a disk may be stuck, and a thread that hangs may have the lock of a stream.
        works: list[Any] = [lambda: self._session.close("abort"), sys.stdout.flush, sys.stderr.flush]
        ending = [thread for work in works if (thread := threads.start("abort", work)) is not None]
        until = time.monotonic() + _LATEST_END
        for thread in ending:
            thread.join(max(0.0, until - time.monotonic()))
        time.sleep(min(max(0.0, at - time.time()), _ENDS_AFTER))
        os._exit(EXIT_CODE)


def change_time(path: Path) -> int | None:
    """Return when a file was written, in ns since 1970; None if there is no file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
