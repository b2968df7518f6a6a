"""Mutations of files that keep most of their structure, so that they pass the first checks of a reader.

A mutation takes the whole content, uncompressed, and a source of randomness, and returns other content.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import pickletools
import sqlite3
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import zstandard

from crossrank.tools.varint import varint

Mutation = Callable[[bytes, Random], bytes]

_RAW = {
    "@deep list": "[" * 20_000 + "]" * 20_000,
    "@deep object": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "@open": "[" * 5_000,
    "@long number": "1" + "0" * 5_000,
    "@number": "1e999",
    "@small": "-1e-999",
    "@nan": "NaN",
    "@infinity": "-Infinity",
    "@surrogate": r'"\ud800"',
    "@surrogates": r'"x\udfff\ud800y"',
    "@twice": '1,"rank":2,"id":3,"name":4',
}
"""What json.dumps does not write, by the text that stands for it."""
NUMBERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62 - 1, 2**62, 2**63 - 1, 2**63, -(2**63), 2**64)
_TEXTS = (
    "", "0", "-1", "1e5", "[0, 1]", "[0]", "default_pg", "all_reduce", "nccl:recv", "x" * 5_000, "\x1b[2J\x9b31m\x07",
    "=cmd|'/C calc'!A0", "</script><script>alert(1)</script>", "{{7*7}}", "\u202e\u2028\x00", "../../../etc/passwd",
    "9" * 5_000, "float32", "rank0", "crossrank-comms 1", "٣", "²",
)  # fmt: skip
_TOKENS = (
    b"\x00", b"\xff\xff\xff\xff", b"\x80", b"\n", b'"', b"[", b"}", b"{", b"9" * 30, b"\xed\xa0\x80", b"null", b"-",
)  # fmt: skip


def value(rng: Random) -> Any:
    """A value for a place in a JSON tree."""
    kind = rng.randrange(10)
    if kind < 3:
        return rng.choice(NUMBERS) * rng.choice((1, 1, -1))
    if kind == 3:
        return rng.choice((0.5, -0.0, 1e308, 1e-300, 9007199254740993.0, None, True, False))
    if kind < 6:
        return rng.choice(_TEXTS)
    if kind == 6:
        return rng.choice(list(_RAW))
    if kind == 7:
        return rng.choice(
            ([], {}, [[]], [{}], {"": []}, [None], [1] * 3_000, [[]] * 3_000, {str(i): i for i in range(500)})
        )
    return [value(rng) for _ in range(rng.randrange(4))] if kind == 8 else {rng.choice(_TEXTS): value(rng)}


def any_bytes(content: bytes, rng: Random) -> bytes:
    """Bytes changed, cut, doubled, or in another place."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + int(2 ** rng.uniform(0, 12)))
        match rng.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(data):
                data[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
            case 2:
                del data[at:end]
            case 3:
                data[at:at] = rng.choice(_TOKENS)
            case 4:
                data[at:at] = data[at:end] * rng.choice((1, 1, 2, 50))
            case 5 if rng.random() < 0.3:
                del data[at:]
            case _:
                source = rng.randrange(len(data) + 1)
                data[at:end] = data[source : source + end - at]
        if not data:
            break
    return bytes(data)


def json_tree(content: bytes, rng: Random) -> bytes:
    """One JSON value, with branches of its tree exchanged, removed, doubled or replaced."""
    return _text(_change_tree(json.loads(content), rng), rng)


def json_lines(content: bytes, rng: Random) -> bytes:
    """A JSON value per line; lines exchanged, removed and doubled too."""
    lines = [line for line in content.split(b"\n") if line]
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(lines)) if rng.random() < 0.7 else 0
        match rng.randrange(10):
            case 0:
                other = rng.randrange(len(lines))
                lines[at], lines[other] = lines[other], lines[at]
            case 1 if len(lines) > 1:
                del lines[at]
            case 2:
                lines[at:at] = [lines[at]] * rng.choice((1, 3, 100))
            case 3:
                lines.insert(at, _text(value(rng), rng))
            case _:
                try:
                    lines[at] = _text(_change_tree(json.loads(lines[at]), rng), rng)
                except (ValueError, RecursionError):
                    lines[at] = any_bytes(lines[at], rng)
    return b"\n".join(lines) + b"\n"


def with_number(content: bytes, number: int) -> Iterator[tuple[str, bytes]]:
    """For each field of a JSON file, or of JSON lines, that has whole numbers: its name, and the file with `number` in
    all of them."""
    lines = [json.loads(line) for line in content.splitlines()] if b"\n{" in content else [json.loads(content)]
    names: dict[str, None] = {}
    _replaced(lines, "", None, number, names)
    for name in names:
        yield name, b"\n".join(json.dumps(_replaced(line, "", name, number, {})).encode() for line in lines)


