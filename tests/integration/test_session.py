"""Enabling, disabling and everything that must not hurt training."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import crossrank
from crossrank.instrument import api
from crossrank.instrument.identity.topology import Topology
from tests.integration import jobs
from tests.integration.jobs import Scripts
from tests.integration.traces import Recorded, execution_trace_ids
from tests.integration.world import TwoRanks

KINDS = ("comms.jsonl.zst", "flight.json.zst")


def _registrations() -> str:
    """What the dispatcher has for all_reduce at our key."""
    table: str = torch._C._dispatch_dump("c10d::allreduce_")
    return "\n".join(line for line in table.splitlines() if line.startswith("BackendSelect"))


def _off(rank: int, directory: str) -> bool:
    before = _registrations()
    with crossrank.enable(tracing="NONE", directory=directory) as tracing:
        dist.all_reduce(torch.ones(1))
        return tracing.active or _registrations() != before or os.path.exists(directory)


def test_tracing_none_installs_and_writes_nothing(two_ranks: TwoRanks) -> None:
    assert two_ranks.run_bare(_off) == [False, False]


def _initializes_after_enabling(rank: int, directory: str) -> tuple[list[str], bool]:
    dist.destroy_process_group()
    crossrank.enable(tracing="ALL", directory=directory)
    dist.init_process_group("gloo", init_method=f"file://{directory}-store", rank=rank, world_size=2)
    found = [f"rank-{rank}.{kind}" for kind in KINDS if os.path.exists(f"{directory}/rank-{rank}.{kind}")]
    watches = any(thread.name == "crossrank-watchdog" for thread in threading.enumerate())
    crossrank.disable()
    return found, watches


def test_a_rank_that_has_made_no_call_yet_has_a_file_and_answers(two_ranks: TwoRanks) -> None:
    found = two_ranks.run_bare(_initializes_after_enabling)
    assert found == [([f"rank-{rank}.comms.jsonl.zst"], True) for rank in (0, 1)]


def _twice(rank: int, directory: str) -> bool:
    first = crossrank.enable(tracing="ALL", directory=directory)
    second = crossrank.enable(tracing="ALL", directory=directory + "-second")
    dist.all_reduce(torch.ones(1))
    crossrank.disable()
    return first.active or second.active or os.path.exists(directory + "-second")


def test_a_second_enable_changes_nothing(two_ranks: TwoRanks) -> None:
    assert two_ranks.run_bare(_twice) == [False, False]
    assert len(two_ranks.recorded().calls) == 1


def _inner_block(rank: int, directory: str) -> list[bool]:
    with crossrank.enable(tracing="ALL", directory=directory) as outer:
        dist.all_reduce(torch.ones(1))
        with crossrank.enable(tracing="ALL", directory=directory) as inner:
            dist.all_reduce(torch.ones(1))
            during = inner.active
        after = outer.active
        dist.all_reduce(torch.ones(1))
    return [during, after, outer.active, inner.active]


def test_a_block_within_a_recording_does_not_end_it(two_ranks: TwoRanks) -> None:
    assert two_ranks.run_bare(_inner_block) == [[True, True, False, False]] * 2
    assert len(two_ranks.recorded().calls) == 3


def _from_many_threads(rank: int, directory: str) -> tuple[int, int]:
    start = threading.Barrier(8)
    handles = []

    def enable() -> None:
        start.wait()
        handles.append(crossrank.enable(tracing="ALL", directory=directory))

    threads = [threading.Thread(target=enable) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.all_reduce(torch.ones(1))
    sessions = len({id(handle._session) for handle in handles})
    crossrank.disable()
    return sessions, _registrations().count("BackendSelect")


def test_concurrent_enable_calls_make_one_recording(two_ranks: TwoRanks) -> None:
    (sessions, left), _ = two_ranks.run_bare(_from_many_threads)
    assert (sessions, left) == (1, 1)  # a kernel stays in the dispatcher
    assert len(two_ranks.recorded().calls) == 1
    assert not (two_ranks.recording / "earlier-1").exists()


def test_a_failed_import_of_torch_prints_one_line(tmp_path: Path) -> None:
    source = """
        import sys
        sys.modules["torch.distributed"] = None  # importing it raises ImportError
        import crossrank
        with crossrank.enable() as tracing, crossrank.window():
            crossrank.step()
        crossrank.disable()
        print("trained", tracing.active, crossrank.enabled())
        """
    result = jobs.run([sys.executable, jobs.write_script(tmp_path, source)], tmp_path)
    assert (result.returncode, result.stdout) == (0, "trained False False\n")
    (line,) = result.stderr.splitlines()
    assert line.startswith("crossrank: tracing is off: ModuleNotFoundError: import of torch.distributed halted")


def _coalesce_on_threads(rank: int) -> list[int | None]:
    current = api._current
    assert current is not None
    recorder = current.recorder

    def batches() -> None:
        for _ in range(3000):
            recorder.start_coalescing()
            recorder.end_coalescing()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=batches) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    recorder.start_coalescing()
    dist.all_reduce(torch.ones(1))
    first = recorder.end_coalescing()
    dist.all_reduce(torch.ones(1))
    crossrank.disable()
    found = [record.batch for record in Recorded(Path(current.facts.config.directory), rank).calls]
    assert found[0] == first
    return found


def test_batches_are_recorded_after_threads_coalesce_concurrently(two_ranks: TwoRanks) -> None:
    assert two_ranks.run(_coalesce_on_threads) == [[0, None]] * 2


class _LateDevice:
    """What is known of the GPU of a rank whose first call is made on the CPU, before `set_device`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
        from crossrank.instrument.identity import gpu

        self.asked: list[int] = []
        monkeypatch.setattr(gpu, "bound_device", lambda: None)
        monkeypatch.setattr(gpu, "may_use_cuda", lambda: True)
        monkeypatch.setattr(gpu, "cuda_is_in_use", lambda: True)
        monkeypatch.setattr(gpu, "GpuReader", self._read)
        plain = gpu.RankGpu.settle
        monkeypatch.setattr(
            gpu.RankGpu, "settle", lambda found, device: plain(found, None if device is None else f"cuda:{rank}")
        )
        self._gpu = gpu

    def _read(self, device: int) -> object:
        self.asked.append(device)

        class Reader:
            gpu = self._gpu.Gpu(index=device, uuid=f"GPU-{device}", driver="580.1")

            def counters(self) -> None:
                return None

        return Reader()


