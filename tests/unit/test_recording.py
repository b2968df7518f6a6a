"""Files of a recording, and what each operation of its records moves."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from crossrank.comm import OPERATIONS, CommRecord
from crossrank.errors import CrossrankError
from crossrank.recording import CommsFile, ReadIssues, file_name, list_recording, rank_of, read_chunks, temporary_name

HEADER = b'{"header":{"schema":"crossrank-comms 1","rank":0,"world_size":1,"host":"h","node":"n"}}\n'
GROUP = b'{"group":{"pg":"0","size":1,"ranks":[0],"desc":"default_pg","backend":"gloo","locality":"intra_node"}}\n'
RECORD = b'{"id":%d,"seq":1,"t":5,"step":0,"op":"barrier","c10d":"barrier","pg":"0","bytes":0}\n'
END = b'{"end":{"reason":"exit","step":0,"records":1}}\n'


def frame(*lines: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(b"".join(lines))


def read(path: Path) -> tuple[list[int], CommsFile]:
    comms = CommsFile(str(path))
    return [record.id for record in comms.records()], comms


WHOLE = [frame(HEADER, GROUP), frame(RECORD % 0), frame(RECORD % 1, RECORD % 2), frame(END)]


@pytest.mark.parametrize("pack", [lambda b: frame(b), gzip.compress, lambda b: b], ids=["zstd", "gzip", "plain"])
def test_the_content_decides_the_compression_not_the_name(pack: object, tmp_path: Path) -> None:
    path = tmp_path / "anything"
    path.write_bytes(pack(HEADER + GROUP + RECORD % 7 + END))  # type: ignore[operator]
    ids, comms = read(path)
    assert ids == [7]
    assert comms.issues.problems == []
    assert comms.header is not None
    assert (comms.header.rank, comms.header.node) == (0, "n")
    assert [group.ranks for group in comms.groups] == [[0]]
    assert comms.end == {"reason": "exit", "step": 0, "records": 1}


def test_impossible_end_numbers_are_skipped_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.comms.jsonl"
    path.write_bytes(HEADER + GROUP + END.replace(b'"records":1', b'"records":1,"calls":18446744073709551616'))
    _, comms = read(path)
    assert comms.end == {"reason": "exit", "step": 0, "records": 1}
    assert comms.issues.problems == ["the last line has impossible numbers (calls)"]


def test_a_gzip_of_two_members_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.comms.jsonl.gz"
    members = [gzip.compress(part) for part in (HEADER + GROUP, RECORD % 0 + RECORD % 1, END)]
    path.write_bytes(b"".join(members))
    ids, comms = read(path)
    assert (ids, comms.issues.problems, comms.end is not None) == ([0, 1], [], True)
    path.write_bytes(b"".join(members) + bytes(512))  # padded to whole blocks, as on tape
    assert read(path)[1].issues.problems == []
    path.write_bytes(b"".join(members)[:-9])
    assert read(path)[1].issues.problems == ["the last gzip stream is cut off; the part before it was read"]
    path.write_bytes(b"".join(members) + b"PK")
    ids, comms = read(path)
    assert (ids, comms.end is not None) == ([0, 1], True)
    assert comms.issues.problems[0].startswith("broken gzip stream before byte ")


@given(st.integers(min_value=0, max_value=sum(map(len, WHOLE))))
def test_a_cut_file_gives_its_complete_frames_and_reports_the_cut(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rank-0.comms.jsonl.zst")
        path.write_bytes(b"".join(WHOLE)[:cut])
        ids, comms = read(path)
    edges = [sum(map(len, WHOLE[:count])) for count in range(len(WHOLE) + 1)]
    whole_frames = max(i for i, edge in enumerate(edges) if edge <= cut)
    # Of the torn frame some lines may be readable as well.
    assert ids[: [0, 0, 1, 3, 3][whole_frames]] == [[], [], [0], [0, 1, 2], [0, 1, 2]][whole_frames]
    assert (comms.end is not None) >= (cut == edges[-1])
    assert bool(comms.issues.problems) == (cut not in edges or cut == 0)


@given(st.binary(max_size=200))
def test_a_foreign_file_is_reported_without_an_exception(content: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rank-0.comms.jsonl.zst")
        path.write_bytes(content)
        ids, comms = read(path)
    assert ids == []
    assert comms.issues.problems


def test_data_before_a_damaged_frame_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.comms.jsonl.zst"
    path.write_bytes(WHOLE[0] + WHOLE[1] + b"\0garbage" + WHOLE[2])
    ids, comms = read(path)
    assert ids == [0]
    (problem,) = comms.issues.problems
    assert problem.startswith("broken zstd frame")


def test_a_missing_file_is_a_problem_not_a_crash(tmp_path: Path) -> None:
    issues = ReadIssues("x")
    assert list(read_chunks(str(tmp_path / "nowhere"), issues)) == []
    assert issues.problems == ["cannot be opened: No such file or directory"]


def test_file_names_have_rank_kind_and_window() -> None:
    assert file_name("comms", 3) == "rank-3.comms.jsonl.zst"
    assert file_name("et", 3, window=2) == "rank-3.w2.et.json.zst"
    assert temporary_name("rank-3.et.json.zst") == ".rank-3.et.json.part"
    assert [rank_of(name) for name in ("rank-12.flight.json.zst", ".rank-3.et.json.part", "rank.txt")] == [12, 3, None]


def test_a_listing_separates_known_partial_and_unknown_files(tmp_path: Path) -> None:
    names = ["rank-1.comms.jsonl.zst", "rank-0.comms.jsonl", "rank-0.w2.kineto.json.gz"]
    for name in (*names, ".rank-1.et.json.part", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "earlier-1").mkdir()
    listing = list_recording(str(tmp_path))
    found = [(file.rank, file.kind, file.window) for file in listing.files]
    assert found == [(0, "comms", 1), (0, "kineto", 2), (1, "comms", 1)]
    assert (listing.partial, listing.unrecognized) == ((".rank-1.et.json.part",), ("notes.txt",))


def test_a_missing_path_gives_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(CrossrankError, match="no such file or folder; check the path"):
        list_recording(str(tmp_path / "nowhere"))


def test_a_url_is_listed_and_read(tmp_path: Path) -> None:
    (tmp_path / "rank-0.comms.jsonl.zst").write_bytes(b"".join(WHOLE))
    (file,) = list_recording(f"file://{tmp_path}").files
    assert file.path.startswith("file://")
    assert [record.id for record in CommsFile(file.path).records()] == [0, 1, 2]


records = st.builds(
    CommRecord,
    id=st.integers(0, 1 << 53),
    op=st.sampled_from(["all_reduce", "send"]),
    c10d=st.just("allreduce_"),
    pg=st.text(max_size=5),
    bytes=st.integers(-1, 1 << 50),
    t=st.integers(0, 1 << 53),
    inputs=st.lists(st.lists(st.integers(0, 1 << 31), max_size=3), max_size=3),
    in_split=st.none() | st.lists(st.integers(0, 1 << 31), max_size=3),
    is_async=st.none() | st.booleans(),
    source=st.none() | st.text(max_size=9),
)


@given(records)
def test_a_record_survives_its_json(record: CommRecord) -> None:
    assert msgspec.json.decode(msgspec.json.encode(record), type=CommRecord) == record


def test_a_recording_in_an_archive_is_listed_and_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        archive.writestr("rank-0.comms.jsonl", HEADER + GROUP + RECORD % 7 + END)
    (file,) = list_recording(f"zip://::{tmp_path}/run.zip").files
    assert file.path == f"zip://rank-0.comms.jsonl::{tmp_path}/run.zip"
    assert [record.id for record in CommsFile(file.path).records()] == [7]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"PK\x05\x06" + b"\xff" * 18])
def test_an_invalid_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.zip").write_bytes(content)
    with pytest.raises(CrossrankError, match=r"run\.zip: cannot be reached"):
        list_recording(f"zip://::{tmp_path}/run.zip")


def test_invalid_sizes_and_ranks_in_an_archive_do_not_stop_the_listing(tmp_path: Path) -> None:
    content = (HEADER + END).decode()
    names = ["rank-0.comms.jsonl", f"rank-{'9' * 5000}.comms.jsonl"]
    refs = {f"run/{name}": ["here", 0, "many"] for name in names} | {"run/rank-1.comms.jsonl": content}
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "refs": refs}))
    listing = list_recording(f"reference://run::{tmp_path}/run.json")
    assert [(file.rank, file.size) for file in listing.files] == [(0, 0), (1, len(content))]
    assert listing.unrecognized == (names[1],)


def test_an_endless_line_does_not_fill_the_memory(tmp_path: Path) -> None:
    (tmp_path / "rank-0.comms.jsonl.zst").write_bytes(frame(HEADER, RECORD % 0, b'{"x":"' + b"y" * (300 << 20)))
    ids, comms = read(tmp_path / "rank-0.comms.jsonl.zst")
    assert ids == [0]
    assert comms.issues.problems == ["a line is longer than 16 MiB, which a real file never has"]


def test_the_first_broken_lines_are_reported_and_the_rest_counted(tmp_path: Path) -> None:
    (tmp_path / "rank-0.comms.jsonl").write_bytes(HEADER + b"?\n" * 1000 + RECORD % 0 + END)
    ids, comms = read(tmp_path / "rank-0.comms.jsonl")
    assert ids == [0]
    assert len(comms.issues.problems) == 101
    assert comms.issues.problems[-1] == "900 more lines are not comms records"


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        # in 100 bytes, out 300 bytes, 4 ranks
        ("all_reduce", 100),
        ("reduce", 100),
        ("broadcast", 100),
        ("all_gather", 300),
        ("reduce_scatter", 100),
        ("gather", 400),
        ("scatter", 1200),
        ("all_to_all", 100),
        ("send", 100),
        ("recv", 300),
        ("barrier", 0),
    ],
)
def test_each_operation_counts_its_bytes(op: str, expected: int) -> None:
    assert OPERATIONS[op].bytes(100, 300, 4) == expected


def test_the_table_has_a_row_for_every_operation_of_the_record_format() -> None:
    one_to_all = {"broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv"}
    assert set(OPERATIONS) == {"all_gather", "all_reduce", "all_to_all", "reduce_scatter"} | one_to_all


@given(st.integers(min_value=1, max_value=100_000))
def test_bus_factors_match_nccl_tests(n: int) -> None:
    for name, operation in OPERATIONS.items():
        if name == "barrier":
            assert operation.bus_factor is None
            continue
        assert operation.bus_factor is not None
        expected = {"all_reduce": 2 * (n - 1) / n}.get(name)
        if expected is None:
            expected = 1.0 if name in ("broadcast", "reduce", "send", "recv") else (n - 1) / n
        assert operation.bus_factor(n) == expected
