"""Reports the state of a rank, and ends its process if it cannot continue.

A collective that waits for a dead rank cannot be left in another way.
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

_CHECK_S = 0.1
"""Time between two checks whether all ranks have to end. With thousands of ranks it is longer, to relieve the store."""
_MAX_CHECK_S = 0.5
_REPORT_S = 0.5
_MOST_TEXT = 4000
"""Characters of an error in a state."""
FINAL_REPORT_S = 0.25
"""How long a rank that has to end waits for the others to report their state."""


class Watch(threading.Thread):
    """Reports the state of the rank to the store, and ends the process if it cannot continue."""

    def __init__(
        self, rank: int, rendezvous: Rendezvous, final_report: Callable[[], None], term: int | None, limit_s: float
    ) -> None:
        """The process ends after `limit_s` without progress, or when `term` becomes readable."""
        super().__init__(name="crossrank-watch", daemon=True)
        self._rank = rank
        self._rendezvous = rendezvous
        self._final_report = final_report
        self._term = term
        self._limit_s = limit_s
        self._executor: CpuExecutor | None = None
        self._ended = threading.Event()
        self._check_s = min(_CHECK_S * max(1.0, rendezvous.world_size / 64), _MAX_CHECK_S)
        self.phase("joining")

    def phase(self, text: str) -> None:
        """Note what the rank does from now on."""
        self._state = State(phase=text)
        self._since = time.monotonic()

    def follow(self, executor: CpuExecutor) -> None:
        """Watch the progress of `executor` from now on."""
        self._executor = executor

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def fail(self, error: str) -> None:
        """Report the error that ended the rank, and that all ranks have to end."""
        self.stop()
        try:
            self._report(error=error)
            self._rendezvous.abort()
        except RuntimeError:  # the store ended with its host
            text = printable(f"crossrank: rank {self._rank} was {self._state.phase}: {error}")
            print(text, file=sys.stderr, flush=True)

    def run(self) -> None:
        last_progress, last_report = [-2], 0.0
        while not self._ended.is_set():
            ended = self._wait_for_term()
            now, call = time.monotonic(), self._current_call()
            progress = list(self._executor.progress) if self._executor is not None else [call]
            if progress != last_progress:
                last_progress, self._since = progress, now
            try:
                if now - last_report > _REPORT_S:
                    self._report()
                    last_report = now
                if now - self._since > self._limit_s and self._state.phase != "done":
                    self._report(error=f"made no progress for {now - self._since:.0f} s")
                    self._rendezvous.abort()
                    self._end_process()
                if ended or self._rendezvous.aborted():
                    self._report(asked_to_end=True)
                    self._end_process()
            except RuntimeError:  # the store ended, and the replay with it
                if self._ended.is_set():
                    return
                text = f"crossrank: rank {self._rank} lost the others while {self._state.phase}, in call {call}"
                print(text, file=sys.stderr, flush=True)
                os._exit(1)

    def _wait_for_term(self) -> bool:
        """Wait for a moment. Return whether the launcher asks the process to end."""
        if self._term is not None:
            return bool(select.select([self._term], [], [], self._check_s)[0])
        self._ended.wait(self._check_s)
        return False

    def _report(self, *, error: str = "", asked_to_end: bool = False) -> None:
        call, error = self._current_call(), error[:_MOST_TEXT]
        state = msgspec.structs.replace(self._state, call=call, error=error, asked_to_end=asked_to_end)
        self._rendezvous.put(f"state/{self._rank}", state)

    def _end_process(self) -> None:
        if self._ended.is_set():
            return  # the rank's own failure is being reported
        time.sleep(FINAL_REPORT_S)
        self._final_report()
        os._exit(1)

    def _current_call(self) -> int:
        return self._executor.progress[0] if self._executor is not None else IDLE
