"""Unpickles data from another machine: dictionaries, lists, strings and numbers, nothing else.

`pickle.load` runs any code that a file asks for. An unpickler without globals runs none. But ten bytes can still make
it allocate 64 GB (a memo index) or overflow the stack (the hash of a deep key). They can also make it run forever (the
hash of a pair of twice the same pair of twice …). So every opcode is checked before the first is executed: the only
tuples are pairs of strings, and a memo index is not larger than the file. One regular expression matches most of what
torch writes (protocol 2), at about the cost of decoding it. Opcodes: pickletools of CPython.
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
    """The pickle asks for more than data, or is incomplete (`cut_off`). The text says what."""

    def __init__(self, text: str, *, cut_off: bool = False) -> None:
        super().__init__(text)
        self.cut_off = cut_off


def load_data(data: bytes, budget: Budget) -> Any:
    """Load a pickle that has only data. Raises `RefusedPickleError` for any other, and `BudgetError`."""
    spend_containers(data, budget)
    return load_whole(data)


def spend_containers(data: bytes, budget: Budget) -> None:
    """Spend the containers of a pickle, by an upper bound for their number."""
    budget.spend(VALUES, data.count(b"}") + data.count(b"]"))


def load_whole(data: bytes) -> Any:
    """Load a pickle whose containers are spent. Raises `RefusedPickleError`."""
    check(data, len(data))
    return unpickle(data)


def unpickle(data: bytes) -> Any:
    """Load a pickle that was checked. Raises `RefusedPickleError` if it is not valid."""
    try:
        # A reader with `peek` makes it as fast as `loads`.
        return _DataUnpickler(BufferedReader(BytesIO(data), _BUFFER)).load()
    except RefusedPickleError:
        raise
    except Exception as error:
        raise RefusedPickleError(f"is not a valid pickle ({type(error).__name__}: {str(error)[:120]})") from error


class _DataUnpickler(Unpickler):
    """The second lock: if `check` overlooks an opcode, globals are still refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise RefusedPickleError(f"uses the global {module[:80]}.{name[:80]}, which data does not need")

    def persistent_load(self, pid: object) -> NoReturn:
        raise RefusedPickleError("has a persistent id, which data does not need")


_BUFFER = 1 << 18
_GET = rb"(?:h.|j.{4})"
_ONE_GET = re.compile(rb"(?s)" + _GET)
_PUT = re.compile(rb"(?s)(?:q.|r.{4})?")
_LENGTHS = {b"X": 4, b"U": 1, b"T": 4, b"\x8c": 1, b"\x8d": 8, b"\x8a": 1}
"""Opcode of a string or a long number -> bytes of the length before its content."""
_ARGUMENTS = {b"h": 1, b"K": 1, b"q": 1, b"M": 2, b"j": 4, b"J": 4, b"r": 4, b"G": 8, b"\x95": 8}
"""Other opcodes of data -> bytes of their argument."""
_LONGEST_RUN = 4000
"""Maximum number of opcodes that the regular expression engine has to remember."""
MARGIN = 1 << 16
"""By how much a memo index may be larger than the file."""


def check(data: bytes, size: int) -> None:
    """Check every opcode without executing any. Raises `RefusedPickleError` at one that could do harm, such as a memo
    index that is larger than a pickle of `size` bytes needs.

    A memo index must directly follow a string, a pair of strings, or a container that was made or filled, so that
    `check` knows which gets return pairs. An opcode that fills a container with nothing leaves the top of the stack as
    it is. That may be a pair, unless it is a container that was just made.
    """
    protocol = data[1:2]
    numbered = protocol in (b"\x02", b"\x03")  # from protocol 4 on, memo indices count up by themselves
    if protocol and not numbered and protocol not in (b"\x04", b"\x05"):
        raise RefusedPickleError(f"has protocol {protocol[0]}; 2 to 5 are read")
    opcodes = _opcodes(size, numbered)
    # Without the gets that a pair is made of: the expression backtracks over up to two.
    run = re.compile(rb"(?s)(?:%s){0,%d}(?!%s?\x86)" % (opcodes, _LONGEST_RUN, _GET)).match
    ends_in_get = re.compile(rb"(?s)(?:%s)*(%s)" % (opcodes, _GET)).fullmatch
    position = 2
    before: re.Match[bytes] | None = None  # the run just before the operands
    operands = 0  # strings, and gets of anything but pairs, before a pair
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
    """The memo index of a get or put."""
    return int.from_bytes(operation[1:], "little")


def _opcodes(size: int, numbered: bool) -> bytes:
    """An expression for one opcode with its arguments that is neither a string nor a pair.

    Its alternatives begin with a literal, and frequent ones come first: that takes half as long as character sets.
    """
    frequent, others = rb"h.|K.|[)saN\x88\x89]", rb"M..|j....|J....|G........|\x8a\x08........|\((?![ue])"
    if not numbered:
        return rb"%s|%s|[ue]|\x95........" % (frequent, others)
    return rb"%s|\]%s|%s|(?:[}\]](?:\([ue])?|[ue])(?:q.|%s)?" % (frequent, long_put(size), others, long_put(size))


def long_put(size: int) -> bytes:
    """An expression for a put with a memo index of four bytes that a pickle of `size` bytes may need."""
    most = size + MARGIN
    if most < 1 << 24:
        return rb"r..[\x00-%s]\x00" % re.escape(bytes([most >> 16]))
    return rb"r...[\x00-%s]" % re.escape(bytes([min(most >> 24, 255)]))
