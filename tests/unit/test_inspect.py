"""`crossrank inspect` on whole, torn, foreign and missing files: text, JSON and exit code."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard

from crossrank.tools.analysis.summary import RankSummary, summarise_rank
from crossrank.tools.traces.discover import FoundFile
from tests.unit.command import Command
from tests.unit.graph.linking.public_traces import needs_traces, public
from tests.unit.traces.logs.lines import traceback, watchdog


def comms(rank: int, node: str, *, world: int = 2, ended: bool = True) -> bytes:
    """One rank of a small job: an all_reduce over both nodes, a send inside the node."""
    header: dict[str, Any] = {"schema": "crossrank-comms 1", "rank": rank, "world_size": world, "host": "h"}
    header |= {"node": node, "config": {"emit": "ALL"}}
    header |= {"versions": {"crossrank": "0.1.0", "torch": "2.13.0", "nccl": None}}
    group = {"pg": "0", "size": world, "ranks": list(range(world)), "desc": "default_pg"}
    reduce: dict[str, Any] = {"id": 0, "seq": 1, "t": 5, "step": 0, "op": "all_reduce", "api": "all_reduce"}
    reduce |= {"c10d": "allreduce_", "pg": "0", "in": [[750]], "bytes": 3000}
    send = {"id": 1, "p2p_seq": 1, "t": 6, "step": 0, "op": "send", "c10d": "send", "pg": "0", "bytes": 1000, "peer": 0}
    lines: list[object] = [
        {"header": header},
        {"group": group | ({"locality": "cross_node"} if rank else {})},
        reduce | {"source": "train.py:7", "locality": "cross_node"},
        send | {"locality": "intra_node"},
        {"step": {"step": 1, "t": 7}},
    ]
    if ended:
        lines.append({"end": {"reason": "exit", "step": 1, "records": 2, "calls": 3, "filtered": 1, "dropped": 0}})
    content = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
    return zstandard.ZstdCompressor().compress(content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rank-0.comms.jsonl.zst").write_bytes(comms(0, "alpha"))
    (tmp_path / "rank-1.comms.jsonl.zst").write_bytes(comms(1, "beta"))
    return tmp_path


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "inspect")


def test_inspect_prints_the_whole_summary(folder: Path, inspect: Command) -> None:
    size = (folder / "rank-0.comms.jsonl.zst").stat().st_size + (folder / "rank-1.comms.jsonl.zst").stat().st_size
    code, out, err = inspect(folder)
    assert (code, err) == (0, "")
    assert out == (
        f"""\
complete   every rank is there, and ended properly
recording  {folder}
ranks      2 of 2 on 2 nodes (alpha: 0, beta: 1)
versions   crossrank 0.1.0, torch 2.13.0
steps      1 ended, 0 with a recorded start
calls      4, 8 kB (size S of nccl-tests, summed over ranks)
           2 more inside nodes, not recorded (TRACING=CROSSNODE)
cross-node 75.0 % of the bytes

Operations
  operation   API call    calls  bytes  bytes/call  cross-node
  all_reduce  all_reduce      2   6 kB        3 kB     100.0 %
  send        (C++)           2   2 kB        1 kB       0.0 %

Process groups
  group  description  size  ranks  locality    calls  bytes
  0      default_pg      2  0-1    cross_node      4   8 kB

Source lines with most bytes
  source      operation   calls  bytes
  train.py:7  all_reduce      2   6 kB
  (C++)       send            2   2 kB

Files
  kind   files   size
  comms      2  {size} B
