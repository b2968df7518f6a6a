"""A comms file that its rank still writes: what is new in it since the last look.

The file is zstd frames that stand for good, one or two that the next write replaces at their place, and maybe a torn
one. So what the last two frames hold is read anew at every look, and what lies before them once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import zstandard

from crossrank.budget import BYTES, Budget

_REPLACED = 2
"""Frames at the end that may still be replaced."""
_MOST = 16 << 20
"""Bytes of a file that are read at one look: the next one goes on where a long recording was left."""
_PIECE = 1 << 13
"""Bytes that are decompressed at once: zstd makes up to 32,768 times as much of them."""


@dataclass(kw_only=True)
class Growth:
    """What a look at a file gave: whole lines."""

    settled: bytes = b""
    """New since the last look, for good."""
    recent: bytes = b""
    """What may be otherwise at the next look."""
    begins_anew: bool = False
    """The file is not the one of the last look: another run writes to the folder."""


class GrowingFile:
    """A file that is looked at again and again."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._at = 0
        self._inode = 0

    def look(self) -> Growth:
        """What is new. Raises `OSError` where the file cannot be read, `BudgetError` where a small one has no end."""
        growth = Growth()
        with open(self.path, "rb") as file:
            found = os.fstat(file.fileno())
            if self._inode and (found.st_ino != self._inode or found.st_size < self._at):
                self._at, growth.begins_anew = 0, True
            self._inode = found.st_ino
            file.seek(self._at)
            data = file.read(_MOST)
            is_end = self._at + len(data) >= found.st_size
        frames = _frames(data, Budget(self.path, found.st_size))
        settled = max(0, len(frames) - _REPLACED) if is_end else len(frames)
        self._at += sum(size for size, _ in frames[:settled])
        growth.settled = b"".join(content for _, content in frames[:settled])
        growth.recent = b"".join(content for _, content in frames[settled:])
        return growth


def _frames(data: bytes, budget: Budget) -> list[tuple[int, bytes]]:
    """(bytes in the file, content) of the whole frames at the begin of `data`."""
    frames: list[tuple[int, bytes]] = []
    at = 0
    while at < len(data):
        stream, content, begin = zstandard.ZstdDecompressor().decompressobj(), b"", at
        try:
            while at < len(data) and not stream.eof:
                made = stream.decompress(data[at : at + _PIECE])
                at += len(data[at : at + _PIECE]) - len(stream.unused_data)
                budget.spend(BYTES, len(made))
                content += made
        except zstandard.ZstdError:  # it is being written: the next look will see it whole
            break
        if not stream.eof:
            break
        frames.append((at - begin, content))
    return frames
