"""Protobuf's variable-length integers: protobuf.dev/programming-guides/encoding."""

from __future__ import annotations


def varint(value: int) -> bytes:
    """Encode an integer in as few bytes as possible.

    >>> varint(300).hex()
    'ac02'
    """
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