"""
    )


def test_groups_are_listed_by_calls_and_silent_groups_are_counted(folder: Path, inspect: Command) -> None:
    line = b'{"group":{"pg":"%d","size":2,"ranks":[0,1],"desc":"made and not used"}}\n'
    header, _, rest = zstandard.decompress(comms(0, "alpha")).partition(b"\n")
    calls = rest.replace(b'"op":"send","c10d":"send","pg":"0"', b'"op":"send","c10d":"send","pg":"7"')
    groups = b"".join(line % number for number in range(1, 9))
    (folder / "rank-0.comms.jsonl.zst").write_bytes(zstandard.compress(header + b"\n" + groups + calls))
    _, out, _ = inspect(folder)
    (table,) = [part for part in out.split("\n\n") if part.startswith("Process groups")]
    first, second, silent = table.splitlines()[2:]
    assert first.split() == ["0", "default_pg", "2", "0-1", "cross_node", "3", "7", "kB"]
    assert second.split()[0] == "7"
    assert silent == "  7 groups without a call (--json shows them)"
    _, out, _ = inspect(folder, "--json")
    assert len(json.loads(out)["groups"]) == 9


def test_the_json_has_the_same_numbers(folder: Path, inspect: Command) -> None:
    code, out, err = inspect(folder, "--json")
    summary = json.loads(out)
    assert (code, err) == (0, "")
    assert summary["ranks"] == [0, 1]
    assert summary["nodes"] == {"alpha": [0], "beta": [1]}
    assert summary["calls"] == {"calls": 4, "bytes": 8000, "cross_node_bytes": 6000, "unknown_bytes": 0}
    assert summary["counts"] == {"records": 4, "calls": 6, "filtered": 2, "dropped": 0}
    totals = {"calls": 2, "bytes": 6000, "cross_node_bytes": 6000, "unknown_bytes": 0}
    assert summary["by_op"][0] == {"op": "all_reduce", "api": "all_reduce"} | totals
    empty = ("missing_ranks", "unfinished_ranks", "problems", "warnings", "cut_off", "unrecognized", "other_jobs")
    assert [summary[name] for name in empty] == [[]] * 7
    assert (summary["world_size"], summary["emit"], summary["mixed"], summary["endings"]) == (2, "ALL", False, {})


def test_several_processes_give_the_same_output(folder: Path, inspect: Command) -> None:
    assert inspect(folder, "--jobs", "2") == inspect(folder, "--jobs", "1")


def test_missing_and_killed_ranks_are_faults(folder: Path, inspect: Command) -> None:
    (folder / "rank-0.comms.jsonl.zst").write_bytes(comms(0, "alpha", world=4))
    (folder / "rank-1.comms.jsonl.zst").write_bytes(comms(1, "beta", world=4, ended=False))
    code, out, _ = inspect(folder)
    assert code == 1
    assert "ranks      2 of 4 on 2 nodes" in out
    assert "missing    rank 2-3 has no comms file\n" in out
    assert "unfinished rank 1: no last line" in out
    assert "complete" not in out


@pytest.mark.parametrize(
    ("end", "line"),
    [
        ({"reason": "SIGABRT", "exceptions": []}, "ended      rank 1: SIGABRT\n"),
        (
            {"reason": "exit", "exceptions": [{"thread": "MainThread", "error": "ValueError: \x1b[31mred"}]},
            "ended      rank 1: ValueError: \\x1b[31mred\n",
        ),
    ],
)
def test_a_rank_ended_by_a_signal_or_exception_is_reported(
    end: dict[str, object], line: str, folder: Path, inspect: Command
) -> None:
    last = zstandard.compress(json.dumps({"end": end}).encode() + b"\n")
    (folder / "rank-1.comms.jsonl.zst").write_bytes(comms(1, "beta", ended=False) + last)
    code, out, _ = inspect(folder)
    assert code == 0
    assert out.startswith(f"{line}complete   every rank is there\n")


def test_a_folder_without_a_known_file_is_refused(tmp_path: Path, inspect: Command) -> None:
    empty = "; give a recording (the folder TRACING_DIR), traces or dumps\n"
    assert inspect(tmp_path) == (2, "", f"crossrank: {tmp_path}: the folder is empty{empty}")
    (tmp_path / "run1").mkdir()
    assert inspect(tmp_path)[2].startswith(f"crossrank: {tmp_path} is not a recording: it has no files, but these")
    (tmp_path / "model.bin").write_bytes(b"abc")
    assert inspect(tmp_path) == (
        2,
        "",
        f"crossrank: {tmp_path}: no file has a known type (model.bin); give a recording (the folder TRACING_DIR), "
        "traces, dumps, exports or logs\n",
    )


def test_an_unreadable_trace_is_listed_and_is_a_problem(tmp_path: Path, inspect: Command) -> None:
    trace = tmp_path / "rank-0.et.json.zst"
    trace.write_bytes(b"")
    code, out, err = inspect(tmp_path, "--json")
    assert (code, err) == (1, "")
    found = json.loads(out)
    assert [(one["kind"], one["ranks"]) for one in found["files"]] == [("et", [0])]
    assert found["problems"] == [f"{trace}: is empty; it should be an execution trace"]


@needs_traces
@pytest.mark.parametrize(
    ("name", "kinds", "operations"),
    [
        ("dlrm_8gpu", {"et": 8, "kineto": 8}, {"all_to_all": (40, 40, None), "all_reduce": (24, 24, None)}),
        ("flight/clean", {"": 1, "flight": 4}, {"all_reduce": (40, 40, 327_760), "all_gather": (20, 20, 20_480)}),
        ("nsight_h100", {"nsight": 1}, {"all_to_all": (64, 64, None)}),
    ],
)
def test_inspect_shows_the_calls_of_any_input(
    name: str, kinds: dict[str, int], operations: dict[str, tuple[int, int, int | None]], inspect: Command
) -> None:
    code, out, _ = inspect(public(name), "--json")
    found = json.loads(out)
    assert code == 0
    assert {one["kind"].replace("unknown", ""): one["files"] for one in found["files"]} == kinds
    rows = found["job"]["operations"]
    for op, expected in operations.items():
        of_op = [one for one in rows if one["op"] == op]
        known = [one["bytes"] for one in of_op if one["bytes"] is not None]
        sums = (sum(one["calls"] for one in of_op), sum(one["timed_calls"] for one in of_op))
        assert (*sums, sum(known) if known else None) == expected
    assert "commands" in inspect(public(name))[1]


@needs_traces
def test_inspect_shows_what_an_execution_trace_has(inspect: Command) -> None:
    path = public("dlrm_8gpu/rank-0.et.json.gz")
    code, out, _ = inspect(path)
    assert code == 0
    assert f"contents   {path}: 1,675 operations of the host, 13 communications\n" in out


def test_two_comms_files_of_a_rank_are_not_added_up(folder: Path, inspect: Command) -> None:
    paths = [folder / "copy.rank-0.zst", folder / "rank-0.comms.jsonl.zst"]
    paths[0].write_bytes(paths[1].read_bytes())
    code, out, err = inspect(folder)
    assert (code, out) == (2, "")
    named, _, rest = err.removeprefix("crossrank: ").partition(" are both")
    assert sorted(named.split(" and ")) == sorted(map(str, paths))
    assert rest == " of rank 0; give the right one, or the folder of one run\n"


def test_files_of_two_jobs_are_not_a_complete_recording(folder: Path, inspect: Command) -> None:
    (folder / "rank-1.comms.jsonl.zst").write_bytes(comms(1, "beta", world=3))
    other = zstandard.decompress(comms(2, "beta", world=3)).replace(b"2.13.0", b"2.12.0")
    other = other.replace(b"cross_node", b"unknown").replace(b'"dropped":0', b'"dropped":3')
    (folder / "rank-2.comms.jsonl").write_bytes(other)
    code, out, _ = inspect(folder)
    assert code == 1
    assert "complete" not in out
    summary = inspect.json(folder)[1]
    assert (summary["mixed"], summary["world_size"], summary["ranks"]) == (True, 3, [0, 1, 2])
    assert summary["calls"] == {"calls": 6, "bytes": 12_000, "cross_node_bytes": 6000, "unknown_bytes": 3000}
    groups = [[one[name] for name in ("size", "ranks", "locality", "calls", "bytes")] for one in summary["groups"]]
    assert groups == [[3, [0, 1, 2], "cross_node", 4, 8000], [2, [0, 1], "unknown", 2, 4000]]
    assert summary["warnings"] == [
        "3 calls were dropped because the ring was full; increase TRACING_RING",
        "the files come from jobs of different world sizes: [2, 3]",
        "the ranks ran different versions of torch",
    ]


def test_a_missing_folder_is_reported(tmp_path: Path, inspect: Command) -> None:
    code, out, err = inspect(tmp_path / "nowhere")
    assert (code, out) == (2, "")
    step = "check the path (a recording is the folder TRACING_DIR)"
    assert err == f"crossrank: {tmp_path}/nowhere: no such file or folder; {step}\n"


def test_a_torn_frame_is_reported_and_the_rest_is_shown(folder: Path, inspect: Command) -> None:
    torn = folder / "rank-1.comms.jsonl.zst"
    torn.write_bytes(comms(1, "beta", ended=False) + comms(1, "beta")[:40])
    (folder / "some.comms.jsonl").write_bytes(b'{"header":{"host":"h"}}\n')
    code, out, err = inspect(folder)
    assert code == 2
    assert "all_reduce  all_reduce      2" in out
    assert err == (
        f"crossrank: {folder}/some.comms.jsonl: does not say its rank\n"
        f"crossrank: {torn}: the last zstd frame is cut off; the part before it was read\n"
    )


def test_a_foreign_file_is_reported_and_the_rest_is_shown(folder: Path, inspect: Command) -> None:
    foreign = folder / "rank-1.comms.jsonl.zst"
    foreign.write_bytes(b"PK\3\4 something else\n")
    code, out, err = inspect(folder)
    assert code == 2
    assert "ranks      1 of 2" in out
    assert "missing    rank 1" in out
    (folder / "rank-0.comms.jsonl.zst").unlink()
    assert "missing  " not in inspect(folder)[1]
    assert err.startswith(f"crossrank: {foreign}: line 1 is not a comms record: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"later":' + b"[" * 100_000 + b"\n", "line 3 is not a comms record: "),
        (b'{"id":"one"}\n', "line 3 is not a comms record: "),
        (b"\xff\n", "line 3 is not a comms record: "),
        (b'{"end":{"reason":"exit","blind_spots":5,"exceptions":5}}\n', None),
    ],
    ids=["nested", "record", "bytes", "end"],
)
def test_a_bad_line_of_one_rank_does_not_end_the_others(
    folder: Path, inspect: Command, line: bytes, problem: str | None
) -> None:
    damaged = folder / "rank-1.comms.jsonl"
    (folder / "rank-1.comms.jsonl.zst").rename(damaged)
    lines = zstandard.decompress(comms(1, "beta")).splitlines(keepends=True)
    damaged.write_bytes(b"".join([*lines[:2], line, *lines[2:-1]]))
    code, out, err = inspect(folder)
    assert "ranks      2 of 2" in out
    assert "all_reduce  all_reduce      2" in out
    assert (code, len(err.splitlines())) == ((0, 0) if problem is None else (2, 1))
    assert problem is None or err.startswith(f"crossrank: {damaged}: {problem}")


def test_a_reader_error_is_reported_and_the_rest_is_shown(
    folder: Path, inspect: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(file: FoundFile) -> RankSummary:
        if file.rank == 1:
            raise ValueError("of a kind that nobody foresaw")
        return summarise_rank(file)

    monkeypatch.setattr("crossrank.tools.analysis.summary.summarise_rank", stop)
    code, out, err = inspect(folder)
    assert (code, "ranks      1 of 2" in out) == (2, True)
    assert err.startswith(f"crossrank: {folder}/rank-1.comms.jsonl.zst: stopped by an unexpected error")


def test_partial_files_and_unknown_file_names_are_listed(folder: Path, inspect: Command) -> None:
    (folder / ".rank-0.et.json.part").write_bytes(b"{")
    (folder / "report.nsys-rep").write_bytes(b"")
    code, out, _ = inspect(folder)
    assert code == 1
    assert "cut off    .rank-0.et.json.part: the process ended while it wrote the file\n" in out
    assert "ignored    1 file(s) of unknown type: report.nsys-rep\n" in out
    assert list(inspect.json(folder)[1]["files"]) == ["comms"]


def test_recordings_of_other_jobs_in_subfolders_are_only_listed(folder: Path, inspect: Command) -> None:
    for name in ("earlier-1", "spawned-2"):
        (folder / name).mkdir()
        (folder / name / "rank-0.comms.jsonl.zst").write_bytes(comms(0, "alpha"))
    code, out, _ = inspect(folder)
    assert (code, "calls      4, " in out) == (0, True)
    assert (
        "others     2 folder(s) of other jobs (earlier ones, or processes that ranks started), not counted: "
        "earlier-1, spawned-2\n"
    ) in out
    assert inspect.json(folder)[1]["other_jobs"] == ["earlier-1", "spawned-2"]


def test_a_file_named_for_another_rank_is_a_problem(folder: Path, inspect: Command) -> None:
    os.rename(folder / "rank-1.comms.jsonl.zst", folder / "rank-7.comms.jsonl.zst")
    code, _, err = inspect(folder)
    assert code == 2
    assert err.endswith("rank-7.comms.jsonl.zst: is named rank 7 and was written by rank 1\n")


@pytest.mark.parametrize("spots", [[[1]], 7, None, {"a": 1}, [{}]])
def test_blind_spots_that_are_not_texts_are_skipped(tmp_path: Path, inspect: Command, spots: object) -> None:
    header = {"schema": "crossrank-comms 1", "rank": 0, "world_size": 1, "host": "h", "node": "n"}
    lines = [{"header": header}, {"end": {"reason": "exit", "calls": 0, "blind_spots": spots}}]
    (tmp_path / "rank-0.comms.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, _ = inspect(tmp_path, "--json")
    summary = json.loads(out)
    assert (code, set(summary["calls"].values()), summary["warnings"]) == (0, {0}, [])
    assert (summary["steps"], summary["world_size"], summary["unfinished_ranks"]) == (0, 1, [])


def test_logs_are_listed_by_rank_and_by_kind_of_line(tmp_path: Path, inspect: Command) -> None:
    lines = ["loading", *watchdog(0, 4), *watchdog(2, 4), *traceback("ValueError: no batch", "[rank1]: ")]
    (tmp_path / "train.log").write_text("\n".join(lines) + "\n")
    code, out, err = inspect(tmp_path)
    assert (code, err) == (0, "")
    assert out == (
        """\
