"""Finishes the files when a process ends without a signal: normally, by an exception, or by an uncaught C++ exception.

* A normal end runs `atexit`. multiprocessing's forked workers leave through `os._exit`, so they run its finalizers.
* `os._exit` runs nothing. So it is replaced by a function that finishes the files first, for a few seconds at most.
* The line that calls `sys.exit` or `os._exit` is noted: at the end of the process it is on no stack.
* Exceptions that end the script or its threads are recorded, and printed as usual.
* gloo raises exceptions on its own threads when ranks disagree about the size of a call. The C++ runtime then calls its
  terminate handler, which prints the exception and aborts. Our handler finishes the files before that one runs. Unlike
  a signal handler, it may run Python: the thread runs ordinary code, and an abort for another reason, such as a broken
  heap, does not call it. But it waits for the interpreter's lock. A thread that waits for a GPU may keep that lock
  forever, and the process would hang instead of aborting. So a process that uses CUDA does not have this handler.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any, NoReturn, Protocol

from crossrank.instrument import threads
from crossrank.instrument.facts import Recording
from crossrank.instrument.hooks.patches import Patches
from crossrank.instrument.identity.gpu import cuda_is_in_use
from crossrank.instrument.log import log
from crossrank.instrument.unpatched import time
from crossrank.recording import OF_A_BACKEND
from crossrank.text import writable

_SET_TERMINATE = ("libstdc++.so.6", "_ZSt13set_terminatePFvvE")  # std::set_terminate(void (*)())
_LONGEST_ERROR = 500
_MOST_EXCEPTIONS = 8
_MOST_FRAMES = 64
_LONGEST_END = 5.0
"""Seconds by which `os._exit` is delayed at most."""


class Closable(Recording, Protocol):
    """A recording that the end of the process closes."""

    def close(self, reason: str, /, *, at_once: bool = False) -> None:
        """Finish every file and uninstall every hook. No effect the second time. `at_once`: the process ends, and does
        not wait for its GPU."""


_session: Closable | None = None
_finalizers: list[Finalize] = []
_patches = Patches()
_of_threads: list[dict[str, Any]] = []
_of_process: list[dict[str, Any]] = []
"""The exception that ends a worker of multiprocessing, or the call of `os._exit` with a code that ends a process."""
_left_at: list[dict[str, Any]] = []
"""The stack of the thread that called `sys.exit` or `os._exit` last, innermost frame first."""
_WORKER_ENDS = {
    "print_exc": ("multiprocessing.process", "_bootstrap"),
    "format_exc": ("torch.multiprocessing.spawn", "_wrap"),
}
"""Functions of `traceback` -> the module and function that call them when an exception ends a multiprocessing worker.
Since Python 3.13 the exception is gone when the finalizers run."""
_earlier: BaseException | None = None
"""`sys.last_value` at the start of the session."""
_terminates = False
"""Whether our terminate handler is installed."""
_previous: int | None = None
"""The terminate handler before ours."""


def install(session: Closable) -> None:
    global _session, _earlier
    _session = session
    atexit.register(_at_exit)
    _finalizers.append(Finalize(None, _at_exit, exitpriority=0))
    _of_threads.clear()
    _of_process.clear()
    _left_at.clear()
    _earlier = getattr(sys, "last_value", None)
    original = threading.excepthook

    def note(arguments: Any) -> None:
        try:
            if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
                name = arguments.thread.name if arguments.thread is not None else "a thread"
                _of_threads.append(describe(name, arguments.exc_value))
                del _of_threads[_MOST_EXCEPTIONS:]
        except Exception as error:
            log.debug("crossrank: cannot record the exception of a thread: %r", error)
        original(arguments)

    _patches.replace(threading, "excepthook", note)
    _patches.replace(os, "_exit", _finishing_first(os._exit))
    _patches.replace(sys, "exit", _noting_the_line(sys.exit))
    if multiprocessing.parent_process() is not None:
        for name, caller in _WORKER_ENDS.items():
            _patches.replace(traceback, name, _record_exception_in(getattr(traceback, name), *caller))
    _replace_terminate()


def _finishing_first(original: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
    """Return a wrapper of `os._exit` that finishes the files, on a thread that may hang."""

    @functools.wraps(original)
    def leave(status: int) -> NoReturn:
        session = _session
        if session is not None and not session.closing:
            with contextlib.suppress(Exception):
                _left_at[:] = describe_frames(traceback.walk_stack(sys._getframe(1)))
                if status:
                    _of_process[:] = [_why_it_leaves(status, sys.exc_info()[1])]
                closing = threads.start("exit", lambda: session.close("exit", at_once=True))
                if closing is not None:
                    closing.join(_LONGEST_END)
        original(status)

    return leave


def _why_it_leaves(status: int, error: BaseException | None) -> dict[str, Any]:
    """Return the exception that the caller of `os._exit` handles, or the call of `os._exit` as one."""
    thread = threading.main_thread().name
    if error is not None:
        return describe(thread, error)
    return {"thread": thread, "error": f"os._exit({status})", "causes": [], "frames": list(_left_at)}


def _noting_the_line(original: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    """Return a wrapper of `sys.exit` that notes its caller. On another thread it ends only that thread."""

    @functools.wraps(original)
    def leave(*args: Any, **kwargs: Any) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            with contextlib.suppress(Exception):
                _left_at[:] = describe_frames(traceback.walk_stack(sys._getframe(1)))
        original(*args, **kwargs)

    return leave


def left_at() -> list[dict[str, Any]]:
    """Return the stack of the thread that called `sys.exit` or `os._exit` last, innermost frame first."""
    return list(_left_at)


def _record_exception_in(original: Callable[..., Any], module: str, function: str) -> Callable[..., Any]:
    """Return a wrapper of `original` that records the current exception if `function` of `module` calls it."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller, error = sys._getframe(1), sys.exc_info()[1]
        if error is not None and (caller.f_globals.get("__name__"), caller.f_code.co_name) == (module, function):
            with contextlib.suppress(Exception):  # the exception is printed anyway
                _of_process[:] = [describe(threading.main_thread().name, error)]
        return original(*args, **kwargs)

    return call


