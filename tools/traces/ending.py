"""How a rank's process ended, or was found when its dump was taken: by its own doing, by others', or not at all; and
where its threads were, by the stacks and waits in crossrank's own dumps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import PurePath

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


# --- where its threads were ------------------------------------------------------------------------------------------

_LIBRARY = re.compile(
    r"[/\\](site|dist)-packages[/\\]|[/\\]lib[/\\]python\d[.\d]*[/\\]|^<frozen |[/\\]torch[/\\]", re.IGNORECASE
)
"""Paths of code that is not the user's: torch and other packages, and Python's own."""
_WAITS = re.compile(r"[/\\]torch[/\\]distributed[/\\](distributed_c10d|c10d_logger|rendezvous)\.py$")
"""Files of functions that wait for other ranks, by calls or through the store."""
_CALLS = re.compile(r"[/\\]torch[/\\]distributed[/\\](distributed_c10d|utils)\.py$")
"""Files of functions that C++ makes calls for."""
_MAY_WAIT = re.compile(
    r"[/\\]torch[/\\]distributed[/\\](?!(tensor|checkpoint|elastic)[/\\])|[/\\]torch[/\\]nn[/\\]parallel[/\\]"
)
"""Files of functions in which C++ may wait for communication that no recorder notes: of a group that is made, of DDP's
buffers."""
_SYNCS = re.compile(r"[/\\]torch[/\\](cuda|distributed)[/\\]")
"""Files of functions in which a host waits for its GPU, or for other hosts."""
_MAY_WAIT_IDLE = re.compile(r"[/\\]torch[/\\](autograd[/\\]|_tensor\.py$|_ops\.py$)")
"""Files of functions that compute in C++, or wait there: of a backward pass, of a custom operation."""
_BUSY = 0.2
"""Share of a processor from which a thread computes."""
_WAITS_FOR_THREAD = re.compile(
    r"[/\\](threading|queue|selectors|subprocess)\.py$|[/\\](concurrent|asyncio|multiprocessing|ray)[/\\]"
)
"""Files of functions in which a thread waits for another one, which may do all of the work."""
_LONG = 2_000_000_000
"""ns after its last call from which a rank that was ended inside torch.distributed is taken to have waited there."""


def main_stack(ending: Ending) -> OwnStack | None:
    return next((stack for stack in ending.stacks if stack.thread == MAIN_THREAD), None)


def is_users(frame: Frame) -> bool:
    return _LIBRARY.search(frame.filename) is None and RECORDER not in frame.filename


def may_wait(ending: Ending) -> bool:
    """Whether a rank that hung waits for communication, or may do so in C++; True where nothing shows it.

    A call may have begun long before anybody waits for it: a receive that is posted early, one that runs beside
    computation. A thread that listens for messages waits as long as none comes: it keeps its rank only where the main
    thread waits for it.
    """
    main = main_stack(ending)
    if ending.waits is None or ending.reason not in ("hang", "SIGUSR1") or main is None:
        return True
    waiting = {one.thread for one in ending.waits}
    waiting |= {one.thread for one in ending.stacks if one.frames and _MAY_WAIT.search(one.frames[0].filename)}
    innermost = main.frames[0].filename if main.frames else ""
    if _MAY_WAIT_IDLE.search(innermost) and (ending.busy is None or ending.busy < _BUSY):
        return True
    return MAIN_THREAD in waiting or (bool(waiting) and _WAITS_FOR_THREAD.search(innermost) is not None)


def syncs(ending: Ending) -> bool:
    """Whether a thread of a rank waits for all that its GPU has to do; True where nothing shows it."""
    if ending.reason not in ("hang", "SIGUSR1") or not ending.stacks:
        return True
    return any(stack.frames and _SYNCS.search(stack.frames[0].filename) for stack in ending.stacks)


def waits_in_call(ending: Ending, call: Sequence[Frame], called: int) -> bool:
    """Whether the main thread of a rank that hung is inside its last call, which was made at `called` in `call`."""
    frames = _frames(ending, called)
    users = next(filter(is_users, frames), None)
    return users is not None and bool(_CALLS.search(frames[0].filename)) and line_of(users) in map(line_of, call)


def waits_elsewhere(ending: Ending, call: Sequence[Frame], called: int) -> bool:
    """Whether the main thread of a rank that hung is inside torch.distributed in something other than its last call.

    Ranks that make a group, or look for a key of the store, wait for the others in what no recorder notes.
    """
    frames = _frames(ending, called)
    inner = list(takewhile(lambda frame: _WAITS.search(frame.filename), frames))
    if not inner or len(inner) == len(frames):
        return False
    # Between them and the user's line others of torch may be, such as the mode of a default device.
    caller = next(filter(is_users, frames), frames[len(inner)])
    return line_of(caller) not in map(line_of, call)


def is_destroying_groups(ending: Ending) -> bool:
    """Whether the main thread waits, in `destroy_process_group`, for the end of calls."""
    stack = main_stack(ending)
    return stack is not None and any(
        frame.name == "destroy_process_group" and _WAITS.search(frame.filename) for frame in stack.frames
    )


def _frames(ending: Ending, called: int) -> list[Frame]:
    """Of the main thread of a rank that hung, innermost first; none where it did not hang or nothing shows it."""
    stack = main_stack(ending)
    hung = ending.reason == "hang" or (ending.was_terminated and (ending.taken_at or 0) - called > _LONG)
    if stack is None or ending.error is not None or not hung:
        return []
    return [frame for frame in stack.frames if RECORDER not in frame.filename]


def line_of(frame: Frame) -> tuple[str, int]:
    """File and line. A record has a path without its folders."""
    return PurePath(frame.filename).name, frame.line
