"""The jobs, each one rank: `jobs.py NAME FOLDER` under torchrun. JOB_DEVICE is `cuda` or `cpu`; every rank uses cuda:0.

Jobs that are traced read their settings from the variables; TRACING=NONE is the control.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import crossrank

CUDA = os.environ["JOB_DEVICE"] == "cuda"
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
FOLDER = Path(sys.argv[2])


def say(name: str, **values: object) -> None:
    """Leave facts for the test."""
    (FOLDER / f"{name}-{RANK}.json").write_text(json.dumps(values, default=str))


def begin(seconds: float = 120, *, eager: bool = False) -> None:
    if CUDA:
        torch.cuda.set_device(DEVICE)
    else:
        torch.set_num_threads(1)
    options: dict[str, Any] = {"device_id": DEVICE} if eager and CUDA else {}
    dist.init_process_group("nccl" if CUDA else "gloo", timeout=timedelta(seconds=seconds), **options)


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def end() -> None:
    synchronize()
    dist.barrier()
    crossrank.disable()
    dist.destroy_process_group()


def leave() -> None:
    """End without tearing down what may hang."""
    crossrank.disable()
    os._exit(0)


def nccl_version() -> int | None:
    """That of the NCCL which is loaded, which need not be the one that torch was built with."""
    if not CUDA:
        return None
    import ctypes

    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value


def digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for one in tensors:
        found.update(one.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def model() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, nhead=4, dim_feedforward=512, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, num_layers=1, enable_nested_tensor=False).to(DEVICE)


def train(net: nn.Module, steps: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(RANK)
    for _ in range(steps):
        x = torch.randn(8, 64, 128, generator=generator).to(DEVICE)
        (net(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def distributed(net: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net, device_ids=[0] if CUDA else None)


# ----------------------------------------------------------------------------------------------------------------------


def hello() -> None:
    """An all_reduce."""
    begin(40)
    ones = torch.full((1 << 18,), float(RANK + 1), device=DEVICE)
    dist.all_reduce(ones)
    synchronize()
    say("hello", right=bool((ones == WORLD * (WORLD + 1) / 2).all()), nccl=nccl_version(), torch=torch.__version__)
    end()


def training() -> None:
    """DDP, FSDP2, functional, coalesced, P2P, uneven splits, asynchronous; a window over iterations 2 and 3."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    begin(150)
    crossrank.enable(window="2:4")
    ddp = distributed(model())
    train(ddp, 3)
    received = every_operation()  # of iteration 3, which the step of another optimizer ends
    one = nn.Parameter(torch.zeros(1, device=DEVICE))
    one.grad = torch.ones_like(one)
    torch.optim.SGD([one], lr=0.1).step()
    synchronize()
    fsdp = model()
    mesh = init_device_mesh(DEVICE.type, (WORLD,), mesh_dim_names=("dp_shard",))
    for layer in fsdp.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(fsdp, mesh=mesh)
    train(fsdp, 2)
    synchronize()
    sharded = digest(one.to_local() for one in fsdp.parameters() if isinstance(one, DTensor))
    say("training", ddp=digest(ddp.parameters()), fsdp=sharded, received=received)
    end()


def every_operation() -> float:
    """Returns the sum of what was received from the neighbour."""
    import torch.distributed._functional_collectives as functional

    right, left = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    part = torch.full((1 << 16,), float(RANK), device=DEVICE)
    whole = torch.empty(WORLD << 16, device=DEVICE)
    dist.all_gather_into_tensor(whole, part)
    work = dist.all_reduce(whole, async_op=True)
    work.wait()
    dist.reduce_scatter_tensor(part, whole.clone())
    with dist._coalescing_manager(device=DEVICE) if CUDA else contextlib.nullcontext():
        for count in (1000, 2000, 3000):
            dist.all_reduce(torch.ones(count, device=DEVICE))
    received = torch.zeros_like(part)
    if WORLD > 1:
        for both in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, part, right), dist.P2POp(dist.irecv, received, left)]
        ):
            both.wait()
        if RANK == 0:
            dist.send(part, 1)
        elif RANK == 1:
            dist.recv(received, 0)
    sent = [100 * (RANK + 1 + rank) for rank in range(WORLD)]
    got = [100 * (rank + 1 + RANK) for rank in range(WORLD)]
    dist.all_to_all_single(torch.empty(sum(got), device=DEVICE), torch.ones(sum(sent), device=DEVICE), got, sent)
    dist.broadcast(part, 0)
    dist.reduce(part, 0)
    dist.all_gather_object([None] * WORLD, {"rank": RANK})
    dist.barrier()
    functional.wait_tensor(functional.all_reduce(part, "sum", list(range(WORLD))))
    return float(received.sum())


