"""What a rank did between two looks, while others waited: its own account."""

from __future__ import annotations

from typing import Annotated

import msgspec

from crossrank.comm import Number
from crossrank.privacy import Privacy
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
    released_by: Annotated[list[Number], MANY] = []
    """Processes of its node that can end this: the holder of a file lock, or those that have the other end of a pipe or
    socket. Empty if that is unknown."""
    timed: bool = False
    """The system call ends by itself after some time."""


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
