"""Dumps torch's flight recorder, at a hang, a window's end, a signal and the end: the last calls of every group with
their state, and what crossrank knows besides.

The file is JSON with the recorder's own fields; `read_flight_dump` of the tools, and every reader of
`_dump_fr_trace_json`, takes it. torch's JSON has no stack frames, so its pickle is taken and written as JSON: with
frames where torch has its compiler loaded, for only then are they free; the calls' own lines are always there. The
field `crossrank` adds what a hang is diagnosed from and the recorder does not know: when and why the dump was taken,
the members of the groups (lost on gloo), the last calls with their peers (gloo's P2P is not recorded by torch), and
where every thread of the process is.

Dumps of one rank go to one file. What was written of a hang is kept until communication goes on, for after gloo's
timeout the call that failed looks completed. So a hang has to be noticed before it: see `crossrank.instrument.hang`.
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
from typing import Any, Protocol

import msgspec
import orjson

from crossrank.instrument import threads
from crossrank.instrument.facts import Recording
from crossrank.instrument.hooks import exits
from crossrank.instrument.identity.gpu import cuda_is_in_use
from crossrank.instrument.identity.process_groups import GroupTable
from crossrank.instrument.record.recorder import NO_CALL, Recorder
from crossrank.instrument.torch_dumps import every_dump
from crossrank.instrument.torch_private import has
from crossrank.instrument.write.comms_writer import CommsWriter, clock
from crossrank.instrument.write.rank_files import RankFiles
from crossrank.machine import need_memory
from crossrank.recording import FLIGHT, file_name
from crossrank.text import writable

_COMPILER = "torch._inductor.codecache"
_IDENTITY = ("profiling_name", "process_group", "collective_seq_id", "p2p_seq_id", "op_id", "time_created_ns")
_VERSION = "2.10"
"""Version of the recorder's format that a dump names in which torch has no part."""
_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOTICED = 1.0
"""Seconds within which torch notices that a call of NCCL is over."""
_PATIENCE = 10.0
"""Seconds that the end of a recording waits for a dump that another thread is writing."""


class Dumped(Recording, Protocol):
    """What a dump sees of its session."""

    recorder: Recorder
    groups: GroupTable
    files: RankFiles | None
    writer: CommsWriter | None


class FlightDumps:
    """The dumps of one session. `write` may be called from any thread."""

    def __init__(self, session: Dumped, main_thread: Callable[[], dict[str, Any]]) -> None:
        """`main_thread` says what the main thread of this rank was seen to do since its last call."""
        self._session = session
        self._main_thread = main_thread
        # Two threads may dump at once. A fatal signal may interrupt its own thread in here, for good.
        self._once = threading.RLock()
        self._writing = False
        self._at_hang: tuple[int, int, list[tuple[int, int]]] | None = None
        """Calls, how many of them were over, and the waits under way, when a hang was noticed."""

    def write(self, reason: str) -> None:
        """Write torch's flight recorder as it stands now."""
        session = self._session
        files = session.files
        # At the end another thread's dump is waited for: it would die with the process before it is written.
        patience = 0 if reason == "SIGUSR1" else _PATIENCE
        if files is None or not session.facts.config.flight or not self._once.acquire(timeout=patience):
            return
        try:
            if self._writing and reason == "SIGUSR1":  # this thread is writing already
                return
            self._writing = True
            if reason == "hang" and session.closing and session.writer is None:  # the end has written its own
                return
            if reason not in ("hang", "SIGUSR1") and self._still_hangs(reason):
                return
            with session.failures.reported("the flight recorder was not dumped"):
                # Before the dump: what ends meanwhile is news.
                progress = session.recorder.calls(), completed(), session.recorder.waits_under_way()
                files.write(file_name(FLIGHT, session.facts.rank), dump(self._moment(reason)))
                if reason == "hang":
                    self._at_hang = progress
        finally:
            self._writing = False
            self._once.release()

    def _still_hangs(self, reason: str) -> bool:
        """Whether what was written of a hang says more than a dump would now.

        The host may have made its last call when its GPU hung: then more calls are over at the end. On gloo, where
        hosts wait, no thread is left in the wait that it hung in. But an aborted call looks completed as well, so that
        counts only where the script came to its end.
        """
        if self._at_hang is None:
            return False
        recorder = self._session.recorder
        calls, over, waits = self._at_hang
        if recorder.calls() != calls:
            return False
        if reason not in ("exit", "disable") or exits.exceptions(reason):
            return True
        if cuda_is_in_use():
            until = time.monotonic() + _NOTICED
            while completed() <= over and time.monotonic() < until:
                time.sleep(_NOTICED / 20)
            return completed() <= over
        return not recorder.follows_waits or not set(waits).isdisjoint(recorder.waits_under_way())

    def _moment(self, reason: str) -> dict[str, Any]:
        """What a dump says about itself: `Moment` of the tools' reader."""
        session, writer = self._session, self._session.writer
        now = clock()
        exceptions = exits.exceptions(reason)
        return {
            "rank": session.facts.rank,
            "world_size": session.facts.world_size,
            "host": socket.gethostname(),
            "reason": reason,
            "error": exceptions[0]["error"] if exceptions else None,
            "exceptions": exceptions,
            "time_ns": now["wall"],
            "clock": now,
            "groups": session.groups.describe(),
            "calls": writer.recent() if writer is not None else [],
            "waits": _waits(session.recorder) if session.recorder.follows_waits else None,
            "waited": writer.waited() if writer is not None else [],
            "stacks": stacks(),
            **self._main_thread(),
        }


