"""Detects whether the main thread moves while this rank makes no calls. Then the rank is slow: it computes or saves.
Also detects whether the thread computes in one long call of C++."""

from __future__ import annotations

import sys
from types import FrameType

from crossrank.instrument.unpatched import threading, time

_MOST_FRAMES = 64
_FEWEST_LOOKS = 3
_SHARE = 1 / 8
"""Share of looks that must find the thread at another line than the look before: a thread that polls moves now and
then, one that computes moves nearly always."""


class MainThread:
    """Counts how often the main thread has moved since the last call of this rank."""

    def __init__(self) -> None:
        self._last: tuple[int, ...] = ()
        self._looks = self._moves = 0
        self._since: tuple[float, float] | None = None
        """Seconds of wall-clock time and of CPU time at the first look."""

    def look(self) -> None:
        found = _find_position()
        self._looks += 1
        self._moves += self._last not in ((), found)
        self._last = found
        if self._since is None:
            self._since = _read_clocks()

    def forget(self) -> None:
        """Start again after a call of this rank."""
        self._last, self._looks, self._moves, self._since = (), 0, 0, None

    @property
    def moves(self) -> bool:
        return self._looks >= _FEWEST_LOOKS and self._moves >= max(2, self._looks * _SHARE)

    @property
    def busy(self) -> float | None:
        """Share of the time since the first look in which the thread used a CPU; None if unknown."""
        since, now = self._since, _read_clocks()
        if since is None or now is None:
            return None
        elapsed, used = (end - begin for begin, end in zip(since, now, strict=True))
        return round(min(used / elapsed, 1.0), 3) if elapsed > 0 else None


def _read_clocks() -> tuple[float, float] | None:
    try:
        clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        return time.monotonic(), time.clock_gettime(clock)
    except (OSError, AttributeError):  # not on every system
        return None


def _find_position() -> tuple[int, ...]:
    """Return the code and line of each frame of the main thread, innermost first."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    found: list[int] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found += (id(frame.f_code), frame.f_lineno)
        frame = frame.f_back
    return tuple(found)
