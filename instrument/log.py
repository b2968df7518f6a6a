"""The recorder's only logger: each failure of the recorder is one line.

Only one rank of a job prints a warning that several ranks have. Before a rank prints a warning, it asks the job's store
whether another rank has printed the same text. If there is no store, or no answer, the rank prints the warning. The
other ranks log it at level INFO.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from collections.abc import Callable

from crossrank.errors import one_line
from crossrank.instrument.signal_mask import leave_signals_to_script
from crossrank.instrument.unpatched import threading, time

log = logging.getLogger("crossrank")

ONE_RANK = {"one_rank": True}
"""`extra` of a warning that only one rank of the job has: it is printed at once."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PATIENCE = 3.0
"""Seconds to wait for the store: a thread that hangs in it blocks it for all threads of the process."""


class _OncePerJob(logging.Filter):
    """Passes a warning on only one rank of the job."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[logging.LogRecord] | None = None
        self._is_first: Callable[[str], bool] | None = None
        self._asking: list[threading.Thread] = []
        self._times: Counter[str] = Counter()  # how often this rank has logged a text, in all recordings
        self.said_full = False  # whether this recording has logged that the disk is full
        self._lock = threading.RLock()

    def hold(self, ranks: int) -> None:
        """Keep warnings until the job is known. `ranks`: the size of the process group, 1 if there is none."""
        self.said_full = False
        if ranks > 1 or os.environ.get("WORLD_SIZE", "1") != "1":
            self._held = []

    def join(self, is_first: Callable[[str], bool] | None) -> None:
        """The job is known: log the kept warnings. `is_first` returns whether no other rank has logged a text, which
        begins with its number on this rank. None if the job has one rank."""
        with self._lock:
            held, self._held, self._is_first = self._held or [], None, is_first
        for record in held:
            log.handle(record)

    def leave(self) -> None:
        """The recording has ended: wait for the questions to the store that are under way."""
        self.join(self._is_first)
        until = time.monotonic() + _PATIENCE + 1
        for thread in self._asking:
            thread.join(max(0.0, until - time.monotonic()))
        self.forget()

    def forget(self) -> None:
        """Print every warning from now on."""
        self._held, self._is_first, self._asking = None, None, []

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING or getattr(record, "one_rank", False):
            return True
        text = record.getMessage()
        with self._lock:
            if self._held is not None:
                self._held.append(record)
                return False
            self._times[text] += 1
            is_first, text = self._is_first, f"{self._times[text]} {text}"
        if is_first is None:
            return True
        arguments = (record, lambda: is_first(text))
        speaker = threading.Thread(target=self._say, args=arguments, name="crossrank-warning", daemon=True)
        try:
            speaker.start()
        except RuntimeError:  # the interpreter shuts down
            return True
        self._asking.append(speaker)
        return False

    def _say(self, record: logging.LogRecord, is_first: Callable[[], bool]) -> None:
        leave_signals_to_script()
        answers: list[bool] = []

        def ask() -> None:
            try:
                answers.append(is_first())
            except Exception:  # the store is gone
                answers.append(True)

        asker = threading.Thread(target=ask, name="crossrank-warning", daemon=True)
        asker.start()
        asker.join(_PATIENCE)
        if False in answers:
            log.info("%s (another rank says so as well)", record.getMessage())
        else:
            record.one_rank = True
            log.handle(record)


once_per_job = _OncePerJob()
log.addFilter(once_per_job)


def report(consequence: str, error: Exception) -> None:
    """Log in one line what failed and what it means for the recording. A full disk makes every write fail, on every
    rank: that is one line in all."""
    if not (isinstance(error, OSError) and error.errno in _FULL):
        log.warning("crossrank: %s: %s", consequence, one_line(error))
    elif not once_per_job.said_full:
        once_per_job.said_full = True
        log.warning(
            "crossrank: the disk of the recording is full: data that does not fit is lost. Training continues. Free "
            "space there, or set another folder with TRACING_DIR"
        )
