"""Locks between processes. They never wait: a caller that finds a lock taken continues without it."""

from __future__ import annotations

import _socket
import contextlib
import errno
import fcntl
import hashlib
import os
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crossrank.instrument.unpatched import time


class HeldLock(_socket.socket):
    """A lock of `take_lock`. gevent and eventlet replace the class of `socket`, and not the one below it."""


_sockets: weakref.WeakSet[HeldLock] = weakref.WeakSet()
_descriptors: set[int] = set()
"""The locks of this process: a forked child inherits them, and would hold them as long as it lives."""
_MOST_ASKERS = 4096
_UNKNOWN = -1
_TRIES, _BETWEEN = 5, 0.01
"""How often to try a lock that is taken and does not listen yet, and seconds between two tries."""
_CREDENTIALS = struct.Struct("iII")
"""Process, user and group of the other end of a socket."""


def take_lock(name: str) -> HeldLock | None:
    """Take a lock that one process of this user and node holds until it closes the lock or ends. Return None while
    another process of this user has it.

    The lock is a socket bound to a name in Linux's abstract namespace. It is no file, so it works on every file system
    (Lustre and NFS often have no file locks) and leaves nothing behind. Every caller gets the lock where there is no
    such namespace, and where another user has taken the name, which every user can see. A forked child closes its
    copy.
    """
    holder = HeldLock(_socket.AF_UNIX, _socket.SOCK_STREAM)
    address = f"\0crossrank-{os.geteuid()}-{hashlib.sha256(name.encode(errors='surrogateescape')).hexdigest()}"
    try:
        holder.bind(address)
        holder.listen(_MOST_ASKERS)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and _holder_of(address) in (_UNKNOWN, os.geteuid()):
            holder.close()
            return None
    _sockets.add(holder)
    return holder


def _holder_of(address: str) -> int | None:
    """Return the user whose process listens at an address; None if none listens. A lock of ours listens at once."""
    for _ in range(_TRIES):
        with contextlib.closing(HeldLock(_socket.AF_UNIX, _socket.SOCK_STREAM)) as asker:
            asker.setblocking(False)
            try:
                asker.connect(address)
                facts = asker.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _CREDENTIALS.size)
                return int(_CREDENTIALS.unpack(facts)[1])
            except ConnectionRefusedError:
                time.sleep(_BETWEEN)
            except OSError:
                return _UNKNOWN
    return None


@contextmanager
def lock_file(path: Path) -> Iterator[int | None]:
    """Yield the descriptor of a lock on a file, which is created if needed; None while another process has the lock.

    A process that is started with the descriptor has the lock too; a forked child closes its copy. On a file system
    without locks every caller gets it.
    Raises `OSError` if the file cannot be created.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with contextlib.ExitStack() as opened:
        opened.callback(os.close, descriptor)  # close it, do not unlock it: another process may have it too
        _descriptors.add(descriptor)
        opened.callback(_descriptors.discard, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        except OSError:
            pass
        yield descriptor


def close_in_child() -> None:
    """In a forked child: close the copies of its parent's locks."""
    for lock in list(_sockets):
        lock.close()
    while _descriptors:
        with contextlib.suppress(OSError):
            os.close(_descriptors.pop())
