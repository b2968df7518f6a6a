"""Files are written whole, under a temporary name that nobody can have put anything under."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crossrank.atomic_file import whole_file


def test_a_link_under_a_guessed_temporary_name_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (".report.html.part", ".report.html.0.part", "report.html.part"):
        (tmp_path / name).symlink_to(victim)
    with whole_file(tmp_path / "report.html") as temporary:
        temporary.write_text("page")
    assert victim.read_text() == "precious"
    assert (tmp_path / "report.html").read_text() == "page"
    assert not (tmp_path / "report.html").is_symlink()


def test_two_writers_of_one_file_have_different_temporary_names(tmp_path: Path) -> None:
    with whole_file(tmp_path / "a") as first, whole_file(tmp_path / "a") as second:
        assert first != second
        second.write_text("second")
        first.write_text("first")
    assert (tmp_path / "a").read_text() == "first"


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), whole_file(tmp_path / "a"):
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_file_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with whole_file(tmp_path / "a") as temporary:
            temporary.write_text("x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
