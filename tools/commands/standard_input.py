"""Reads a log from the standard input, where a command is given `-` as a path."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from crossrank.tools.traces.discover import FoundFile, look

STANDARD_INPUT = "-"
"""The path that means the standard input."""


@contextmanager
def kept_input(paths: Sequence[str]) -> Iterator[list[FoundFile]]:
    """Keep what the standard input has in a file for as long as it is read, if `-` is one of `paths`."""
    if STANDARD_INPUT not in paths:
        yield []
        return
    with tempfile.NamedTemporaryFile(prefix="crossrank-input-") as kept:
        shutil.copyfileobj(sys.stdin.buffer, kept)
        kept.flush()
        yield [replace(look(kept.name), rank=None, size=os.path.getsize(kept.name), shown="standard input")]
