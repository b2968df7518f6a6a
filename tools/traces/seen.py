"""What was seen of a rank that does not answer, by another rank of its node or by a thread of its own in C++."""

from __future__ import annotations

from typing import Annotated

import msgspec

from crossrank.comm import Int, Number
from crossrank.errors import BROKEN
from crossrank.privacy import Privacy
from crossrank.recording import ReadIssues, read_chunks
from crossrank.tools.traces.activity import Seconds
from crossrank.tools.traces.flight.dump import Frames


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
    frames: Frames = []
    """Frames of its main thread, innermost first; only if the process itself wrote this, without its Python."""


def read_seen(path: str) -> Seen | None:
    """Return what was seen of a rank; None if the file cannot be used."""
    try:
        return msgspec.json.decode(b"".join(read_chunks(path, ReadIssues(path))), type=Seen)
    except (OSError, *BROKEN):
        return None
