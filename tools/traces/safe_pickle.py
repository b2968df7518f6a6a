"""Unpickling of data from another machine: dictionaries, lists, strings and numbers, nothing else.

`pickle.load` runs whatever a file asks for. An unpickler that finds no global runs nothing, but ten bytes may still
make it allocate 64 GB (a memo index), never end (the hash of a key that is a pair of twice the same pair of twice …) or
overflow the stack (the hash of a deep one). So every opcode is looked at before the first is carried out: the only
tuples are pairs of strings, and a memo index has a limit. A regular expression passes over most of what torch and
Python write at about the cost of decoding it. Opcodes: pickletools of CPython.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from io import BufferedReader, BytesIO
from pickle import Unpickler
from typing import Any, NoReturn

from crossrank.budget import VALUES, Budget

_OTHER_OPCODE = "holds a pickle opcode that is not data, or not in the order that dumps have"
_OTHER_TUPLE = "holds a tuple of other things than short strings, which no dump has"


class RefusedPickleError(ValueError):
    """The pickle asks for more than data, or is none (`cut_off`). The text says what."""

    def __init__(self, text: str, *, cut_off: bool = False) -> None:
        super().__init__(text)
        self.cut_off = cut_off


def load_data(data: bytes, budget: Budget) -> Any:
    """The object of a pickle that holds data alone. Raises `RefusedPickleError` for any other, and `BudgetError`."""
    budget.spend(VALUES, data.count(b"}") + data.count(b"]"))  # at most so many containers
    _check(data)
    try:
        # One that can peek, which makes it as fast as `loads`.
        return _DataUnpickler(BufferedReader(BytesIO(data), _BUFFER)).load()
    except RefusedPickleError:
        raise
    except Exception as error:
        raise RefusedPickleError(f"is no sound pickle ({type(error).__name__}: {str(error)[:120]})") from error


class _DataUnpickler(Unpickler):
    """The second lock: were an opcode overlooked, it would still find no global."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise RefusedPickleError(f"names the global {module[:80]}.{name[:80]}, which data has no need of")

    def persistent_load(self, pid: object) -> NoReturn:
        raise RefusedPickleError("holds a persistent id, which data has no need of")


_BUFFER = 1 << 18
_LENGTHS = {b"X": 4, b"U": 1, b"T": 4, b"\x8c": 1, b"\x8d": 8, b"\x8a": 1}
"""Opcodes of strings, and of long numbers -> bytes of the length that stands before their content."""
_ARGUMENTS = {b"h": 1, b"K": 1, b"q": 1, b"M": 2, b"j": 4, b"J": 4, b"r": 4, b"G": 8, b"\x95": 8}
"""Other opcodes of data -> bytes of their argument."""
_LONGEST_RUN = 4000
"""Opcodes that the regular expression engine has to remember."""
_LONGEST_TEXT = 127
_AT_INDEX, _AT_NEXT = rb"q.|r..[\0-\x3f]\0", rb"\x94"
"""What gives a memo index: up to protocol 3 one below 4,194,304 (a dump has fewer values), and from 4 on the next."""


@lru_cache
def _run(put: bytes) -> Callable[[bytes, int], re.Match[bytes] | None]:
    """Matches opcodes up to a pair that gets a memo index by `put`; its groups are the gets that it is made of, and the
    put. Nothing is matched at what has to be looked at by itself, and at what is no data.

    An index is given at once to a container that was made or filled, to a string, or to a pair of strings, so that it
    is known which gets are of pairs. An opcode that fills with nothing leaves what is on top of the stack, which may be
    a pair, unless it is a container made just before.
    """
    get, text, index = rb"h.|j....", _text(put), _index_or_none(put)
    # The alternatives begin with a literal, and frequent ones come first: that takes half as long as sets do.
    one = rb"h.|j....|K.|[)saN\x88\x89]|\](?:%b)|%b|M..|J....|G........|\x8a\x08........" % (put, text)
    one += rb"|\((?![ue])|(?:[}\]](?:\([ue])?|[ue])%b|\x95........" % index
    part = rb"(?:\x95........)?(?:(%b)|%b)" % (get, text)
    pair = rb"%b%b\x86(%b)" % (part, part, index)
    # What a pair is made of is given back to it: two opcodes.
    return re.compile(rb"(?s)(?:%b){0,%d}(?:%b|(?!(?:%b)?\x86))" % (one, _LONGEST_RUN, pair, part)).match


