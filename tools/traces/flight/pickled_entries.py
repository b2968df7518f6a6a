"""Reads the entries of a pickled dump as columns, without a dictionary for each.

torch writes one dictionary per call. Nearly all of them have the same keys in the same order, and each key and text is
a reference to its first occurrence in the file. Entries with the same opcodes have their fields at the same offsets:
they are rows of an array of bytes, and a field is some of its columns. They are cut out of the pickle. Their distinct
references and lists are appended to the rest, which is then unpickled.

This is safe for untrusted files. The rest is checked like any pickle. The appended part has only references, and lists
and pairs of references and numbers. If anything is not as expected, the dump has to be read as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, repeat
from operator import is_
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from crossrank.tools.traces.flight.safe_pickle import MARGIN, RefusedPickleError, check, unpickle

_START, _END, _PLACEHOLDER = b"\x80\x02", b".", b"N"
_PAIRED = "process_group"
_FEWEST = 4
"""Minimum number of entries for which a search for their common layout pays."""
_LONGEST = 1 << 14
"""Maximum bytes of an entry; longer ones are not cut out."""
_MOST = 1 << 21
"""Maximum number of entries that are searched for."""
_MOST_ORDERS = 3
"""Maximum number of layouts among entries of one length."""

_OPERATION = re.compile(rb"(?s)h.|K.|\x8a\x08.{8}|M..|[Jjr]....|G.{8}|q.|[}\](ueaN\x88\x89\x86]")
_ONE, _PUT, _PAIR = rb"[hKMJjGN\x88\x89\x8a]", rb"[qr]?", rb"[hj]{2}\x86[qr]?"
_ITEM = rb"(?:%b|\]%b(?:%ba|\(%b+e)?)" % (_ONE, _PUT, _ONE, _ONE)
_FIELD = rb"[hj](?:%b|\]%b(?:%ba|\(%b+e)?|%b)" % (_PAIR, _PUT, _ITEM, _ITEM, _ONE)
_ENTRY = re.compile(rb"(?s)(\}%b\()((?:%b)+)u" % (_PUT, _FIELD))
"""The opcodes of an entry of references and numbers, without their arguments."""
_NUMBERS = {b"K": ("u1", 1), b"M": ("<u2", 1), b"J": ("<i4", 1), b"\x8a": ("<i8", 2), b"G": (">f8", 1)}
"""Opcode of a number -> its type, and its offset in the operation."""
_WIDTHS = {ord(opcode): width for opcode, width in zip("hKqMJjrG\x8a", (2, 2, 2, 3, 5, 5, 5, 9, 10), strict=True)}
"""Opcodes with arguments -> bytes of both."""
_CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False}

_Bytes = NDArray[np.uint8]
_Places = NDArray[np.intp]
_Columns = tuple[dict[str, NDArray[Any]], _Places, dict[str, list[int]]]
"""(numeric fields, kind of each entry by its other fields, other field -> index of its object for each kind)"""


@dataclass(frozen=True)
class _Layout:
    """Offsets in entries with the same opcodes."""

    same: _Bytes
    """255 for each byte that is the same in all entries (opcodes, keys, the upper half of memo indices), else 0."""
    puts: tuple[int, ...]
    """Offsets of the upper halves of memo indices."""
    keys: tuple[slice, ...]
    values: tuple[tuple[bytes, _Places], ...]
    """For each field its opcodes, and the offsets of its bytes without memo indices."""


@dataclass(frozen=True)
class _Alike:
    """Entries with the same layout and the same keys."""

    numbers: _Places
    """Their indices among all entries that were found."""
    content: _Bytes
    """One row of bytes per entry."""
    fields: dict[str, tuple[bytes, _Places]]
    """Requested field -> its opcodes and offsets."""


def load_columns(data: bytes, names: Sequence[str]) -> tuple[Any, dict[str, list[Any]]] | None:
    """(object of a pickle, fields `names` of its entries as columns); None if it must be read as a whole.

    The object's `entries` has None in place of most entries. A field that an entry lacks is None.
    """
    if not data.startswith(_START) or not data.endswith(_END):
        return None
    name_of = {get: name for name in names if (get := _get_of(data, name))}
    starts = _starts(data, name_of)
    found = list(_find_alike(data, starts, name_of))
    if 2 * sum(len(alike.numbers) for alike in found) <= len(starts):
        return None
    # What is appended to the rest of the pickle -> its index there.
    behind = {get: place for place, get in enumerate(name_of)}
    columns = [_columns(alike, behind) for alike in found]
    ends = np.zeros(len(starts), np.intp)
    for alike in found:
        ends[alike.numbers] = starts[alike.numbers] + alike.content.shape[1]
    cut = np.flatnonzero(ends)
    rest = _rest(data, starts[cut], ends[cut])
    try:
        check(b"%b%b%b" % (_START, rest, _END), len(data))
        content, objects = unpickle(b"%b](%b](%bee." % (_START, rest, b"".join(behind)))
    except (RefusedPickleError, TypeError, ValueError):
        return None
    if not isinstance(objects, list) or len(objects) != len(behind) or objects[: len(name_of)] != [*name_of.values()]:
        return None
    entries = content.get("entries") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not {dict, type(None)}.issuperset(map(type, entries)):
        return None
    is_cut = np.fromiter(map(is_, entries, repeat(None)), bool, len(entries))
    if np.count_nonzero(is_cut) != len(cut) or len(entries) > 2 * len(cut):
        return None
    places = np.zeros(len(starts), np.intp)
    places[cut] = np.flatnonzero(is_cut)
    order = np.argsort(np.concatenate([*(places[alike.numbers] for alike in found), np.flatnonzero(~is_cut)]))
    others = [entry for entry in entries if entry is not None]
    return content, {name: _joined(name, columns, others, objects, order) for name in names}


def _joined(
    name: str,
    columns: Sequence[_Columns],
    others: Sequence[dict[str, Any]],
    objects: Sequence[Any],
    order: _Places,
) -> list[Any]:
    """A field of all entries: those that were cut out, then the `others`, sorted by `order`."""
    parts: list[NDArray[Any]] = []
    for numbers, kind, behind in columns:
        if name in behind:
            parts.append(_objects([objects[place] for place in behind[name]])[kind])
        else:
            parts.append(numbers[name] if name in numbers else np.full(len(kind), None))
    own = _objects([entry.get(name) for entry in others])
    values: list[Any] = np.concatenate([*parts, own])[order].tolist()  # as objects: an int stays one
    return values


def _objects(things: Sequence[Any]) -> NDArray[Any]:
    return np.fromiter(things, object, len(things))


def _rest(data: bytes, begins: _Places, ends: _Places) -> bytes:
    """The operations of a pickle, with a placeholder for each entry between `begins` and `ends`."""
    firsts = np.flatnonzero(begins > np.concatenate(([0], ends[:-1])))
    counts = np.diff(firsts, append=len(begins)).tolist()
    before: list[int] = [len(_START), *ends[np.append(firsts[1:], len(begins)) - 1].tolist()]
    runs = zip(before[:-1], begins[firsts].tolist(), counts, strict=True)
    pieces = [data[end:begin] + _PLACEHOLDER * count for end, begin, count in runs]
    return b"".join([*pieces, data[before[-1] : -len(_END)]])


def _get_of(data: bytes, name: str) -> bytes:
    """The reference to the string `name`; empty if the pickle has none."""
    text = b"X%b%b" % (len(name).to_bytes(4, "little"), name.encode())
    start = data.find(text)
    put = data[start + len(text) : start + len(text) + 5] if start >= 0 else b""
    if len(put) < 5:
        return b""
    return b"h" + put[1:2] if put[:1] == b"q" else b"j" + put[1:] if put[:1] == b"r" else b""


def _starts(data: bytes, keys: Iterable[bytes]) -> _Places:
    """Offsets of the dictionaries that may be entries. Their first key is that of the first dictionary that starts with
    one of `keys`."""
    first = re.search(rb"(?s)\}(?:q.|r....)?(\((?:%b))" % (b"|".join(map(re.escape, keys)) or b"(?!)"), data)
    if first is None:
        return np.empty(0, np.intp)
    pieces = data.split(first[1], _MOST)
    marks = np.cumsum([*map(len, pieces[:-1])]) + np.arange(len(pieces) - 1) * len(first[1])
    every = np.frombuffer(data, np.uint8)
    starts = np.full(len(marks), -1)
    for put, width in ((b"r", 5), (b"q", 2), (b"", 0)):
        before = marks - width - 1
        is_start = (before >= 0) & (every[before] == ord("}"))
        if put:
            is_start &= every[before + 1] == ord(put)
        starts[is_start] = before[is_start]
    return np.unique(starts[starts >= 0])


def _find_alike(data: bytes, starts: _Places, name_of: Mapping[bytes, str]) -> Iterator[_Alike]:
    """Yield entries with the same opcodes. They also have the same length, from one start to the next."""
    every, sizes = np.frombuffer(data, np.uint8), np.diff(starts, append=len(data))
    for size, count in zip(*np.unique(sizes, return_counts=True), strict=True):
        if count < _FEWEST or size > _LONGEST:
            continue
        numbers = np.flatnonzero(sizes == size)
        content = sliding_window_view(every, size)[starts[numbers]]
        for _ in range(_MOST_ORDERS):
            first = content[0]
            layout = _layout(first.tobytes())
            fields = _fields(first, layout, name_of, len(data)) if layout is not None else None
            is_alike = np.arange(len(numbers)) == 0
            if layout is not None and fields is not None:
                is_alike = ~((content ^ first) & layout.same).any(axis=1)
                yield _Alike(numbers[is_alike], content[is_alike], fields)
            numbers, content = numbers[~is_alike], content[~is_alike]
            if len(numbers) < _FEWEST:
                break


def _layout(entry: bytes) -> _Layout | None:
    """The layout of an entry with only references and numbers; None for any other."""
    operations = _OPERATION.findall(entry)
    if sum(map(len, operations)) != len(entry):
        return None
    return _layout_of(b"".join(operation[:1] for operation in operations))


@lru_cache(maxsize=256)
def _layout_of(opcodes: bytes) -> _Layout | None:
    whole = _ENTRY.fullmatch(opcodes)
    if whole is None:
        return None
    places = [0, *accumulate(_WIDTHS.get(opcode, 1) for opcode in opcodes)]
    # Numbers, the lower half of memo indices, and references other than keys may differ.
    same = np.zeros(places[-1], np.uint8)
    same[places[:-1]] = 0xFF
    puts = [place + 3 for place, opcode in zip(places, opcodes, strict=False) if opcode == ord("r")]
    same[[*puts, *(place + 1 for place in puts)]] = 0xFF
    keys, values = [], []
    for field in re.finditer(b"(?s)" + _FIELD, opcodes[whole.start(2) : whole.end(2)]):
        first, last = (whole.start(2) + end for end in field.span())
        keys.append(slice(places[first], places[first + 1]))
        same[keys[-1]] = 0xFF
        own = [range(*places[at : at + 2]) for at in range(first + 1, last) if opcodes[at] not in b"qr"]
        values.append((field[0][1:], np.fromiter(chain(*own), np.intp)))
    for at, opcode in enumerate(opcodes):
        if opcode == 0x8A:
            same[places[at] + 1] = 0xFF
    return _Layout(same, tuple(puts), tuple(keys), tuple(values))


def _fields(
    entry: _Bytes, layout: _Layout, name_of: Mapping[bytes, str], size: int
) -> dict[str, tuple[bytes, _Places]] | None:
    """Opcodes and offsets of the requested fields of an entry; None if it is not as torch writes it."""
    content = entry.tobytes()
    keys = [content[key] for key in layout.keys]
    if len({*keys}) < len(keys):
        return None
    fields = dict(zip((name_of.get(key, key) for key in keys), layout.values, strict=True))
    most = max((int.from_bytes(content[at : at + 2], "little") for at in layout.puts), default=0)
    has_pairs = any(b"\x86" in opcodes for name, (opcodes, _) in fields.items() if name != _PAIRED)
    if has_pairs or (most << 16) + 0xFFFF > size + MARGIN:
        return None
    return {name: value for name, value in fields.items() if isinstance(name, str)} or None


def _columns(alike: _Alike, behind: dict[bytes, int]) -> _Columns:
    """The fields of entries. References and lists that `behind` lacks are added to it."""
    content, numbers, others = alike.content, dict[str, NDArray[Any]](), dict[str, _Places]()
    for name, (opcodes, places) in alike.fields.items():
        if opcodes in _CONSTANTS:
            numbers[name] = np.full(len(content), _CONSTANTS[opcodes], object)
        elif opcodes in _NUMBERS:
            kind_of_number, begin = _NUMBERS[opcodes]
            numbers[name] = np.ascontiguousarray(content[:, places[begin:]]).view(kind_of_number).ravel()
        else:
            others[name] = places
    # Calls from one source line are equal in all of these: each combination is read once.
    combinations = np.ascontiguousarray(content[:, np.concatenate([*others.values(), [0]])])
    rows = combinations.view(f"V{combinations.shape[1]}").ravel().tolist()
    place_of: dict[bytes, int] = {row: place for place, row in enumerate(dict.fromkeys(rows))}
    kind = np.fromiter(map(place_of.__getitem__, rows), np.intp, len(rows))
    begins = np.cumsum([0, *map(len, others.values())]).tolist()
    parts = {name: slice(*begins[at : at + 2]) for at, name in enumerate(others)}
    places_of = {name: [behind.setdefault(row[part], len(behind)) for row in place_of] for name, part in parts.items()}
    return numbers, kind, places_of
