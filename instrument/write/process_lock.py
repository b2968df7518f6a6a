"""A lock that one process of this machine holds, and that the kernel takes back when the process ends.

It is a socket bound to a name in Linux's abstract namespace: no file, so it works whatever file system a recording
lies on (Lustre and NFS often come without file locks) and leaves nothing behind. Where there is no such namespace
every caller gets the lock.
"""

from __future__ import annotations

import errno
import hashlib
import socket


def take(name: str) -> socket.socket | None:
    """The lock of this name until it is closed, or None while another holder has it.

    A forked child closes its copy.
    """
    holder = socket.socket(getattr(socket, "AF_UNIX", socket.AF_INET), socket.SOCK_DGRAM)
    try:
        holder.bind("\0crossrank-" + hashlib.sha256(name.encode()).hexdigest())
    except (OSError, TypeError) as error:  # another family takes no such name
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            holder.close()
            return None
    return holder
