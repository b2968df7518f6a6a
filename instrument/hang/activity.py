"""Measures what this process does between two looks: its calls, and the CPU time and I/O of each thread.

A thread that is blocked uses no CPU time at all, however short the looks are apart, and a thread that works uses some.
So two looks tell them apart, which two looks at a stack do not: a loop of one line always shows the same line.
Sources: `/proc/self/task/*/{schedstat,io,children}` (Linux; proc(5)). Elsewhere, only calls are known.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from crossrank.instrument import threads
from crossrank.instrument.hang.other_ends import Blocked, OtherEnds, children_of, numbers_in, text_of
from crossrank.instrument.record.recorder import CurrentWait, Recorder
from crossrank.instrument.unpatched import threading, time
from crossrank.instrument.write.flight_dump import completed, number_of
from crossrank.machine import process_status
from crossrank.recording import POLLS
from crossrank.text import writable

_NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_MOST = 256
"""Threads, and child processes, that are described."""
_LOOKED_FOR = 0.1
"""Seconds within which the threads of a process that may only poll are looked for in their sleep."""
_PAUSE = 0.005
"""Seconds between two looks."""


@dataclass(frozen=True)
class Usage:
    """What a thread, or a child process, has used so far."""

    cpu_ns: int
    bytes: int
    """Bytes read and written, through the cache or not."""


@dataclass(frozen=True)
class Communicated:
    """The communication of this process up to a moment. Two are equal if it did not communicate in between."""

    calls: int
    completed: int
    waits: frozenset[CurrentWait]


def progress(recorder: Recorder) -> Communicated:
    return Communicated(recorder.calls(), completed(), frozenset(recorder.waits_under_way()))


@dataclass(frozen=True, kw_only=True)
class Look:
    """The counters of this process at one moment."""

    at: float
    """Seconds on the monotonic clock."""
    progress: Communicated
    threads: dict[int, Usage]
    """Thread, by its number in the system -> its usage; without crossrank's own threads."""
    children: dict[int, int]
    """Child process -> its CPU time in ns."""


def look(recorder: Recorder) -> Look:
    own = {number_of(thread) for thread in threading.enumerate() if thread.name.startswith(threads.PREFIX)}
    found = {thread: _usage(thread) for thread in numbers_in("/proc/self/task") if thread not in own}
    return Look(
        at=time.monotonic(),
        progress=progress(recorder),
        threads={thread: usage for thread, usage in found.items() if usage is not None},
        children={child: cpu for child in children_of(os.getpid()) if (cpu := cpu_of_process(child)) is not None},
    )


def between(first: Look, last: Look) -> dict[str, Any]:
    """Return what the process did between two looks, in the format of a dump: `RankActivity` of the tools' reader."""
    names = {number_of(thread): thread.name for thread in threading.enumerate()}
    before, now, ends, seconds = first.progress, last.progress, OtherEnds(), last.at - first.at
    until = time.monotonic() + _LOOKED_FOR
    return {
        "seconds": round(seconds, 3),
        "calls": now.calls - before.calls,
        "completed": now.completed - before.completed,
        "held": [{"id": wait.call, "thread": wait.thread} for wait in sorted(before.waits & now.waits)],
        "threads": [
            _describe(thread, names.get(thread), first.threads.get(thread, Usage(0, 0)), usage, seconds, ends, until)
            for thread, usage in list(last.threads.items())[:_MOST]
        ],
        "children": [
            {"id": child, "name": writable(name_of_process(child)), "cpu_ns": cpu - first.children.get(child, 0)}
            for child, cpu in list(last.children.items())[:_MOST]
        ],
    }


def _describe(
    thread: int, name: str | None, before: Usage, now: Usage, seconds: float, ends: OtherEnds, until: float
) -> dict[str, Any]:
    """Return what a thread did. `name`: its name in Python; None if it does not run Python, and so does not train."""
    used = now.cpu_ns - before.cpu_ns
    if name is not None and 0 < used < POLLS * seconds * 1e9:
        blocked = _blocked_mostly(thread, ends, until)
    else:
        blocked = ends.blocked(thread, ends=name is not None)
    return {
        "id": thread,
        "name": writable(name or text_of(f"/proc/self/task/{thread}/comm").strip()),
        "cpu_ns": used,
        "bytes": now.bytes - before.bytes,
        "blocked_in": blocked.call,
        "released_by": list(blocked.released_by),
        "timed": blocked.timed,
    }


def _blocked_mostly(thread: int, ends: OtherEnds, until: float) -> Blocked:
    """Return where a thread sleeps which wakes up now and then. One look may find it between two sleeps, more often if
    other processes use the CPUs. `until`: when to give up, on the monotonic clock."""
    while not (blocked := ends.blocked(thread, ends=True)).timed and time.monotonic() < until:
        time.sleep(_PAUSE)
    return blocked


def cpu_of_process(process: int) -> int | None:
    """Return the CPU time of a process in ns, in ticks of the system; None if there is none."""
    fields = process_status(process)
    return (int(fields[11]) + int(fields[12])) * _NS_PER_TICK if len(fields) > 12 else None


def name_of_process(process: int) -> str:
    return text_of(f"/proc/{process}/comm").strip()


def _usage(thread: int) -> Usage | None:
    cpu = text_of(f"/proc/self/task/{thread}/schedstat").split()
    if not cpu:
        return None  # the thread has ended, or the kernel does not count
    transferred = [line.partition(": ") for line in text_of(f"/proc/self/task/{thread}/io").splitlines()]
    return Usage(int(cpu[0]), sum(int(value) for name, _, value in transferred if name in ("rchar", "wchar")))
