"""A loop like torchtitan's: pipeline, FSDP2 and tensor parallelism, with sharded sequences, over one device mesh.

torchrun --nproc-per-node 4 examples/three_dimensions.py     # or 8: then data is sharded over 2
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import crossrank

WIDTH, BATCH, MICRO_BATCHES, STEPS = 32, 16, 4, 3

dist.init_process_group("gloo")
crossrank.enable(window="1:2")
torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 4, 2), mesh_dim_names=("pp", "dp_shard", "tp"))
pp, dp, tp = mesh["pp"], mesh["dp_shard"], mesh["tp"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(self.up(x).relu())
        return y


torch.manual_seed(pp.get_local_rank())
block = Block()
whole, shard = {"input_layouts": Shard(0)}, {"output_layouts": Shard(0)}
parallelize_module(block, tp, {"up": ColwiseParallel(**whole), "down": RowwiseParallel(**shard)})
fully_shard(block, mesh=dp)
stage = PipelineStage(block, pp.get_local_rank(), 2, torch.device("cpu"), group=pp.get_group())
schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)

losses: list[torch.Tensor] = []
generator = torch.Generator().manual_seed(dp.get_local_rank())
for _ in range(STEPS):
    batch = torch.randn(BATCH, WIDTH, generator=generator).chunk(2)[tp.get_local_rank()]
    is_first = stage.stage_index == 0
    schedule.step(batch) if is_first else schedule.step(target=batch.flip(1), losses=losses)
    optimizer.step()
    optimizer.zero_grad()

if dist.get_rank() == dist.get_world_size() - 1:
    print("loss", [one.item().hex() for one in losses])
crossrank.disable()
dist.destroy_process_group()
