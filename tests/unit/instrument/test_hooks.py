"""Whatever a hook changes of torch or Python is as before when it is taken away again.

The rule is checked on all that can be looked at: attributes of every module of torch and Python and of their classes,
what lists and dictionaries of modules hold, signal handlers, finalizers, the dispatcher's kernels and C++'s terminate
handler.
"""

from __future__ import annotations

import ctypes
import gc
import operator
import signal
import sys
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.autograd import Variable

import crossrank
from crossrank.instrument.config import Config
from crossrank.instrument.hooks import registry, spawn
from crossrank.instrument.hooks.registry import HOOKS, Hook
from crossrank.instrument.session import Session

LOOKED_AT = {"torch"} | sys.stdlib_module_names - {"linecache", "logging", "re", "warnings"}
"""Torch and Python, without what keeps what it has seen."""
UNSTEADY = {("torch.utils.hooks", "RemovableHandle", "next_id"), ("threading", "_active", "content")}
"""A counter that only ever rises, and threads, which end in their own time."""
NOTHING_TO_CHANGE = (spawn,)
"""What changes nothing unless the runner started the process."""


def modules() -> dict[str, ModuleType]:
    found = {name: module for name, module in list(sys.modules.items()) if type(module) is ModuleType}
    return {name: module for name, module in found.items() if name.split(".")[0] in LOOKED_AT}


def kernels() -> list[str]:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")]
    return [torch._C._dispatch_dump(name) for name in sorted(names)]


State = dict[tuple[str, ...], dict[Any, object]]


def state() -> State:
    """Everything by where it is. Values are held, so that none of them is mistaken for another."""
    found: State = {}
    for name, module in modules().items():
        found[name,] = dict(vars(module))
        for attribute, value in list(vars(module).items()):
            if issubclass(type(value), type) and value.__module__ == name:
                found[name, attribute] = dict(vars(value))
            elif issubclass(type(value), list | set | dict) and attribute not in ("__builtins__", "modules"):
                content = list(value.values() if isinstance(value, dict) else value)
                found[name, attribute, "content"] = dict(enumerate(content))
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13get_terminatev"]
    terminate.restype = ctypes.c_void_p
    found["process",] = {
        "wakeup": wakeup,
        "finalizers": len(util._finalizer_registry),  # type: ignore[attr-defined]
        "kernels": kernels(),
        "terminate": terminate(),
        **{str(number): signal.getsignal(number) for number in signal.valid_signals()},
    }
    return found


def changed(before: State, after: State) -> list[tuple[object, ...]]:
    """Where the two differ."""

    def same(one: object, other: object) -> bool:
        return one is other or (type(one) in (int, str, list, tuple) and one == other)

    keys: list[tuple[object, ...]] = []
    for where in before.keys() | after.keys():
        one, other = before.get(where, {}), after.get(where, {})
        if one.keys() != other.keys() or not all(map(operator.is_, one.values(), other.values())):
            names = one.keys() | other.keys()
            keys += [(*where, name) for name in names if not same(one.get(name), other.get(name))]
    return sorted((key for key in keys if not any(key[: len(one)] == one for one in UNSTEADY)), key=str)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    # What is imported or cached at the first use is no change.
    crossrank.enable(tracing="ALL", directory=tmp_path)
    crossrank.disable()
    gc.collect()
    return Session(Config(directory=str(tmp_path)))


def test_each_hook_changes_something_and_undoes_all_of_it(session: Session) -> None:
    before = state()
    for hook in HOOKS:
        hook.module.install(session)
        during = state()
        hook.module.uninstall()
        hook.module.uninstall()
        assert changed(before, state()) == [], hook
        assert bool(changed(before, during)) == (hook.module not in NOTHING_TO_CHANGE), hook


def test_kernels_stay_in_the_dispatcher_because_other_threads_may_call_them(session: Session, tmp_path: Path) -> None:
    with crossrank.enable(tracing="ALL", directory=tmp_path / "first"):
        during = kernels()
    assert any("BackendSelect" in one for one in during)
    assert kernels() == during
    with crossrank.enable(tracing="ALL", directory=tmp_path / "second"):
        assert kernels() == during
    assert kernels() == during


def test_all_hooks_together_leave_no_change(session: Session, tmp_path: Path) -> None:
    before = state()
    for _ in range(2):
        assert crossrank.enable(tracing="ALL", directory=tmp_path).active
        assert changed(before, state())
        crossrank.disable()
        assert changed(before, state()) == []


def test_subprocesses_are_not_followed_after_disable(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(spawn, "_wanted", False)
    before = state()
    assert (spawn.follow(), spawn.follow()) == (True, False)
    followed = changed(before, state())
    assert ("subprocess", "Popen", "__init__") in followed
    for _ in range(2):  # a later session follows again
        with crossrank.enable(tracing="ALL", directory=tmp_path):
            assert set(followed) <= set(changed(before, state()))
        assert changed(before, state()) == []


def test_later_changes_by_another_library_stay(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    before = state()
    monkeypatch.setattr(Variable, "_execution_engine", Variable._execution_engine)
    previous = signal.getsignal(signal.SIGTERM)

    def theirs(*_: object) -> None: ...

    registry.install(session)
    Variable._execution_engine = engine = object()  # type: ignore[assignment]
    signal.signal(signal.SIGTERM, theirs)
    try:
        registry.uninstall(session.failures)
        assert Variable._execution_engine is engine
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, previous)
    monkeypatch.undo()
    assert changed(before, state()) == []


def test_a_failed_hook_leaves_no_hook_installed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def install(self, session: registry.Hooked, /) -> None:
            raise OSError("no")

        def uninstall(self) -> None: ...

    monkeypatch.setattr(registry, "HOOKS", (*HOOKS, Hook(Failing())))
    before = state()
    with pytest.raises(OSError, match="no"):
        session.start()
    monkeypatch.undo()
    assert [key for key in changed(before, state()) if "HOOKS" not in str(key)] == []
    assert (session.closing, session.finished) == (True, True)
