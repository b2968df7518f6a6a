"""What a run brings back, in one folder: a summary, the logs, and what tests elsewhere are made of.

`summary.json` has each test with its outcome and seconds, and the facts that it noted. `fixtures/` has recordings,
dumps and traces of two ranks, small enough to be kept beside the tests.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import zstandard

from tests.gpu.machine import DEVICE, ROOT, crossrank

FOLDER = Path(os.environ.get("OUT") or ROOT / f"gpu-results-{DEVICE}").absolute()
FIXTURES = FOLDER / "fixtures"
_MOST_BYTES = 500_000
"""Of a file of a fixture."""


def about() -> dict[str, Any]:
    """What it ran on, and when."""
    on_gpu = DEVICE == "cuda" and torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name(0) if on_gpu else "CPU",
        "nccl": list(torch.cuda.nccl.version()) if on_gpu else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


class Summary:
    """Outcomes and facts, written after each test: a run that is cut off has what came before."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {**about(), "tests": {}}

    def note(self, test: str, **facts: object) -> None:
        self.content["tests"].setdefault(test, {}).update(facts)
        self.write()

    def write(self) -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "summary.json").write_text(json.dumps(self.content, indent=1, default=str))

    def table(self) -> list[str]:
        """A line for each test."""
        return [
            f"{one.get('outcome', '?'):<8} {one.get('seconds', 0):6.1f} s  {name}"
            for name, one in self.content["tests"].items()
        ]


def keep_log(test: str, folder: Path) -> None:
    """Keep what the programs of a test printed."""
    for output in sorted(folder.rglob("output.txt")):
        name = "-".join((test, *output.parent.relative_to(folder).parts))
        (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
        shutil.copy(output, FOLDER / "logs" / f"{name}.txt")


def keep_recording(name: str, recording: Path, *beside: Path) -> None:
    """Keep a recording, without the names of this machine, and files `beside` it."""
    target = FIXTURES / name
    shutil.rmtree(target, ignore_errors=True)
    crossrank(FOLDER / "anonymize", "anonymize", recording, "-o", target)
    shutil.rmtree(FOLDER / "anonymize")
    for path in beside:
        shutil.copy(path, target)
    for path in target.iterdir():
        if path.stat().st_size > _MOST_BYTES:
            path.unlink()
    (FIXTURES / "about.json").write_text(json.dumps(about()) + "\n")


def keep_chakra(paths: Sequence[Path]) -> None:
    """Keep Chakra traces, packed."""
    target = FIXTURES / "chakra"
    target.mkdir(parents=True, exist_ok=True)
    for path in paths:
        content = zstandard.ZstdCompressor(level=15).compress(path.read_bytes())
        if len(content) <= _MOST_BYTES:
            (target / f"{path.name}.zst").write_bytes(content)
