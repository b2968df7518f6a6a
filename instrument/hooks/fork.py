"""Functions that run when the process forks. Python cannot unregister them; without a session they have no effect."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterable

from crossrank.instrument.locks import close_in_child
from crossrank.instrument.unpatched import threading

in_child: list[Callable[[], None]] = [close_in_child]
"""Called in every forked child."""
held_back: frozenset[signal.Signals] = frozenset()
"""Signals that a forked child blocks until `in_child` has run. Until then it shares the parent's pipe, and the parent
would act on its signals."""
_leaves_at_once = False

_masks = threading.local()
"""`before`: the signals that this thread had blocked before the current fork."""


def hold_back(signals: Iterable[signal.Signals]) -> None:
    global held_back
    held_back = frozenset(signals)


def let_children_leave_at_once() -> None:
    """Let forked children of this process exit, now that it has used Kineto.

    The destructor of a static object of Kineto waits for a thread that a forked child does not have. So a child that
    exits normally (not through `os._exit`, as those of multiprocessing do) would hang forever. In such a child, the
    first exit handler of libc calls `_exit` with the child's status. Python has flushed its own files by then.
    """
    global _leaves_at_once
    _leaves_at_once = True


def _before() -> None:
    if held_back:
        _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, held_back)


def _unmask() -> None:
    before = getattr(_masks, "before", None)
    if before is not None:
        _masks.before = None
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_child() -> None:
    for action in in_child:
        action()
    _unmask()
    if _leaves_at_once:
        libc = ctypes.CDLL(None)
        if hasattr(libc, "on_exit"):  # glibc
            libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_unmask, after_in_child=_in_child)
