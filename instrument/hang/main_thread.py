"""Whether the main thread of this rank moves while it communicates nothing: then it computes, or saves, and is slow;
and whether it computes in one long call of C++."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType

_MOST_FRAMES = 64
_FEWEST_LOOKS = 3
_SHARE = 1 / 8
"""Of the looks at a thread, so many that find it elsewhere than the look before: one that polls is found elsewhere now
and then, one that computes nearly always."""


class MainThread:
    """Where the main thread was at each look since the last call of this rank."""

    def __init__(self) -> None:
        self._last: tuple[int, ...] = ()
        self._looks = self._moves = 0
        self._since: tuple[float, float] | None = None
        """Seconds of the clock, and of a processor, at the first look."""

    def look(self) -> None:
        found = _place()
        self._looks += 1
        self._moves += self._last not in ((), found)
        self._last = found
        if self._since is None:
            self._since = _clocks()

    def forget(self) -> None:
        """A call was made: what was seen before it says nothing of the silence after it."""
        self._last, self._looks, self._moves, self._since = (), 0, 0, None

    @property
    def moves(self) -> bool:
        return self._looks >= _FEWEST_LOOKS and self._moves >= max(2, self._looks * _SHARE)

    @property
    def busy(self) -> float | None:
        """Share of the silence in which it had a processor; None where that is not known."""
        since, now = self._since, _clocks()
        if since is None or now is None:
            return None
        elapsed, used = (end - begin for begin, end in zip(since, now, strict=True))
        return round(min(used / elapsed, 1.0), 3) if elapsed > 0 else None


def _clocks() -> tuple[float, float] | None:
    try:
        clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        return time.monotonic(), time.clock_gettime(clock)
    except (OSError, AttributeError):  # not on every system
        return None


def _place() -> tuple[int, ...]:
    """The code and the line of each frame, innermost first."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    found: list[int] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found += (id(frame.f_code), frame.f_lineno)
        frame = frame.f_back
    return tuple(found)
