from __future__ import annotations

import pytest

from crossrank.instrument.steps import StepBoundaries


@pytest.mark.parametrize(
    ("steps", "iterations"),
    [
        ("aaaa", "1111"),
        ("abab", "1001"),  # the first iteration is counted when a steps, all later ones when b does
        ("abcabcabc", "100001001"),
        ("aaaabbb", "1111111"),  # a second training phase
        ("aaabababab", "1111010101"),  # a generator that joins after a warm-up
        ("aaaabaaaabaaaab", "111110111011110"),  # an optimizer that steps now and then
    ],
)
def test_which_optimizer_steps_end_an_iteration(steps: str, iterations: str) -> None:
    boundaries = StepBoundaries()
    assert "".join("1" if boundaries.ends_iteration(ord(step)) else "0" for step in steps) == iterations
