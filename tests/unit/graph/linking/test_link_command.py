"""`crossrank link` as a user runs it: folders, pairs, bad input, exit codes."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import zstandard

from crossrank.tools.cli import main
from crossrank.tools.commands import link as command
from crossrank.tools.graph.linking.linked_file import write_linked
from tests.unit.graph.linking.small_traces import SmallTrace, comm_params


def rank_trace(rank: int | None, *, collectives: int = 2) -> SmallTrace:
    trace = SmallTrace()
    trace.kineto_head["distributedInfo"]["rank"] = rank
    for i in range(collectives):
        trace.op("record_param_comms", 100 * i, 50, inputs=comm_params("allreduce", i + 1))
        trace.launch("ncclDevKernel_AllReduce_Sum_f32(x)", 100 * i + 5, 100 * i + 10, 20, 500 + i, stream=20)
    for i in range(10):
        trace.op("aten::mm", 2000 + 10 * i, 5)
    return trace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank in (0, 1):
        rank_trace(rank).write(tmp_path, rank)
    return tmp_path


def run(*words: str | Path) -> int:
    return main(["link", *map(str, words), "--jobs", "1"])


def load(path: Path) -> Any:
    return json.loads(zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()))


def test_every_rank_of_a_folder_is_linked_and_summed_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder) == 0
    assert (
        capsys.readouterr().out
        == f"""\
linked     2 of 2 traces: 100.0 % of 24 host operations matched
wrote      {folder}/rank-0.linked.json.zst and 1 more; next: crossrank convert, simulate, or replay --compute

Linked traces
                      host     host         GPU      GPU      GPU     commu-   depen-
  rank  window  operations  matched  activities   linked  skipped  nications  dencies
  0     1               12  100.0 %           2  100.0 %        0          2       29
  1     1               12  100.0 %           2  100.0 %        0          2       29

Matched host operations, by method
         24  record function id

Dependencies, by kind
         28  caller
         22  program_order
          4  launch
          2  group_order
          2  stream

Communications, by source of their record
          4  record_param_comms

Process groups of the linked ranks
  group  window  members  ranks  collectives per rank  sends and receives
  0      1             2  0-1                       2                   0
