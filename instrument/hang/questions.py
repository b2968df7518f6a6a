"""Carries a question from one rank to all: "what do you do at this moment?".

The store of torchrun counts the questions. Every rank reads this number once a second. It has its own connection for
that: a client of `TCPStore` is one socket with a lock, and a thread that waits for a key keeps the lock. The store may
be gone with the rank that serves it, or may not answer. So a question is also written to a file in the recording, and
a rank whose store does not answer reads this file.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from crossrank.atomic_file import whole_file
from crossrank.budget import BudgetError, read_small
from crossrank.errors import one_line
from crossrank.instrument import threads
from crossrank.instrument.log import log
from crossrank.instrument.store_requests import StoreRequests
from crossrank.instrument.unpatched import time
from crossrank.recording import ASKED

if TYPE_CHECKING:
    from torch.distributed import Store

_PAUSE, _PAUSE_IN_SILENCE = 1.0, 0.5
_PAUSE_PER_RANK = 4e-4
"""Seconds between two looks at the store, or the file: together, all ranks ask it at most 2,500 times per second."""
_SILENT = 2.5
"""Seconds without an answer of the store after which the file is read."""


class Questions:
    """The questions of one job."""

    def __init__(
        self,
        folder: Path,
        world_size: int,
        store: Callable[[], Store | None],
        calls: Callable[[], int] = lambda: 0,
        requests: StoreRequests | None = None,
        on_question: Callable[[], None] = lambda: None,
    ) -> None:
        """`store` returns the store of the job, None if it has none that outlives its process groups: torch logs a
        warning with a C++ stack for each connection to a store that has ended. A rank whose `calls` grow trains. A
        thread calls `on_question` when the store has a new question."""
        self._path = folder / ASKED
        self._key = f"crossrank/asked/{hashlib.sha256(str(folder).encode(errors='replace')).hexdigest()}"
        self._least_pause = world_size * _PAUSE_PER_RANK
        self._calls = calls
        self._on_question = on_question
        self._find_store = store
        self._store: Store | None = None
        self._requests = requests or StoreRequests()
        self._answered = -_SILENT
        """When the store answered last, on the monotonic clock."""
        self._stopped = False
        self._read_at = 0.0
        self._in_store = 0
        self._heard_in_store = 0
        self._heard_in_file = self._read()

    def start(self) -> None:
        threads.start("questions", self._listen, lost="this rank hears of hangs through the folder alone")

    def stop(self) -> None:
        """Stop to listen. A request to the store may be under way."""
        self._stopped = True

    def hear(self) -> bool:
        """Return whether a question was asked since the last time."""
        in_store, in_file = self._in_store, self._heard_in_file
        if not self._is_alive() and time.monotonic() - self._read_at >= max(_PAUSE, self._least_pause):
            in_file = self._read()
        is_new = (in_store, in_file) != (self._heard_in_store, self._heard_in_file)
        self._heard_in_store, self._heard_in_file = in_store, in_file
        return is_new

    def ask(self) -> None:
        """Ask all ranks, this one too. A rank that asks hears itself at once."""
        with contextlib.suppress(OSError), whole_file(self._path) as part:
            part.write_text(str(time.time_ns()))
        self._read_at = 0.0
        if self._is_alive():
            with contextlib.suppress(RuntimeError):
                self._add(1)

    def asked_at(self) -> int:
        """Return when the last question was asked, in ns since 1970 on the clock of the folder; 0 if none was."""
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return 0

    def _is_alive(self) -> bool:
        return time.monotonic() - self._answered < _SILENT

    def _read(self) -> bytes:
        self._read_at = time.monotonic()
        with contextlib.suppress(OSError, BudgetError):
            return read_small(self._path)
        return b""

    def _add(self, count: int) -> None:
        with self._requests.one() as may_ask:
            if may_ask and self._store is not None and not self._stopped:
                self._in_store = self._store.add(self._key, count)
                self._answered = time.monotonic()

    def _listen(self) -> None:
        try:
            with self._requests.one() as may_ask:
                store = self._find_store() if may_ask else None
                self._store = store.clone() if store is not None and hasattr(store, "clone") else None
                del store  # it may host the job's rendezvous, and would block the next process group
            self._add(0)
            self._heard_in_store = self._in_store
            before = -1
            while self._store is not None and not (self._stopped or self._requests.ended):
                trains, before = self._calls() != before, self._calls()
                time.sleep(max(_PAUSE if trains else _PAUSE_IN_SILENCE, self._least_pause))
                self._add(0)
                if self._in_store != self._heard_in_store:
                    self._on_question()
        except Exception as error:  # the rank that serves the store may be gone
            log.info("crossrank: questions about hangs come through the folder from here on: %s", one_line(error))
