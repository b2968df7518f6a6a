"""The recorder's threads are the operating system's, although another library has replaced Python's."""

from __future__ import annotations

import _thread
import ast
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from crossrank.instrument import unpatched

INSTRUMENT = Path(__file__).parents[3] / "instrument"
USES_PYTHONS = {"unpatched.py", "hooks/exits.py", "hooks/spawn.py"}
"""These replace functions of the user's modules."""


def refuse(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a function of another library was called")


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What gevent and eventlet replace, in part: the replacements raise."""
    for module, names in {
        _thread: ("start_new_thread", "start_joinable_thread"),  # not the locks of imports
        threading: ("_start_new_thread", "_start_joinable_thread", "_allocate_lock", "Lock", "RLock", "get_ident"),
        time: ("sleep",),
        os: ("waitpid",),
        subprocess: ("Popen", "run"),
    }.items():
        for name in names:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, refuse)
    yield
    monkeypatch.undo()


def test_python_is_used_itself_unless_threads_are_replaced() -> None:
    assert not unpatched.are_threads_replaced()
    assert unpatched.threading.Thread is threading.Thread
    assert unpatched.time.sleep is time.sleep
    assert unpatched.subprocess.run is subprocess.run


@pytest.mark.parametrize("clock", ["monotonic", "monotonic_ns", "time", "time_ns"])
def test_a_clock_is_pythons_own_attribute_so_that_two_can_be_read_together(clock: str) -> None:
    assert vars(unpatched.time)[clock] is getattr(time, clock)


@pytest.mark.usefixtures("replaced")
def test_a_thread_runs_while_the_main_thread_waits() -> None:
    assert unpatched.are_threads_replaced()
    lock, found = unpatched.threading.Lock(), list[Any]()

    def work() -> None:
        unpatched.time.sleep(0.001)
        found.append(unpatched.threading.get_native_id())
        lock.release()

    lock.acquire()
    thread = unpatched.threading.Thread(target=work, name="crossrank-test")
    thread.start()
    assert lock.acquire(timeout=10)
    thread.join(10)
    assert not thread.is_alive()
    assert found != [os.getpid()]


@pytest.mark.usefixtures("replaced")
def test_processes_are_waited_for() -> None:
    command = [sys.executable, "-S", "-c", "print(open(0).read(), end='!')"]
    done = unpatched.subprocess.run(command, input="text", capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "text!"


def test_the_main_thread_is_known_in_a_copy_that_another_thread_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpatched, "_copies", {})
    found = list[Any]()
    worker = threading.Thread(target=lambda: found.append(unpatched._copy("threading").main_thread()))
    worker.start()
    worker.join(10)
    assert not worker.is_alive()  # Python's own `threading` still notices the end of its thread
    assert (found[0].ident, found[0].native_id) == (threading.main_thread().ident, os.getpid())


def test_the_recorder_imports_threads_from_here_alone() -> None:
    wrong = []
    for path in sorted(INSTRUMENT.rglob("*.py")):
        name = str(path.relative_to(INSTRUMENT))
        source = path.read_text()
        tree = ast.parse(source)
        forbidden = set() if name in USES_PYTHONS else {"threading", "subprocess", "queue", "_thread"}
        if ".sleep(" in source:
            forbidden |= {"time"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                wrong += [f"{name} imports {alias.name}" for alias in node.names if alias.name in forbidden]
            elif isinstance(node, ast.ImportFrom) and node.module in forbidden | {"concurrent.futures"}:
                wrong.append(f"{name} imports {node.module}")
    assert wrong == []
