"""Ends a recording properly however the process ends, and keeps forked children out of it.

* Normal exit and uncaught exceptions: `atexit`, and multiprocessing's finalizers in its workers. What ends the script,
  or one of its threads, is noted.
* SIGTERM and SIGINT, where nobody else handles them: the files are finished, then the process dies of the
  signal as it would have. Where the script handles them, its handler is left alone.
* SIGUSR1: the flight recorder is dumped, then the script's own handler runs, if it has one.
* An exception of C++ that nobody catches, as gloo raises it after a mismatch: the files are finished, then the process
  aborts as it would have.
* fork: the child lets go of everything of its parent.

A rank that hangs in a collective does not run Python handlers: its main thread sits in C++. So the signal's
number is also written to a pipe, by the interpreter's C handler, and a thread reads it there: it dumps on
SIGUSR1, and on SIGTERM it gives the main thread a moment and then finishes and dies in its place. It also sees to it
that the process dies where finishing takes too long, on whichever thread that is. It needs Python's lock for that: a
thread that keeps it for ever, in C code that never gives it up, keeps the process alive as well.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from crossrank.errors import one_line
from crossrank.instrument.hooks.terminate import TerminateHandler
from crossrank.instrument.script_errors import raised_by_script

log = logging.getLogger("crossrank")

_PATIENCE = 1.0
"""Seconds that the main thread has for its own handler before the signal thread acts for it."""
_LONGEST_END = 25.0
"""Seconds after a fatal signal in which the process dies, whatever is not finished: launchers kill after 30."""
_LONGEST_ERROR = 500
_MOST_EXCEPTIONS = 8
_MOST_FRAMES = 64

_Masks = threading.local()
"""`before`: the signals that this thread had blocked before the fork that is under way."""

Handler = Callable[[int, FrameType | None], Any] | int | None


class ExitGuard:
    """Watches over one session. `finish` and `dump` must be safe to call twice and from any thread."""

    def __init__(
        self,
        *,
        finish: Callable[[str], None],
        dump: Callable[[], None],
        closing: Callable[[], bool],
        finished: Callable[[], bool],
    ) -> None:
        self._finish = finish
        self._dump = dump
        self._closing = closing  # whether somebody has begun to finish
        self._finished = finished  # whether that is through
        self._pending: int | None = None  # a fatal signal that came while the files were being finished
        self._previous: dict[int, Handler] = {}
        self._ours: dict[int, Handler] = {}
        self._pipe: tuple[int, int] | None = None
        self._main_acted = False  # a plain flag: an Event's lock may be held by what a signal interrupts
        self._finalizer: multiprocessing.util.Finalize | None = None
        self._terminate = TerminateHandler(lambda: finish("SIGABRT"))
        self._threads_hook: Callable[[Any], Any] | None = None  # the one that ours stands before
        self._thread_exceptions: list[dict[str, Any]] = []
        self._last_before = getattr(sys, "last_value", None)

    def install(self, *, on_usr1: bool) -> None:
        """Register for exit and, from the main thread, for signals."""
        atexit.register(self._finish_quietly, "exit")
        # Forked workers of multiprocessing leave through os._exit: atexit does not run there, finalizers do.
        self._finalizer = multiprocessing.util.Finalize(None, self._finish_quietly, args=("exit",), exitpriority=0)
        self._terminate.install()
        self._threads_hook, threading.excepthook = threading.excepthook, self._on_thread_error
        if threading.current_thread() is not threading.main_thread():
            log.debug("crossrank: enabled outside the main thread, signals are not watched")
            return
        # Without the pipe a rank that hangs would not die of a signal that is handled. The first process of a container
        # is not killed by a signal that nobody handles, and goes on.
        watched = self._watch()
        for number in (signal.SIGTERM, signal.SIGINT) if watched and os.getpid() != 1 else ():
            if self._free_handler(number) is signal.SIG_DFL:
                self._handle(number, self._on_fatal)
        if on_usr1 and signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN:
            self._handle(signal.SIGUSR1, self._on_usr1)

    def uninstall(self) -> None:
        """Give back every handler that nobody has replaced since. On another thread than the main one they stay:
        they do nothing then but let the process die of its signal."""
        atexit.unregister(self._finish_quietly)
        if self._finalizer is not None:
            self._finalizer.cancel()
        self._terminate.uninstall()
        self._give_back_threads_hook()
        if threading.current_thread() is threading.main_thread():
            self._give_back_handlers()
            if self._pipe is not None:
                self._give_back_wakeup(self._pipe[1])
                os.close(self._pipe[1])  # ends the thread, which closes the other side
                self._pipe = None
        if self._pending is not None:
            _die_of(self._pending)

    def abandon(self) -> None:
        """In a forked child: signals do what they did before."""
        if self._pipe is not None:
            reader, writer = self._pipe
            self._pipe = None
            self._give_back_wakeup(writer)
            os.close(reader)
            os.close(writer)
        self._give_back_handlers()
        self._give_back_threads_hook()
        self._terminate.uninstall()
        atexit.unregister(self._finish_quietly)

    def on_step(self) -> None:
        """To be called on the main thread now and then: an event loop that was closed has taken the pipe away."""
        if self._pipe is not None and threading.current_thread() is threading.main_thread():
            found = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            if found not in (-1, self._pipe[1]):
                signal.set_wakeup_fd(found, warn_on_full_buffer=False)

    def on_tick(self) -> None:
        """To be called now and then."""
        self._terminate.uninstall_under_cuda()

    def exceptions(self, reason: str = "") -> list[dict[str, Any]]:
        """What ended the script, and threads of it, so far: thread, text, texts of its causes, frames innermost first.

        `reason` says what the recording ends by. Python keeps the exception that ended a script in `sys.last_value`,
        but so does a notebook with that of any cell. A worker of multiprocessing ends while its exception is handled.
        """
        error = None
        if reason in ("exit", "disable"):
            error = sys.exc_info()[1]
            if isinstance(error, SystemExit) and error.code:
                error = error.__context__
        if error is None and reason != "disable" and not hasattr(sys, "ps1"):
            last = getattr(sys, "last_value", None)
            error = last if last is not self._last_before else None
        if error is None or isinstance(error, SystemExit | GeneratorExit):
            return self._thread_exceptions
        return [_describe(threading.main_thread().name, error), *self._thread_exceptions]

    def _finish_quietly(self, reason: str) -> None:
        """Finish at exit, where Python would print a traceback of whatever comes up."""
        try:
            self._finish(reason)
        except Exception as error:
            if raised_by_script(error):
                raise
            log.warning("crossrank: the recording did not end properly: %s", one_line(error))

    def _on_thread_error(self, arguments: Any) -> None:
        """A thread of the script ends by an exception: note it, and let Python print it as ever."""
        try:
            if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
                name = arguments.thread.name if arguments.thread is not None else "a thread"
                self._thread_exceptions.append(_describe(name, arguments.exc_value))
                del self._thread_exceptions[_MOST_EXCEPTIONS:]
        except Exception as error:
            log.debug("crossrank: the exception of a thread is not noted: %r", error)
        if self._threads_hook is not None:
            self._threads_hook(arguments)

    def _give_back_threads_hook(self) -> None:
        if self._threads_hook is not None and threading.excepthook == self._on_thread_error:
            threading.excepthook, self._threads_hook = self._threads_hook, None

    def _give_back_handlers(self) -> None:
        for number in self._ours:
            if self._is_ours(number):
                signal.signal(number, self._previous[number])
        self._ours.clear()

    def _give_back_wakeup(self, ours: int) -> None:
        found = signal.set_wakeup_fd(-1)
        if found not in (-1, ours):  # somebody has put theirs in place since
            signal.set_wakeup_fd(found, warn_on_full_buffer=False)

    def _handle(self, number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        self._previous[number] = signal.signal(number, handler)
        self._ours[number] = handler

    def _on_fatal(self, number: int, frame: FrameType | None) -> None:
        self._main_acted = True
        self._pending = number  # before the look below: who finishes looks at it when through
        if (
            self._closing() and not self._finished()
        ):  # this thread, which the handler has interrupted, or another one: it dies when through
            return
        self._finish(signal.Signals(number).name)
        _die_of(number)

    def _on_usr1(self, number: int, frame: FrameType | None) -> None:
        self._dump()  # the signal thread does the same, and is the only one that can while this thread hangs
        previous = self._previous[number]
        if callable(previous):
            previous(number, frame)

    def _free_handler(self, number: int) -> Handler:
        """The handler of a signal; what it stood for, where it is that of a recording that another thread has ended."""
        handler = signal.getsignal(number)
        guard = getattr(handler, "__self__", None)
        if isinstance(guard, ExitGuard) and guard is not self and guard._finished():
            return guard._previous.get(number, signal.SIG_DFL)
        return handler

    def _watch(self) -> bool:
        """Start the thread that signals reach while the main thread is stuck; False where an event loop is."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        taken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if taken != -1:  # an event loop uses it
            signal.set_wakeup_fd(taken, warn_on_full_buffer=False)
            os.close(reader)
            os.close(writer)
            return False
        self._pipe = (reader, writer)
        threading.Thread(target=self._listen, args=(reader,), name="crossrank-signals", daemon=True).start()
        return True

    def _listen(self, reader: int) -> None:
        try:
            while numbers := os.read(reader, 64):
                for number in numbers:
                    if not self._is_ours(number):  # the script has set a handler of its own since
                        continue
                    if number == signal.SIGUSR1:  # which may take long, and a fatal signal may follow
                        threading.Thread(target=self._dump, name="crossrank-dump", daemon=True).start()
                    else:
                        self._see_to_the_end(number)
            os.close(reader)
        except Exception as error:
            log.warning("crossrank: signals are no longer watched: %s", one_line(error))

    def _see_to_the_end(self, number: int) -> None:
        """Have the process die of a fatal signal: by its main thread, else by this one; and in any case in time."""
        started = time.monotonic()

        def wait(seconds: float, while_: Callable[[], bool]) -> None:
            while while_() and self._is_ours(number) and time.monotonic() < started + seconds:
                time.sleep(0.05)

        wait(_PATIENCE, lambda: not self._main_acted)
        if not (self._main_acted or self._closing()) and self._is_ours(number):
            reason = signal.Signals(number).name
            thread = threading.Thread(target=self._finish_quietly, args=(reason,), name="crossrank-end", daemon=True)
            thread.start()
        wait(_LONGEST_END, lambda: not self._finished())
        if self._is_ours(number):
            _die_of(number)

    def _is_ours(self, number: int) -> bool:
        return number in self._ours and signal.getsignal(number) is self._ours[number]


