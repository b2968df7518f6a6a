"""Finds the coroutines that the event loop of a thread runs: the stack of the thread shows the loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import FrameType
from typing import Any

from crossrank.instrument.hooks.exits import describe_frames

_LOOP = "run_forever"
"""Method in which an event loop runs. uvloop has it in C, where Python's `Runner` is above it."""
_RUNNER = "run"
_MOST_TASKS = 4
_AWAITED = ("cr_await", "gi_yieldfrom", "ag_await")
"""Attributes of coroutines and generators with what they wait for."""
_FRAMES = ("cr_frame", "gi_frame", "ag_frame")


def tasks_of(frame: FrameType | None) -> list[list[dict[str, Any]]]:
    """Return the stacks of the tasks of the event loop in which a thread waits, innermost frame first.

    A task that runs is on the stack of the thread: then the others do not matter. Tasks that wait for other tasks are
    left out, because those show what they wait for. The tasks that were made first come first.
    """
    loop = _loop_of(frame)
    if loop is None or asyncio.current_task(loop) is not None:
        return []
    try:
        everyone = asyncio.all_tasks(loop)
    except RuntimeError:  # the thread of the loop changes it all the time
        return []
    tasks = [task for task in everyone if not _waits_for_task(task)]
    tasks.sort(key=lambda task: (len(task.get_name()), task.get_name()))  # Task-9 was made before Task-10
    stacks = (list(_frames_of(task.get_coro())) for task in tasks)
    return [describe_frames((one, one.f_lineno) for one in reversed(stack)) for stack in stacks if stack][:_MOST_TASKS]


def _loop_of(frame: FrameType | None) -> asyncio.AbstractEventLoop | None:
    while frame is not None:
        if frame.f_code.co_name in (_LOOP, _RUNNER):
            held = frame.f_locals.get("self")
            loop = getattr(held, "_loop", held)
            if isinstance(loop, asyncio.AbstractEventLoop):
                return loop
        frame = frame.f_back
    return None


def _waits_for_task(task: asyncio.Task[Any]) -> bool:
    """Return whether a task waits for other tasks, by itself or with `gather`."""
    awaited = getattr(task, "_fut_waiter", None)
    children = getattr(awaited, "_children", None) or [awaited]
    return any(isinstance(one, asyncio.Task) and not one.done() for one in children)


def _frames_of(awaitable: object) -> Iterator[FrameType]:
    """Return the frames of a coroutine and of those that it waits for, outermost first."""
    while awaitable is not None:
        frame = next((found for name in _FRAMES if (found := getattr(awaitable, name, None)) is not None), None)
        if frame is None:
            return
        yield frame
        awaitable = next((found for name in _AWAITED if (found := getattr(awaitable, name, None)) is not None), None)
