"""A file that is looked at while it is written gives every line that stands for good once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import zstandard

from crossrank.budget import BudgetError
from crossrank.tools.traces import growing
from crossrank.tools.traces.growing import GrowingFile, Growth


def frame(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


def looked(growth: Growth) -> tuple[bytes, bytes]:
    return growth.settled, growth.recent


def test_final_frames_are_given_once_and_the_last_two_frames_at_each_look(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.comms.jsonl.zst"
    file = GrowingFile(str(path))
    path.write_bytes(frame(b"head\n") + frame(b"clock 1\n"))
    assert looked(file.look()) == (b"", b"head\nclock 1\n")
    path.write_bytes(frame(b"head, changed\n") + frame(b"a\n") + frame(b"clock 2\n"))
    assert looked(file.look()) == (b"head, changed\n", b"a\nclock 2\n")
    assert looked(file.look()) == (b"", b"a\nclock 2\n")
    path.write_bytes(frame(b"head, changed\n") + frame(b"a\n") + frame(b"b\n") + frame(b"c\n") + frame(b"clock 3\n"))
    assert looked(file.look()) == (b"a\nb\n", b"c\nclock 3\n")


def test_an_unfinished_frame_is_left_for_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.comms.jsonl.zst"
    whole = frame(b"head\n") + frame(b"a\n") + frame(b"clock\n")
    file = GrowingFile(str(path))
    path.write_bytes(whole[:-3])
    assert looked(file.look()) == (b"", b"head\na\n")
    path.write_bytes(whole[:-9] + bytes(9))
    assert looked(file.look()) == (b"", b"head\na\n")
    path.write_bytes(whole)
    assert looked(file.look()) == (b"head\n", b"a\nclock\n")


def test_a_replaced_file_is_read_from_the_start(tmp_path: Path) -> None:
    path, other = tmp_path / "rank-0.comms.jsonl.zst", tmp_path / "other"
    path.write_bytes(frame(b"one\n") + frame(b"two\n") + frame(b"three\n"))
    file = GrowingFile(str(path))
    assert not file.look().begins_anew
    other.write_bytes(frame(b"new\n") + frame(b"a\n") + frame(b"clock\n"))
    os.replace(other, path)
    growth = file.look()
    assert (growth.begins_anew, *looked(growth)) == (True, b"new\n", b"a\nclock\n")


def test_a_long_file_is_read_in_several_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-0.comms.jsonl.zst"
    frames = [frame(b"%d\n" % number) for number in range(5)]
    path.write_bytes(b"".join(frames))
    monkeypatch.setattr(growing, "_MOST", 2 * len(frames[0]) + 1)
    file = GrowingFile(str(path))
    assert [looked(file.look()) for _ in range(3)] == [(b"0\n1\n", b""), (b"2\n3\n", b""), (b"", b"4\n")]


def test_a_small_file_with_huge_content_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.comms.jsonl.zst"
    path.write_bytes(frame(bytes(100 << 20)))
    with pytest.raises(BudgetError, match="bytes of content"):
        GrowingFile(str(path)).look()


def test_a_frame_that_expands_to_more_than_the_recorder_writes_is_refused(tmp_path: Path) -> None:
    """Random bytes between long runs: the file may have that much content, but not in one frame."""
    path = tmp_path / "rank-0.comms.jsonl.zst"
    head = frame(b"head\n")
    runs = b"".join(os.urandom(10_000).replace(b"\n", b" ") + bytes(800_000) for _ in range(120))
    path.write_bytes(head + frame(runs))
    file = GrowingFile(str(path))
    growth = file.look()
    assert (growth.goes_on, *looked(growth)) == (True, b"head\n", b"")
    for _ in range(2):
        with pytest.raises(BudgetError) as raised:
            file.look()
        assert str(raised.value) == (
            f"{path}: is refused from byte {len(head)} on: a part there has more than 67,108,864 bytes of content, far "
            "more than the recorder writes at once; `crossrank inspect` reads the whole file"
        )


def test_a_look_returns_limited_content_and_the_next_one_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing, "_MOST_CONTENT", 25)
    path = tmp_path / "rank-0.comms.jsonl.zst"
    path.write_bytes(b"".join(frame(b"%9d\n" % number) for number in range(5)))
    file = GrowingFile(str(path))
    found = [(growth.goes_on, growth.settled.split(), growth.recent.split()) for growth in (file.look(), file.look())]
    assert found == [(True, [b"0", b"1"], []), (True, [b"2", b"3"], [])]
    assert looked(file.look()) == (b"", b"%9d\n" % 4)


def test_a_small_file_with_very_many_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.comms.jsonl.zst"
    path.write_bytes(frame(b"\n" * 1_000_000))
    with pytest.raises(BudgetError, match="131,072 lines"):
        GrowingFile(str(path)).look()


def test_a_missing_file_raises_the_system_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        GrowingFile(str(tmp_path / "rank-0.comms.jsonl.zst")).look()