def _barrier_then_gpu(rank: int, directory: str) -> list[int]:
    patch = pytest.MonkeyPatch()
    device = _LateDevice(patch, rank)
    try:
        with crossrank.enable(tracing="ALL", directory=directory):
            dist.barrier()
            early = list(device.asked)
            dist.all_reduce(torch.ones(1))
            dist.all_reduce(torch.ones(2))
    finally:
        patch.undo()
    return early + device.asked


def test_the_first_tensor_gives_the_gpu_if_no_device_was_bound(two_ranks: TwoRanks) -> None:
    assert two_ranks.run_bare(_barrier_then_gpu) == [[0], [1]]
    for rank in (0, 1):
        comms = two_ranks.recorded(rank)
        assert len(comms.calls) == 3
        assert comms.header.gpu is not None
        assert (comms.header.gpu["uuid"], comms.header.versions["driver"]) == (f"GPU-{rank}", "580.1")


def _again(rank: int, directory: str) -> None:
    for size in (1, 2):
        with crossrank.enable(tracing="ALL", directory=directory):
            dist.all_reduce(torch.ones(size))
        dist.all_reduce(torch.ones(100))


def test_enabling_again_keeps_the_earlier_recording(two_ranks: TwoRanks) -> None:
    two_ranks.run_bare(_again)
    assert [record.bytes for record in two_ranks.recorded(1, "recording/earlier-1").calls] == [4]
    assert [record.bytes for record in two_ranks.recorded(1).calls] == [8]


