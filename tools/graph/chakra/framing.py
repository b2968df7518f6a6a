"""The framing of a Chakra file: a stream of `<varint length><message>`, plain, gzip or zstd."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import BinaryIO

from google.protobuf.message import DecodeError

from crossrank.errors import CrossrankError
from crossrank.recording import ReadIssues, read_chunks
from crossrank.tools.graph.chakra.et_def_pb2 import GlobalMetadata, Node
from crossrank.tools.varint import varint

KINDS = {
    **dict.fromkeys(("comm_type", "comm_size"), "int64_val"),
    **dict.fromkeys(("comm_src", "comm_dst", "comm_tag"), "int32_val"),
    **dict.fromkeys(("tensor_size", "pid", "start_ts", "finish_ts"), "uint64_val"),
}
"""Attribute -> the kind of number that the older feeder assumes. The newer one converts."""
_VARINT_BYTES = 5
"""Most bytes of a length, as in Chakra's own readers."""
_MAX_LENGTH = 1 << 30


def write_message(file: BinaryIO, message: bytes) -> None:
    """Append one serialized message."""
    file.write(_encode_length(len(message)) + message)


_encode_length = lru_cache(maxsize=4096)(varint)


def read_trace(path: str, problems: list[str] | None = None) -> tuple[GlobalMetadata, Iterator[tuple[int, Node]]]:
    """Return the metadata of a file and an iterator over (offset, node). The offset is in the uncompressed file.

    Raise `CrossrankError` with file, node and offset if the file is cut off or is no Chakra trace. For the nodes, the
    iterator raises it when it reaches that place; with `problems`, it adds the text there and skips the node.
    """
    messages = _read_messages(path)
    first = next(messages, None)
    if first is None:
        raise CrossrankError(f"{path}: is empty; a Chakra trace starts with its metadata")
    metadata = GlobalMetadata()
    try:
        metadata.ParseFromString(first[1])
    except DecodeError as error:
        raise CrossrankError(f"{path}: the first message is not Chakra metadata; give a Chakra .et file") from error
    if first[1] and not metadata.version and not metadata.attr:
        raise CrossrankError(f"{path}: does not start with Chakra metadata; convert it again")
    nodes = _read_nodes(path, messages, problems)
    return metadata, nodes if problems is None else _until_damage(nodes, problems)


def _read_nodes(
    path: str, messages: Iterator[tuple[int, bytes]], problems: list[str] | None
) -> Iterator[tuple[int, Node]]:
    for number, (offset, message) in enumerate(messages, start=1):
        node = Node()
        try:
            node.ParseFromString(message)
        except DecodeError as error:
            text = f"{path}: node {number} at byte {offset} is not a Chakra node; the file is damaged"
            if problems is None:
                raise CrossrankError(text) from error
            problems.append(text)
            continue
        yield offset, node


def _until_damage(nodes: Iterator[tuple[int, Node]], problems: list[str]) -> Iterator[tuple[int, Node]]:
    try:
        yield from nodes
    except CrossrankError as error:
        problems.append(str(error))


def _read_messages(path: str) -> Iterator[tuple[int, bytes]]:
    issues = ReadIssues(path)
    buffer = bytearray()
    start = 0  # of the buffer in the file
    at = 0  # in the buffer
    for chunk in read_chunks(path, issues):
        del buffer[:at]
        start, at = start + at, 0
        buffer += chunk
        while (found := _read_length(path, buffer, at, start)) is not None:
            length, after = found
            if after + length > len(buffer):
                break
            yield start + at, bytes(buffer[after : after + length])
            at = after + length
    if issues.problems and not buffer:
        raise CrossrankError(f"{path}: {issues.problems[0]}")
    if at < len(buffer) or issues.problems:
        why = f" ({issues.problems[0]})" if issues.problems else ""
        raise CrossrankError(f"{path}: cut off in the message at byte {start + at}{why}; convert it again")


def _read_length(path: str, buffer: bytearray, at: int, start: int) -> tuple[int, int] | None:
    """Return (length, position after it) of the message at a position; None if it is not complete yet."""
    length = 0
    for i in range(_VARINT_BYTES):
        if at + i >= len(buffer):
            return None
        byte = buffer[at + i]
        length |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            if length > _MAX_LENGTH:
                break
            return length, at + i + 1
    raise CrossrankError(f"{path}: no message length at byte {start + at}; the file is damaged or not a Chakra trace")
