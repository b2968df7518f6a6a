"""Whose exception it is that comes up through the recorder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import crossrank.comm
from crossrank.instrument import config
from crossrank.instrument.script_errors import raised_by_script

CALL = """
def call(rest):
    if not rest:
        raise ValueError("x")
    rest[0](rest[1:])
"""


def _raised_in(*files: str) -> Exception:
    """An exception that was raised in the last of these files and came up through the others."""
    functions = []
    for file in files:
        names: dict[str, Any] = {}
        exec(compile(CALL, file, "exec"), names)
        functions.append(names["call"])
    with pytest.raises(ValueError, match="x") as caught:
        functions[0](functions[1:])
    # Without the frame of this function, which the recorder would not have above it.
    return caught.value.with_traceback(caught.tb.tb_next)


OURS = config.__file__
GROUND = crossrank.comm.__file__


@pytest.mark.parametrize(
    "files",
    [
        (OURS,),
        (OURS, GROUND),
        (OURS, str(Path(OURS).resolve())),
        (OURS, msgspec.__file__),
        (OURS, "nvtx/_lib/lib.pyx"),
        (OURS, "/env/lib/python3.12/site-packages/pynvml.py"),
    ],
)
def test_a_failure_of_the_recorder_or_its_libraries_is_ours(files: tuple[str, ...]) -> None:
    assert not raised_by_script(_raised_in(*files))


@pytest.mark.parametrize(
    "script",
    [
        "/home/me/train.py",
        "/env/lib/python3.12/site-packages/timeouts/handler.py",
        str(Path(OURS).resolve().parents[1] / "train.py"),  # beside a checkout's folders
        "<ipython-input-3>",
    ],
)
def test_a_failure_of_a_script_handler_is_not_ours(script: str) -> None:
    assert raised_by_script(_raised_in(OURS, script))
