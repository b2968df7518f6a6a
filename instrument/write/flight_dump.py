"""Dumps torch's flight recorder, at a hang, a window's end, a signal and the end: the last calls of every group with
their state, and what crossrank knows besides.

The file is JSON with the recorder's own fields; `read_flight_dump` of the tools, and every reader of
`_dump_fr_trace_json`, takes it. torch's JSON has no stack frames, so its pickle is taken and written as JSON: with
frames where torch has its compiler loaded, for only then are they free; the calls' own lines are always there. The
field `crossrank` adds what a hang is diagnosed from and the recorder does not know: when and why the dump was taken,
the members of the groups (lost on gloo), the last calls with their peers (gloo's P2P is not recorded by torch), and
where every thread of the process is.

Dumps of one rank go to one file. What was written of a hang is kept until communication goes on, for after gloo's
timeout the call that failed looks completed. So a hang has to be noticed before it: see `HangWatch`.
"""

from __future__ import annotations

import itertools
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec
import orjson
import torch

from crossrank.instrument import threads
from crossrank.instrument.hooks import exits
from crossrank.instrument.identity.gpu import cuda_is_in_use
from crossrank.instrument.log import log
from crossrank.instrument.torch_private import has
from crossrank.instrument.write.comms_writer import clock
from crossrank.instrument.write.rank_files import take_lock
from crossrank.recording import FLIGHT, file_name
from crossrank.text import writable

if TYPE_CHECKING:
    from crossrank.instrument.session import Session

_COMPILER = "torch._inductor.codecache"
_IDENTITY = ("profiling_name", "process_group", "collective_seq_id", "p2p_seq_id", "op_id", "time_created_ns")
_VERSION = "2.10"
"""Version of the recorder's format that a dump names in which torch has no part."""
_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LOOKS = 8
"""Looks per patience."""
_LONGEST_PAUSE = 0.5
"""Seconds between two looks: the patience may have become shorter."""
_PATIENCE = 10.0
"""Seconds that the end of a recording waits for a dump that another thread is writing."""


class FlightDumps:
    """The dumps of one session. `write` may be called from any thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        # Two threads may dump at once. A fatal signal may interrupt its own thread in here, for good.
        self._once = threading.RLock()
        self._writing = False
        self._watch: HangWatch | None = None
        self._calls_at_hang: int | None = None
        self._reporter: socket.socket | None = None  # held by the rank of this node that reports a hang

    def write(self, reason: str) -> None:
        """Write torch's flight recorder as it stands now."""
        session = self._session
        files = session.files
        # At the end another thread's dump is waited for: it would die with the process before it is written.
        patience = 0 if reason == "SIGUSR1" else _PATIENCE
        if files is None or not session.config.flight or not self._once.acquire(timeout=patience):
            return
        try:
            if self._writing and reason == "SIGUSR1":  # this thread is writing already
                return
            self._writing = True
            calls = session.recorder.calls()
            if reason not in ("hang", "SIGUSR1") and calls == self._calls_at_hang:
                return
            with session.failures.reported("the flight recorder was not dumped"):
                files.write(file_name(FLIGHT, session.rank), dump(self._moment(reason)))
                if reason == "hang":
                    self._calls_at_hang = calls
        finally:
            self._writing = False
            self._once.release()

    def watch(self) -> None:
        """Watch for hangs from now on, where that is asked for."""
        config = self._session.config
        if self._watch is None and config.hang_seconds > 0 and config.flight:
            self._watch = HangWatch(
                self._patience,
                calls=self._session.recorder.calls,
                completed=completed,
                on_hang=self._on_hang,
                on_end=self._go_on,
            )
            self._watch.start()

    def _patience(self) -> float:
        """Seconds without communication that are taken for a hang.

        At most half of the shortest timeout of a process group: at the timeout itself the job is aborted.
        """
        timeout = self._session.groups.shortest_timeout()
        seconds = self._session.config.hang_seconds
        return seconds if timeout is None else min(seconds, timeout / 2)

    def stop_watching(self) -> None:
        """No hang is noticed after this."""
        if self._watch is not None:
            self._watch.stop()
        self._go_on()

    def _go_on(self) -> None:
        """Communication goes on: another rank may report the next hang."""
        reporter, self._reporter = self._reporter, None
        if reporter is not None:
            reporter.close()

    def _on_hang(self, seconds: float) -> None:
        session = self._session
        if session.files is None or session.current_world() is None:
            return
        self.write("hang")
        folder = session.files.folder
        # A long evaluation or checkpoint is silent as well, on every rank: one rank of a node reports it, and once.
        self._reporter = take_lock(f"no communication in {folder}")
        if self._reporter is not None:
            log.warning(
                "crossrank: no communication for %.3g s (rank %d): what every rank did last is in %s. If the job "
                "hangs, `crossrank diagnose %s` shows which rank waits for which",
                seconds,
                session.rank,
                folder,
                folder,
            )

    def _moment(self, reason: str) -> dict[str, Any]:
        """What a dump says about itself: `Moment` of the tools' reader."""
        session = self._session
        now = clock()
        exceptions = exits.exceptions(reason)
        return {
            "rank": session.rank,
            "world_size": session.world_size,
            "host": socket.gethostname(),
            "reason": reason,
            "error": exceptions[0]["error"] if exceptions else None,
            "exceptions": exceptions,
            "time_ns": now["wall"],
            "clock": now,
            "groups": session.groups.describe(),
            "calls": session.writer.recent() if session.writer is not None else [],
            "stacks": stacks(),
        }


