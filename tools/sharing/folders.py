"""The output folder of a recording to share."""

from __future__ import annotations

import fsspec

from crossrank.atomic_file import join
from crossrank.errors import CrossrankError
from crossrank.recording import VERDICT, is_folder, list_recording


def refuse_full(folder: str) -> None:
    """Raise `CrossrankError` if a folder has content, which would become part of the output."""
    if is_folder(folder):
        there = list_recording(folder)
        names = (there.files, there.partial, there.unrecognized, there.folders, there.special)
        if any(names) or exists(join(folder, VERDICT)):
            raise CrossrankError(f"{folder}: is not empty; choose a new folder with -o")


def exists(path: str) -> bool:
    """Return whether there is a file at a path or URL."""
    try:
        file_system, there = fsspec.core.url_to_fs(path)
        return bool(file_system.exists(there))
    except Exception:  # each kind of file system has its own errors
        return False
