"""Requests of crossrank's threads to the store of the job.

Before Python 3.14, a thread that returns from C++ while the interpreter shuts down ends the process with SIGABRT. So
the end of a recording waits for the request under way, and no other one begins after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from crossrank.instrument.unpatched import threading

_LONGEST = 3.0
"""Seconds that the end of a recording waits for an answer of the store."""


class StoreRequests:
    """The requests of one thread, one at a time."""

    def __init__(self) -> None:
        self._under_way = threading.Lock()
        self.ended = False

    @contextlib.contextmanager
    def one(self) -> Iterator[bool]:
        """Yield whether a request may be made, which must return before the block ends."""
        with self._under_way:
            yield not self.ended

    def end(self, *, wait: bool = True) -> None:
        """Allow no more requests. With `wait`, wait a few seconds for the one under way."""
        self.ended = True
        if wait and self._under_way.acquire(timeout=_LONGEST):
            self._under_way.release()
