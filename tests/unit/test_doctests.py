"""Examples in docstrings give what they say."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"crossrank": "*.py", "instrument": "**/*.py", "tools": "**/*.py", "replay": "**/*.py"}


def modules_with_examples() -> list[str]:
    paths = sorted(path for folder, pattern in FOLDERS.items() for path in (ROOT / folder).glob(pattern))
    names = [str(path.relative_to(ROOT).with_suffix("")) for path in paths if ">>> " in path.read_text()]
    return [f"crossrank/{name}".replace("crossrank/crossrank/", "crossrank/").replace("/", ".") for name in names]


@pytest.mark.parametrize("module", modules_with_examples())
def test_docstring_examples_pass(module: str) -> None:
    result = doctest.testmod(import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
