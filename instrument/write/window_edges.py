"""When a window opens and closes: the iterations that the configuration names, and blocks of the script's own."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist

from crossrank.instrument import threads
from crossrank.instrument.identity.gpu import is_capturing
from crossrank.instrument.write.window import WindowRecorder, ends_on_any_thread

if TYPE_CHECKING:
    from crossrank.instrument.session import Session

log = logging.getLogger("crossrank")

_PATIENCE_DYING = 10.0
"""Seconds that the end of a window may take in a process that dies: it waits for the GPU, which may be stuck."""
_FILES_PATIENCE = 60.0
"""Seconds that the end of a recording waits for the files of windows that are being compressed."""


class Windows:
    """The windows of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._reported = session.failures.reported
        self._recorder: WindowRecorder | None = None

    def begin(self) -> None:
        """New files begin: windows are numbered from 1."""
        session = self._session
        if session.files is not None:
            self._recorder = WindowRecorder(session.files, session.rank, session.config.nsys, session.nvtx)

    def open_if_due(self) -> None:
        window = self._session.config.window
        if window is not None and window.holds(self._session.recorder.step):
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
        session, window, windows = self._session, self._session.config.window, self._recorder
        recorder = session.recorder
        # At an edge Kineto synchronises the GPU, which breaks a CUDA graph that is being captured: the edge waits for
        # the end of an iteration in which none is.
        if session.closing:
            return
        capturing = is_capturing()
        if window is not None and recorder.window_open and not window.continues(ended) and not capturing:
            self.close(ended)
        if recorder.window_open and windows is not None:
            with self._reported("iterations have no range in the traces"):
                windows.begin_step(recorder.step)
        elif window is None or capturing:
            return
        elif window.holds(recorder.step):
            session.begin()
            self._open()
        elif window.holds(recorder.step + 1) and windows is not None:
            with self._reported("Kineto was not warmed up"):
                windows.prepare()

    def note_process_groups(self) -> None:
        """Put a new process group into the execution trace of the window that is open, if any."""
        if self._session.recorder.window_open and self._recorder is not None:
            with self._reported("a process group is missing in the execution trace"):
                self._recorder.note_process_groups()

    def make_way(self) -> None:
        """A profiler of the user's is about to start: end the Kineto session that is ours, if any."""
        if self._recorder is not None:
            self._recorder.make_way()

    def close(self, step: int | None = None) -> None:
        """End the window that is open, if any, and dump the flight recorder unless the session ends."""
        windows = self._recorder
        if windows is None or not windows.is_open:
            return
        self.note_end(step)
        with self._reported("a window is incomplete"):
            windows.close()
        if not self._session.closing:
            self._session.dumps.write("window")

    def note_end(self, step: int | None = None) -> None:
        """Write the end of the window that is open, if any, into the comms file."""
        self._session.recorder.window_open = False
        if self._recorder is not None and self._recorder.is_open:
            with self._reported("the end of a window is not recorded"):
                self._note("close", self._recorder.number, step)

    def finish(self, *, dies: bool) -> None:
        """End the window that is open, if any, and wait until the files of all windows are in place.

        In a process that dies this has a limit.
        """
        windows = self._recorder
        if windows is None:
            return

        def work() -> None:
            with self._reported("a window is incomplete"):
                windows.close()
            with self._reported("the files of a window are not in place"):
                windows.drop_prepared()
                windows.wait(timeout=_FILES_PATIENCE)

        if not dies or not ends_on_any_thread():
            work()
        elif not _ends_within(_PATIENCE_DYING, work):
            log.warning(
                "crossrank: window %d is incomplete: the process dies, and its end took longer than %g s",
                windows.number,
                _PATIENCE_DYING,
            )

    def warn_if_none_opened(self) -> None:
        window = self._session.config.window
        if self._session.rank == 0 and window is not None and (self._recorder is None or self._recorder.number == 0):
            log.warning(
                "crossrank: the window %d:%d never opened: the recording ended in iteration %d",
                window.start,
                window.stop,
                self._session.recorder.step,
            )

    def abandon(self) -> None:
        """In a forked child: leave the parent's window to the parent."""
        self._session.recorder.window_open = False
        if self._recorder is not None:
            self._recorder.abandon()

    def _open(self) -> bool:
        session, windows = self._session, self._recorder
        if windows is None:
            if not dist.is_initialized():
                log.warning("crossrank: a window needs a process group; call it after init_process_group")
            return False
        if windows.is_open:
            return False
        if is_capturing():
            log.warning("crossrank: no window opens while a CUDA graph is captured; open it before or after")
            return False
        with self._reported("a window is incomplete"):
            session.groups.add_all()
            self._note("open", windows.open(session.recorder.step))
        session.recorder.window_open = windows.is_open
        return windows.is_open

    def _note(self, edge: str, number: int, step: int | None = None) -> None:
        session = self._session
        step = session.recorder.step if step is None else step
        moment = {"window": number, "edge": edge, "step": step, "t": time.monotonic_ns()}
        if session.writer is not None:
            session.writer.line("window", moment)
            counters = session.gpu.counters()
            if counters is not None:
                session.writer.line("counters", moment | counters)
        if session.nvtx is not None and edge == "open":
            # nsys may capture windows alone, and nothing of what was marked before.
            session.nvtx.mark_identity(session.rank, session.world_size)
            for group in session.groups.describe():
                session.nvtx.mark_group(group)


def _ends_within(seconds: float, work: Callable[[], None]) -> bool:
    """Do `work`; returns whether it ended in time. If not, it is left to itself."""
    thread = threads.start("window", work)
    if thread is None:
        work()
        return True
    thread.join(seconds)
    return not thread.is_alive()