def windows() -> None:
    """Windows over iterations 2, 4 and 6, of five calls each."""
    begin()
    crossrank.enable(window="2:3:2")
    iterate(7, calls=5, elements=1 << 14)
    end()


def iterate(iterations: int, *, calls: int, elements: int) -> None:
    for _ in range(iterations):
        for _ in range(calls):
            dist.all_reduce(torch.ones(elements, device=DEVICE))
        crossrank.step()


def timing() -> None:
    """Durations by CUDA events of its own, in a window; a call is under way when the window ends."""
    begin()
    crossrank.enable(window="1:2")
    sizes = {1 << shift: torch.ones((1 << shift) // 4, device=DEVICE) for shift in (12, 20, 24)}
    for one in sizes.values():
        dist.all_reduce(one)
    synchronize()
    dist.barrier()
    crossrank.step()
    took: dict[int, list[float]] = {}
    for size, one in sizes.items():
        took[size] = [microseconds(partial(dist.all_reduce, one)) for _ in range(7)]
    pending = dist.all_reduce(sizes[1 << 24], async_op=True)
    crossrank.step()
    pending.wait()
    synchronize()
    say("timing", us=took)
    end()


def microseconds(call: Callable[[], object]) -> float:
    if not CUDA:
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e6
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last) * 1e3)


def receive_ahead() -> None:
    """A receive is posted when the window ends, whose send comes after the end: it must not be waited for."""
    begin(60)
    crossrank.enable(window="1:2", hang_seconds=0)
    peer = 1 - RANK
    a, b = torch.ones(1 << 10, device=DEVICE), torch.empty(1 << 10, device=DEVICE)
    there, back = dist.new_group([0, 1]), dist.new_group([0, 1])  # a communicator for each direction
    out, into = (there, back) if RANK == 0 else (back, there)
    for first in (0, 1):
        work = dist.isend(a, peer, group=out) if first == RANK else dist.irecv(b, peer, group=into)
        assert work is not None
        work.wait()
        synchronize()
    crossrank.step()
    ahead = dist.irecv(b, peer, group=into)
    crossrank.step()
    sending = dist.isend(a, peer, group=out)
    assert ahead is not None
    assert sending is not None
    sending.wait()
    ahead.wait()
    synchronize()
    say("receive_ahead", passed=True)
    leave()


def hang() -> None:
    """Rank 1 stays away from the third all_reduce; JOB_TIMEOUT later NCCL's watchdog ends the job."""
    begin(float(os.environ.get("JOB_TIMEOUT", "100")))
    crossrank.enable(hang_seconds=4)
    for step in range(3):
        if step == 2 and RANK == 1:
            time.sleep(300)
        dist.all_reduce(torch.ones(1 << 20, device=DEVICE))
        synchronize()


def hang_beside_nccl() -> None:
    """The same with a gloo group beside NCCL, as checkpoints have it."""
    begin(100)
    crossrank.enable(hang_seconds=4)
    cpu = dist.new_group(backend="gloo", timeout=timedelta(seconds=100), group_desc="checkpoint")
    for step in range(3):
        dist.all_reduce(torch.ones(1 << 16, device=DEVICE))
        synchronize()
        if step == 2 and RANK == 1:
            time.sleep(200)
        dist.all_reduce(torch.ones(16), group=cpu)