logs       1 file
ranks      3 with lines of their own: 0-2
no rank    1 line could not be given to a rank

Ranks
  rank  host  lines  end
  0               2
  1               6  ValueError: no batch
  2               2

Lines that say something
  kind       lines  ranks  first in     text
  timeout        2  0,2    train.log:2  [E1126 10:00:00.000000000 ProcessGroupNCCL.cpp:683] [Rank 0] Watchdog caught collective operation ti
  status         2  0,2    train.log:3  [E1126 10:00:00.000000000 ProcessGroupNCCL.cpp:2241] [PG ID 0 PG GUID 0(default_pg) Rank 0]  failure
  traceback      1  1      train.log:6  Traceback (most recent call last):
"""  # noqa: E501
    )
    (attempt,) = json.loads(inspect(tmp_path / "train.log", "--json")[1])["attempts"]
    assert [(one["rank"], one["lines"], one["end"]) for one in attempt["ranks"]] == [
        (0, 2, ""),
        (1, 6, "ValueError: no batch"),
        (2, 2, ""),
    ]
    assert [(one["kind"], one["line"]) for one in attempt["lines"]] == [("timeout", 2), ("status", 3), ("traceback", 6)]


def test_a_log_is_read_from_the_standard_input(monkeypatch: pytest.MonkeyPatch, inspect: Command) -> None:
    lines = "\n".join([*watchdog(0, 4), ""]).encode()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(lines)))
    code, shown, _ = inspect.json("-")
    assert code == 0
    assert shown["files"] == ["standard input"]
    assert [one["rank"] for one in shown["attempts"][0]["ranks"]] == [0]


def test_a_log_that_is_cut_off_is_not_complete(tmp_path: Path, inspect: Command) -> None:
    (tmp_path / "train.log").write_text("\n".join(watchdog(0, 4)))
    code, out, _ = inspect(tmp_path)
    assert code == 1
    assert "train.log: ends within a line" in out
