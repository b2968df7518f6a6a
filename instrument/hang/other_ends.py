"""Finds the processes of this node that can end what a thread of this process waits for, from `/proc` (proc(5)).

That is the holder of a file lock, or the processes that have the other end of a pipe or a socket. Only ranks that the
same launcher started, and their children, are looked at: others are no ranks of this job, as far as is known.
"""

from __future__ import annotations

import _socket
import os
import platform
import stat
import struct
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from crossrank.recording import C_SLEEPS, PYTHON_SLEEPS, SLEEPS, STORE

_SYSTEM_CALLS: dict[str, dict[int, str]] = {
    "x86_64": {
        0: "read", 1: "write", 5: "fstat", 7: "poll", 9: "mmap", 16: "ioctl", 17: "pread", 18: "pwrite", 23: "select",
        34: "pause", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 47: "recvmsg",
        61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 128: "sigtimedwait", 130: "sigsuspend", 202: "futex",
        230: "nanosleep", 232: "epoll_wait", 247: "waitid", 257: "open", 262: "stat", 270: "select", 271: "poll",
        281: "epoll_wait", 288: "accept",
    },
    "aarch64": {
        22: "epoll_wait", 25: "fcntl", 29: "ioctl", 32: "flock", 56: "open", 63: "read", 64: "write", 67: "pread",
        68: "pwrite", 72: "select", 73: "poll", 79: "stat", 80: "fstat", 82: "fsync", 95: "waitid", 98: "futex",
        101: "nanosleep", 115: "nanosleep", 133: "sigsuspend", 137: "sigtimedwait", 202: "accept", 203: "connect",
        206: "sendto", 207: "recvfrom", 212: "recvmsg", 222: "mmap", 242: "accept", 260: "wait4",
    },
}  # fmt: skip
"""Machine -> number of a system call that may block -> its name (syscalls(2))."""
_TIMER_ABSTIME = 1
"""Flag of clock_nanosleep(2)."""
_READS = ("read", "recvfrom", "recvmsg")
_LOCKS = ("flock", "fcntl")
_POLLFD = struct.Struct("ihh")
_POLLIN = 1
_INT = 0xFFFFFFFF
_TIMEOUTS: dict[str, dict[int, tuple[int, int]]] = {
    "x86_64": {7: (2, -1), 23: (4, 0), 202: (3, 0), 232: (3, -1), 270: (4, 0), 271: (2, 0), 281: (3, -1)},
    "aarch64": {22: (3, -1), 72: (4, 0), 73: (2, 0), 98: (3, 0)},
}
"""Machine -> number of a system call -> (place of the argument that limits it, the value of one without a limit)."""
_MOST = 64
"""Descriptors that one call may wait for."""
_LISTENS = "0A"
"""State of a socket in `/proc/net/tcp`: LISTEN of the kernel's tcp_states.h."""
_STORE = "pt_tcpstore"
"""First part of the name of torch's threads that serve a store."""
_WRITES = (os.O_WRONLY, os.O_RDWR)


@dataclass(frozen=True)
class Blocked:
    """What a thread is blocked in."""

    call: str = ""
    """The system call, or STORE; empty if it runs or this is unknown."""
    released_by: tuple[int, ...] = ()
    """The processes that can end it: each of them, if it waits for one of several. Empty if any of them is unknown."""
    timed: bool = False
    """It ends by itself after some time."""


