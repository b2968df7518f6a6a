"""What recording costs a step of training, with both kernels, on two gloo ranks with a core each.

    python benchmarks/training.py [--quick] [--rounds N] [--steps N] [MODEL ...]

Models: DDP (12 x Linear(256)), FSDP2 (a transformer of 48 small layers), Trainer (a small GPT-2 under transformers'
Trainer, where that is installed). Between two calls a step evicts the caches, so a call costs more here than in a tight
loop. A turn is so many steps without tracing, as many with it, and as many without; of each the step counts that a
quarter of them beat, for a neighbour's burst is not what is measured. Printed are the medians over the turns with their
quartiles: the CPU time that the thread of rank 0 which trains spends more, and the ratio of the wall times; beside each
the same of the two untraced parts, which is what the machine's noise alone gives.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import crossrank
from crossrank.instrument import api
from crossrank.tools.output.console import print_table
from tests.integration.kernels import remove_kernels

KERNELS = ("compiled", "python")
MODELS = ("DDP", "FSDP2", "Trainer")
_PARTS = ("before", "settling", "traced", "after")


@dataclass
class Turns:
    """Measures the steps of a loop, whoever runs it, and switches tracing on and off between them."""

    kernel: str
    rounds: int
    steps: int
    folder: str
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    """Part of a turn -> a step of each turn; so is the next one."""
    wall_us: dict[str, list[float]] = field(default_factory=dict)
    calls_per_step: float = 0.0
    _done: int = 0
    _taken: list[tuple[float, float]] = field(default_factory=list)
    _calls: int = 0
    _began: tuple[int, int] = (0, 0)

    @property
    def total(self) -> int:
        """Steps of the loop; the first ones are for warming up."""
        return self.steps * (len(_PARTS) * self.rounds + 1)

    def begin(self) -> None:
        """A step begins."""
        part = self._part()
        if self._done % self.steps == 0:
            self._taken.clear()
            if part == "settling":
                crossrank.enable(tracing="ALL", directory=self.folder, flight=False, recorder=self.kernel)
            elif part == "traced":
                self._calls = api._current.recorder.calls()  # type: ignore[union-attr]
            elif part == "after":
                now = api._current.recorder.calls()  # type: ignore[union-attr]
                self.calls_per_step = (now - self._calls) / self.steps
                crossrank.disable()
                remove_kernels()  # steps without it are as in a process that was never recorded
        self._began = time.thread_time_ns(), time.perf_counter_ns()

    def end(self) -> None:
        """It is over."""
        cpu, wall = time.thread_time_ns() - self._began[0], time.perf_counter_ns() - self._began[1]
        self._taken.append((cpu / 1000, wall / 1000))
        part = self._part()
        self._done += 1
        if self._done % self.steps == 0:
            for found, values in zip((self.cpu_us, self.wall_us), zip(*self._taken, strict=True), strict=True):
                found.setdefault(part, []).append(statistics.quantiles(values, n=4)[0])

    def _part(self) -> str:
        if self._done < self.steps:
            return "warm-up"
        return _PARTS[(self._done // self.steps - 1) % len(_PARTS)]

    def row(self, name: str) -> tuple[str, ...]:
        """The row of the table."""
        cpu = [self.cpu_us[part] for part in ("before", "traced", "after")]
        wall = [self.wall_us[part] for part in ("before", "traced", "after")]
        untraced = statistics.median(cpu[0] + cpu[2])
        added = [traced - (one + two) / 2 for one, traced, two in zip(*cpu, strict=True)]
        ratio = [2 * traced / (one + two) for one, traced, two in zip(*wall, strict=True)]
        noise = [(two - one) * (-1) ** turn for turn, (one, two) in enumerate(zip(cpu[0], cpu[2], strict=True))]
        still = [(two / one) ** (-1) ** turn for turn, (one, two) in enumerate(zip(wall[0], wall[2], strict=True))]
        return (
            f"{self.kernel}: {name}",
            f"{self.calls_per_step:g}",
            f"{untraced:.0f}",
            _spread(added, 0),
            f"{100 * statistics.median(added) / untraced:.2f}",
            _spread(noise, 0),
            _spread(ratio, 3),
            _spread(still, 3),
        )


def _spread(values: list[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def _loop(model: nn.Module, batch: torch.Tensor, turns: Turns) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(turns.total):
        turns.begin()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        turns.end()


def _ddp(turns: Turns) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
    _loop(DistributedDataParallel(model, bucket_cap_mb=1), torch.randn(256, 256), turns)


def _fsdp2(turns: Turns) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layer = nn.TransformerEncoderLayer(128, 2, 256, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 48, enable_nested_tensor=False)
    mesh = init_device_mesh("cpu", (2,))
    for one in model.layers:
        fully_shard(one, mesh=mesh)
    _loop(fully_shard(model, mesh=mesh), torch.randn(8, 64, 128), turns)


def _trainer(turns: Turns) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Measuring(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.end()

    ids = torch.randint(0, 1000, (64,))
    rows = [{"input_ids": ids, "labels": ids}] * (8 * turns.total)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=1000))
    arguments = TrainingArguments(
        output_dir=turns.folder,
        max_steps=turns.total,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Measuring()]).train()


_RUN: dict[str, Callable[[Turns], None]] = {"DDP": _ddp, "FSDP2": _fsdp2, "Trainer": _trainer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--quick", action="store_true", help="4 rounds of 5 steps, to see that it runs")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int)
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    models = arguments.models or [one for one in MODELS if one != "Trainer" or find_spec("transformers")]
    if "RANK" not in os.environ:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        subprocess.run([*words, *sys.argv[1:]], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return
    rounds, steps = (
        arguments.rounds or (4 if arguments.quick else 20),
        arguments.steps or (5 if arguments.quick else 20),
    )
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, rows = dist.get_rank(), []
    with tempfile.TemporaryDirectory() as folder:
        for name in models:
            for kernel in KERNELS:
                torch.manual_seed(0)
                turns = Turns(kernel=kernel, rounds=rounds, steps=steps, folder=folder)
                _RUN[name](turns)
                rows.append(turns.row(name))
    if rank == 0:
        print_table(
            f"Step of training, 2 gloo ranks, torch {torch.__version__}: {rounds} turns of {steps} steps; "
            "CPU us of the thread that trains",
            (
                *("kernel and model", "#calls", "#untraced", "#added", "#%", "#untraced - untraced"),
                *("#wall: traced / untraced", "#untraced / untraced"),
            ),
            rows,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
