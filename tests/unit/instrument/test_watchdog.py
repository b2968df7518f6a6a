"""A hang is reported once, when nothing has been communicated for the whole patience, and again after it went on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from crossrank.instrument import threads
from crossrank.instrument.hang import watch
from crossrank.instrument.record.recorder import CurrentWait

PATIENCE = 8.0


class Job:
    """A rank, the clock that its watch reads, and what the watch does."""

    def __init__(
        self, *, calls: int = 1, does: Callable[[Job], None] = lambda job: None, again: float | None = None
    ) -> None:
        self.calls, self.completed = calls, 0
        self.waits: list[CurrentWait] = []
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
        self._watch._woken = self  # type: ignore[assignment]
        self._again = again

    def run(self, seconds: float) -> None:
        self.end = seconds
        self._watch.start()

    def _on_hang(self, seconds: float, wait: CurrentWait | None) -> float | None:
        self.hangs.append(self.now)
        return self._again if seconds < 3 * PATIENCE else None

    def _count_completed(self) -> int:
        self.asked += 1
        return self.completed

    def monotonic(self) -> float:
        return self.now

    def clear(self) -> None:
        """As of an `Event`: see `wait`."""

    def wait(self, seconds: float) -> None:
        """What the rank does while its watch waits for its next look."""
        self.now += seconds
        self._does(self)
        if self.now >= self.end:
            self._watch.stop()


@pytest.fixture(autouse=True)
def _watch_in_this_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "start", lambda name, target, lost: target())


def call_at_20_s(job: Job) -> None:
    job.calls = 1 + (job.now >= 20)


def call(job: Job) -> None:
    job.calls += 1


def end(job: Job) -> None:
    job.completed += 1


def wait_beside_calls(job: Job) -> None:
    job.calls += 1
    job.waits = [CurrentWait(5, 1, limited=False)] if job.now >= 20 else []


def short_waits_beside_calls(job: Job) -> None:
    job.calls += 1
    job.waits = [CurrentWait(round(job.now / 2), 1, limited=False)]


def wait_at_20_s(job: Job) -> None:
    job.waits = [CurrentWait(5, 1, limited=False)] if job.now >= 20 else []


@pytest.mark.parametrize(
    ("job", "hangs"),
    [
        pytest.param(Job(does=call_at_20_s), [PATIENCE, 20 + PATIENCE], id="once, until a call is made"),
        pytest.param(Job(does=call), [], id="not while calls are made"),
        pytest.param(
            Job(does=wait_beside_calls), [20 + PATIENCE], id="once, if a thread waits while others make calls"
        ),
        pytest.param(Job(does=short_waits_beside_calls), [], id="not if the waits of a thread end"),
        pytest.param(Job(does=end), [], id="not while calls end"),
        pytest.param(Job(calls=0), [PATIENCE], id="before the first call"),
        pytest.param(Job(does=wait_at_20_s), [PATIENCE, 20 + PATIENCE], id="again when a thread begins to wait"),
        pytest.param(Job(again=5 * PATIENCE), [PATIENCE, 5 * PATIENCE], id="again when a slow job's has lasted"),
        pytest.param(
            Job(again=watch.COUNT_ANEW),
            [number * PATIENCE for number in range(1, 8)],
            id="what is no sign of a hang counts anew",
        ),
    ],
)
def test_silence_is_reported_at_expected_times(job: Job, hangs: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "time", job)
    job.run(60)
    assert job.hangs == hangs
    assert (job.asked == 0) == (job.calls > 2)  # torch is not asked while calls are made
