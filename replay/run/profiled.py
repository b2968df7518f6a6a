"""A pass under torch's profiler, as a recording's window has it: an execution trace and Kineto."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile


def profiled(run: Callable[[], object], et: Path, kineto: Path) -> None:
    """Call `run` under the profiler, and write its execution trace to `et` and its Kineto trace to `kineto`."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    observer = ExecutionTraceObserver()
    observer.register_callback(str(et))
    try:
        with profile(activities=activities, record_shapes=True, execution_trace_observer=observer) as session:
            run()
    finally:
        observer.unregister_callback()
    session.export_chrome_trace(str(kineto))
