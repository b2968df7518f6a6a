"""Files that exist completely or not at all, also after an error or Ctrl-C. They are local or at an fsspec URL."""

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
    """Return the path or URL of `name` in `folder`.

    >>> join("s3://bucket/run/", "a"), join("run", "a"), join("/", "a")
    ('s3://bucket/run/a', 'run/a', '/a')
    """
    folder = str(folder)
    return f"{folder.rstrip('/')}/{name}" if is_url(folder) else os.path.join(folder, name)


def make_folder(folder: str) -> None:
    """Make a folder, local or at a URL, and its parents. Raise `CrossrankError` if that fails."""
    try:
        if is_url(folder):
            import fsspec

            file_system, path = fsspec.core.url_to_fs(folder)
            file_system.makedirs(path, exist_ok=True)
        else:
            os.makedirs(folder, exist_ok=True)
    except Exception as error:  # each kind of file system has its own errors
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise CrossrankError(f"{folder}: cannot be created ({reason}); choose another folder with -o") from error


def compressed(file: BinaryIO, name: str | Path) -> AbstractContextManager[Any]:
    """Return a stream into `file`, compressed if `name` ends in `.gz` or `.zst`. It leaves `file` open. The bytes
    depend only on the content: they contain no name and no time."""
    if str(name).endswith(".gz"):
        return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6)
    if str(name).endswith(".zst"):
        return zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False)
    return nullcontext(file)


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a local path to write to. If the block succeeds, move the file to `path`, otherwise remove it.

    A URL receives the complete file at the end. Raise `OSError` if the file cannot be put in place.
    """
    if is_url(str(path)):
        import fsspec

        with tempfile.TemporaryDirectory(prefix="crossrank-") as folder:
            temporary = Path(folder) / str(path).rpartition("/")[2]
            yield temporary
            try:
                file_system, remote_path = fsspec.core.url_to_fs(str(path))
                file_system.put_file(str(temporary), remote_path)
            except Exception as error:  # each kind of file system has its own errors
                raise OSError(0, one_line(error), str(path)) from error
        return
    path = Path(path)
    if not path.name or path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        # os.replace would put a file in place of the device or pipe.
        raise OSError(errno.EINVAL, "is a device or a pipe, not a file", str(path))
    # No other user can put a link or pipe at a random name, and O_EXCL opens no existing file.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
