"""Measures what this process does between two looks: its calls, and the CPU time and I/O of each thread.

A thread that is blocked uses no CPU time at all, however short the looks are apart, and a thread that works uses some.
So two looks tell them apart, which two looks at a stack do not: a loop of one line always shows the same line.
Sources: `/proc/self/task/*/{schedstat,io,syscall,children}` (Linux; proc(5)). Elsewhere, only calls are known.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from crossrank.instrument import threads
from crossrank.instrument.record.recorder import CurrentWait, Recorder
from crossrank.instrument.unpatched import threading, time
from crossrank.instrument.write.flight_dump import completed, number_of
from crossrank.machine import process_status
from crossrank.text import writable

_NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_MOST = 256
"""Threads, and child processes, that are described."""
_SYSTEM_CALLS: dict[str, dict[int, str]] = {
    "x86_64": {
        0: "read", 1: "write", 5: "fstat", 7: "poll", 9: "mmap", 16: "ioctl", 17: "pread", 18: "pwrite", 23: "select",
        35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 47: "recvmsg", 61: "wait4",
        72: "fcntl", 73: "flock", 74: "fsync", 202: "futex", 230: "nanosleep", 232: "epoll_wait", 247: "waitid",
        257: "open", 262: "stat", 270: "select", 271: "poll", 281: "epoll_wait", 288: "accept",
    },
    "aarch64": {
        22: "epoll_wait", 25: "fcntl", 29: "ioctl", 32: "flock", 56: "open", 63: "read", 64: "write", 67: "pread",
        68: "pwrite", 72: "select", 73: "poll", 79: "stat", 80: "fstat", 82: "fsync", 95: "waitid", 98: "futex",
        101: "nanosleep", 115: "nanosleep", 202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom",
        212: "recvmsg", 222: "mmap", 242: "accept", 260: "wait4",
    },
}  # fmt: skip
"""Machine -> number of a system call that may block -> its name (syscalls(2))."""


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
    found = {thread: _usage(thread) for thread in _numbers("/proc/self/task") if thread not in own}
    return Look(
        at=time.monotonic(),
        progress=progress(recorder),
        threads={thread: usage for thread, usage in found.items() if usage is not None},
        children={child: cpu for child in _children() if (cpu := cpu_of_process(child)) is not None},
    )


def between(first: Look, last: Look) -> dict[str, Any]:
    """Return what the process did between two looks, in the format of a dump: `RankActivity` of the tools' reader."""
    names = {number_of(thread): thread.name for thread in threading.enumerate()}
    before, now, holders = first.progress, last.progress, _lock_holders()
    return {
        "seconds": round(last.at - first.at, 3),
        "calls": now.calls - before.calls,
        "completed": now.completed - before.completed,
        "held": [{"id": wait.call, "thread": wait.thread} for wait in sorted(before.waits & now.waits)],
        "threads": [
            {
                "id": thread,
                "name": writable(names.get(thread) or _text(f"/proc/self/task/{thread}/comm").strip()),
                "cpu_ns": usage.cpu_ns - earlier.cpu_ns,
                "bytes": usage.bytes - earlier.bytes,
                "blocked_in": _blocked_in(thread),
                "lock_of": holders.get(thread),
            }
            for thread, usage in list(last.threads.items())[:_MOST]
            if (earlier := first.threads.get(thread, Usage(0, 0)))
        ],
        "children": [
            {"id": child, "name": writable(name_of_process(child)), "cpu_ns": cpu - first.children.get(child, 0)}
            for child, cpu in list(last.children.items())[:_MOST]
        ],
    }


def cpu_of_process(process: int) -> int | None:
    """Return the CPU time of a process in ns, in ticks of the system; None if there is none."""
    fields = process_status(process)
    return (int(fields[11]) + int(fields[12])) * _NS_PER_TICK if len(fields) > 12 else None


def name_of_process(process: int) -> str:
    return _text(f"/proc/{process}/comm").strip()


def _children() -> Iterator[int]:
    for thread in _numbers("/proc/self/task"):
        yield from map(int, _text(f"/proc/self/task/{thread}/children").split())


def _usage(thread: int) -> Usage | None:
    cpu = _text(f"/proc/self/task/{thread}/schedstat").split()
    if not cpu:
        return None  # the thread has ended, or the kernel does not count
    transferred = [line.partition(": ") for line in _text(f"/proc/self/task/{thread}/io").splitlines()]
    return Usage(int(cpu[0]), sum(int(value) for name, _, value in transferred if name in ("rchar", "wchar")))


def _blocked_in(thread: int) -> str:
    """Return the system call that a thread is in; empty if it runs or this is unknown."""
    number = _text(f"/proc/self/task/{thread}/syscall").partition(" ")[0]
    names = _SYSTEM_CALLS.get(platform.machine(), {})
    return names.get(int(number), f"system call {number}") if number.isdigit() else ""


def _lock_holders() -> dict[int, int]:
    """Return process that waits for a file lock -> process that holds it, by `/proc/locks` (proc(5)).

    A line with `->` is of a process that waits for the lock in the line before.
    """
    found: dict[int, int] = {}
    holder = 0
    for fields in map(str.split, _text("/proc/locks").splitlines()):
        waits = "->" in fields
        process = fields[4 + waits] if len(fields) > 4 + waits else ""
        if not process.lstrip("-").isdigit():
            continue
        if waits:
            found[int(process)] = holder
        else:
            holder = int(process)
    return found


def _numbers(folder: str) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(folder)]
    return []


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except (OSError, ValueError):
        return ""
