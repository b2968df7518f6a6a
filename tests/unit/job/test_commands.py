"""`crossrank bandwidth`, `timeline` and `report` as a user runs them: what is printed, exit codes, bad input."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import fsspec
import pytest

from tests.unit.command import Command
from tests.unit.graph.linking.test_link_command import rank_trace
from tests.unit.traces.nsight.exports import write_exports

COMMANDS = ("bandwidth", "timeline", "report")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "reports"
    folder.mkdir()
    write_exports(folder)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, last=("--jobs", "1"))


def test_bandwidth_prints_the_measurements_and_their_coverage(folder: Path, run: Command) -> None:
    assert (
        run("bandwidth", folder, "--line-rate", "640Gbps")[1]
        == """\
total      0.200 ms in 2 timed collectives and transfers (4 of 4 calls have a measured time)
time       0.0 % computation, 20.0 % exposed communication, 2.2 % waiting for other profilers to start, 0.0 % copies, 77.8 % idle
           of 2 traced steps or windows, all 2 ranks together, measured on the device

Collectives and transfers, most time first
                                                                      total    time    time    time  waiting  waiting     algbw     busbw    busbw   share of
  operation   group           size    locality    ranks  collectives  bytes  p50 us  p95 us  max us   p50 us   p95 us  p50 GB/s  p50 GB/s  p5 GB/s  line rate
  all_reduce  default_pg [0]  ≤4 MiB  cross_node      2            2   8 MB   100.0   100.0   100.0     25.0     47.5        40        40       40     50.0 %
  waiting leaves out 1 collective at the start of profiler windows: ranks wait there for other profilers

ranks      2 of 2
measured   Nsight Systems: kernels launched inside NVTX ranges of crossrank or NCCL; 2 ranks
clocks     2 clocks, aligned by the end times of collectives; remaining difference 0.0 us (p50), 0.0 us (max)

Measured times with a known operation, by source
          4  launched inside crossrank's marker

Launches matched across ranks (batches are not), by
          4  their order in the group, counted
