"""Every way in which a backward pass begins is seen, and nothing is left behind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

from crossrank.instrument import torch_private
from crossrank.instrument.hooks import optimizer as backward


@pytest.fixture
def watch() -> Iterator[ModuleType]:
    backward.watch_backward()
    yield backward
    backward.uninstall()


def loss() -> torch.Tensor:
    return torch.ones(3, requires_grad=True).sum()


def of_a_tensor() -> None:
    loss().backward()


def gradient_only() -> None:
    inputs = torch.ones(3, requires_grad=True)
    torch.autograd.grad(inputs.sum(), inputs)


def engine_itself() -> None:
    """As Megatron's pipeline schedules do."""
    given = {"tensors": (loss(),), "grad_tensors": (torch.tensor(1.0),), "inputs": ()}
    flags = {"keep_graph": False, "create_graph": False, "allow_unreachable": True, "accumulate_grad": True}
    Variable._execution_engine.run_backward(**given, **flags)


def pipeline_stage() -> None:
    from torch.distributed.pipelining._backward import stage_backward

    inputs = torch.ones(3, requires_grad=True)
    stage_backward(inputs.sum(), None, [inputs])


def on_a_thread() -> None:
    thread = threading.Thread(target=of_a_tensor)
    thread.start()
    thread.join()


def compiled() -> None:
    torch.compile(lambda inputs: (inputs * 2).sum(), backend="aot_eager")(torch.ones(3, requires_grad=True)).backward()


def under_compiled_autograd() -> None:
    from torch._dynamo import compiled_autograd

    # The name has changed between versions.
    enable: Any = getattr(compiled_autograd, "_enable", None) or getattr(compiled_autograd, "enable")  # noqa: B009
    with enable(torch.compile(backend="eager")):
        of_a_tensor()


def inside_an_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))

    def closure() -> float:
        value = parameter.sum()
        value.backward()
        return value.item()

    torch.optim.LBFGS([parameter]).step(closure)


WAYS: dict[str, Callable[[], object]] = {
    "of a tensor": of_a_tensor,
    "of a function": lambda: torch.autograd.backward(loss()),
    "gradient only": gradient_only,
    "functional gradient": lambda: torch.func.grad(torch.sum)(torch.ones(3)),
    "the engine itself": engine_itself,
    "a pipeline stage": pipeline_stage,
    "on a thread": on_a_thread,
    "compiled": compiled,
    "under compiled autograd": under_compiled_autograd,
    "inside an optimizer": inside_an_optimizer,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_backward_pass_is_seen_once(way: Callable[[], object], watch: ModuleType) -> None:
    assert not watch.take_backward_began()
    way()
    assert watch.take_backward_began()
    assert not watch.take_backward_began()


def test_other_work_is_not_a_backward_pass(watch: ModuleType) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    torch.optim.Adam([parameter]).step()
    checkpoint(torch.sin, parameter, use_reentrant=True)
    checkpoint(torch.sin, parameter, use_reentrant=False)
    assert not watch.take_backward_began()


def test_a_failed_backward_pass_raises_its_original_error(watch: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(1).backward()
    assert watch.take_backward_began()


def test_an_engine_installed_by_another_library_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(type(Variable._execution_engine)):  # type: ignore[misc]
        pass

    monkeypatch.setattr(Variable, "_execution_engine", Variable._execution_engine)
    backward.watch_backward()
    theirs = Variable._execution_engine = Other()
    backward.uninstall()
    assert Variable._execution_engine is theirs


@pytest.mark.parametrize("engine", [None, object()])
def test_every_step_counts_as_after_backward_without_the_engine(
    engine: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Variable, "_execution_engine", engine)
    torch_private.has.cache_clear()
    with caplog.at_level(logging.WARNING, "crossrank"):
        backward.watch_backward()
    torch_private.has.cache_clear()
    (record,) = caplog.records
    assert "has no torch.autograd.Variable._execution_engine.run_backward: every optimizer step" in record.getMessage()
    assert Variable._execution_engine is engine
    assert backward.take_backward_began()
    assert backward.take_backward_began()
