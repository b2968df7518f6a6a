"""The normal end of a process: `atexit`, and multiprocessing's finalizers in its workers.

Forked workers of multiprocessing leave through `os._exit`: `atexit` does not run there, finalizers do.
"""

from __future__ import annotations

import atexit
import logging
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

from crossrank.errors import one_line
from crossrank.instrument.script_errors import raised_by_script

if TYPE_CHECKING:
    from crossrank.instrument.session import Session

log = logging.getLogger("crossrank")

_session: Session | None = None
_finalizers: list[Finalize] = []


def install(session: Session) -> None:
    global _session
    _session = session
    atexit.register(_at_exit)
    _finalizers.append(Finalize(None, _at_exit, exitpriority=0))


def uninstall() -> None:
    global _session
    _session = None
    atexit.unregister(_at_exit)
    while _finalizers:
        _finalizers.pop().cancel()


def _at_exit() -> None:
    if _session is not None:
        close_quietly(_session, "exit")


def close_quietly(session: Session, reason: str) -> None:
    """Close where Python would print a traceback of whatever is raised."""
    try:
        session.close(reason)
    except Exception as error:
        if raised_by_script(error):
            raise
        log.warning("crossrank: the recording did not end properly: %s", one_line(error))
