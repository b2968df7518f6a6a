"""The recorder's only logger: whatever it cannot do is logged there as one line.

What the ranks of a job have in common one of them says: before a warning is printed, the job's store is asked whether
another rank has printed the same text. Where the store cannot be asked, or does not answer, the rank prints it itself.
The others have the line at level INFO.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from threading import RLock, Thread

from crossrank.errors import one_line

log = logging.getLogger("crossrank")

ONE_RANK = {"one_rank": True}
"""`extra` of a warning that one rank of the job alone has: it is printed at once."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PATIENCE = 3.0
"""Seconds that the store may take: a rank that hangs in it keeps it from all threads of its process."""


class _OncePerJob(logging.Filter):
    """Lets a warning pass on one rank of the job."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[logging.LogRecord] | None = None
        self._is_first: Callable[[str], bool] | None = None
        self._asking: list[Thread] = []
        self._times: Counter[str] = Counter()  # how often this rank has said a text, in whichever recording
        self.said_full = False  # that the disk is full, in this recording
        self._lock = RLock()

    def hold(self, ranks: int) -> None:
        """Keep what the ranks have to say until their job is known. `ranks`: so many has the process group, if any."""
        self.said_full = False
        if ranks > 1 or os.environ.get("WORLD_SIZE", "1") != "1":
            self._held = []

    def join(self, is_first: Callable[[str], bool] | None) -> None:
        """The job is known: `is_first` says whether no other rank has said a text, with how often this one has before
        it. None where there is one rank."""
        with self._lock:
            held, self._held, self._is_first = self._held or [], None, is_first
        for record in held:
            log.handle(record)

    def leave(self) -> None:
        """The recording has ended: what is still asked for is waited for."""
        self.join(self._is_first)
        until = time.monotonic() + _PATIENCE + 1
        for thread in self._asking:
            thread.join(max(0.0, until - time.monotonic()))
        self.forget()

    def forget(self) -> None:
        """Print whatever comes from now on."""
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
        speaker = Thread(target=self._say, args=arguments, name="crossrank-warning", daemon=True)
        try:
            speaker.start()
        except RuntimeError:  # the interpreter shuts down
            return True
        self._asking.append(speaker)
        return False

    def _say(self, record: logging.LogRecord, is_first: Callable[[], bool]) -> None:
        answers: list[bool] = []

        def ask() -> None:
            try:
                answers.append(is_first())
            except Exception:  # the store is gone
                answers.append(True)

        asker = Thread(target=ask, name="crossrank-warning", daemon=True)
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
    """One line about what failed and what it means for the recording. Of a full disk everything fails that writes, on
    every rank: that is one line for all of it."""
    if not (isinstance(error, OSError) and error.errno in _FULL):
        log.warning("crossrank: %s: %s", consequence, one_line(error))
    elif not once_per_job.said_full:
        once_per_job.said_full = True
        log.warning(
            "crossrank: the disk of the recording is full: data that does not fit is lost. Training continues. Free "
            "space there, or set another folder with TRACING_DIR"
        )
