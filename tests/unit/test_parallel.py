"""Work over ranks: the same results whoever does it, and no rank lost with a worker."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest

from crossrank.errors import CrossrankError
from crossrank.tools import parallel
from crossrank.tools.cli import main
from crossrank.tools.parallel import Fleet, map_ranks
from tests.unit.graph.linking.test_link_command import rank_trace
from tests.unit.parallel_work import Work, large, refuse, square, squared_text


def lost(work: Work, error: CrossrankError) -> str:
    return f"{work.number}: {error}"


def test_every_executor_keeps_the_result_order(tmp_path: Path) -> None:
    work = [Work(tmp_path, number) for number in range(7)]
    with ThreadPoolExecutor(3) as threads:
        for fleet in (Fleet(), Fleet(jobs=2), Fleet(executor=threads)):
            assert map_ranks(square, work, fleet) == [0, 1, 4, 9, 16, 25, 36]


def test_a_failed_rank_is_retried_once(tmp_path: Path) -> None:
    once = [Work(tmp_path, number, failures=number == 1) for number in range(3)]
    assert map_ranks(square, once, Fleet()) == [0, 1, 4]
    always = [Work(tmp_path, 10 + number, failures=9 * (number == 1)) for number in range(3)]
    assert map_ranks(square, always, Fleet(), failed=lost) == [100, "11: item 11 was not there", 144]
    with pytest.raises(CrossrankError, match="item 20 was not there"):
        map_ranks(square, [Work(tmp_path, 20, failures=9)], Fleet())


def test_a_killed_process_loses_only_the_rank_that_kills_it(tmp_path: Path) -> None:
    once = [Work(tmp_path, number, deaths=number == 1) for number in range(4)]
    assert map_ranks(square, once, Fleet(jobs=2)) == [0, 1, 4, 9]
    always = [Work(tmp_path, 10 + number, deaths=9 * (number == 1)) for number in range(3)]
    killed = "11: its process was killed, most often for lack of memory; try --jobs 1"
    assert map_ranks(square, always, Fleet(jobs=2), failed=lost) == [100, killed, 144]


def test_one_killer_among_many_ranks_loses_only_itself_in_few_tries(tmp_path: Path) -> None:
    work = [Work(tmp_path, number, deaths=99 * (number == 37)) for number in range(64)]
    results = map_ranks(squared_text, work, Fleet(jobs=2), failed=lost)
    assert [number for number in range(64) if results[number] != str(number**2)] == [37]
    assert results[37].startswith("37: its process was killed")
    # Halves are tried until it is alone: not every rank by itself.
    assert sum(len(list(tmp_path.glob(f"{number}-*"))) for number in range(64)) < 64 * 3


def test_a_process_returns_an_error_of_any_class_as_its_text() -> None:
    with pytest.raises(CrossrankError, match=r"^a: is refused$"):
        map_ranks(refuse, ["a", "b"], Fleet(jobs=2))


def test_results_larger_than_a_pipe_are_complete_and_leave_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sizes = [10, 5_000_000, 300_000]
    assert [len(result) for result in map_ranks(large, sizes, Fleet(jobs=2))] == sizes
    assert list(tmp_path.iterdir()) == []


def test_a_dask_cluster_survives_killed_workers(tmp_path: Path) -> None:
    fleet = Fleet(jobs=2, cluster="local")
    once = [Work(tmp_path, 10 + number, deaths=number == 1) for number in range(3)]
    assert map_ranks(square, once, fleet) == [100, 121, 144]
    always = [Work(tmp_path, 20 + number, deaths=99 * (number == 1)) for number in range(2)]
    killed = "21: its process was killed, most often for lack of memory; try --jobs 1"
    assert map_ranks(square, always, fleet, failed=lost) == [400, killed]


def test_a_killed_worker_loses_no_other_rank_of_its_task(tmp_path: Path) -> None:
    work = [Work(tmp_path, number, deaths=99 * (number == 70), failures=9 * (number == 3)) for number in range(130)]
    results = map_ranks(squared_text, work, Fleet(jobs=2, cluster="local"), failed=lost)
    wrong = {number: results[number] for number in range(130) if results[number] != str(number**2)}
    assert wrong == {
        3: "3: item 3 was not there",
        70: "70: its process was killed, most often for lack of memory; try --jobs 1",
    }


def test_an_unreachable_cluster_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_PATIENCE", "2s")
    with pytest.raises(CrossrankError, match=r"--cluster tcp://127.0.0.1:1: no Dask scheduler answers there"):
        map_ranks(square, [Work(Path(), 1)], Fleet(cluster="tcp://127.0.0.1:1"))


ENGINES = {
    "this process": ["--jobs", "1"],
    "processes": ["--jobs", "2"],
    "cluster": ["--jobs", "2", "--cluster", "local"],
    "url": ["--jobs", "2"],
}


def test_every_engine_gives_the_same_linked_traces_and_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = tmp_path / "recording"
    recording.mkdir()
    for rank in range(4):
        rank_trace(rank).write(recording, rank)
    given = {}
    for engine, words in ENGINES.items():
        out = tmp_path / engine.replace(" ", "-")
        command = ["link", str(recording), "-o", f"file://{out}" if engine == "url" else str(out), "--json"]
        assert main([*command, *words]) == 0
        printed = capsys.readouterr().out.replace(f"file://{out}", "OUT").replace(str(out), "OUT")
        given[engine] = printed, {path.name: path.read_bytes() for path in sorted(out.iterdir())}
    assert list(given["this process"][1]) == [f"rank-{rank}.linked.json.zst" for rank in range(4)]
    for engine in ENGINES:
        assert given[engine] == given["this process"], engine


def test_inputs_and_outputs_may_be_memory_urls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fsspec

    memory: fsspec.AbstractFileSystem = fsspec.filesystem("memory")
    local = tmp_path / "local"
    local.mkdir()
    for rank in range(2):
        for path in rank_trace(rank).write(local, rank):
            memory.pipe_file(f"/run/{Path(path).name}", Path(path).read_bytes())
    assert main(["link", str(local), "--jobs", "1"]) == 0
    assert main(["link", "memory://run", "--jobs", "1"]) == 0
    for rank in range(2):
        name = f"rank-{rank}.linked.json.zst"
        assert memory.cat_file(f"/run/{name}") == (local / name).read_bytes()
    assert not [name for name in memory.ls("/run", detail=False) if name.endswith(".part")]


def test_a_negative_number_of_jobs_prints_one_line_and_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank_trace(0).write(tmp_path, 0)
    assert main(["link", str(tmp_path), "--jobs", "-1"]) == 2
    assert capsys.readouterr().err == "crossrank: --jobs -1 is not a number of processes\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_partial_file_and_no_process(tmp_path: Path, number: signal.Signals) -> None:
    for rank in range(40):
        rank_trace(rank, collectives=300).write(tmp_path, rank)
    output = tmp_path / "out"
    command = [sys.executable, "-m", "crossrank.tools.cli", "link", str(tmp_path), "-o", str(output), "--jobs", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (output.exists() and list(output.iterdir())):
        time.sleep(0.02)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    expected = {signal.SIGTERM: (143, "crossrank: terminated\n"), signal.SIGINT: (130, "crossrank: interrupted\n")}
    assert (process.returncode, error) == expected[number]
    assert {path.suffix for path in output.iterdir()} == {".zst"}
    while time.monotonic() < deadline and running_in(process.pid):
        time.sleep(0.05)
    assert running_in(process.pid) == []


def running_in(session: int) -> list[str]:
    """Command lines of the processes of a session that run; those that nobody has reaped have none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[3]) == session:
                found.append(path.with_name("cmdline").read_text())
        except OSError:
            continue
    return [line for line in found if line]


def test_an_executor_stays_open() -> None:
    with ThreadPoolExecutor(1) as threads:
        executor: Executor = threads
        assert map_ranks(len, ["a", "bb"], Fleet(executor=executor)) == [1, 2]
        assert threads.submit(len, "ccc").result() == 3
