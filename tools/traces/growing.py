"""Reads a comms file that its rank still writes: what is new since the last look, and the time of its last call.

The file has final zstd frames, then one or two that the next write replaces, and maybe an incomplete one. So every look
reads the last two frames again, and the frames before them once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import msgspec
import zstandard

from crossrank.budget import BYTES, Budget, BudgetError
from crossrank.comm import Int
from crossrank.errors import BROKEN

_REPLACED = 2
"""Frames at the end that may still be replaced."""
_MOST = 16 << 20
"""Maximum bytes that one look reads. In a long recording, the next look continues there."""
_MAGIC = b"\x28\xb5\x2f\xfd"
_MOST_MAGICS = 64
"""Maximum number of places to try: compressed bytes rarely look like the start of a frame."""
_END = 1 << 16
"""Bytes at the end of a file that are searched first for its last call."""
_PIECE = 1 << 13
"""Bytes that are decompressed at once: zstd expands them up to 32,768 times."""


@dataclass(kw_only=True)
class Growth:
    """What one look at a file found: whole lines."""

    settled: bytes = b""
    """Final lines that are new since the last look."""
    recent: bytes = b""
    """Lines that may change until the next look."""
    begins_anew: bool = False
    """The file is not the same as at the last look: another run writes to the folder."""


class GrowingFile:
    """A file that is read repeatedly while it grows."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._at = 0
        self._inode = 0

    def look(self) -> Growth:
        """Return what is new. Raises `OSError` if the file is unreadable, and `BudgetError` if a small one has no
        end."""
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


class _EndLine(msgspec.Struct):
    id: Int | None = None
    t: Int = 0
    clock: dict[str, Int] | None = None


_decode = msgspec.json.Decoder(_EndLine).decode_lines


def last_call_at(path: str) -> int | None:
    """Time of the last call in a comms file, in ns since 1970, without reading all of a long file; None = unknown.

    Raises `OSError` if the file cannot be read.
    """
    size = os.path.getsize(path)
    if not path.endswith(".zst"):
        return None
    length = _END
    with open(path, "rb") as file:
        while True:
            file.seek(max(0, size - length))
            data = file.read(length)
            try:
                lines = [line for content in _last_frames(path, data) for line in _decode(content)]
            except (*BROKEN, BudgetError):
                return None
            calls = [line.t for line in lines if line.id is not None]
            clock = next((line.clock for line in reversed(lines) if line.clock is not None), {})
            if calls and "wall" in clock and "t" in clock:
                return calls[-1] + clock["wall"] - clock["t"]
            if length >= min(size, _MOST):
                return None
            length *= 16


def _last_frames(path: str, data: bytes) -> list[bytes]:
    """Contents of the frames from the first one that starts in `data`."""
    at = -1
    for _ in range(_MOST_MAGICS):
        at = data.find(_MAGIC, at + 1)
        if at < 0:
            break
        if frames := _frames(data[at:], Budget(path, len(data))):
            return [content for _, content in frames]
    return []


def _frames(data: bytes, budget: Budget) -> list[tuple[int, bytes]]:
    """(bytes in the file, content) of the complete frames at the start of `data`."""
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
        except zstandard.ZstdError:  # it is being written: the next look finds it complete
            break
        if not stream.eof:
            break
        frames.append((at - begin, content))
    return frames
