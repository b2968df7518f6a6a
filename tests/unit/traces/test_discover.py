"""Which files are found, what they are, and of which rank."""

from __future__ import annotations

import gzip
import json
import pickle
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import zstandard

from crossrank.errors import CrossrankError
from crossrank.recording import COMMS, EXECUTION_TRACE, FLIGHT, KINETO, LINKED
from crossrank.tools.traces.discover import (
    DATABASE,
    NSIGHT,
    PLAN,
    REPORT,
    TIMELINE,
    FoundFile,
    discover,
    look,
    other_jobs,
)
from crossrank.tools.traces.file_ranks import rank_in_name


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank-12.flight.json.zst", 12),
        ("_dump_3", 3),
        ("nccl_trace_rank_12", 12),
        ("trace.host7-rank4.pickle", 4),
        ("node-0-rank-9_step100.json", 9),
        ("rank0_trace.json", 0),
        ("RANK_5.json", 5),
        ("local_rank_3_rank_11.json", 11),
        ("rank_11_local_rank_3.json", 11),
        ("tp_rank_1_pp_rank_0_rank_9", 9),
        ("host7_dump_0.json", 0),
        ("dump_4_h100-07", 4),
        ("trace-gpu1-2.json.gz", 2),
        ("worker3.pt.trace.json.gz", 3),
        ("worker0.1697000000000000000.pt.trace.json", 0),
        ("host7_et_3.json.gz", 3),
        ("trace_3_iter_100.json", 3),
        ("trace_2026-11-22_3.json", 3),
        ("kineto_20261122_3.json", 3),
        ("job-worker-3_dump_12", 12),
        ("local_rank_3.json", 3),
        ("7.json", 7),
        ("report1.sqlite3", 1),
        # These do not say it.
        ("notes.txt", None),
        ("trace.json", None),
        ("tp_rank_1_pp_rank_0.json", None),
        ("node_rank_1.json", None),
        ("dlrm_8gpu.json", None),
        ("trace_2026-11-22.json", None),
        ("gpu07_4711.1790000000000000000.pt.trace.json", None),
        ("rank_1048575.json", 1_048_575),
        ("rank_1048576.json", None),
        ("rank_00000001.json", None),
    ],
)
def test_a_file_name_gives_the_rank(name: str, rank: int | None) -> None:
    assert rank_in_name(name) == rank


def kineto(rank: int | None = None) -> bytes:
    info = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 8}}
    return json.dumps({"schemaVersion": 1, **info, "traceEvents": []}).encode()


def database(path: Path, *statements: str) -> bytes:
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    return path.read_bytes()


CONTENTS: dict[str, list[bytes]] = {
    COMMS: [b'{"header":{"schema":"crossrank-comms 1","rank":3}}\n'],
    EXECUTION_TRACE: [b'{"schema": "1.1.1-chakra.0.0.4", "pid": 7, "nodes": [{"id": 1, "name": "x"}]}'],
    KINETO: [kineto(), b'[{"name": "x", "ph": "X", "ts": 1}]'],
    LINKED: [b'{"schema":"1.1.1","crossrank":{"version":"0.1.0"},"nodes":[]}'],
    FLIGHT: [
        pickle.dumps({"version": "2.10", "entries": []}, 2),
        b'{"version": "2.10", "pg_config": {}, "entries": []}',
        b'{"version": "2.10", "entries": []}',
    ],
    PLAN: [b'{"schema":"crossrank-plan 1","source":"x"}'],
    TIMELINE: [b'{"metadata":{"crossrank":"0.1.0"},"traceEvents":[]}'],
    REPORT: [],
    "": [b"a note", b'{"events": []}', b"PK\3\4", b'{"nodes": 3}', b'log: "entries": 4', b" " * (1 << 16) + kineto()],
}


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.ZstdCompressor().compress], ids=["", "gzip", "zstd"])
@pytest.mark.parametrize(("kind", "content"), [(kind, one) for kind, many in CONTENTS.items() for one in many])
def test_the_first_bytes_decide_the_file_kind_not_the_name(
    tmp_path: Path, kind: str, content: bytes, pack: Any
) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(pack(content))
    assert look(str(path)).kind == kind


def test_nsight_exports_reports_and_our_databases_are_recognised(tmp_path: Path) -> None:
    database(tmp_path / "a", "CREATE TABLE NVTX_EVENTS (start INTEGER)")
    database(tmp_path / "b.sqlite", "CREATE TABLE findings (position INTEGER, role TEXT, kind TEXT, content TEXT)")
    (tmp_path / "c.sqlite").write_bytes(b"no database")
    (tmp_path / "d.nsys-rep").write_bytes(b"\1\2")
    assert [file.kind for file in discover([str(tmp_path)])] == [NSIGHT, DATABASE, NSIGHT, REPORT]


