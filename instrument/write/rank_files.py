"""Writes the files of one rank under their final names, each complete.

A file has a temporary name in the same folder until it is complete. Files of an earlier recording or another program
that have a name of this rank are moved to `earlier-K/`. They are never overwritten or opened, because opening a named
pipe would block.

The files of a rank belong to the process that created them. A child process records in its own recording `spawned-K/`
if it has the same rank or belongs to another job. The process in which `torch.distributed.checkpoint.async_save` saves
is both.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import zstandard

from crossrank.errors import CrossrankError
from crossrank.instrument.locks import HeldLock, take_lock
from crossrank.instrument.log import log
from crossrank.instrument.unpatched import time
from crossrank.machine import boot_id, process_status
from crossrank.recording import (
    COMMS,
    RANK_FOLDER,
    VERDICT,
    CommsFile,
    Header,
    file_name,
    rank_folder,
    rank_of,
    temporary_name,
)
from crossrank.text import writable

_LEVEL = 3
_PATIENCE = 5.0
"""Seconds that a process waits for another process that still writes files of its rank."""
_NOTICED = 1.0
"""Seconds of that wait after which a warning is logged."""
_LARGE = 1024
"""Ranks of a job that has one folder per group of ranks."""
_VARIABLE = "CROSSRANK_RECORDING"
"""Passes the `_Owner` of the files to child processes."""
_EARLIER = re.compile(r"earlier-(\d{1,9})")
_SPAWNED = re.compile(r"spawned-\d+")


class RankFiles:
    """The files that one rank writes."""

    def __init__(
        self, directory: str, rank: int, world_size: int, *, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Changes nothing if `is_wanted` returns False after the wait for another process of this rank."""
        place = os.path.realpath(os.path.expanduser(directory))
        self.recording = Path(place)
        """The folder of the whole job."""
        self._lock: HeldLock | None = None
        try:
            self.recording.mkdir(parents=True, exist_ok=True)
            if _is_spawned(place, rank, world_size):
                self.recording, self._lock = _take_part(self.recording, rank, world_size)
            else:
                self._lock = _wait_for_rank(place, rank)
                if not is_wanted():
                    self.abandon()
                    raise CrossrankError(f"the recording ended before {self.recording} was open")
                _set_aside(self.recording, rank, world_size)
            self._folder = self.recording / rank_folder(rank, world_size)
            self._folder.mkdir(exist_ok=True)
        except OSError as error:
            raise CrossrankError(
                f"cannot write to {self.recording}: {error.strerror}; set another folder with TRACING_DIR"
            ) from error
        self._owner = _Owner(pid=os.getpid(), rank=rank, world_size=world_size, job=_job(), place=writable(place))
        self._inherited = msgspec.json.encode(self._owner).decode()

    def announce(self) -> None:
        """Pass the owner of the files to later child processes. Call it on a training thread: other threads may read
        the environment at any moment."""
        os.environ.setdefault(_VARIABLE, self._inherited)

    def path(self, name: str) -> Path:
        return self._folder / name

    def temporary(self, name: str) -> Path:
        """Return the path of `name` until it is complete."""
        return self._folder / temporary_name(name)

    def finish(self, name: str) -> None:
        """Compress the complete temporary file of `name` and rename it."""
        plain = self.temporary(name)
        compressed = plain.with_name(plain.name + ".zst")
        with plain.open("rb") as source, os.fdopen(create(compressed), "wb") as target:
            zstandard.ZstdCompressor(level=_LEVEL).copy_stream(source, target)
        os.replace(compressed, self.path(name))
        plain.unlink()

    def write(self, name: str, content: bytes) -> None:
        """Compress `content` and write it to `name`."""
        temporary = self.temporary(name)
        with os.fdopen(create(temporary), "wb") as target:
            target.write(zstandard.ZstdCompressor(level=_LEVEL).compress(content))
        os.replace(temporary, self.path(name))

    def close(self) -> None:
        """Release the folder."""
        if os.environ.get(_VARIABLE) == self._inherited:
            del os.environ[_VARIABLE]
        self.abandon()

    def abandon(self) -> None:
        """Release only the lock of the folder."""
        if self._lock is not None:
            self._lock.close()


def create(path: Path) -> int:
    """Return a descriptor of a new, empty file at `path`, which replaces any other file there. Never blocks.

    Raises `OSError`.
    """
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


class _Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The process that writes the files of a rank, as its child processes inherit it."""

    pid: int
    rank: int
    world_size: int
    job: str
    place: str


def _job() -> str:
    """Return an identifier of the job of this process; a job that it starts has another one."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return " ".join(os.environ.get(name, "") for name in names)


def _lock_name(place: str, rank: int) -> str:
    return f"records {place}/rank-{rank}"


