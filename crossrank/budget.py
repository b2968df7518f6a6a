"""Limits on what one file may expand to, so that a small file cannot use up the reader's memory or time.

A file states how large things are: its unpacked size, the members of a group, how often something is repeated. A
real file stays far below these limits. A file above them is malicious or broken. A file of up to 1 MB may have
`base` items of a kind. A larger file may have `per_byte` more for each further byte on disk.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import dataclass, field

from crossrank.errors import CrossrankError

_FREE = 1_000_000
"""The first bytes on disk, which do not raise a limit."""


@dataclass(frozen=True)
class Limit:
    """How many items of one kind a file may have."""

    what: str
    base: int
    per_byte: int


BYTES = Limit("bytes of content", 64 << 20, 256)
LINES = Limit("lines", 1 << 17, 1)
"""Lines of a comms file. A call takes 10 bytes there; a replay turns each into about 2.5 kB."""
ROWS = Limit("rows", 1 << 18, 1)
"""Rows of a file's long list: nodes, events, calls or entries."""
OBJECTS = Limit("JSON objects", 2_000_000, 64)
"""JSON objects in rows that are decoded into structs. The reader counts their brackets before it decodes them."""
VALUES = Limit("values", 3_000_000, 64)
"""Values of content that is decoded without a struct."""
QUERIES = Limit("microseconds of queries", 3_000_000, 1)
"""CPU time of queries in SQLite. A genuine export takes a twentieth of it."""
MEMBERS = Limit("members of groups", 1 << 20, 4)
EXTENTS = Limit("extents of tensors", 1 << 20, 4)


class BudgetError(CrossrankError):
    """A file asks for more than any real file of its size. `what` is the message without the path."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.what = what


@dataclass
class Budget:
    """What one file has used of its limits."""

    path: str
    size: int = 0
    """Bytes on disk; 0 if unknown."""
    used: Counter[Limit] = field(default_factory=Counter)

    @classmethod
    def of(cls, path: str) -> Budget:
        """Return the budget of the local file at `path`."""
        return cls(path, os.path.getsize(path) if os.path.isfile(path) else 0)

    def spend(self, limit: Limit, count: int) -> None:
        """Count `count` more items. Raise `BudgetError` above the limit."""
        self.used[limit] += count
        most = limit.base + limit.per_byte * max(0, self.size - _FREE)
        if self.used[limit] > most:
            size = f"of {self.size:,} bytes" if self.size else "like it"
            raise BudgetError(
                self.path,
                f"is refused: it has, or asks for, more than {most:,} {limit.what}, far more than a real file "
                f"{size} does; give another file",
            )

    def ranks(self, ranks: list[int] | range) -> list[int]:
        """Return the members of a group as a list. Spend the members of a range, which the file does not list."""
        if isinstance(ranks, list):
            return ranks
        self.spend(MEMBERS, len(ranks))
        return list(ranks)


def read_small(path: str | os.PathLike[str], most: int = 16 << 20) -> bytes:
    """Return the content of a regular file that programs write for each other, such as a verdict.

    Raise `BudgetError` for more than `most` bytes, and for a pipe or a device, which could have no end. Raise
    `OSError` if the file cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BudgetError(os.fspath(path), "is not a regular file, so it is not read")
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise BudgetError(os.fspath(path), f"is refused: it has more than {most:,} bytes")
    return content
