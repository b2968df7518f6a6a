"""How a rank's process ended (by itself or by others), or what it did when its dump was taken."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from crossrank.comm import CommRecord, is_p2p
from crossrank.recording import ANSWERS, OF_A_BACKEND
from crossrank.tools.traces.activity import RankActivity, ThreadActivity
from crossrank.tools.traces.flight.dump import Frame, OwnStack, Raised, WaitUnderWay
from crossrank.tools.traces.seen import Seen

CUT_SHORT = ("SIGTERM", "SIGINT", "SIGABRT", "abort")
"""Reasons of crossrank's dumps that end a rank at any point, so its last call may be unfinished. `abort` comes from
`TRACING_ON_HANG`."""

LEFT = ("exit", "disable", *CUT_SHORT)
"""Reasons after which no more calls of a rank are recorded."""

MAIN_THREAD = "MainThread"

_GOES_ON = ("", *ANSWERS, "SIGUSR1", "window", "disable")
"""Reasons after which a rank may still make calls, recorded or not."""

RECORDER = "/crossrank/instrument/"
"""Part of the paths of the recorder's own frames."""

_STOPPED_BY_USER = re.compile(r"KeyboardInterrupt\b")
_COMMUNICATION_FAILED = re.compile(
    r"(RuntimeError|Dist\w*Error)\b.*("
    r"connection (closed|reset|refused|was|lost)|broken pipe|(read|write) error|timed? ?out|socket|gloo/transport"
    r"|failed to recv|monitoredBarrier|ncclRemoteError|remote process exited|(was|been) aborted"
    r"|Detected mismatch between|DDP expects same model|unhandled system error)",
    re.IGNORECASE | re.DOTALL,
)
"""An exception that a rank gets because another rank left or never arrived."""

_COMMUNICATES = re.compile(r"[/\\]torch[/\\](distributed|autograd|nn[/\\]parallel)[/\\]|[/\\]torch[/\\]_tensor\.py$")
"""Files with functions that communicate or wait for communication."""