def _in_a_used_folder(rank: int, directory: str) -> list[str]:
    files = Path(directory)
    files.mkdir(exist_ok=True)
    if rank == 0:
        (files / "rank-2.comms.jsonl.zst").write_bytes(b"of a job with three ranks")
    dist.barrier()
    with crossrank.enable(tracing="ALL", directory=directory):
        dist.barrier()
    dist.barrier()
    return sorted(os.listdir(files))


def test_files_of_a_larger_job_are_moved_too(two_ranks: TwoRanks) -> None:
    names, _ = two_ranks.run_bare(_in_a_used_folder)
    assert names == ["earlier-1"] + [f"rank-{rank}.{kind}" for rank in (0, 1) for kind in KINDS]
    assert os.listdir(two_ranks.recording / "earlier-1") == ["rank-2.comms.jsonl.zst"]


def _look_at_every_turn() -> None:
    """Have the writer's look for new groups come right before the files end and right after the new world is known."""
    session = api._current
    assert session is not None
    end_files, begin_topology = session._end_files, session._begin_topology

    def end(*arguments: Any, **named: Any) -> None:
        session._on_look()
        end_files(*arguments, **named)

    def begin(rank: int, world_size: int) -> Topology:
        topology = begin_topology(rank, world_size)
        session._on_look()
        return topology

    session._end_files, session._begin_topology = end, begin  # type: ignore[method-assign]


def _made_again(rank: int, directory: str, pause: float, look: bool) -> None:
    with crossrank.enable(tracing="ALL", directory=directory):
        if look:
            _look_at_every_turn()
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{directory}-same", rank=rank, world_size=2)
        dist.all_reduce(torch.ones(2))
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{directory}-swapped", rank=1 - rank, world_size=2)
        time.sleep(pause)
        dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize(
    ("pause", "look"),
    [(0.0, False), (0.8, False), (0.0, True)],
    ids=["at once", "after the writer has looked", "while the writer looks"],
)
def test_a_recreated_group_continues_or_starts_again(pause: float, look: bool, two_ranks: TwoRanks) -> None:
    two_ranks.run_bare(_made_again, pause, look)
    # Each process wrote as one rank first and as the other one after the swap; nothing was overwritten.
    for rank in (0, 1):
        before, after = two_ranks.recorded(rank, "recording/earlier-1"), two_ranks.recorded(rank)
        assert [(record.bytes, record.seq) for record in before.calls] == [(4, 1), (8, 1)]
        assert [group.ranks for group in before.groups] == [[0, 1], [0, 1]]
        assert [record.bytes for record in after.calls] == [12]
        assert after.header.rank == rank
        assert [group.ranks for group in after.groups] == [[0, 1]]


def _many_threads(rank: int) -> None:
    groups = [dist.new_group([rank], use_local_synchronization=True) for _ in range(4)]

    def work(group: dist.ProcessGroup) -> None:
        for _ in range(200):
            dist.all_reduce(torch.ones(1), group=group)

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_share_one_call_counter(two_ranks: TwoRanks) -> None:
    two_ranks.run(_many_threads)
    records = two_ranks.recorded().calls
    assert sorted(record.id for record in records) == list(range(800))
    for pg in {record.pg for record in records}:
        assert [record.seq for record in records if record.pg == pg] == list(range(1, 201))


def _one_rank_is_off(rank: int, directory: str) -> float:
    started = time.monotonic()
    with crossrank.enable(tracing="ALL" if rank == 0 else "NONE", directory=directory):
        dist.all_reduce(torch.ones(1))
    return time.monotonic() - started


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_recorder_has_threads_although_another_library_replaces_them(when: str, scripts: Scripts) -> None:
    """With gevent a thread runs only while the others wait in Python's functions. Here such a function ends the
    process."""
    scripts.python(
        f"""
        import _thread, traceback

        def of_another_library(original):
            def replacement(*arguments, **keywords):
                if sys._getframe(1).f_globals["__name__"].partition(".")[0] in ("crossrank", "threading"):
                    traceback.print_stack()
                    os._exit(7)
                return original(*arguments, **keywords)
            return replacement

        def replace():
            for module, names in {{
                _thread: ("start_new_thread", "start_joinable_thread"),
                threading: ("_start_new_thread", "_start_joinable_thread", "Lock", "RLock", "Event", "Condition"),
                time: ("sleep",),
            }}.items():
                for name in names:
                    if hasattr(module, name):
                        setattr(module, name, of_another_library(getattr(module, name)))

        {"replace()" if when == "before" else ""}
        crossrank.enable()
        {"replace()" if when == "after" else ""}
        with crossrank.window():
            for _ in range(3):
                dist.all_reduce(torch.ones(4))
        crossrank.disable()
        """
    )
    comms = scripts.recorded().without_error()
    assert (comms.ids, comms.end["reason"]) == ([0, 1, 2], "disable")
    assert set(execution_trace_ids(scripts.load("et"))) == {0, 1, 2}