def _replaced(tree: Any, name: str, wanted: str | None, number: int, names: dict[str, None]) -> Any:
    """The tree with `number` in all whole numbers of the field `wanted`; notes the fields that have some."""
    if isinstance(tree, dict):
        return {key: _replaced(inner, f"{name}.{key}", wanted, number, names) for key, inner in tree.items()}
    if isinstance(tree, list):
        return [_replaced(inner, name, wanted, number, names) for inner in tree]
    if not isinstance(tree, int) or isinstance(tree, bool):
        return tree
    names[name] = None
    return number if name == wanted else tree


def _change_tree(tree: Any, rng: Random) -> Any:
    if not isinstance(tree, dict | list) or not tree or rng.random() < 0.01:
        return value(rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 10))):
        if not tree:
            break
        node, key = _place(tree, rng)
        old = node[key]
        other, other_key = _place(tree, rng)
        match rng.randrange(8):
            case 0:
                del node[key]
            case 1 if isinstance(node, dict):
                node[rng.choice(_TEXTS) if rng.random() < 0.5 else str(other_key)] = node.pop(key)
            case 2 if isinstance(node, list):
                node[key:key] = [old] * rng.choice((1, 2, 300))
            case 3 if isinstance(old, int):
                node[key] = old + rng.choice((1, -1, 1 << 31, -(1 << 63)))
            case 4:
                node[key] = copy.deepcopy(other[other_key]) if _is_small(other[other_key]) else None
            case 5:
                node[key] = str(old)[:200] if rng.random() < 0.5 else [old]
            case _:
                node[key] = value(rng)
    return tree


def _place(tree: Any, rng: Random) -> tuple[Any, Any]:
    """A container somewhere in the tree, and an index or key of it."""
    while True:
        key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        child = tree[key]
        if not isinstance(child, dict | list) or not child or rng.random() < 0.15:
            return tree, key
        tree = child


def _is_small(thing: Any) -> bool:
    return not isinstance(thing, dict | list) or len(thing) < 50


def _text(tree: Any, rng: Random) -> bytes:
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.8, separators=(",", ":"))
    if '"@' in text:
        for name, raw in _RAW.items():
            text = text.replace(f'"{name}"', raw, 3)
    return text.encode("utf-8", "surrogatepass")


_OPCODES = (
    b"cos\nsystem\n", b"(S'x'\ntR", b"\x8c\x02os\x8c\x06system\x93", b"R", b"b", b"\x81", b"0", b"1", b"2", b"h\x00",
    b"h\x01", b"j\xff\xff\xff\x7f", b"r\xff\xff\xff\x7f", b"q\x00", b"\x94", b"(", b"t", b"l", b"d", b"e", b"u", b"s",
    b"a", b"]", b"}", b")", b"\x85", b"\x86", b"\x87", b"\x8a\x20" + b"\x7f" * 32, b"\x8b\xff\xff\xff\x7f",
    b"I99999999999999999999\n", b"L9L\n", b"F1e999\n", b"G\x7f\xf0\x00\x00\x00\x00\x00\x00",
    b"G\x7f\xf8\x00\x00\x00\x00\x00\x00", b"N", b"\x88", b"\x8f", b"X\x03\x00\x00\x00\xed\xa0\x80",
    b"X\xff\xff\xff\xff", b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f", b"B\x02\x00\x00\x00ab",
    b"\x96\x02\x00\x00\x00\x00\x00\x00\x00ab", b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x80\x05", b"\x97", b"\x98",
    b"P1\n", b"Q", b"J\xff\xff\xff\xff", b"K\x05", b"K\x00", b".", b"]" * 30_000, b"(" * 3_000 + b"t" * 3_000,
    b"V\\ud800\n", b"\x82\x01", b"h\x01" * 20_000,
)  # fmt: skip


def pickle_opcodes(content: bytes, rng: Random) -> bytes:
    """Opcodes removed, doubled, exchanged and put in."""
    try:
        starts = [position for _, _, position in pickletools.genops(content) if position is not None]
    except Exception:  # it was changed before
        return any_bytes(content, rng)
    parts = [content[start:end] for start, end in zip(starts, [*starts[1:], len(content)], strict=True)]
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(1, len(parts))
        match rng.randrange(6):
            case 0:
                del parts[at]
            case 1:
                parts[at:at] = parts[at : at + rng.choice((1, 5, 40))]
            case 2:
                other = rng.randrange(1, len(parts))
                parts[at], parts[other] = parts[other], parts[at]
            case 3 if len(parts[at]) > 1:
                parts[at] = parts[at][:1] + any_bytes(parts[at][1:], rng)[:5_000]
            case _:
                parts.insert(at, rng.choice(_OPCODES))
    return b"".join(parts)


