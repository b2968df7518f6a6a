"""The same execution traces replayed by crossrank and by PARAM's replayer, in turns.

    PARAM=CHECKOUT python -m benchmarks.beside_param [--pairs N]

CHECKOUT is a checkout of facebookresearch/param; PARAM_PYTHON names a Python that has torch and what its replayer
imports (pydot, intervaltree). The traces are those of two ranks with all_reduces of 256 floats, in the newest schema
and with all that PARAM reads, made here because it reads no trace of gloo. What each reports as end to end of a pass is
divided by the calls: of PARAM the mean of its passes, of crossrank the median.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CALLS = 1000
RANKS = 2
PASSES = 5
_FLAGS = {"rf_id": 0, "fw_parent": 0, "seq_id": -1, "scope": 0, "tid": 1, "fw_tid": 0}
_GROUP = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "group_count": 1}
_TYPES = [
    "GenericList[Tensor(float)]",
    "Tuple[Int,Bool]",
    "Tuple[String,String]",
    "Int",
    "String",
    *["GenericList[]"] * 2,
    *["Int"] * 3,
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs (5)")
    arguments = parser.parse_args()
    checkout = os.environ.get("PARAM")
    if not checkout:
        raise SystemExit("set PARAM to a checkout of facebookresearch/param")
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(RANKS):
            Path(folder, f"rank-{rank}.json").write_text(json.dumps(trace()))
        pairs = [(crossrank(folder), param(folder, checkout)) for _ in range(arguments.pairs)]
    print(f"{CALLS} all_reduces of 256 floats on {RANKS} gloo ranks, {PASSES} passes, us per call, end to end")
    for name, values in zip(("crossrank", "PARAM"), zip(*pairs, strict=True), strict=True):
        print(f"  {name:<12} {statistics.median(values):>10.0f} ({min(values):.0f}..{max(values):.0f})")
    ratios = sorted(other / one for one, other in pairs)
    print(f"  PARAM / crossrank: {statistics.median(ratios):.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f})")


def crossrank(folder: str) -> float:
    words = [sys.executable, "-m", "crossrank", "replay", folder, "--json", "--repeat", str(PASSES)]
    report = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)
    return float(report["end_to_end_us"]["p50"]) / CALLS


def param(folder: str, checkout: str) -> float:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = [os.environ.get("PARAM_PYTHON", sys.executable), "-m", "et_replay.tools.comm_replay"]
    words += ["--trace-path", folder, "--trace-type", "et", "--backend", "gloo", "--device", "cpu"]
    words += ["--num-replays", str(PASSES)]
    place = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            words,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": checkout},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    output, *_ = [process.communicate()[0] for process in started]
    found = re.search(r"([\d.]+) per iter in avg", output)
    if found is None:
        raise SystemExit(f"PARAM did not replay:\n{output[-2000:]}")
    return float(found[1]) / CALLS


def trace() -> dict[str, Any]:
    """An execution trace with the process group and the calls."""
    members = {**_GROUP, "ranks": list(range(RANKS)), "group_size": RANKS}
    nodes = [
        node(1, "[pytorch|profiler|execution_trace|process]", [], [], []),
        node(2, "## process_group:init ##", [json.dumps([members])], [[]], ["String"]),
    ]
    for number in range(CALLS):
        values = [[[10, 11, 0, 256, 4, "cpu"]], [number + 1, False], ["0", "default_pg"], 0, "allreduce", [], [], 0, 1]
        shapes: list[Any] = [[[256]], [[], []], [[], []], *[[]] * 7]
        nodes.append(
            node(number + 3, "record_param_comms", [*values, RANKS], shapes, _TYPES)
            | {"outputs": sides([[[10, 11, 0, 256, 4, "cpu"]]], [[[256]]], _TYPES[:1])}
        )
        nodes[-1]["attrs"] += [
            {"name": name, "type": "uint64" if isinstance(value, int) else "string", "value": value}
            for name, value in {
                "collective_name": "allreduce",
                "dtype": "Float",
                "in_msg_nelems": 256,
                "out_msg_nelems": 256,
                "in_split_size": "[]",
                "out_split_size": "[]",
                "global_rank_start": 0,
                "global_rank_stride": 1,
                "pg_name": "0",
                "pg_desc": "default_pg",
                "pg_size": RANKS,
            }.items()
        ]
    start = {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "time": "2026-01-01 00:00:00", "start_ts": 1}
    return start | {"nodes": nodes, "finish_ts": 2}


def node(number: int, name: str, values: list[Any], shapes: list[Any], types: list[str]) -> dict[str, Any]:
    attributes = [{"name": flag, "type": "uint64", "value": value} for flag, value in _FLAGS.items()]
    attributes += [
        {"name": text, "type": "string", "value": ""} for text in ("op_schema", "kernel_backend", "kernel_file")
    ]
    made = {"id": number, "name": name, "ctrl_deps": 1, "attrs": attributes}
    return made | {"inputs": sides(values, shapes, types), "outputs": sides([], [], [])}


def sides(values: list[Any], shapes: list[Any], types: list[str]) -> dict[str, Any]:
    return {"values": values, "shapes": shapes, "types": types, "strides": [[]] * len(shapes)}


if __name__ == "__main__":
    main()
