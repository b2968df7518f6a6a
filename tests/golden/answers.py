"""The answers of every command on one folder of traces."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from crossrank.tools.cli import main

GOLDEN = Path(__file__).parent
TRACES = (
    "cuda_sync",
    "dlrm_8gpu",
    "kineto_mi300",
    "linear_1gpu",
    "nccl_2gpu",
    "nsight_h100",
    "flight/clean",
    "flight/gloo_missing",
    "flight/missing_one",
    "flight/p2p_single_clean",
    "flight/rank_died",
)
"""Folders of public traces."""
COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", "TRACES"),
    "link": ("link", "TRACES", "-o", "OUT/linked"),
    "convert": ("convert", "TRACES", "-o", "OUT/chakra", "--simulate"),
    "check": ("check", "OUT/chakra/chakra.0.et"),
    "diagnose": ("diagnose", "TRACES"),
    "bandwidth": ("bandwidth", "TRACES"),
    "timeline": ("timeline", "TRACES", "-o", "OUT/timeline.pftrace"),
    "report": ("report", "TRACES", "-o", "OUT/report.html"),
    "replay": ("replay", "TRACES", "--dry-run"),
    "replay of one trace": ("replay", "TRACES", "--dry-run", "--one-trace"),
}


def golden_file(trace: str) -> Path:
    return GOLDEN / f"{trace.replace('/', '-')}.json"


def answers(traces: Path, out: Path) -> dict[str, Any]:
    """Command -> its exit code, what it said on stderr, and its `--json`. `out` is an empty folder."""
    return {name: _answer(words, {"TRACES": str(traces), "OUT": str(out)}) for name, words in COMMANDS.items()}


def as_text(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _answer(words: tuple[str, ...], folders: dict[str, str]) -> dict[str, Any]:
    given = []
    for word in words:
        name, _, rest = word.partition("/")
        given.append(f"{folders[name]}/{rest}".rstrip("/") if name in folders else word)
    jobs = [] if words[0] == "check" else ["--jobs", "1"]
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        code = main([*given, *jobs, "--json"])
    texts = [printed.getvalue(), said.getvalue()]
    for name, folder in folders.items():
        texts = [text.replace(folder, name) for text in texts]
    return {"exit": code, "said": texts[1].splitlines(), "answer": json.loads(texts[0]) if texts[0] else None}
