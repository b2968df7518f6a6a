"""Leaves the signals of a process to the threads of the script."""

from __future__ import annotations

import signal

_OF_THREADS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS, signal.SIGABRT}
)
"""Signals that a thread causes itself: blocked, they would end the process without the handler of the script."""
_OTHERS = frozenset(signal.valid_signals()) - _OF_THREADS


def leave_signals_to_script() -> None:
    """Block all signals in this thread.

    The kernel gives a signal of the process to any thread that does not block it. A script may block one on all of its
    threads, to wait for it with `sigwait`; on another thread, the signal would end the process.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _OTHERS)
