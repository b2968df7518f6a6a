"""Reads large JSON files of PyTorch's profilers: an object with a few fields and one long list of rows.

The file is read as a stream: rows of a few megabytes at a time are decoded into structs and passed on. If that fails
(cut off, NaN, numbers in quotes, bytes that are not UTF-8), the rest is read row by row. Every valid row is kept; the
others are counted in `Document.damage`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar, cast

import msgspec

from crossrank import machine
from crossrank.budget import OBJECTS, ROWS, Budget
from crossrank.errors import BROKEN, CrossrankError, one_line
from crossrank.recording import ReadIssues, read_chunks
from crossrank.unknown_values import Decoder

Content = TypeVar("Content")

# Decoded rows take about this many times the size of the text.
_MEMORY_PER_BYTE = 3
_BATCH = 4 << 20
"""Bytes of rows that are decoded at a time."""
_LONGEST_ROW = 64 << 20
_TAIL = 1 << 16
"""Bytes at the end of a batch that are searched for the start of its last row."""
_FIRST_KEY = re.compile(rb'\s*\{\s*("[^"\\]*")')
_SPACES = " \t\r\n"
_BETWEEN = re.compile(r"[\s,]*")
_KEY = r'\{\s*"(?P<key>[^"\\]*)"\s*:'
_ROW = re.compile(_KEY)
_ROW_AFTER = re.compile(r'\]\s*,\s*\{\s*"')
"""A bracket after which the list continues."""
_LIST_ENDS = re.compile(r'\](?=\s*(?:\}|,\s*"|\Z))')
_MOST_ENDS = 100
"""Places that are tried as the end of the list, where its last row is broken."""
_BARE = re.compile(r"(?<=[:,\[])\s*-?(?:inf|nan|infinity)(?=\s*[,}\]])", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Shape(Generic[Content]):
    """The layout of a kind of file."""

    what: str
    """What the file should be, for messages."""
    content: type[Content]
    rows: str
    """Name of the field with the long list."""
    row: type[Any]
    bare_list: bool = False
    """Whether the list alone, without the object around it, is accepted."""
    lenient: bool = False
    """Whether a field of a row that cannot be read is unknown. If not, it costs the row."""
    hashed: bool = True
    """Whether the SHA-256 is needed."""


def parse(text: Any, content: type[Content]) -> Content | None:
    """JSON text from inside another file, decoded; None if it does not fit `content`."""
    try:
        return msgspec.json.decode(text, type=content, strict=False)
    except BROKEN:
        return None


class Document(Generic[Content]):
    """Reads all that is readable of one file, plain, gzip or zstd, at a path or an fsspec URL.

    `take` gets the rows in their order, some at a time; the list in `content` is empty. Raw fields of a row are views,
    which keep the text around the row in memory. Raises `CrossrankError` if nothing of the file can be used.
    """

    def __init__(self, path: str, shape: Shape[Content], take: Callable[[list[Any]], object]) -> None:
        self.path = path
        self.issues = ReadIssues(path)
        self._digest = hashlib.sha256()
        self._shape = shape
        self._hand_on = take
        self._count = 0
        self._head = b""
        """The text before the list."""
        self._closing = b""
        """The text that a bare list lacks at its end."""
        self._rest = bytearray()
        """The text from the bracket before the first row that was not passed on."""
        self._boundary: re.Pattern[bytes] | None = None
        """What is between two rows."""
        self._streams = True
        """Whether the ends of rows can be found without decoding."""
        self.content = self._read()
        setattr(self.content, shape.rows, [])

    @property
    def sha256(self) -> str:
        """SHA-256 of the uncompressed content, if the shape is hashed."""
        return self._digest.hexdigest()

    @property
    def budget(self) -> Budget:
        """The budget of reading, for those who decode more of the content."""
        return self.issues.budget

    @property
    def damage(self) -> list[str]:
        """Parts of the file that could not be read."""
        return self.issues.problems

    def _read(self) -> Content:
        try:
            self._stream()
        except OSError as error:
            raise CrossrankError(f"{self.path}: cannot be read ({one_line(error)})") from error
        problems = "".join(f"; {problem}" for problem in self.issues.problems)
        if not self._head and not self._rest.strip():
            what = problems[2:] or f"is empty; it should be {self._shape.what}"
            raise CrossrankError(f"{self.path}: {what}")
        try:
            content = msgspec.json.decode(self._head + self._rest + self._closing, type=self._shape.content)
        except BROKEN as error:
            salvaged = self._salvage() if self._head else None
            if salvaged is None:
                raise CrossrankError(
                    f"{self.path}: is not {self._shape.what} ({one_line(error)}){problems}; give the right file"
                ) from error
            return salvaged
        self._take(getattr(content, self._shape.rows))
        return content

    def _stream(self) -> None:
        """Pass on the rows. The last ones and the part after the list stay in `_rest`."""
        memory = machine.memory()
        size = 0
        for chunk in read_chunks(self.path, self.issues):
            size += len(chunk)
            if size * _MEMORY_PER_BYTE > memory:
                raise CrossrankError(
                    f"{self.path}: has more than {size / 1e9:.1f} GB of JSON, too much for this machine's "
                    f"{memory / 1e9:.0f} GB of memory; record a shorter window, or use a larger machine"
                )
            if self._shape.hashed:
                self._digest.update(chunk)
            self.issues.budget.spend(OBJECTS, chunk.count(b"{"))
            searched = max(0, len(self._rest) - 100)
            self._rest += chunk
            if not self._head:
                self._find_list(searched)
            if self._head and self._boundary is None and (key := _FIRST_KEY.match(self._rest, 1)):
                self._boundary = re.compile(rb"\}\s*,\s*(?=\{\s*" + re.escape(key[1]) + rb"\s*:)")
            if self._streams and self._boundary is not None and len(self._rest) >= _BATCH:
                self._decode_batch(self._boundary)

    def _find_list(self, searched: int) -> None:
        rows = self._shape.rows.encode()
        if self._shape.bare_list and self._rest.lstrip()[:1] == b"[":
            self._head, self._closing = b'{"%b":' % rows, b"}"
            del self._rest[: self._rest.index(b"[")]
        elif (start := re.compile(rb'"%b"\s*:\s*\[' % rows).search(self._rest, searched)) is not None:
            self._head = bytes(self._rest[: start.end() - 1])
            del self._rest[: start.end() - 1]

    def _decode_batch(self, boundary: re.Pattern[bytes]) -> None:
        # If there is no boundary near the end, there may be one after the next chunk.
        *_, cut = None, *boundary.finditer(self._rest, len(self._rest) - _TAIL)
        if cut is None:
            self._streams = len(self._rest) <= _LONGEST_ROW
            return
        end, start = cut.start() + 1, cut.end() - 1
        del cut  # a match keeps `_rest` from changing its size
        after = self._rest[end]
        self._rest[end] = ord("]")
        try:
            rows = msgspec.json.decode(bytes(self._rest[: end + 1]), type=list[self._shape.row])  # type: ignore[name-defined]
        except BROKEN:
            self._streams = False
            self._rest[end] = after
            return
        self._take(rows)
        del self._rest[:start]
        self._rest[0] = ord("[")

    def _take(self, rows: list[Any]) -> None:
        self.issues.budget.spend(ROWS, len(rows))
        self._count += len(rows)
        self._hand_on(rows)

    def _salvage(self) -> Content | None:
        """Read row by row what does not decode as a whole. None if there is no row."""
        problems, name = self.issues.problems, self._shape.rows
        text = self._rest[1:].decode(errors="replace")
        unknown = Counter[str]()
        lenient = Decoder(self._shape.row, unknown, strict=False)
        decoder = lenient if self._shape.lenient else msgspec.json.Decoder(self._shape.row, strict=False)
        rows, broken = list[Any](), list[str]()
        reader = _Rows(text, self._closing.decode())
        for number, row in enumerate(reader, start=self._count + 1):
            try:
                if isinstance(row, ValueError):
                    raise row
                rows.append(decoder.decode(msgspec.json.encode(row)))
            except BROKEN as error:
                broken.append(f"number {number}, {one_line(error)}")
        total = self._count + len(rows)
        if broken:
            problems.append(f"{len(broken)} of {len(broken) + total} {name} are unusable (first: {broken[0]})")
        if unknown:
            fields = ", ".join(f"{field} {count:,}" for field, count in unknown.most_common())
            problems.append(f"values of {name} that cannot be read are unknown: {fields}")
        if reader.nulls:
            problems.append(f"numbers that JSON lacks (inf, nan): {reader.nulls}; they are taken as unknown")
        after = text[reader.end :].lstrip()
        if not after.startswith("]"):
            problems.append(f"cut off or broken after {len(broken) + total} {name}; {total} whole {name} were read")
            after = "]}"
            if not total:
                return None
        self._take(rows)
        return self._salvage_head(self._head.decode(errors="replace") + "[", after + self._closing.decode())

    def _salvage_head(self, before: str, after: str) -> Content:
        """The other fields of the object: all, else those before the list, else their defaults."""
        name = self._shape.rows
        fields: dict[str, Any] = {}
        for candidate, problem in (
            (before + after, ""),
            (before + "]}", f"the part after the {name} is broken and was skipped"),
            ("{}", f"the part around the {name} is broken and was skipped"),
        ):
            with suppress(ValueError, RecursionError):
                fields = json.loads(candidate)
                self.issues.problems += [problem] if problem else []
                break
        good: dict[str, Any] = {name: []}
        for field in self._shape.content.__struct_encode_fields__:  # type: ignore[attr-defined]
            if field in fields and field != name:
                try:
                    msgspec.json.encode(fields[field])  # halves of surrogate pairs could not be written again
                    msgspec.convert(good | {field: fields[field]}, self._shape.content, strict=False)
                    good[field] = fields[field]
                except BROKEN as error:
                    self.issues.problems.append(f"{field} is unusable ({one_line(error)})")
        return msgspec.convert(good, self._shape.content, strict=False)


class _Rows:
    """Reads the objects at the start of a text one by one. One that is no JSON costs itself alone: the next one begins
    behind a closing brace, with a key that other rows begin with."""

    def __init__(self, text: str, closing: str) -> None:
        """`closing`: what the text lacks at its end."""
        self.end = 0
        """The position where the list ends or breaks."""
        self.nulls = 0
        """Numbers that JSON lacks."""
        self._text, self._closing = text, closing
        self._keys = set[str]()
        """First keys of rows."""
        # Not strict: strings may have control characters. A number that is too large for every field becomes infinite.
        decoder = json.JSONDecoder(strict=False, parse_int=_number, parse_constant=self._null)
        self._decode = decoder.raw_decode

    def __iter__(self) -> Iterator[Any]:
        """Yield each row; a `ValueError` that says why it cannot be read."""
        text = self._text
        while True:
            self.end = cast("re.Match[str]", _BETWEEN.match(text, self.end)).end()
            if self.end == len(text) or (text[self.end] == "]" and not _ROW_AFTER.match(text, self.end)):
                return
            nulls = self.nulls
            try:
                row, end = self._decode(text, self.end)
                if not isinstance(row, dict) and text[end : end + 1] not in (",", "]"):
                    raise ValueError("it does not begin as an object does")
            except (ValueError, RecursionError) as error:
                self.nulls = nulls
                broken_end = self._end_of_broken_row()
                if broken_end is None:
                    return
                row, end = self._repaired(text[self.end : broken_end], error), broken_end
            if isinstance(row, dict):
                self._keys.update(islice(row, 1))
            yield row
            self.end = end

    def _end_of_broken_row(self) -> int | None:
        """Return where a row ends that cannot be read; None if the text ends there."""
        text, keys = self._text, self._keys
        if not keys and (own := _ROW.match(text, self.end)) is not None:
            keys = {own["key"]}
        for found in _ROW.finditer(text, self.end + 1):
            if found["key"] in keys and self._before(found.start(), _SPACES) in ",]}":
                return found.start()
            if not keys and self._before(found.start(), _SPACES + ",]") == "}":
                return found.start()
        for found in islice(_LIST_ENDS.finditer(text, self.end), _MOST_ENDS):
            with suppress(ValueError, RecursionError):
                json.loads('{"": [' + text[found.start() :] + self._closing)
                return found.start()
        return None

    def _before(self, position: int, skipped: str) -> str:
        """Return the last character before a position that is none of `skipped`. A pattern would try each of a run."""
        while (position := position - 1) > self.end and self._text[position] in skipped:
            pass
        return self._text[position]

    def _repaired(self, part: str, error: Exception) -> Any:
        """Return a row without the bare `inf` and `nan` that C++ prints; why it cannot be read, if there is more."""
        nulls = self.nulls
        text, bare = _BARE.subn("null", part)
        with suppress(ValueError, RecursionError):
            row, end = self._decode(text, 0)
            if isinstance(row, dict) and not text[end:].strip(_SPACES + ",]"):
                self.nulls += bare
                return row
        self.nulls = nulls
        why = error.msg if isinstance(error, json.JSONDecodeError) else one_line(error)
        return ValueError(f"it is no JSON: {why}")

    def _null(self, _name: str) -> None:
        self.nulls += 1


def _number(digits: str) -> float:
    return int(digits) if len(digits) < 40 else math.inf
