"""The main job of `make demo`: four gloo ranks that pose as two nodes.

They train a small transformer with DDP, then with FSDP2 (sharded inside a node, replicated across nodes), and pass
activations from rank to rank as a pipeline does. The only lines about crossrank are `import`, `enable`, with the node
that each rank pretends to be on, and `disable`.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import crossrank

RANKS_PER_NODE = 2
STEPS = 4
BATCH, LENGTH, WIDTH = 4, 32, 128


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)


def train(model: nn.Module, rank: int) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    loss = torch.zeros(())
    for _ in range(STEPS):
        batch = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
        loss = (model(batch) - batch.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def pass_along(rank: int, world_size: int) -> None:
    """One pipeline step: activations to the next rank, gradients back to the one before."""
    activations = torch.full((BATCH, LENGTH, WIDTH), float(rank))
    received = torch.empty_like(activations)
    ops = []
    if rank + 1 < world_size:
        ops.append(dist.P2POp(dist.isend, activations, rank + 1))
    if rank > 0:
        ops.append(dist.P2POp(dist.irecv, received, rank - 1))
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    crossrank.enable(node=f"node-{rank // RANKS_PER_NODE}", window=os.environ.get("TRACING_WINDOW", "2:4:4"))

    ddp_loss = train(DistributedDataParallel(make_model()), rank)

    sharded = make_model()
    mesh = init_device_mesh(
        "cpu", (world_size // RANKS_PER_NODE, RANKS_PER_NODE), mesh_dim_names=("replicate", "shard")
    )
    for layer in sharded.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    fsdp_loss = train(sharded, rank)

    pass_along(rank, world_size)
    dist.barrier()
    if rank == 0:
        print(f"trained: loss {ddp_loss:.4f} with DDP, {fsdp_loss:.4f} with FSDP2")
    crossrank.disable()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
