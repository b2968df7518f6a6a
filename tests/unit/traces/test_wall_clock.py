"""Monotonic times become wall times by every moment at which a recording read both clocks."""

from __future__ import annotations

from crossrank.tools.traces.comms import WallClock

SECOND = 1_000_000_000
WALL = 1_780_000_000 * SECOND


def test_between_two_readings_a_time_drifts_from_the_one_offset_to_the_other() -> None:
    clock = WallClock([{"t": 0, "wall": WALL}, {"t": 10 * SECOND, "wall": WALL + 10 * SECOND + 4000}])
    assert [clock.at(second * SECOND) - WALL - second * SECOND for second in (0, 5, 10)] == [0, 2000, 4000]


def test_before_the_first_reading_and_after_the_last_their_offsets_hold() -> None:
    clock = WallClock([{"t": SECOND, "wall": WALL}, {"t": 11 * SECOND, "wall": WALL + 10 * SECOND + 4000}])
    assert (clock.at(0), clock.at(21 * SECOND)) == (WALL - SECOND, WALL + 20 * SECOND + 4000)


def test_a_clock_that_was_set_goes_on_as_if_it_had_not_been_and_says_by_how_much() -> None:
    moments = [{"t": 0, "wall": WALL}, {"t": 10 * SECOND, "wall": WALL + 15 * SECOND}]
    moments.append({"t": 20 * SECOND, "wall": WALL + 25 * SECOND + 1000})
    clock = WallClock(moments)
    assert clock.set_by == 5 * SECOND
    assert [clock.at(second * SECOND) - WALL for second in (5, 10, 20)] == [5 * SECOND, 10 * SECOND, 20 * SECOND + 1000]


def test_readings_that_lack_a_clock_or_go_back_are_left_out() -> None:
    clock = WallClock([{"t": 10, "wall": WALL}, {"t": 20}, {"t": 5, "wall": 0}, {}])
    assert clock.at(20) == WALL + 10
    assert WallClock([{}]).at(7) == 7
