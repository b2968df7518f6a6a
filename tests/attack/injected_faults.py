"""A training loop that is recorded once for each function of the recorder, which raises an exception at its first call.

`python -m tests.attack.injected_faults` prints the functions whose exception reached the loop, or changed what it
computes: first with the compiled recorder, then, with the Python recorder and a window, those that did not run before.
With `0 2` it tries the first of every two, with `1 2` the second.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from types import CodeType, FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import crossrank
from crossrank import instrument
from tests.integration.kernels import remove_kernels

FOLDER = instrument.__path__[0]
BOUNDARIES = {
    # What the loop calls itself.
    "api.py __init__",
    "api.py disable",
    "api.py enable",
    "api.py step",
    # What torch calls, and what runs a part of the recorder and catches what that raises.
    "compiled_kernel.py <lambda>",
    "compiled_kernel.py _close",
    "compiled_kernel.py _guarded",
    "compiled_kernel.py _site",
    "dispatcher.py <lambda>",
    "dispatcher.py kernel",
    "iterations.py on_optimizer_step",
    "iterations.py step",
    "optimizer.py run_backward",
    "python_recorder.py __call__",
    "python_recorder.py _begin_wait",
    "python_recorder.py _end_wait",
    "python_recorder.py _record_wait",
    "python_recorder.py computed",
    "python_recorder.py functional",
    "python_recorder.py wait",
    "python_recorder.py wait_tensor",
    "recorder.py after",
    "session.py _attempt",
    "session.py close",
}
"""Functions that raise what they are made to raise: nothing of the recorder is above them."""


class Injector:
    """Has one function of the recorder raise; without one it notes which there are."""

    def __init__(self) -> None:
        self.seen: set[CodeType] = set()
        self.target: CodeType | None = None
        self.has_raised = False

    def trace(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code.co_filename.startswith(FOLDER):
            if self.target is None:
                self.seen.add(code)
            elif code is self.target and not self.has_raised:
                self.has_raised = True
                raise_in_recorder()

    def record(self, target: CodeType | None, folder: str, kernel: str, *, window: bool) -> float:
        """Record the loop, in which `target` raises; returns what the loop computes."""
        self.target, self.has_raised = target, False
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        try:
            crossrank.enable(tracing="ALL", directory=folder, recorder=kernel, window="1:2" if window else None)
            result = train()
            crossrank.disable()
        finally:
            sys.settrace(None)
            threading.settrace(None)
        return result


def raise_in_recorder() -> None:
    raise RuntimeError("forced")


# An exception with a frame of another file is one that the script raised, and reaches it.
for function in (raise_in_recorder, Injector.trace):
    function.__code__ = function.__code__.replace(co_filename=f"{FOLDER}/forced.py")


def train() -> float:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = 0.0
    for number in range(2):
        optimizer.zero_grad()
        loss = model(torch.full((4, 8), float(number))).sum()
        loss.backward()
        optimizer.step()
        tensor = torch.ones(4)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        assert dist.group.WORLD is not None
        functional.wait_tensor(functional.all_reduce(tensor, "sum", dist.group.WORLD))
        future = dist.all_reduce(torch.ones(4), async_op=True)
        assert future is not None
        future.get_future().wait()
        group = dist.new_group()
        dist.barrier(group)
        dist.destroy_process_group(group)
        crossrank.step()
        total += float(loss.detach()) + float(tensor.sum())
    return total


def main(part: int, parts: int) -> None:
    logging.getLogger("crossrank").setLevel(logging.CRITICAL)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plain, injector, found = train(), Injector(), dict[str, str]()
    tried = set[CodeType]()
    with tempfile.TemporaryDirectory() as folder:
        for kernel, window in (("compiled", False), ("python", True)):
            remove_kernels()
            for number in range(2):  # what is imported or cached at the first use is not run again
                injector.seen.clear()
                injector.record(None, f"{folder}/{kernel}-{number}", kernel, window=window)
            new = sorted(injector.seen - tried, key=lambda one: (one.co_filename, one.co_firstlineno, one.co_name))
            tried.update(new)
            for number, code in enumerate(new):
                if number % parts != part:
                    continue
                name = f"{Path(code.co_filename).name} {code.co_name}"
                try:
                    if injector.record(code, f"{folder}/{kernel}-of-{number}", kernel, window=window) != plain:
                        found[name] = "the result is another one"
                except BaseException as error:
                    frames = traceback.extract_tb(error.__traceback__)[::-1]
                    if name not in BOUNDARIES:
                        found[name] = " < ".join(f"{Path(one.filename).name}:{one.lineno}" for one in frames[:5])
                    crossrank.disable()
    print(json.dumps({"functions": len(tried), "reached the loop": found}, indent=1))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or (0, 1)))
