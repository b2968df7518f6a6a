"""Threads of the recorder: daemons, by whose names dumps leave them out."""

from __future__ import annotations

import threading
from collections.abc import Callable

PREFIX = "crossrank-"


def start(name: str, work: Callable[[], object]) -> threading.Thread | None:
    """Do `work` on a thread; None where Python (from 3.12) starts none because the interpreter shuts down."""
    thread = threading.Thread(target=work, name=PREFIX + name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