@dataclass
class Ending:
    """What is known about the end of a rank's process, or about the moment of its dump."""

    taken_at: int | None = None
    """ns since 1970 when the dump was taken, or up to which the comms file is complete; None = unknown."""
    written_at: int | None = None
    """ns since 1970 of the last change of the file, if the dump has no time of its own: it was taken before."""
    reason: str = ""
    """Reason of the dump or the end: `hang`, `SIGUSR1`, `SIGTERM`, `window`, `disable`, `exit`; empty = unknown."""
    ended: bool = False
    """The rank ended its recording properly."""
    unseen: bool = False
    """The only file is a comms file without an end: the last calls may not have reached the disk."""
    went_on: bool = False
    """The rank left the job by itself after this dump of a hang: the call in which it waited has ended."""
    was_ended: bool = False
    """According to the comms file, the process was ended from outside after this dump of a hang."""
    vanished: bool = False
    """The process was killed after this dump: that ended the communication of the others."""
    error: str | None = None
    """The exception that ended the process."""
    causes: tuple[str, ...] = ()
    """Texts of the exceptions that it was raised from, the direct cause first."""
    traceback: tuple[Frame, ...] = ()
    """Where the exception that ended the process was raised, innermost frame first."""
    of_threads: list[Raised] = field(default_factory=list)
    """Exceptions that ended threads other than the main one; the process continues."""
    stacks: list[OwnStack] = field(default_factory=list)
    """Where the threads were when the dump was taken."""
    process: int | None = None
    """Its number in the system, on its node."""
    groups_made: int | None = None
    """How many process groups it has made, those of others included."""
    failed_groups: frozenset[str] = frozenset()
    """Names of the groups whose communicator has failed on this rank."""
    limited_groups: frozenset[str] = frozenset()
    """Names of the groups that got a shorter timeout than the default group: the script may handle its end."""
    callers: dict[str, int] = field(default_factory=dict)
    """Group -> thread that made the last call on it, in the order of these calls."""
    collective_callers: dict[str, int] = field(default_factory=dict)
    """The same of collectives alone: another thread may only send and receive."""
    waits: list[WaitUnderWay] | None = None
    """Waits of these threads; None = unknown."""
    activity: RankActivity | None = None
    """What it did just before the dump was taken."""
    seen: Seen | None = None
    """What another rank of the node saw of it, if it does not answer."""

    def take_exceptions(self, exceptions: Sequence[Raised], error: str | None = None) -> None:
        """Set the exceptions that ended the process and its threads. `error` is used if the file lists none."""
        main = next((one for one in exceptions if one.thread == MAIN_THREAD), None)
        if main is not None:
            self.error, self.traceback, self.causes = main.error, tuple(main.frames), tuple(main.causes)
        elif error is not None and not exceptions:
            self.error = error
        self.of_threads = [one for one in exceptions if one.thread != MAIN_THREAD] or self.of_threads

    def note_callers(self, records: Iterable[CommRecord]) -> None:
        """Note which threads made these calls, which are in order."""
        for record in records:
            if record.thread:
                self.callers.pop(record.pg, None)
                self.callers[record.pg] = record.thread
                if not is_p2p(record):
                    self.collective_callers[record.pg] = record.thread

    def caller(self, pg: str, *, p2p: bool) -> OwnStack | None:
        """Return the thread that makes a rank's collectives, or its sends and receives, on a group; None if unknown."""
        number = (self.callers if p2p else self.collective_callers).get(pg)
        return next((one for one in self.stacks if one.number == number), None)

    def activity_of(self, stack: OwnStack | None) -> ThreadActivity | None:
        """Return what a thread did just before the dump was taken; None if that is unknown."""
        threads = self.activity.threads if self.activity is not None else []
        return next((one for one in threads if stack is not None and one.id == stack.number), None)

    @property
    def awaited(self) -> set[int]:
        """Ids of the calls that the main thread waited for, or if it waited for none, those of the other threads."""
        waits = self.waits or []
        of_main = [one for one in waits if one.thread == MAIN_THREAD]
        return {one.id for one in of_main or waits if one.id is not None}

    @property
    def thread_of_call(self) -> dict[int, int]:
        """Id of each call that a thread waited for -> this thread."""
        return {one.id: one.number for one in self.waits or () if one.id is not None and one.number is not None}

    @property
    def taken_by(self) -> int | None:
        """Latest possible time of the dump, in ns since 1970; None = unknown."""
        return self.written_at if self.taken_at is None else self.taken_at

    @property
    def is_gone(self) -> bool:
        """Whether its process ended, so that it made no later calls."""
        return self.reason not in _GOES_ON or self.was_ended or self.vanished or self.error is not None

    @property
    def is_final(self) -> bool:
        """Whether it made no call after its dump, as far as the dump shows: it ended, or hangs."""
        return self.is_gone or self.reason == "hang"

    @property
    def was_terminated(self) -> bool:
        """Whether a scheduler, the launcher or the user ended its process."""
        return self.reason in ("SIGTERM", "SIGINT") and not self.has_raised

    @property
    def has_raised(self) -> bool:
        """Whether an exception of its own ended its process."""
        error = self.error
        return error is not None and not self.has_failed and _STOPPED_BY_USER.match(error) is None

    @property
    def has_failed(self) -> bool:
        """Whether failed communication ended its process: as far as is known, because of other ranks."""
        if self.error is None:
            return False
        if any(_is_of_communication(text) for text in (self.error, *self.causes)):
            return True
        # Connections of other libraries also break and time out.
        inner = next((frame for frame in self.traceback if RECORDER not in frame.filename), None)
        in_torch = inner is None or _COMMUNICATES.search(inner.filename) is not None
        return in_torch and _COMMUNICATION_FAILED.search(self.error) is not None

    @property
    def has_left(self) -> bool:
        """Whether its process ended by itself: not from outside, and not because other ranks ended."""
        return self.has_raised or (self.reason == "exit" and self.error is None)

    @property
    def ended_well(self) -> bool:
        """Whether its process ended by itself without an exception."""
        return self.reason == "exit" and self.error is None and not self.was_ended

    @property
    def ended_itself(self) -> bool:
        """Whether its process ended before a launcher could end it: it left, or gloo aborted it because it received
        more than it asked for."""
        return self.has_left or self.reason == "SIGABRT"


def may_be_of_communication(text: str) -> bool:
    """Return whether an exception may mean that a connection failed, of torch or of another library."""
    return _COMMUNICATION_FAILED.search(text) is not None


def _is_of_communication(text: str) -> bool:
    return may_be_of_communication(text) and OF_A_BACKEND.search(text) is not None
