"""Notices that nothing is communicated any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from crossrank.instrument import threads

_LOOKS = 8
"""Looks per patience."""
_LONGEST_PAUSE = 0.5
"""Seconds between two looks: the patience may have become shorter."""


COUNT_ANEW = 0.0
"""What `on_hang` returns where the silence so far is no sign of a hang: it counts from now on."""


class HangWatch:
    """Calls `on_hang(seconds)` when nothing has been communicated for `patience()` seconds.

    A thread looks a few times per patience whether a call was begun. When none was for half of it it also asks torch
    how many calls are over. When neither moves for all of it the hang is reported, once until the next call. Where
    calls were begun since the last look, `on_look` is called.
    Every rank of a hung job does so on its own, also the one that the others wait for, and one that never comes to its
    first call. The patience may change: a group with a shorter timeout may be made. The thread ends after `stop`.
    """

    def __init__(
        self,
        patience: Callable[[], float],
        *,
        calls: Callable[[], int],
        completed: Callable[[], int],
        on_hang: Callable[[float], float | None],
        waits: Callable[[], Iterable[tuple[int, int]]] = lambda: (),
        on_calls: Callable[[], None] = lambda: None,
        on_silence: Callable[[], None] = lambda: None,
    ) -> None:
        self._patience = patience
        self._calls = calls
        self._completed = completed
        self._on_hang = on_hang
        self._waits = waits
        self._on_calls = on_calls
        self._on_silence = on_silence
        self._stopped = False  # a plain flag: an Event's lock may be held by what a signal handler interrupts

    def start(self) -> None:
        self._stopped = threads.start("watchdog", self._watch, lost="hangs are no longer watched for") is None

    def stop(self) -> None:
        self._stopped = True

    def _watch(self) -> None:
        calls, since = self._calls(), time.monotonic()
        completed: int | None = None
        reported, again = False, None
        waits: set[tuple[int, int]] = set()
        while not self._stopped:
            patience = self._patience()
            time.sleep(min(patience / _LOOKS, _LONGEST_PAUSE))
            now = time.monotonic()
            if self._calls() != calls:
                self._on_calls()
                calls, since, completed, reported = self._calls(), now, None, False
                waits.clear()
                continue
            self._on_silence()
            if reported and not waits.issuperset(self._waits()):
                since, completed, reported = now, None, False
            reported = reported and (again is None or now - since < again)
            if reported or now - since < patience / 2:
                continue
            over = self._completed()
            if completed is not None and over != completed:
                since = now
            completed = over
            if now - since >= patience and not self._stopped:
                reported, waits = True, waits.union(self._waits())
                again = self._on_hang(now - since)
                if again == COUNT_ANEW:
                    since, completed, reported, again = time.monotonic(), None, False, None
