"""How much of the communication is hidden by computation, against the stand-in's log."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.busy_time import busy_ns
from tests.integration.commands import Commands
from tests.stand_in.logs import log_to, rows
from tests.stand_in.test_machine import record

FIRST, ITERATIONS = 2, 4
JOB = """
side = torch.cuda.Stream()
weights, gradients, metrics = (torch.ones(256, 256, device="cuda") for _ in range(3))
for step in range(8):
    weights = torch.relu(weights @ weights)
    reduced = [dist.all_reduce(gradients, async_op=True)]        # three kernels hide a part of it
    for _ in range(3):
        weights = torch.cos(weights)
    with torch.cuda.stream(side):
        reduced.append(dist.all_gather_into_tensor(torch.empty(512, 256, device="cuda"), metrics, async_op=True))
    for work in reduced:
        work.wait()
    weights = torch.sin(weights)
    if rank == step % 2:
        weights = torch.tanh(weights)                            # the other rank waits for this one
    crossrank.step()
torch.cuda.synchronize()
"""


def test_overlap_and_exposed_communication_match_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Commands
) -> None:
    log = log_to(tmp_path / "log", monkeypatch)
    monkeypatch.setenv("STAND_IN_KERNELS", ".=1500")
    monkeypatch.setenv("STAND_IN_NCCL_LATENCY_US", "8000")
    record(tmp_path, JOB, TRACING_WINDOW=f"{FIRST}:{FIRST + ITERATIONS}")
    said = {one["rank"]: one for one in command.json("bandwidth", tmp_path / "recording")["overlap"]["ranks"]}
    for rank in (0, 1):
        truth = of_window(log, rank)
        assert said[rank]["iterations"] == ITERATIONS
        said[rank]["exposed_ms"] += said[rank]["profiler_ms"]  # the log does not know why a kernel waits
        for name, ms in truth.items():
            assert said[rank][name] == pytest.approx(ms, rel=0.01, abs=0.01), (rank, name, said[rank], truth)
        assert 0.05 < truth["exposed_ms"] / truth["communication_ms"] < 0.9  # longer than all kernels


def of_window(log: Path, rank: int) -> dict[str, float]:
    """ms per iteration that the log has of a rank's window. An iteration begins with its matrix product, and launches
    one collective of each kind, which may begin before."""
    window = slice(FIRST, FIRST + ITERATIONS)
    kernels = [row for row in rows(log, "kernel") if row["device"] == rank]
    begins = [row["begin"] for row in kernels if "gemm" in row["name"]]
    computed = [one for one in map(span, kernels) if begins[FIRST] <= one[0] < begins[FIRST + ITERATIONS]]
    launched: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in rows(log, "communication"):
        if row["device"] == rank:
            launched[row["calls"][0]["op"]].append(span(row))
    communicated = [one for spans in launched.values() for one in spans[window]]
    ns = {
        "computation_ms": busy_ns(computed),
        "communication_ms": busy_ns(communicated),
        "exposed_ms": busy_ns(computed + communicated) - busy_ns(computed),
    }
    return {name: one / ITERATIONS / 1e6 for name, one in ns.items()}


def span(row: dict[str, Any]) -> tuple[int, int]:
    return row["begin"], row["end"]
