"""Our flight-recorder dumps: what stands in them, and which one stays."""

from __future__ import annotations

import queue
import re
import threading
from pathlib import Path
from typing import IO, Any

import pytest

from crossrank.instrument.write import flight_dump
from crossrank.tools.traces.flight.dump import FlightDump, Moment, read_flight_dump
from tests.integration import jobs
from tests.integration.commands import Commands
from tests.integration.jobs import Scripts
from tests.integration.names import needs_gloo_recorder

pytestmark = pytest.mark.touches("tools/analysis/diagnosis")

SILENT = """
import threading, time
from crossrank.instrument.log import log
said, handle = threading.Event(), log.handle
log.handle = lambda record: (handle(record), said.set())
crossrank.enable(hang_seconds=0.4)
dist.all_reduce(torch.ones(4))
said.clear()

def wait_for_somebody():
    while not said.is_set():
        time.sleep(0.05)

wait_for_somebody()
"""


def dump_of(folder: Path) -> tuple[FlightDump, Moment]:
    dump = read_flight_dump(str(folder / jobs.RECORDING / "rank-0.flight.json.zst"))
    assert dump.moment is not None
    return dump, dump.moment


def test_a_hang_dump_stays_if_the_process_ends_during_the_hang(scripts: Scripts, tmp_path: Path) -> None:
    result = scripts(1).python(SILENT + 'raise RuntimeError("timed out")\n')

    folder = tmp_path / jobs.RECORDING
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("crossrank: "))
    said = re.fullmatch(
        r"crossrank: no communication on rank 0 for (\d+\.?\d*) s, and no rank waits for another; "
        rf"{folder} has the last calls of every rank \(verdict: ok\)",
        line,
    )
    assert said is not None
    assert 0.4 <= float(said[1]) < 5
    dump, moment = dump_of(tmp_path)
    assert (moment.reason, moment.error, moment.rank, moment.world_size) == ("hang", None, 0, 1)
    assert dump.problems == []
    (main_thread,) = (stack for stack in moment.stacks if stack.thread == "MainThread")
    of_script = [frame.name for frame in main_thread.frames if frame.filename.endswith("train.py")]
    assert of_script == ["wait_for_somebody", "<module>"]


@needs_gloo_recorder
def test_the_end_is_dumped_if_communication_continues_after_a_hang(scripts: Scripts, tmp_path: Path) -> None:
    scripts(1).python(SILENT + 'dist.all_reduce(torch.ones(4))\nraise RuntimeError("later")\n')

    dump, moment = dump_of(tmp_path)
    assert (moment.reason, moment.error) == ("exit", "RuntimeError: later")
    assert [entry.profiling_name for entry in dump.entries] == ["gloo:all_reduce", "gloo:all_reduce"]
    assert [(record.op, record.source) for record in moment.calls] == [
        ("all_reduce", f"train.py:{line}") for line in (12, 20)
    ]


@needs_gloo_recorder
@pytest.mark.parametrize("emit", ["ALL", "CROSSNODE"])
def test_a_dump_has_the_last_calls_in_every_tracing_mode(emit: str, scripts: Scripts, tmp_path: Path) -> None:
    scripts(TRACING=emit).python("""
        crossrank.enable()
        for _ in range(600):
            dist.all_reduce(torch.ones(4))
        """)

    dump, moment = dump_of(tmp_path)
    assert [record.seq for record in moment.calls] == list(range(89, 601))
    assert [(group.pg, group.desc, group.ranks) for group in moment.groups] == [("0", "default_pg", [0])]
    assert abs(moment.time_ns - moment.clock["wall"]) == 0
    assert dump.entries[-1].collective_seq_id == 600


def test_the_watch_for_hangs_can_be_switched_off(scripts: Scripts) -> None:
    result = scripts.python("""
        crossrank.enable(hang_seconds=0)
        dist.all_reduce(torch.ones(4))
        assert not [thread.name for thread in threading.enumerate() if "hang" in thread.name]
        """)

    assert result.stderr == ""
    bad = scripts(TRACING_HANG_SECONDS="soon").python("crossrank.enable()")
    assert bad.stderr == (
        "crossrank: tracing is off: TRACING_HANG_SECONDS='soon' is not a number of seconds from 0.1 to 10,000,000; "
        "0 turns the hang watch off\n"
    )


def _entry(record_id: int, pg_id: int, group: str, seq: int, created: int) -> dict[str, Any]:
    return {
        "record_id": record_id,
        "pg_id": pg_id,
        "process_group": (group, "undefined"),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": "nccl:all_reduce" if group == "train" else "gloo:all_reduce",
        "time_created_ns": created,
    }


def test_nccl_and_gloo_flight_recorders_are_merged() -> None:
    completed = {"train": {"last_completed_collective": 9}, "checkpoint": {"last_completed_collective": 1}}
    train = {
        "version": "2.10",
        "entries": [_entry(7, 0, "train", 8, 100), _entry(8, 0, "train", 9, 300)],
        "pg_config": {"train": {"ranks": "[0, 1]"}},
        "pg_status": {"0": completed["train"]},
    }
    checkpoint = {
        "version": "2.10",
        "entries": [_entry(0, 0, "checkpoint", 1, 200), _entry(1, 0, "checkpoint", 2, 400)],
        "pg_config": {"": {"ranks": "[]"}},
        "pg_status": {"0": completed["checkpoint"]},
    }
    merged = flight_dump._merged([train, checkpoint])
    # The first number says that seven entries fell out of a ring.
    assert [
        (entry["record_id"], entry["process_group"][0], entry["collective_seq_id"]) for entry in merged["entries"]
    ] == [(7, "train", 8), (8, "checkpoint", 1), (9, "train", 9), (10, "checkpoint", 2)]
    status = {entry["process_group"][0]: merged["pg_status"][str(entry["pg_id"])] for entry in merged["entries"]}
    assert status == completed
    assert set(merged["pg_config"]) == {"train", ""}
    assert flight_dump._merged([checkpoint, train])["entries"] == [
        entry | {"pg_id": 1 - entry["pg_id"]} for entry in merged["entries"]
    ]


