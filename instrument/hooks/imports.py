"""The import of a module: something is done right after it. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_finders: list[_AfterImport] = []


def install(actions: Mapping[str, Callable[[], None]]) -> None:
    """Do each action as soon as the module of its name has been imported, at once where it is.

    A module that is there already, and one that nobody imports, both cost nothing.
    """
    waiting = {name: action for name, action in actions.items() if name not in sys.modules}
    _finders.append(_AfterImport(waiting))
    sys.meta_path.insert(0, _finders[-1])
    for name in actions.keys() - waiting.keys():
        actions[name]()


def uninstall() -> None:
    """Wait for no module any more."""
    while _finders:
        _finders.pop().remove()


class _AfterImport:
    """A finder that runs an action as soon as a module has been imported."""

    def __init__(self, actions: Mapping[str, Callable[[], None]]) -> None:
        self._actions = dict(actions)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._actions:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self)
        spec = next((spec for spec in (finder.find_spec(name, path, target) for finder in others) if spec), None)
        # Libraries also look for torch without importing it, so the action stays until it is imported.
        if spec is not None and spec.loader is not None:
            self._act_after(spec.loader, name)
        return spec

    def _act_after(self, loader: Any, name: str) -> None:
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            original(module)
            if module.__name__ == name:
                del loader.exec_module
                self._act(name)

        loader.exec_module = exec_module

    def _act(self, name: str) -> None:
        action = self._actions.pop(name, None)
        if not self._actions:
            self.remove()
        if action is not None:
            action()

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
