"""Reports where a rank is, and ends its process when it cannot go on.

A collective that waits for a dead rank cannot be left in any other way.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from crossrank.replay.run.executor import IDLE, CpuExecutor
from crossrank.replay.run.messages import State
from crossrank.replay.run.rendezvous import Rendezvous
from crossrank.text import printable

_LOOK_S = 0.1
"""Between two looks whether all have to end; longer where thousands would keep the store busy."""
_LONGEST_LOOK_S = 0.5
_BEAT_S = 0.5
FINAL_REPORT_S = 0.25
"""How long a rank that has to end waits for the others to tell where they are."""


class Watch(threading.Thread):
    """Reports to the store where the rank is, and ends the process where it cannot go on."""

    def __init__(
        self, rank: int, rendezvous: Rendezvous, final_report: Callable[[], None], term: int | None, limit_s: float
    ) -> None:
        """After `limit_s` without progress the process ends, and when `term` can be read."""
        super().__init__(name="crossrank-watch", daemon=True)
        self._rank = rank
        self._rendezvous = rendezvous
        self._final_report = final_report
        self._term = term
        self._limit_s = limit_s
        self._executor: CpuExecutor | None = None
        self._over = threading.Event()
        self._look_s = min(_LOOK_S * max(1.0, rendezvous.world_size / 64), _LONGEST_LOOK_S)
        self.phase("joining")

    def phase(self, text: str) -> None:
        """Note what the rank does from now on."""
        self._state = State(phase=text)
        self._since = time.monotonic()

    def follow(self, executor: CpuExecutor) -> None:
        """Watch the progress of `executor` from now on."""
        self._executor = executor

    def stop(self) -> None:
        self._over.set()
        self.join()

    def fail(self, error: str) -> None:
        """Report what ended the rank, and that all have to end."""
        self.stop()
        try:
            self._report(error=error)
            self._rendezvous.abort()
        except RuntimeError:  # the store is gone with its host
            text = printable(f"crossrank: rank {self._rank} was {self._state.phase}: {error}")
            print(text, file=sys.stderr, flush=True)

    def run(self) -> None:
        last_progress, last_report = [-2], 0.0
        while not self._over.is_set():
            ended = self._wait()
            now, call = time.monotonic(), self._call()
            progress = list(self._executor.progress) if self._executor is not None else [call]
            if progress != last_progress:
                last_progress, self._since = progress, now
            try:
                if now - last_report > _BEAT_S:
                    self._report()
                    last_report = now
                if now - self._since > self._limit_s and self._state.phase != "done":
                    self._report(error=f"made no progress for {now - self._since:.0f} s")
                    self._rendezvous.abort()
                    self._end()
                if ended or self._rendezvous.aborted():
                    self._report(asked_to_end=True)
                    self._end()
            except RuntimeError:  # the store is gone, and with it the replay
                if self._over.is_set():
                    return
                text = f"crossrank: rank {self._rank} lost the others while {self._state.phase}, in call {call}"
                print(text, file=sys.stderr, flush=True)
                os._exit(1)

    def _wait(self) -> bool:
        """A moment; True where the launcher asks the process to end."""
        if self._term is not None:
            return bool(select.select([self._term], [], [], self._look_s)[0])
        self._over.wait(self._look_s)
        return False

    def _report(self, *, error: str = "", asked_to_end: bool = False) -> None:
        state = msgspec.structs.replace(self._state, call=self._call(), error=error, asked_to_end=asked_to_end)
        self._rendezvous.put(f"state/{self._rank}", state)

    def _end(self) -> None:
        if self._over.is_set():
            return  # the rank's own failure is being reported
        time.sleep(FINAL_REPORT_S)
        self._final_report()
        os._exit(1)

    def _call(self) -> int:
        return self._executor.progress[0] if self._executor is not None else IDLE
