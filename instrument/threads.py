"""Threads of the recorder: daemons, by whose names dumps leave them out."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

from crossrank.instrument.log import report

PREFIX = "crossrank-"


def start(name: str, work: Callable[[], object], lost: str = "a part of the recording is lost") -> Thread | None:
    """Do `work` on a thread; None where Python (from 3.12) starts none because the interpreter shuts down.

    An error of it is one line that begins with what is `lost` then.
    """

    def run() -> None:
        try:
            work()
        except Exception as error:
            report(lost, error)

    thread = Thread(target=run, name=PREFIX + name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
