"""What the value of a field says about its user. `crossrank anonymize` is made from it.

The class stands on the field that declares it: `host: Annotated[str, Privacy.HOST]`. A field without one is left out
of an anonymous file, and counted. A `bool` and a `Literal` need none: they say one of a few things of ours.
"""

from __future__ import annotations

from enum import Enum


class Privacy(Enum):
    """What a value is. Its text stands in names: `host-3f9a1c20de`."""

    # Numbers, and lists of them however deep, also as text.
    NUMBER = "number"
    """Stays: no size, no time of the day, no serial number."""
    SIZE = "size"
    """A count of elements or bytes: stays, or is rounded with `--coarse`."""
    WALL = "wall"
    """ns or us since 1970: moved, with all others by the same time."""
    DAY = "day"
    """A local time, as `2023-09-07 16:09:59`: moved."""

    # Texts of which a part may stay.
    EVENT = "name"
    """An operation, a kernel, a range, a frame of Python as Kineto names it."""
    PATH = "path"
    PLACE = "place"
    """`file.py:line`"""
    FRAMES = "frames"
    """Of a stack: functions with their files."""
    MESSAGE = "text"
    """What an exception says, or a sentence of ours with such in it."""
    OP_SCHEMA = "schema of an operation"
    WORD = "word"
    """One of ours: which of a few things something is."""

    # Texts that stay where they are what anyone's traces have in such a place. `vocabulary.PATTERNS` has what that is.
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
    """Name or description of a process group. Of another one the dimension stays: `tp-group-3f9a1c20de`."""
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

    # Texts and numbers that never stay.
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
    """Parts of it are of several classes, and have no struct that says so: `tools/sharing/kinds.py` does."""
