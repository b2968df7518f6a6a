"""What workers of `test_parallel` do, in a module that takes no time to import."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from crossrank.budget import BudgetError
from crossrank.errors import CrossrankError


@dataclass(frozen=True)
class Work:
    """One item; `folder` remembers who was here."""

    folder: Path
    number: int
    deaths: int = 0
    failures: int = 0


def square(work: Work) -> int:
    """Runs in a worker: dies or fails so often as its item says."""
    visits = len(list(work.folder.glob(f"{work.number}-*")))
    (work.folder / f"{work.number}-{visits}").touch()
    if visits < work.deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    if visits < work.failures:
        raise CrossrankError(f"item {work.number} was not there")
    return work.number**2


def squared_text(work: Work) -> str:
    return str(square(work))


def refuse(path: str) -> None:
    """Runs in a worker: an error that `pickle` cannot make again from its text."""
    raise BudgetError(path, "is refused")


def large(size: int) -> bytes:
    """Runs in a worker."""
    return bytes(size)
