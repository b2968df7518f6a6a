"""A lock that one process of this machine holds, and that the kernel takes back when the process ends.

It is a socket bound to a name in Linux's abstract namespace: no file, so it works whatever file system a recording
lies on (Lustre and NFS often come without file locks) and leaves nothing behind. Where there is no such namespace
every caller gets the lock.
"""

from __future__ import annotations

import errno
import hashlib
import socket


class ProcessLock:
    """Held from `take` until `release`, or until the process ends. A forked child lets go of its copy."""

    def __init__(self, holder: socket.socket | None) -> None:
        self._holder = holder

    def release(self) -> None:
        if self._holder is not None:
            self._holder.close()


def take(name: str) -> ProcessLock | None:
    """The lock of this name, or None while another holder has it."""
    try:
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    except (AttributeError, OSError):
        return ProcessLock(None)
    try:
        holder.bind("\0crossrank-" + hashlib.sha256(name.encode()).hexdigest())
    except OSError as error:
        holder.close()
        return None if error.errno == errno.EADDRINUSE else ProcessLock(None)
    return ProcessLock(holder)
