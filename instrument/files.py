"""Puts the files of one rank where they belong: whole, under their final name, uploaded where that is a URL.

A file is written under a temporary name beside its place and renamed when it is whole. Whatever a recording before
this one, or somebody else, left under a name of this rank is moved to `earlier-K/`, never overwritten and never
opened: a named pipe would block the one who opens it. An fsspec URL is served from a local folder: each file is
written there and copied to the URL when it is whole.

The files of a rank belong to the process that began them. A process that it starts and that has its rank, or belongs
to a job of its own (the one in which `torch.distributed.checkpoint.async_save` saves does both), records in
`spawned-K/`, a recording of its own.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import zstandard

from crossrank.errors import CrossrankError, one_line
from crossrank.instrument.topology import boot_id
from crossrank.recording import COMMS, CommsFile, file_name, is_url, rank_of, temporary_name

log = logging.getLogger("crossrank")

_LEVEL = 3
_UPLOAD_SECONDS = 300
_OWNER = "CROSSRANK_RECORDING"
"""Variable by which the processes that a rank starts know whose files are whose: PID:RANK:WORLD_SIZE:FOLDER."""
_EARLIER = re.compile(r"earlier-(\d{1,9})")
_SPAWNED = re.compile(r"spawned-\d+")


class RankFiles:
    """The folder of a recording as one rank writes it."""

    def __init__(self, directory: str, rank: int, world_size: int) -> None:
        url = directory.rstrip("/") if is_url(directory) else None
        place = url or os.path.realpath(os.path.expanduser(directory))
        spawned = _is_spawned(place, rank, world_size)
        folder = Path(tempfile.mkdtemp(prefix="crossrank-") if url else place)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if spawned:
                folder = _spawned_folder(folder, rank, url)
            else:
                _set_aside(folder, rank, world_size)
        except OSError as error:
            raise CrossrankError(
                f"cannot write to {folder}: {error.strerror}; name another folder with TRACING_DIR"
            ) from error
        self.folder = folder
        self._url = f"{url}/{folder.name}" if url and spawned else url
        self._owner = f"{os.getpid()}:{rank}:{world_size}:{place}"
        os.environ.setdefault(_OWNER, self._owner)
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
        with plain.open("rb") as source, os.fdopen(create(compressed), "wb") as target:
            zstandard.ZstdCompressor(level=_LEVEL).copy_stream(source, target)
        os.replace(compressed, self.path(name))
        plain.unlink()
        self.upload(name)

    def write(self, name: str, content: bytes) -> None:
        """Write `content` to `name` at once, compressed."""
        temporary = self.temporary(name)
        with os.fdopen(create(temporary), "wb") as target:
            target.write(zstandard.ZstdCompressor(level=_LEVEL).compress(content))
        os.replace(temporary, self.path(name))
        self.upload(name)

    def close(self) -> None:
        """Let go of the folder; the local one of a URL is removed, if nothing had to stay in it."""
        if os.environ.get(_OWNER) == self._owner:
            del os.environ[_OWNER]
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


def create(path: Path) -> int:
    """A descriptor of a new, empty file at `path`, in place of whatever stands there. Never blocks.

    Raises `OSError`.
    """
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def _is_spawned(place: str, rank: int, world_size: int) -> bool:
    """Whether a process that this one descends from records in `place`, and this one is not another rank of its job.

    Ranks may start each other: Lightning's rank 0 starts the others of its node. A process of multiprocessing's fork
    server may lack the variable; then the header of the rank's own file says whose it is.
    """
    pid, _, rest = os.environ.get(_OWNER, "").partition(":")
    owner, _, rest = rest.partition(":")
    size, _, recorded = rest.partition(":")
    if recorded == place and pid != str(os.getpid()):
        return owner == str(rank) or size != str(world_size)
    if is_url(place):
        return False
    comms = CommsFile(os.path.join(place, file_name(COMMS, rank)))
    if not os.path.isfile(comms.path):
        return False
    next(comms.records(), None)
    header = comms.header
    return header is not None and header.boot_id == boot_id() and header.pid in _ancestors()


def _ancestors() -> set[int]:
    """The processes that this one descends from; none where the system has no /proc."""
    found: set[int] = set()
    pid = os.getppid()
    while pid > 1 and pid not in found:
        found.add(pid)
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        pid = int(status.rpartition(")")[2].split()[1])  # the name before it may hold spaces
    return found


def _spawned_folder(folder: Path, rank: int, url: str | None) -> Path:
    """The first `spawned-K` in `folder` that has no file of this rank. At a URL that is always the first."""
    number = 1
    while (folder / f"spawned-{number}" / file_name(COMMS, rank)).exists():
        number += 1
    spawned = folder / f"spawned-{number}"
    spawned.mkdir(exist_ok=True)
    log.warning(
        "crossrank: process %d was started by one that records in %s: it records in %s of it",
        os.getpid(),
        url or folder,
        spawned.name,
    )
    return spawned


def _set_aside(folder: Path, rank: int, world_size: int) -> None:
    """Move what an earlier recording left for this rank to an `earlier-K` that has none of it.

    That is the latest one, which another rank of this job may just have begun, or a new one. Rank 0 also moves what
    is left of ranks that this job does not have, and of spawned processes.
    """

    def is_left(name: str) -> bool:
        owner = rank_of(name)
        if owner is None:
            return rank == 0 and _SPAWNED.fullmatch(name) is not None
        return owner == rank or (rank == 0 and owner >= world_size)

    names = os.listdir(folder)
    left = [name for name in names if is_left(name)]
    if not left:
        return
    latest = max((int(match[1]) for name in names if (match := _EARLIER.fullmatch(name))), default=1)
    earlier = folder / f"earlier-{latest}"
    if any(os.path.lexists(earlier / name) for name in left):
        earlier = folder / f"earlier-{latest + 1}"
    earlier.mkdir(exist_ok=True)
    for name in left:
        os.rename(folder / name, earlier / name)


if __name__ == "__main__":
    upload_file(*sys.argv[1:])