def test_a_rank_without_recording_blocks_no_rank(two_ranks: TwoRanks) -> None:
    assert max(two_ranks.run_bare(_one_rank_is_off)) < 5
    (record,) = two_ranks.recorded().calls
    assert record.locality == "unknown"
    assert not (two_ranks.recording / "rank-1.comms.jsonl.zst").exists()


def _burst(rank: int) -> None:
    current = api._current
    assert current is not None
    assert current.writer is not None
    with current.writer._lock:  # a writer that cannot keep up
        for _ in range(500):
            dist.all_reduce(torch.ones(1))


def test_a_full_ring_counts_its_drops(two_ranks: TwoRanks) -> None:
    two_ranks.run(_burst, ring=10)
    comms = two_ranks.recorded()
    assert comms.end["calls"] == 500
    assert comms.end["dropped"] == 500 - len(comms.calls)
    assert comms.end["dropped"] >= 490
    assert comms.end["records"] == len(comms.calls)


@pytest.mark.parametrize("folder", ["/proc/not-there", "/dev/null/x"])
def test_an_unwritable_folder_warns_once_and_training_continues(folder: str, scripts: Scripts) -> None:
    result = scripts(TRACING_DIR=folder).python("""
        crossrank.enable(window="0:2")
        for _ in range(3):
            dist.all_reduce(torch.ones(4))
            crossrank.step()
        print("trained")
        """)
    assert result.stdout == "trained\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"crossrank: the recording continues without files: cannot write to {folder}")
    assert "TRACING_DIR" in line


def test_a_full_disk_counts_unwritten_records(scripts: Scripts) -> None:
    result = scripts.python("""
        import random, resource
        crossrank.enable(ring=1000000, flight=False)
        dist.all_reduce(torch.ones(4))
        time.sleep(0.8)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        for _ in range(4):
            for _ in range(2000):
                dist.all_reduce(torch.ones(random.randrange(1000)))
            time.sleep(0.6)
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        group = dist.new_group([0])
        dist.barrier(group=group)
        print("trained")
        """)
    assert result.stdout == "trained\n"
    assert result.stderr.count("cannot write") == 1
    comms = scripts.recorded()
    assert comms.end["unwritten"] > 0
    assert comms.end["records"] == len(comms.calls)
    assert comms.end["records"] + comms.end["unwritten"] == comms.end["calls"] == 8002
    assert comms.calls[-1].op == "barrier"
    assert comms.calls[-1].pg in {group.pg for group in comms.groups}


def _broken_recorder(rank: int) -> str:
    current = api._current
    assert current is not None
    tensor = torch.ones(1)

    vars(current.recorder).update(_find_site=None, _sites=None)  # not callable: raises in the recorder itself
    for _ in range(3):
        dist.all_reduce(tensor)
    assert current.writer is not None
    return f"{tensor.item()} {current.recorder.counts().errors}"