def dump(moment: dict[str, Any]) -> bytes:
    """The flight recorder of this process as JSON with `moment` in it; `moment` alone where this torch has none.

    A CUDA build keeps NCCL's own recorder apart from the generic one that gloo fills: a process that uses both, one for
    training and one for checkpoints, has its calls in both, and may hang in either.
    """
    # To resolve stacks torch imports its compiler, which takes most of a second and keeps process groups alive. And it
    # makes the interpreter forget that a KeyboardInterrupt ends it: the process would exit with 1, not die of SIGINT.
    interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    with_stacks = _COMPILER in sys.modules and not interrupted
    need_memory()
    # This process wrote the pickles a moment ago.
    contents = [pickle.loads(function(True, with_stacks, False)) for function in every_dump()]
    if not contents:
        has("flight recorder")
        contents = [{"version": _VERSION, "entries": []}]
    return orjson.dumps(_merged(contents) | {"crossrank": moment}, default=msgspec.to_builtins)


def completed() -> int:
    """How many calls torch knows to be over, summed over the groups; it rises while communication goes on."""
    status = [pickle.loads(function(False, False, False)).get("pg_status", {}) for function in every_dump()]
    return sum(int(progress["last_completed_collective"]) for groups in status for progress in groups.values())


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


def _waits(recorder: Recorder) -> list[dict[str, Any]]:
    """What threads of this process wait for: the call, None where it is not known, and the thread."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    names[os.getpid()] = threading.main_thread().name  # of a forked process Python knows the parent's number
    return [
        {"id": None if call == NO_CALL else call, "thread": writable(names.get(thread, f"thread {thread}"))}
        for call, thread in recorder.waits_under_way()
    ]


def stacks() -> list[dict[str, Any]]:
    """The stack of every Python thread of this process, innermost frame first, and the exception that it handles;
    crossrank's own threads are left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}

    def is_ours(placed: tuple[FrameType, int]) -> bool:  # the thread that dumps is in here
        return placed[0].f_code.co_filename.startswith(_FOLDER)

    found = []
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, f"thread {ident}")
        if not name.startswith(threads.PREFIX):
            frames = itertools.dropwhile(is_ours, traceback.walk_stack(frame))
            stack: dict[str, Any] = {"thread": writable(name), "frames": exits.describe_frames(frames)}
            if (error := _handled_by(ident)) is not None:
                stack["handles"] = exits.describe(name, error)
            found.append(stack)
    return found


def _handled_by(thread: int) -> BaseException | None:
    """The exception that a thread handles now: what hangs in a `finally` says with it why it is there."""
    found = sys._current_exceptions().get(thread)
    return found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
