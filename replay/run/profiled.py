"""A pass under torch's profiler, as a recording's window has it: an execution trace and Kineto."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd.profiler import profile
from torch.profiler import ExecutionTraceObserver


def profiled(run: Callable[[], object], et: Path, kineto: Path) -> None:
    """Call `run` under the profiler, and write its execution trace to `et` and its Kineto trace to `kineto`."""
    observer = ExecutionTraceObserver()
    observer.register_callback(str(et))
    try:
        # Not torch.profiler's own: it imports the compiler when it starts, which takes seconds.
        with profile(use_device="cuda" if torch.cuda.is_initialized() else None, record_shapes=True) as session:
            observer.start()
            run()
            observer.stop()
    finally:
        observer.unregister_callback()
    session.export_chrome_trace(str(kineto))
