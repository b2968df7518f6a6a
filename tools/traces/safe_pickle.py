"""Unpickling of data that nobody vouches for: dictionaries, lists, strings and numbers, nothing else.

`pickle.load` runs whatever a file asks for. Here every opcode is looked at before the first is carried out, and a file
that holds one outside a short list is refused: no global, extension or persistent id can be named. The look also
bounds what a small file could make large (memo indices, up to which Python allocates; containers; long numbers) and
what could be deep (tuples of tuples, which are hashed by recursion as keys): a tuple may hold strings alone.

A pickle as torch writes it (protocol 2) is looked through in runs of opcodes, at 0.4 times the cost of decoding it, and
then decoded by the C unpickler. Any other is decoded by the one in Python, with the same rules, ten times slower.
Opcodes: pickletools of CPython.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from typing import Any, NoReturn

from crossrank.budget import OPCODES, VALUES, Budget

_PLAIN = rb"}\](esuaN)\x88\x89"
"""Opcodes without an argument: containers, None, True, False."""
_MARGIN = 1 << 16
_LONGEST_RUN = 4000
_STRINGS = {0x58: 4, 0x8C: 1, 0x8D: 8, 0x54: 4, 0x55: 1}
"""Opcode -> bytes of its length: BINUNICODE, SHORT_BINUNICODE, BINUNICODE8, BINSTRING, SHORT_BINSTRING."""
_LONG1, _LONGEST_INT = 0x8A, 8
_TUPLE2, _STOP = 0x86, 0x2E
_ARGUMENTS = {0x4B: 1, 0x68: 1, 0x71: 1, 0x4D: 2, 0x4A: 4, 0x6A: 4, 0x72: 4, 0x47: 8, 0x80: 1, 0x8A: 1, 0x95: 8}
"""Opcode -> bytes of its argument, of those that may stand at a cut."""
_PAIR = re.compile(rb"(?s)(h.|j.{4})(h.|j.{4})\x86")
_SECOND = re.compile(rb"(?s)(h.|j.{4})\x86")
_PUT = re.compile(rb"(?s)q.|r.{4}")


class RefusedError(ValueError):
    """The pickle asks for more than data, or is none (`cut_off`). The text says what."""

    def __init__(self, text: str, *, cut_off: bool = False) -> None:
        super().__init__(text)
        self.cut_off = cut_off


class _Unusual(Exception):
    """The pickle is not as torch writes it, and may be harmless."""


def load_data(data: bytes, budget: Budget) -> Any:
    """The object of a pickle that holds data alone. Raises `RefusedError` for any other, and `BudgetError`."""
    budget.spend(VALUES, data.count(b"}") + data.count(b"]"))  # at most so many containers
    try:
        _look_through(data)
        return _decode(_Fast(io.BytesIO(data)))
    except _Unusual:
        budget.spend(OPCODES, len(data))  # at most so many
        return _decode(_Careful(data))


def _decode(unpickler: _Fast | _Careful) -> Any:
    try:
        return unpickler.load()
    except RefusedError:
        raise
    except (EOFError, pickle.UnpicklingError, IndexError) as error:
        raise RefusedError(f"is no whole pickle ({type(error).__name__}: {str(error)[:120]})", cut_off=True) from error
    except Exception as error:
        raise RefusedError(f"is no sound pickle ({type(error).__name__}: {str(error)[:120]})") from error


class _NoGlobals:
    """The second lock: were an opcode overlooked, it would still find no global."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise RefusedError(f"names the global {module[:80]}.{name[:80]}, which data has no need of")

    def persistent_load(self, pid: object) -> NoReturn:
        raise RefusedError("holds a persistent id, which data has no need of")


class _Fast(_NoGlobals, pickle.Unpickler):
    """The unpickler in C."""