_SQL_VALUES: tuple[Any, ...] = (
    None, 0, -1, 1, 2**31, 2**62, 2**63 - 1, -(2**63), 0.5, 1e308, float("inf"), "", "x", "1", "{" * 3_000,
    b"\xff\x00", b"", "\x1b[2J", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", '{"op":"all_reduce","bytes":-1}',
    '{"op":"=1","pg":"\\ud800"}', '{"op":"all_reduce","c10d":"x","pg":"0","bytes":1e99}', "9" * 5_000,
    b"\x00" * 70_000,
)  # fmt: skip
_SQL_TYPES = ("INTEGER", "TEXT", "BLOB", "REAL", "ANY", "")


def sqlite_tables(content: bytes, rng: Random) -> bytes:
    """Cells, columns and tables changed; a table replaced by a view, by one without rowid, or by a virtual one."""
    if rng.random() < 0.3:
        return _sqlite_pages(content, rng)
    with tempfile.NamedTemporaryFile(suffix=".sqlite") as file:
        Path(file.name).write_bytes(content)
        connection = sqlite3.connect(file.name)
        connection.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF")
        for _ in range(rng.choice((1, 1, 2, 4))):
            try:
                _change_table(connection, rng)
            except (sqlite3.Error, OverflowError):
                pass  # the table is of another kind by now
        connection.commit()
        connection.close()
        return Path(file.name).read_bytes()


def _change_table(connection: sqlite3.Connection, rng: Random) -> None:
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1")]
    table = rng.choice(tables)
    columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
    column = rng.choice(columns)
    some = f"rowid % {rng.choice((1, 2, 5))} = 0"
    match rng.randrange(10):
        case 0:
            connection.execute(f'DROP TABLE "{table}"')
        case 1:
            connection.execute(f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "other"')
        case 2:  # of another type, and without constraints
            types = ", ".join(f'"{name}" {rng.choice(_SQL_TYPES)}' for name in columns)
            _replace(connection, table, f'CREATE TABLE "{table}" ({types})')
        case 3:
            _replace(connection, table, f'CREATE VIEW "{table}" AS SELECT * FROM "old"')
        case 4:
            first = f'"{columns[0]}" PRIMARY KEY'
            rest = "".join(f', "{name}"' for name in columns[1:])
            _replace(connection, table, f'CREATE TABLE "{table}" ({first}{rest}) WITHOUT ROWID')
        case 5:
            for _ in range(rng.choice((1, 4))):
                connection.execute(f'CREATE TABLE "more" AS SELECT * FROM "{table}"')
                connection.execute(f'INSERT OR IGNORE INTO "{table}" SELECT * FROM "more"')
                connection.execute('DROP TABLE "more"')
        case 6:
            connection.execute(f'DELETE FROM "{table}" WHERE {some}')
        case _:
            connection.execute(
                f'UPDATE OR IGNORE "{table}" SET "{column}" = ? WHERE {some}', (rng.choice(_SQL_VALUES),)
            )


def _replace(connection: sqlite3.Connection, table: str, statement: str) -> None:
    connection.execute(f'ALTER TABLE "{table}" RENAME TO "old"')
    connection.execute(statement)
    if "VIEW" not in statement:
        connection.execute(f'INSERT OR IGNORE INTO "{table}" SELECT * FROM "old"')
        connection.execute('DROP TABLE "old"')


def _sqlite_pages(content: bytes, rng: Random) -> bytes:
    size = int.from_bytes(content[16:18], "big") or 4096
    data = bytearray(content)
    pages = max(1, len(data) // size)
    for _ in range(rng.choice((1, 2, 8))):
        page = rng.randrange(pages) * size
        match rng.randrange(4):
            case 0:
                other = rng.randrange(pages) * size
                data[page : page + size] = data[other : other + size]
            case 1:  # the page's header and its pointers
                data[page + rng.randrange(min(40, size))] = rng.randrange(256)
            case 2 if rng.random() < 0.3:
                del data[page:]
                break
            case _:
                data[page + rng.randrange(size)] = rng.choice((0, 1, 5, 13, 127, 255, rng.randrange(256)))
    return bytes(data)


def protobuf_fields(content: bytes, rng: Random) -> bytes:
    """Messages with their lengths before them: fields removed, doubled, of another number, type, length or value."""
    messages = []
    at = 0
    while at < len(content):
        length, at = _varint(content, at)
        messages.append(content[at : at + length])
        at += length
    for _ in range(rng.choice((1, 1, 2, 5))):
        if not messages:
            break
        at = rng.randrange(len(messages)) if rng.random() < 0.8 else 0
        match rng.randrange(8):
            case 0:
                del messages[at]
            case 1:
                messages[at:at] = [messages[at]] * rng.choice((1, 2, 200))
            case 2:
                other = rng.randrange(len(messages))
                messages[at], messages[other] = messages[other], messages[at]
            case _:
                messages[at] = _change_message(messages[at], rng, 3)
    out = b"".join(varint(len(one)) + one for one in messages)
    if rng.random() < 0.1:
        at = rng.randrange(len(out) + 1)
        out = out[:at] + varint(rng.choice(NUMBERS)) + out[at + 1 :]
    return out


def _change_message(message: bytes, rng: Random, depth: int) -> bytes:
    fields = _fields(message)
    if not fields:
        return any_bytes(message or b"\x08\x01", rng)
    at = rng.randrange(len(fields))
    number, wire, body = fields[at]
    match rng.randrange(8):
        case 0:
            del fields[at]
        case 1:
            fields[at:at] = [fields[at]] * rng.choice((1, 2, 300))
        case 2:
            fields[at] = (rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 29, 1 << 28)), wire, body)
        case 3:
            fields[at] = (number, rng.randrange(8), body)
        case _ if wire == 2:
            changed = (
                _change_message(body, rng, depth - 1) if depth and rng.random() < 0.7 else any_bytes(body or b"x", rng)
            )
            fields[at] = (number, wire, changed)
        case _ if wire == 0:
            fields[at] = (number, wire, varint(rng.choice(NUMBERS)))
        case _:
            fields[at] = (number, wire, any_bytes(body or b"x", rng)[: len(body)])
    return b"".join(
        varint(number << 3 | wire) + (varint(len(body)) if wire == 2 else b"") + body for number, wire, body in fields
    )


