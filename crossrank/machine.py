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
"""Bytes that training must be able to allocate when a recording starts or dumps torch's flight recorder."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str | None:
    """Return the kernel's id of this boot of this node; None if the system has none."""
    try:
        return _BOOT_ID.read_text().strip() or None
    except OSError:
        return None


def pid_namespace() -> int | None:
    """Return the kernel's number of the namespace of process numbers that this process is in; None if unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


def process_status(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` (proc(5)) from the state on; empty if there is no such process, or no
    /proc."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return status.rpartition(")")[2].split()  # the name before it may contain spaces


def network_cards() -> int:
    """Return how many network cards connect this node to others: InfiniBand and RoCE devices, else network devices
    with hardware. 1 if the system lists none."""
    for devices in (Path("/sys/class/infiniband").glob("*"), Path("/sys/class/net").glob("*/device")):
        if count := len(list(devices)):
            return count
    return 1


def memory() -> int:
    """Return this node's bytes of memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def need_memory() -> None:
    """Raise `CrossrankError` if the limits of this process leave too little memory for a recording.

    The check comes first, since code in torch that runs out of memory may end the process."""
    try:
        mmap.mmap(-1, _LEAST_MEMORY, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError):
        raise CrossrankError(
            f"this process can allocate less than {_LEAST_MEMORY >> 20} MiB more; raise its limit (ulimit -v)"
        ) from None


def limit_memory(more: int) -> None:
    """Let this process allocate `more` bytes in addition to what it has now. Above that, an allocation fails. Has no
    effect if the system has no such limit."""
    with suppress(OSError, ValueError):
        now = _read_status_bytes("VmData")
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def give_memory_back() -> None:
    """Return freed memory to the system and restart the measurement of `peak_memory`, if this system can do so."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return the peak memory of this process in bytes; since `give_memory_back` if the system can measure that."""
    with suppress(OSError, ValueError):
        return _read_status_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _read_status_bytes(name: str) -> int:
    """Return the bytes in line `name` of this process's status. Raise `OSError` or `ValueError` if there is none."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(name)