def _text(put: bytes) -> bytes:
    """Strings as Python and torch write them, each length an alternative: no expression can count."""
    start, length = (rb"\x8c", b"%b.{%d}") if put == _AT_NEXT else (b"X", rb"%b\0\0\0.{%d}")
    lengths = b"|".join(length % (re.escape(bytes([size])), size) for size in range(_LONGEST_TEXT + 1))
    return rb"%b(?:%b)%b" % (start, lengths, _index_or_none(put))


def _index_or_none(put: bytes) -> bytes:
    return rb"(?:%b|(?!%b))" % (put, put)  # of which nothing is given back


@lru_cache
def _puts() -> Callable[[bytes, int, int], list[bytes]]:
    """Finds what gives the next memo index in checked opcodes, with the opcode of a pair where it is of one."""
    text = _text(_AT_NEXT).removesuffix(_index_or_none(_AT_NEXT))
    one = rb"h.|K.|%b|[)saN\x88\x89\(ue}\]]|M..|[jJ]....|[G\x95]........|\x8a\x08........|\x86(?!\x94)" % text
    return re.compile(rb"(?s)(?:%b)*(\x86?\x94|\Z)" % one).findall


def _check(data: bytes) -> None:
    """Walk over every opcode without carrying any out. Raises `RefusedPickleError` at one that could do harm.

    A pair holds no other one, so the memo indices of pairs are noted: from protocol 4 on, where they have to be
    counted, as far as the gets in pairs go.
    """
    protocol = data[1:2]
    if protocol > b"\x05" or b"" < protocol < b"\x02":
        raise RefusedPickleError(f"has protocol {protocol[0]}; 2 to 5 are read")
    put_at = _AT_INDEX if protocol < b"\x04" else _AT_NEXT
    position, pairs = 2, set[int]()
    counted, uncounted = 0, deque[tuple[int, int]]()  # indices given so far, and where those after them are
    while position < len(data):
        run = _run(put_at)(data, position)
        opcode = data[position : position + 1]
        if run is not None and run.end() > position:
            *gets, put = run.group(1, 2, 3)
            for index in map(_index, filter(None, gets)) if pairs or uncounted else ():
                while counted <= index and uncounted:
                    ends = list(filter(None, _puts()(data, *uncounted.popleft())))
                    pairs.update(counted + at for at, end in enumerate(ends) if len(end) > 1)
                    counted += len(ends)
                if index in pairs:
                    raise RefusedPickleError(_OTHER_TUPLE)
            if put_at is _AT_NEXT:
                uncounted.append(run.span())
            elif put:
                pairs.add(_index(put))
            position = run.end()
        elif width := _LENGTHS.get(opcode):
            start = position + 1 + width
            position = min(start + int.from_bytes(data[position + 1 : start], "little"), len(data))
            if put := re.compile(b"(?s)" + put_at).match(data, position):
                uncounted.extend([put.span()] if put_at is _AT_NEXT else [])
                position = put.end()
        elif opcode == b".":
            return
        elif position + 1 + _ARGUMENTS.get(opcode, 0) > len(data):
            break
        else:
            raise RefusedPickleError(_OTHER_TUPLE if opcode == b"\x86" else _OTHER_OPCODE)
    raise RefusedPickleError(f"is cut off: the pickle of {len(data)} bytes has no end", cut_off=True)


def _index(operation: bytes) -> int:
    """Of a get or put: the memo index."""
    return int.from_bytes(operation[1:], "little")
