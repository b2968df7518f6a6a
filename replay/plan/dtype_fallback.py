"""Which element types and reductions each backend supports, and what replaces the others.

For gloo, measured with torch 2.13 (each operation with each type). For NCCL, from `ncclDataType_t` and torch's mapping
of bool and fp8 to it (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). A replacement has the same size, so that the
same bytes are sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from crossrank.comm import CommRecord, is_p2p

REDUCING = frozenset(("all_reduce", "reduce", "reduce_scatter"))

_COMMON = frozenset(("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int32", "int64", "bool"))
_COMPLEX = frozenset(("complex64", "complex128"))
_FP8 = frozenset(("float8_e4m3fn", "float8_e5m2"))
_INTEGERS = frozenset(("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool"))
_BITWISE = frozenset(("band", "bor", "bxor"))
REDUCTIONS = frozenset(("sum", "avg", "product", "min", "max", *_BITWISE))
"""Reductions that the replay can make. `premul_sum` is missing: its factor is not recorded."""
_MONITORED = "monitored_barrier_"


@dataclass(frozen=True)
class Backend:
    """What one backend supports."""

    moves: frozenset[str]
    """Types of collectives without arithmetic."""
    reduces: frozenset[str]
    p2p: frozenset[str] | None = None
    """Types of send and recv; None: all."""
    bitwise: bool = True
    """Whether it has BAND, BOR and BXOR."""


BACKENDS = {
    "gloo": Backend(moves=_COMMON, reduces=_COMMON | _COMPLEX),
    "nccl": Backend(moves=_COMMON | _FP8, reduces=_COMMON, p2p=_COMMON | _FP8, bitwise=False),
}

# For the time of arithmetic, the size of a type matters more than its kind.
_STAND_INS = {
    **dict.fromkeys(("int16", "uint16"), "float16"),
    "uint32": "int32",
    "uint64": "int64",
    "complex32": "float32",
    "complex64": "float64",
}
"""Type -> its replacement. For other types, which have one byte, it is uint8."""
_TWICE = {"complex128": "float64"}
"""Types without a replacement of their size -> two elements of another."""


@dataclass(frozen=True, kw_only=True)
class Substitute:
    """The call that replaces a recorded one."""

    c10d: str
    """The c10d op to call: the recorded one, unless only one backend has it."""
    dtype: str
    elements: int = 1
    """Elements of `dtype` for each recorded one."""
    reduce: str | None = None
    differences: tuple[str, ...] = ()
    """Differences from the recording, as text for the user."""


def substitute(record: CommRecord, backend: str) -> Substitute:
    """Return what `backend` communicates for `record`; without `differences` if it supports the recorded call.

    >>> call = CommRecord(id=0, op="all_gather", c10d="_allgather_base_", pg="0", bytes=8, t=0, dtype="complex128")
    >>> substitute(call, "gloo").differences
    ('all_gather of complex128 as twice as many float64',)
    """
    row = BACKENDS.get(backend)
    dtype = record.dtype or "uint8"
    if record.c10d == _MONITORED and backend != "gloo":
        text = "monitored_barrier, which gloo alone has, as barrier"
        return Substitute(c10d="barrier", dtype=dtype, differences=(text,))
    if row is None or record.op == "barrier":
        return Substitute(c10d=record.c10d, dtype=dtype, reduce=record.reduce)
    differences = []
    reducing = record.op in REDUCING
    reduce = (record.reduce or "").lower() if reducing else None
    able = row.p2p if is_p2p(record) else row.reduces if reducing else row.moves
    if reducing and dtype in _COMPLEX and (reduce or "sum") not in ("sum", "avg"):
        able = row.moves  # complex numbers have no order, and gloo has no complex product
    elements = 1
    if able is not None and dtype not in able:
        if dtype in _TWICE:
            instead, elements = _TWICE[dtype], 2
            differences.append(f"{record.op} of {dtype} as twice as many {instead}")
        else:
            instead = _STAND_INS.get(dtype, "uint8")
            differences.append(f"{record.op} of {dtype} as {instead}, of the same size")
        dtype = instead
    reason = _why_replaced_by_sum(reduce, dtype, backend, row) if reduce is not None else None
    if reason is not None:
        differences.append(f"{record.op} as sum, {reason}")
        reduce = "sum"
    return Substitute(c10d=record.c10d, dtype=dtype, elements=elements, reduce=reduce, differences=tuple(differences))


def _why_replaced_by_sum(reduce: str, dtype: str, backend: str, row: Backend) -> str | None:
    """Return why a sum replaces the reduction; None if the backend supports it."""
    if not reduce:
        return "because the reduction is not recorded"
    if reduce not in REDUCTIONS:
        return f"instead of {reduce}"
    if reduce in _BITWISE and not (row.bitwise and dtype in _INTEGERS):
        return f"because {backend} has no {reduce} of {dtype}"
    return f"because {dtype} has no avg" if reduce == "avg" and dtype in _INTEGERS else None
