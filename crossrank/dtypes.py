"""Element types: one row each, with size and the names in execution traces, Kineto traces and dumps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """One element type. `name` is torch's name."""

    name: str
    size: int
    """Bytes per element."""
    aliases: tuple[str, ...] = ()
    """Other names: C++ types in execution traces, ScalarType in Kineto traces and flight-recorder dumps."""


DTYPES: dict[str, DType] = {
    row.name: row
    for row in (
        DType("float32", 4, ("Float", "float", "fp32")),
        DType("float64", 8, ("Double", "double", "fp64")),
        DType("float16", 2, ("Half", "c10::Half", "half", "fp16")),
        DType("bfloat16", 2, ("BFloat16", "c10::BFloat16", "bf16")),
        DType("uint8", 1, ("Byte", "unsigned char")),
        DType("int8", 1, ("Char", "signed char", "char")),
        DType("int16", 2, ("Short", "short", "short int")),
        DType("int32", 4, ("Int", "int")),
        DType("int64", 8, ("Long", "long", "long int", "long long")),
        DType("uint16", 2, ("UInt16", "unsigned short", "short unsigned int")),
        DType("uint32", 4, ("UInt32", "unsigned int")),
        DType("uint64", 8, ("UInt64", "unsigned long", "long unsigned int")),
        DType("bool", 1, ("Bool",)),
        DType("complex32", 4, ("ComplexHalf", "c10::complex<c10::Half>")),
        DType("complex64", 8, ("ComplexFloat", "c10::complex<float>")),
        DType("complex128", 16, ("ComplexDouble", "c10::complex<double>")),
        DType("float8_e4m3fn", 1, ("Float8_e4m3fn", "c10::Float8_e4m3fn")),
        DType("float8_e5m2", 1, ("Float8_e5m2", "c10::Float8_e5m2")),
        DType("float8_e4m3fnuz", 1, ("Float8_e4m3fnuz", "c10::Float8_e4m3fnuz")),
        DType("float8_e5m2fnuz", 1, ("Float8_e5m2fnuz", "c10::Float8_e5m2fnuz")),
        DType("float8_e8m0fnu", 1, ("Float8_e8m0fnu", "c10::Float8_e8m0fnu")),
    )
}

_BY_ALIAS = {alias: row for row in DTYPES.values() for alias in (row.name, *row.aliases)}


def dtype_of(name: str) -> DType | None:
    """Return the element type that any of the formats calls `name`; None if the table lacks it.

    >>> dtype_of("c10::BFloat16").name, dtype_of("Tensor(long int)").size
    ('bfloat16', 8)
    """
    return _BY_ALIAS.get(name.removeprefix("Tensor(").removesuffix(")") if name.startswith("Tensor(") else name)
