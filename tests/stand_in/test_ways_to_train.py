"""Ways to train, recorded on NCCL: every kernel of the log is of the calls that launched it, and every call of a window
has its kernels."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from crossrank.recording import CommsFile
from crossrank.tools.graph.linking.link import link
from crossrank.tools.graph.linking.linked_trace import LinkedTrace
from tests.integration.commands import Commands
from tests.stand_in.logs import log_to, rows
from tests.stand_in.test_machine import record

BEGIN = """
torch.manual_seed(0)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
print("pid", rank, os.getpid(), flush=True)

def train(model, steps=5):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(8, 64).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def blocks():
    both = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(2)]
    return nn.Sequential(*both).cuda()
"""
END = """
torch.cuda.synchronize()
torch.save([one.cpu() for one in results], f"results-{rank}.pt")
dist.barrier()
"""

JOBS: dict[str, tuple[int, str]] = {
    "sharded": (
        2,
        """
from torch.distributed.fsdp import fully_shard
model = blocks()
for block in model:
    fully_shard(block)
fully_shard(model)
train(model)
results = [one.to_local().detach() for one in model.parameters()]
""",
    ),
    "tensor parallel, and data parallel around it": (
        4,
        """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))
model = blocks()
for block in model:
    parallelize_module(block, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(block, mesh=mesh["data"])
train(model)
results = [one.to_local().detach() for one in model.parameters()]
""",
    ),
    "pipeline": (
        2,
        """
model, peer = blocks(), 1 - rank
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def exchange(sent=None, receives=False):
    got = torch.empty(2, 64, device="cuda", requires_grad=True) if receives else None
    ops = [dist.P2POp(dist.isend, sent, peer)] if sent is not None else []
    ops += [dist.P2POp(dist.irecv, got.data, peer)] if receives else []
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got

for step in range(5):  # one forward, one backward: what goes on and what comes back go out together
    if rank == 0:
        outputs = [model(torch.ones(2, 64).cuda()) for _ in range(4)]
        exchange(outputs[0].detach())
        for number in range(4):
            after = outputs[number + 1].detach() if number < 3 else None
            outputs[number].backward(exchange(after, receives=True))
    else:
        given = exchange(receives=True)
        for number in range(4):
            model(given).sum().backward()
            given = exchange(given.grad, receives=number < 3)
    optimizer.step()
    optimizer.zero_grad()
results = [one.detach() for one in model.parameters()]
""",
    ),
    "experts": (
        2,
        """
results = []
for step in range(5):
    sent = [3 + step + rank, 5 + step]
    received = [3 + step, 4 + step] if rank == 0 else [5 + step, 5 + step]
    tokens, got = torch.full((sum(sent),), float(rank), device="cuda"), torch.empty(sum(received), device="cuda")
    dist.all_to_all_single(got, tokens, received, sent)
    dist.all_to_all_single(tokens, got, sent, received)
    results.append(got)
    crossrank.step()
""",
    ),
    "two streams": (
        2,
        """
other, stream = dist.new_group(), torch.cuda.Stream()
results = [torch.full((1 << 16,), float(rank + 1), device="cuda") for _ in range(2)]
torch.cuda.synchronize()
for step in range(5):
    first = dist.all_reduce(results[0], async_op=True)
    with torch.cuda.stream(stream):
        second = dist.all_reduce(results[1], group=other, async_op=True)
        second.wait()
    first.wait()
    torch.cuda.synchronize()
    crossrank.step()
""",
    ),
    "a group that is made in the window": (
        2,
        """
results = [torch.ones(64, device="cuda")]
late = None
for step in range(5):
    dist.all_reduce(results[0])
    if step == 2:
        late = dist.new_group(group_desc="late")
    if late is not None:
        dist.all_reduce(results[0], group=late)
    torch.cuda.synchronize()
    crossrank.step()
""",
    ),
}
NAMES = {
    "AllReduce": ("all_reduce", "barrier"),
    "AllGather": ("all_gather",),
    "ReduceScatter": ("reduce_scatter",),
    "Broadcast": ("broadcast",),
    "Reduce": ("reduce",),
    "AlltoAll": ("all_to_all",),
    "Send": ("send", "all_to_all"),
    "Recv": ("recv", "all_to_all"),
}

_BY_MESSAGES = ("send", "recv", "scatter", "gather")
"""Operations that torch makes of sends and receives; an uneven all_to_all is another."""


def run(name: str, folder: Path, **variables: str) -> dict[int, int]:
    """Run a job; rank -> its process."""
    ranks, source = JOBS[name]
    ended = record(folder, BEGIN + source + END, ranks, **variables)
    return {int(line.split()[1]): int(line.split()[2]) for line in ended.stdout.splitlines() if line[:3] == "pid"}


@pytest.mark.parametrize("name", JOBS)
def test_every_kernel_in_a_window_links_to_its_calls(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Commands
) -> None:
    run(name, tmp_path / "without", TRACING="NONE", TRACING_NVTX="0")
    log = log_to(tmp_path / "log", monkeypatch)
    process = run(name, tmp_path / "with", TRACING="ALL", TRACING_WINDOW="2:4")
    recording = tmp_path / "with" / "recording"
    for rank, pid in process.items():
        results = [(tmp_path / folder / f"results-{rank}.pt").read_bytes() for folder in ("with", "without")]
        assert results[0] == results[1]
        ran = {row["correlation"]: row for row in rows(log, "communication") if row["pid"] == pid}
        assert_linked(_linked(recording, rank), ran)
        recorded = list(CommsFile(str(recording / f"rank-{rank}.comms.jsonl.zst")).records())
        launched = [call for row in ran.values() for call in row["calls"]]
        collective = Counter(one["op"] for one in launched if one["op"] not in ("Send", "Recv"))
        assert sum(collective.values()) == sum(
            one.op not in _BY_MESSAGES and not (one.op == "all_to_all" and one.in_split) for one in recorded
        )
    found = command.json("bandwidth", recording)
    assert not found.get("problems")


def assert_linked(linked: LinkedTrace, ran: dict[int, dict[str, Any]]) -> None:
    report = linked.report
    assert (report.communication_kernels_alone, report.activities_unlinked) == (0, {})
    kernels = {one.id: one for one in linked.activities if "ncclDevKernel" in one.name}
    in_window = {number: one for number, one in kernels.items() if one.unlinked is None}
    assert in_window
    calls_of = {number: [one for one in linked.communications if number in one.activities] for number in in_window}
    for number, kernel in in_window.items():
        row = ran[kernel.correlation or 0]
        assert abs(kernel.duration_ns - (row["end"] - row["begin"])) <= 0.01 * kernel.duration_ns + 5
        assert calls_of[number], kernel
        launched = {op for call in row["calls"] for op in NAMES[call["op"]]}
        assert {one.record.op for one in calls_of[number]} <= launched
    without = [one for one in linked.communications if not one.activities]
    assert without == [], [one.record for one in without]


def _linked(recording: Path, rank: int) -> LinkedTrace:
    et, kineto, comms = (
        str(recording / f"rank-{rank}.{kind}.zst") for kind in ("et.json", "kineto.json", "comms.jsonl")
    )
    return link(et, kineto, comms, rank=rank)
