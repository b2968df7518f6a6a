"""The jobs of `whole_steps.py`, one rank: `whole_step_jobs.py KIND STEPS record|plain`.

Rank 0 prints `[median ms of a step, MB of the largest process]` as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

WARM_UP = 3
Loss = Callable[[], Tensor]


class Transformer(nn.Module):
    def __init__(self, layers: int = 4, width: int = 256, words: int = 1000, *, checkpointed: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, batch_first=True)
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.body = nn.TransformerEncoder(layer, num_layers=layers, enable_nested_tensor=False)
        self.checkpointed = checkpointed

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.body.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)


class Llama(nn.Module):
    """Blocks of RMSNorm, attention with rotary positions, and SwiGLU."""

    def __init__(self, layers: int = 4, width: int = 320, heads: int = 5, words: int = 2000) -> None:
        super().__init__()
        self.embed, self.head, self.heads = nn.Embedding(words, width), nn.Linear(width, words, bias=False), heads
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "before": nn.RMSNorm(width),
                    "qkv": nn.Linear(width, 3 * width, bias=False),
                    "out": nn.Linear(width, width, bias=False),
                    "between": nn.RMSNorm(width),
                    "gate": nn.Linear(width, 3 * width, bias=False),
                    "up": nn.Linear(width, 3 * width, bias=False),
                    "down": nn.Linear(3 * width, width, bias=False),
                }
            )
            for _ in range(layers)
        )

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        batch, length, width = x.shape
        half = width // self.heads // 2
        angles = torch.outer(torch.arange(length), 10000 ** (-torch.arange(half) / half))
        turn = torch.polar(torch.ones_like(angles), angles)
        for block in self.blocks:
            parts = block["qkv"](block["before"](x)).view(batch, length, 3, self.heads, -1).unbind(2)
            query, key, value = (one.transpose(1, 2) for one in parts)
            query, key = (
                torch.view_as_real(torch.view_as_complex(one.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
                for one in (query, key)
            )
            seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + block["out"](seen.transpose(1, 2).flatten(2))
            y = block["between"](x)
            x = x + block["down"](nn.functional.silu(block["gate"](y)) * block["up"](y))
        return self.head(x)


class Experts(nn.Module):
    """A layer whose tokens go to the rank that a gate chooses: splits are others in each step. The gate does not learn,
    or later steps would move less than those of the window."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(width, dist.get_world_size()).requires_grad_(False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).softmax(1)
        to = chosen.argmax(1)
        counts = torch.bincount(to, minlength=dist.get_world_size())
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        send, receive = counts.tolist(), theirs.tolist()
        order = to.argsort()
        there = Exchange.apply(x[order], send, receive)
        back = Exchange.apply(self.expert(there).relu(), receive, send)
        return x + torch.empty_like(x).index_copy(0, order, back) * chosen.amax(1, keepdim=True)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.splits = send, receive
        out = x.new_empty(sum(receive), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        send, receive = ctx.splits
        out = grad.new_empty(sum(send), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), send, receive)
        return out, None, None


def words_of(model: nn.Module, batch: int, length: int, words: int = 1000) -> Loss:
    def loss() -> Tensor:
        given = torch.randint(0, words, (batch, length))
        return nn.functional.cross_entropy(model(given).flatten(0, 1), given.flatten())

    return loss


def numbers(model: nn.Module, *shape: int) -> Loss:
    def loss() -> Tensor:
        made = model(torch.randn(shape))
        return (made[0] if isinstance(made, tuple) else made).square().mean()

    return loss


def sharded(model: Transformer) -> nn.Module:
    for layer in model.body.layers:
        fully_shard(layer)
    return fully_shard(model)


def convolutions(width: int = 32) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(4):
        layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def job(kind: str) -> tuple[nn.Module, Loss]:
    """A model and what gives its loss on a batch of its own."""
    if kind in ("fsdp2", "checkpointed"):
        model = sharded(Transformer(checkpointed=kind == "checkpointed"))
        return model, words_of(model, 8, 64)
    if kind == "experts":
        model = nn.Sequential(*(Experts(128) for _ in range(4)))
        return model, numbers(model, 512, 128)
    if kind == "compiled":
        model = DistributedDataParallel(Transformer(2, 128))
        return model, words_of(torch.compile(model), 4, 64)
    bare: nn.Module = {
        "llama": Llama,
        "convolutions": convolutions,
        "lstm": lambda: nn.LSTM(64, 128, num_layers=2, batch_first=True),
    }.get(kind, Transformer)()
    model = DistributedDataParallel(bare)
    if kind == "llama":
        return model, words_of(model, 4, 128, 2000)
    if kind == "convolutions":
        return model, numbers(model, 8, 3, 32, 32)
    if kind == "lstm":
        return model, numbers(model, 16, 32, 64)
    return model, words_of(model, 8, 64)


def steps_of(kind: str) -> Iterator[float]:
    """Train, and give the seconds of each step."""
    model, loss = job(kind)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in count():
        start = time.perf_counter()
        rounds = 2 if kind == "accumulated" else 1
        for number in range(rounds):
            apart: AbstractContextManager[object] = nullcontext()
            if isinstance(model, DistributedDataParallel) and number < rounds - 1:
                apart = model.no_sync()
            with apart:
                with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                    given = loss()
                given.backward()
        if kind == "experts":
            for one in model.parameters():
                if one.grad is not None:
                    dist.all_reduce(one.grad)
        optimizer.step()
        optimizer.zero_grad()
        yield time.perf_counter() - start


def main() -> None:
    kind, steps, record = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "record"
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    if record:
        import crossrank

        crossrank.enable()
    took = [seconds for _, seconds in zip(range(steps), steps_of(kind), strict=False)]
    if record:
        crossrank.disable()
    peak = torch.tensor(float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps([statistics.median(took[WARM_UP:]) * 1000, peak.item() / 1024]), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may end a process that leaves in another way


if __name__ == "__main__":
    main()
