"""Dumps torch's flight recorder at a hang, the end of a window, a signal and the end of the recording. A dump has the
last calls of every group with their state, and the records of crossrank.

The file is JSON with the fields of torch's recorder: `read_flight_dump` of the tools and every reader of
`_dump_fr_trace_json` can read it. torch's JSON has no stack frames, so crossrank converts torch's pickle to JSON. The
pickle has frames only if torch has loaded its compiler, because only then are they free. Calls always have source
lines. The field `crossrank` adds data that torch does not record, for the diagnosis of a hang. It has the time and
reason of the dump, members of the groups (missing on gloo), last calls with their peers (torch does not record P2P on
gloo), and the position of every thread.

All dumps of one rank use one file. The dump of a hang is kept until communication continues, because after gloo's
timeout the failed call looks completed. So a hang must be noticed before it: see `crossrank.instrument.hang`.
"""

from __future__ import annotations

import itertools
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Mapping
from types import FrameType
from typing import Any, Protocol

import msgspec
import orjson
from torch.distributed import distributed_c10d

from crossrank.instrument import threads
from crossrank.instrument.event_loops import tasks_of
from crossrank.instrument.facts import Recording
from crossrank.instrument.hooks import exits
from crossrank.instrument.identity.gpu import cuda_is_in_use
from crossrank.instrument.identity.process_groups import GroupTable
from crossrank.instrument.record.recorder import NO_CALL, CurrentWait, Recorder
from crossrank.instrument.torch_dumps import every_dump
from crossrank.instrument.torch_private import has
from crossrank.instrument.unpatched import threading, time
from crossrank.instrument.write.comms_writer import CommsWriter, clock
from crossrank.instrument.write.rank_files import RankFiles
from crossrank.machine import need_memory
from crossrank.recording import ANSWERS, FLIGHT, file_name
from crossrank.text import writable

_COMPILER = "torch._inductor.codecache"
_IDENTITY = ("profiling_name", "process_group", "collective_seq_id", "p2p_seq_id", "op_id", "time_created_ns")
_VERSION = "2.10"
"""Format version of a dump without data of torch's recorder."""
_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOTICED = 1.0
"""Seconds within which torch notices the end of an NCCL call."""
_MAKES_GROUP, _HELPER, _C10D = "new_group", "_new_process_group_helper", "distributed_c10d.py"
"""Functions of torch that make a process group, the second one with its name, and their file."""
_PATIENCE = 10.0
"""Seconds that the end of a recording waits for the dump of another thread."""


class Dumped(Recording, Protocol):
    """The part of a session that dumps use."""

    recorder: Recorder
    groups: GroupTable
    files: RankFiles | None
    writer: CommsWriter | None


class FlightDumps:
    """The dumps of one session. `write` may be called from any thread."""

    def __init__(self, session: Dumped) -> None:
        self._session = session
        # Two threads may dump at once. A fatal signal may interrupt a thread in here, and never return.
        self._once = threading.RLock()
        self._writing = False
        self._at_hang: tuple[int, int, list[CurrentWait]] | None = None
        """Numbers of calls and of finished calls, and the current waits, when a hang was noticed."""

    def write(self, reason: str, *, activity: dict[str, Any] | None = None) -> None:
        """Write a dump of torch's flight recorder. `activity`: what the process did just before, if that is known."""
        session = self._session
        files = session.files
        # At the end, wait for the dump of another thread: the end of the process would cut it off.
        patience = 0 if reason == "SIGUSR1" else _PATIENCE
        if files is None or not session.facts.config.flight or not self._once.acquire(timeout=patience):
            return
        try:
            if self._writing and reason == "SIGUSR1":  # this thread is already writing
                return
            self._writing = True
            if reason in ANSWERS and session.closing and session.writer is None:  # the end has written one
                return
            if reason not in (*ANSWERS, "SIGUSR1") and self._still_hangs(reason):
                return
            with session.failures.reported("the flight recorder was not dumped"):
                # Before the dump, so that calls that finish meanwhile count as progress.
                progress = session.recorder.calls(), completed(), session.recorder.waits_under_way()
                files.write(file_name(FLIGHT, session.facts.rank), dump(self._moment(reason, activity)))
                if reason == "hang":
                    self._at_hang = progress
        finally:
            self._writing = False
            self._once.release()

    def _still_hangs(self, reason: str) -> bool:
        """Return whether the dump of a hang has more information than a dump now.

        If the GPU hung after the last call of the host, more calls are finished at the end. On gloo, where hosts wait,
        no thread is still in the wait in which it hung. An aborted call looks completed too, so this counts only if
        the script has reached its end.
        """
        if self._at_hang is None:
            return False
        recorder = self._session.recorder
        calls, over, waits = self._at_hang
        if recorder.calls() != calls:
            # torch's watchdog aborts a hung call of NCCL, and the script may make another one: that is no progress.
            return cuda_is_in_use() and over > 0 and _stands_still(over)
        if reason not in ("exit", "disable") or exits.exceptions(reason):
            return True
        if cuda_is_in_use():
            return _stands_still(over)
        return not recorder.follows_waits or not set(waits).isdisjoint(recorder.waits_under_way())

    def _moment(self, reason: str, activity: dict[str, Any] | None) -> dict[str, Any]:
        """Return the data about the dump itself: `Moment` of the tools' reader."""
        session, writer = self._session, self._session.writer
        now = clock()
        exceptions = exits.exceptions(reason)
        return {
            "rank": session.facts.rank,
            "world_size": session.facts.world_size,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "groups_made": getattr(distributed_c10d._world, "group_count", None) if has("process groups") else None,
            "failed_groups": session.groups.failed(),
            "limited_groups": session.groups.limited(),
            "reason": reason,
            "error": exceptions[0]["error"] if exceptions else None,
            "exceptions": exceptions,
            "time_ns": now["wall"],
            "clock": now,
            "groups": session.groups.describe_with_gone(),
            "calls": writer.recent() if writer is not None else [],
            "waits": _waits(session.recorder) if session.recorder.follows_waits else None,
            "waited": writer.waited() if writer is not None else [],
            "stacks": stacks(exits.left_at() if reason == "exit" else []),
            "activity": activity,
        }