@dataclass
class OtherEnds:
    """What `/proc` shows of the processes of this node, read once for all threads of this process."""

    _links_of: dict[int, dict[int, str]] = field(default_factory=dict)
    """Process -> its open descriptors, and what each leads to."""

    def blocked(self, thread: int, *, ends: bool) -> Blocked:
        """Return what a thread of this process is blocked in, and with `ends` who can end it."""
        number, *arguments = text_of(f"/proc/self/task/{thread}/syscall").split() or [""]
        if not number.isdigit():
            return Blocked()
        name = _SYSTEM_CALLS.get(platform.machine(), {}).get(int(number), f"system call {number}")
        values = [int(one, 16) for one in arguments]
        if name == "select" and values[:1] == [0]:
            name = PYTHON_SLEEPS  # before 3.11
        elif name == PYTHON_SLEEPS and not (len(values) > 1 and values[1] & _TIMER_ABSTIME):
            name = C_SLEEPS
        timed = _is_timed(int(number), name, values)
        if not ends:
            return Blocked(name, timed=timed)
        with suppress(OSError, ValueError, IndexError, struct.error):
            if name in _LOCKS:
                holder = self._lock_holders.get(os.getpid())
                return Blocked(name, () if holder is None else (holder,), timed)
            if name in SLEEPS:
                return Blocked(name, tuple(sorted(self._holders_of_open_files)), timed)
            awaited = _awaited(name, values)
            if any(map(self._leads_to_store, awaited)):
                return Blocked(STORE, timed=timed)
            return Blocked(name, self._who_write(awaited), timed)
        return Blocked(name, timed=timed)

    def _who_write(self, descriptors: Collection[int]) -> tuple[int, ...]:
        found: set[int] = set()
        for descriptor in descriptors:
            ends = self._who_writes(descriptor)
            # A pipe that only this process can write to is its own; all that have opened a named one may write to it.
            if not (ends := ends - {os.getpid()}):
                return ()
            found |= ends
        return tuple(sorted(found))

    def _who_writes(self, descriptor: int) -> set[int]:
        """Return the processes that have the other end of a pipe or socket; empty if that is unknown."""
        of = os.fstat(descriptor)
        if stat.S_ISFIFO(of.st_mode):
            return {one for one in self._near if _writes(one, of)}
        if not stat.S_ISSOCK(of.st_mode):
            return set()
        if (inode := _inode(os.readlink(f"/proc/self/fd/{descriptor}"))) not in self._sockets:
            return {one for one in _unix_peer(descriptor) if not self._serves(one)}
        found = self._holders(self._other_end(inode))
        return set() if any(map(self._serves, found)) else found

    def _leads_to_store(self, descriptor: int) -> bool:
        """Return whether a socket leads to torch's store: any client may set the key that a thread waits for."""
        if (inode := _inode(os.readlink(f"/proc/self/fd/{descriptor}"))) not in self._sockets:
            return False
        other, port = self._other_end(inode), int(self._sockets[inode][1].rpartition(":")[2], 16)
        if port and str(port) == os.environ.get("MASTER_PORT"):
            return True
        return any(self._may_be_of_a_store(one, other) for one in self._holders(other))

    def _other_end(self, inode: str) -> str:
        """Return the inode of the socket of this node that a TCP socket is connected to; empty without one."""
        local, remote, _ = self._sockets[inode]
        return self._inodes.get((remote, local), "")

    def _holders(self, inode: str) -> set[int]:
        return {one for one in self._near if inode and f"socket:[{inode}]" in self._links(one).values()}

    def _serves(self, process: int) -> bool:
        """Return whether a process is the child of another rank, such as the server of a queue: what a client waits for
        may come from any other client."""
        return process not in self._ranks and process not in children_of(os.getpid())

    def _may_be_of_a_store(self, process: int, inode: str) -> bool:
        """Return whether a socket of a process may belong to torch's store, whose server waits for all its sockets and
        for new connections in one call."""
        tasks = numbers_in(f"/proc/{process}/task")
        if not any(text_of(f"/proc/{process}/task/{one}/comm").startswith(_STORE) for one in tasks):
            return False
        links = self._links(process)
        servers = []
        for descriptor, link in links.items():
            if link == "anon_inode:[eventpoll]":
                watched = [links.get(one, "") for one in _watched(process, descriptor)]
                if any(self._listens(one) for one in watched):
                    servers.append(watched)
        return not servers or any(f"socket:[{inode}]" in watched for watched in servers)

    def _listens(self, link: str) -> bool:
        inode = _inode(link)
        return inode in self._sockets and self._sockets[inode][2] == _LISTENS

    @cached_property
    def _holders_of_open_files(self) -> set[int]:
        """The processes that keep this one from writing to a file that it has open: a loop may try to lock it now and
        then."""
        found = set()
        for descriptor in self._links(os.getpid()):
            with suppress(OSError):
                found.add(self._writers.get(os.fstat(descriptor).st_ino, 0))
        return (found & self._near) - {os.getpid()}

    @cached_property
    def _ranks(self) -> set[int]:
        """The launcher, and the processes that it started."""
        return {os.getppid(), *children_of(os.getppid()), os.getpid()}

    @cached_property
    def _near(self) -> set[int]:
        """The launcher, the processes that it started, and their children."""
        return self._ranks.union(*map(children_of, self._ranks))

    def _links(self, process: int) -> dict[int, str]:
        if process not in self._links_of:
            folder, found = f"/proc/{process}/fd", dict[int, str]()
            for descriptor in numbers_in(folder):
                with suppress(OSError):
                    found[descriptor] = os.readlink(f"{folder}/{descriptor}")
            self._links_of[process] = found
        return self._links_of[process]

    @cached_property
    def _sockets(self) -> dict[str, tuple[str, str, str]]:
        """Inode of a TCP socket -> (its address, the address of the other end, its state)."""
        found = {}
        for name in ("tcp", "tcp6"):
            for fields in map(str.split, text_of(f"/proc/self/net/{name}").splitlines()[1:]):
                if len(fields) > 9:
                    found[fields[9]] = (_address(fields[1]), _address(fields[2]), fields[3])
        return found

    @cached_property
    def _inodes(self) -> dict[tuple[str, str], str]:
        return {(local, remote): inode for inode, (local, remote, _) in self._sockets.items()}

    @cached_property
    def _locks(self) -> list[tuple[bool, list[str]]]:
        """The lines of `/proc/locks`: whether a process waits for the lock of the line before, and the fields without
        the arrow that says so: (number, type, mode, access, process, file, ...)."""
        rows = map(str.split, text_of("/proc/locks").splitlines())
        return [("->" in fields, [one for one in fields if one != "->"]) for fields in rows if len(fields) > 5]

    @cached_property
    def _writers(self) -> dict[int, int]:
        """Inode of a file -> the process that has locked it for itself alone."""
        return {
            int(fields[5].rpartition(":")[2]): int(fields[4])
            for waits, fields in self._locks
            if not waits and fields[3] == "WRITE" and fields[4].isdecimal()
        }

    @cached_property
    def _lock_holders(self) -> dict[int, int]:
        """Process that waits for a file lock -> process that holds it."""
        found: dict[int, int] = {}
        holder = 0
        for waits, fields in self._locks:
            if not fields[4].lstrip("-").isdigit():
                continue
            if waits:
                found[int(fields[4])] = holder
            else:
                holder = int(fields[4])
        return found


