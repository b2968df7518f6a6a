"""What the lines of a job's logs say."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from crossrank.tools.traces.logs.read import JobLog, _File, read_logs
from tests.unit.traces.logs.lines import traceback, watchdog


def write(folder: Path, lines: list[str], name: str = "train.log") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_fact_has_its_line(tmp_path: Path) -> None:
    attempt = read_logs([write(tmp_path, ["step 1", *watchdog(2, 7)])]).last
    assert [(one.kind, one.origin.rank, one.quote.number) for one in attempt.facts] == [
        ("timeout", 2, 2),
        ("status", 2, 3),
    ]


def test_colors_are_taken_off_and_a_compressed_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.log.gz"
    path.write_bytes(gzip.compress("\n".join(f"\x1b[31m{line}\x1b[0m" for line in watchdog(0, 3)).encode()))
    assert [one.kind for one in read_logs([str(path)]).last.facts] == ["timeout", "status"]


def test_a_traceback_is_read_between_the_lines_of_other_ranks(tmp_path: Path) -> None:
    ours = traceback("ValueError: no batch", "[rank1]: ")
    mixed = [line for pair in zip(ours, ["[rank0]: step"] * len(ours), strict=True) for line in pair]
    (found,) = read_logs([write(tmp_path, mixed)]).last.tracebacks
    assert (found.error, found.frames[0], found.origin.rank) == (
        "ValueError: no batch",
        ("main", "/job/train.py", 7),
        1,
    )
    assert found.ended_process


@pytest.mark.parametrize(("steps", "ended"), [(0, True), (20, False)])
def test_an_exception_before_more_steps_was_handled(steps: int, ended: bool, tmp_path: Path) -> None:
    lines = traceback("ValueError: bad sample") + [f"step {number} loss 1.0" for number in range(steps)]
    (found,) = read_logs([write(tmp_path, lines, "rank-1.log")]).last.tracebacks
    assert (found.origin.rank, found.ended_process) == (1, ended)


def test_a_restart_begins_a_new_attempt(tmp_path: Path) -> None:
    restart = "I1126 09:00:06 4000 torch/distributed/elastic/agent/server/api.py:943] [default] Worker group FAILED. "
    lines = [*traceback("OSError: gone", "[rank1]: "), f"{restart}1/1 attempts left; will restart worker group"]
    first, last = read_logs([write(tmp_path, lines + watchdog(0, 3))]).attempts
    assert [one.error for one in first.tracebacks] == ["OSError: gone"]
    assert [one.kind for one in last.facts] == ["timeout", "status"]
    assert last.tracebacks == []


def test_a_folder_of_torchrun_has_the_ranks_in_its_paths(tmp_path: Path) -> None:
    path = write(tmp_path, traceback("ValueError: x"), "none_abc/attempt_1/3/stderr.log")
    first, last = read_logs([path]).attempts
    assert first.tracebacks == []
    assert [one.origin.local for one in last.tracebacks] == [3]


def test_a_long_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(b"x" * (4 << 20) + b"\n" + "\n".join([*watchdog(0, 3), ""]).encode())
    assert [one.kind for one in read_logs([str(path)]).last.facts] == ["timeout", "status"]


def test_the_last_error_of_nccl_is_part_of_the_exception(tmp_path: Path) -> None:
    lines = [
        *traceback("DistBackendError: NCCL error"),
        "ncclInvalidUsage: This usually",
        "Last error:",
        "Duplicate GPU",
    ]
    (found,) = read_logs([write(tmp_path, lines)]).last.tracebacks
    assert found.error == "DistBackendError: NCCL error (Duplicate GPU)"


def test_an_exception_that_another_one_follows_is_its_cause_only_if_a_line_links_them(tmp_path: Path) -> None:
    link = ["", "During handling of the above exception, another exception occurred:", ""]
    linked = read_logs([write(tmp_path, [*traceback("RuntimeError: a"), *link, "OSError: b"])]).last.tracebacks
    apart = read_logs([write(tmp_path, traceback("RuntimeError: a") + traceback("OSError: b"))]).last.tracebacks
    assert [(one.error, one.causes) for one in linked] == [("OSError: b", ("RuntimeError: a",))]
    assert [one.error for one in apart] == ["RuntimeError: a", "OSError: b"]


def test_quotes_name_a_file_as_it_is_to_be_shown(tmp_path: Path) -> None:
    path = write(tmp_path, watchdog(0, 3))
    assert read_logs([path], {path: "standard input"}).last.facts[0].quote.path == "standard input"


def test_the_innermost_exception_of_a_group_is_read(tmp_path: Path) -> None:
    lines = [
        "  + Exception Group Traceback (most recent call last):",
        '  |   File "/job/train.py", line 214, in <module>',
        "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)",
        "  +-+---------------- 1 ----------------",
        "    | Traceback (most recent call last):",
        '    |   File "/job/io.py", line 20, in fetch',
        "    | ValueError: bad magic",
        "    +------------------------------------",
    ]
    (found,) = read_logs([write(tmp_path, [f"[rank3]: {line}" for line in lines])]).last.tracebacks
    assert (found.error, found.frames) == ("ValueError: bad magic", (("fetch", "/job/io.py", 20),))


def test_a_traceback_in_a_box_of_rich_is_read(tmp_path: Path) -> None:
    box = """\
