"""Two looks at this process tell a thread that works from one that is blocked, and say in what it is blocked."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from crossrank.instrument.hang import activity
from crossrank.instrument.hang.activity import Communicated
from crossrank.instrument.hang.other_ends import Blocked
from crossrank.instrument.record.recorder import CurrentWait
from crossrank.recording import C_SLEEPS

CALLS = {"made": 0}
WAIT = CurrentWait(7, os.getpid(), limited=False)
RECORDER: Any = SimpleNamespace(calls=lambda: CALLS["made"], waits_under_way=lambda: [WAIT])


@pytest.fixture(autouse=True)
def _nothing_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "completed", lambda: 3)


def thread_between_looks(
    work: Callable[[threading.Event], object], until: Callable[[dict[str, Any]], object], name: str = "worker"
) -> dict[str, Any]:
    """What a thread did between two looks, as soon as this is so; `work` ends when its event is set."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name=name)
    thread.start()
    try:
        first = activity.look(RECORDER)
        deadline = time.monotonic() + 30
        while True:
            found = activity.between(first, activity.look(RECORDER))
            described: dict[str, Any] = next(one for one in found["threads"] if one["id"] == thread.native_id)
            if until(described) or time.monotonic() > deadline:
                return described
    finally:
        over.set()
        thread.join()


def is_in(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda thread: thread["blocked_in"] == name


def spin(over: threading.Event) -> None:
    while not over.is_set():
        sum(range(1000))


def test_a_thread_that_works_uses_cpu_time() -> None:
    found = thread_between_looks(spin, lambda one: one["cpu_ns"], "spins")
    assert found["cpu_ns"] > 0
    assert found["name"] == "spins"


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def test_a_thread_that_waits_for_an_event_is_blocked_in_a_futex() -> None:
    assert thread_between_looks(threading.Event.wait, is_in("futex"))["blocked_in"] == "futex"


def test_a_thread_that_polls_a_pipe_is_blocked_in_poll() -> None:
    with pipe() as (reading, writing):
        poller = select.poll()
        poller.register(reading, select.POLLIN)

        def wait(over: threading.Event) -> None:
            threading.Thread(target=lambda: (over.wait(), os.write(writing, b"x"))).start()
            poller.poll()

        assert thread_between_looks(wait, is_in("poll"))["blocked_in"] == "poll"


def test_a_thread_that_wakes_up_now_and_then_is_looked_for_in_its_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter([Blocked(), Blocked("fcntl"), Blocked(C_SLEEPS, (7,), timed=True)])
    monkeypatch.setattr(activity, "OtherEnds", lambda: SimpleNamespace(blocked=lambda *_, **__: next(states)))
    usage = activity.Usage(cpu_ns=1_000_000, bytes=0)
    first, last = (
        activity.Look(at=at, progress=activity.progress(RECORDER), threads=threads, children={})
        for at, threads in ((0.0, {}), (1.0, {threading.get_native_id(): usage}))
    )
    [thread] = activity.between(first, last)["threads"]
    assert (thread["blocked_in"], thread["released_by"], thread["timed"]) == (C_SLEEPS, [7], True)


def test_a_wait_that_lasts_from_one_look_to_the_other_is_held_and_calls_are_counted() -> None:
    first = activity.look(RECORDER)
    CALLS["made"] += 2
    found = activity.between(first, activity.look(RECORDER))
    assert (found["calls"], found["completed"]) == (2, 0)
    assert found["held"] == [{"id": 7, "thread": os.getpid()}]


def test_progress_is_equal_while_nothing_is_communicated() -> None:
    before = activity.progress(RECORDER)
    assert before == activity.progress(RECORDER) == Communicated(CALLS["made"], 3, frozenset({WAIT}))
    CALLS["made"] += 1
    assert before != activity.progress(RECORDER)


def test_the_cpu_time_of_a_child_process_is_measured() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            first = activity.look(RECORDER)
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                children = activity.between(first, activity.look(RECORDER))["children"]
                used = {one["id"]: one["cpu_ns"] for one in children}
                if used.get(child.pid, 0) > 0:
                    break
            assert used[child.pid] > 0
        finally:
            child.kill()