"""
    )
    assert load(folder / "rank-1.linked.json.zst")["crossrank"]["rank"] == 1


def test_json_has_the_whole_report_of_every_rank(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--json", "--ranks", "1", "-o", folder / "out") == 0
    summary = json.loads(capsys.readouterr().out)
    (rank,) = summary["ranks"]
    assert (rank["rank"], rank["output"], rank["error"]) == (1, str(folder / "out" / "rank-1.linked.json.zst"), None)
    assert (rank["host_rate"], rank["activity_rate"], rank["nodes"]) == (1.0, 1.0, 17)
    assert rank["communications"] == {"record_param_comms": 2}
    assert summary["groups"] == [
        {"pg": "0", "ranks": [0, 1], "window": 1, "collectives": {"1": 2}, "p2p": 0, "disagrees": False}
    ]
    assert sorted(os.listdir(folder / "out")) == ["rank-1.linked.json.zst"]


@pytest.mark.parametrize(
    ("rank", "compression", "linked"),
    [
        (5, "zst", "rank-5.linked.json.zst"),
        (5, "gz", "rank-5.linked.json.gz"),
        (5, "none", "rank-5.linked.json"),
        (None, "none", "rank-0.linked.json"),
    ],
)
def test_the_two_files_of_one_rank_are_linked_in_either_order(
    tmp_path: Path, rank: int | None, compression: str, linked: str
) -> None:
    et, kineto = rank_trace(rank).write(tmp_path, 5)
    renamed = [tmp_path / "observer.json.gz", tmp_path / "worker.pt.trace.json.gz"]
    for path, new in zip((et, kineto), renamed, strict=True):
        new.write_bytes(gzip.compress(Path(path).read_bytes()))
    assert run(renamed[1], renamed[0], "-o", tmp_path / "out", "--compress", compression) == 0
    assert os.listdir(tmp_path / "out") == [linked]


@pytest.mark.parametrize(
    "names",
    [
        ("pytorch_et_{}.json", "kineto_trace_{}.json"),
        ("et_rank{}.json", "worker{}_step_12.1694128201545.pt.trace.json"),
        ("{}.et.json", "{}.json"),
    ],
)
def test_files_with_foreign_names_are_paired_by_rank(tmp_path: Path, names: tuple[str, str]) -> None:
    for rank in (0, 11):
        for path, name in zip(rank_trace(rank).write(tmp_path, rank), names, strict=True):
            os.replace(path, tmp_path / name.format(rank))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "config.json").write_text("{}")
    assert run(tmp_path, "-o", tmp_path / "out") == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["rank-0.linked.json.zst", "rank-11.linked.json.zst"]


def test_windows_are_linked_separately(folder: Path) -> None:
    for kind in ("et", "kineto"):
        (folder / f"rank-1.{kind}.json").unlink()
        (folder / f"rank-0.w2.{kind}.json").write_bytes((folder / f"rank-0.{kind}.json").read_bytes())
    header = {"schema": "crossrank-comms 1", "rank": 0, "world_size": 2, "host": "h", "node": "n"}
    (folder / "rank-0.comms.jsonl.zst").write_bytes(zstandard.compress(json.dumps({"header": header}).encode() + b"\n"))
    assert run(folder, "-o", folder / "out") == 0
    names = ["rank-0.linked.json.zst", "rank-0.w2.linked.json.zst"]
    assert sorted(os.listdir(folder / "out")) == names
    for name in names:
        assert "rank-0.comms.jsonl.zst" in load(folder / "out" / name)["crossrank"]["inputs"]


def test_a_rank_without_a_kineto_trace_is_reported_and_others_are_linked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "rank-1.kineto.json").unlink()
    assert run(folder, "-o", folder / "out") == 1
    assert capsys.readouterr().err == f"crossrank: rank 1: no Kineto trace beside {folder}/rank-1.et.json\n"
    assert os.listdir(folder / "out") == ["rank-0.linked.json.zst"]
    assert (run(folder, "--ranks", "0"), run(folder, "--ranks", "0,1")) == (0, 1)
    assert capsys.readouterr().err == f"crossrank: rank 1: no Kineto trace beside {folder}/rank-1.et.json\n"


def test_a_failed_rank_is_reported_and_the_others_are_linked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rank-0.et.json").write_bytes(b"")
    for jobs in ("1", "2"):
        assert main(["link", str(folder), "-o", str(folder / "out"), "--jobs", jobs]) == 1
        message = f"crossrank: rank 0: {folder}/rank-0.et.json: is empty; it should be an execution trace\n"
        assert capsys.readouterr().err == message
        assert os.listdir(folder / "out") == ["rank-1.linked.json.zst"]
    assert run(folder, "--json") == 1
    failed = json.loads(capsys.readouterr().out)["ranks"][0]
    assert [failed[name] for name in ("nodes", "host_nodes", "communication_kernels_alone")] == [0, 0, 0]


def test_a_truncated_file_is_linked_up_to_the_damage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (folder / "rank-0.et.json").read_bytes()
    (folder / "rank-0.et.json").write_bytes(whole[: len(whole) * 2 // 3])
    assert run(folder, "--ranks", "0") == 1
    (complaint,) = capsys.readouterr().err.splitlines()
    assert complaint.startswith(f"crossrank: rank 0: {folder}/rank-0.et.json: cut off or broken after ")
    assert complaint.endswith("whole nodes were read")
    assert len(load(folder / "rank-0.linked.json.zst")["nodes"]) < 17


def test_files_of_two_runs_are_refused_with_the_reasons(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = rank_trace(0)
    other.et_head |= {"pid": 123, "time": "2024-06-30 08:00:00"}
    et, _ = other.write(folder, 0)
    assert run(et, folder / "rank-1.kineto.json", "-o", folder / "out") == 2
    assert capsys.readouterr().err == (
        f"crossrank: rank 0: {et} and {folder}/rank-1.kineto.json are not of the same run "
        "(process 123 in the one, 70 in the other; "
        "written 2024-06-30 08:00:00 in the one, 2024-05-02 10:00:00 UTC in the other); give files of one run\n"
    )
    assert os.listdir(folder / "out") == []


def test_a_poor_match_exits_1_with_its_main_reason(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = rank_trace(0)
    trace.events = [event for event in trace.events if event["ts"] < 2030]
    trace.write(folder, 0)
    assert run(folder, "--ranks", "0") == 1
    assert capsys.readouterr().err == (
        "crossrank: rank 0: matched 41.7 %, less than --min-match 95.0 %; 7 operations: outside the Kineto trace\n"
    )
    assert run(folder, "--ranks", "0", "--min-match", "0.41") == 0


def test_files_of_two_ranks_are_linked_with_a_doubt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = rank_trace(1)
    other.et_head["pid"] = 123
    et, _ = other.write(folder, 1)
    assert run(et, folder / "rank-0.kineto.json", "-o", folder / "out") == 1
    assert capsys.readouterr().err == (
        "crossrank: rank 1: the two files may be of different runs: process 123 in the one, 70 in the other\n"
        "crossrank: rank 1: the two files may be of different runs: rank 1 in the file name, 0 in the Kineto trace\n"
    )


def test_our_own_bug_on_one_rank_does_not_stop_the_others(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(trace: object, path: str) -> None:
        if "rank-0" in path:
            raise ZeroDivisionError("division by zero")
        write_linked(trace, path)  # type: ignore[arg-type]

    monkeypatch.setattr(command, "write_linked", broken)
    assert run(folder, "-o", folder / "out") == 1
    assert re.fullmatch(
        r"crossrank: rank 0: stopped by an unexpected error \(ZeroDivisionError: division by zero at "
        r"test_link_command\.py:[0-9]+\); please report it\n",
        capsys.readouterr().err,
    )
    assert os.listdir(folder / "out") == ["rank-1.linked.json.zst"]


def test_an_unrelated_file_is_reported_and_the_rest_is_linked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, name in zip(rank_trace(0).write(tmp_path, 0), ("et_0.json", "worker0.pt.trace.json"), strict=True):
        os.replace(path, tmp_path / name)
    (tmp_path / "notes.json").write_text("")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "rank-0.flight.pickle").write_text("")
    for words in ((), ("--ranks", "0")):
        assert run(tmp_path, "-o", tmp_path / "out", *words) == 1
        assert capsys.readouterr().err.splitlines() == [
            f"crossrank: {tmp_path}/notes.json: cannot be linked, it is empty; remove it or record again"
        ]
    assert os.listdir(tmp_path / "out") == ["rank-0.linked.json.zst"]


def test_a_copy_in_a_subfolder_is_skipped_and_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = folder / "below" / "rank-0.et.json"
    copy.parent.mkdir()
    copy.write_bytes((folder / "rank-0.et.json").read_bytes())
    assert run(folder) == 0
    assert capsys.readouterr().err == (
        f"crossrank: {copy}: is of rank 0, as {folder}/rank-0.et.json is, and was skipped\n"
    )


def test_two_files_for_one_part_fail_their_rank(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rank-0.et.json.gz").write_bytes(b"")
    assert run(folder, "-o", folder / "out") == 1
    assert (
        "rank 0: 2 execution traces and 1 Kineto traces (rank-0.et.json, rank-0.et.json.gz," in capsys.readouterr().err
    )
    assert os.listdir(folder / "out") == ["rank-1.linked.json.zst"]


def test_names_in_a_trace_do_not_steer_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = rank_trace(0)
    trace.host_event("never matched", 1, 1, None)
    trace.nodes.append({**trace.nodes[-1], "id": 999, "name": "evil\x1b[31m"})
    trace.nodes[3]["inputs"]["values"][2] = ["0\x1b[31m", ""]
    trace.write(folder, 0)
    assert run(folder, "--ranks", "0", "-o", f"{folder}/out\x1b[31m", "--min-match", "0") == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "out\\x1b[31m" in captured.out


@pytest.mark.parametrize(("collectives", "told"), [(0, "0 on rank 1; 2 on rank 0"), (3, "2 on rank 0; 3 on rank 1")])
def test_ranks_with_different_collective_counts_are_reported(
    folder: Path, capsys: pytest.CaptureFixture[str], collectives: int, told: str
) -> None:
    rank_trace(1, collectives=collectives).write(folder, 1)
    assert run(folder) == 1
    assert capsys.readouterr().err == (
        f"crossrank: the ranks of group 0 made different numbers of collectives: {told}\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{folder}/gone"], "gone: no such file or folder"),
        (["{folder}/empty"], "the folder is empty; give a recording (the folder TRACING_DIR), traces or dumps"),
        (
            ["{folder}/rank-0.et.json", "{folder}/rank-1.et.json"],
            "one Kineto trace, but {folder}/rank-0.et.json is an execution trace, {folder}/rank-1.et.json is an",
        ),
        (["{folder}/rank-0.et.json"], "is one file; give the execution trace and the Kineto trace of a rank"),
        (["{folder}/a", "{folder}/b", "{folder}/c"], "3 paths given; give one folder, or the two files of one rank"),
        (["{folder}", "--ranks", "7"], "rank 7 has no pair of traces"),
        (
            ["{folder}", "-o", "{folder}/rank-0.et.json"],
            "cannot be created (File exists); choose another folder with -o",
        ),
        (["{folder}/rank-0.et.json", "{folder}/rank-0.kineto.json", "--ranks", "0"], "two files are one rank"),
        ([""], "the path is empty"),
        (["foo://x"], "foo://x: cannot be reached (ValueError: Protocol not known: foo"),
    ],
)
def test_unusable_input_prints_one_line_and_exits_2(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (folder / "empty").mkdir()
    assert run(*[word.format(folder=folder) for word in words]) == 2
    error = capsys.readouterr().err
    assert message.format(folder=folder) in error
    assert error.count("\n") == 1
    assert not list(folder.glob("*.linked.*"))


@pytest.mark.parametrize(
    "words",
    [["--ranks", "3-1"], ["--ranks", "a"], ["--ranks", "0-99999999999"], ["--min-match", "2"], ["--min-match", "x"]],
)
def test_a_bad_option_names_the_value(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(folder, *words)
    assert stopped.value.code == 2
    assert repr(words[1]) in capsys.readouterr().err
