"""A hang is reported once, when nothing has been communicated for the whole timeout, and again after it went on."""

from __future__ import annotations

import time
from collections.abc import Callable

from crossrank.instrument.hang.watch import HangWatch

SECONDS = 0.4


class Job:
    """What a rank has communicated, as the watch sees it."""

    def __init__(self, calls: int = 1) -> None:
        self.calls = calls
        self.completed = 0
        self.hangs = 0
        self.asked = 0

    def count_completed(self) -> int:
        self.asked += 1
        return self.completed

    def note_hang(self, seconds: float) -> None:
        self.hangs += 1

    def watch(self) -> HangWatch:
        watch = HangWatch(
            lambda: SECONDS, calls=lambda: self.calls, completed=self.count_completed, on_hang=self.note_hang
        )
        watch.start()
        return watch


def keep_doing(action: Callable[[], None], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        action()
        time.sleep(0.02)


def test_silence_is_reported_once_until_a_call_is_made() -> None:
    job = Job()
    watch = job.watch()
    time.sleep(4 * SECONDS)
    assert job.hangs == 1
    job.calls += 1
    time.sleep(4 * SECONDS)
    watch.stop()

    assert job.hangs == 2


def test_a_rank_that_makes_calls_does_not_hang_and_torch_is_not_asked() -> None:
    job = Job()
    watch = job.watch()

    def call() -> None:
        job.calls += 1

    keep_doing(call, 3 * SECONDS)
    watch.stop()

    assert (job.hangs, job.asked) == (0, 0)


def test_a_rank_whose_calls_end_does_not_hang() -> None:
    job = Job()
    watch = job.watch()

    def end() -> None:
        job.completed += 1

    keep_doing(end, 3 * SECONDS)
    watch.stop()

    assert job.hangs == 0


def test_a_rank_that_never_comes_to_its_first_call_hangs() -> None:
    job = Job(calls=0)
    watch = job.watch()
    time.sleep(3 * SECONDS)
    watch.stop()

    assert job.hangs == 1
