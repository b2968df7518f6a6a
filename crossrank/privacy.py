"""What the value of a field reveals about its user. `crossrank anonymize` follows these classes.

A field declares its class in its type: `host: Annotated[str, Privacy.HOST]`. `anonymize` skips and counts a field
without a class. A `bool` and a `Literal` need no class: crossrank defines all their values.
"""

from __future__ import annotations

from enum import Enum


class Privacy(Enum):
    """The class of a value. Its text is part of a pseudonym: `host-3f9a1c20de`."""

    # Numbers, and nested lists of them, also as text.
    NUMBER = "number"
    """Stays. It is no size, no wall time and no serial number."""
    SIZE = "size"
    """A count of elements or bytes. Stays, or is rounded with `--coarse`."""
    WALL = "wall"
    """ns or us since 1970. Moved by the same time as all others."""
    DAY = "day"
    """A local time such as `2023-09-07 16:09:59`. Moved."""

    # Texts that may stay in part.
    EVENT = "name"
    """An operation, a kernel, a range, or a Python frame as Kineto names it."""
    PATH = "path"
    PLACE = "place"
    """`file.py:line`"""
    FRAMES = "frames"
    """Functions of a stack with their files."""
    MESSAGE = "text"
    """The text of an exception, or a message of crossrank that contains one."""
    OP_SCHEMA = "schema of an operation"
    WORD = "word"
    """A word of crossrank's own files: one of a few values."""

    # Texts that stay if they match the public pattern of their class in `vocabulary.PATTERNS`.
    API = "api"
    BACKEND = "backend"
    CATEGORY = "category"
    DEVICE_NAME = "device name"
    DTYPE = "dtype"
    EDGE = "edge"
    EVENT_TYPE = "event type"
    FACT = "fact"
    FIELD = "field"
    GROUP = "group"
    """Name or description of a process group. A replaced name keeps its dimension: `tp-group-3f9a1c20de`."""
    LABEL = "label"
    MEMORY = "memory"
    PACKAGE = "package"
    PHASE = "phase"
    REASON = "reason"
    REDUCTION = "reduction"
    SCHEMA = "schema"
    SETTING = "emit"
    STATE = "state"
    SYNC = "sync"
    THREAD = "thread"
    TYPE = "type"
    UNIT = "unit"
    VERSION = "version"

    # Texts and numbers that are always replaced.
    BOOT = "boot"
    COMMUNICATOR = "communicator"
    DIGEST = "sha256"
    FABRIC = "fabric"
    FILE = "file"
    FOLDER = "folder"
    HOST = "host"
    NODE = "node"
    PCI = "pci"
    SERIAL = "serial"
    UUID = "uuid"
    VM = "vm"

    MIXED = "mixed"
    """The parts have several classes, which no struct declares. `tools/sharing/kinds.py` lists them."""
