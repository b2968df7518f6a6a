"""Finds out from `/proc` what a rank of this node does that does not answer: it is stopped, gone, or keeps the GIL.

The process of a rank is known by its number in the header of its comms file, and by that it has this file open: numbers
are used again. A process in another namespace is not visible: this module does not report it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossrank.instrument.hang.activity import cpu_of_process
from crossrank.instrument.hang.other_ends import open_on
from crossrank.instrument.unpatched import time
from crossrank.instrument.write.rank_files import read_header
from crossrank.machine import pid_namespace, process_status

_FROZEN = "frozen 1"


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What is visible of a process at one moment."""

    at: float
    """Seconds on the monotonic clock."""
    process: int
    state: str
    """A letter of `/proc/PID/stat`; `X` if the process has ended, empty if that is unknown."""
    cpu_ns: int = 0
    frozen: bool = False
    """Its control group is frozen."""


def see(comms: Path) -> Sight | None:
    """Return what is visible of the process that writes this comms file; None if nothing is."""
    header = read_header(str(comms))
    if header is None or header.pid is None or header.pid_namespace != pid_namespace():
        return None
    process, now = header.pid, time.monotonic()
    fields = process_status(process)
    if not fields or fields[0] in "ZX" or not _has_open(process, comms):
        return Sight(at=now, process=process, state="X")
    return Sight(
        at=now, process=process, state=fields[0], cpu_ns=cpu_of_process(process) or 0, frozen=_is_frozen(process)
    )


def compare(rank: int, by: int, first: Sight, last: Sight) -> dict[str, Any]:
    """Return what rank `by` saw of a rank in two looks, in the format of a file: `Seen` of the tools' reader."""
    return {
        "rank": rank,
        "by": by,
        "time_ns": time.time_ns(),
        "seconds": round(last.at - first.at, 3),
        "process": last.process,
        "state": last.state,
        "cpu_ns": last.cpu_ns - first.cpu_ns if last.state != "X" else 0,
        "frozen": last.frozen,
    }


def _has_open(process: int, path: Path) -> bool:
    """Return whether a process has a file open; True if that is not visible."""
    try:
        wanted = os.stat(path)
        descriptors = [int(name) for name in os.listdir(f"/proc/{process}/fd")]
    except OSError:
        return True
    return any(True for _ in open_on(process, descriptors, wanted))


def _is_frozen(process: int) -> bool:
    try:
        lines = Path(f"/proc/{process}/cgroup").read_text().splitlines()
        group = next((line[3:] for line in lines if line.startswith("0::")), None)
        return group is not None and _FROZEN in Path(f"/sys/fs/cgroup{group}/cgroup.events").read_text()
    except OSError:
        return False
