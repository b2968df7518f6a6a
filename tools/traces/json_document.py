"""Large JSON files of the kind that PyTorch's profilers write: an object with a few fields and one long list.

A whole file is decoded at once into typed rows. A file that is cut off, or has single rows that are no valid JSON
rows (NaN, numbers in quotes, bytes that are no UTF-8), is read again row by row: every whole row is kept, the rest
is counted in `Document.damage`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import msgspec

from crossrank.budget import OBJECTS, ROWS, Budget
from crossrank.errors import BROKEN, CrossrankError, one_line
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
    budget: Budget
    """What reading it has used, for what its content asks for."""
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


def parse(text: Any, content: type[Content]) -> Content | None:
    """JSON text that stands inside another file, or None where it is not what it should be."""
    try:
        return msgspec.json.decode(text, type=content, strict=False)
    except BROKEN:
        return None


def read_document(path: str, shape: Shape[Content]) -> Document[Content]:
    """Read a plain, gzip or zstd file at a path or an fsspec URL.

    Raises `CrossrankError` where nothing of it can be used.
    """
    data, problems, budget = _read(path)
    budget.spend(OBJECTS, data.count(b"{"))
    digest = hashlib.sha256(data).hexdigest()
    if not data.strip():
        raise CrossrankError(_said(path, "is empty", problems, f"it should be {shape.what}"))
    if shape.bare_list and data.lstrip()[:1] == b"[":
        data = b'{"%s":%s}' % (shape.rows.encode(), data)
    try:
        content = msgspec.json.decode(data, type=shape.content)
    except BROKEN as error:
        salvaged = _Salvage(data, shape)
        if salvaged.content is None:
            raise CrossrankError(
                _said(path, f"is not {shape.what} ({one_line(error)})", problems, "name the right file")
            ) from error
        content, problems = salvaged.content, problems + salvaged.problems
    budget.spend(ROWS, len(getattr(content, shape.rows)))
    return Document(path=path, content=content, sha256=digest, budget=budget, damage=tuple(problems))


def _said(path: str, what: str, problems: list[str], step: str) -> str:
    return f"{path}: {what}{''.join(f'; {problem}' for problem in problems)}; {step}"


def _read(path: str) -> tuple[bytes, list[str], Budget]:
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
    return b"".join(chunks), damage.problems, damage.budget


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
        rows, unusable, first = [], 0, ""
        end = start.end()
        for position, row in self._rows(text, start.end()):
            if row is _END:
                end = position
                break
            try:
                # Encoding turns NaN and Infinity, which JSON lacks, into null.
                rows.append(decoder.decode(msgspec.json.encode(row)))
            except BROKEN as error:
                unusable += 1
                first = first or f"first at character {position}: {one_line(error)}"
        if unusable:
            self.problems.append(f"{unusable} of {unusable + len(rows)} {self.shape.rows} are unusable ({first})")
        rest = text[end:].lstrip()
        if not rest.startswith("]"):
            self.problems.append(
                f"cut off or broken at character {end} of {len(text)}; {len(rows)} whole {self.shape.rows} were read"
            )
            rest = "]}"
            if not rows:
                return
        head = self._head(text[: start.end()], rest)
        if head is not None:
            setattr(head, self.shape.rows, rows)
            self.content = head

    def _rows(self, text: str, position: int) -> Iterator[tuple[int, Any]]:
        """(position, row) for every row, then (position, `_END`) where the list ends or breaks."""
        # Not strict: control characters stand in strings as they are. A number that no field holds is as good as none.
        decode = json.JSONDecoder(strict=False, parse_int=_number).raw_decode
        while True:
            position = cast("re.Match[str]", _BETWEEN.match(text, position)).end()
            try:
                row, after = decode(text, position)
            except RecursionError:
                following = _NEXT_ROW.search(text, position)
                if following is None:
                    yield position, _END
                    return
                row, after = None, following.end() - 1
            except ValueError:
                yield position, _END
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
                fields = json.loads(candidate)
            except (ValueError, RecursionError):
                continue
            if problem is not None:
                self.problems.append(problem)
            return self._convert(fields)
        return None

    def _convert(self, fields: dict[str, Any]) -> Content:
        """The head from its fields, without those that are not what they should be."""
        good: dict[str, Any] = {self.shape.rows: []}
        for name in getattr(self.shape.content, "__struct_encode_fields__", ()):
            if name in fields and name != self.shape.rows:
                try:
                    msgspec.json.encode(fields[name])  # halves of surrogate pairs could not be written again
                    msgspec.convert(good | {name: fields[name]}, self.shape.content, strict=False)
                except BROKEN as error:
                    self.problems.append(f"{name} is unusable ({one_line(error)})")
                    continue
                good[name] = fields[name]
        return msgspec.convert(good, self.shape.content, strict=False)


_END = object()
_BETWEEN = re.compile(r"[\s,]*")
_NEXT_ROW = re.compile(r"\}\s*,\s*\{")


def _number(digits: str) -> float:
    return int(digits) if len(digits) < 40 else math.inf