def _wait_for_rank(place: str, rank: int) -> HeldLock | None:
    """Return the lock of a rank's files, once no process of this node writes them; None if one still does.

    Ranks may change when a process group is created again. The process that was this rank may still be finishing its
    files, which would get mixed with ours.
    """
    begun = time.monotonic()
    while (lock := take_lock(_lock_name(place, rank))) is None and time.monotonic() < begun + _PATIENCE:
        time.sleep(0.01)
    if (waited := time.monotonic() - begun) > _NOTICED:
        log.warning(
            "crossrank: rank %d waited %.1f s for another process of this user that records rank %d in %s%s",
            *(rank, waited, rank, place, "" if lock is not None else ", which still does"),
        )
    return lock


def _is_spawned(place: str, rank: int, world_size: int) -> bool:
    """Return whether an ancestor of this process records in `place`, and this process is not another rank of its job.

    Ranks may start each other: Lightning's rank 0 starts the others of its node. A process of multiprocessing's fork
    server may lack the variable. Then the header of the rank's file has the owner, and a lock shows whether the owner
    still records.
    """
    ancestors = _ancestors()
    try:
        owner = msgspec.json.decode(os.environ.get(_VARIABLE, ""), type=_Owner)
    except msgspec.MsgspecError:
        owner = None
    # A batch system may pass the environment of an ended job to the next one.
    if owner is not None and owner.place == writable(place) and owner.pid in ancestors:
        return owner.rank == rank or (owner.world_size, owner.job) != (world_size, _job())
    # The job that records there may have another number of ranks, and so another folder for this rank.
    for folder in dict.fromkeys(rank_folder(rank, size) for size in (1, world_size, _LARGE)):
        header = read_header(os.path.join(place, folder, file_name(COMMS, rank)))
        if header is not None and header.boot_id == boot_id() and header.pid in ancestors:
            lock = take_lock(_lock_name(place, rank))
            if lock is not None:
                lock.close()
            return lock is None
    return False


def read_header(path: str) -> Header | None:
    """Return the header of a comms file; None if there is none."""
    if not os.path.isfile(path):
        return None
    comms = CommsFile(path)
    next(comms.records(), None)
    return comms.header


def _ancestors() -> set[int]:
    """Return the ancestors of this process; none if the system has no /proc."""
    found: set[int] = set()
    pid = os.getppid()
    while pid > 1 and pid not in found:
        found.add(pid)
        if not (status := process_status(pid)):
            break
        pid = int(status[1])
    return found


def _take_part(recording: Path, rank: int, world_size: int) -> tuple[Path, HeldLock | None]:
    """Return the first `spawned-K` in which no process has recorded this rank, and its lock."""
    for part in (recording / f"spawned-{number}" for number in itertools.count(1)):
        if (lock := take_lock(_lock_name(str(part), rank))) is None:
            continue
        if not (part / rank_folder(rank, world_size) / file_name(COMMS, rank)).exists():
            break
        lock.close()
    part.mkdir(exist_ok=True)
    log.warning("crossrank: the parent of process %d records in %s: it uses %s", os.getpid(), recording, part)
    return part, lock


def _set_aside(recording: Path, rank: int, world_size: int) -> None:
    """Move the files of an earlier recording of this rank to an `earlier-K` without such files.

    This is the latest one, which another rank of this job may have created, or a new one. The first rank of a folder
    also moves files of ranks that do not belong to the folder in this job. Rank 0 also moves the folders that this job
    does not have, those of spawned processes, and the verdict.
    """
    own = rank_folder(rank, world_size)
    is_first = rank == 0 or rank_folder(rank - 1, world_size) != own

    def is_left(folder: str, name: str) -> bool:
        owner = rank_of(name)
        if owner is not None:
            has_place = owner < world_size and rank_folder(owner, world_size) == folder
            return owner == rank or (not has_place and (is_first if folder else rank == 0))
        if rank != 0 or folder:
            return False
        return name in superseded or _SPAWNED.fullmatch(name) is not None

    names = os.listdir(recording)
    superseded = {name for name in names if name == VERDICT or RANK_FOLDER.fullmatch(name)}
    if rank == 0:
        superseded -= {rank_folder(one, world_size) for one in range(world_size)}
    left = [name for name in names if is_left("", name)]
    if own in names:
        left += [f"{own}/{name}" for name in os.listdir(recording / own) if is_left(own, name)]
    if not left:
        return
    latest = max((int(match[1]) for name in names if (match := _EARLIER.fullmatch(name))), default=1)
    earlier = recording / f"earlier-{latest}"
    if any(os.path.lexists(earlier / name) for name in left):
        earlier = recording / f"earlier-{latest + 1}"
    for name in left:
        (earlier / name).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # a writer on another node has renamed it since
            os.rename(recording / name, earlier / name)