╭───────────── Traceback (most recent call last) ──────────────╮
│ /job/train.py:9 in main                                      │
│                                                              │
│ ❱  9 │   │   │   fetch(step)                                 │
│ ╭─ locals ─╮                                                 │
│ │ step = 0 │                                                 │
│ ╰──────────╯                                                 │
│                                                              │
│ /opt/a/path/that/is/too/long/for/one/line/of/the/box/loade   │
│ r.py:5 in fetch                                              │
╰──────────────────────────────────────────────────────────────╯
KeyError: 'image'

The above exception was the direct cause of the following exception:

╭───────────── Traceback (most recent call last) ──────────────╮
│ /job/train.py:11 in main                                     │
╰──────────────────────────────────────────────────────────────╯
OSError: no batch
"""
    (found,) = read_logs([write(tmp_path, [f"[default2]:{line}" for line in box.splitlines()])]).last.tracebacks
    assert (found.error, found.causes) == ("OSError: no batch", ("KeyError: 'image'",))
    assert found.frames == (("main", "/job/train.py", 11),)
    first = box.partition("\n\n")[0].splitlines()
    (found,) = read_logs([write(tmp_path, [f"[default2]:{line}" for line in first])]).last.tracebacks
    path = "/opt/a/path/that/is/too/long/for/one/line/of/the/box/loader.py"
    assert found.frames == (("fetch", path, 5), ("main", "/job/train.py", 9))


def test_a_log_that_ends_within_a_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("\n".join(watchdog(0, 3)))
    found = read_logs([str(path)])
    assert (found.is_cut, found.problems) == (True, [f"{path}: ends within a line; what came after it is missing"])


def test_an_exception_before_steps_that_differ_in_numbers_was_handled(tmp_path: Path) -> None:
    lines = [*traceback("ClientError: slow down", "[rank0]: "), "[rank0]: upload ok"]
    for steps, ended in ((1, True), (2, False)):
        steps_made = [f"[rank0]: step {number} loss 4.{number}" for number in range(steps)]
        (tmp_path / "train.log").write_text("\n".join([*lines, *steps_made]) + "\n")
        (found,) = read_logs([str(tmp_path / "train.log")]).last.tracebacks
        assert found.ended_process is ended


def test_an_exception_before_another_one_of_the_rank_was_handled(tmp_path: Path) -> None:
    lines = [
        *traceback("ClientError: slow down", "[rank0]: "),
        "[rank0]: again",
        *traceback("ValueError: x", "[rank0]: "),
    ]
    (tmp_path / "train.log").write_text("\n".join(lines) + "\n")
    assert [one.ended_process for one in read_logs([str(tmp_path / "train.log")]).last.tracebacks] == [False, True]


def test_a_traceback_behind_a_progress_bar_is_read(tmp_path: Path) -> None:
    first, *others = traceback("ValueError: crop", "[rank5]: ")
    (tmp_path / "train.log").write_text("\n".join([f"\rEpoch 2:  5%| 50/1000{first}", *others]) + "\n")
    (found,) = read_logs([str(tmp_path / "train.log")]).last.tracebacks
    assert (found.origin.rank, found.error) == (5, "ValueError: crop")


def test_a_traceback_keeps_the_other_prefixes_of_its_lines(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("\n".join(traceback("ValueError: x", "[default1]:[rank9]: ")) + "\n")
    (found,) = read_logs([str(tmp_path / "train.log")]).last.tracebacks
    assert (found.origin.rank, found.origin.local) == (9, 1)


def test_an_exception_of_an_unknown_rank_was_handled_if_ranks_still_make_steps(tmp_path: Path) -> None:
    for steps, ended in ((3, True), (30, False)):
        made = [f"[rank0] it {number} loss 3.{number}" for number in range(steps)]
        (tmp_path / "train.log").write_text("\n".join([*traceback("ValueError: truncated JPEG"), *made]) + "\n")
        (found,) = read_logs([str(tmp_path / "train.log")]).last.tracebacks
        assert found.ended_process is ended


def test_a_traceback_behind_other_words_continues_in_lines_without_a_prefix(tmp_path: Path) -> None:
    first, *others = traceback("OutOfMemoryError: CUDA out of memory")
    start = f"[2025-12-01 08:09:41 TP3] Scheduler hit an exception: {first}"
    (tmp_path / "server.log").write_text("\n".join([start, *others]) + "\n")
    (found,) = read_logs([str(tmp_path / "server.log")]).last.tracebacks
    assert (found.origin.rank, found.error) == (3, "OutOfMemoryError: CUDA out of memory")


@pytest.mark.parametrize("prefix", ["<trainer rank-3> | ", "2026/01/02 gpu-b rank=3 ERR ", "job.3.rank3 -> "])
def test_a_traceback_behind_a_prefix_of_no_known_form_is_read_between_other_lines(prefix: str, tmp_path: Path) -> None:
    ours = traceback("ValueError: no batch", prefix)
    other = prefix.replace("3", "4")
    mixed = ["epoch 1", *(line for one in ours for line in (one, f"{other}step"))]
    (found,) = read_logs([write(tmp_path, mixed)]).last.tracebacks
    assert (found.error, found.origin.rank, found.frames[0]) == (
        "ValueError: no batch",
        3,
        ("main", "/job/train.py", 7),
    )
    assert found.ended_process


def test_many_tracebacks_behind_times_of_their_own_are_read_in_constant_memory(tmp_path: Path) -> None:
    lines = [
        line
        for number in range(300)
        for line in traceback("ValueError: no batch", f"2026/01/02 10:{number // 60:02}:{number % 60:02} app ERR ")
    ]
    log = _File(write(tmp_path, lines), job := JobLog(), "train.log", None)
    log.read()
    assert len(job.last.tracebacks) == 300
    assert len(log._begun) + len(log._learned) <= 64
