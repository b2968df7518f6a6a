"""Which element types and reductions each backend can communicate, and what stands in for the others.

Measured with torch 2.13 on gloo (each operation with each type); for NCCL, the types of `ncclDataType_t` and torch's
own mapping of bool and fp8 to it (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). A stand-in has the same size, so
that the same bytes travel.
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
"""Those that can be made again; `premul_sum` has a factor that is not recorded."""
_MONITORED = "monitored_barrier_"


@dataclass(frozen=True)
class Backend:
    """What one backend can communicate."""

    moves: frozenset[str]
    """Types that collectives without arithmetic take."""
    reduces: frozenset[str]
    p2p: frozenset[str] | None = None
    """Types that send and recv take; None = all."""
    bitwise: bool = True
    """Whether BAND, BOR and BXOR exist."""


BACKENDS = {
    "gloo": Backend(moves=_COMMON, reduces=_COMMON | _COMPLEX),
    "nccl": Backend(moves=_COMMON | _FP8, reduces=_COMMON, p2p=_COMMON | _FP8, bitwise=False),
}

# In arithmetic the kind matters little for the time, the size does.
_STAND_INS = {
    **dict.fromkeys(("int16", "uint16"), "float16"),
    "uint32": "int32",
    "uint64": "int64",
    "complex32": "float32",
    "complex64": "float64",
}
"""Types -> what stands in for them; for others, which have one byte, uint8."""
_TWICE = {"complex128": "float64"}
"""Types without a stand-in of their size: two elements of another."""


@dataclass(frozen=True, kw_only=True)
class Substitute:
    """What is communicated instead of what was recorded."""

    c10d: str
    """The op that is made: the recorded one, but for what one backend alone has."""
    dtype: str
    elements: int = 1
    """Elements of `dtype` for each recorded one."""
    reduce: str | None = None
    differences: tuple[str, ...] = ()
    """What differs from the recording, for people."""


def substitute(record: CommRecord, backend: str) -> Substitute:
    """What `backend` communicates for `record`; without `differences` where that is what was recorded.

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
        able = row.moves  # there is no order of complex numbers, nor a product in gloo
    elements = 1
    if able is not None and dtype not in able:
        if dtype in _TWICE:
            instead, elements = _TWICE[dtype], 2
            differences.append(f"{record.op} of {dtype} as twice as many {instead}")
        else:
            instead = _STAND_INS.get(dtype, "uint8")
            differences.append(f"{record.op} of {dtype} as {instead}, of the same size")
        dtype = instead
    reason = _no_reduction(reduce, dtype, backend, row) if reduce is not None else None
    if reason is not None:
        differences.append(f"{record.op} as sum, {reason}")
        reduce = "sum"
    return Substitute(c10d=record.c10d, dtype=dtype, elements=elements, reduce=reduce, differences=tuple(differences))


def _no_reduction(reduce: str, dtype: str, backend: str, row: Backend) -> str | None:
    """Why that reduction is not made; None where it is."""
    if not reduce:
        return "for the recording does not say the reduction"
    if reduce not in REDUCTIONS:
        return f"in the place of {reduce}"
    if reduce in _BITWISE and not (row.bitwise and dtype in _INTEGERS):
        return f"for {backend} has no {reduce} of {dtype}"
    return f"for there is no avg of {dtype}" if reduce == "avg" and dtype in _INTEGERS else None
