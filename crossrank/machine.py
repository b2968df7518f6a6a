"""The machine that a process runs on."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
from contextlib import suppress
from pathlib import Path

from crossrank.errors import CrossrankError

_LEAST_MEMORY = 32 << 20
"""Bytes that must be left to training when a recording begins, or writes down what torch knows."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str | None:
    """The kernel's id of this boot of this machine; None where the system has none."""
    try:
        return _BOOT_ID.read_text().strip() or None
    except OSError:
        return None


def network_cards() -> int:
    """Cards by which this machine reaches others: InfiniBand and RoCE devices, else network devices that are no
    software; 1 where the system tells none."""
    for devices in (Path("/sys/class/infiniband").glob("*"), Path("/sys/class/net").glob("*/device")):
        if count := len(list(devices)):
            return count
    return 1


def memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def need_memory() -> None:
    """Raise `CrossrankError` where this process may not allocate what a recording needs, as far as its own limits go.

    Asked beforehand, for code of torch's that lacks memory may end the process."""
    try:
        mmap.mmap(-1, _LEAST_MEMORY, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError):
        raise CrossrankError(
            f"this process may allocate less than {_LEAST_MEMORY >> 20} MiB more; raise its limit (ulimit -v)"
        ) from None


def limit_memory(more: int) -> None:
    """Let this process allocate `more` bytes than it has by now: beyond that an allocation fails, where the system can
    do that."""
    with suppress(OSError, ValueError):
        now = _of_this_process("VmData")
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def give_memory_back() -> None:
    """Give freed memory back to the system, and let `peak_memory` begin anew, as far as this system can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Most bytes that this process had in memory, since `give_memory_back` where the system can tell that."""
    with suppress(OSError, ValueError):
        return _of_this_process("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _of_this_process(name: str) -> int:
    """Bytes that the system counts under a name. Raises `OSError` or `ValueError` where it counts none."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(name)
