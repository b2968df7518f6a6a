"""One rank of a replay: joins the others, makes its calls, and returns its measurements.

A separate thread (`watch`) reports the state of the rank to the store. It ends the process if the rank makes no
progress or another rank has failed.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

import crossrank
from crossrank.comm import Group
from crossrank.errors import CrossrankError, one_line
from crossrank.machine import boot_id, give_memory_back, limit_memory, memory
from crossrank.replay.results.expected_values import Checker
from crossrank.replay.results.saved_data import DataComparer, DataWriter, saving
from crossrank.replay.run.compute_program import ComputeProgram
from crossrank.replay.run.executor import CpuExecutor, CudaExecutor, GraphExecutor
from crossrank.replay.run.messages import OwnOptions, Pass, RankResult, WorkItem
from crossrank.replay.run.pacing import make_pacer, parse_pace
from crossrank.replay.run.place_launches import own_tensors
from crossrank.replay.run.program import FILL, Program, barrier_options, late_ends, prepare
from crossrank.replay.run.rendezvous import FINISHED, NoPlanError, Rendezvous, between, measure_offset
from crossrank.replay.run.watch import FINAL_REPORT_S, Watch
from crossrank.tools.traces.replayed import Settings

_BACKEND_GRACE_S = 30.0
_INTERNAL_BACKENDS = ("undefined", "fake")
"""Names in torch's list of backends that are no real backends."""
_PROFILED_PASSES = 3
_HOST_FITS, _FITTED_PASSES = 2, 5
_PROFILED_STEPS = "1:3"
"""The window for the recording: its first pass contains the cost of the profiler's start."""


def run_rank(
    rank: int,
    local_rank: int,
    rendezvous: Rendezvous,
    second: Rendezvous,
    own: OwnOptions,
    final_report: Callable[[], None] = lambda: None,
    *,
    term: int | None = None,
    leads: bool = False,
) -> tuple[int, RankResult | None]:
    """Replay as `rank`, with its own options. Return the exit code and the result, None if there was nothing to do or
    the rank failed.

    `second` is a rendezvous over its own connection for the watch, which calls `final_report` before it ends the
    process. `term` is a file that becomes readable when the launcher asks the process to end. The rank that `leads`
    does not wait for the others. Raises `NoPlanError` if rank 0 has nothing to replay.
    """
    work = rendezvous.work_item(rank)
    if work.ends:
        return 0, None
    settings = work.settings = own.put_into(work.settings)
    watch = Watch(rank, second, final_report, term, settings.timeout_s + settings.slack_s)
    watch.start()
    try:
        result = _replay(rank, local_rank, rendezvous, work, watch)
        rendezvous.put(f"result/{rank}", result)
        watch.phase("done")
        if not leads:
            rendezvous.wait_for(FINISHED)
        watch.stop()
    except NoPlanError:
        time.sleep(2 * FINAL_REPORT_S)  # the watch ends the process
        return 1, None
    except Exception as error:
        watch.fail(one_line(error))
        return 1, None
    return 0, result