class _Careful(_NoGlobals, pickle._Unpickler):
    """The unpickler in Python, with every opcode that is not data taken out of its table."""

    # What typeshed does not know of it.
    stack: list[Any]
    memo: dict[int, Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._size = len(data)

    def _refuse(self) -> NoReturn:
        raise RefusedError("holds a pickle opcode that is not data")

    def _load_long_binput(self) -> None:
        index = int.from_bytes(self.read(4), "little")
        if index > self._size + _MARGIN:
            raise RefusedError(f"numbers its parts up to {index}, more than it has")
        self.memo[index] = self.stack[-1]

    def _load_long1(self) -> None:
        length = self.read(1)[0]
        if length > _LONGEST_INT:
            raise RefusedError(f"holds a number of {length} bytes")
        self.append(int.from_bytes(self.read(length), "little", signed=True))

    def _tuple_of_strings(self, parts: list[Any]) -> tuple[Any, ...]:
        if not all(type(part) is str for part in parts):
            raise RefusedError("holds a tuple of other things than strings, which no dump has")
        return tuple(parts)

    def _load_tuple2(self) -> None:
        self.stack[-2:] = [self._tuple_of_strings(self.stack[-2:])]

    def _load_tuple(self) -> None:
        parts = self.pop_mark()
        self.append(self._tuple_of_strings(parts))

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(key, value)

    def _load_setitems(self) -> None:
        items = self.pop_mark()
        for index in range(0, len(items) - 1, 2):
            self._set(items[index], items[index + 1])

    def _set(self, key: Any, value: Any) -> None:
        if type(key) is not str or type(self.stack[-1]) is not dict:
            raise RefusedError("holds a key that is no string, which no dump has")
        self.stack[-1][key] = value


def _table() -> dict[int, Any]:
    known = pickle._Unpickler.dispatch
    names = (
        "PROTO STOP MARK EMPTY_DICT EMPTY_LIST EMPTY_TUPLE NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 BINFLOAT "
        "BINUNICODE SHORT_BINUNICODE BINUNICODE8 APPEND APPENDS BINPUT MEMOIZE BINGET LONG_BINGET FRAME"
    )
    table: dict[int, Any] = dict.fromkeys(known, _Careful._refuse)
    table |= {opcode: known[opcode] for name in names.split() if (opcode := getattr(pickle, name)[0]) in known}
    return table | {
        pickle.LONG_BINPUT[0]: _Careful._load_long_binput,
        pickle.LONG1[0]: _Careful._load_long1,
        pickle.TUPLE2[0]: _Careful._load_tuple2,
        pickle.TUPLE[0]: _Careful._load_tuple,
        pickle.SETITEM[0]: _Careful._load_setitem,
        pickle.SETITEMS[0]: _Careful._load_setitems,
    }


_Careful.dispatch = _table()


def _look_through(data: bytes) -> None:
    """Walk over every opcode without carrying any out. Raises `_Unusual` where that does not settle it."""
    run = _run_pattern(len(data)).match
    position, size = 0, len(data)
    strings = 0  # pushed one after the other just before `position`
    tuples: set[int] = set()  # memo indices that hold tuples
    while position < size:
        match = run(data, position)
        assert match is not None  # the empty run always matches
        if match.end() > position:
            position = match.end()
            # A get that ends a run is the first of a pair whose second is a new string.
            strings = 1 if match.end("get") == position and _index(match["get"]) not in tuples else 0
            continue
        opcode = data[position]
        if opcode in _STRINGS:
            width = _STRINGS[opcode]
            position += 1 + width + int.from_bytes(data[position + 1 : position + 1 + width], "little")
            put = _PUT.match(data, position)
            position = put.end() if put is not None else position
            if put is not None and _index(put[0]) > size + _MARGIN:
                raise RefusedError(f"numbers its parts up to {_index(put[0])}, more than it has")
            strings += 1
            continue
        pair = _PAIR.match(data, position)
        if pair is None and strings:
            pair = _SECOND.match(data, position)
        if pair is not None or (opcode == _TUPLE2 and strings >= 2):
            if pair is not None and not tuples.isdisjoint(map(_index, pair.groups())):
                raise RefusedError("holds a tuple of tuples, which no dump has")
            position = pair.end() if pair is not None else position + 1
            put = _PUT.match(data, position)
            if put is not None:
                tuples.add(_index(put[0]))
            strings = 0
        elif opcode == _LONG1 and position + 1 < size and data[position + 1] <= _LONGEST_INT:
            position += 2 + data[position + 1]
            strings = 0
        elif opcode == _STOP:
            return
        elif position + 1 + _ARGUMENTS.get(opcode, 0) > size:
            break
        else:
            raise _Unusual
    raise RefusedError(f"is cut off: the pickle of {size} bytes has no end", cut_off=True)


def _index(operation: bytes) -> int:
    """Of a get or put: the memo index."""
    return int.from_bytes(operation[1:], "little")


def _run_pattern(size: int) -> re.Pattern[bytes]:
    """Opcodes of fixed length, as many as follow each other, but not the pair of gets that a tuple is made of.

    A memo index is at most about the size of the file.
    """
    most = size + _MARGIN
    if most < 1 << 24:
        long_put = b"r..[\\x00-%s]\\x00" % re.escape(bytes([most >> 16]))
    else:
        long_put = b"r...[\\x00-%s]" % re.escape(bytes([min(most >> 24, 255)]))
    get = rb"(?P<get>(?:h.|j.{4})(?!\x86|(?:h.|j.{4})\x86))"
    fixed = rb"|[Kq].|M..|J.{4}|G.{8}|\x80[\x02\x03]|\x8a\x08.{8}|"
    return re.compile(b"(?s)(?:[%s]|%s%s%s){0,%d}" % (_PLAIN, get, fixed, long_put, _LONGEST_RUN))
