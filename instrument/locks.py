"""Locks between processes, which never wait: whoever finds one taken goes on without."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MOST_ASKERS = 4096
_UNKNOWN = -1
_TRIES, _BETWEEN = 5, 0.01
"""Looks at a lock that is taken and does not listen yet, and seconds between them."""
_CREDENTIALS = struct.Struct("iII")
"""Of the other end of a socket: process, user, group."""


def take_lock(name: str) -> socket.socket | None:
    """A lock that one process of this user and machine holds until it is closed or the process ends; None while another
    one of this user has it.

    It is a socket bound to a name in Linux's abstract namespace: no file, so it works whatever file system a recording
    lies on (Lustre and NFS often come without file locks) and leaves nothing behind. Where there is no such namespace
    every caller gets the lock, and so where another user has taken its name, which everybody can see. A forked child
    closes its copy.
    """
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address = f"\0crossrank-{os.geteuid()}-{hashlib.sha256(name.encode(errors='surrogateescape')).hexdigest()}"
    try:
        holder.bind(address)
        holder.listen(_MOST_ASKERS)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and _holder_of(address) in (_UNKNOWN, os.geteuid()):
            holder.close()
            return None
    return holder


def _holder_of(address: str) -> int | None:
    """The user whose process listens at an address; None where it does not listen, as a lock of ours does at once."""
    for _ in range(_TRIES):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
            asker.setblocking(False)
            try:
                asker.connect(address)
                facts = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                return int(_CREDENTIALS.unpack(facts)[1])
            except ConnectionRefusedError:
                time.sleep(_BETWEEN)
            except OSError:
                return _UNKNOWN
    return None


@contextmanager
def lock_file(path: Path) -> Iterator[int | None]:
    """The descriptor of a lock on a file, which is made where it is not there; None while another process has it.

    A process that inherits the descriptor has the lock as well. Where a file system has no locks every caller gets it.
    Raises `OSError` where the file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with contextlib.ExitStack() as opened:
        opened.callback(os.close, descriptor)  # closed, not unlocked: another process may have it as well
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        except OSError:
            pass
        yield descriptor
