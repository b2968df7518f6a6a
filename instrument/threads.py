"""Threads of the recorder. They are daemons, and dumps skip them by their name."""

from __future__ import annotations

from collections.abc import Callable

from crossrank.instrument.log import report
from crossrank.instrument.signal_mask import leave_signals_to_script
from crossrank.instrument.unpatched import threading

PREFIX = "crossrank-"


def start(
    name: str, work: Callable[[], object], lost: str = "a part of the recording is lost"
) -> threading.Thread | None:
    """Do `work` on a thread. Return None if Python (3.12 or later) starts no thread because the interpreter shuts down.

    An error is logged as one line that begins with `lost`.
    """

    def run() -> None:
        leave_signals_to_script()
        try:
            work()
        except Exception as error:
            report(lost, error)

    thread = threading.Thread(target=run, name=PREFIX + name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
