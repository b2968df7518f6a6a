"""Notices that a rank has stopped communicating, and has its state written down while it still hangs.

A thread looks a few times per patience whether a call was begun. When none was for half of it it also asks torch
how many calls are over. When neither moves for all of it the flight recorder is dumped, once until the next
call. Every rank of a hung job does so on its own, also the one that the others wait for, and one that never comes to
its first call. After gloo's own timeout the call that failed looks completed, so the dump has to be taken before it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from crossrank.errors import one_line
from crossrank.instrument import threads

log = logging.getLogger("crossrank")

_LOOKS = 8
"""Looks per patience."""
_LONGEST_PAUSE = 0.5
"""Seconds between two looks: the patience may have become shorter."""


class HangWatch:
    """Calls `on_hang(seconds)` when nothing has been communicated for `patience()` seconds.

    The patience may change: a group with a shorter timeout may be made. The thread ends after `stop`.
    """

    def __init__(
        self,
        patience: Callable[[], float],
        *,
        calls: Callable[[], int],
        completed: Callable[[], int],
        on_hang: Callable[[float], None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._patience = patience
        self._calls = calls
        self._completed = completed
        self._on_hang = on_hang
        self._on_end = on_end  # called when calls are made again
        self._stopped = False  # a plain flag: an Event's lock may be held by what a signal handler interrupts

    def start(self) -> None:
        self._stopped = threads.start("watchdog", self._run) is None

    def stop(self) -> None:
        self._stopped = True

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:
            log.warning("crossrank: hangs are no longer watched for: %s", one_line(error))

    def _watch(self) -> None:
        calls, since = self._calls(), time.monotonic()
        completed: int | None = None
        reported = False
        while not self._stopped:
            patience = self._patience()
            time.sleep(min(patience / _LOOKS, _LONGEST_PAUSE))
            now = time.monotonic()
            if self._calls() != calls:
                if reported:
                    self._on_end()
                calls, since, completed, reported = self._calls(), now, None, False
                continue
            if reported or now - since < patience / 2:
                continue
            over = self._completed()
            if completed is not None and over != completed:
                since = now
            completed = over
            if now - since >= patience and not self._stopped:
                reported = True
                self._on_hang(now - since)