@pytest.mark.parametrize(
    ("name", "content", "rank"),
    [
        ("trace.json", kineto(5), 5),
        ("gpu07_4711.1790000000000000000.pt.trace.json", kineto(5), 5),
        ("host7.json", kineto(5), 5),  # what a file says counts more than any number in its name
        ("rank2.json", kineto(5), 2),  # but not more than what is called a rank: `link` says that they differ
        ("calls.jsonl", CONTENTS[COMMS][0], 3),
        ("host7.jsonl", CONTENTS[COMMS][0], 3),
        ("trace.json", kineto(99_999_999), None),
    ],
)
def test_file_content_gives_the_rank(tmp_path: Path, name: str, content: bytes, rank: int | None) -> None:
    (tmp_path / name).write_bytes(content)
    assert look(str(tmp_path / name)).rank == rank


def put(folder: Path, *names: str, content: bytes = CONTENTS[FLIGHT][0]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def names_and_ranks(folder: Path) -> list[tuple[str, int | None]]:
    return [(str(Path(file.path).relative_to(folder)), file.rank) for file in discover([str(folder)])]


def test_a_folder_is_searched_recursively_without_other_jobs(tmp_path: Path) -> None:
    put(tmp_path, "node0/dump_0", "node1/a/dump_1", "earlier-1/dump_0", "spawned-12/dump_0", ".cache/dump_0")
    assert names_and_ranks(tmp_path) == [("node0/dump_0", 0), ("node1/a/dump_1", 1)]
    assert other_jobs(str(tmp_path)) == ["earlier-1", "spawned-12"]


def test_a_trace_without_a_rank_gets_the_only_rank(tmp_path: Path) -> None:
    put(tmp_path, "kineto.json", content=kineto(5))
    put(tmp_path, "et.json", content=CONTENTS[EXECUTION_TRACE][0])
    put(tmp_path, "notes-7.txt", "notes.txt", content=b"a note")
    notes = [("notes-7.txt", 7), ("notes.txt", None)]
    assert names_and_ranks(tmp_path) == [("et.json", 5), ("kineto.json", 5), *notes]
    put(tmp_path, "dump_6")
    assert names_and_ranks(tmp_path) == [("dump_6", 6), ("et.json", None), ("kineto.json", 5), *notes]
    put(tmp_path, "dump_5")
    (tmp_path / "dump_6").unlink()
    assert names_and_ranks(tmp_path)[:2] == [("dump_5", 5), ("et.json", 5)]
    put(tmp_path, "other.json", content=CONTENTS[EXECUTION_TRACE][0])
    assert names_and_ranks(tmp_path)[1:3] == [("et.json", None), ("kineto.json", 5)]


def described(rank: int, ranks: str) -> bytes:
    args = {"Process Group Ranks": ranks, "Seq": 1, "Rank": rank}
    return json.dumps({"traceEvents": [{"ph": "X", "name": "record_param_comms", "args": args}]}).encode()


@pytest.mark.parametrize(
    ("names", "ranks", "how"),
    [
        (["a_0.json", "a_1.json"], [0, 1], ""),
        (["node1_26.json", "node1_27.json"], [0, 1], "2 files without a rank are numbered in the order of their names"),
        (["trace_A100.json", "trace_H100.json"], [0, 1], "2 files without a rank are numbered in the order of"),
        (
            ["TP-0-PP-0.json", "TP-0-PP-1.json", "TP-1-PP-0.json", "TP-1-PP-1.json"],
            [0, 2, 1, 3],
            "the names of the files have coordinates: they count in the order tp, cp, dp, pp",
        ),
    ],
)
def test_traces_whose_names_say_no_rank_are_ranked_together(
    names: list[str], ranks: list[int], how: str, tmp_path: Path
) -> None:
    put(tmp_path, *names, content=kineto())
    found = discover([str(tmp_path)])
    assert [file.rank for file in found] == ranks
    assert all(file.ranked_by.startswith(how) for file in found)


def test_the_ranks_of_groups_in_traces_count_more_than_numbers_in_their_names(tmp_path: Path) -> None:
    put(tmp_path, "a_0.json", content=described(1, "[4, 6]"))
    put(tmp_path, "a_1.json", content=described(0, "[4, 6]"))
    assert names_and_ranks(tmp_path) == [("a_0.json", 6), ("a_1.json", 4)]
    put(tmp_path, "a_2.json", content=described(2, "[4, 6, ...]"))
    assert names_and_ranks(tmp_path) == [("a_0.json", 0), ("a_1.json", 1), ("a_2.json", 2)]


@pytest.mark.parametrize("name", ["trace_A100.json", "profile_v2.json", "1.0.2-chakra.0.0.4.json", "x__1016002.json"])
def test_a_number_in_the_name_of_a_single_trace_is_not_a_rank(name: str, tmp_path: Path) -> None:
    put(tmp_path, name, content=kineto())
    assert names_and_ranks(tmp_path) == [(name, None)]


def test_the_file_nearest_to_the_path_is_used_and_the_other_is_reported(tmp_path: Path) -> None:
    put(tmp_path, "rank_0", "copy/rank_0", "copy/rank_1")
    put(tmp_path, "rank-0.linked.json", "copy/rank-0.linked.json", content=CONTENTS[LINKED][0])
    put(tmp_path, "rank_0.sqlite", "copy/rank_0.sqlite", content=b"an export holds several ranks")
    put(tmp_path, "et.json", "copy/et.json", content=CONTENTS[EXECUTION_TRACE][0])
    problems = {str(Path(file.path).relative_to(tmp_path)): file.problem for file in discover([str(tmp_path)])}
    assert problems == {
        **dict.fromkeys(("rank_0.sqlite", "copy/rank_0.sqlite", "et.json", "copy/et.json"), ""),
        "rank_0": "",
        "rank-0.linked.json": "",
        "copy/rank_1": "",
        "copy/rank_0": f"is of rank 0, as {tmp_path}/rank_0 is, and was skipped",
    }


def test_two_files_of_one_rank_side_by_side_are_both_found(tmp_path: Path) -> None:
    put(tmp_path, "a/rank_0", "b/rank_0")
    assert [file.problem for file in discover([str(tmp_path)])] == ["", ""]


def test_unusable_files_report_the_reason(tmp_path: Path) -> None:
    put(tmp_path, "dump_0", content=b"")
    put(tmp_path, "dump_1.gz", content=b"\x1f\x8b\x08")
    put(tmp_path, ".rank-2.et.json.part")
    put(tmp_path, "rank-99999999.flight.json")
    (tmp_path / "dump_3").symlink_to(tmp_path / "nowhere")
    problems = {Path(file.path).name: (file.rank, file.problem) for file in discover([str(tmp_path)])}
    assert problems == {
        "dump_0": (0, "is empty"),
        "dump_1.gz": (1, "the last gzip stream is cut off; the part before it was read"),
        ".rank-2.et.json.part": (2, "was cut off during writing"),
        "rank-99999999.flight.json": (None, "invalid rank 99999999; a job has at most 1048576 ranks"),
        "dump_3": (3, "is neither a file nor a folder"),
    }


def test_a_file_given_twice_is_found_once(tmp_path: Path) -> None:
    put(tmp_path, "a/b/dump_0", content=CONTENTS[FLIGHT][1])
    (file,) = discover([str(tmp_path), str(tmp_path / "a/b/dump_0")])
    path, size = f"{tmp_path}/a/b/dump_0", len(CONTENTS[FLIGHT][1])
    assert file == FoundFile(path=path, kind=FLIGHT, rank=0, window=1, size=size, depth=2)
    with pytest.raises(CrossrankError, match="gone"):
        discover([str(tmp_path / "gone")])


def test_a_path_with_a_placeholder_gives_the_rank(tmp_path: Path) -> None:
    for folder in ("pp0", "pp1"):
        (tmp_path / folder).mkdir()
        for number in (1, 12):
            (tmp_path / folder / f"A100_{folder}_v{number}.json").write_text('{"traceEvents": []}')
    found = discover([f"{tmp_path}/*/A100_pp1_v{{rank}}.json"])
    assert [(Path(one.path).parent.name, one.kind, one.rank) for one in found] == [
        ("pp1", KINETO, 1),
        ("pp1", KINETO, 12),
    ]
    # Twice in a pattern, it is the same number.
    assert [one.rank for one in discover([f"{tmp_path}/pp{{rank}}/A100_pp{{rank}}_v12.json"])] == [0, 1]
    with pytest.raises(CrossrankError) as refused:
        discover([f"{tmp_path}/pp2/v{{rank}}.json"])
    assert str(refused.value).startswith(f"{tmp_path}/pp2: no such file or folder")
    with pytest.raises(CrossrankError) as refused:
        discover([f"{tmp_path}/pp1/v{{rank}}.json"])
    assert str(refused.value) == (
        f"{tmp_path}/pp1/v{{rank}}.json: no file has such a name; {{rank}} is a number, and * any text without /"
    )
