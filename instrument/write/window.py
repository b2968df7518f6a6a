"""Execution trace and Kineto over a window of iterations, each window its own pair of whole files.

A window comes from the configuration or from a block in the script. Inside it every recorded call runs in a profiler
range `crossrank#<id>`, so both traces have its id. Every step runs in a range `ProfilerStep#<number>`, as
`torch.profiler` makes it: Chakra's linker and HolisticTraceAnalysis find steps by it. A window costs time (a small CPU
op takes about 13 times as long under the execution trace), so keep it to a few steps.

torch has one execution-trace observer and one Kineto session per process. Where the user has either, it is left
alone and one line says what the window therefore lacks; where the user's profiler starts inside a window, ours
ends there (`hooks.profiler`) and keeps what it has.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.autograd.profiler as autograd_profiler
import torch.distributed as dist

from crossrank.errors import one_line
from crossrank.instrument import threads
from crossrank.instrument.facts import Recording
from crossrank.instrument.identity.gpu import cuda_is_in_use, is_capturing
from crossrank.instrument.identity.process_groups import process_group_config
from crossrank.instrument.log import log
from crossrank.instrument.record.recorder import Recorder
from crossrank.instrument.torch_private import has
from crossrank.instrument.unpatched import threading, time
from crossrank.instrument.write.flight_dump import FlightDumps
from crossrank.instrument.write.kineto_session import Kineto, ends_on_any_thread, is_users_profiler_running
from crossrank.instrument.write.nvtx_markers import NvtxMarkers
from crossrank.instrument.write.rank_files import RankFiles, create
from crossrank.recording import EXECUTION_TRACE, KINETO, file_name
from crossrank.text import writable

PROCESS_GROUPS = "## process_group:init ##"
"""Name of the node that carries the process groups, as torch itself writes it."""
NSYS_RANGE = "window"
"""NVTX range around a window for `nsys --capture-range=nvtx --nvtx-capture=window@crossrank`."""
_STEP_BACK_NS = 1_000_000
"""A wall clock that is only slowed down goes back by less from step to step."""
_PATIENCE_DYING = 10.0
"""Seconds that the end of a window may take in a process that dies: it waits for the GPU, which may be stuck."""
_FILES_PATIENCE = 60.0
"""Seconds that the end of a recording waits for the files of windows that are being compressed."""


class WindowOwner(Recording, Protocol):
    """What windows see of their session."""

    recorder: Recorder
    files: RankFiles | None
    dumps: FlightDumps
    nvtx: NvtxMarkers | None

    def begin(self) -> None:
        """Begin the files of the process group that exists now, unless they are begun."""

    def find_groups(self) -> None:
        """Take in every process group that torch knows."""

    def note_window(self, edge: dict[str, Any], /) -> None:
        """A window begins or ends: for the comms file, and for Nsight Systems."""


def _wall_offset() -> int:
    """Return by how many ns the wall clock is ahead of the monotonic one."""
    return time.time_ns() - time.monotonic_ns()


class Windows:
    """The windows of one session, one after the other."""

    def __init__(self, session: WindowOwner) -> None:
        self._session = session
        self._reported = session.failures.reported
        self._number = 0  # of the latest window; the files' first one has 1
        self._is_open = False
        self._kineto = Kineto()
        self._observed: Path | None = None
        self._nsys_range: int | None = None
        self._step: autograd_profiler.record_function | None = None
        self._step_thread = 0
        self._finishing: list[threading.Thread] = []
        self._wall_offset = _wall_offset()
        self._waits_in = -1
        """The step in which no window opens, because the wall clock stepped back."""

    def begin(self) -> None:
        """New files begin."""
        self._number = 0

    def open_if_due(self) -> None:
        window = self._session.facts.config.window
        step = self._session.recorder.step
        if window is not None and window.holds(step) and step != self._waits_in:
            self._open()

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Record ET and Kineto inside the block."""
        opened = False
        with self._reported("a window is missing"):
            self._session.begin()
            opened = self._open()
        try:
            yield
        finally:
            if opened:
                self.close()

    def pass_edge(self, ended: int) -> None:
        """End the window that ends with iteration `ended`, and begin the one that begins with the next."""
        session, window, recorder = self._session, self._session.facts.config.window, self._session.recorder
        # At an edge Kineto synchronises the GPU, which breaks a CUDA graph that is being captured: the edge waits for
        # the end of an iteration in which none is.
        if session.closing:
            return
        capturing = is_capturing()
        steps_back = window is not None and self._wall_clock_steps_back()
        if window is not None and recorder.window_open and not window.continues(ended) and not capturing:
            self.close(ended)
        if recorder.window_open:
            with self._reported("steps have no range in the traces"):
                self._begin_step()
        elif window is None or capturing:
            return
        elif window.holds(recorder.step):
            if steps_back:
                self._waits_in = recorder.step
                log.warning(
                    "crossrank: the window waits for a step: the wall clock steps back, and torch's profiler ends the "
                    "process if it does so in a window"
                )
                return
            session.begin()
            self._open()
        elif window.holds(recorder.step + 1) and session.files is not None and not session.facts.config.nsys:
            with self._reported("Kineto was not warmed up"):
                self._kineto.prepare()

    def _wall_clock_steps_back(self) -> bool:
        """Whether the wall clock has stepped back since the last call."""
        before, self._wall_offset = self._wall_offset, _wall_offset()
        return self._wall_offset < before - _STEP_BACK_NS

    def note_process_groups(self) -> None:
        """Put the process groups with their global ranks into the execution trace of the window that is open."""
        if self._session.recorder.window_open:
            with self._reported("a process group is missing in the execution trace"):
                self._note_process_groups()

    @property
    def traces_execution(self) -> bool:
        """Whether an execution trace of ours is being written."""
        return self._observed is not None

    def make_way(self) -> None:
        """A profiler of the user's is about to start: end the Kineto session that is ours, if any."""
        if self._is_open and self._kineto.runs:
            log.warning(
                "crossrank: your profiler starts inside window %d; the window's Kineto trace ends here", self._number
            )
        with self._reported("the Kineto trace of a window is missing"):
            self._close_kineto()

    def close(self, step: int | None = None) -> None:
        """End the window that is open, if any, and dump the flight recorder unless the session ends."""
        if not self._is_open:
            return
        self.note_end(step)
        with self._reported("a window is incomplete"):
            self._close()
        if not self._session.closing:
            self._session.dumps.write("window")

    def note_end(self, step: int | None = None) -> None:
        """Write the end of the window that is open, if any, into the comms file."""
        self._session.recorder.window_open = False
        if self._is_open:
            with self._reported("the end of a window is not recorded"):
                self._note("close", step)

    def finish(self, *, dies: bool) -> None:
        """End the window that is open, if any, and wait until the files of all windows are in place.

        In a process that dies this has a limit.
        """
        if self._session.files is None:
            return

        def work() -> None:
            with self._reported("a window is incomplete"):
                self._close()
            with self._reported("the files of a window are unfinished"):
                self._kineto.drop_prepared()
                for thread in self._finishing:
                    thread.join(_FILES_PATIENCE)
                self._finishing.clear()

        thread = threads.start("window", work) if dies and ends_on_any_thread() else None
        if thread is None:
            work()
            return
        thread.join(_PATIENCE_DYING)
        if thread.is_alive():
            log.warning(
                "crossrank: window %d is incomplete: the process dies, and closing the window took over %g s",
                self._number,
                _PATIENCE_DYING,
            )

    def warn_if_none_opened(self) -> None:
        window = self._session.facts.config.window
        if self._session.facts.rank == 0 and window is not None and self._number == 0:
            log.warning(
                "crossrank: the window %d:%d never opened: the recording ended in step %d",
                window.start,
                window.stop,
                self._session.recorder.step,
            )

    def abandon(self) -> None:
        """In a forked child: keep the parent's execution trace free of this process's copy of its buffer.

        The observer's stream cannot be reached, and flushes what it inherited when the child exits; so the
        descriptor below it is pointed elsewhere.
        """
        self._session.recorder.window_open = False
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

    def _open(self) -> bool:
        """Open the next window, where one can open now; returns whether it is open."""
        session = self._session
        if session.files is None:
            if not dist.is_initialized():
                log.warning("crossrank: a window needs a process group; call it after init_process_group")
            return False
        if self._is_open:
            return False
        if is_capturing():
            log.warning("crossrank: cannot open a window while a CUDA graph is captured; open it before or after")
            return False
        with self._reported("a window is incomplete"):  # what has started by then is part of it
            session.find_groups()
            self._number += 1
            self._is_open = True
            if session.facts.config.nsys:
                self._start_nsys()
            else:
                self._start_traces(session.files)
            self._note("open")
        session.recorder.window_open = self._is_open
        return self._is_open

    def _start_nsys(self) -> None:
        """Have Nsight Systems capture: by its profiler's API where CUDA is in use, and by a range."""
        markers = self._session.nvtx
        if cuda_is_in_use():
            torch.cuda.profiler.start()
        elif markers is None:
            self._lacks("Nsight range", "TRACING_NSYS=1 needs a process that uses CUDA or runs under nsys with nvtx")
        if markers is not None:
            self._nsys_range = markers.begin(NSYS_RANGE)

    def _start_traces(self, files: RankFiles) -> None:
        try:
            if has("execution trace"):
                self._start_execution_trace(files)
        except OSError as error:
            self._lacks("execution trace", one_line(error))
        if not self._kineto.start() and has("Kineto"):
            self._lacks("Kineto trace", "your profiler is running, and continues undisturbed")
        self._begin_step()

    def _start_execution_trace(self, files: RankFiles) -> None:
        path = files.temporary(file_name(EXECUTION_TRACE, self._session.facts.rank, self._number))
        os.close(create(path))  # raises here rather than in torch, where a failed open blocks every later observer
        path.unlink()
        with _named_for_torch(path) as name:
            torch._C._profiler._add_execution_trace_observer(name)
        # Its result is True also where another observer is registered; only the file shows it. Removing "ours" then
        # would remove that one, and its owner's next call would crash.
        if not path.exists():
            self._lacks("execution trace", "another execution trace observer is registered, and stays registered")
            return
        self._observed = path
        torch._C._profiler._enable_execution_trace_observer()
        self._note_process_groups()

    def _note_process_groups(self) -> None:
        if self._observed is not None and has("ranges"):
            handle = torch.autograd._record_function_with_args_enter(PROCESS_GROUPS, process_group_config())
            torch.autograd._record_function_with_args_exit(handle)

    def _begin_step(self) -> None:
        """An iteration begins here, and the one before it ends. A profiler of the user's gets no range of ours."""
        self._end_step()
        if self._kineto.runs or (self._observed is not None and has("Kineto") and not is_users_profiler_running()):
            self._step = autograd_profiler.record_function(f"ProfilerStep#{self._session.recorder.step}")
            self._step_thread = threading.get_ident()
            self._step.__enter__()

    def _end_step(self) -> None:
        step, self._step = self._step, None
        # A range ends on the thread that began it. Where another one ends the window, that one is stuck.
        if step is not None and self._step_thread == threading.get_ident():
            step.__exit__(None, None, None)

    def _close(self) -> None:
        """End the window that is open, if any. Its files are compressed and put in place in the background.

        If one part fails, the others are ended: an observer or a profiler that is left open crashes the process at
        exit.
        """
        if not self._is_open:
            return
        self._is_open = False
        if self._session.facts.config.nsys:
            if self._session.nvtx is not None and self._nsys_range is not None:
                self._session.nvtx.end(self._nsys_range)
                self._nsys_range = None
            if cuda_is_in_use():
                torch.cuda.profiler.stop()
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_execution_trace)
            stack.callback(self._close_kineto)
            stack.callback(self._end_step)

    def _close_execution_trace(self) -> None:
        path, self._observed = self._observed, None
        if path is None:
            return
        try:
            torch._C._profiler._disable_execution_trace_observer()
        finally:
            torch._C._profiler._remove_execution_trace_observer()  # only now is the file valid JSON
        self._finish(EXECUTION_TRACE)

    def _close_kineto(self) -> None:
        profiler, files = self._kineto.end(), self._session.files
        if profiler is None or files is None:
            return
        if not self._kineto.is_whole:
            log.warning(
                "crossrank: window %d ends while its GPU is still at work, maybe waiting for another rank: "
                "unfinished calls have no kernel in the Kineto trace",
                self._number,
            )
        path = files.temporary(file_name(KINETO, self._session.facts.rank, self._number))
        # Kineto writes another file, and renames it. crossrank makes both first, because Kineto would follow a link,
        # and wait for the other end of a pipe.
        for one in (path, path.with_name(f"{path.name}.tmp")):
            os.close(create(one))
        with _named_for_torch(path) as name:
            profiler.export_chrome_trace(name)
        self._finish(KINETO)

    def _finish(self, kind: str) -> None:
        """Put a whole trace in place, on a thread where one can be started."""
        files, name = self._session.files, file_name(kind, self._session.facts.rank, self._number)
        if files is None:
            return

        lost = f"cannot write {name}, which is left as {files.temporary(name)}"
        thread = threads.start(name, lambda: files.finish(name), lost)
        if thread is None:
            with self._reported(lost):
                files.finish(name)
        else:
            self._finishing = [*filter(threading.Thread.is_alive, self._finishing), thread]

    def _lacks(self, what: str, why: str) -> None:
        log.warning("crossrank: window %d has no %s: %s", self._number, what, why)

    def _note(self, edge: str, step: int | None = None) -> None:
        session = self._session
        step = session.recorder.step if step is None else step
        moment = {"window": self._number, "edge": edge, "step": step, "t": time.monotonic_ns()}
        session.note_window(moment)


@contextlib.contextmanager
def _named_for_torch(path: Path) -> Iterator[str]:
    """The name of a file for torch, which takes UTF-8 alone: in a folder whose name is none, by its descriptor."""
    name = str(path)
    if name == writable(name):
        yield name
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
