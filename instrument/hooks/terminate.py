"""Runs something before an exception of C++ that nobody catches aborts the process.

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
from typing import Any

from crossrank.instrument.identity.gpu import cuda_is_in_use

log = logging.getLogger("crossrank")

_LIBRARY = "libstdc++.so.6"
_SET_TERMINATE = "_ZSt13set_terminatePFvvE"  # std::set_terminate(void (*)())
_KEPT: list[Any] = []
"""Handlers that were ever installed: a thread may be in one, or about to be."""


class TerminateHandler:
    """Calls `action` once, on whichever thread the exception is raised. `action` must be safe to call there."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._ours = ctypes.CFUNCTYPE(None)(self._on_terminate)
        self._installed = False
        self._previous: int | None = None
        self._set: Any = None

    def install(self) -> None:
        """Put the handler in place, where this process uses the GNU C++ runtime and no CUDA."""
        if cuda_is_in_use():
            return
        try:
            self._set = getattr(ctypes.CDLL(_LIBRARY), _SET_TERMINATE)
        except (OSError, AttributeError):
            return
        self._set.argtypes = (ctypes.c_void_p,)
        self._set.restype = ctypes.c_void_p
        self._previous = self._set(ctypes.cast(self._ours, ctypes.c_void_p))
        self._installed = True
        _KEPT.append(self._ours)

    def uninstall(self) -> None:
        """Put back what was there, unless somebody has put a handler of theirs in place since."""
        if not self._installed:
            return
        self._installed = False
        found = self._set(self._previous)
        if found != ctypes.cast(self._ours, ctypes.c_void_p).value:
            self._set(found)

    def uninstall_under_cuda(self) -> None:
        """Put back what was there if the process has begun to use CUDA."""
        if self._installed and cuda_is_in_use():
            self.uninstall()

    def _on_terminate(self) -> None:
        try:
            self._action()
        except BaseException as error:
            log.debug("crossrank: the recording did not end properly before an abort: %r", error)
        if self._previous:
            ctypes.CFUNCTYPE(None)(self._previous)()  # prints the exception and aborts
        ctypes.CDLL(None).abort()
