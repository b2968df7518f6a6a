"""DeepSpeed's ZeRO 2 on CPUs: its inner optimizer steps several times an iteration.

DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/with_deepspeed.py
"""

from __future__ import annotations

import deepspeed
import torch
from torch import nn

import crossrank

STEPS = 4

deepspeed.init_distributed("gloo")
crossrank.enable()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
weights = [one for one in model.parameters() if one.ndim > 1]
biases = [one for one in model.parameters() if one.ndim == 1]
optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=1e-2)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=optimizer,
    config={
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    },
)
generator = torch.Generator().manual_seed(torch.distributed.get_rank())
for _ in range(STEPS):
    inputs = torch.randn(8, 16, generator=generator)
    loss = (engine(inputs.bfloat16()).float() - inputs.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()

torch.distributed.all_reduce(loss := loss.detach().clone())
if torch.distributed.get_rank() == 0:
    print("loss", loss.item().hex(), flush=True)
torch.distributed.barrier()
crossrank.disable()
torch.distributed.destroy_process_group()
