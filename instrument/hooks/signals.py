"""Signals: finishes the files before the process dies of a signal, and dumps the flight recorder on SIGUSR1.

* SIGTERM and SIGINT, if the script does not handle them: the files are finished, then the process dies of the signal.
  If the script handles them, its handler stays.
* SIGUSR1: the flight recorder is dumped, then the script's own handler runs, if it has one.

A rank that hangs in a collective does not run Python handlers: its main thread is in C++. So the interpreter's C
handler also writes the number of the signal to a pipe, and a thread reads it. On SIGUSR1 the thread dumps. On SIGTERM
it gives the main thread a moment, then finishes the files and ends the process itself. It also ends the process if
finishing takes too long on any thread. For this it needs the interpreter's lock: C code that never releases the lock
keeps the process alive.

Python changes handlers only on the main thread. If a session ends on another thread, our handlers stay until the next
session: they only let the process die of its signal.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from crossrank.instrument import threads
from crossrank.instrument.hooks import fork
from crossrank.instrument.hooks.exits import Closable, close_quietly
from crossrank.instrument.log import log
from crossrank.instrument.unpatched import threading, time
from crossrank.instrument.write.flight_dump import FlightDumps

_PATIENCE = 1.0
"""Seconds that the main thread has for its own handler before the signal thread acts."""
_LONGEST_END = 25.0
"""Seconds after a fatal signal until the process dies, finished or not: launchers kill after 30."""
_FATAL = (signal.SIGTERM, signal.SIGINT)


class Signalled(Closable, Protocol):
    """A recording that a signal may end or dump."""

    dumps: FlightDumps
    finished: bool


_session: Signalled | None = None  # the latest; its handlers may outlive it
_previous: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}
"""The handler before ours, by signal."""
_pipe: tuple[int, int] | None = None
_pending: int | None = None
"""A fatal signal that came while the files were being finished."""
_main_acted = False  # no Event: a signal may interrupt the thread that has its lock


def install(session: Signalled) -> None:
    """Handle signals, if this is the main thread."""
    global _session, _pending, _main_acted
    _session, _pending, _main_acted = session, None, False
    if threading.current_thread() is not threading.main_thread():
        log.debug("crossrank: enabled outside the main thread, signals are not watched")
        return
    # Without the pipe, a rank that hangs would not die of a handled signal. A signal without a handler does not kill
    # the first process of a container.
    watched = _pipe is not None or _watch()
    for number in _FATAL if watched and os.getpid() != 1 else ():
        if signal.getsignal(number) is signal.SIG_DFL:
            _previous[number] = signal.signal(number, _on_fatal)
    if session.facts.config.flight and signal.getsignal(signal.SIGUSR1) not in (signal.SIG_IGN, _on_usr1):
        _previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, _on_usr1)
    fork.hold_back((*_FATAL, signal.SIGUSR1))


def uninstall() -> None:
    """Restore the handlers that are still ours, and die of a pending signal."""
    global _pipe, _session
    if threading.current_thread() is threading.main_thread():
        _session = None
        _restore_handlers()
        if _pipe is not None:
            _set_wakeup(-1, ours=_pipe[1])
            os.close(_pipe[1])  # ends the thread, which closes the other side
            _pipe = None
    if _pending is not None:
        _die_of(_pending)


def leave_to_parent() -> None:
    """In a forked child: restore the handling of signals."""
    global _pipe
    if _pipe is not None:
        _set_wakeup(-1, ours=_pipe[1])
        for end in _pipe:
            os.close(end)
        _pipe = None
    _restore_handlers()


def keep_watching() -> None:
    """Restore the pipe, which an event loop removes when it closes. Call it regularly."""
    if _pipe is not None and threading.current_thread() is threading.main_thread():
        _set_wakeup(_pipe[1], ours=_pipe[1])


def _on_fatal(number: int, frame: FrameType | None) -> None:
    global _main_acted, _pending
    _main_acted = True
    _pending = number  # set it before the check below: the closing thread reads it at its end
    if _session is not None:
        if _session.closing and not _session.finished:
            return  # the handler interrupted the closing thread, or another thread closes: it dies at its end
        _session.close(signal.Signals(number).name)
    _die_of(number)


def _on_usr1(number: int, frame: FrameType | None) -> None:
    _dump()  # the signal thread does this too; only it can while this thread hangs
    previous = _previous.get(number)
    if callable(previous):
        previous(number, frame)


def _dump() -> None:
    if _session is not None and not _session.finished:
        _session.dumps.write("SIGUSR1")


_OURS = dict.fromkeys(_FATAL, _on_fatal) | {signal.SIGUSR1: _on_usr1}


def _is_ours(number: int) -> bool:
    return number in _previous and signal.getsignal(number) is _OURS[signal.Signals(number)]


def _restore_handlers() -> None:
    for number, previous in _previous.items():
        if _is_ours(number):
            signal.signal(number, previous)
    _previous.clear()
    fork.hold_back(())


def _set_wakeup(descriptor: int, ours: int) -> bool:
    """Make Python write signals to a descriptor (-1: none). Return False if an event loop has set its own."""
    found = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    if found in (-1, ours):
        return True
    signal.set_wakeup_fd(found, warn_on_full_buffer=False)
    return False


def _watch() -> bool:
    """Start the thread that handles signals while the main thread is stuck; False if an event loop has the pipe."""
    global _pipe
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    if not _set_wakeup(writer, ours=-1):
        os.close(reader)
        os.close(writer)
        return False
    _pipe = (reader, writer)
    threads.start("signals", lambda: _listen(reader), lost="signals are no longer watched")
    return True


def _listen(reader: int) -> None:
    while numbers := os.read(reader, 64):
        for number in filter(_is_ours, numbers):  # the script may have set a handler of its own since
            if number == signal.SIGUSR1:  # a dump may take long, and a fatal signal may follow
                threads.start("dump", _dump)
            elif _session is not None:
                _ensure_death(_session, number)
    os.close(reader)


def _ensure_death(session: Signalled, number: int) -> None:
    """Make the process die of a fatal signal in time: on its main thread, or else on this one."""
    started = time.monotonic()

    def wait(seconds: float, while_: Callable[[], bool]) -> None:
        while while_() and _is_ours(number) and time.monotonic() < started + seconds:
            time.sleep(0.05)

    wait(_PATIENCE, lambda: not _main_acted)
    if not (_main_acted or session.closing) and _is_ours(number):
        threads.start("end", lambda: close_quietly(session, signal.Signals(number).name))
    wait(_LONGEST_END, lambda: not session.finished)
    if _is_ours(number):
        _die_of(number)


def _die_of(number: int) -> None:
    """End the process by this signal, so that its exit status is the same as without crossrank.

    This uses libc because `signal.signal` works only on the main thread.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(int(number), None)  # SIG_DFL is the null pointer
    os.kill(os.getpid(), number)
