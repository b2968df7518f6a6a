"""Operations of two traces are aligned by their names, also where one of them lacks some."""

from __future__ import annotations

import pytest

from crossrank.tools.graph.linking.name_alignment import aligned
from tests.unit.graph.linking.test_event_matching import events, nodes

STEP = "abcdefghijklmnop"


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (STEP, STEP, [*range(16)]),
        (STEP, STEP[3:], [-1, -1, -1, *range(13)]),
        (STEP[3:], STEP, [*range(3, 16)]),
        ("xy" + STEP, STEP, [-1, -1, *range(16)]),
        (STEP + "xyz" + STEP, STEP + STEP, [*range(16), -1, -1, -1, *range(16, 32)]),
        (STEP + STEP, STEP + "xyz" + STEP, [*range(16), *range(19, 35)]),
        (STEP + "x" + STEP, STEP + "y" + STEP, [*range(16), -1, *range(17, 33)]),
        (STEP + "x" + STEP + STEP, STEP + STEP + "yz" + STEP, [*range(16), -1, *range(16, 32), *range(34, 50)]),
    ],
    ids=["equal", "later", "earlier", "not in theirs", "gap in theirs", "gap in ours", "renamed", "one gap in each"],
)
def test_names_are_aligned_around_what_one_trace_lacks(ours: str, theirs: str, expected: list[int]) -> None:
    assert aligned(nodes(ours), events(theirs))[0] == expected


def test_a_single_equal_name_at_the_end_of_a_trace_does_not_match() -> None:
    assert aligned(nodes(STEP + "xyzc"), events(STEP + "c"))[0] == [*range(16), -1, -1, -1, -1]
