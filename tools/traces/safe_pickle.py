"""Unpickling of data from another machine: dictionaries, lists, strings and numbers, nothing else.

`pickle.load` runs whatever a file asks for. An unpickler that finds no global runs nothing, but ten bytes may still
make it allocate 64 GB (a memo index), never end (the hash of a key that is a pair of twice the same pair of twice …) or
overflow the stack (the hash of a deep one). So every opcode is looked at before the first is carried out. One regular
expression passes over what torch writes (protocol 2) at about the cost of decoding it, and the unpickler in C decodes
it. Any other pickle is decoded by the one in Python, ten times slower, whose memo is a dictionary and whose tuples are
looked at as they are made. Opcodes: pickletools of CPython.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any, NoReturn

from crossrank.budget import OPCODES, VALUES, Budget

_OTHER_OPCODE = "holds a pickle opcode that is not data"


class RefusedError(ValueError):
    """The pickle asks for more than data, or is none (`cut_off`). The text says what."""

    def __init__(self, text: str, *, cut_off: bool = False) -> None:
        super().__init__(text)
        self.cut_off = cut_off


def load_data(data: bytes, budget: Budget) -> Any:
    """The object of a pickle that holds data alone. Raises `RefusedError` for any other, and `BudgetError`."""
    budget.spend(VALUES, data.count(b"}") + data.count(b"]"))  # at most so many containers
    file = io.BytesIO(data)
    is_as_torch_writes = _is_as_torch_writes(data)
    if not is_as_torch_writes:
        budget.spend(OPCODES, len(data))  # at most so many
    try:
        return _Fast(_Peeked(data)).load() if is_as_torch_writes else _Careful(file).load()
    except RefusedError:
        raise
    except Exception as error:
        if file.tell() == len(data):
            raise RefusedError(f"is cut off: the pickle of {len(data)} bytes has no end", cut_off=True) from error
        raise RefusedError(f"is no sound pickle ({type(error).__name__}: {str(error)[:120]})") from error


class _NoGlobals:
    """The second lock: were an opcode overlooked, it would still find no global."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise RefusedError(f"names the global {module[:80]}.{name[:80]}, which data has no need of")

    def persistent_load(self, pid: object) -> NoReturn:
        raise RefusedError("holds a persistent id, which data has no need of")


class _Fast(_NoGlobals, pickle.Unpickler):
    """The unpickler in C."""


class _Peeked:
    """A file that shows the C unpickler all of `data` at once and without a copy, which makes it as fast as `loads`."""

    def __init__(self, data: bytes) -> None:
        self._rest = memoryview(data)

    def peek(self, size: int) -> memoryview:
        return self._rest

    def read(self, size: int) -> bytes:
        found, self._rest = self._rest[:size], self._rest[size:]
        return bytes(found)

    def readline(self) -> NoReturn:
        raise RefusedError(_OTHER_OPCODE)


class _Careful(_NoGlobals, pickle._Unpickler):
    """The unpickler in Python, with every opcode that is not data taken out of its table."""

    stack: list[Any]  # which typeshed does not know

    def _refuse(self) -> NoReturn:
        raise RefusedError(_OTHER_OPCODE)

    def _load_tuple(self) -> None:
        _known[pickle.TUPLE[0]](self)
        self._check_tuple()

    def _load_tuple2(self) -> None:
        _known[pickle.TUPLE2[0]](self)
        self._check_tuple()

    def _check_tuple(self) -> None:
        if not all(type(part) is str for part in self.stack[-1]):
            raise RefusedError("holds a tuple of other things than strings, which no dump has")


_DATA = (
    "PROTO STOP MARK EMPTY_DICT EMPTY_LIST EMPTY_TUPLE NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
    "BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINSTRING SHORT_BINSTRING APPEND APPENDS SETITEM SETITEMS BINPUT "
    "LONG_BINPUT MEMOIZE BINGET LONG_BINGET FRAME"
)
_known: dict[int, Any] = pickle._Unpickler.dispatch
_Careful.dispatch = (
    dict.fromkeys(_known, _Careful._refuse)
    | {opcode: _known[opcode] for name in _DATA.split() for opcode in getattr(pickle, name)}
    | {pickle.TUPLE[0]: _Careful._load_tuple, pickle.TUPLE2[0]: _Careful._load_tuple2}
)


_GET = rb"(?:h.|j.{4})"
_ONE_GET = re.compile(rb"(?s)" + _GET)
_PUT = re.compile(rb"(?s)(?:q.|r.{4})?")
_LONGEST_RUN = 4000
"""Opcodes that the regular expression engine has to remember."""
_MARGIN = 1 << 16
"""By how much a memo index may be larger than the file."""


def _is_as_torch_writes(data: bytes) -> bool:
    """Walk over every opcode without carrying any out: whether those are the few that cannot do harm.

    A memo index is given at once to a container that was made or filled, a string, or a pair of strings, so that it is
    known which gets are of pairs. What is filled with nothing could be a pair, but for a container made just before.
    """
    opcodes = _opcodes(len(data))
    # Not the gets that a pair is made of: the expression gives back up to two.
    run = re.compile(rb"(?s)(?:%s){0,%d}(?!%s?\x86)" % (opcodes, _LONGEST_RUN, _GET)).match
    ends_in_get = re.compile(rb"(?s)(?:%s)*(%s)" % (opcodes, _GET)).fullmatch
    position = 0
    begin, end = 0, 0  # of the run just before the operands
    operands = 0  # strings, and gets of what is no pair, that stand before a pair
    pairs: set[int] = set()  # memo indices of pairs
    while position < len(data):
        match = run(data, position)
        if match is not None and match.end() > position:
            begin, position, end, operands = position, match.end(), match.end(), 0
            continue
        opcode = data[position : position + 1]
        if get := _ONE_GET.match(data, position):
            if _index(get[0]) in pairs:
                return False
            position, operands = get.end(), operands + 1
            continue
        if opcode == b"X":
            position += 5 + int.from_bytes(data[position + 1 : position + 5], "little")
            operands += 1
        elif opcode == b"\x86":
            first = ends_in_get(data, begin, end) if operands == 1 else None
            if operands < 2 and (first is None or _index(first[1]) in pairs):
                return False
            position += 1
            begin, end, operands = 0, 0, 0
        else:
            return opcode == b"."
        put = _PUT.match(data, position)
        assert put is not None  # the empty one always matches
        if _index(put[0]) > len(data) + _MARGIN:
            return False
        if opcode == b"\x86" and put[0]:
            pairs.add(_index(put[0]))
        position = put.end()
    return False


def _index(operation: bytes) -> int:
    """Of a get or put: the memo index."""
    return int.from_bytes(operation[1:], "little")


def _opcodes(size: int) -> bytes:
    """An expression for one opcode with its arguments that is neither a string nor a pair.

    Its alternatives begin with a literal, and frequent ones come first: that takes half as long as sets do.
    """
    most = size + _MARGIN
    if most < 1 << 24:
        long_put = rb"r..[\x00-%s]\x00" % re.escape(bytes([most >> 16]))
    else:
        long_put = rb"r...[\x00-%s]" % re.escape(bytes([min(most >> 24, 255)]))
    return (
        rb"h.|K.|[)saN\x88\x89]|\]%s|M..|j....|J....|G........|\x8a\x08........|(?:[}\]](?:\([ue])?|[ue])(?:q.|%s)?|"
        rb"\((?![ue])|\x8a(?:\x07.{7}|\x06.{6}|\x05.{5})|\x80[\x02\x03]" % (long_put, long_put)
    )
