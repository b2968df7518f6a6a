"""Which optimizer steps end an iteration. `|` is a backward pass, a letter an optimizer, a digit a parameter group."""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from typing import Any

import pytest
import torch

from crossrank.instrument.record.iterations import StepBoundaries, first_parameter


class Optimizer:
    pass


class Loop:
    """A training loop whose optimizer steps are counted."""

    def __init__(self) -> None:
        self.doubts = 0
        self.boundaries = StepBoundaries(self._doubt)
        self.optimizers: dict[str, Optimizer] = defaultdict(Optimizer)

    def _doubt(self) -> None:
        self.doubts += 1

    def run(self, steps: str) -> str:
        """For every step how many iterations it ended, in the layout of `steps`."""
        counts, after_backward = [], False
        for backward, name, part in re.findall(r"(\|)|([a-z])(\d*)", steps):
            if backward:
                after_backward = True
                counts.append("|")
            else:
                ended = self.boundaries.count(self.optimizers[name], int(part or 0), after_backward=after_backward)
                after_backward = False
                counts.append(str(ended))
        return "".join(counts)


def total(counts: str) -> int:
    return sum(int(count) for count in counts if count != "|")


ROUNDS = {
    "one optimizer": ("|a|a|a|a", "|1|1|1|1"),
    "gradient accumulation": ("|||a|||a|||a", "|||1|||1|||1"),
    "Muon and Adam": ("|ab|ab|ab", "|10|01|01"),
    "ZeRO-1 and 2 with two parameter groups": ("|a0a1|a0a1|a0a1", "|10|01|01"),
    "ZeRO-3 with sub-groups": ("|a0a1a2a3a4a5|a0a1a2a3a4a5|a0a1a2a3a4a5", "|100000|000001|000001"),
    "an optimizer that is called twice": ("|aa|aa|aa", "|10|01|01"),
    "an optimizer for every parameter, in any order": ("|abcd|abcd|abdc|dcba", "|1000|0001|0001|0001"),
    "discriminator and generator": ("|a|b|a|b|a|b", "|1|0|0|1|0|1"),
    "three in turn": ("|a|b|c|a|b|c|a|b|c", "|1|0|0|0|0|1|0|0|1"),
    "discriminator and generator under ZeRO": ("|a0a1|b0b1|a0a1|b0b1", "|10|00|00|01"),
    "discriminator that is called twice": ("|aa|b|aa|b|aa|b", "|10|0|00|1|00|1"),
}
CHANGES = {
    "a second optimizer joins": ("|a|a|a|ab|ab|ab", "|1|1|1|10|10|01"),
    "a second optimizer joins, after a backward pass": ("|a|a|a|b|a|b|a|b|a|b", "|1|1|1|0|1|0|0|1|0|1"),
    "a second optimizer under ZeRO joins": ("|a0a1|a0a1|b0b1|a0a1|b0b1|a0a1|b0b1", "|10|01|00|01|00|00|01"),
    "one steps now and then": ("|a|a|a|ab|a|a|a|ab", "|1|1|1|10|1|1|1|10"),
    "one steps now and then, before the other": ("|a|a|a|ba|a|a|a|ba", "|1|1|1|01|1|1|1|01"),
    "one steps in every second iteration": ("|a|ab|a|ab", "|1|10|1|10"),
    "the last one leaves": ("|ab|ab|a|a|a", "|10|01|0|2|1"),
    "the generator leaves": ("|a|b|a|b|a|a|a", "|1|0|0|1|0|2|1"),
    "the next phase": ("|a|a|a|a|b|b|b", "|1|1|1|1|0|2|1"),
    "the next phase, under ZeRO": ("|a0a1|a0a1|b0b1|b0b1|b0b1", "|10|01|00|11|01"),
    "the next phase of discriminator and generator": ("|a|b|a|b|c|d|c|d", "|1|0|0|1|0|0|1|1"),
    "one of an optimizer for every parameter rests": ("|abcd|abcd|abc|bacd", "|1000|0001|000|1010"),
}
HIDDEN = {
    "backward passes run in a graph": ("|a|a|aaaaaaaa", "|1|1|10004111"),
    "backward passes were never seen": ("aaaaaaaa", "10004111"),
    "backward passes of two optimizers run in a graph": ("|ab|abababababab", "|10|010000003101"),
    "a pass is seen again": ("|aaaaaaa|a|a", "|1000411|1|1"),
}
UNEVEN = {
    "two critic steps, then the generator": ("|a|a|b|a|a|b|a|a|b", "|1|1|0|1|1|0|1|1|0"),
    "the generator, then two critic steps": ("|b|a|a|b|a|a|b|a|a", "|1|0|0|1|0|2|0|1|1"),
    "one steps in every tenth, after a backward pass": ("|a|a|a|a|b|a|a|a|a|b|a", "|1|1|1|1|0|1|1|1|1|0|1"),
    "phases take turns": ("|a|a|a|b|b|b|a|a|a", "|1|1|1|0|2|1|0|2|1"),
}


@pytest.mark.parametrize(("steps", "counts"), (ROUNDS | CHANGES | HIDDEN).values(), ids=ROUNDS | CHANGES | HIDDEN)
def test_optimizer_steps_give_the_training_steps(steps: str, counts: str) -> None:
    loop = Loop()
    assert loop.run(steps) == counts
    assert loop.doubts == 0


@pytest.mark.parametrize(("steps", "counts"), UNEVEN.values(), ids=UNEVEN)
def test_an_optimizer_that_steps_more_often_than_another_raises_a_doubt(steps: str, counts: str) -> None:
    loop = Loop()
    assert loop.run(steps) == counts
    assert loop.doubts > 0


@pytest.mark.parametrize(
    "round_of_steps", [steps.split("|", 1)[1] for steps in ("|a", "|ab", "|a0a1a2", "|a|b", "|a|b|c0c1")]
)
@pytest.mark.parametrize("joining", ["", "x", "|x", "|x0x1"])
def test_ten_steps_count_as_ten_with_any_later_optimizer(round_of_steps: str, joining: str) -> None:
    loop = Loop()
    assert total(loop.run(f"|{round_of_steps}" * 4 + f"|{round_of_steps}{joining}" * 6)) == 10
    assert loop.doubts == 0


def test_the_first_step_of_a_phase_counts_at_once_if_the_old_optimizer_is_gone() -> None:
    loop = Loop()
    assert loop.run("|a|a|a") == "|1|1|1"
    del loop.optimizers["a"]
    gc.collect()
    assert loop.run("|b|b|b") == "|1|1|1"


def test_an_optimizer_at_a_reused_address_is_a_new_optimizer() -> None:
    loop = Loop()
    for _ in range(20):
        loop.optimizers.clear()
        assert loop.run("|a|b|a|b").count("1") == 2


def test_parameters_identify_the_part_that_an_optimizer_updates() -> None:
    first, second = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    of_first: list[dict[str, Any]] = [{"params": [first]}, {"params": []}]
    of_second: list[dict[str, Any]] = [{"params": []}, {"params": [second]}]
    assert first_parameter(of_first) == first_parameter(of_first)
    assert first_parameter(of_first) != first_parameter(of_second)
    assert first_parameter([{"params": []}]) == 0