def stuck_in_window() -> None:
    """Rank 0 is stuck on its GPU while a window is open."""
    begin(200)
    crossrank.enable(hang_seconds=0, window="1:9")
    for step in range(3):
        if step == 2 and RANK == 1:
            time.sleep(300)
        ones = torch.ones(1 << 20, device=DEVICE)
        if step == 2:
            say("stuck", pid=os.getpid())
        dist.all_reduce(ones)
        synchronize()
        crossrank.step()


def ring() -> None:
    """Large sends and receives one by one round a ring, over communicators that are made when they are needed.

    A pair's communicator does one after the other: every second rank receives first, or all would wait to send."""
    begin(60, eager=os.environ.get("JOB_EAGER") == "1")
    crossrank.enable()
    right, left = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    a, b = torch.full((8 << 20,), float(RANK), device=DEVICE), torch.empty(8 << 20, device=DEVICE)
    for _ in range(3):
        calls = [partial(dist.isend, a, right), partial(dist.irecv, b, left)]
        for work in [call() for call in (calls if RANK % 2 == 0 else reversed(calls))]:
            assert work is not None
            work.wait()
        synchronize()
        crossrank.step()
    say("ring", right=bool((b == left).all()))
    leave()


def barrier() -> None:
    """An asynchronous barrier around a send, on a pair that is connected before: NCCL does not connect two ranks while
    a kernel on their GPU waits for one of them."""
    begin(60)
    crossrank.enable()
    a = torch.ones(1 << 10, device=DEVICE)
    dist.all_reduce(a)
    dist.barrier()
    synchronize()
    other = dist.new_group()
    dist.send(a, 1, group=other) if RANK == 0 else dist.recv(a, 0, group=other)
    synchronize()
    for _ in range(2):
        if RANK == 0:
            work = dist.barrier(async_op=True)
            dist.send(a, 1, group=other)
            work.wait()
        else:
            dist.recv(a, 0, group=other)
            dist.barrier()
        synchronize()
        crossrank.step()
    leave()


def graphs() -> None:
    """CUDA graphs are captured while calls are recorded."""
    begin()
    crossrank.enable(window="3:5")
    found: dict[str, object] = {}

    def attempt(name: str, body: Callable[[], object]) -> None:
        try:
            found[name] = body()
            synchronize()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"

    x = torch.ones(1 << 12, device=DEVICE)
    for _ in range(3):
        dist.all_reduce(x)
    synchronize()

    def plain() -> bool:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(x)
        x.fill_(1.0)
        for _ in range(3):
            graph.replay()
        synchronize()
        return float(x[0]) == WORLD**3

    def new_group_in_capture() -> bool:
        group, y, graph = dist.new_group(), torch.ones(64, device=DEVICE), torch.cuda.CUDAGraph()
        dist.barrier(group=group)  # the communicator exists
        with torch.cuda.graph(graph):
            dist.all_reduce(y, group=group)
        y.fill_(1.0)
        graph.replay()
        synchronize()
        return float(y[0]) == WORLD

    def dump_in_capture() -> bool:
        y, graph = torch.ones(64, device=DEVICE), torch.cuda.CUDAGraph()
        pending = [dist.all_reduce(torch.ones(1 << 22, device=DEVICE), async_op=True) for _ in range(4)]
        with torch.cuda.graph(graph):
            if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:  # which ends the process
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.5)
            dist.all_reduce(y)
        for one in pending:
            one.wait()
        y.fill_(1.0)
        graph.replay()
        synchronize()
        return float(y[0]) == WORLD

    def step_in_capture(steps: int) -> bool:
        """The step of an optimizer that is captured is where windows open and close."""
        one = nn.Parameter(torch.ones(64, device=DEVICE))
        optimizer = torch.optim.Adam([one], lr=0.1, capturable=True)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            one.grad = torch.ones_like(one)
            optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        synchronize()
        with torch.cuda.graph(graph):
            dist.all_reduce(one.grad)
            for _ in range(steps):
                optimizer.step()
        before = float(one[0].detach())
        graph.replay()
        synchronize()
        return float(one[0].detach()) != before

    attempt("plain", plain)
    attempt("dump_in_capture", dump_in_capture)
    attempt("new_group_in_capture", new_group_in_capture)
    attempt("window_opens_in_capture", partial(step_in_capture, 2))
    attempt("window_closes_in_capture", partial(step_in_capture, 3))
    say("graphs", **found)
    os._exit(0)  # a broken capture leaves a context that cannot be left


