"""Execution trace and Kineto over a window of iterations, each window its own pair of whole files.

Inside a window every recorded call runs in a profiler range `crossrank#<id>`, so that it is found by its id in both
traces, and every iteration in a range `ProfilerStep#<number>`, by which Chakra's linker and HolisticTraceAnalysis find
iterations, as `torch.profiler` makes it. A window costs (a small CPU op takes about 13 times as long under the
execution trace), so keep it to a few iterations.

torch has one execution-trace observer and one Kineto session per process. Where the user has either, it is left
alone and one line says what the window therefore lacks; where the user's profiler starts inside a window, ours
ends there (`hooks.profiler`) and keeps what it has.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.autograd.profiler as autograd_profiler
import torch.distributed as dist
from torch.distributed import distributed_c10d

from crossrank.errors import one_line
from crossrank.instrument import threads
from crossrank.instrument.hooks import fork
from crossrank.instrument.identity.gpu import cuda_is_in_use
from crossrank.instrument.identity.process_groups import process_group_config
from crossrank.instrument.torch_private import has
from crossrank.instrument.write.nvtx_markers import NvtxMarkers
from crossrank.instrument.write.rank_files import RankFiles, create
from crossrank.recording import EXECUTION_TRACE, KINETO, file_name

log = logging.getLogger("crossrank")

PROCESS_GROUPS = "## process_group:init ##"
"""Name of the node that carries the process groups, as torch itself writes it."""
NSYS_RANGE = "window"
"""NVTX range around a window for `nsys --capture-range=nvtx --nvtx-capture=window@crossrank`."""


class WindowRecorder:
    """Records the windows of one rank, one after the other."""

    def __init__(self, files: RankFiles, rank: int, nsys: bool, markers: NvtxMarkers | None = None) -> None:
        """`nsys`: windows drive what Nsight Systems captures, by `markers` and, where CUDA is in use, by its
        profiler's API."""
        self._files = files
        self._rank = rank
        self._nsys = nsys
        self._markers = markers
        self._nsys_range: int | None = None
        self.number = 0
        """The latest window, counted from 1."""
        self._kineto: autograd_profiler.profile | None = None
        self._kineto_runs = False
        self._observed: Path | None = None
        self._finishing: list[threading.Thread] = []
        self._step: autograd_profiler.record_function | None = None
        self._step_thread = 0
        self.is_open = False

    def prepare(self) -> None:
        """Warm Kineto up, one iteration before a window opens: CUPTI takes its time at the first start."""
        if self._nsys or self._kineto is not None or not has("Kineto") or _profiler_of_user():
            return
        profiler = _kineto_profiler()
        profiler._prepare_trace()
        fork.let_children_leave_at_once()
        self._kineto = profiler

    def open(self, step: int) -> int:
        """Start the next window, in iteration `step`, and return its number, counted from 1.

        Raises what torch raises; whatever has begun by then is part of the window.
        """
        self.number += 1
        self.is_open = True
        if self._nsys:
            if cuda_is_in_use():
                torch.cuda.profiler.start()
            elif self._markers is None:
                self._lacks(
                    "Nsight range", "TRACING_NSYS=1 needs a process that uses CUDA or runs under nsys with nvtx"
                )
            if self._markers is not None:
                self._nsys_range = self._markers.begin(NSYS_RANGE)
            return self.number
        try:
            self._open_execution_trace()
        except OSError as error:
            self._lacks("execution trace", one_line(error))
        if self._kineto is None:
            self.prepare()
        if self._kineto is not None:
            self._start_kineto(self._kineto)
            _add_metadata()
        elif has("Kineto"):
            self._lacks("Kineto trace", "a profiler of yours is running, and is left alone")
        self.begin_step(step)
        return self.number

    def begin_step(self, step: int) -> None:
        """Iteration `step` begins here, and the one before it ends. A profiler of the user's gets no range of ours."""
        self._end_step()
        if not self.is_open:
            return
        if self._kineto_runs or (self._observed is not None and has("Kineto") and not _profiler_of_user()):
            self._step = autograd_profiler.record_function(f"ProfilerStep#{step}")
            self._step_thread = threading.get_ident()
            self._step.__enter__()

    def _end_step(self) -> None:
        step, self._step = self._step, None
        # A range ends on the thread that began it. Where another one ends the window, that one is stuck.
        if step is not None and self._step_thread == threading.get_ident():
            step.__exit__(None, None, None)

    def close(self) -> None:
        """End the window. Its files are compressed and put in place in the background: see `wait`.

        Whatever fails, the others are ended: an observer or a profiler that is left open crashes the process at exit.
        """
        if not self.is_open:
            return
        self.is_open = False
        if self._nsys:
            if self._markers is not None and self._nsys_range is not None:
                self._markers.end(self._nsys_range)
                self._nsys_range = None
            if cuda_is_in_use():
                torch.cuda.profiler.stop()
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_execution_trace)
            stack.callback(self._close_kineto)
            stack.callback(self._end_step)

    def wait(self, timeout: float) -> None:
        """Wait until the files of all closed windows are in place."""
        for thread in self._finishing:
            thread.join(timeout)
        self._finishing.clear()

    def make_way(self) -> None:
        """A profiler of the user's is about to start: end ours."""
        if self._kineto is None:
            return
        if self.is_open:
            log.warning(
                "crossrank: a profiler of yours starts inside window %d; its Kineto trace ends here", self.number
            )
        try:
            self._close_kineto()
        except Exception as error:
            log.warning("crossrank: cannot end the Kineto trace: %s", one_line(error))

    def drop_prepared(self) -> None:
        """Let go of a Kineto session that was warmed up and will not be used.

        Only one that runs can be ended, and while one is warmed up no other can be made, by the user either.
        """
        if self._kineto is None or self._kineto_runs:
            return
        profiler, self._kineto = self._kineto, None
        torch.autograd._enable_profiler(profiler.config(), profiler.kineto_activities)
        torch.autograd._disable_profiler()

    def note_process_groups(self) -> None:
        """Put the process groups with their global ranks into the execution trace."""
        if self._observed is not None and has("ranges"):
            handle = torch.autograd._record_function_with_args_enter(PROCESS_GROUPS, process_group_config())
            torch.autograd._record_function_with_args_exit(handle)

    def abandon(self) -> None:
        """In a forked child: keep the parent's execution trace free of this process's copy of its buffer.

        The observer's stream cannot be reached, and flushes what it inherited when the child exits; so the
        descriptor below it is pointed elsewhere.
        """
        if self._observed is None:
            return
        target = str(self._observed)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for name in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{name}") == target:
                    os.dup2(nowhere, int(name))
            except OSError:
                continue  # the descriptor that listed the folder
        os.close(nowhere)

    def _open_execution_trace(self) -> None:
        if not has("execution trace"):
            return
        path = self._files.temporary(file_name(EXECUTION_TRACE, self._rank, self.number))
        os.close(create(path))  # raises here rather than in torch, where a failed open blocks every later observer
        path.unlink()
        torch._C._profiler._add_execution_trace_observer(str(path))
        # Its result is True also where another observer is registered; only the file tells. Removing "ours" then
        # would remove that one, and its owner's next call would crash.
        if not path.exists():
            self._lacks("execution trace", "another execution trace observer is registered, and is left alone")
            return
        self._observed = path
        torch._C._profiler._enable_execution_trace_observer()
        self.note_process_groups()

    def _close_execution_trace(self) -> None:
        path, self._observed = self._observed, None
        if path is None:
            return
        try:
            torch._C._profiler._disable_execution_trace_observer()
        finally:
            torch._C._profiler._remove_execution_trace_observer()  # only now is the file valid JSON
        self._finish(path, file_name(EXECUTION_TRACE, self._rank, self.number))

    def _start_kineto(self, profiler: autograd_profiler.profile) -> None:
        try:
            profiler._start_trace()
        except Exception:
            autograd_profiler._run_on_profiler_stop()
            self.drop_prepared()
            raise
        self._kineto_runs = True

    def _close_kineto(self) -> None:
        profiler, self._kineto = self._kineto, None
        runs, self._kineto_runs = self._kineto_runs, False
        if profiler is None or not runs:
            return
        try:
            profiler.__exit__(None, None, None)
        except Exception:
            if profiler.kineto_results is None:  # it failed before the session was stopped (a CUDA error, say)
                torch.autograd._disable_profiler()
                autograd_profiler._run_on_profiler_stop()
            raise
        name = file_name(KINETO, self._rank, self.number)
        path = self._files.temporary(name)
        path.unlink(missing_ok=True)  # whatever it is: torch would wait for the other end of a pipe
        profiler.export_chrome_trace(str(path))
        self._finish(path, name)

    def _finish(self, path: Path, name: str) -> None:
        def work() -> None:
            try:
                self._files.finish(path, name)
            except Exception as error:
                log.warning("crossrank: cannot write %s: %s; it is left as %s", name, one_line(error), path)

        thread = threads.start(name, work)
        if thread is None:
            work()
        else:
            self._finishing = [*filter(threading.Thread.is_alive, self._finishing), thread]

    def _lacks(self, what: str, why: str) -> None:
        log.warning("crossrank: window %d has no %s: %s", self.number, what, why)


