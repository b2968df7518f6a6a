"""The same questions asked of crossrank, HolisticTraceAnalysis, TraceLens and torchfrtrace, each beside the truth.

    PEERS_PYTHON=PYTHON python -m benchmarks.beside_peers TRACES

TRACES is a folder with dlrm_8gpu, nccl_2gpu, kineto_mi300, kineto_deepep, flight and flight_real; PYTHON has
HolisticTraceAnalysis and TraceLens. What a GPU did is checked by arithmetic on the intervals of the raw file, over what
the tool looked at: crossrank looks at iterations, TraceLens at the whole trace, HolisticTraceAnalysis at all iterations
but the last. Who hangs is checked by the truth that is kept beside the dumps.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import crossrank
from crossrank.tools.output.console import print_table

GPU = ("dlrm_8gpu", "nccl_2gpu", "kineto_mi300", "kineto_deepep")
HANGS = ("flight/clean", "flight/missing_one", "flight/rank_died", "flight/size_mismatch", "flight_real/gpu_error")
_COMMUNICATES = re.compile(r"nccl\w*Kernel|dpsk::ep::")
_SAYS = re.compile(r"missing ranks: |Missing dump files|mismatch", re.IGNORECASE)
_ITERATION = re.compile(r"ProfilerStep#\d+")
Span = tuple[float, float]

_TRACELENS = """
import json, sys
from TraceLens import TreePerfAnalyzer
found = TreePerfAnalyzer.from_file(sys.argv[1]).get_df_gpu_timeline()
print(json.dumps(dict(zip(found["type"], found["time ms"]))))
"""
_HTA = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
trace = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/")
print(json.dumps(trace.get_temporal_breakdown(visualize=False).to_dict("records")[0]))
"""


def union(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def within(spans: Iterable[Span], windows: Sequence[Span]) -> list[Span]:
    """The parts of spans that lie in one of the windows."""
    parts = ((max(begin, first), min(end, last)) for begin, end in spans for first, last in windows)
    return [(begin, end) for begin, end in parts if end > begin]


class Raw:
    """The kernels of a Kineto trace, read without crossrank. Times are us of the file."""

    def __init__(self, path: Path) -> None:
        content = json.loads(gzip.decompress(path.read_bytes()))
        self.base_us = content.get("baseTimeNanoseconds", 0) / 1000
        events = [one for one in content["traceEvents"] if one.get("ph") == "X"]
        kernels = [one for one in events if one.get("cat") == "kernel"]
        spans = [(one["ts"], one["ts"] + one["dur"], bool(_COMMUNICATES.search(one["name"]))) for one in kernels]
        self.computation = union((begin, end) for begin, end, communicates in spans if not communicates)
        self.communication = union((begin, end) for begin, end, communicates in spans if communicates)
        device = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        self.whole = (min(one["ts"] for one in device), max(one["ts"] + one["dur"] for one in device))
        marks = {one["name"]: one["ts"] for one in events if _ITERATION.fullmatch(one["name"])}
        self.iterations, self.last_iteration = len(marks), max(marks.values(), default=0.0)

    def answer(self, windows: Sequence[Span]) -> tuple[float, float]:
        """(ms of computation, ms of communication that no computation hides) in the windows."""
        computed = union(within(self.computation, windows))
        either = union([*computed, *within(self.communication, windows)])
        return length(computed) / 1000, (length(either) - length(computed)) / 1000


def of_crossrank(path: Path, raw: Raw) -> tuple[tuple[float, float], tuple[float, float]]:
    """(what it says, the truth over the same iterations)"""
    frame = crossrank.load(path).overlap().frame
    begins = frame["began_ns"].to_list()
    ends = (frame["began_ns"] + frame["duration_ns"]).to_list()
    windows = [(begin / 1000 - raw.base_us, end / 1000 - raw.base_us) for begin, end in zip(begins, ends, strict=True)]
    said = frame["computation_ns"].sum() / 1e6, frame["exposed_ns"].sum() / 1e6
    return said, raw.answer(windows)


def asked(program: str, path: Path) -> dict[str, Any]:
    """What a peer answers; empty where it fails."""
    done = subprocess.run(
        [os.environ["PEERS_PYTHON"], "-W", "ignore", "-c", program, str(path.resolve())],
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2] or "{}") if not done.returncode else {}
    return found


def gpus(traces: Path) -> None:
    rows = []
    for name in GPU:
        path = traces / name / "rank-0.kineto.json.gz"
        raw = Raw(path)
        said, true = of_crossrank(path, raw)
        rows.append((name, "crossrank, iterations", *_both(said[0], true[0]), *_both(said[1], true[1])))
        found, true = asked(_TRACELENS, path), raw.answer([raw.whole])
        answers = found.get("computation_time"), found.get("exposed_comm_time")
        total, whole = found.get("total_time", 0.0), (raw.whole[1] - raw.whole[0]) / 1000
        if abs(total - whole) < 0.01 * whole:
            rows.append((name, "TraceLens, whole trace", *_both(answers[0], true[0]), *_both(answers[1], true[1])))
        else:
            span = f"TraceLens, {total:.1f} of {whole:.1f} ms"
            rows.append((name, span, _ms(answers[0]), "-", "not compared", _ms(answers[1]), "-", "not compared"))
        computed = asked(_HTA, path).get("compute_time(us)")
        # Of several iterations it leaves out the last one.
        true = raw.answer([(raw.whole[0], raw.last_iteration if raw.iterations > 1 else raw.whole[1])])
        answer = _both(computed and computed / 1000, true[0])
        rows.append((name, "HTA, all iterations but the last", *answer, "-", "-", "not asked"))
    heads = ("trace", "who, over what", "#computation", "#truth", "", "#exposed", "#truth", "")
    print_table("What rank 0's GPU did, ms", heads, rows)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}"


def _both(said: float | None, true: float) -> tuple[str, str, str]:
    right = said is not None and abs(said - true) <= max(0.01, 0.005 * true)
    return _ms(said), _ms(true), "right" if right else "no answer" if said is None else "differs"


def hangs(traces: Path) -> None:
    rows = []
    for name in HANGS:
        folder = traces / name
        truth = json.loads((folder / "expected.json").read_text())
        found = crossrank.load(folder).diagnose()
        named = sorted({text for text in found.frame.filter(what="cause")["culprit_ranks"] if text})
        prefix = next(one.name for one in folder.iterdir() if one.suffix != ".json").rpartition("_")[0] + "_"
        done = subprocess.run(
            [str(Path(sys.executable).with_name("torchfrtrace")), str(folder), "-p", prefix],
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line for line in (done.stdout + done.stderr).splitlines() if _SAYS.search(line)]
        said = (
            "; ".join(dict.fromkeys(line.strip()[-60:] for line in lines[:3]))
            or f"nothing, exit code {done.returncode}"
        )
        expected = truth.get("verdict", ""), truth.get("suspect_ranks", "")
        rows.append((name, f"{expected[0]} {expected[1]}", f"{found.text} {', '.join(named)}", said))
    print_table("Who hangs", ("dumps", "truth", "crossrank", "torchfrtrace"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    arguments = parser.parse_args()
    gpus(arguments.traces)
    hangs(arguments.traces)


if __name__ == "__main__":
    main()