def _die_of(number: int) -> None:
    """End the process by this signal, so that its exit status is what it would have been without us.

    libc is asked because `signal.signal` works on the main thread only.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(int(number), None)  # SIG_DFL is the null pointer
    os.kill(os.getpid(), number)


def _describe(thread: str, error: BaseException) -> dict[str, Any]:
    frames = [
        {"name": _plain(frame.f_code.co_name), "filename": _plain(frame.f_code.co_filename), "line": line}
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    causes: list[str] = []
    cause = error.__cause__ or error.__context__
    while cause is not None and len(causes) < _MOST_EXCEPTIONS:
        causes.append(_text_of(cause))
        cause = cause.__cause__ or cause.__context__
    return {
        "thread": _plain(thread),
        "error": _text_of(error),
        "causes": causes,
        "frames": frames[: -_MOST_FRAMES - 1 : -1],
    }


def _text_of(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be made"
    return _plain(f"{type(error).__name__}: {text}"[:_LONGEST_ERROR])


def _plain(text: str) -> str:
    """`text` as it can be written: a script's may hold halves of surrogate pairs."""
    return text.encode("utf-8", "backslashreplace").decode()


# A forked child shares the pipe until its copy of the session is abandoned: a signal that it gets before that would
# be carried out by the parent. The hook that abandons it is registered before these, so it runs before they unblock.
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}


def _before_fork() -> None:
    _Masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _after_fork() -> None:
    before = getattr(_Masks, "before", None)
    if before is not None:
        _Masks.before = None
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
