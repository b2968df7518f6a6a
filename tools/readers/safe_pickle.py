"""Unpickling of data that nobody vouches for: plain containers, strings and numbers, nothing else.

`pickle.load` runs whatever a file asks for. Here every opcode is looked at before the first is carried out: a file
that holds one outside the list below is refused, so neither a global, an extension nor a persistent id can be named.
The same look bounds what a small file could otherwise make large: the memo's index (Python allocates up to it) and
the lengths of strings. What is left is decoded by the C unpickler, which costs 0.4 times as much again to look at.

Opcodes: pickletools of CPython. torch's flight recorder writes protocol 2 and needs those of `_PLAIN` and `_FIXED`;
the others are what `pickle.dumps` of the same data gives with later protocols.
"""

from __future__ import annotations

import io
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any, NoReturn

_PLAIN = rb"}\](esuaN\x85\x86\x87)t\x88\x89\x94"
"""Opcodes without an argument: containers, None, True, False, MEMOIZE."""
_MARGIN = 1 << 16
_LONGEST_RUN = 4000
_FEW_TUPLES = 20_000
_MOST_TUPLES = 5_000_000
_DEEPEST_STACK = 512 << 20
"""Bytes. The C unpickler hashes a key that is a tuple of tuples by recursion, with about 100 bytes a level."""

_STRINGS = {0x58: 4, 0x8C: 1, 0x8D: 8, 0x54: 4, 0x55: 1}
"""Opcode -> bytes of its length: BINUNICODE, SHORT_BINUNICODE, BINUNICODE8, BINSTRING, SHORT_BINSTRING."""
_LONG1 = 0x8A
_LONGEST_INT = 16
_STOP = 0x2E


class RefusedError(ValueError):
    """The pickle asks for more than data, or is none. The text says what."""


class _DataUnpickler(pickle.Unpickler):
    """The second lock: were an opcode overlooked, it would still find no global."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise RefusedError(f"names the global {module[:80]}.{name[:80]}, which data has no need of")

    def persistent_load(self, pid: object) -> NoReturn:
        raise RefusedError("holds a persistent id, which data has no need of")


def load_data(data: bytes) -> Any:
    """The object of a pickle that holds data alone. Raises `RefusedError` for any other."""
    _look_through(data)
    tuples = sum(data.count(opcode) for opcode in (b"\x85", b"\x86", b"\x87", b"t"))  # at most so many
    if tuples > _MOST_TUPLES:
        raise RefusedError(f"may hold {tuples} tuples, more than the {_MOST_TUPLES} that are looked at")
    try:
        if tuples < _FEW_TUPLES:
            return _DataUnpickler(io.BytesIO(data)).load()
        return _with_deep_stack(lambda: _DataUnpickler(io.BytesIO(data)).load())
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(f"is no whole pickle ({type(error).__name__}: {str(error)[:120]})") from error


def _look_through(data: bytes) -> None:
    """Walk over every opcode without carrying any out."""
    run = _run_pattern(len(data)).match
    position, size = 0, len(data)
    while position < size:
        match = run(data, position)
        assert match is not None  # the empty run always matches
        if match.end() > position:
            position = match.end()
            continue
        opcode = data[position]
        if opcode in _STRINGS:
            width = _STRINGS[opcode]
            position += 1 + width + int.from_bytes(data[position + 1 : position + 1 + width], "little")
        elif opcode == _LONG1 and position + 1 < size and data[position + 1] <= _LONGEST_INT:
            position += 2 + data[position + 1]
        elif opcode == _STOP:
            return
        else:
            raise RefusedError(f"holds the pickle opcode {bytes([opcode])!r} at byte {position}, which is not data")
    raise RefusedError(f"is cut off: the pickle of {size} bytes has no end")


def _run_pattern(size: int) -> re.Pattern[bytes]:
    """Opcodes of fixed length, as many as follow each other. A memo index is at most about the size of the file."""
    most = size + _MARGIN
    if most < 1 << 24:
        long_put = b"r..[\\x00-%s]\\x00" % re.escape(bytes([most >> 16]))
    else:
        long_put = b"r...[\\x00-%s]" % re.escape(bytes([min(most >> 24, 255)]))
    fixed = rb"|[Khq].|M..|[Jj].{4}|[G\x95].{8}|\x80[\x02-\x05]|\x8a\x08.{8}|"
    return re.compile(b"(?s)(?:[%s]%s%s){0,%d}" % (_PLAIN, fixed, long_put, _LONGEST_RUN))


def _with_deep_stack(load: Callable[[], Any]) -> Any:
    """Run where deeply nested tuples, which the C unpickler may hash as keys, do not overflow the stack."""
    result: list[Any] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(load())
        except BaseException as error:
            failure.append(error)

    before = threading.stack_size(_DEEPEST_STACK)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
