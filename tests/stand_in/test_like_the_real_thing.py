"""What PyTorch writes on the stand-in has the shape of what it writes on GPUs: Kineto traces and dumps with NCCL."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from crossrank.tools.traces.flight.dump import read_flight_dump
from crossrank.tools.traces.flight.entries import Entry
from tests.integration.traces import load
from tests.stand_in.test_machine import record
from tests.stand_in.test_recording import TRAINING
from tests.unit.graph.linking.public_traces import needs_traces, public

_OF_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_runtime", "cuda_sync")
_OF_OLD_VERSIONS = {"queued", "est. achieved occupancy %", "Process Group Description"}

_OF_NCCL = re.compile(r"ncclDevKernel_(AllReduce_Sum|Broadcast|AllGather)_\w+\(ncclDevKernelArgsStorage<")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    record(folder, TRAINING, TRACING_WINDOW="2:4")
    return folder / "recording"


@needs_traces
@pytest.mark.parametrize("trace", ["nccl_2gpu/rank-0", "dlrm_8gpu/rank-0", "cuda_sync/event_sync"])
def test_gpu_events_have_the_arguments_of_real_gpu_events(trace: str, recording: Path) -> None:
    real = arguments(json.loads(gzip.decompress(Path(public(f"{trace}.kineto.json.gz")).read_bytes())))
    ours = arguments(load(recording, "kineto"))
    for kind in real.keys() & ours.keys():
        assert real[kind] - ours[kind] <= _OF_OLD_VERSIONS, kind
    assert {("kernel", "", False), ("cuda_runtime", "", False)} <= real.keys() & ours.keys()


def arguments(trace: dict[str, Any]) -> dict[tuple[str, str, bool], set[str]]:
    """Kind of event of a GPU, and whether it communicates -> names of arguments."""
    found: dict[tuple[str, str, bool], set[str]] = defaultdict(set)
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in _OF_GPU:
            what = event["name"] if event["cat"] == "cuda_sync" else ""
            communicates = "Collective name" in event.get("args", {})
            found[event["cat"], what, communicates].update(event.get("args", {}))
    return found


def test_correlation_ids_join_launches_to_kernels_and_nccl_kernels_have_real_names(recording: Path) -> None:
    events = load(recording, "kineto")["traceEvents"]
    launches = {
        event["args"]["correlation"]: event["name"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    kernels = [event for event in events if event.get("cat") == "kernel"]
    in_window = [kernel for kernel in kernels if kernel["args"]["correlation"] in launches]
    assert sum("nccl" in kernel["name"] for kernel in in_window) == 2
    for kernel in in_window:
        nccl = kernel["name"].startswith("nccl")
        assert launches[kernel["args"]["correlation"]] == ("cuLaunchKernelEx" if nccl else "cudaLaunchKernel")
        if nccl:
            assert _OF_NCCL.match(kernel["name"])


@needs_traces
def test_a_dump_has_the_fields_of_nccl_dumps(recording: Path) -> None:
    real, ours = (
        next(iter(read_flight_dump(path).entries))
        for path in (public("flight_real/gpu_error/_dump_0"), str(recording / "rank-0.flight.json.zst"))
    )
    assert given(real) - given(ours) <= {"frames"}  # torch writes them where its compiler is loaded


def given(entry: Entry) -> set[str]:
    return {name for name in Entry.__struct_fields__ if getattr(entry, name) not in (None, (), "", ("", ""))}