def uninstall() -> None:
    global _session
    _session = None
    atexit.unregister(_at_exit)
    while _finalizers:
        _finalizers.pop().cancel()
    _patches.undo()
    _restore_terminate()


def end_with(code: int, seconds: float) -> None:
    """Make the process end with this code even if the script ends by itself. The caller ends it within `seconds`;
    otherwise this does."""

    def wait() -> None:
        time.sleep(seconds)
        os._exit(code)

    atexit.register(wait)
    Finalize(None, wait, exitpriority=0)


def _at_exit() -> None:
    if _session is not None:
        close_quietly(_session, "exit")


def close_quietly(session: Closable, reason: str) -> None:
    """Close a session where Python would print the traceback of an exception."""
    with session.failures.reported("the recording did not end properly"):
        session.close(reason)


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
"""Never freed: a thread may be running it, or about to, when it is uninstalled."""


@functools.cache
def _set_terminate() -> Callable[[Any], int | None] | None:
    """Return `std::set_terminate` if this process uses the GNU C++ runtime."""
    library, name = _SET_TERMINATE
    try:
        return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)((name, ctypes.CDLL(library)))
    except (OSError, AttributeError):
        return None


def _replace_terminate() -> None:
    global _terminates, _previous
    set_terminate = _set_terminate()
    if set_terminate is not None and not cuda_is_in_use():
        _terminates, _previous = True, set_terminate(_HANDLER)


def _restore_terminate() -> None:
    global _terminates
    set_terminate = _set_terminate()
    if set_terminate is None or not _terminates:
        return
    _terminates = False
    found = set_terminate(_previous)
    if found != ctypes.cast(_HANDLER, ctypes.c_void_p).value:
        set_terminate(found)


def restore_terminate_under_cuda() -> None:
    """Remove our terminate handler once the process uses CUDA. Call it regularly."""
    if _terminates and cuda_is_in_use():
        _restore_terminate()


def exceptions(reason: str) -> list[dict[str, Any]]:
    """Return the exceptions that ended the script and its threads: thread, text, texts of the causes, frames innermost
    first.

    `reason` is why the recording ends. Python keeps the exception that ended a script in `sys.last_value`, but a
    notebook keeps that of any cell there. A worker of multiprocessing ends while it handles its exception.
    """
    error = None
    if reason in ("exit", "disable"):
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit) and error.code:
            error = error.__context__
    if error is None and reason != "disable" and not hasattr(sys, "ps1"):
        last = getattr(sys, "last_value", None)
        error = last if last is not _earlier else None
    if error is None or isinstance(error, SystemExit | GeneratorExit):
        return [*_of_process, *_of_threads]
    return [describe(threading.main_thread().name, error), *_of_threads]


def describe(thread: str, error: BaseException) -> dict[str, Any]:
    """Return an exception of a thread in the format of a dump: `Raised` of the tools' reader."""
    frames = list(traceback.walk_tb(error.__traceback__))
    causes: list[str] = []
    cause = error.__cause__ or error.__context__
    while cause is not None and len(causes) < _MOST_EXCEPTIONS:
        causes.append(_text_of(cause))
        cause = cause.__cause__ or cause.__context__
    return {
        "thread": writable(thread),
        "error": _text_of(error),
        "causes": causes,
        "frames": describe_frames(reversed(frames)),
    }


def describe_frames(frames: Iterable[tuple[FrameType, int]]) -> list[dict[str, Any]]:
    """Return the first `_MOST_FRAMES` frames with their lines in the format of a dump."""
    return [
        {"name": writable(frame.f_code.co_name), "filename": writable(frame.f_code.co_filename), "line": line or 0}
        for frame, line in itertools.islice(frames, _MOST_FRAMES)
    ]


def _text_of(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = "its text is unavailable"
    text = f"{type(error).__name__}: {text}"
    if not _keeps_texts and OF_A_BACKEND.search(text) is None:
        text = f"{type(error).__name__} (its text is not recorded)"
    return writable(text[:_LONGEST_ERROR])


def keep_texts(keep: bool) -> None:
    """Set whether the texts of exceptions are recorded. Those of torch.distributed always are: they say which
    communication failed."""
    global _keeps_texts
    _keeps_texts = keep


_keeps_texts = True
