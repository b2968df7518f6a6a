"""Files that are there whole or not at all, also after an error or Ctrl-C; local or at an fsspec URL."""

from __future__ import annotations

import errno
import gzip
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from crossrank.errors import CrossrankError, one_line
from crossrank.recording import is_url


def join(folder: str | Path, name: str) -> str:
    """Path or URL of `name` in `folder`.

    >>> join("s3://bucket/run/", "a"), join("run", "a"), join("/", "a")
    ('s3://bucket/run/a', 'run/a', '/a')
    """
    folder = str(folder)
    return f"{folder.rstrip('/')}/{name}" if is_url(folder) else os.path.join(folder, name)


def make_folder(folder: str) -> None:
    """Make a local folder or one at a URL, with its parents. Raises `CrossrankError` where it cannot be created."""
    try:
        if is_url(folder):
            import fsspec

            file_system, path = fsspec.core.url_to_fs(folder)
            file_system.makedirs(path, exist_ok=True)
        else:
            os.makedirs(folder, exist_ok=True)
    except Exception as error:  # every kind of file system has errors of its own
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise CrossrankError(f"{folder}: cannot be created ({reason}); name another folder with -o") from error


def compressed(file: BinaryIO, name: str | Path) -> AbstractContextManager[Any]:
    """Writes into `file`, which stays open, compressed where `name` ends in `.gz` or `.zst`. The bytes depend on the
    content alone: no name and no time is in them."""
    if str(name).endswith(".gz"):
        return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6)
    if str(name).endswith(".zst"):
        return zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False)
    return nullcontext(file)


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Gives the local name under which the block writes: renamed to `path` if the block ends well, else removed.

    A URL gets the file when it is whole. Raises `OSError` where it cannot be put in place.
    """
    if is_url(str(path)):
        import fsspec

        with tempfile.TemporaryDirectory(prefix="crossrank-") as folder:
            temporary = Path(folder) / str(path).rpartition("/")[2]
            yield temporary
            try:
                file_system, there = fsspec.core.url_to_fs(str(path))
                file_system.put_file(str(temporary), there)
            except Exception as error:  # every kind of file system has errors of its own
                raise OSError(0, one_line(error), str(path)) from error
        return
    path = Path(path)
    if not path.name or path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        # A device or pipe would be replaced by a file.
        raise OSError(errno.EINVAL, "is a device or a pipe, not a file", str(path))
    # A name that cannot be guessed holds no link or pipe of another user, and an existing file is never opened.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