def _profiler_of_user() -> bool:
    """Whether a profiler that is not ours runs. Asked only while ours does not."""
    return bool(autograd_profiler._is_profiler_enabled or torch.autograd._profiler_enabled())


def _kineto_profiler() -> autograd_profiler.profile:
    """The profiler below `torch.profiler.profile`.

    That one imports inductor when it starts, for seconds and in the middle of training, and with it modules whose
    default arguments keep the process group alive after its destruction.
    """
    inductor = sys.modules.get("torch._inductor.config")
    if inductor is not None and inductor.triton.cudagraphs:
        # CUPTI cannot be started again under CUDA graphs: torch.profiler.profile keeps it the same way.
        os.environ["DISABLE_CUPTI_LAZY_REINIT"] = "1"
        os.environ["TEARDOWN_CUPTI"] = "0"
    return autograd_profiler.profile(
        use_cpu=True,
        use_device="cuda" if cuda_is_in_use() else None,
        record_shapes=True,
        use_kineto=True,
        experimental_config=_experimental_config(),
    )


def _add_metadata() -> None:
    """What `torch.profiler.profile` adds to a trace and tools look for: the job's ranks and process groups."""
    torch.autograd._add_metadata_json("record_shapes", "1")
    if not dist.is_initialized() or not has("Kineto's groups"):
        return
    groups = distributed_c10d._get_all_pg_configs()
    information = {
        "backend": dist.get_backend(),
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "pg_count": dist.get_pg_count(),
        "pg_config": groups,
    }
    torch.autograd._add_metadata_json("distributedInfo", orjson.dumps(information, default=int).decode())


_ALL_THREADS = "profile_all_threads"


def _experimental_config() -> Any:
    """All threads, synchronisation events, no Python event objects; what this torch does not know is left out."""
    wanted = (_ALL_THREADS, "enable_cuda_sync_events", "trace_only")
    config: Any = torch._C._profiler._ExperimentalConfig
    return config(**{name: True for name in wanted if _is_option(name)})


def ends_on_any_thread() -> bool:
    """Whether a window may be ended on another thread than the one that began it; older torches cannot."""
    return has("Kineto") and _is_option(_ALL_THREADS)


def _is_option(name: str) -> bool:
    return name in (torch._C._profiler._ExperimentalConfig.__init__.__doc__ or "")
