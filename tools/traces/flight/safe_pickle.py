"""Unpickling of data from another machine: dictionaries, lists, strings and numbers, nothing else.

`pickle.load` runs whatever a file asks for. An unpickler that finds no global runs nothing, but ten bytes may still
make it allocate 64 GB (a memo index), never end (the hash of a key that is a pair of twice the same pair of twice …) or
overflow the stack (the hash of a deep one). So every opcode is looked at before the first is carried out: the only
tuples are pairs of strings, and a memo index is no larger than the file. One regular expression passes over most of
what torch writes (protocol 2) at about the cost of decoding it. Opcodes: pickletools of CPython.
"""

from __future__ import annotations

import re
from io import BufferedReader, BytesIO
from pickle import Unpickler
from typing import Any, NoReturn

from crossrank.budget import VALUES, Budget

_OTHER_OPCODE = "has a pickle opcode that is not data, or not in the order of dumps"
_OTHER_TUPLE = "has a tuple with other values than strings, which no dump has"


class RefusedPickleError(ValueError):
    """The pickle asks for more than data, or is none (`cut_off`). The text says what."""

    def __init__(self, text: str, *, cut_off: bool = False) -> None:
        super().__init__(text)
        self.cut_off = cut_off


def load_data(data: bytes, budget: Budget) -> Any:
    """The object of a pickle that holds data alone. Raises `RefusedPickleError` for any other, and `BudgetError`."""
    spend_containers(data, budget)
    return load_whole(data)


def spend_containers(data: bytes, budget: Budget) -> None:
    """Spend what a pickle holds: it has at most so many containers."""
    budget.spend(VALUES, data.count(b"}") + data.count(b"]"))


def load_whole(data: bytes) -> Any:
    """The object of a pickle of which the containers are spent. Raises `RefusedPickleError`."""
    check(data, len(data))
    return unpickle(data)


def unpickle(data: bytes) -> Any:
    """The object of a pickle that was checked. Raises `RefusedPickleError` where it is not sound."""
    try:
        # One that can peek, which makes it as fast as `loads`.
        return _DataUnpickler(BufferedReader(BytesIO(data), _BUFFER)).load()
    except RefusedPickleError:
        raise
    except Exception as error:
        raise RefusedPickleError(f"is not a valid pickle ({type(error).__name__}: {str(error)[:120]})") from error


