"""The folder that a recording to be handed on is written to."""

from __future__ import annotations

import fsspec

from crossrank.atomic_file import join
from crossrank.errors import CrossrankError
from crossrank.recording import VERDICT, is_folder, list_recording


def refuse_full(folder: str) -> None:
    """Raise `CrossrankError` where there is something in a folder: it would become part of what is written."""
    if is_folder(folder):
        there = list_recording(folder)
        names = (there.files, there.partial, there.unrecognized, there.folders, there.special)
        if any(names) or exists(join(folder, VERDICT)):
            raise CrossrankError(f"{folder}: is not empty; name a new folder with -o")


def exists(path: str) -> bool:
    """Whether there is a file at a path or URL."""
    try:
        file_system, there = fsspec.core.url_to_fs(path)
        return bool(file_system.exists(there))
    except Exception:  # every kind of file system has errors of its own
        return False
