"""The exceptions that end a script and its threads, noted and printed as ever."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from crossrank.instrument.hooks.patches import Patches
from crossrank.text import writable

if TYPE_CHECKING:
    from crossrank.instrument.session import Session

log = logging.getLogger("crossrank")

_LONGEST_ERROR = 500
_MOST_EXCEPTIONS = 8
_MOST_FRAMES = 64

_patches = Patches()
_of_threads: list[dict[str, Any]] = []
_earlier: BaseException | None = None
"""What `sys.last_value` held already when the session began."""


def install(_: Session) -> None:
    global _earlier
    _of_threads.clear()
    _earlier = getattr(sys, "last_value", None)
    original = threading.excepthook

    def note(arguments: Any) -> None:
        try:
            if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
                name = arguments.thread.name if arguments.thread is not None else "a thread"
                _of_threads.append(_describe(name, arguments.exc_value))
                del _of_threads[_MOST_EXCEPTIONS:]
        except Exception as error:
            log.debug("crossrank: the exception of a thread is not noted: %r", error)
        original(arguments)

    _patches.replace(threading, "excepthook", note)


def uninstall() -> None:
    _patches.undo()


def exceptions(reason: str) -> list[dict[str, Any]]:
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
        error = last if last is not _earlier else None
    if error is None or isinstance(error, SystemExit | GeneratorExit):
        return list(_of_threads)
    return [_describe(threading.main_thread().name, error), *_of_threads]


def _describe(thread: str, error: BaseException) -> dict[str, Any]:
    frames = [
        {"name": writable(frame.f_code.co_name), "filename": writable(frame.f_code.co_filename), "line": line}
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    causes: list[str] = []
    cause = error.__cause__ or error.__context__
    while cause is not None and len(causes) < _MOST_EXCEPTIONS:
        causes.append(_text_of(cause))
        cause = cause.__cause__ or cause.__context__
    return {
        "thread": writable(thread),
        "error": _text_of(error),
        "causes": causes,
        "frames": frames[: -_MOST_FRAMES - 1 : -1],
    }


def _text_of(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = "its text is not available"
    return writable(f"{type(error).__name__}: {text}"[:_LONGEST_ERROR])
