"""How a rank's process ended, or was found when its dump was taken: by its own doing, by others', or not at all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from crossrank.recording import OF_A_BACKEND
from crossrank.tools.traces.flight.dump import Frame, OwnStack, Raised, WaitUnderWay

CUT_SHORT = ("SIGTERM", "SIGINT", "SIGABRT", "abort")
"""Reasons of our dumps that end a rank wherever it is, so that its last call may not be over: `abort` is that of
`TRACING_ON_HANG`."""

LEFT = ("exit", "disable", *CUT_SHORT)
"""Reasons after which a rank makes no more calls that are seen."""

MAIN_THREAD = "MainThread"

_GOES_ON = ("", "hang", "SIGUSR1", "window", "disable")
"""Reasons after which a rank may still make calls, seen or not."""

RECORDER = "/crossrank/instrument/"
"""Part of the paths of the recorder's own frames."""

_STOPPED_BY_USER = re.compile(r"KeyboardInterrupt\b")
_COMMUNICATION_FAILED = re.compile(
    r"(RuntimeError|Dist\w*Error)\b.*("
    r"connection (closed|reset|refused|was|lost)|broken pipe|(read|write) error|timed? ?out|socket|gloo/transport"
    r"|monitoredBarrier|ncclRemoteError|remote process exited|(was|been) aborted)",
    re.IGNORECASE | re.DOTALL,
)
"""An exception that a rank gets because another one has left, or never came."""

_COMMUNICATES = re.compile(r"[/\\]torch[/\\](distributed|autograd|nn[/\\]parallel)[/\\]|[/\\]torch[/\\]_tensor\.py$")
"""Files whose functions communicate, or wait for communication."""


@dataclass
class Ending:
    """What is known of the end of a rank's process, or of the moment when its dump was taken."""

    taken_at: int | None = None
    """ns since 1970 when the dump was taken, or up to which the comms file lacks nothing; None = unknown."""
    written_at: int | None = None
    """ns since 1970 when the file of a dump that does not say when it was taken was last changed: it is no younger."""
    reason: str = ""
    """Why: `hang`, `SIGUSR1`, `SIGTERM`, `window`, `disable`, `exit`; empty where that is unknown."""
    ended: bool = False
    """The rank ended its recording properly."""
    unseen: bool = False
    """Nothing but an unfinished comms file is left: its last calls may not have reached the disk."""
    went_on: bool = False
    """The rank left the job by itself after this dump of a hang: what it waited in has ended."""
    was_ended: bool = False
    """Somebody ended the process after this dump of a hang, as its comms file says."""
    error: str | None = None
    """The exception that ended the process."""
    causes: tuple[str, ...] = ()
    """Texts of the exceptions that it was raised from, the direct cause first."""
    traceback: tuple[Frame, ...] = ()
    """Where the exception that ended the process was raised, innermost frame first."""
    of_threads: list[Raised] = field(default_factory=list)
    """Exceptions that ended other threads than the main one; the process goes on."""
    stacks: list[OwnStack] = field(default_factory=list)
    """Where the threads were when the dump was taken."""
    waits: list[WaitUnderWay] | None = None
    """What they waited for; None = not known whether they did."""
    moves: bool = False
    """The main thread was seen to move since the last call."""
    busy: float | None = None
    """Share of the time since then in which it had a processor; None = unknown."""

    def take_exceptions(self, exceptions: Sequence[Raised], error: str | None = None) -> None:
        """Note what ended the process and its threads; `error` is what is known of a file that lists none."""
        main = next((one for one in exceptions if one.thread == MAIN_THREAD), None)
        if main is not None:
            self.error, self.traceback, self.causes = main.error, tuple(main.frames), tuple(main.causes)
        elif error is not None and not exceptions:
            self.error = error
        self.of_threads = [one for one in exceptions if one.thread != MAIN_THREAD] or self.of_threads

    @property
    def awaited(self) -> set[int]:
        """Ids of the calls that the main thread waited for; where it waited for none, those of the other threads."""
        waits = self.waits or []
        of_main = [one for one in waits if one.thread == MAIN_THREAD]
        return {one.id for one in of_main or waits if one.id is not None}

    @property
    def taken_by(self) -> int | None:
        """ns since 1970 when the dump had been taken at the latest; None = unknown."""
        return self.written_at if self.taken_at is None else self.taken_at

    @property
    def is_gone(self) -> bool:
        """Whether its process ended: what it had not done by then it never did."""
        return self.reason not in _GOES_ON or self.was_ended or self.error is not None

    @property
    def is_final(self) -> bool:
        """Whether it made no call after its dump, as far as its dump goes: it ended, or hangs."""
        return self.is_gone or self.reason == "hang"

    @property
    def was_terminated(self) -> bool:
        """Whether somebody outside ended its process: a scheduler, the launcher, its user."""
        return self.reason in ("SIGTERM", "SIGINT") and not self.has_raised

    @property
    def has_raised(self) -> bool:
        """Whether its process ended by an exception of its own."""
        error = self.error
        return error is not None and not self.has_failed and _STOPPED_BY_USER.match(error) is None

    @property
    def has_failed(self) -> bool:
        """Whether its process ended by a communication that failed: because of others, as far as is known."""
        if self.error is None:
            return False
        if any(_is_of_communication(text) for text in (self.error, *self.causes)):
            return True
        # Other libraries' connections break and time out as well.
        inner = next((frame for frame in self.traceback if RECORDER not in frame.filename), None)
        in_torch = inner is None or _COMMUNICATES.search(inner.filename) is not None
        return in_torch and _COMMUNICATION_FAILED.search(self.error) is not None

    @property
    def has_left(self) -> bool:
        """Whether its process ended by its own doing, not because others had ended it or theirs."""
        return self.has_raised or (self.reason == "exit" and self.error is None)

    @property
    def ended_itself(self) -> bool:
        """Whether its process ended before any launcher ended it: it left, or gloo aborted it, which was sent more than
        it asked for."""
        return self.has_left or self.reason == "SIGABRT"


def _is_of_communication(text: str) -> bool:
    return _COMMUNICATION_FAILED.search(text) is not None and OF_A_BACKEND.search(text) is not None
