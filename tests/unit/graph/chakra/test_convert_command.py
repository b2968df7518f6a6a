"""`crossrank convert` as a user runs it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from crossrank.tools.cli import main
from crossrank.tools.graph.chakra.framing import read_trace
from tests.unit.command import Command
from tests.unit.graph.linking.small_traces import SmallTrace
from tests.unit.graph.linking.test_link_command import rank_trace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank in (0, 1):
        rank_trace(rank).write(tmp_path, rank)
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "convert", "--jobs", "1")


def test_a_recording_becomes_a_trace_per_rank_and_a_group_file(folder: Path, run: Command) -> None:
    out = run(folder, "-o", folder / "out")[1]
    assert sorted(os.listdir(folder / "out")) == ["chakra.0.et", "chakra.1.et", "comm_groups.json"]
    assert json.loads((folder / "out" / "comm_groups.json").read_text()) == {}
    assert (
        "                       on the  pauses of              commu-   depen-     redundant\n"
        "  rank  window  nodes    host   the host  on GPUs  nications  dencies  ones dropped     size\n"
        "  0     1          25      12         11        0          2       25             1  0.00 MB\n"
    ) in out
    assert "         44  program_order" in out
    assert main(["check", str(folder / "out" / "chakra.0.et"), str(folder / "out" / "chakra.1.et")]) == 0


def test_linked_traces_give_the_same_files(folder: Path, run: Command) -> None:
    assert run(folder, "-o", folder / "direct", "--keep-linked")[0] == 0
    linked = sorted((folder / "direct").glob("*.linked.json.zst"))
    assert len(linked) == 2
    assert run(*linked, "-o", folder / "again")[0] == 0
    for name in ("chakra.0.et", "chakra.1.et", "comm_groups.json"):
        assert (folder / "direct" / name).read_bytes() == (folder / "again" / name).read_bytes()


def test_ranks_with_different_collectives_are_named(folder: Path, run: Command) -> None:
    rank_trace(1, collectives=4).write(folder, 1)
    code, _, err = run(folder, "-o", folder / "out")
    told = "crossrank: group 0: collective 3 is all_reduce of 96 B on rank 1 and nothing on rank 0\n"
    assert (code, err) == (1, told)


@pytest.mark.parametrize("command", ["convert", "simulate"])
def test_ranks_of_two_runs_are_named(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later = rank_trace(1)
    later.kineto_head["baseTimeNanoseconds"] += 100 * 10**9
    later.write(folder, 1)
    code, _, err = Command(capsys, command, "--jobs", "1")(folder)
    told = "the ranks are from different runs: rank 0 ends 100 s before rank 1 starts; give the files of one run"
    assert (code, err) == (1, f"crossrank: {told}\n")


def test_a_failed_rank_causes_no_disagreement(folder: Path, run: Command) -> None:
    (folder / "rank-1.et.json").write_text("{}")
    code, found, _ = run.json(folder, "-o", folder / "out")
    assert (code, found["disagreements"], [rank["size"] > 0 for rank in found["ranks"]]) == (1, [], [True, False])


def test_two_files_without_a_rank_belong_to_rank_0(tmp_path: Path, run: Command) -> None:
    trace = SmallTrace()
    del trace.kineto_head["distributedInfo"]
    trace.op("aten::mm", 0, 5)
    et, kineto = (Path(path) for path in trace.write(tmp_path))
    assert run(et.rename(tmp_path / "a.json"), kineto.rename(tmp_path / "b.json"), "-o", tmp_path / "out")[0] == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["chakra.0.et", "comm_groups.json"]


def test_a_json_that_is_not_a_linked_trace_is_refused(folder: Path, run: Command) -> None:
    path = folder / "rank-0.linked.json"
    path.write_text('{"nodes": [{"id": 1, "name": "a", "ctrl_deps": 0}]}')
    code, _, err = run(path, "-o", folder / "out")
    told = f"crossrank: rank 0: {path}: is not a linked trace of crossrank; create one with `crossrank link`\n"
    assert (code, err) == (2, told)
    assert os.listdir(folder / "out") == []


def test_two_inputs_of_one_rank_are_refused(folder: Path, run: Command) -> None:
    assert run(folder, "-o", folder / "a", "--keep-linked")[0] == 0
    linked = folder / "a" / "rank-0.linked.json.zst"
    double = folder / "b" / linked.name
    double.parent.mkdir()
    double.write_bytes(linked.read_bytes())
    told = f"crossrank: {linked} and {double} are both of rank 0; give one of them\n"
    assert run(linked, double, "-o", folder / "out") == (2, "", told)
    assert not (folder / "out").exists()
    other = linked.with_name("rank-7.linked.json.zst")
    other.write_bytes(linked.read_bytes())
    code, _, err = run(other, "-o", folder / "out")
    assert (code, "rank-7.linked.json.zst: is of rank 0 by its content" in err) == (2, True)
    assert run(linked, "--ranks", "5-5", "-o", folder / "out")[0] == 2


def test_an_unwritable_group_file_prints_one_line(folder: Path, run: Command) -> None:
    (folder / "out" / "comm_groups.json").mkdir(parents=True)
    code, _, err = run(folder, "-o", folder / "out")
    told = "comm_groups.json: cannot be written (Is a directory); choose another folder with -o\n"
    assert (code, err.endswith(told)) == (2, True)
    assert not list((folder / "out").glob(".*.part"))


def test_options_control_pauses_and_the_group_node(
    folder: Path, run: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    def kinds(*words: str) -> Any:
        return run.json(folder, "-o", folder / "out", *words)[1]["ranks"][0]["converted"]["nodes"]

    assert kinds() == {"computation on the host": 12, "pause of the host": 11, "all_reduce": 2}
    assert kinds("--no-pauses") == {"computation on the host": 12, "all_reduce": 2}
    assert main(["check", str(folder / "out" / "chakra.0.et")]) == 0
    assert kinds("--group-node")["pause of the host"] == 11
    assert main(["check", str(folder / "out" / "chakra.0.et")]) == 1
    assert "a METADATA_NODE, at which the statistics of ASTRA-sim stop" in capsys.readouterr().err


@pytest.mark.parametrize(("dedupe", "files"), [([], 4), (["--dedupe"], 2)])
def test_each_rank_of_a_grown_job_has_the_nodes_of_its_recorded_rank(
    folder: Path, run: Command, dedupe: list[str], files: int
) -> None:
    of_rank_1 = rank_trace(1)
    of_rank_1.op("aten::add", 3000, 5)
    of_rank_1.write(folder, 1)

    def nodes(name: str, *words: str) -> list[list[tuple[str, int]]]:
        assert run(folder, "-o", folder / name, *words)[0] == 0
        paths = sorted((folder / name).glob("*.et"))
        return [[(node.name, node.duration_micros) for _, node in read_trace(str(path))[1]] for path in paths]

    first, second = nodes("recorded")
    assert nodes("grown", "--grow-to", "4", *dedupe) == [first, second, second, second]
    written = sorted((folder / "grown").glob("*.et"))
    assert len({path.stat().st_ino for path in written}) == files
    assert main(["check", *map(str, written)]) == 0
