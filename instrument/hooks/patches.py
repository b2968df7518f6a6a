"""Attributes of torch and Python that are replaced for a while."""

from __future__ import annotations

from typing import Any


class Patches:
    """Attributes that one hook has replaced."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, object, object]] = []

    def replace(self, owner: Any, name: str, replacement: object) -> None:
        """Set an attribute that stands in the dictionary of `owner`, a class, module or object.

        What `getattr` gives for a class is bound: restoring that would break every later call.
        """
        self._replaced.append((owner, name, vars(owner)[name], replacement))
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Restore the originals, except where another library has replaced ours since."""
        while self._replaced:
            owner, name, original, replacement = self._replaced.pop()
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)
