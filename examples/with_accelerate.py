"""Accelerate, with gradient accumulation: an iteration is a real step of the optimizer.

torchrun --nproc-per-node 2 examples/with_accelerate.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import crossrank

crossrank.enable()

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
data = TensorDataset(torch.randn(128, 16), torch.randn(128, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))

for inputs, targets in loader:  # 8 batches on each of 2 ranks: 4 iterations
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

losses = accelerator.gather(loss.detach())
accelerator.print("loss", [one.hex() for one in losses.tolist()])
accelerator.wait_for_everyone()
crossrank.disable()
accelerator.end_training()
