"""Where the main thread of a rank was when its dump was taken, by the stacks and waits in crossrank's own dumps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import PurePath

from crossrank.recording import ANSWERS
from crossrank.tools.traces.ending import MAIN_THREAD, RECORDER, Ending
from crossrank.tools.traces.flight.dump import Frame, OwnStack

_OF_TORCH = (
    r"[/\\]torch[/\\](_\w+[/\\.]|(functional|serialization|storage|overrides|library|hub|random)\.py$|"
    r"(amp|ao|autograd|backends|compiler|cpu|cuda|distributed|distributions|export|fft|func|futures|fx|jit|linalg|masked|mps|"
    r"multiprocessing|nested|nn|onnx|optim|package|profiler|quantization|sparse|special|testing|utils|xpu)[/\\])"
)
"""Paths in a source tree of torch. A folder of the user may also be called torch."""
_LIBRARY = re.compile(
    rf"[/\\](site|dist)-packages[/\\]|[/\\]lib[/\\]python\d[.\d]*[/\\]|^<frozen |{_OF_TORCH}", re.IGNORECASE
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
_WAITS_FOR_THREAD = re.compile(
    r"[/\\](threading|queue|selectors|subprocess)\.py$|[/\\](concurrent|asyncio|multiprocessing|ray)[/\\]"
)
"""Files of functions in which a thread waits for another one, which may do all of the work."""
_JOINS = ("join", "result", "_shutdown")
"""Functions of Python that wait for the end or the result of a thread."""
_EVENT_LOOP = re.compile(r"[/\\](selectors\.py$|asyncio[/\\])")
"""Files of an event loop that waits for an event or a time."""
_LONG = 2_000_000_000
"""ns after its last call from which a rank that was ended inside torch.distributed is taken to have waited there."""


def main_stack(ending: Ending) -> OwnStack | None:
    return next((stack for stack in ending.stacks if stack.thread == MAIN_THREAD), None)


def is_users(frame: Frame) -> bool:
    return not is_library(frame.filename) and RECORDER not in frame.filename


def is_library(text: str) -> bool:
    """Return whether a path, or a frame as text, is of a package or of Python's own library.

    >>> is_library("/job/torch/train.py"), is_library("/src/pytorch/torch/nn/modules/module.py")
    (False, True)
    """
    return _LIBRARY.search(text) is not None


def may_wait(ending: Ending) -> bool:
    """Whether a rank that hung waits for communication, or may do so in C++; True where nothing shows it.

    A call may have started long before a rank waits for it: a receive that is posted early, or a call that overlaps
    with computation. A thread that listens for messages waits as long as none comes: it blocks its rank only if the
    main thread waits for it.
    """
    main = main_stack(ending)
    if ending.waits is None or ending.reason not in (*ANSWERS, "SIGUSR1") or main is None:
        return True
    waiting = {one.thread for one in ending.waits}
    waiting |= {one.thread for one in ending.stacks if one.frames and _MAY_WAIT.search(one.frames[0].filename)}
    if main.frames and _MAY_WAIT_IDLE.search(main.frames[0].filename) and not _computes(ending):
        return True
    return MAIN_THREAD in waiting or (bool(waiting) and waits_for_threads(main))


def waits_for_threads(stack: OwnStack) -> bool:
    """Return whether a thread waits for another thread, or for a process."""
    return bool(stack.frames) and _WAITS_FOR_THREAD.search(stack.frames[0].filename) is not None


def joins(stack: OwnStack) -> bool:
    """Return whether a thread waits for the end of another thread, or for its result."""
    inner = takewhile(lambda frame: not is_users(frame), stack.frames)
    return any(frame.name in _JOINS and _WAITS_FOR_THREAD.search(frame.filename) for frame in inner)


def runs_event_loop(stack: OwnStack) -> bool:
    """Return whether a thread waits in an event loop, which may have timers."""
    return any(_EVENT_LOOP.search(frame.filename) for frame in stack.frames[:2])


def is_timer(stack: OwnStack) -> bool:
    """Return whether it is a `threading.Timer` that has not called its function yet."""
    names = [frame.name for frame in stack.frames if frame.filename.endswith("threading.py")]
    return len(names) == len(stack.frames) and names[:3] == ["wait", "wait", "run"]


def _computes(ending: Ending) -> bool:
    """Return whether the main thread used CPU time between the two looks of an answer."""
    main = ending.activity_of(main_stack(ending))
    return main is not None and main.cpu_ns > 0


def syncs(ending: Ending) -> bool:
    """Whether a thread of a rank waits for all that its GPU has to do; True where nothing shows it."""
    if ending.reason not in (*ANSWERS, "SIGUSR1", "abort") or not ending.stacks:
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
    """Frames of the main thread of a rank that hung, innermost first; empty if it did not hang or nothing shows it."""
    stack = main_stack(ending)
    hung = ending.reason in ANSWERS or (ending.was_terminated and (ending.taken_at or 0) - called > _LONG)
    if stack is None or ending.error is not None or not hung:
        return []
    return [frame for frame in stack.frames if RECORDER not in frame.filename]


def line_of(frame: Frame) -> tuple[str, int]:
    """File and line. A record has a path without its folders."""
    return PurePath(frame.filename).name, frame.line
