"""How long a replay pauses before a launch."""

from __future__ import annotations

import pytest

from crossrank.replay.run.pacing import Pacer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time now, as the only item: it moves only if a test moves it."""
    now = [1000]
    monkeypatch.setattr("crossrank.replay.run.pacing.time.monotonic_ns", lambda: now[0])
    return now


def filled(pacer: Pacer, gaps: list[int], *launches: tuple[int, int]) -> list[int]:
    """What is filled before each launch, given as (recorded thread, thread)."""
    found = []
    pacer.begin()
    for position, (recorded, thread) in enumerate(launches):
        gaps.clear()
        pacer.pace(position, recorded, thread)
        found.append(sum(gaps))
    return found


def test_overlapping_gaps_of_threads_on_one_stream_are_queued_once(clock: list[int]) -> None:
    gaps: list[int] = []
    pacer = Pacer([0, 0, 300, 500, 100], [False] * 5, gaps.append, queues=True)
    # 300 ns after the first call of thread 0, and 500 ns after that of thread 1: both began at one time.
    launches = ((0, 0), (1, 0), (0, 0), (1, 0), (1, 0))
    assert filled(pacer, gaps, *launches) == [0, 0, 300, 200, 100]
    assert filled(pacer, gaps, *launches) == [0, 0, 300, 200, 100]


def test_gaps_of_threads_on_different_streams_are_queued_on_each(clock: list[int]) -> None:
    gaps: list[int] = []
    pacer = Pacer([0, 0, 300, 500], [False] * 4, gaps.append, queues=True)
    assert filled(pacer, gaps, (0, 0), (1, 1), (0, 0), (1, 1)) == [0, 0, 300, 500]


def test_idling_ends_with_the_gap_of_the_recorded_thread(clock: list[int]) -> None:
    pauses: list[int] = []

    def idle(ns: int) -> None:
        pauses.append(ns)
        clock[0] += ns

    pacer = Pacer([0, 0, 300, 500], [False] * 4, idle)
    assert filled(pacer, pauses, (0, 0), (1, 0), (0, 0), (1, 0)) == [0, 0, 300, 200]
