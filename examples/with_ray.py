"""Ray Train: `enable()` at the beginning of what each worker runs, with a folder that all of them see.

python examples/with_ray.py
"""

from __future__ import annotations

import os
from pathlib import Path

import ray.train
import ray.train.torch
import torch
from torch import nn

import crossrank

STEPS = 4


def train(config: dict[str, str]) -> str:
    crossrank.enable(directory=config["directory"])
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(STEPS):
        inputs = torch.randn(8, 16, generator=generator)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.distributed.all_reduce(loss := loss.detach())
    crossrank.disable()
    value: str = loss.item().hex()
    return value


if __name__ == "__main__":
    directory = str(Path(os.environ.get("TRACING_DIR", "crossrank-recording")).absolute())
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"directory": directory},
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=str(Path("ray-results").absolute())),
    )
    ray.init(num_cpus=2, include_dashboard=False)
    print("loss", trainer.fit().return_value, flush=True)
