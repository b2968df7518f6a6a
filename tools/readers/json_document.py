"""Large JSON files of the kind that PyTorch's profilers write: an object with a few fields and one long list.

A whole file is decoded at once into typed rows. A file that is cut off, or has single rows that are no valid JSON
rows (NaN, numbers in quotes, bytes that are no UTF-8), is read again row by row: every whole row is kept, the rest
is counted in `Document.damage`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from crossrank.errors import CrossrankError, one_line
from crossrank.recording import Damage, read_chunks

Content = TypeVar("Content")

# Decoded rows take about this many times the size of the text.
_MEMORY_PER_BYTE = 3


@dataclass(frozen=True, kw_only=True)
class Document(Generic[Content]):
    """What could be read of one file."""

    path: str
    content: Content
    sha256: str
    """Of the uncompressed content."""
    damage: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Shape(Generic[Content]):
    """How a kind of file is laid out."""

    what: str
    """What the file should be, for messages."""
    content: type[Content]
    rows: str
    """Name of the field that holds the long list."""
    row: type[Any]
    bare_list: bool = False
    """Whether the list alone, without the object around it, is accepted."""


def read_document(path: str, shape: Shape[Content]) -> Document[Content]:
    """Read a plain, gzip or zstd file at a path or an fsspec URL.

    Raises `CrossrankError` where nothing of it can be used.
    """
    data, problems = _read(path)
    digest = hashlib.sha256(data).hexdigest()
    if not data.strip():
        raise CrossrankError(_said(path, "is empty", problems, f"it should be {shape.what}"))
    if shape.bare_list and data.lstrip()[:1] == b"[":
        data = b'{"%s":%s}' % (shape.rows.encode(), data)
    try:
        content = msgspec.json.decode(data, type=shape.content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        salvaged = _Salvage(data, shape)
        if salvaged.content is None:
            raise CrossrankError(
                _said(path, f"is not {shape.what} ({one_line(error)})", problems, "name the right file")
            ) from error
        return Document(path=path, content=salvaged.content, sha256=digest, damage=tuple(problems + salvaged.problems))
    return Document(path=path, content=content, sha256=digest, damage=tuple(problems))


def _said(path: str, what: str, problems: list[str], step: str) -> str:
    return f"{path}: {what}{''.join(f'; {problem}' for problem in problems)}; {step}"


def _read(path: str) -> tuple[bytes, list[str]]:
    damage = Damage(path)
    chunks, size = [], 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        for chunk in read_chunks(path, damage):
            chunks.append(chunk)
            size += len(chunk)
            if size * _MEMORY_PER_BYTE > memory:
                raise CrossrankError(
                    f"{path}: holds more than {size / 1e9:.1f} GB of JSON, too much for this machine's "
                    f"{memory / 1e9:.0f} GB of memory; record a shorter window, or use a larger machine"
                )
    except OSError as error:
        raise CrossrankError(f"{path}: cannot be read ({error.strerror or one_line(error)})") from error
    if not chunks and damage.problems:
        raise CrossrankError(f"{path}: {damage.problems[0]}")
    return b"".join(chunks), damage.problems


@dataclass
class _Salvage(Generic[Content]):
    """Reads row by row what does not decode as a whole."""

    data: bytes
    shape: Shape[Content]
    content: Content | None = None
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        text = self.data.decode(errors="replace")
        start = re.search(rf'"{self.shape.rows}"\s*:\s*\[', text)
        if start is None:
            return
        decoder = msgspec.json.Decoder(self.shape.row, strict=False)
        rows, unusable, first, end = [], 0, "", None
        for position, row in self._rows(text, start.end()):
            if row is None:
                end = position
                break
            try:
                # Encoding turns NaN and Infinity, which JSON lacks, into null.
                rows.append(decoder.decode(msgspec.json.encode(row)))
            except (msgspec.MsgspecError, UnicodeError) as error:
                unusable += 1
                first = first or f"first at character {position}: {one_line(error)}"
        if unusable:
            self.problems.append(f"{unusable} of {unusable + len(rows)} {self.shape.rows} are unusable ({first})")
        rest = "" if end is None else text[end:].lstrip()
        if not rest.startswith("]"):
            at = len(text) if end is None else end
            self.problems.append(
                f"cut off or broken at character {at} of {len(text)}; {len(rows)} whole {self.shape.rows} were read"
            )
            rest = "]}"
            if not rows:
                return
        head = self._head(text[: start.end()], rest)
        if head is not None:
            setattr(head, self.shape.rows, rows)
            self.content = head

    def _rows(self, text: str, position: int) -> Iterator[tuple[int, Any]]:
        """(position, row) for every whole row, then (position, None) where the list ends or breaks."""
        decode = json.JSONDecoder().raw_decode
        skip = re.compile(r"[\s,]*")
        while True:
            position = skip.match(text, position).end()  # type: ignore[union-attr]
            try:
                row, after = decode(text, position)
            except (ValueError, RecursionError):
                yield position, None
                return
            if row is None:
                yield position, None
                return
            yield position, row
            position = after

    def _head(self, before: str, after: str) -> Content | None:
        """The other fields of the object: all, or those before the list, or their defaults."""
        empty = f'{{"{self.shape.rows}":[]}}'
        for candidate, problem in (
            (before + after, None),
            (before + "]}", f"what follows the {self.shape.rows} is broken and was left out"),
            (empty, f"what stands around the {self.shape.rows} is broken and was left out"),
        ):
            try:
                head = msgspec.convert(json.loads(candidate), self.shape.content, strict=False)
            except (ValueError, RecursionError, msgspec.MsgspecError):
                continue
            if problem is not None:
                self.problems.append(problem)
            return head
        return None
