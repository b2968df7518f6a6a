"""What a rank did while others waited: its own account between two looks, and what a neighbour saw of it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from crossrank.comm import Int, Number
from crossrank.errors import BROKEN
from crossrank.privacy import Privacy
from crossrank.recording import ReadIssues, read_chunks
from crossrank.tools.traces.flight.entries import MANY, Text

Seconds = Annotated[float, msgspec.Meta(ge=0), Privacy.NUMBER]


class HeldWait(msgspec.Struct, frozen=True):
    """A wait that lasted from one look to the other."""

    id: Number
    """Id of the call; -1 = unknown."""
    thread: Number


class ThreadActivity(msgspec.Struct, frozen=True, kw_only=True):
    """What a thread did between two looks."""

    id: Number
    name: Annotated[Text, Privacy.THREAD] = ""
    cpu_ns: Number = 0
    bytes: Number = 0
    """Bytes read and written."""
    blocked_in: Annotated[Text, Privacy.WORD] = ""
    """The system call that it was in at the second look; empty if it ran, or if that is unknown."""
    lock_of: Number | None = None
    """The process that holds the file lock that it waits for."""


class ChildActivity(msgspec.Struct, frozen=True, kw_only=True):
    """What a child process did between two looks."""

    id: Number
    name: Annotated[Text, Privacy.THREAD] = ""
    cpu_ns: Number = 0


class RankActivity(msgspec.Struct, frozen=True, kw_only=True):
    """What a process did between two looks."""

    seconds: Seconds
    calls: Number = 0
    """Calls that it made."""
    completed: Number = 0
    """Calls that finished, as torch counts them."""
    held: Annotated[list[HeldWait], MANY] = []
    threads: Annotated[list[ThreadActivity], MANY] = []
    children: Annotated[list[ChildActivity], MANY] = []

    @property
    def has_communicated(self) -> bool:
        return bool(self.calls or self.completed)


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What another rank of the node saw of a process that does not answer: `rank-N.seen.json.zst`."""

    rank: Number
    by: Number
    """The rank that looked."""
    time_ns: Annotated[Int, Privacy.WALL]
    seconds: Seconds
    """Time between two looks."""
    process: Number
    state: Annotated[str, msgspec.Meta(max_length=1), Privacy.WORD]
    """A letter of `/proc/PID/stat`: `T` = stopped, `X` = it has ended; else it lives."""
    cpu_ns: Number = 0
    """CPU time between the looks, in ticks of the system (10 ms)."""
    frozen: bool = False
    """Its control group is frozen."""


def read_seen(path: str) -> Seen | None:
    """Return what was seen of a rank; None if the file cannot be used."""
    try:
        return msgspec.json.decode(b"".join(read_chunks(path, ReadIssues(path))), type=Seen)
    except (OSError, *BROKEN):
        return None
