"""What is in the files that commands write, as values that a reader of a difference can judge.

For each field, over all files of a kind: how many values it has; of numbers their sum; of texts how often each occurs,
or, where they are many, how many there are.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from perfetto.protos.perfetto.trace import perfetto_trace_pb2

from crossrank.recording import ReadIssues, read_chunks
from crossrank.tools.commands.export import SCHEMA
from crossrank.tools.graph.chakra.framing import read_trace

_MOST_TEXTS = 8
_LONG = 100
"""Characters of a text that is counted, not shown."""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_IN_A_NAME = re.compile(r"(?<=[-.])\d+(?=\.)")
_IS_A_KEY = re.compile(r"[A-Za-z_][\w .:/()#-]*")


def contents(folder: Path, *others: Path) -> dict[str, dict[str, str]]:
    """Name of each kind of file below a folder, `*` for the rank -> its fields. The names of this folder and of
    `others` are taken out of texts."""
    files: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.rglob("*.*")):
        if path.name != SCHEMA:  # which is the same for every job
            files[_IN_A_NAME.sub("*", str(path.relative_to(folder)))].append(path)
    found = {}
    for name, paths in files.items():
        values: dict[str, list[Any]] = defaultdict(list)
        for path in paths:
            for field, value in _values(path, (folder, *others)):
                values[field].append(value)
        found[name] = {"": f"{len(paths)} files"} | {field: _summary(of_field) for field, of_field in values.items()}
    return found


def _summary(values: list[Any]) -> str:
    """
    >>> _summary([1, 2.5]), _summary(["a", "b", "a"])
    ('2 from 1 to 2.5, sum 3.5', '3: a 2, b 1')
    """
    numbers = [Decimal(str(one)) for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
    texts = Counter(str(one) for one in values if isinstance(one, bool) or not isinstance(one, int | float))
    parts = []
    if numbers:
        ends = (min(numbers), max(numbers), sum(numbers))
        least, greatest, total = (f"{one:.12g}" if one % 1 else f"{one:.0f}" for one in ends)
        parts.append(f"{len(numbers)} from {least} to {greatest}, sum {total}")
    if len(texts) > _MOST_TEXTS or any(len(text) > _LONG for text in texts):
        parts.append(f"{texts.total()}, {len(texts)} of them different, {sum(map(len, texts))} characters")
    elif texts:
        parts.append(f"{texts.total()}: " + ", ".join(f"{text} {texts[text]}" for text in sorted(texts)))
    return "; ".join(parts)


def _values(path: Path, folders: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """(name of a field, one of its values)"""
    if path.suffix == ".et":
        yield from _of_chakra(path)
        return
    content = b"".join(read_chunks(str(path), ReadIssues(str(path))))
    if path.suffix == ".pftrace":
        yield from _of_timeline(content)
        return
    text = content.decode()
    for folder in folders:
        text = text.replace(str(folder), "")
    if path.suffix == ".html":
        yield from _of_page(text)
    elif path.suffix == ".csv":
        for row in csv.DictReader(io.StringIO(text)):
            yield from ((name, _number(value)) for name, value in row.items())
    else:
        yield from _of_json(json.loads(text), "")


def _number(text: str) -> Any:
    return json.loads(text) if re.fullmatch(_NUMBER, text) and not re.match(r"-?0\d", text) else text


def _of_json(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _of_json(inner, f"{name}.{key if _IS_A_KEY.fullmatch(key) else '*'}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from _of_json(inner, name)
    elif value is not None:
        yield name, value


def _of_chakra(path: Path) -> Iterator[tuple[str, Any]]:
    metadata, nodes = read_trace(str(path))
    yield from _of_json(MessageToDict(metadata, preserving_proto_field_name=True), "metadata")
    for _, node in nodes:
        yield "type", node.type
        yield "name", node.name
        yield "duration_micros", node.duration_micros
        yield "data_deps", len(node.data_deps)
        yield "ctrl_deps", len(node.ctrl_deps)
        for one in node.attr:
            kind = one.WhichOneof("value")
            given = getattr(one, str(kind))
            for value in getattr(given, "values", [given]):
                yield f"attr.{one.name}", value


def _of_timeline(content: bytes) -> Iterator[tuple[str, Any]]:
    trace = perfetto_trace_pb2.Trace()
    trace.ParseFromString(content)
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            yield "track", packet.track_descriptor.name
        for name in packet.interned_data.event_names:
            yield "event name", name.name
        if packet.HasField("track_event"):
            event = packet.track_event
            yield f"time of {event.Type.Name(event.type)}", packet.timestamp
            if event.HasField("double_counter_value"):
                yield "counter", event.double_counter_value
            yield "arrows", len(event.flow_ids)
            for one in event.debug_annotations:
                yield "argument", one.int_value


class _Page(HTMLParser):
    """What a page shows, and the figures of its charts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, str | None]] = []
        self.found: list[tuple[str, Any]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append((tag, dict(attrs).get("id")))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tag, name = self.open[-1] if self.open else ("", None)
        if (tag, name) == ("script", "charts"):
            self.found += _of_json(json.loads(data), "chart")
        # The licences are those of whichever version of the library draws.
        elif tag not in ("script", "style") and name != "licenses" and (text := data.strip()):
            kind = "heading" if re.fullmatch(r"h\d", tag) else "text"
            self.found += [(kind, text), *(("number", _number(one)) for one in _NUMBER.findall(text))]


def _of_page(content: str) -> Iterator[tuple[str, Any]]:
    page = _Page()
    page.feed(content)
    yield from page.found
