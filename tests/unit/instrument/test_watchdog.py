"""A hang is reported once, when nothing has been communicated for the whole patience, and again after it went on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from crossrank.instrument import threads
from crossrank.instrument.hang import watch

PATIENCE = 8.0


class Job:
    """A rank, the clock that its watch reads, and what the watch does."""

    def __init__(
        self, *, calls: int = 1, does: Callable[[Job], None] = lambda job: None, again: float | None = None
    ) -> None:
        self.calls, self.completed = calls, 0
        self.waits: list[tuple[int, int]] = []
        self.now, self.end = 0.0, 0.0
        self.asked = 0
        self.hangs: list[float] = []
        self._does = does
        self._watch = watch.HangWatch(
            lambda: PATIENCE,
            calls=lambda: self.calls,
            completed=self._count_completed,
            on_hang=self._on_hang,
            waits=lambda: self.waits,
        )
        self._again = again

    def run(self, seconds: float) -> None:
        self.end = seconds
        self._watch.start()

    def _on_hang(self, seconds: float) -> float | None:
        self.hangs.append(self.now)
        return self._again if seconds < 3 * PATIENCE else None

    def _count_completed(self) -> int:
        self.asked += 1
        return self.completed

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """What the rank does while its watch sleeps."""
        self.now += seconds
        self._does(self)
        if self.now >= self.end:
            self._watch.stop()


@pytest.fixture(autouse=True)
def _watch_in_this_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "start", lambda name, target, lost: target())


def watched(seconds: float, monkeypatch: pytest.MonkeyPatch, job: Job) -> Job:
    monkeypatch.setattr(watch, "time", job)
    job.run(seconds)
    return job


def test_silence_is_reported_once_until_a_call_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def call_at_20_s(job: Job) -> None:
        job.calls = 1 + (job.now >= 20)

    job = watched(60, monkeypatch, Job(does=call_at_20_s))

    assert job.hangs == [PATIENCE, 20 + PATIENCE]


def test_a_rank_that_makes_calls_does_not_hang_and_torch_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(job: Job) -> None:
        job.calls += 1

    job = watched(60, monkeypatch, Job(does=call))

    assert (job.hangs, job.asked) == ([], 0)


def test_a_rank_whose_calls_end_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(job: Job) -> None:
        job.completed += 1

    assert watched(60, monkeypatch, Job(does=end)).hangs == []


def test_a_rank_that_never_comes_to_its_first_call_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(60, monkeypatch, Job(calls=0)).hangs == [PATIENCE]


def test_silence_is_reported_again_when_somebody_begins_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_at_20_s(job: Job) -> None:
        job.waits = [(5, 1)] if job.now >= 20 else []

    job = watched(60, monkeypatch, Job(does=wait_at_20_s))

    assert job.hangs == [PATIENCE, 20 + PATIENCE]


def test_silence_of_a_slow_job_is_reported_again_when_it_has_lasted_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    job = watched(60, monkeypatch, Job(again=5 * PATIENCE))

    assert job.hangs == [PATIENCE, 5 * PATIENCE]


def test_a_silence_that_is_no_sign_of_a_hang_counts_from_its_report_on(monkeypatch: pytest.MonkeyPatch) -> None:
    job = watched(3 * PATIENCE + 1, monkeypatch, Job(again=watch.COUNT_ANEW))

    assert job.hangs == [PATIENCE, 2 * PATIENCE, 3 * PATIENCE]
