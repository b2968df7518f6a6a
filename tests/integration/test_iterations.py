"""Iterations of real optimizers, as training loops and frameworks step them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.optim import SGD, AdamW

import crossrank
from tests.integration.traces import execution_trace_ids
from tests.integration.world import TwoRanks

ITERATIONS = 6
JOINS = 3  # in which iteration an optimizer joins


class PerGroup:
    """Steps its inner optimizer once per parameter group, as DeepSpeed's ZeRO-1 and 2 do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def step(self) -> None:
        groups = self.inner.param_groups
        for group in groups:
            self.inner.param_groups = [group]
            self.inner.step()
        self.inner.param_groups = groups


class PerSubGroup(PerGroup):
    """Steps its inner optimizer once per sub-group that it puts into one parameter group, as ZeRO-3 does."""

    def step(self) -> None:
        (group,) = self.inner.param_groups
        parameters = group["params"]
        for parameter in parameters:
            group["params"] = [parameter]
            self.inner.step()
        group["params"] = parameters


def _communicate(loss: torch.Tensor) -> None:
    loss.backward()
    dist.all_reduce(torch.ones(1))


def _model() -> nn.Linear:
    return nn.Linear(4, 4)


def _loss(*models: nn.Linear) -> torch.Tensor:
    return torch.stack([model(torch.ones(4)).sum() for model in models]).sum()


def per_group(rank: int) -> None:
    first, second = _model(), _model()
    groups: list[dict[str, Any]] = [{"params": first.parameters()}, {"params": second.parameters(), "weight_decay": 0}]
    optimizer = PerGroup(AdamW(groups))
    for _ in range(ITERATIONS):
        _communicate(_loss(first, second))
        optimizer.step()


def per_sub_group(rank: int) -> None:
    model = _model()
    optimizer = PerSubGroup(AdamW(model.parameters()))
    for _ in range(ITERATIONS):
        _communicate(_loss(model))
        optimizer.step()


def two_for_one_loss(rank: int) -> None:
    first, second = _model(), _model()
    optimizers = SGD(first.parameters()), AdamW(second.parameters())
    for _ in range(ITERATIONS):
        _communicate(_loss(first, second))
        for optimizer in optimizers:
            optimizer.step()


def joins_later(rank: int) -> None:
    first, second = _model(), _model()
    optimizers = SGD(first.parameters()), AdamW(second.parameters())
    for iteration in range(ITERATIONS):
        _communicate(_loss(first, second))
        optimizers[0].step()
        if iteration >= JOINS:
            optimizers[1].step()


def accumulated(rank: int) -> None:
    model = _model()
    optimizer = SGD(model.parameters())
    for _ in range(ITERATIONS):
        _loss(model).backward()
        _communicate(_loss(model))
        optimizer.step()


def in_the_backward_pass(rank: int) -> None:
    """Every parameter has an optimizer of its own, which steps as soon as its gradient is there."""
    model = _model()
    for parameter in model.parameters():
        optimizer = SGD([parameter])
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    for _ in range(ITERATIONS):
        dist.all_reduce(torch.ones(1))
        _loss(model).backward()


def closure(rank: int) -> None:
    """As Lightning steps its optimizers."""
    model = _model()
    optimizer = SGD(model.parameters())

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(model)
        _communicate(loss)
        return loss

    for _ in range(ITERATIONS):
        optimizer.step(evaluate)


LOOPS = [per_group, per_sub_group, two_for_one_loss, joins_later, accumulated, in_the_backward_pass, closure]


@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_iteration_is_one_step(loop: Callable[[int], None], two_ranks: TwoRanks) -> None:
    two_ranks.run(loop, window="4:5")
    for rank in (0, 1):
        comms = two_ranks.recorded(rank)
        records = comms.calls
        assert [record.step for record in records] == list(range(ITERATIONS))
        assert [line["step"] for line in comms.steps] == list(range(1, ITERATIONS + 1))
        assert list(execution_trace_ids(two_ranks.load("et", rank))) == [records[4].id]


def _two_critic_steps(rank: int) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("crossrank").addHandler(handler)
    critic, generator = _model(), _model()
    critic_optimizer, generator_optimizer = SGD(critic.parameters()), SGD(generator.parameters())
    for _ in range(ITERATIONS):
        for _ in range(2):
            _communicate(_loss(critic))
            critic_optimizer.step()
        _communicate(_loss(generator))
        generator_optimizer.step()
    logging.getLogger("crossrank").removeHandler(handler)
    return said


def test_ambiguous_steps_give_one_warning_per_job(two_ranks: TwoRanks) -> None:
    (warning,), others = two_ranks.run(_two_critic_steps)
    assert others == []
    assert "call crossrank.step() at the end of every iteration" in warning


def _without_the_engine(rank: int, directory: str) -> bool:
    engine = Variable._execution_engine

    class Unknown:
        def __getattr__(self, name: str) -> object:
            if name == "run_backward":
                raise AttributeError(name)
            return getattr(engine, name)

    Variable._execution_engine = Unknown()  # type: ignore[assignment]
    try:
        with crossrank.enable(tracing="ALL", directory=directory) as tracing:
            dist.all_reduce(torch.ones(1))
            return tracing.active
    finally:
        Variable._execution_engine = engine


def test_calls_are_recorded_without_an_autograd_hook(two_ranks: TwoRanks) -> None:
    assert two_ranks.run_bare(_without_the_engine) == [True, True]
    assert len(two_ranks.recorded().calls) == 1
