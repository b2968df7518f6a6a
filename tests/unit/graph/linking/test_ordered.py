"""Looking up what was before or after a time."""

from __future__ import annotations

from crossrank.tools.graph.linking.ordered import NEVER, ordered_by


def test_things_are_found_by_their_key_and_time() -> None:
    lanes = ordered_by([("a", 30, 7), ("b", 10, 1), ("a", 10, 5), ("a", 20, 6)])
    assert [lanes["a"].last_until(time) for time in (9, 10, 19, 20, 99)] == [-1, 5, 5, 6, 7]
    assert [lanes["a"].first_from(time) for time in (0, 10, 11, 30, 31)] == [5, 5, 6, 7, -1]
    assert (lanes["b"].at_or_before(10), lanes["b"].at_or_before(9)) == ((10, 1), NEVER)


def test_a_key_without_things_finds_nothing() -> None:
    lanes = ordered_by([("a", 1, 1)])
    assert (lanes["c"].last_until(5), lanes["c"].first_from(0)) == (-1, -1)
