"""An exception of C++ that nobody catches: the files are finished before it aborts the process.

gloo raises such exceptions on its own threads when ranks disagree about the size of a call, and the C++ runtime then
calls its terminate handler, which prints the exception and aborts. Ours runs before that one. It is no signal handler:
the thread is in ordinary code, and an abort for another reason (a broken heap, say) does not pass here.

To run Python the handler has to wait for the interpreter. A thread that waits for a GPU may hold that for ever, and a
process that was to abort would hang; so nothing is installed in a process that uses CUDA, and it is taken back when one
begins to.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from crossrank.instrument.identity.gpu import cuda_is_in_use

if TYPE_CHECKING:
    from crossrank.instrument.session import Session

log = logging.getLogger("crossrank")

_LIBRARY = "libstdc++.so.6"
_SET_TERMINATE = "_ZSt13set_terminatePFvvE"  # std::set_terminate(void (*)())

_session: Session | None = None  # while the handler is installed
_previous: int | None = None
_set: Callable[[Any], int | None] | None = None


def _on_terminate() -> None:
    try:
        if _session is not None:
            _session.close("SIGABRT")
    except BaseException as error:
        log.debug("crossrank: the recording did not end properly before an abort: %r", error)
    if _previous:
        ctypes.CFUNCTYPE(None)(_previous)()  # prints the exception and aborts
    ctypes.CDLL(None).abort()


_HANDLER = ctypes.CFUNCTYPE(None)(_on_terminate)
"""Stays in memory for ever: a thread may be in it, or about to be, when it is uninstalled."""


def install(session: Session) -> None:
    """Put the handler in place, where this process uses the GNU C++ runtime and no CUDA."""
    global _session, _previous, _set
    if cuda_is_in_use():
        return
    if _set is None:
        try:
            _set = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)((_SET_TERMINATE, ctypes.CDLL(_LIBRARY)))
        except (OSError, AttributeError):
            return
    _session, _previous = session, _set(_HANDLER)


def uninstall() -> None:
    global _session
    if _session is None or _set is None:
        return
    _session = None
    found = _set(_previous)
    if found != ctypes.cast(_HANDLER, ctypes.c_void_p).value:
        _set(found)


def uninstall_under_cuda() -> None:
    """Put back what was there if the process has begun to use CUDA. To be called now and then."""
    if _session is not None and cuda_is_in_use():
        uninstall()