def dump(moment: dict[str, Any]) -> bytes:
    """Return the flight recorder of this process as JSON with `moment` in it; only `moment` if this torch has none.

    A CUDA build has one recorder for NCCL and a generic one for gloo. A process that trains with NCCL and writes
    checkpoints with gloo has calls in both, and may hang in either.
    """
    # To resolve stacks torch imports its compiler, which takes nearly a second and keeps process groups alive. After a
    # KeyboardInterrupt, this import would make the process exit with 1 instead of dying of SIGINT.
    interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    with_stacks = _COMPILER in sys.modules and not interrupted
    need_memory()
    # The pickles are safe: this process wrote them a moment ago.
    contents = [pickle.loads(function(True, with_stacks, False)) for function in every_dump()]
    if not contents:
        has("flight recorder")
        contents = [{"version": _VERSION, "entries": []}]
    return orjson.dumps(_merged(contents) | {"crossrank": moment}, default=msgspec.to_builtins)


def _stands_still(over: int) -> bool:
    """Return whether no more than `over` calls finish. torch notices an end a moment later."""
    until = time.monotonic() + _NOTICED
    while completed() <= over and time.monotonic() < until:
        time.sleep(_NOTICED / 20)
    return completed() <= over


def completed() -> int:
    """Return how many calls torch counts as finished, over all groups. It grows while communication continues."""
    status = [pickle.loads(function(False, False, False)).get("pg_status", {}) for function in every_dump()]
    return sum(int(progress["last_completed_collective"]) for groups in status for progress in groups.values())


def _merged(contents: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge several recorders of one process: entries ordered by time, with new numbers.

    Each recorder has its own numbers for entries and groups. In some builds of torch, one recorder has two names, so a
    recorder without a new entry is skipped.
    """
    filled = [content for content in contents if content.get("entries")]
    merged = dict((filled or contents)[0])
    for other in filled[1:]:
        known = {_identity_of(entry) for entry in merged["entries"]}
        new = [entry for entry in other["entries"] if _identity_of(entry) not in known]
        if not new:
            continue
        # The first number of a ring is the number of lost entries: the merged numbers start after all lost entries.
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
    """Return a text that identifies an entry within the process."""
    return str([entry.get(name) for name in _IDENTITY])


def _waits(recorder: Recorder) -> list[dict[str, Any]]:
    """Return the current waits of this process: the call, None if unknown, and the thread with its number."""
    names = {number: thread.name for thread in threading.enumerate() if (number := number_of(thread)) is not None}
    return [
        {
            "id": None if wait.call == NO_CALL else wait.call,
            "thread": writable(names.get(wait.thread, f"thread {wait.thread}")),
            "number": wait.thread,
            "limited": wait.limited,
        }
        for wait in recorder.waits_under_way()
    ]


def number_of(thread: threading.Thread) -> int | None:
    """Return the number that the system gives a thread. In a forked process Python has that of the parent."""
    return os.getpid() if thread is threading.main_thread() else thread.native_id


def stacks(left_at: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the stack of every Python thread, innermost frame first, and the exception that it handles. Skips
    crossrank's own threads. `left_at`: the stack of the main thread before the process began to end."""
    known = {thread.ident: thread for thread in threading.enumerate()}

    def is_ours(placed: tuple[FrameType, int]) -> bool:  # the thread that dumps
        return placed[0].f_code.co_filename.startswith(_FOLDER)

    found = []
    for ident, frame in sys._current_frames().items():
        thread = known.get(ident)
        name = f"thread {ident}" if thread is None else thread.name
        if not name.startswith(threads.PREFIX):
            frames = itertools.dropwhile(is_ours, traceback.walk_stack(frame))
            stack: dict[str, Any] = {
                "thread": writable(name),
                "number": None if thread is None else number_of(thread),
                "frames": (thread is threading.main_thread() and left_at) or exits.describe_frames(frames),
                "makes_group": _members_of_new_group(frame),
                "makes_name": writable(str((_variables_of(frame, _HELPER) or {}).get("group_name") or "")),
                "tasks": tasks_of(frame),
            }
            if (error := _handled_by(ident)) is not None:
                stack["handles"] = exits.describe(name, error)
            found.append(stack)
    return found


def _members_of_new_group(frame: FrameType | None) -> list[int] | None:
    """Return the members of the process group that a thread is making, empty for all; None if it makes none."""
    variables = _variables_of(frame, _MAKES_GROUP)
    return None if variables is None else list(map(int, variables.get("ranks") or ()))


def _variables_of(frame: FrameType | None, function: str) -> Mapping[str, Any] | None:
    """Return the variables of a function of torch.distributed that a thread is in; None if it is in no such one."""
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_code.co_filename.endswith(_C10D):
            return frame.f_locals
        frame = frame.f_back
    return None


def _handled_by(thread: int) -> BaseException | None:
    """Return the exception that a thread handles: it explains a hang in a `finally` block."""
    found = sys._current_exceptions().get(thread)
    return found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
