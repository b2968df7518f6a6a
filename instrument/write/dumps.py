"""When the flight recorder is dumped, and which dump stays: at a hang, a window's end, a signal, the end.

Dumps of one rank go to one file. What was written of a hang is kept until communication goes on, for after gloo's
timeout the call that failed looks completed.
"""

from __future__ import annotations

import logging
import socket
import threading
from typing import TYPE_CHECKING, Any

from crossrank.instrument.write import flight_dump, process_lock
from crossrank.instrument.write.comms_writer import clock
from crossrank.instrument.write.watchdog import HangWatch
from crossrank.recording import FLIGHT, file_name

if TYPE_CHECKING:
    from crossrank.instrument.session import Session

log = logging.getLogger("crossrank")

_PATIENCE = 10.0
"""Seconds that the end of a recording waits for a dump that another thread is writing."""


class FlightDumps:
    """The dumps of one session. `write` may be called from any thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        # Two threads may be asked at once. A fatal signal may meet its own thread in here, which is not going on then.
        self._once = threading.RLock()
        self._writing = False
        self._watch: HangWatch | None = None
        self._calls_at_hang: int | None = None
        self._voice: process_lock.ProcessLock | None = None

    def write(self, reason: str) -> None:
        """Write torch's flight recorder as it stands now."""
        session = self._session
        files = session.files
        # At the end another thread's dump is waited for: it would die with the process before it is written.
        patience = 0 if reason == "SIGUSR1" else _PATIENCE
        if files is None or not session.config.flight or not self._once.acquire(timeout=patience):
            return
        try:
            if self._writing and reason == "SIGUSR1":  # this thread is at it
                return
            self._writing = True
            calls = session.recorder.calls()
            if reason not in ("hang", "SIGUSR1") and calls == self._calls_at_hang:
                return
            with session.reported("the flight recorder was not dumped"):
                files.write(file_name(FLIGHT, session.rank), flight_dump.dump(self._moment(reason)))
                if reason == "hang":
                    self._calls_at_hang = calls
        finally:
            self._writing = False
            self._once.release()

    def watch(self) -> None:
        """Watch for hangs from now on, where that is asked for."""
        config = self._session.config
        if self._watch is None and config.hang_seconds > 0 and config.flight:
            self._watch = HangWatch(
                self._patience,
                calls=self._session.recorder.calls,
                completed=flight_dump.completed,
                on_hang=self._on_hang,
                on_end=self._go_on,
            )
            self._watch.start()

    def _patience(self) -> float:
        """Seconds without communication that are taken for a hang.

        At most half of the shortest timeout of a process group: at the timeout itself the job is aborted.
        """
        timeout = self._session.groups.shortest_timeout()
        seconds = self._session.config.hang_seconds
        return seconds if timeout is None else min(seconds, timeout / 2)

    def stop_watching(self) -> None:
        """No hang is noticed after this."""
        if self._watch is not None:
            self._watch.stop()
        self._go_on()

    def _go_on(self) -> None:
        """Communication goes on: of the next silence another rank may speak."""
        voice, self._voice = self._voice, None
        if voice is not None:
            voice.release()

    def _on_hang(self, seconds: float) -> None:
        session = self._session
        if session.files is None or not session.is_current_world():
            return
        self.write("hang")
        folder = session.files.folder
        # A long evaluation or checkpoint is silent as well, on every rank: one rank of a node says so, and once.
        self._voice = process_lock.take(f"no communication in {folder}")
        if self._voice is not None:
            log.warning(
                "crossrank: no communication for %.3g s (rank %d): what every rank did last is in %s. If the job "
                "hangs, `crossrank diagnose %s` says who waits for whom",
                seconds,
                session.rank,
                folder,
                folder,
            )

    def _moment(self, reason: str) -> dict[str, Any]:
        """What a dump says about itself: `Moment` of the tools' reader."""
        session = self._session
        now = clock()
        exceptions = session.exceptions(reason)
        return {
            "rank": session.rank,
            "world_size": session.world_size,
            "host": socket.gethostname(),
            "reason": reason,
            "error": exceptions[0]["error"] if exceptions else None,
            "exceptions": exceptions,
            "time_ns": now["wall"],
            "clock": now,
            "groups": session.groups.describe(),
            "calls": session.writer.recent() if session.writer is not None else [],
            "stacks": flight_dump.stacks(),
        }
