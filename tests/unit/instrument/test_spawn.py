"""Which commands are followed into the Python program that they start."""

from __future__ import annotations

import os
import sys
import zipapp
from pathlib import Path

import pytest

from crossrank.instrument.hooks.spawn import follow_command

PYTHON = sys.executable


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


@pytest.mark.parametrize(
    ("command", "before", "after"),
    [
        (["PYTHON", "SCRIPT"], ["PYTHON"], ["SCRIPT"]),
        (["PYTHON", "-u", "-X", "dev", "-Wignore", "SCRIPT", "-m", "x"], 5, ["SCRIPT", "-m", "x"]),
        (["PYTHON", "-m", "train", "--lr"], ["PYTHON"], ["-m", "train", "--lr"]),
        (["PYTHON", "-mtrain"], ["PYTHON"], ["-m", "train"]),
        (["PYTHON", "-Bum", "train"], ["PYTHON", "-Bu"], ["-m", "train"]),
        (["PYTHON", "-cpass", "-c"], ["PYTHON"], ["-c", "pass", "-c"]),
        (("PYTHON", "SCRIPT"), ["PYTHON"], ["SCRIPT"]),
        ([b"PYTHON", b"SCRIPT"], ["PYTHON"], ["SCRIPT"]),
    ],
)
def test_a_python_program_is_followed(
    command: object, before: list[str] | int, after: list[str], script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known(word: str | bytes) -> str:
        return os.fsdecode(word).replace("PYTHON", PYTHON).replace("SCRIPT", script)

    assert isinstance(command, list | tuple)
    followed = follow_command([known(word) for word in command])
    assert followed is not None
    index = followed.index("-c")
    if isinstance(before, int):
        assert index == before
    else:
        assert followed[:index] == [known(word) for word in before]
    assert followed[index + 2 :] == [known(word) for word in after]


WITH_SCRIPT = (["-i", "SCRIPT"], ["-x", "SCRIPT"])


@pytest.mark.parametrize(
    "options",
    [[], *(["-" + name] for name in ("", "m", "c", "V", "-version", "h", "X")), *WITH_SCRIPT, ["-Z", "-c"]],
)
def test_a_command_without_a_program_is_unchanged(options: list[str], script: str) -> None:
    assert follow_command([PYTHON, *(word.replace("SCRIPT", script) for word in options)]) is None


@pytest.mark.parametrize("command", [None, "", [], PYTHON, b"python", "python train.py", ["ninja", "-c", "x"], [""]])
def test_other_programs_are_started_unchanged(command: object) -> None:
    assert follow_command(command) is None


def test_another_interpreter_is_started_unchanged(tmp_path: Path, script: str) -> None:
    other = tmp_path / "python"
    other.symlink_to(PYTHON)
    assert follow_command([str(other), script]) is None
    assert follow_command(["python", script], {"PATH": str(tmp_path)}) is None
    assert follow_command(["python", script], {"PATH": os.path.dirname(PYTHON)}) is not None
    assert follow_command(["python", script], {}) is None


def test_only_source_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("")
    (tmp_path / "code.pyc").write_text("")
    zipapp.create_archive(tmp_path / "package", tmp_path / "app.pyz", interpreter="/usr/bin/env python3")
    worker = tmp_path / "torch" / "_inductor" / "compile_worker" / "__main__.py"
    worker.parent.mkdir(parents=True)
    worker.write_text("")
    for name in ("package", "app.pyz", "code.pyc", "nowhere.py", str(worker)):
        assert follow_command([PYTHON, name], folder=tmp_path) is None


def test_a_script_is_searched_in_the_folder_of_the_child(tmp_path: Path, script: str) -> None:
    assert follow_command([PYTHON, "train.py"]) is None
    assert follow_command([PYTHON, "train.py"], folder=tmp_path) is not None