class _DataUnpickler(Unpickler):
    """The second lock: were an opcode overlooked, it would still find no global."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise RefusedPickleError(f"uses the global {module[:80]}.{name[:80]}, which data does not need")

    def persistent_load(self, pid: object) -> NoReturn:
        raise RefusedPickleError("has a persistent id, which data does not need")


_BUFFER = 1 << 18
_GET = rb"(?:h.|j.{4})"
_ONE_GET = re.compile(rb"(?s)" + _GET)
_PUT = re.compile(rb"(?s)(?:q.|r.{4})?")
_LENGTHS = {b"X": 4, b"U": 1, b"T": 4, b"\x8c": 1, b"\x8d": 8, b"\x8a": 1}
"""Opcodes of strings, and of long numbers -> bytes of the length that stands before their content."""
_ARGUMENTS = {b"h": 1, b"K": 1, b"q": 1, b"M": 2, b"j": 4, b"J": 4, b"r": 4, b"G": 8, b"\x95": 8}
"""Other opcodes of data -> bytes of their argument."""
_LONGEST_RUN = 4000
"""Opcodes that the regular expression engine has to remember."""
MARGIN = 1 << 16
"""By how much a memo index may be larger than the file."""


def check(data: bytes, size: int) -> None:
    """Walk over every opcode without carrying any out. Raises `RefusedPickleError` at one that could do harm, such as a
    memo index that is larger than a pickle of `size` bytes needs.

    A memo index is given at once to a container that was made or filled, a string, or a pair of strings, so that it is
    known which gets are of pairs. An opcode that fills with nothing leaves what is on top of the stack, which may be a
    pair, unless it is a container made just before.
    """
    protocol = data[1:2]
    numbered = protocol in (b"\x02", b"\x03")  # from protocol 4 on, memo indices count up by themselves
    if protocol and not numbered and protocol not in (b"\x04", b"\x05"):
        raise RefusedPickleError(f"has protocol {protocol[0]}; 2 to 5 are read")
    opcodes = _opcodes(size, numbered)
    # Not the gets that a pair is made of: the expression gives back up to two.
    run = re.compile(rb"(?s)(?:%s){0,%d}(?!%s?\x86)" % (opcodes, _LONGEST_RUN, _GET)).match
    ends_in_get = re.compile(rb"(?s)(?:%s)*(%s)" % (opcodes, _GET)).fullmatch
    position = 2
    before: re.Match[bytes] | None = None  # the run just before the operands
    operands = 0  # strings, and gets of what is no pair, that stand before a pair
    memoized = 0
    pairs: set[int] = set()  # memo indices of pairs
    while position < len(data):
        match = run(data, position)
        if match is not None and match.end() > position:
            before, position, operands = match, match.end(), 0
            continue
        opcode = data[position : position + 1]
        if get := _ONE_GET.match(data, position):
            if _index(get[0]) in pairs:
                raise RefusedPickleError(_OTHER_TUPLE)
            position, operands = get.end(), operands + 1
            continue
        if width := _LENGTHS.get(opcode):
            position += 1 + width + int.from_bytes(data[position + 1 : position + 1 + width], "little")
            operands += 1
            if opcode == b"\x8a":
                before, operands = None, 0
        elif opcode == b"\x86":
            first = ends_in_get(data, *before.span()) if before is not None and operands == 1 else None
            if operands < 2 and (first is None or _index(first[1]) in pairs):
                raise RefusedPickleError(_OTHER_TUPLE)
            position += 1
            before, operands = None, 0
        elif opcode in b"]}" and not numbered:
            position += 1
            before, operands = None, 0
        elif opcode == b".":
            return
        elif position + 1 + _ARGUMENTS.get(opcode, 0) > len(data):
            break
        else:
            raise RefusedPickleError(_OTHER_OPCODE)
        if numbered:
            put = _PUT.match(data, min(position, len(data)))
            assert put is not None  # the empty one always matches
            index, position = _index(put[0]) if put[0] else None, put.end()
        else:
            index = memoized if data[position : position + 1] == b"\x94" else None
            memoized, position = memoized + (index is not None), position + (index is not None)
        if index is not None and index > size + MARGIN:
            raise RefusedPickleError(f"has the memo index {index}, more than a pickle of {size} bytes needs")
        if opcode == b"\x86" and index is not None:
            pairs.add(index)
    raise RefusedPickleError(f"is cut off: the pickle of {len(data)} bytes has no end", cut_off=True)


def _index(operation: bytes) -> int:
    """Of a get or put: the memo index."""
    return int.from_bytes(operation[1:], "little")


def _opcodes(size: int, numbered: bool) -> bytes:
    """An expression for one opcode with its arguments that is neither a string nor a pair.

    Its alternatives begin with a literal, and frequent ones come first: that takes half as long as sets do.
    """
    frequent, others = rb"h.|K.|[)saN\x88\x89]", rb"M..|j....|J....|G........|\x8a\x08........|\((?![ue])"
    if not numbered:
        return rb"%s|%s|[ue]|\x95........" % (frequent, others)
    return rb"%s|\]%s|%s|(?:[}\]](?:\([ue])?|[ue])(?:q.|%s)?" % (frequent, long_put(size), others, long_put(size))


def long_put(size: int) -> bytes:
    """An expression for what gives a memo index of four bytes, as large as a pickle of `size` bytes may need."""
    most = size + MARGIN
    if most < 1 << 24:
        return rb"r..[\x00-%s]\x00" % re.escape(bytes([most >> 16]))
    return rb"r...[\x00-%s]" % re.escape(bytes([min(most >> 24, 255)]))
