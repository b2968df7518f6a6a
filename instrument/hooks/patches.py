"""Replaces attributes of torch and Python, and restores them."""

from __future__ import annotations

from typing import Any


class Patches:
    """The attributes that one hook has replaced."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, object, object]] = []

    def replace(self, owner: Any, name: str, replacement: object) -> None:
        """Set an attribute in the dictionary of `owner`, a class, module or object.

        `getattr` on a class returns a bound attribute: restoring it would break every later call.
        """
        self._replaced.append((owner, name, vars(owner)[name], replacement))
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Restore the originals, except those that another library has replaced since."""
        while self._replaced:
            owner, name, original, replacement = self._replaced.pop()
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)
