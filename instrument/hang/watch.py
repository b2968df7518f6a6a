"""Notices that a rank makes no progress in communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from crossrank.instrument import threads
from crossrank.instrument.record.recorder import CurrentWait
from crossrank.instrument.unpatched import threading, time

_LOOKS = 8
"""Checks per patience."""
_LONGEST_PAUSE, _LONGEST_IN_SILENCE = 1.0, 0.25
"""Longest time between two checks, in seconds: the patience may become shorter."""


COUNT_ANEW = 0.0
"""Result of `on_hang` if the time without calls so far is not a hang: the count starts again."""


class HangWatch:
    """Calls `on_hang(seconds, None)` when this rank has made no progress for `patience()` seconds.

    A thread checks a few times per patience whether a call has started. After half of the patience without one, it also
    asks torch how many calls have finished. If neither number changes for all of it, the hang is reported, once until
    the next call. `on_early(seconds)` is called `early()` seconds before that, or after half of the patience.
    A thread may wait while others make calls. Then `on_hang(seconds, wait)` is called when its wait has lasted so long.
    The thread calls `on_look` at each check, and `on_calls` if calls have started since the last one.
    Every rank of a hung job does this independently, also the rank that the others wait for and a rank that never makes
    a call. The patience may change: a group with a shorter timeout may be created. The thread ends after `stop`.
    """

    def __init__(
        self,
        patience: Callable[[], float],
        *,
        calls: Callable[[], int],
        completed: Callable[[], int],
        on_hang: Callable[[float, CurrentWait | None], float | None],
        waits: Callable[[], Iterable[CurrentWait]] = lambda: (),
        on_calls: Callable[[], None] = lambda: None,
        on_look: Callable[[], None] = lambda: None,
        early: Callable[[], float] = lambda: 0.0,
        on_early: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._patience = patience
        self._calls = calls
        self._completed = completed
        self._on_hang = on_hang
        self._waits = waits
        self._on_calls = on_calls
        self._on_look = on_look
        self._early = early
        self._on_early = on_early
        self._held: dict[CurrentWait, tuple[float, float]] = {}
        """Wait under way -> when it began, and after how many seconds to report it next."""
        self._stopped = False  # no Event: a signal handler may interrupt the thread that has its lock
        self._woken = threading.Event()

    def start(self) -> None:
        self._stopped = threads.start("watchdog", self._watch, lost="hangs are no longer watched for") is None

    def stop(self) -> None:
        self._stopped = True

    def wake(self) -> None:
        """Check at once. For threads of the recorder: see `_stopped`."""
        self._woken.set()

    def _watch(self) -> None:
        calls, since = self._calls(), time.monotonic()
        completed: int | None = None
        reported, is_early, again = False, False, None
        waits: set[CurrentWait] = set()
        trains = True
        while not self._stopped:
            patience = self._patience()
            self._woken.wait(min(patience / _LOOKS, _LONGEST_PAUSE if trains else _LONGEST_IN_SILENCE))
            self._woken.clear()
            if self._stopped:
                return
            now = time.monotonic()
            if trains := self._calls() != calls:
                self._on_calls()
                calls, since, completed, reported, is_early = self._calls(), now, None, False, False
                waits.clear()
                self._on_look()
                self._look_at_waits(now, patience)
                continue
            self._held.clear()
            self._on_look()
            if reported and not waits.issuperset(self._waits()):
                since, completed, reported, is_early = now, None, False, False
            reported = reported and (again is None or now - since < again)
            if reported or now - since < patience / 2:
                continue
            over = self._completed()
            if completed is not None and over != completed:
                since, is_early = now, False
            completed = over
            if not is_early and now - since >= patience - self._early():
                is_early = True
                self._on_early(now - since)
            if now - since >= patience and not self._stopped:
                reported, is_early, waits = True, False, waits.union(self._waits())
                again = self._on_hang(now - since, None)
                if again == COUNT_ANEW:
                    since, completed, reported, again = time.monotonic(), None, False, None

    def _look_at_waits(self, now: float, patience: float) -> None:
        """Report the waits that last although other threads make calls."""
        held = {wait: self._held.get(wait, (now, patience)) for wait in self._waits()}
        for wait, (began, due) in held.items():
            if now - began >= due and not self._stopped:
                again = self._on_hang(now - began, wait)
                held[wait] = (now, patience) if again == COUNT_ANEW else (began, again or math.inf)
                break
        self._held = held