def _inode(link: str) -> str:
    """Return the inode of the socket that a link of `/proc/N/fd` names; empty for another file."""
    return link[len("socket:[") : -1] if link.startswith("socket:[") else ""


def children_of(process: int) -> set[int]:
    tasks = numbers_in(f"/proc/{process}/task")
    return {int(one) for task in tasks for one in text_of(f"/proc/{process}/task/{task}/children").split()}


def _is_timed(number: int, name: str, arguments: list[int]) -> bool:
    """Return whether a system call ends by itself after some time."""
    place, without = _TIMEOUTS.get(platform.machine(), {}).get(number, (len(arguments), 0))
    return name in SLEEPS or (place < len(arguments) and arguments[place] & _INT != without & _INT)


def _awaited(name: str, arguments: list[int]) -> list[int]:
    """Return the descriptors whose data a system call of this process waits for."""
    first, second = arguments[:2]
    if name in _READS:
        return [first]
    if name == "epoll_wait":
        return list(_watched(os.getpid(), first))[:_MOST]
    if name == "poll":
        found = _POLLFD.iter_unpack(_memory(first, min(second, _MOST) * _POLLFD.size))
        return [descriptor for descriptor, events, _ in found if events & _POLLIN]
    if name == "select":
        bits = int.from_bytes(_memory(second, (first + 7) // 8), "little") if second else 0
        return [descriptor for descriptor in range(first) if bits >> descriptor & 1]
    return []


def _memory(address: int, size: int) -> bytes:
    """Return bytes of this process; the thread may have left the call meanwhile, so the address may be invalid."""
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(memory, size, address)
    finally:
        os.close(memory)


def _watched(process: int, descriptor: int) -> Iterator[int]:
    """Yield the descriptors that an epoll instance of a process watches."""
    for fields in map(str.split, text_of(f"/proc/{process}/fdinfo/{descriptor}").splitlines()):
        if fields[:1] == ["tfd:"]:
            yield int(fields[1])


def _writes(process: int, of: os.stat_result) -> bool:
    """Return whether a process can write to a pipe."""
    for descriptor in open_on(process, numbers_in(f"/proc/{process}/fd"), of):
        flags = text_of(f"/proc/{process}/fdinfo/{descriptor}").partition("flags:")[2].split()
        if flags and int(flags[0], 8) & os.O_ACCMODE in _WRITES:
            return True
    return False


def open_on(process: int, descriptors: Iterable[int], of: os.stat_result) -> Iterator[int]:
    """Yield those descriptors of a process that lead to a file."""
    for descriptor in descriptors:
        with suppress(OSError):
            found = os.stat(f"/proc/{process}/fd/{descriptor}")
            if (found.st_dev, found.st_ino) == (of.st_dev, of.st_ino):
                yield descriptor


def _unix_peer(descriptor: int) -> set[int]:
    """Return the process that connected, or accepted, the other end of a Unix socket (unix(7))."""
    copy = _socket.socket(-1, -1, -1, os.dup(descriptor))
    try:
        if copy.family != _socket.AF_UNIX:
            return set()
        process, _, _ = struct.unpack("iII", copy.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12))
    finally:
        copy.close()
    return {process} if process > 0 else set()


def _address(text: str) -> str:
    """Return an address and port of `/proc/net/tcp6` as `/proc/net/tcp` writes it, if it is one of IPv4."""
    address, _, port = text.partition(":")
    return f"{address.removeprefix('0000000000000000FFFF0000') if len(address) == 32 else address}:{port}"


def numbers_in(folder: str) -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir(folder)]
    return []


def text_of(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except (OSError, ValueError):
        return ""