def _fields(message: bytes) -> list[tuple[int, int, bytes]]:
    """(number, wire type, bytes) of a message; empty where it is none."""
    fields = []
    at = 0
    try:
        while at < len(message):
            key, at = _varint(message, at)
            start = at
            match key & 7:
                case 0:
                    _, at = _varint(message, at)
                case 1:
                    at += 8
                case 2:
                    length, start = _varint(message, at)
                    at = start + length
                case 5:
                    at += 4
                case _:
                    return []
            if at > len(message):
                return []
            fields.append((key >> 3, key & 7, message[start:at]))
    except IndexError:
        return []
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, at


def csv_cells(content: bytes, rng: Random) -> bytes:
    """Cells and lines changed."""
    rows = [line.split(",") for line in content.decode().splitlines()]
    for _ in range(rng.choice((1, 1, 2, 5))):
        row = rng.choice(rows) if rng.random() < 0.8 else rows[0]
        match rng.randrange(6):
            case 0 if row:
                del row[rng.randrange(len(row))]
            case 1:
                rows.insert(rng.randrange(len(rows)), list(row))
            case 2:
                row[:] = row * 3
            case _ if row:
                number = str(rng.choice(NUMBERS) * rng.choice((1, -1)))
                row[rng.randrange(len(row))] = rng.choice((number, "nan", "inf", "1e999", '"', *_TEXTS))
    return "\n".join(map(",".join, rows)).encode("utf-8", "surrogatepass")


def packed(content: bytes, rng: Random) -> bytes:
    """Content as a file may have it: plain, gzip, zstd, in several members, cut off, with a wrong one behind."""
    kind = rng.randrange(12)
    if kind < 6:
        return content
    halves = [content[: len(content) // 2], content[len(content) // 2 :]] if rng.random() < 0.3 else [content]
    pack = (lambda part: gzip.compress(part, 1)) if kind < 9 else zstandard.ZstdCompressor(level=1).compress
    whole = b"".join(map(pack, halves))
    match rng.randrange(8):
        case 0:
            return whole[: rng.randrange(len(whole) + 1)]
        case 1:
            return any_bytes(whole, rng)
        case 2:
            return whole + rng.choice((b"\x00" * 40, b"\x1f\x8b\x08", b"(\xb5/\xfd\x00", b"junk", whole[:30]))
        case 3:  # an archive that unpacks to nothing that was asked for
            return zstandard.ZstdCompressor(level=1).compress(whole)
    return whole


def zip_of(content: bytes) -> bytes:
    """An archive of one comms file."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rank-0.comms.jsonl", content)
    return file.getvalue()


def zipped(content: bytes, rng: Random) -> bytes:
    """An archive with bytes of its directory, or of anything, or of its member changed."""
    match rng.randrange(3):
        case 0:
            return content[:-120] + any_bytes(content[-120:], rng)
        case 1:
            return any_bytes(content, rng)
        case _:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                return zip_of(json_lines(archive.read("rank-0.comms.jsonl"), rng))
