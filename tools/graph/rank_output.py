"""The file that a command writes for one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from crossrank.errors import CrossrankError, one_line


@dataclass(kw_only=True)
class RankOutput:
    """What became of one rank and window."""

    rank: int | None
    window: int
    output: str | None = None
    error: str | None = None
    """Why there is no output."""

    @property
    def name(self) -> str:
        rank = "one pair" if self.rank is None else f"rank {self.rank}"
        return rank if self.window == 1 else f"{rank}, window {self.window}"


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Turn what goes wrong with the disk into a `CrossrankError` that names `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise CrossrankError(f"{path}: cannot be written ({reason}); name another folder with -o") from error