"""  # noqa: E501
    )


def test_the_json_is_the_same_as_the_file(folder: Path, tmp_path: Path, run: Command) -> None:
    output = tmp_path / "bandwidth.json"
    code, found, _ = run.json("bandwidth", folder, "-o", output, "--by", "source,op")
    assert (code, found) == (0, json.loads(output.read_text()))
    assert found["schema"] == "crossrank-bandwidth 1"
    assert found["by"] == ["source", "op"]
    assert [(row["op"], row["source"], row["pg"]) for row in found["rows"]] == [("all_reduce", None, None)]


def test_a_timeline_is_next_to_its_input_and_lists_its_contents(folder: Path, run: Command) -> None:
    out = run("timeline", folder)[1]
    assert out.startswith(f"timeline   {folder}/timeline.pftrace, ")
    assert "contents   2 ranks, no known steps, 1.2 ms from the first call to the last\n" in out
    assert "           4 calls or batches, 4 with a measured start and end\n" in out
    assert (folder / "timeline.pftrace").stat().st_size > 200
    packed = folder / "t.pftrace.gz"
    _, found, _ = run.json("timeline", folder, "-o", packed)
    assert (found["output"], found["calls"], found["bytes"]) == (str(packed), 4, packed.stat().st_size)
    assert gzip.decompress(packed.read_bytes()) == (folder / "timeline.pftrace").read_bytes()
    made = {"t.pftrace.gz", "timeline.pftrace"}
    assert {path.name for path in folder.iterdir()} == {"rank_0.sqlite", "rank_1.sqlite"} | made


def test_a_missing_rank_is_reported_and_its_times_are_bounds(folder: Path, run: Command) -> None:
    write_exports(folder, ranks=2, world=3)
    code, found, err = run.json("bandwidth", folder)
    assert (code, err) == (1, "crossrank: rank 2 is missing: times of its groups include waiting time\n")
    (row,) = found["rows"]
    assert (row["upper_bounds"], row["collectives"], row["ranks"]) == (2, 2, 3)


@pytest.mark.parametrize("command", COMMANDS)
def test_one_damaged_export_does_not_end_the_others(folder: Path, run: Command, command: str) -> None:
    (folder / "rank_1.sqlite").write_bytes((folder / "rank_1.sqlite").read_bytes()[:5000])
    code, _, err = run(command, folder, *([] if command == "bandwidth" else ["-o", folder / command]))
    assert (code, f"{folder}/rank_1.sqlite: is damaged or not an SQLite file" in err) == (1, True)
    assert "rank 1 is missing" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_the_error_for_an_nsys_report_gives_the_export_command(tmp_path: Path, run: Command, command: str) -> None:
    (tmp_path / "rank_0.nsys-rep").write_bytes(b"\x01\x02\x03" * 99)
    told = (
        f"crossrank: {tmp_path}/rank_0.nsys-rep: is a report, not an export; run: nsys export --type sqlite "
        f"--output {tmp_path}/rank_0.sqlite {tmp_path}/rank_0.nsys-rep\n"
    )
    for path in (tmp_path, tmp_path / "rank_0.nsys-rep"):
        assert run(command, path) == (2, "", told)


@pytest.mark.parametrize("command", COMMANDS)
def test_ranks_of_different_runs_are_refused(folder: Path, run: Command, command: str) -> None:
    write_exports(folder, ranks=1, world=4)
    told = (
        f"crossrank: the ranks are from different runs: {folder}/rank_1.sqlite of 2 ranks, {folder}/rank_0.sqlite of 4 "
        "ranks; give the files of one run\n"
    )
    assert run(command, folder) == (2, "", told)
    write_exports(folder)
    (folder / "copy_1.sqlite").write_bytes((folder / "rank_1.sqlite").read_bytes())
    code, _, err = run(command, folder)
    assert (code, "copy_1.sqlite and " in err) == (2, True)
    assert err.endswith("are both of rank 1; give one of them, or the folder of one run\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bandwidth", "{empty}"], "the folder is empty"),
        (["timeline", "{empty}"], "the folder is empty"),
        (["report", "{empty}"], "the folder is empty"),
        (["bandwidth", "{nowhere}"], "no such file or folder"),
        (["bandwidth", "{folder}", "--by", "op,colour"], "choose from op, group, size, locality, source"),
        (["bandwidth", "{folder}", "--line-rate", "fast"], "is not [LOCALITY=]RATE"),
        (["bandwidth", "{folder}", "--source", "flight"], "communication measurements for --source flight"),
        (["timeline", "{folder}", "--ranks", "7"], "has none of the ranks given by --ranks"),
        (["timeline", "{folder}", "-o", "{nowhere}/t.pftrace"], "cannot be written"),
        (["report", "{folder}", "-o", "{nowhere}/r.html"], "cannot be written"),
        (["report", "{folder}", "--replay", "{empty}"], "replay.json"),
    ],
)
def test_unusable_input_prints_one_line_and_exits_2(
    folder: Path, tmp_path: Path, run: Command, words: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"folder": folder, "empty": tmp_path / "empty", "nowhere": tmp_path / "nowhere"}
    code, _, err = run(*[word.format(**places) for word in words])
    assert (code, message in err, err.count("\n")) == (2, True, 1)
    assert not (tmp_path / "nowhere").exists()


def test_linked_and_unlinked_kineto_traces_give_equal_results(tmp_path: Path, run: Command) -> None:
    for rank in (0, 1):
        rank_trace(rank).write(tmp_path, rank)
    unlinked = run.json("bandwidth", tmp_path)[1]
    assert run("link", tmp_path)[0] == 0
    code, linked, _ = run.json("bandwidth", tmp_path)
    assert code == 0
    assert linked["rows"] == unlinked["rows"]
    (row,) = linked["rows"]
    assert (row["op"], row["collectives"], row["time_us"]["p50"]) == ("all_reduce", 2, 20.0)


@pytest.mark.parametrize("command", COMMANDS)
def test_inputs_and_outputs_may_be_urls(folder: Path, tmp_path: Path, run: Command, command: str) -> None:
    memory: fsspec.AbstractFileSystem = fsspec.filesystem("memory")
    for path in folder.iterdir():
        memory.pipe_file(f"/{command}/{path.name}", path.read_bytes())
    assert run(command, folder, "-o", tmp_path / "local")[0] == 0
    assert run(command, f"memory://{command}", "-o", f"memory://{command}/out")[0] == 0
    here, there = (tmp_path / "local").read_bytes(), memory.cat_file(f"/{command}/out")
    if command == "timeline":
        assert there == here
    else:  # they name their input
        assert there.replace(f"memory://{command}".encode(), b"INPUT") == here.replace(str(folder).encode(), b"INPUT")
    code, _, err = run(command, f"memory://{command}/rank_0.sqlite", "-o", tmp_path / "one")
    assert (code, "rank 1 is missing" in err) == (1, True)