def compiled() -> None:
    """torch.compile with functional collectives, with and without inductor's CUDA graphs."""
    import torch.distributed._functional_collectives as functional

    begin()
    crossrank.enable(window="1:2")
    found: dict[str, object] = {}

    def reduced(value: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = functional.all_reduce(value * 2, "sum", list(range(WORLD))) + 1
        return whole

    for mode in ("default", "reduce-overhead") if CUDA else ("default",):
        run, value = torch.compile(reduced, mode=mode, fullgraph=True), torch.ones(256, device=DEVICE)
        result = [run(value).clone() for _ in range(4)][-1]
        synchronize()
        found[mode] = float(result[0]) == 2.0 * WORLD + 1
        crossrank.step()
    say("compiled", **found)
    end()


def overhead() -> None:
    """CPU time of a call with and without recording, in turns; a step of DDP; what a window costs."""
    begin()
    ones = torch.ones(256, device=DEVICE)
    calls, rounds = int(os.environ["JOB_CALLS"]), int(os.environ["JOB_ROUNDS"])
    net = distributed(model())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    train(net, 3, optimizer)

    def per_call() -> float:
        synchronize()
        began = time.thread_time_ns()
        for _ in range(calls):
            dist.all_reduce(ones)
        took = (time.thread_time_ns() - began) / calls / 1e3
        synchronize()
        return took

    def per_step() -> float:
        synchronize()
        began = time.perf_counter()
        train(net, 10, optimizer)
        synchronize()
        return time.perf_counter() - began

    recording = {"directory": str(FOLDER / "overhead-recording"), "tracing": "ALL"}
    per_call()
    bare, added, steps, ratios = [], [], [], []
    for _ in range(rounds):
        bare.append(per_call())
        steps.append(per_step())
        with crossrank.enable(**recording):  # type: ignore[arg-type]
            train(net, 1, optimizer)
            ratios.append(per_step() / steps[-1])  # before thousands of calls, which are written while steps go on
            per_call()  # once the calls of this place are known
            added.append(per_call() - bare[-1])
    windows = []
    with crossrank.enable(**recording):  # type: ignore[arg-type]
        for _ in range(2):
            began = time.perf_counter()
            with crossrank.window():
                train(net, 1, optimizer)
            windows.append(time.perf_counter() - began)
    middle = statistics.median
    say(
        "overhead",
        bare_us=middle(bare),
        added_us=middle(added),
        step_ms=middle(steps) / 10 * 1e3,
        step_ratio=middle(ratios),
        first_window_s=windows[0],
        second_window_s=windows[1],
    )
    dist.destroy_process_group()


def identity() -> None:
    """The GPU as crossrank knows it, and a window, which under Nsight Systems drives the capture."""
    from dataclasses import asdict

    from crossrank.instrument.identity.gpu import GpuReader

    begin()
    dist.all_reduce(torch.ones(4, device=DEVICE))
    reader = GpuReader(0)
    say(
        "identity",
        gpu=asdict(reader.gpu) if reader.gpu is not None else None,
        counters=reader.counters(),
        nccl=nccl_version(),
        device=torch.cuda.get_device_name(0),
    )
    crossrank.enable(window="1:3")
    iterate(4, calls=3, elements=1 << 16)
    end()


_JOBS: tuple[Callable[[], None], ...] = (
    *(hello, training, windows, timing, receive_ahead, hang, hang_beside_nccl, stuck_in_window, ring, barrier),
    *(graphs, compiled, overhead, identity),
)

if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    {one.__name__: one for one in _JOBS}[sys.argv[1]]()