def test_a_flight_recorder_with_two_names_counts_once() -> None:
    content = {"entries": [_entry(0, 0, "train", 1, 100)], "pg_status": {"0": {"last_completed_collective": 1}}}
    assert flight_dump._merged([content, content]) == content
    assert flight_dump._merged([{"entries": [], "pg_status": {}}, content]) == content


@needs_gloo_recorder
def test_a_gloo_hang_in_an_nccl_job_is_in_the_dump(scripts: Scripts, tmp_path: Path) -> None:
    result = scripts.python("""
        import pickle
        from crossrank.instrument import torch_dumps
        train = {"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": [{
            "record_id": 0, "pg_id": 0, "process_group": ("9", "undefined"), "collective_seq_id": 1, "p2p_seq_id": 0,
            "op_id": 1, "profiling_name": "nccl:all_reduce", "time_created_ns": time.time_ns(), "state": "completed",
            "input_sizes": [[4]], "input_dtypes": ["Float"], "output_sizes": [[4]], "output_dtypes": ["Float"],
            "time_discovered_started_ns": None, "time_discovered_completed_ns": None, "retired": True,
            "timeout_ms": 600000, "is_p2p": False, "frames": [],
        }]}
        torch._C._distributed_c10d._dump_nccl_trace = lambda *_: pickle.dumps(train)
        torch_dumps.cuda_is_in_use = lambda: True
        crossrank.enable()
        dist.all_reduce(torch.ones(4))
        """)

    assert result.stderr == ""
    dump, _ = dump_of(tmp_path)
    assert [entry.profiling_name for entry in dump.entries] == ["nccl:all_reduce", "gloo:all_reduce"]


def put_lines(stream: IO[str], into: queue.Queue[str]) -> None:
    """Put the recorder's lines of a stream into a queue."""
    for line in stream:
        if line.startswith("crossrank: "):
            into.put(line)


def test_one_rank_reports_each_silence_once(scripts: Scripts, tmp_path: Path) -> None:
    ranks = scripts(TRACING_HANG_SECONDS="0.5").start_two("""
        crossrank.enable()
        for go_on in ("go-1", "go-2"):
            dist.barrier()
            while not os.path.exists(go_on):
                time.sleep(0.02)
        """)
    said: queue.Queue[str] = queue.Queue()
    # On a busy machine rank 1 may be the first to report.
    readers = [threading.Thread(target=put_lines, args=(process.stderr, said)) for process in ranks]
    for reader in readers:
        reader.start()
    for go_on in ("go-1", "go-2"):
        assert said.get(timeout=60).startswith("crossrank: no communication on rank ")
        assert all((tmp_path / jobs.RECORDING / f"rank-{rank}.flight.json.zst").exists() for rank in (0, 1))
        (tmp_path / go_on).touch()
    assert [process.wait(timeout=30) for process in ranks] == [0, 0]
    for reader in readers:
        reader.join()
    assert said.empty()


@needs_gloo_recorder
def test_a_hang_is_dumped_before_the_shortest_group_timeout(scripts: Scripts, tmp_path: Path) -> None:
    ranks = scripts.start_two("""
        crossrank.enable()
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=16))
        dist.barrier(group=group)
        if rank == 0:
            dist.all_reduce(torch.ones(4), group=group)
        else:
            time.sleep(17)
        """)
    errors = "".join(process.communicate(timeout=40)[1] for process in ranks)
    assert ranks[0].returncode == 1
    late = (
        r"crossrank: rank 0 waits in all_reduce #2 for rank 1, which is blocked in nanosleep\(\) in <module> \(\S+\): "
    )
    assert re.search(rf"{late}no communication on rank \d+ for (8|9|1[0-5])(\.\d+)? s\. ", errors)
    assert "Timed out" in errors
    dump, moment = dump_of(tmp_path)
    assert moment.reason == "hang"
    assert dump.entries[-1].retired is False


def test_a_rank_that_outlives_its_group_shows_its_position_and_is_healthy(
    scripts: Scripts, tmp_path: Path, command: Commands
) -> None:
    result = scripts.python("""
        import shutil
        crossrank.enable(hang_seconds=0.4)
        for _ in range(3):
            dist.all_reduce(torch.ones(4))
        dist.destroy_process_group()

        def works_alone():
            while not os.path.exists("crossrank-recording/rank-0.flight.json.zst"):
                time.sleep(0.05)

        works_alone()
        shutil.copytree("crossrank-recording", "while it works/crossrank-recording")
        """)
    assert result.stderr == ""
    _, moment = dump_of(tmp_path / "while it works")
    (main_thread,) = (stack for stack in moment.stacks if stack.thread == "MainThread")
    assert "works_alone" in [frame.name for frame in main_thread.frames]
    for folder in (tmp_path, tmp_path / "while it works"):
        command("diagnose", folder / jobs.RECORDING)