def test_a_recorder_failure_is_counted_and_the_call_succeeds(two_ranks: TwoRanks) -> None:
    assert two_ranks.run(_broken_recorder) == ["8.0 3", "8.0 3"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TRACING": "SOME"}, "TRACING='SOME' is not one of CROSSNODE, ALL, NONE"),
        (
            {"TRACING_WINDOW": "ten"},
            "TRACING_WINDOW='ten' is not START:STOP or START:STOP:EVERY in steps, for example 10:12 or 10:12:1000",
        ),
        (
            {"TRACING_DIR": "s3://bucket/run"},
            "TRACING_DIR='s3://bucket/run' is a URL; give a folder, and copy it after the job",
        ),
        (
            {"TRACING_RING": "999999999999999999"},
            "TRACING_RING='999999999999999999' is not a whole number from 1 to 1,048,576",
        ),
    ],
)
def test_a_bad_value_warns_once_and_training_continues(
    variables: dict[str, str], message: str, scripts: Scripts, tmp_path: Path
) -> None:
    result = scripts(**variables).python("crossrank.enable(); dist.barrier(); print('trained')")
    assert (result.stdout, result.stderr) == ("trained\n", f"crossrank: tracing is off: {message}\n")
    assert not (tmp_path / "crossrank-recording").exists()


@pytest.mark.parametrize(
    ("owner", "name", "instead", "said"),
    [
        (torch.library.Library, "_destroy", None, "has no torch.library.Library._destroy, which recording needs"),
        (dist, "is_available", lambda: False, "built without torch.distributed"),
    ],
    ids=["a part", "distributed"],
)
def test_an_incompatible_torch_warns_once(
    owner: Any, name: str, instead: Any, said: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    before = _registrations()
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "crossrank"):
        patch.setattr(owner, name, instead) if instead is not None else patch.delattr(owner, name)
        assert not crossrank.enable(tracing="ALL", directory=tmp_path / "x").active
    (record,) = caplog.records
    assert said in record.getMessage()
    assert _registrations() == before


def test_a_lost_store_is_ignored(scripts: Scripts) -> None:
    result = scripts.python("""
        def fail(*_):
            raise RuntimeError("the store is gone")
        dist.PrefixStore.set = fail
        crossrank.enable()
        dist.all_reduce(torch.ones(4))
        print("trained")
        """)
    assert (result.stdout, result.stderr) == ("trained\n", "")


class _PythonGroup(dist.ProcessGroup):
    """A process group written in Python, as wrappers of people's own are."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]


def _python_subclass(rank: int) -> None:
    group = _PythonGroup(rank, 2)
    group_name: Any = getattr(distributed_c10d, "GroupName", str)  # a plain text before torch 2.11
    distributed_c10d._world.pg_names[group] = group_name("mine")
    dist.barrier()


def test_groups_that_bypass_the_dispatcher_are_reported(two_ranks: TwoRanks) -> None:
    two_ranks.run(_python_subclass)
    comms = two_ranks.recorded()
    assert comms.end["blind_spots"] == [
        "process group 'mine' is a _PythonGroup, a Python class that bypasses the dispatcher"
    ]


def test_crossnode_writes_intra_node_calls_to_the_file(scripts: Scripts) -> None:
    result = scripts(TRACING="CROSSNODE").python("crossrank.enable(print_calls=True); dist.barrier()")
    assert (result.stdout, result.stderr) == ("", "")
    comms = scripts.recorded()
    assert [(record.op, record.locality) for record in comms.calls] == [("barrier", "intra_node")]
    assert (comms.header.config["emit"], comms.header.leaves_out_calls) == ("CROSSNODE", False)


def test_a_window_that_never_opened_is_reported(scripts: Scripts) -> None:
    result = scripts.python("crossrank.enable(window=(5, 6)); dist.barrier()")
    assert result.stderr == "crossrank: the window 5:6 never opened: the recording ended in step 0\n"


def _store_after_destroy(rank: int, directory: str) -> bool:
    import weakref

    store = dist.FileStore(f"{directory}-mine", 2)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    reference = weakref.ref(store)
    del store
    with crossrank.enable(tracing="ALL" if rank == 0 else "NONE", directory=directory):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.3)
        dist.destroy_process_group()
        time.sleep(0.3)
        gone = reference() is None
    dist.init_process_group("gloo", init_method=f"file://{directory}-again", rank=rank, world_size=2)
    return gone


def test_waiting_for_a_silent_rank_does_not_keep_the_store_alive(two_ranks: TwoRanks) -> None:
    assert two_ranks.run_bare(_store_after_destroy) == [True, True]
