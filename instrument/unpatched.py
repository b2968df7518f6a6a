"""Threads, locks and sleep of the operating system, although gevent or eventlet has replaced Python's.

Both replace functions of `_thread`, `threading`, `time` and other modules, so that a thread is a greenlet. A greenlet
runs only while the others wait in one of those functions. Training waits in C++ instead, so a thread of the recorder
would never run, and a caller that waits for it would wait forever.

Import `threading`, `time` and `subprocess` from here, not from Python. They are Python's modules, and private copies of
them with the interpreter's own functions while threads are replaced. This is decided at each use: `patch_all()` may
come after `enable()`. Where a module of the user's is meant, such as `threading.excepthook`, import Python's.
"""

from __future__ import annotations

import _thread
import builtins
import importlib
import importlib.util
import os
import sys
from importlib.abc import Loader
from types import BuiltinFunctionType, ModuleType
from typing import TYPE_CHECKING, Any

_COPIED = ("_socket", "_thread", "os", "posix", "select", "selectors", "subprocess", "threading", "time")
"""Modules that are replaced in part, and modules that import those."""
_STARTERS = ("start_new_thread", "start_joinable_thread")
"""The second one is new in Python 3.13."""


def are_threads_replaced() -> bool:
    """Return whether another library has replaced the functions with which Python starts threads."""
    python = sys.modules.get("threading")
    starters = [getattr(_thread, name, None) for name in _STARTERS]
    starters += [getattr(python, f"_{name}", None) for name in _STARTERS]
    return not all(
        starter is None or (isinstance(starter, BuiltinFunctionType) and starter.__module__ == _thread.__name__)
        for starter in starters
    )


_CLOCKS = ("monotonic", "monotonic_ns", "time", "time_ns")
"""Functions of `time` that no library replaces. They are attributes, since a lookup takes 2 µs: two clocks that are
read together would show times that are so far apart."""

_copies: dict[str, ModuleType] = {}


def _copy(name: str) -> ModuleType:
    """Return the private copy of a module of Python. It imports private copies too."""
    if (found := _copies.get(name)) is not None:
        return found
    with _making:
        return _copies.get(name) or _make_copy(name)


def _make_copy(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    vars(copy)["__builtins__"] = vars(builtins) | {"__import__": _import}
    if name == "threading":
        _execute_threading(spec.loader, copy)
    else:
        spec.loader.exec_module(copy)
    _copies[name] = copy
    return copy


def _import(name: str, *arguments: Any, **keywords: Any) -> ModuleType:
    """Do the `import` of a copy."""
    return _copy(name) if name in _COPIED else builtins.__import__(name, *arguments, **keywords)


def _execute_threading(loader: Loader, copy: ModuleType) -> None:
    """Let a copy of `threading` describe the main thread without taking its lock from Python's own `threading`.

    Before Python 3.13 the interpreter frees one lock of each thread at its end, the last one that was asked for.
    """
    attributes, ask_for_lock = vars(_copy("_thread")), "_set_sentinel"
    original = attributes.get(ask_for_lock)
    if original is None:
        loader.exec_module(copy)
    else:
        attributes[ask_for_lock] = attributes["allocate_lock"]
        loader.exec_module(copy)
        attributes[ask_for_lock] = vars(copy)[ask_for_lock] = original
    if attributes["get_native_id"]() != os.getpid():
        # The copy takes the thread that makes it for the main one, which is the oldest: that one comes last here.
        main = copy.main_thread()
        main._ident, main._native_id = list(sys._current_frames())[-1], os.getpid()
        vars(copy)["_active"] = {main._ident: main}


_making: Any = _make_copy("_thread").RLock()


class _Module:
    """A module of Python, or its copy while threads are replaced."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module = importlib.import_module(name)
        vars(self).update({clock: getattr(self._module, clock) for clock in _CLOCKS if name == "time"})

    def __getattr__(self, name: str) -> Any:
        return getattr(_copy(self._name) if are_threads_replaced() else self._module, name)


if TYPE_CHECKING:
    import subprocess as subprocess
    import threading as threading
    import time as time
else:
    threading, time, subprocess = map(_Module, ("threading", "time", "subprocess"))