def _replay(rank: int, local_rank: int, rendezvous: Rendezvous, work: WorkItem, watch: Watch) -> RankResult:
    settings = work.settings
    device = _choose_device(settings, local_rank)
    # Longer than the timeout of the watch, whose message is clearer than a backend's error.
    timeout = timedelta(seconds=settings.timeout_s + settings.slack_s + _BACKEND_GRACE_S)
    if settings.backend == "nccl":
        gpu = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        if gpu is not None:  # some builds for ROCm have no uuid
            # NCCL lets ranks share a GPU if NCCL_HOSTID puts them on different hosts.
            host = os.environ.get("NCCL_HOSTID") or boot_id() or socket.gethostname()
            claim_gpu(rendezvous, rank, f"{host}/{gpu}")
    world = next((group for group in work.groups if group.ranks == list(range(work.world_size))), None)
    dist.init_process_group(
        settings.backend,
        store=dist.PrefixStore("torch", rendezvous.store),
        rank=rank,
        world_size=work.world_size,
        timeout=timeout,
        device_id=bound_device(world, device),
    )
    groups = _make_groups(work, world, rank, device, timeout, watch)
    watch.phase("comparing clocks")
    clock = measure_offset(rendezvous, rank, "start")
    watch.phase("binding its calls")
    compute = None
    if work.compute is not None:
        # The replay's own numbers produce values that training does not. Values near zero (denormal) are slow.
        torch.set_flush_denormal(True)
        if device.type == "cpu":  # the plan may be from another user, and an operation may ask for any amount of memory
            share = memory() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
            limit_memory(max(share, min(2 * work.compute.bytes, memory())))
        scale, indices = parse_pace(settings.pace).scale, settings.indices
        compute = ComputeProgram(
            work.compute, device, imports=settings.imports, scale=scale, indices=indices, seed=rank
        )
    program = prepare(
        work.calls,
        rank=rank,
        groups=groups,
        backend=settings.backend,
        device=device,
        timeout=timeout,
        own=own_tensors(compute.plan, compute.slots, work.calls, settings.backend) if compute is not None else {},
        barriers=settings.blocking,
        streams=work.streams,
    )
    pacer = make_pacer(work.calls, parse_pace(settings.pace), device) if compute is None else None
    executor: CpuExecutor
    if settings.graph:
        executor = GraphExecutor(program)
    else:
        executor = (CudaExecutor if device.type == "cuda" else CpuExecutor)(program, pacer, compute)
    watch.follow(executor)
    checker = Checker(program, rank) if settings.check else None
    comparer = None
    if settings.compare_data is not None:
        comparer = DataComparer(program, rank, settings.compare_data, settings.rtol, settings.atol)
    with saving(program, rank, settings.save_data) if settings.save_data is not None else nullcontext() as writer:
        checks = [one for one in (checker, writer, comparer) if one is not None]
        passes, cpu_s, times = _run_passes(executor, program, compute, work, watch, checks)
    computed = compute.result(times) if compute is not None else None
    watch.phase("comparing clocks again")
    offset, error = between(clock, measure_offset(rendezvous, rank, "end"))
    watch.phase("destroying its process groups")
    executor.close()
    # Not after a failure: groups whose other ranks are gone may hang.
    dist.destroy_process_group()
    return RankResult(
        rank=rank,
        host=socket.gethostname(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        offset_ns=offset,
        offset_error_ns=error,
        passes=passes,
        cpu_s=cpu_s,
        late_ends=late_ends(program),
        substitutes=Counter(text for one in program.substitutes for text in one.differences),
        check=checker.result if checker is not None else None,
        versions={"torch": str(torch.__version__), "python": sys.version.split()[0]},
        computed=computed,
        data=comparer.result if comparer is not None else None,
    )


def _choose_device(settings: Settings, local_rank: int) -> torch.device:
    if settings.device != "cuda":
        # Every rank is a process of its own. One thread per core in each of them would overload the cores.
        torch.set_num_threads(settings.threads)
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise CrossrankError(f"finds no GPU on {socket.gethostname()}; start no ranks there, or use --backend gloo")
    # A launcher may show each rank only its own GPU, which is then number 0.
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device


def claim_gpu(rendezvous: Rendezvous, rank: int, gpu: str) -> None:
    """Record that `rank` uses this GPU, whose name is unique over all nodes. Raises `CrossrankError` if another rank
    uses it: NCCL would fail with a less clear message."""
    holder = int(rendezvous.store.compare_set(f"gpu/{gpu}", "", str(rank)))
    if holder != rank:
        raise CrossrankError(
            f"shares a GPU with rank {holder}, and NCCL needs one each; start fewer ranks, set NCCL_HOSTID, or use "
            "--backend gloo"
        )


def bound_device(group: Group | None, device: torch.device) -> torch.device | None:
    """Return the `device_id` for a new group: None, unless the recorded group was bound to its GPU.

    If bound, NCCL creates the communicator at once and runs single sends and receives in order with all other calls. If
    not, each pair of ranks gets a communicator at its first call. A job may need either to reach its end.
    """
    return device if group is not None and group.eager and device.type == "cuda" else None


def _make_groups(
    work: WorkItem, world: Group | None, rank: int, device: torch.device, timeout: timedelta, watch: Watch
) -> dict[str, tuple[Group, ProcessGroup]]:
    """Return the groups of this rank. All ranks create all groups, in the order of the plan: torch names a group by its
    number. With other orders, ranks would wait for each other under different names."""
    groups: dict[str, tuple[Group, ProcessGroup]] = {}
    default = c10d._get_default_group()
    for number, group in enumerate(work.groups):
        watch.phase(f"creating process group {number + 1} of {len(work.groups)}")
        ranks = group.ranks or []
        if group is world:
            made = default
        else:
            # Splits and lists follow the order in the group, which may differ from the rank order.
            options: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
            bound = bound_device(group, device)
            # A new group inherits the binding of the first group.
            if bound is not None and default.bound_device_id is None:
                options["device_id"] = bound
            made = dist.new_group(ranks, timeout=timeout, group_desc=group.desc or None, **options)
        if rank in ranks:
            groups[group.pg] = (group, made)
    return groups


def _run_passes(
    executor: CpuExecutor,
    program: Program,
    compute: ComputeProgram | None,
    work: WorkItem,
    watch: Watch,
    checks: Sequence[Checker | DataWriter | DataComparer],
) -> tuple[list[Pass], float, list[int]]:
    """Run all passes. Return (passes, their CPU seconds, the clock of an extra pass if there is computation)."""
    settings = work.settings
    # Call the backend directly, so that crossrank does not record the barrier before a pass.
    backend: Any = c10d._get_default_group()._get_backend(program.device)

    def barrier() -> None:
        backend.barrier(barrier_options(program.device)).wait()

    def meet(phase: str) -> None:
        watch.phase(phase)
        # Otherwise repeated in-place sums would overflow every type.
        program.block.fill_(FILL)
        barrier()

    if compute is not None:
        meet("trying every operation")
        executor.run(trial=True)
        meet("in passes under the profiler")
        compute.learn_from_profiler(executor.run, _PROFILED_PASSES)
        for _ in range(_HOST_FITS if work.fits_host else 0):
            fitted = []
            for number in range(_FITTED_PASSES):
                meet(f"in pass {number + 1} that the host's time is fitted to")
                fitted.append(executor.run().own_ns)
            compute.fit_host(median(fitted))
        give_memory_back()
    for check in checks:  # in separate passes: filling and comparing takes longer than the calls
        meet("in the checked pass")
        executor.run(check.fill, check.take)
    # With a graph, the first pass creates communicators and the second captures the graph.
    for number in range(max(settings.warmup, 2) if settings.graph else settings.warmup):
        meet(f"in warm-up pass {number + 1}")
        executor.run()
    passes = []
    cpu_s = 0.0
    with crossrank.enable(tracing="ALL", directory=settings.record) if settings.record is not None else nullcontext():
        for number in range(settings.repeats):
            meet(f"in pass {number + 1}")
            spent = time.process_time()
            passes.append(executor.run())
            cpu_s += time.process_time() - spent
            if settings.record is not None:
                crossrank.step()
    if settings.profile is not None:
        with crossrank.enable(tracing="ALL", directory=settings.profile, window=_PROFILED_STEPS):
            for number in range(_PROFILED_PASSES):
                meet(f"in profiled pass {number + 1}")
                executor.run()
                crossrank.step()
    clock: list[int] = []
    if compute is not None:
        meet("in a pass that times every operation")
        executor.run(clock=clock)
    watch.phase("waiting for the end of the others")
    barrier()
    return passes, cpu_s, clock


def leave(code: int) -> NoReturn:
    """End this process now: threads of a failed backend may keep the interpreter alive."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def check_backend_name(backend: str) -> None:
    """Raise `CrossrankError` if this torch does not know the backend, built in or not."""
    if backend not in _list_backends():
        raise CrossrankError(f"--backend {backend!r} is not one of {', '.join(_list_backends())}")


def _list_backends() -> list[str]:
    return [name for name in dist.Backend.backend_list if name not in _INTERNAL_BACKENDS]


def check_backend(backend: str | None, device: str | None, ranks_here: int | None) -> tuple[str, str]:
    """Return (backend, device) to use; `ranks_here` is the number of ranks on this node, if known.

    Raises `CrossrankError` if this torch or this node lacks them.
    """
    if backend is not None:
        check_backend_name(backend)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = device or ("cuda" if gpus and backend != "gloo" else "cpu")
    backend = backend or ("nccl" if device == "cuda" and dist.is_nccl_available() else "gloo")
    has = ", ".join(name for name in _list_backends() if dist.is_backend_available(name))
    for is_wrong, text in (
        (device not in ("cpu", "cuda"), f"--device {device!r} is neither cpu nor cuda"),
        (
            not dist.is_backend_available(backend),
            f"backend {backend!r} is not built into torch {torch.__version__}, which has {has}; choose one with "
            "--backend",
        ),
        (
            device == "cuda" and not gpus,
            "--device cuda, but torch sees no GPU; use --device cpu with --backend gloo",
        ),
        (
            backend == "nccl" and device != "cuda",
            "backend nccl needs GPUs; use --backend gloo, or a machine that has them",
        ),
        (
            backend == "nccl" and ranks_here is not None and ranks_here > gpus,
            f"{ranks_here} ranks and {gpus} GPU(s): NCCL needs one per rank; start them on more machines with "
            "torchrun, srun or mpirun, choose fewer with --nproc, or use --backend gloo --device cpu",
        ),
    ):
        if is_wrong:
            raise CrossrankError(text)
    return backend, device
