"""The folder of a rank: what stands there already, whose it is, and what may block."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from crossrank.instrument.hooks import fork
from crossrank.instrument.locks import HeldLock, close_in_child, lock_file, take_lock
from crossrank.instrument.write.rank_files import RankFiles
from crossrank.machine import boot_id
from crossrank.recording import SCHEMA, Header, rank_folder

COMMS = "rank-0.comms.jsonl.zst"


def begun(directory: str, rank: int, world_size: int) -> RankFiles:
    files = RankFiles(directory, rank, world_size)
    files.announce()
    return files


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


@pytest.fixture(autouse=True)
def _no_recording_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CROSSRANK_RECORDING", raising=False)


def _place(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to nowhere":
        path.symlink_to(path.with_name("nowhere"))
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"an earlier recording")


@pytest.mark.parametrize("kind", ["file", "pipe", "folder", "link to nowhere", "link to a device"])
@pytest.mark.timeout(20)
def test_a_file_with_one_of_our_names_is_moved_unopened(kind: str, tmp_path: Path) -> None:
    for name in (COMMS, "rank-0.flight.json.zst", ".rank-0.et.json.part", ".rank-0.flight.json.part"):
        _place(tmp_path / name, kind)
    files = begun(str(tmp_path), 0, 2)
    files.write("rank-0.flight.json.zst", b"{}")
    files.close()
    assert sorted(os.listdir(tmp_path)) == ["earlier-1", "rank-0.flight.json.zst"]
    assert len(os.listdir(tmp_path / "earlier-1")) == 4


@pytest.mark.timeout(20)
def test_a_pipe_created_during_the_recording_blocks_nothing(tmp_path: Path) -> None:
    files = begun(str(tmp_path), 0, 2)
    for name in ("rank-0.flight.json.zst", ".rank-0.flight.json.part"):
        os.mkfifo(tmp_path / name)
    for name in ("rank-0.et.json.zst", ".rank-0.et.json.part.zst"):
        os.mkfifo(tmp_path / name)
    files.write("rank-0.flight.json.zst", b"{}")
    whole = files.temporary("rank-0.et.json.zst")
    whole.write_bytes(b"{}")
    files.finish("rank-0.et.json.zst")
    assert sorted(os.listdir(tmp_path)) == ["rank-0.et.json.zst", "rank-0.flight.json.zst"]
    assert all(stat.S_ISREG((tmp_path / name).lstat().st_mode) for name in os.listdir(tmp_path))
    files.close()


def test_the_ranks_of_each_job_move_earlier_files_to_one_new_folder(tmp_path: Path) -> None:
    for job in range(3):
        for rank in (1, 0, 2):
            begun(str(tmp_path), rank, 3).close()
            (tmp_path / f"rank-{rank}.comms.jsonl.zst").write_bytes(b"job %d" % job)
        (tmp_path / "verdict.json").write_bytes(b"job %d" % job)
    for earlier, job in (("earlier-1", 0), ("earlier-2", 1)):
        names = [*(f"rank-{rank}.comms.jsonl.zst" for rank in range(3)), "verdict.json"]
        found = {path.name: path.read_bytes() for path in (tmp_path / earlier).iterdir()}
        assert found == dict.fromkeys(names, b"job %d" % job)


def test_a_thousand_earlier_recordings_are_not_checked_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 1001):
        (tmp_path / f"earlier-{number}").mkdir()
        (tmp_path / f"earlier-{number}" / COMMS).touch()
    (tmp_path / COMMS).touch()
    asked: list[Path] = []
    lexists = os.path.lexists

    def count(path: Path) -> bool:
        asked.append(path)
        return lexists(path)

    monkeypatch.setattr(os.path, "lexists", count)
    begun(str(tmp_path), 0, 1).close()
    assert (tmp_path / "earlier-1001" / COMMS).exists()
    assert len(asked) == 1


def _forked(work: object, *arguments: object) -> int:
    """The exit status of a forked child that does `work`."""
    assert callable(work)
    child = os.fork()
    if child == 0:
        try:
            work(*arguments)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _record(folder: Path, rank: int, world_size: int, expected: Path) -> None:
    path = begun(str(folder), rank, world_size).path(f"rank-{rank}.comms.jsonl.zst")
    assert path.parent == expected
    path.write_bytes(b"the child's")


@pytest.mark.parametrize(
    ("rank", "world_size", "part"),
    [
        (3, 8, "spawned-1"),  # the process in which async_save saves: the same rank of a job of the same size
        (0, 1, "spawned-1"),  # a job of its own
        (5, 8, ""),  # another rank of this job, started by this one
    ],
)
def test_a_process_started_by_a_rank_leaves_the_job_files_alone(
    rank: int, world_size: int, part: str, tmp_path: Path
) -> None:
    files = begun(str(tmp_path), 3, 8)
    (tmp_path / "rank-3.comms.jsonl.zst").write_bytes(b"the parent's")
    (tmp_path / "rank-0.comms.jsonl.zst").write_bytes(b"rank 0's")
    assert _forked(_record, tmp_path, rank, world_size, tmp_path / part) == 0
    assert names(tmp_path) == sorted(
        ["rank-0.comms.jsonl.zst", "rank-3.comms.jsonl.zst", os.path.join(part, f"rank-{rank}.comms.jsonl.zst")]
    )
    files.close()
    assert "CROSSRANK_RECORDING" not in os.environ


def test_a_job_of_equal_size_started_by_a_rank_leaves_the_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    files = begun(str(tmp_path), 0, 2)
    (tmp_path / "rank-1.comms.jsonl.zst").write_bytes(b"rank 1's")
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert _forked(_record, tmp_path, 1, 2, tmp_path / "spawned-1") == 0
    assert names(tmp_path) == ["rank-1.comms.jsonl.zst", "spawned-1/rank-1.comms.jsonl.zst"]
    files.close()


def test_the_environment_of_an_ended_job_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = begun(str(tmp_path), 0, 2)
    theirs = os.environ["CROSSRANK_RECORDING"].replace(f'"pid":{os.getpid()}', '"pid":4194304')
    monkeypatch.setenv("CROSSRANK_RECORDING", theirs)
    assert _forked(_record, tmp_path, 0, 2, tmp_path) == 0
    files.close()


def test_simultaneous_processes_of_one_rank_each_get_a_folder(tmp_path: Path) -> None:
    files = begun(str(tmp_path), 0, 1)
    reader, writer = os.pipe()
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)  # until all are there: the end of the pipe
            begun(str(tmp_path), 0, 1).write(COMMS, b"the child's")
            os._exit(0)
        children.append(child)
    os.close(reader)
    os.close(writer)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert len({name for name in names(tmp_path) if name.endswith(COMMS)}) == 4
    files.close()


def test_a_second_process_of_a_rank_gets_its_own_folder_and_the_next_job_moves_both(tmp_path: Path) -> None:
    files = begun(str(tmp_path), 0, 1)
    for number in (1, 2):
        assert _forked(_record, tmp_path, 0, 1, tmp_path / f"spawned-{number}") == 0
    files.close()
    begun(str(tmp_path), 0, 1).close()
    assert names(tmp_path) == [f"earlier-1/spawned-{number}/{COMMS}" for number in (1, 2)]


def test_the_header_gives_the_owner_of_a_file_without_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process of multiprocessing's fork server has the environment of before the recording.
    header = Header(schema=SCHEMA, rank=0, world_size=1, host="h", node="n", boot_id=boot_id(), pid=os.getpid())
    files = begun(str(tmp_path), 0, 1)
    (tmp_path / COMMS).write_bytes(msgspec.json.encode({"header": header}) + b"\n")
    monkeypatch.delenv("CROSSRANK_RECORDING")
    assert _forked(_record, tmp_path, 0, 1, tmp_path / "spawned-1") == 0
    assert names(tmp_path) == [COMMS, f"spawned-1/{COMMS}"]
    # A driver that recorded something itself starts the job when it is through.
    files.close()
    assert _forked(_record, tmp_path, 0, 1, tmp_path) == 0
    assert names(tmp_path) == [f"earlier-1/{COMMS}", f"earlier-1/spawned-1/{COMMS}", COMMS]


def test_the_file_of_an_unrelated_process_is_an_earlier_recording(tmp_path: Path) -> None:
    header = Header(schema=SCHEMA, rank=0, world_size=1, host="h", node="n", boot_id=boot_id(), pid=1 << 22)
    (tmp_path / COMMS).write_bytes(msgspec.json.encode({"header": header}) + b"\n")
    assert _forked(_record, tmp_path, 0, 1, tmp_path) == 0
    assert names(tmp_path) == [f"earlier-1/{COMMS}", COMMS]


def test_a_process_lock_has_one_owner_and_ends_with_it() -> None:
    name = f"a test of process {os.getpid()}, {time.monotonic_ns()}"
    lock = take_lock(name)
    assert lock is not None
    assert take_lock(name) is None
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(take_lock(name)))
    thread.start()
    thread.join()
    assert found == [None]
    lock.close()
    again = take_lock(name)
    assert again is not None
    again.close()


def test_a_rank_waits_until_its_earlier_files_are_finished(tmp_path: Path) -> None:
    # In a process group that is made again ranks may change places, each while the other one closes its files.
    first = begun(str(tmp_path), 0, 2)
    found: list[RankFiles] = []
    second = threading.Thread(target=lambda: found.append(begun(str(tmp_path), 0, 2)))
    second.start()
    second.join(0.1)
    assert not found
    first.write("rank-0.flight.json.zst", b"{}")
    first.close()
    second.join()
    assert names(tmp_path) == ["earlier-1/rank-0.flight.json.zst"]
    found[0].close()


def test_a_file_renamed_meanwhile_is_not_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / COMMS).write_bytes(b"")
    monkeypatch.setattr(os, "listdir", lambda _: [".rank-0.flight.json.part", COMMS])
    begun(str(tmp_path), 0, 2).close()
    assert names(tmp_path) == [f"earlier-1/{COMMS}"]


def _write_dump(folder: Path, rank: int, world_size: int) -> None:
    files = begun(str(folder), rank, world_size)
    files.write(f"rank-{rank}.flight.json.zst", b"{}")
    files.close()


def test_a_large_job_has_folders_of_a_few_ranks_each(tmp_path: Path) -> None:
    for rank in (0, 7, 8, 70):
        _write_dump(tmp_path, rank, 71)
    expected = [(0, "ranks-0-7"), (7, "ranks-0-7"), (70, "ranks-64-71"), (8, "ranks-8-15")]
    assert names(tmp_path) == [f"{folder}/rank-{rank}.flight.json.zst" for rank, folder in expected]


@pytest.mark.parametrize(("world_size", "folders"), [(65, 9), (8192, 1024), (8193, 513), (16384, 1024)])
def test_no_folder_of_a_large_job_has_more_than_a_thousand_entries(world_size: int, folders: int) -> None:
    ranks_in = Counter(rank_folder(rank, world_size) for rank in range(world_size))
    assert len(ranks_in) == folders
    assert max(ranks_in.values()) * len(("comms", "flight", "et", "kineto")) <= 1024
    assert "" not in ranks_in


def test_a_job_of_another_size_moves_files_that_do_not_fit(tmp_path: Path) -> None:
    def record(world_size: int) -> None:
        for rank in sorted({0, 3, world_size - 1}):
            _write_dump(tmp_path, rank, world_size)

    record(72)
    record(4)  # without folders
    assert names(tmp_path) == [
        "earlier-1/ranks-0-7/rank-0.flight.json.zst",
        "earlier-1/ranks-0-7/rank-3.flight.json.zst",
        "earlier-1/ranks-64-71/rank-71.flight.json.zst",
        "rank-0.flight.json.zst",
        "rank-3.flight.json.zst",
    ]
    record(66)
    assert [name for name in names(tmp_path) if not name.startswith("earlier-1/ranks")] == [
        "earlier-1/rank-0.flight.json.zst",
        "earlier-1/rank-3.flight.json.zst",
        "ranks-0-7/rank-0.flight.json.zst",
        "ranks-0-7/rank-3.flight.json.zst",
        "ranks-64-71/rank-65.flight.json.zst",
    ]
    record(65)  # rank 65 has no place in the folder that stays
    assert [name for name in names(tmp_path) if "/rank-65." in name] == [
        "earlier-2/ranks-64-71/rank-65.flight.json.zst",
    ]


def test_a_process_started_by_a_rank_of_a_large_job_records_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = Header(schema=SCHEMA, rank=0, world_size=96, host="h", node="n", boot_id=boot_id(), pid=os.getpid())
    files = begun(str(tmp_path), 0, 96)
    (tmp_path / "ranks-0-7" / COMMS).write_bytes(msgspec.json.encode({"header": header}) + b"\n")
    assert _forked(_record, tmp_path, 0, 1, tmp_path / "spawned-1") == 0
    monkeypatch.delenv("CROSSRANK_RECORDING")
    assert _forked(_record, tmp_path, 0, 1, tmp_path / "spawned-2") == 0
    files.close()


@pytest.mark.parametrize("kind", ["socket", "file"])
def test_a_forked_child_does_not_hold_the_locks_of_its_parent(kind: str, tmp_path: Path) -> None:
    assert close_in_child in fork.in_child
    with contextlib.ExitStack() as held:
        if kind == "socket":
            lock = take_lock(str(tmp_path))
            assert lock is not None
            held.callback(lock.close)
        else:
            held.enter_context(lock_file(tmp_path / "lock"))
        ended, end = os.pipe()
        heard, tell = os.pipe()
        if not (child := os.fork()):
            os.close(end)
            os.write(tell, b"1")
            os.read(ended, 1)
            os._exit(0)
        os.read(heard, 1)
    again = take_lock(str(tmp_path)) if kind == "socket" else held.enter_context(lock_file(tmp_path / "lock"))
    try:
        assert again is not None
    finally:
        for descriptor in (ended, end, heard, tell):
            os.close(descriptor)
        os.waitpid(child, 0)
        held.close()
        if isinstance(again, HeldLock):
            again.close()
