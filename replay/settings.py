"""How a plan is run: what the command line asks for, and what every rank is told."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, kw_only=True, frozen=True):
    """How a plan is run."""

    backend: str
    device: str
    """`cpu` or `cuda`."""
    warmup: int = 2
    """Passes that are not measured."""
    repeats: int = 5
    """Passes that are measured."""
    pace: str = "fast"
    check: bool = False
    timeout_s: float = 120.0
    """After this long without progress a rank is taken to hang."""
    slack_s: float = 0.0
    """How long the ranks of this plan may wait for each other in its gaps, beside that."""
    record: str | None = None
    """Folder for a recording of the replay."""
