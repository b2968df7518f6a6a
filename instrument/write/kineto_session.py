"""The Kineto session of the windows. torch has one per process, and crossrank leaves the user's profiler alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import orjson
import torch
import torch.autograd.profiler as autograd_profiler
import torch.distributed as dist
from torch.distributed import distributed_c10d

from crossrank.instrument.hooks import fork
from crossrank.instrument.identity.gpu import cuda_is_in_use
from crossrank.instrument.torch_dumps import nccl_dump
from crossrank.instrument.torch_private import has
from crossrank.instrument.unpatched import time

_ALL_THREADS = "profile_all_threads"
_OPTIONS = (_ALL_THREADS, "enable_cuda_sync_events", "trace_only")
"""Events of all threads and of synchronisation, no Python event objects; skipped if this torch lacks the option."""
_PATIENCE_OWN_S = 60.0
"""Longest wait at the end of a session for the stream of the thread that started it."""
_PATIENCE_OTHERS_S = 5.0
"""Longest wait, after that, for calls in other streams, which may wait for other ranks."""


class Kineto:
    """Warms up, starts and ends one Kineto session after the other."""

    def __init__(self) -> None:
        self._profiler: autograd_profiler.profile | None = None
        self.runs = False
        self.is_whole = True
        """Whether the GPU had done all of its work when the last session ended."""
        self._stream: torch.cuda.Stream | None = None
        """Stream of the thread that started the session. The thread that ends it may be new, and on the first GPU."""

    def prepare(self) -> None:
        """Warm Kineto up, unless it is warm or not available: the first start of CUPTI is slow."""
        if self._profiler is not None or not has("Kineto") or is_users_profiler_running():
            return
        profiler = _new_profiler()
        profiler._prepare_trace()
        fork.let_children_leave_at_once()
        self._profiler = profiler

    def start(self) -> bool:
        """Start, and add the metadata that `torch.profiler.profile` adds to a trace. Return False without Kineto."""
        self.prepare()
        if self._profiler is None:
            return False
        if self._profiler.use_device is not None:
            self._stream = torch.cuda.current_stream()
        try:
            self._profiler._start_trace()
        except Exception:
            autograd_profiler._run_on_profiler_stop()
            self.drop_prepared()
            raise
        self.runs = True
        torch.autograd._add_metadata_json("record_shapes", "1")
        if dist.is_initialized() and has("Kineto's groups"):
            information = {
                "backend": dist.get_backend(),
                "rank": dist.get_rank(),
                "world_size": dist.get_world_size(),
                "pg_count": dist.get_pg_count(),
                "pg_config": distributed_c10d._get_all_pg_configs(),
            }
            torch.autograd._add_metadata_json("distributedInfo", orjson.dumps(information, default=int).decode())
        return True

    def end(self) -> autograd_profiler.profile | None:
        """End the running session and return it for its export. Return None if none runs."""
        profiler, self._profiler = self._profiler, None
        runs, self.runs = self.runs, False
        if profiler is None or not runs:
            return None
        try:
            self.is_whole = True
            if profiler.use_device is not None and self._stream is not None:
                # The profiler would wait for the GPU without a limit. A peer may make the send for a pending receive
                # only after the end of its own window: two ranks would wait for each other.
                self.is_whole = _wait_for_gpu(self._stream)
                profiler.use_device = None
            profiler.__exit__(None, None, None)
        except Exception:
            if profiler.kineto_results is None:  # it failed before the session stopped, e.g. by a CUDA error
                torch.autograd._disable_profiler()
                autograd_profiler._run_on_profiler_stop()
            raise
        return profiler

    def drop_prepared(self) -> None:
        """Drop a session that was warmed up and will not be used.

        Only a running session can end. While one is warm, no other can start, not even the user's.
        """
        if self._profiler is None or self.runs:
            return
        profiler, self._profiler = self._profiler, None
        torch.autograd._enable_profiler(profiler.config(), profiler.kineto_activities)
        torch.autograd._disable_profiler()


def _wait_for_gpu(stream: torch.cuda.Stream) -> bool:
    """Wait, within limits, until the GPU has done its work; return whether it has. Raises CUDA's errors.

    Only on this thread: the query of an event may wait, with the interpreter's lock, for a thread that synchronises.
    """
    own = torch.cuda.Event()
    own.record(stream)
    if not _holds_within(own.query, _PATIENCE_OWN_S) or not _holds_within(_no_call_is_open, _PATIENCE_OTHERS_S):
        return False
    stream.synchronize()
    torch.cuda.synchronize(stream.device)
    return True


def _holds_within(condition: Callable[[], bool], seconds: float) -> bool:
    until, pause = time.monotonic() + seconds, 1e-4
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return True


def _no_call_is_open() -> bool:
    """Return whether torch's flight recorder has no unfinished NCCL call; True if it keeps no calls."""
    dump = nccl_dump()
    entries = orjson.loads(dump(True, True)).get("entries", []) if dump is not None else []
    return all(entry.get("retired") for entry in entries)


def is_users_profiler_running() -> bool:
    """Return whether the user's profiler runs. Valid only while ours does not run."""
    return bool(autograd_profiler._is_profiler_enabled or torch.autograd._profiler_enabled())


def ends_on_any_thread() -> bool:
    """Return whether another thread than the first may end a session; older torches cannot."""
    return has("Kineto") and _is_option(_ALL_THREADS)


def _new_profiler() -> autograd_profiler.profile:
    """The profiler below `torch.profiler.profile`.

    That one imports inductor at its start, which takes seconds during training. It also imports modules whose default
    arguments keep the process group alive after its destruction.
    """
    inductor = sys.modules.get("torch._inductor.config")
    if inductor is not None and inductor.triton.cudagraphs:
        # CUPTI cannot start again under CUDA graphs: torch.profiler.profile keeps it alive in the same way.
        os.environ["DISABLE_CUPTI_LAZY_REINIT"] = "1"
        os.environ["TEARDOWN_CUPTI"] = "0"
    config: Any = torch._C._profiler._ExperimentalConfig
    return autograd_profiler.profile(
        use_cpu=True,
        use_device="cuda" if cuda_is_in_use() else None,
        record_shapes=True,
        use_kineto=True,
        experimental_config=config(**{name: True for name in _OPTIONS if _is_option(name)}),
    )


def _is_option(name: str) -> bool:
    return name in (torch._C._profiler._ExperimentalConfig.__init__.__doc__ or "")
