"""The answers of every command on one folder of traces."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

from crossrank.tools.cli import main
from tests.golden.contents import contents
from tests.unit.traces.nsight.exports import write_exports

GOLDEN = Path(__file__).parent
SEEDS = GOLDEN.parent / "fuzz" / "seeds"
SMALL = ("recording", "flight", "replay", "gpu", "exports")
"""Folders of small real files beside the tests, and exports of Nsight Systems that are made."""
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
    "convert": ("convert", "TRACES", "-o", "OUT/chakra"),
    "convert for more ranks": ("convert", "TRACES", "-o", "OUT/grown", "--grow-to", "16", "--dedupe"),
    "simulate": ("simulate", "TRACES", "--leave-one-out"),
    "simulate elsewhere": ("simulate", "TRACES", "--inter", "50GB/s,8us", "--intra", "300GB/s,2us", "--compute", "0.5"),
    "convert for a simulator": ("convert", "TRACES", "-o", "OUT/lowered", "--lower", "astra-sim", "--deps", "data"),
    "convert without the host": ("convert", "TRACES", "-o", "OUT/gpu", "--nodes", "gpu", "--group-node"),
    "check": ("check", "OUT/chakra/chakra.0.et"),
    "diagnose": ("diagnose", "TRACES"),
    "bandwidth": ("bandwidth", "TRACES"),
    "bandwidth by all": ("bandwidth", "TRACES", "--by", "op,group,size,locality,source", "--line-rate", "50GB/s"),
    "timeline": ("timeline", "TRACES", "-o", "OUT/timeline.pftrace"),
    "report": ("report", "TRACES", "-o", "OUT/report.html"),
    "export": ("export", "TRACES", "-o", "OUT/tables", "--format", "csv"),
    "replay": ("replay", "TRACES", "--dry-run"),
    "replay of one trace": ("replay", "TRACES", "--dry-run", "--one-trace"),
    "replay as recorded": ("replay", "TRACES", "--dry-run", "--pace", "recorded", "--save-plan", "OUT/plan.json"),
    "replay on more ranks": ("replay", "TRACES", "--dry-run", "--nproc", "16", "--save-plan", "OUT/more.json"),
    "replay of half": ("replay", "TRACES", "--dry-run", "--scale-bytes", "0.5", "--save-plan", "OUT/half.json"),
}


def golden_file(trace: str) -> Path:
    return GOLDEN / f"{trace.replace('/', '-')}.json"


def answers(traces: Path, out: Path) -> dict[str, Any]:
    """Command -> its exit code, what it said on stderr, and its `--json`; and what is in the files that were
    written. `out` is an empty folder."""
    found = {name: answer(words, {"TRACES": str(traces), "OUT": str(out)}) for name, words in COMMANDS.items()}
    return found | {"files": contents(out, traces)}


def answers_on_a_copy(name: str, folder: Path) -> dict[str, Any]:
    """`answers` on one of `SMALL`, with an empty `folder` for the copy and for what is written."""
    if name == "exports":
        (folder / "traces").mkdir()
        write_exports(folder / "traces", 3, world=4)
    else:
        shutil.copytree(SEEDS / name, folder / "traces")
    (folder / "out").mkdir()
    return answers(folder / "traces", folder / "out")


def as_text(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def answer(words: tuple[str, ...], folders: dict[str, str]) -> dict[str, Any]:
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
