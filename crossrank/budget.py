"""Bounds on what one file may expand to, so that a small file cannot use up its reader's memory or time.

A file states how large things are: how far it unpacks, how many members a group has, how often one thing is
repeated. A genuine file stays far below these bounds; one that does not is malicious or broken. A file of up to 1 MB
may have `base` of a thing, a larger one `per_byte` more for every byte that it has on disk beyond that.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import dataclass, field

from crossrank.errors import CrossrankError

_FREE = 1_000_000
"""Bytes on disk that do not make a bound larger."""


@dataclass(frozen=True)
class Limit:
    """How many of a thing a file may have."""

    what: str
    base: int
    per_byte: int


BYTES = Limit("bytes of content", 64 << 20, 256)
LINES = Limit("lines", 1 << 17, 1)
"""Of a comms file, whose calls take 10 bytes each; a replay makes some 2.5 kB of one."""
ROWS = Limit("rows", 1 << 18, 1)
"""Of the long list that a file consists of: nodes, events, calls, entries."""
OBJECTS = Limit("JSON objects", 2_000_000, 64)
"""In rows that are decoded into structs, counted before anything is known of them but their brackets."""
VALUES = Limit("values", 3_000_000, 64)
"""Of content that is decoded into whatever it holds."""
QUERIES = Limit("microseconds of queries", 3_000_000, 1)
"""Of a processor, within SQLite; a genuine export takes a twentieth of it."""
MEMBERS = Limit("members of groups", 1 << 20, 4)
EXTENTS = Limit("extents of tensors", 1 << 20, 4)


class BudgetError(CrossrankError):
    """A file asks for more than any genuine one of its size has. `what` is the text without the file."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.what = what


@dataclass
class Budget:
    """What one file has used of its bounds."""

    path: str
    size: int = 0
    """Bytes on disk; 0 where it is not known."""
    used: Counter[Limit] = field(default_factory=Counter)

    @classmethod
    def of(cls, path: str) -> Budget:
        """That of the local file at `path`."""
        return cls(path, os.path.getsize(path) if os.path.isfile(path) else 0)

    def spend(self, limit: Limit, count: int) -> None:
        """Note `count` more of a thing. Raises `BudgetError` past its bound."""
        self.used[limit] += count
        most = limit.base + limit.per_byte * max(0, self.size - _FREE)
        if self.used[limit] > most:
            size = f"of {self.size:,} bytes" if self.size else "like it"
            raise BudgetError(
                self.path,
                f"is refused: it holds, or asks for, more than {most:,} {limit.what}, far more than a genuine file "
                f"{size} does; name another",
            )

    def ranks(self, ranks: list[int] | range) -> list[int]:
        """The members of a group. Those that a range stands for the file does not list but counts: they are spent."""
        if isinstance(ranks, list):
            return ranks
        self.spend(MEMBERS, len(ranks))
        return list(ranks)


def read_small(path: str | os.PathLike[str], most: int = 16 << 20) -> bytes:
    """The content of a regular file that programs write for each other, such as a verdict.

    A pipe would be waited for, and a device has no end: raises `BudgetError` for them and for more than `most` bytes,
    `OSError` where the file cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BudgetError(os.fspath(path), "is no regular file; it is not read")
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise BudgetError(os.fspath(path), f"is refused: it holds more than {most:,} bytes")
    return content