class HangWatch:
    """Calls `on_hang(seconds)` when nothing has been communicated for `patience()` seconds.

    A thread looks a few times per patience whether a call was begun. When none was for half of it it also asks torch
    how many calls are over. When neither moves for all of it the hang is reported, once until the next call (`on_end`).
    Every rank of a hung job does so on its own, also the one that the others wait for, and one that never comes to its
    first call. The patience may change: a group with a shorter timeout may be made. The thread ends after `stop`.
    """

    def __init__(
        self,
        patience: Callable[[], float],
        *,
        calls: Callable[[], int],
        completed: Callable[[], int],
        on_hang: Callable[[float], None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._patience = patience
        self._calls = calls
        self._completed = completed
        self._on_hang = on_hang
        self._on_end = on_end
        self._stopped = False  # a plain flag: an Event's lock may be held by what a signal handler interrupts

    def start(self) -> None:
        self._stopped = threads.start("watchdog", self._watch, lost="hangs are no longer watched for") is None

    def stop(self) -> None:
        self._stopped = True

    def _watch(self) -> None:
        calls, since = self._calls(), time.monotonic()
        completed: int | None = None
        reported = False
        while not self._stopped:
            patience = self._patience()
            time.sleep(min(patience / _LOOKS, _LONGEST_PAUSE))
            now = time.monotonic()
            if self._calls() != calls:
                if reported:
                    self._on_end()
                calls, since, completed, reported = self._calls(), now, None, False
                continue
            if reported or now - since < patience / 2:
                continue
            over = self._completed()
            if completed is not None and over != completed:
                since = now
            completed = over
            if now - since >= patience and not self._stopped:
                reported = True
                self._on_hang(now - since)


def dump(moment: dict[str, Any]) -> bytes:
    """The flight recorder of this process as JSON with `moment` in it; `moment` alone where this torch has none.

    A CUDA build keeps NCCL's own recorder apart from the generic one that gloo fills: a process that uses both, one for
    training and one for checkpoints, has its calls in both, and may hang in either.
    """
    # To resolve stacks torch imports its compiler, which takes most of a second and keeps process groups alive. And it
    # makes the interpreter forget that a KeyboardInterrupt ends it: the process would exit with 1, not die of SIGINT.
    interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    with_stacks = _COMPILER in sys.modules and not interrupted
    # This process wrote the pickles a moment ago.
    contents = [pickle.loads(function(True, with_stacks, False)) for function in _recorders("")]
    if not contents:
        has("flight recorder")
        contents = [{"version": _VERSION, "entries": []}]
    return orjson.dumps(_merged(contents) | {"crossrank": moment}, default=msgspec.to_builtins)


def completed() -> int:
    """How many calls torch knows to be over, summed over the groups; it rises while communication goes on."""
    total = 0
    for function in _recorders("_json"):
        status = orjson.loads(function(False, False)).get("pg_status", {})
        total += sum(int(progress["last_completed_collective"]) for progress in status.values())
    return total


def _recorders(suffix: str) -> list[Callable[..., Any]]:
    """The functions of torch that dump a recorder which this process may have filled, NCCL's first."""
    names = ["_dump_fr_trace"]
    if cuda_is_in_use():
        names.insert(0, "_dump_nccl_trace")
    found = (getattr(torch._C._distributed_c10d, name + suffix, None) for name in names)
    return [function for function in found if function is not None]


def _merged(contents: list[dict[str, Any]]) -> dict[str, Any]:
    """Several recorders of one process as one: entries in the order of their times, numbered anew.

    Each numbers its entries and groups for itself. In some builds of torch two names stand for one recorder; so a
    recorder of which no entry is new is left out.
    """
    filled = [content for content in contents if content.get("entries")]
    merged = dict((filled or contents)[0])
    for other in filled[1:]:
        known = {_identity_of(entry) for entry in merged["entries"]}
        new = [entry for entry in other["entries"] if _identity_of(entry) not in known]
        if not new:
            continue
        # What fell out of a ring shows in its first number: the numbers of the whole begin behind all that is lost.
        lost = int(merged["entries"][0]["record_id"]) + int(other["entries"][0]["record_id"])
        groups = 1 + max(
            max(int(entry["pg_id"]) for entry in merged["entries"]), *map(int, merged.get("pg_status", {})), -1
        )
        new = [entry | {"pg_id": int(entry["pg_id"]) + groups} for entry in new]
        entries = sorted(merged["entries"] + new, key=lambda entry: int(entry["time_created_ns"]))
        merged["entries"] = [entry | {"record_id": lost + index} for index, entry in enumerate(entries)]
        status = {str(int(key) + groups): value for key, value in other.get("pg_status", {}).items()}
        merged["pg_status"] = merged.get("pg_status", {}) | status
        merged["pg_config"] = other.get("pg_config", {}) | merged.get("pg_config", {})
    return merged


def _identity_of(entry: dict[str, Any]) -> str:
    """What distinguishes an entry from every other one of the process."""
    return str([entry.get(name) for name in _IDENTITY])


def stacks() -> list[dict[str, Any]]:
    """The stack of every Python thread of this process, innermost frame first; crossrank's own threads are left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}

    def is_ours(placed: tuple[FrameType, int]) -> bool:  # the thread that dumps is in here
        return placed[0].f_code.co_filename.startswith(_FOLDER)

    found = []
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, f"thread {ident}")
        if not name.startswith(threads.PREFIX):
            frames = itertools.dropwhile(is_ours, traceback.walk_stack(frame))
            found.append({"thread": writable(name), "frames": exits.describe_frames(frames)})
    return found
