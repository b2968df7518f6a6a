"""What the tasks of an event loop wait for, as another thread sees it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from crossrank.instrument.event_loops import tasks_of

RELEASED: list[asyncio.Future[None]] = []


def names_seen(coroutine: Coroutine[Any, Any, None]) -> list[list[str]]:
    """Run a coroutine that waits for a future; return the functions of the tasks, as another thread sees them."""
    main = threading.get_ident()
    seen: list[list[str]] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        released = loop.create_future()
        RELEASED.append(released)
        waits = asyncio.create_task(coroutine)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

        def look() -> None:
            frame = sys._current_frames()[main]
            while not (found := tasks_of(frame)):  # the loop may not wait yet
                frame = sys._current_frames()[main]
            seen.extend([[one["name"] for one in stack] for stack in found])
            loop.call_soon_threadsafe(released.set_result, None)

        thread = threading.Thread(target=look)
        thread.start()
        await waits
        thread.join()

    asyncio.run(run())
    RELEASED.clear()
    return seen


async def waits() -> None:
    await RELEASED[-1]


async def calls() -> None:
    await waits()


async def gathers() -> None:
    await asyncio.gather(calls(), waits())


async def numbers() -> AsyncIterator[int]:
    await RELEASED[-1]
    yield 1


async def iterates() -> None:
    async for _ in numbers():
        pass


def test_a_task_is_seen_where_it_waits() -> None:
    assert names_seen(calls()) == [["waits", "calls"]]


def test_a_task_that_waits_for_others_is_left_out() -> None:
    assert sorted(names_seen(gathers())) == [["waits"], ["waits", "calls"]]


def test_a_task_that_iterates_is_seen_at_its_loop() -> None:
    assert names_seen(iterates()) == [["iterates"]]


def test_a_thread_without_an_event_loop_has_no_tasks() -> None:
    assert tasks_of(sys._getframe()) == []


def test_a_task_that_runs_hides_the_others() -> None:
    async def run() -> list[list[dict[str, Any]]]:
        other = asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        found = tasks_of(sys._getframe())
        other.cancel()
        return found

    assert asyncio.run(run()) == []
