"""The API for training scripts: `enable`, `disable`, `step`, `window`. A process has one session at a time."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING

from crossrank.errors import CrossrankError, one_line
from crossrank.instrument import config as configuration
from crossrank.instrument.hooks import fork
from crossrank.instrument.log import log, once_per_job
from crossrank.instrument.unpatched import threading
from crossrank.machine import need_memory

if TYPE_CHECKING:
    from crossrank.instrument.session import Session

# Held while tracing starts or ends. A signal handler may do either while its own thread holds it.
_lock = threading.RLock()
_current: Session | None = None
_asked = False  # whether enable() was ever called in this process


class Tracing:
    """The handle that `enable()` returns. A `with` block around it ends the recording. No effect while tracing is off.

    Only the handle of the `enable()` that started the recording ends it.
    """

    def __init__(self, session: Session | None, *, ends_recording: bool = False) -> None:
        self._session = session
        self._ends_recording = ends_recording

    @property
    def active(self) -> bool:
        """Whether calls are being recorded."""
        return self._session is not None and not self._session.closing

    def __enter__(self) -> Tracing:
        return self

    def __exit__(self, *_: object) -> None:
        if self._ends_recording and self._session is _current:
            disable()


def enable(
    *,
    tracing: str | None = None,
    directory: str | os.PathLike[str] | None = None,
    window: str | tuple[int, ...] | None = None,
    nvtx: str | bool | None = None,
    print_calls: bool | None = None,
    flight: bool | None = None,
    hang_seconds: float | None = None,
    on_hang: str | None = None,
    timing: bool | None = None,
    exception_texts: bool | None = None,
    nsys: bool | None = None,
    node: str | None = None,
    ring: int | None = None,
    recorder: str | None = None,
) -> Tracing:
    """Record every collective and P2P call of this process from now on.

    Each argument overrides its variable: see `crossrank.instrument.config`. Never raises: if tracing cannot start,
    one log line says why and training continues. A second call logs a warning and has no effect.
    """
    global _asked, _current
    arguments = dict(locals())
    _asked = True
    with _lock:
        if _current is not None:
            log.warning("crossrank: already enabled; this enable() has no effect")
            return Tracing(_current)
        try:
            config = configuration.load(arguments, os.environ)
            if config.emit == "NONE":
                return Tracing(None)
            need_memory()
            # Import torch here: if that fails, only the recording is lost.
            import torch.distributed as dist

            if not dist.is_available():
                raise CrossrankError("this torch is built without torch.distributed; install a build that has it")
            from crossrank.instrument.session import Session

            once_per_job.hold(dist.get_world_size() if dist.is_initialized() else 1)
            session = Session(config)
            session.start()
            _current = session
        except Exception as error:
            once_per_job.leave()
            is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # the ranks of a node have the same variables and torch
            level = logging.WARNING if is_first else logging.INFO
            log.log(level, "crossrank: tracing is off: %s", one_line(error))
            return Tracing(None)
        return Tracing(_current, ends_recording=True)


def disable() -> None:
    """Finish the files and stop recording. No effect while tracing is off."""
    global _current
    with _lock:
        session, _current = _current, None
        if session is not None:
            session.close()


def enabled() -> bool:
    """Whether calls are being recorded."""
    return _current is not None and not _current.closing


def step() -> None:
    """Mark the end of a training step. Without this call, crossrank counts the steps of the optimizers."""
    if _current is not None:
        _current.iterations.step()


def window() -> contextlib.AbstractContextManager[None]:
    """Return a `with` block that is recorded as one window of traces. No effect while tracing is off."""
    if _current is not None:
        return _current.windows.block()
    if not _asked:
        log.warning("crossrank: a window before enable() records nothing")
    return contextlib.nullcontext()


def expect_pause(seconds: float = 1800) -> contextlib.AbstractContextManager[None]:
    """Return a `with` block in which the other ranks wait for this one: an evaluation on one rank, a long save.

    No rank reports a hang until the block ends or `seconds` have passed. No effect while tracing is off.
    """
    if _current is not None:
        return _current.hangs.expect_pause(seconds)
    return contextlib.nullcontext()


def _after_fork_in_child() -> None:
    global _current, _lock
    _lock = threading.RLock()  # a thread that the child does not have may hold the parent's lock
    session, _current = _current, None
    if session is not None:
        session.abandon()


fork.in_child.append(_after_fork_in_child)
