"""Puts the files of one rank where they belong: whole, under their final name, uploaded where that is a URL.

A file is written under a temporary name beside its place and renamed when it is whole. Files that a recording
before this one left for the same rank are moved to `earlier-K/`, never overwritten. An fsspec URL is served from
a local folder: each file is written there and copied to the URL when it is whole.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import zstandard

from crossrank.errors import CrossrankError, one_line
from crossrank.recording import is_url, rank_of, temporary_name

log = logging.getLogger("crossrank")

_LEVEL = 3
_UPLOAD_SECONDS = 300


class RankFiles:
    """The folder of a recording as one rank writes it."""

    def __init__(self, directory: str, rank: int, world_size: int) -> None:
        self._url = directory if is_url(directory) else None
        folder = Path(tempfile.mkdtemp(prefix="crossrank-")) if self._url else Path(directory).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _set_aside(folder, rank, world_size)
        except OSError as error:
            raise CrossrankError(
                f"cannot write to {folder}: {error.strerror}; name another folder with TRACING_DIR"
            ) from error
        self.folder = folder.resolve()
        if self._url is not None:
            self._check_url(self._url)

    def path(self, name: str) -> Path:
        return self.folder / name

    def temporary(self, name: str) -> Path:
        """Where `name` grows until it is whole."""
        return self.folder / temporary_name(name)

    def finish(self, plain: Path, name: str) -> None:
        """Compress the whole file `plain` to `name`, put it in place and remove `plain`."""
        compressed = plain.with_name(plain.name + ".zst")
        with plain.open("rb") as source, compressed.open("wb") as target:
            zstandard.ZstdCompressor(level=_LEVEL).copy_stream(source, target)
        os.replace(compressed, self.path(name))
        plain.unlink()
        self.upload(name)

    def write(self, name: str, content: bytes) -> None:
        """Write `content` to `name` at once, compressed."""
        temporary = self.temporary(name)
        temporary.write_bytes(zstandard.ZstdCompressor(level=_LEVEL).compress(content))
        os.replace(temporary, self.path(name))
        self.upload(name)

    def close(self) -> None:
        """Remove the local folder of a URL, if nothing had to stay in it."""
        if self._url is not None and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _check_url(self, url: str) -> None:
        """Say now, rather than at the end of a long job, that a URL cannot be written to."""
        import fsspec

        try:
            fsspec.core.url_to_fs(url)
        except Exception as error:
            log.warning("crossrank: cannot upload to %s: %s; files will stay in %s", url, one_line(error), self.folder)

    def upload(self, name: str) -> None:
        """Copy a whole file to the URL of the recording, if it has one. The local copy stays if that fails."""
        if self._url is None:
            return
        target = f"{self._url.rstrip('/')}/{name}"
        try:
            try:
                upload_file(str(self.path(name)), target)
            except RuntimeError:
                # Object stores of fsspec need threads, which an interpreter that shuts down no longer gives.
                command = [sys.executable, "-m", "crossrank.instrument.files", str(self.path(name)), target]
                subprocess.run(command, check=True, timeout=_UPLOAD_SECONDS, capture_output=True)
            self.path(name).unlink()
        except Exception as error:
            log.warning("crossrank: cannot upload %s: %s; it is kept as %s", target, one_line(error), self.path(name))


def upload_file(local: str, target: str) -> None:
    """Copy a local file to an fsspec URL."""
    import fsspec

    file_system, remote = fsspec.core.url_to_fs(target)
    file_system.makedirs(file_system._parent(remote), exist_ok=True)
    file_system.put_file(local, remote)


def _set_aside(folder: Path, rank: int, world_size: int) -> None:
    """Move what an earlier recording left for this rank to the first `earlier-K` that has none of it.

    Rank 0 also moves what is left of ranks that this job does not have.
    """

    def is_left(path: Path) -> bool:
        owner = rank_of(path.name)
        return owner is not None and (owner == rank or (rank == 0 and owner >= world_size)) and path.is_file()

    left = [path for path in folder.iterdir() if is_left(path)]
    if not left:
        return
    number = 1
    while any((folder / f"earlier-{number}" / path.name).exists() for path in left):
        number += 1
    earlier = folder / f"earlier-{number}"
    earlier.mkdir(exist_ok=True)
    for path in left:
        shutil.move(path, earlier / path.name)


if __name__ == "__main__":
    upload_file(*sys.argv[1:])
