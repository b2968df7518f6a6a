"""A part of a recording is a recording: what is kept, what is left out, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crossrank.recording import CommsFile, ReadIssues, file_name, rank_folder, read_lines
from crossrank.tools.cli import main
from crossrank.tools.traces.comms import read_comms

SECOND = 1_000_000_000
WALL = 1_780_000_000 * SECOND
STEP = 10 * SECOND
GROUP = {"group": {"pg": "0", "size": 2, "ranks": [0, 1], "backend": "gloo"}}
END = {"end": {"reason": "exit", "step": 5, "calls": 5, "records": 5, "dropped": 2, "exceptions": ["x"]}}


def call(number: int, step: int) -> dict[str, Any]:
    """The call of an iteration that begins at `STEP` times its number, one second later."""
    about = {"op": "all_reduce", "c10d": "allreduce_", "pg": "0", "bytes": 8, "dtype": "float", "in": [[2]]}
    return {"id": number, "seq": number + 1, "t": step * STEP + SECOND, "step": step, **about}


def lines_of(rank: int, world: int = 2, steps: int = 5, end: dict[str, Any] | None = END) -> list[dict[str, Any]]:
    """A job of an iteration each ten seconds, with a window over the iterations 2 and 3. Its wall clock runs 1 ppm
    faster than the monotonic one."""
    header = {"schema": "crossrank-comms 1", "rank": rank, "world_size": world, "host": "h", "node": "n"}
    found: list[dict[str, Any]] = [{"header": header | {"clock": {"t": 0, "wall": WALL}, "later": 1}}, GROUP]
    for step in range(steps):
        begin = step * STEP
        found += [{"step": {"step": step, "t": begin}}] if step else []
        if step == 2:
            found.append({"window": {"window": 1, "edge": "open", "step": 2, "t": begin}})
        found += [call(step, step), {"wait": {"t": begin + 2 * SECOND, "took": 5, "thread": 1, "id": step}}]
        found.append({"wait": {"t": begin, "took": 7, "thread": 1, "id": step - 1} if step else {**LATE}})
        found += [{"ran": {"id": step, "t": begin + SECOND, "took": 9}}, {"counters": {"t": begin + 1, "gpu": step}}]
        found.append({"clock": {"t": begin + 3 * SECOND, "wall": WALL + (begin + 3 * SECOND) // 1_000_000 * 1_000_001}})
        if step == 3:
            found.append({"window": {"window": 1, "edge": "close", "step": 3, "t": begin + 4 * SECOND}})
    return [*found, {"step": {"step": steps, "t": steps * STEP}}, *([end] if end else [])]


LATE = {"t": 5, "took": 7, "thread": 1}


def write(folder: Path, rank: int, lines: list[dict[str, Any]], more: bytes = b"") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    (folder / f"rank-{rank}.comms.jsonl").write_bytes(text.encode() + more)


def job(folder: Path, *ranks: list[dict[str, Any]]) -> Path:
    for rank, lines in enumerate(ranks or (lines_of(0), lines_of(1))):
        write(folder, rank, lines)
        for kind in ("et", "kineto"):
            (folder / file_name(kind, rank)).write_bytes(f"{kind} {rank}".encode())
        (folder / file_name("flight", rank)).write_bytes(b"dump")
    (folder / "verdict.json").write_bytes(b"{}")
    return folder


def minimize(source: Path, steps: str) -> Path:
    output = source.parent / "part"
    assert main(["minimize", str(source), "--steps", steps, "-o", str(output)]) == 0
    return output


def lines_in(path: Path) -> list[dict[str, Any]]:
    issues = ReadIssues(str(path))
    found = [json.loads(line) for line in read_lines(str(path), issues)]
    assert issues.problems == []
    return found


def test_lines_of_the_part_are_kept_unchanged(tmp_path: Path) -> None:
    part = minimize(job(tmp_path / "job"), "2:4")
    kept = lines_in(part / file_name("comms", 0))
    header, end = kept[0]["header"], kept[-1]["end"]
    shown = (header["part"], header["later"], header["clock"])
    assert shown == ([2, 4], 1, {"t": 2 * STEP, "wall": WALL + 20_000_020_000})
    assert end == {"reason": "disable", "step": 4, "calls": 2, "records": 2, "dropped": 2, "exceptions": []}
    original = [line for line in lines_of(0) if line not in ({"header": header}, END)]
    of_part = kept[1:-2]
    assert of_part == [line for line in original if line in of_part]
    assert [line["id"] for line in of_part if "id" in line] == [2, 3]
    assert [line["step"]["step"] for line in of_part if "op" not in line and "step" in line] == [2, 3, 4]
    # The wait of iteration 2 for the call of iteration 1 is of no call of the part, that of 4 for that of 3 is.
    assert [line["wait"]["id"] for line in of_part if "wait" in line] == [2, 3, 2, 3]
    assert [line["ran"]["id"] for line in of_part if "ran" in line] == [2, 3]
    assert [line["counters"]["gpu"] for line in of_part if "counters" in line] == [2, 3]


def test_a_part_keeps_the_original_times(tmp_path: Path) -> None:
    source = job(tmp_path / "job")
    part = minimize(source, "2:4")
    whole = read_comms(str(source / "rank-1.comms.jsonl"), 1)
    cut = read_comms(str(part / file_name("comms", 1)), 1)
    assert list(cut.calls.called) == list(whole.calls.called)[2:4]
    assert cut.steps == [one for one in whole.steps if 2 <= one[0] <= 4]
    assert cut.span == (whole.steps[1][1], whole.steps[3][1])


def test_only_windows_with_all_their_steps_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = job(tmp_path / "job")
    assert (minimize(source, "2:4") / file_name("kineto", 1)).read_bytes() == b"kineto 1"
    cut = tmp_path / "cut"
    assert main(["minimize", str(source), "--steps", "3:4", "-o", str(cut)]) == 0
    assert [path.name for path in sorted(cut.iterdir())] == [file_name("comms", 0), file_name("comms", 1)]
    assert "window 1 of rank 0-1 (steps 2 to 3): only part of it is in the part" in capsys.readouterr().out


def test_dumps_are_kept_if_a_rank_ends_in_the_part(tmp_path: Path) -> None:
    hung = lines_of(1, steps=3, end=None)[:-1]
    part = minimize(job(tmp_path / "job", lines_of(0), hung), "1:4")
    assert (part / file_name("flight", 0)).read_bytes() == (part / file_name("flight", 1)).read_bytes() == b"dump"
    assert (part / "verdict.json").read_bytes() == b"{}"
    died = CommsFile(str(part / file_name("comms", 1)))
    assert [record.id for record in died.records()] == [1, 2]
    assert died.end is None


def test_later_dumps_are_skipped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = minimize(job(tmp_path / "job"), "1:2")
    assert not (part / file_name("flight", 0)).exists()
    assert not (part / "verdict.json").exists()
    assert "2 flight-recorder dump(s), because every rank continued after these steps" in capsys.readouterr().out


def test_a_part_with_all_steps_equals_the_recording(tmp_path: Path) -> None:
    part = minimize(job(tmp_path / "job"), "0:99")
    kept = lines_in(part / file_name("comms", 0))
    assert kept[1:-1] == lines_of(0)[1:-1]
    assert kept[-1]["end"] == END["end"]


def test_ranks_of_a_large_job_keep_their_folders(tmp_path: Path) -> None:
    source = tmp_path / "job"
    write(source / rank_folder(9, 128), 9, lines_of(9, world=128))
    assert (minimize(source, "2:3") / rank_folder(9, 128) / file_name("comms", 9)).exists()


def test_inspect_reports_a_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = minimize(job(tmp_path / "job"), "2:4")
    main(["inspect", str(part)])
    shown = capsys.readouterr().out
    assert "steps      4 ended, 2 with a recorded start\n           steps 2:4 of a longer recording\n" in shown


def test_unreadable_lines_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "job"
    write(source, 0, lines_of(0), b'{"id":broken}\n')
    write(source, 1, lines_of(1))
    assert main(["minimize", str(source), "--steps", "2:4", "-o", str(tmp_path / "part")]) == 1
    assert "rank-0.comms.jsonl: 1 line(s) unreadable, skipped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("7:9", "no call in steps 7:9; its calls are in steps 0 to 4"),
        ("4:2", "'4:2' is not a range START:STOP with START < STOP"),
    ],
)
def test_missing_or_invalid_steps_print_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: str, said: str
) -> None:
    words = ["minimize", str(job(tmp_path / "job")), "--steps", steps, "-o", str(tmp_path / "part")]
    try:
        code = main(words)
    except SystemExit as error:
        code = int(error.code or 0)
    assert (code, said in capsys.readouterr().err) == (2, True)


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = job(tmp_path / "job")
    before = sorted(source.iterdir())
    assert main(["minimize", str(source), "--steps", "2:4", "-o", str(source)]) == 2
    assert f"{source}: is not empty; choose a new folder with -o" in capsys.readouterr().err
    assert sorted(source.iterdir()) == before


def test_traces_without_comms_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / file_name("flight", 0)).write_bytes(b"dump")
    assert main(["minimize", str(tmp_path), "--steps", "2:4", "-o", str(tmp_path / "part")]) == 2
    assert "has no comms file, so the steps of its calls are unknown" in capsys.readouterr().err


def test_a_refused_run_leaves_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = job(tmp_path / "job")
    assert main(["minimize", str(source), "--steps", "7:9", "-o", str(tmp_path / "part")]) == 2
    assert main(["minimize", str(source), "--steps", "2:4", "-o", str(tmp_path / "part")]) == 0
    (tmp_path / "file").touch()
    capsys.readouterr()
    assert main(["minimize", str(source), "--steps", "2:4", "-o", str(tmp_path / "file")]) == 2
    assert "no call" not in capsys.readouterr().err


def test_a_rank_without_a_comms_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = job(tmp_path / "job")
    (source / "rank-1.comms.jsonl").unlink()
    assert main(["minimize", str(source), "--steps", "2:4", "-o", str(tmp_path / "part")]) == 1
    assert "the files of rank 1, which has no comms file" in capsys.readouterr().out


def test_files_of_unmarked_windows_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unmarked = [line for line in lines_of(0) if "window" not in line]
    source = job(tmp_path / "job", unmarked, lines_of(1))
    assert main(["minimize", str(source), "--steps", "2:4", "-o", str(tmp_path / "part")]) == 0
    assert "2 file(s) of windows whose steps are not in the comms file" in capsys.readouterr().out


def test_dumps_are_skipped_if_a_rank_is_unreadable(tmp_path: Path) -> None:
    source = job(tmp_path / "job")
    (source / "rank-1.comms.jsonl").write_text("garbage")
    assert main(["minimize", str(source), "--steps", "1:2", "-o", str(tmp_path / "part")]) == 1
    assert not (tmp_path / "part" / file_name("flight", 0)).exists()
