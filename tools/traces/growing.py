"""Reads a comms file that its rank still writes: what is new since the last look, and the time of its last call.

The file has final zstd frames, then one or two that the next write replaces, and maybe an incomplete one. So every look
reads the last two frames again, and the frames before them once.

The recorder writes final frames of about 512 calls. The reader takes in no more than 64 MiB of content at once, and
refuses a frame with more.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import zstandard

from crossrank.budget import BYTES, LINES, Budget, BudgetError, Limit
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
_PIECE = 1 << 10
"""Bytes that are decompressed at once: zstd expands them up to 32,768 times."""
_MOST_CONTENT = BYTES.base
"""Maximum bytes of content that one look returns, and those of a frame."""


@dataclass(kw_only=True)
class Growth:
    """What one look at a file found: whole lines."""

    settled: bytes = b""
    """Final lines that are new since the last look."""
    recent: bytes = b""
    """Lines that may change until the next look."""
    begins_anew: bool = False
    """The file is not the same as at the last look: another run writes to the folder."""
    goes_on: bool = False
    """The file had more content than one look returns. The next look continues there."""


class GrowingFile:
    """A file that is read repeatedly while it grows."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._at = 0
        self._inode = 0
        self._used = Counter[Limit]()
        """What the final frames that were read so far have of the file's limits."""

    def look(self) -> Growth:
        """Return what is new. Raises `OSError` if the file is unreadable, and `BudgetError` at a place that expands to
        more than the recorder writes."""
        growth = Growth()
        with open(self.path, "rb") as file:
            found = os.fstat(file.fileno())
            if self._inode and (found.st_ino != self._inode or found.st_size < self._at):
                self._at, self._used, growth.begins_anew = 0, Counter(), True
            self._inode = found.st_ino
            file.seek(self._at)
            data = file.read(_MOST)
            is_end = self._at + len(data) >= found.st_size
        budget = Budget(self.path, found.st_size, self._used.copy())
        frames: list[tuple[int, bytes]] = []
        content = 0
        try:
            for frame in _frames(data, budget, self._at):
                content += len(frame[1])
                if frames and content > _MOST_CONTENT:
                    growth.goes_on = True
                    break
                frames.append(frame)
        except BudgetError:
            if not frames:
                raise
            growth.goes_on = True  # to the place that is refused, with the frames before it
        settled = len(frames) if growth.goes_on or not is_end else max(0, len(frames) - _REPLACED)
        self._at += sum(size for size, _ in frames[:settled])
        growth.settled = b"".join(content for _, content in frames[:settled])
        growth.recent = b"".join(content for _, content in frames[settled:])
        self._used += Counter({BYTES: len(growth.settled), LINES: growth.settled.count(b"\n")})
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
            called, clock = None, dict[str, int]()
            try:
                for content in _last_frames(path, data):
                    for line in _decode(content):
                        called = line.t if line.id is not None else called
                        clock = line.clock or clock
            except (*BROKEN, BudgetError):
                return None
            if called is not None and "wall" in clock and "t" in clock:
                return called + clock["wall"] - clock["t"]
            if length >= min(size, _MOST):
                return None
            length *= 16


def _last_frames(path: str, data: bytes) -> Iterator[bytes]:
    """Yield the contents of the frames from the first one that starts in `data`."""
    at, budget = -1, Budget(path, len(data))
    for _ in range(_MOST_MAGICS):
        at = data.find(_MAGIC, at + 1)
        if at < 0:
            return
        is_start = False
        for _, content in _frames(data[at:], budget):
            is_start = True
            yield content
        if is_start:
            return


def _frames(data: bytes, budget: Budget, first: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield (bytes in the file, content) of the complete frames at the start of `data`, which is at byte `first`."""
    at = 0
    while at < len(data):
        stream, begin = zstandard.ZstdDecompressor().decompressobj(), at
        content, size = list[bytes](), 0
        try:
            while at < len(data) and not stream.eof:
                piece = data[at : at + _PIECE]
                made = stream.decompress(piece)
                at += len(piece) - len(stream.unused_data)
                size += len(made)
                if size > _MOST_CONTENT:
                    raise BudgetError(
                        budget.path,
                        f"is refused from byte {first + begin:,} on: a part there has more than {_MOST_CONTENT:,} "
                        "bytes of content, far more than the recorder writes at once; `crossrank inspect` reads the "
                        "whole file",
                    )
                budget.spend(BYTES, len(made))
                budget.spend(LINES, made.count(b"\n"))
                content.append(made)
        except zstandard.ZstdError:  # it is being written: the next look finds it complete
            return
        if not stream.eof:
            return
        yield at - begin, b"".join(content)
