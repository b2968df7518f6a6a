"""Actions right after the import of a module. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_finders: list[_AfterImport] = []


def install(actions: Mapping[str, Callable[[], None]]) -> None:
    """Run each action as soon as the module of its name is imported, or now if it already is.

    A module that is never imported costs nothing.
    """
    for name, action in actions.items():
        if name in sys.modules:
            action()
        else:
            _finders.append(_AfterImport(name, action))
            sys.meta_path.insert(0, _finders[-1])


def uninstall() -> None:
    """Stop waiting for modules."""
    while _finders:
        _finders.pop().remove()


class _AfterImport:
    """A finder that runs an action after the import of a module."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self)
        spec = next((spec for spec in (finder.find_spec(name, path, target) for finder in others) if spec), None)
        # Libraries also search for torch without importing it, so the finder stays until the import.
        if spec is not None and spec.loader is not None:
            self._act_after(spec.loader)
        return spec

    def _act_after(self, loader: Any) -> None:
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            original(module)
            if module.__name__ == self._name:
                del loader.exec_module
                if self.remove():
                    self._action()

        loader.exec_module = exec_module

    def remove(self) -> bool:
        """Stop waiting; return whether it was waiting."""
        waits = self in sys.meta_path
        if waits:
            sys.meta_path.remove(self)
        return waits
