"""Every kind of caller is recorded exactly once per call on the wire, and nothing is raised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossrank.instrument.write import flight_dump
from crossrank.recording import CommsFile
from tests.integration import callers, names
from tests.integration.jobs import Scripts
from tests.integration.world import Task, TwoRanks

DDP = [("all_reduce", None)]
COMPILED = [("all_reduce", None)]
# A pipeline stage tells its neighbours the shapes before the first micro-batch.
SHAPES_FORWARD = [
    ("send", "send"),
    ("recv", "recv"),
    ("send", "send_object_list"),
    ("send", "send_object_list"),
    ("recv", "recv_object_list"),
    ("recv", "recv_object_list"),
]
SHAPES_BACK = [
    ("recv", "recv"),
    ("send", "send"),
    ("recv", "recv_object_list"),
    ("recv", "recv_object_list"),
    ("send", "send_object_list"),
    ("send", "send_object_list"),
]

if not names.HAS_SINGLE:  # torch before 2.13
    SHAPES_FORWARD = [("send", "batch_isend_irecv"), ("recv", "batch_isend_irecv")]
    SHAPES_FORWARD += [("send", "send_object_list")] * 2
    SHAPES_BACK = [("recv", "batch_isend_irecv"), ("send", "batch_isend_irecv")]
    SHAPES_BACK += [("recv", "recv_object_list")] * 2
if names.VERSION < (2, 11):  # without a round to connect first
    SHAPES_FORWARD, SHAPES_BACK = SHAPES_FORWARD[2:], SHAPES_BACK[2:]
if names.VERSION >= (2, 15):  # it first agrees on how to find the shapes, and connects the neighbours
    AGREE = ("all_reduce", "all_reduce")
    SHAPES_FORWARD = [AGREE, ("send", "isend"), AGREE, *SHAPES_FORWARD[2:]]
    SHAPES_BACK = [AGREE, ("recv", "irecv"), AGREE, *SHAPES_BACK[2:]]
STAGE_SENDS, STAGE_RECEIVES = ("isend", "irecv") if names.HAS_SINGLE else ("batch_isend_irecv", "batch_isend_irecv")

# caller -> (operation, API) of every record, on both ranks or on rank 0 and rank 1
EXPECTED: dict[Task, Any] = {
    callers.all_reduce: [("all_reduce", "all_reduce")],
    callers.early_bound: [("all_reduce", "all_reduce")],
    callers.module_attribute: [("all_reduce", "all_reduce")],
    callers.asynchronous: [("all_reduce", "all_reduce")],
    callers.new_single_names: [("all_gather", "all_gather_single"), ("reduce_scatter", "reduce_scatter_single")],
    callers.old_single_names: [
        ("all_gather", "all_gather_into_tensor"),
        ("reduce_scatter", "reduce_scatter_tensor"),
        ("all_gather", "_all_gather_base"),
        ("reduce_scatter", "_reduce_scatter_base"),
    ],
    callers.lists: [
        ("all_gather", "all_gather"),
        ("reduce_scatter", "reduce_scatter"),
        ("all_to_all", "all_to_all_single"),
    ],
    callers.rooted: [(op, op) for op in ("broadcast", "reduce", "gather", "scatter")],
    callers.group_keywords: (
        [("broadcast", "broadcast"), ("reduce", "reduce"), ("barrier", "barrier"), ("send", "send")],
        [("broadcast", "broadcast"), ("reduce", "reduce"), ("barrier", "barrier"), ("recv", "recv")],
    ),
    callers.ddp: DDP,
    callers.ddp_backward_in_thread: DDP,
    callers.ddp_comm_hook: [("all_reduce", "all_reduce")],
    # On gloo FSDP1 gathers into a list.
    callers.fsdp1: [("all_gather", "all_gather"), ("reduce_scatter", names.REDUCE_SCATTER)],
    callers.fsdp2: [("all_gather", names.ALL_GATHER)] * 4 + [("reduce_scatter", names.REDUCE_SCATTER)] * 2,
    callers.dtensor: [
        ("all_gather", f"functional.{names.FUNCTIONAL_ALL_GATHER}"),
        ("all_reduce", "functional.all_reduce"),
    ],
    callers.functional_eager: [("all_reduce", "functional.all_reduce"), ("all_gather", "functional.all_gather_tensor")],
    callers.compiled_eager: COMPILED,
    callers.compiled_aot_eager: COMPILED,
    callers.compiled_inductor: COMPILED,
    callers.compiled_dist_all_reduce: COMPILED,
    callers.batch_p2p: [("send", "batch_isend_irecv"), ("recv", "batch_isend_irecv")],
    callers.early_batch_p2p: [("send", "batch_isend_irecv"), ("recv", "batch_isend_irecv")],
    callers.send_recv: ([("send", "send"), ("send", "isend")], [("recv", "recv"), ("recv", "irecv")]),
    callers.recv_any_source: ([("send", "send")], [("recv", "recv")]),
    callers.objects: [
        ("all_gather", "all_gather_object"),
        ("all_gather", "all_gather_object"),
        ("broadcast", "broadcast_object_list"),
        ("broadcast", "broadcast_object_list"),
        ("all_gather", "gather_object"),
        ("gather", "gather_object"),
        ("broadcast", "scatter_object_list"),
        ("scatter", "scatter_object_list"),
        ("scatter", "scatter_object_list"),
    ],
    callers.coalescing_manager: [("all_reduce", "_coalescing_manager")],
    callers.pipeline: (
        SHAPES_FORWARD + [("send", STAGE_SENDS)] * 2 + [("recv", STAGE_RECEIVES)] * 2,
        SHAPES_BACK + [("recv", STAGE_RECEIVES)] * 2 + [("send", STAGE_SENDS)] * 2,
    ),
    callers.barriers: [("barrier", "barrier"), ("barrier", "monitored_barrier")],
    callers.autograd_functions: [("all_reduce", "nn.functional.all_reduce"), ("all_reduce", "all_reduce")],
    callers.process_group_methods: [("all_reduce", "ProcessGroup.allreduce"), ("broadcast", "ProcessGroup.broadcast")],
    callers.no_grad_and_inference: [("all_reduce", "all_reduce"), ("all_reduce", "all_reduce")],
    callers.parameter: [("broadcast", "broadcast")],
}
for _caller in callers.ABSENT:
    EXPECTED.pop(_caller, None)


def records_of(recording: Path, rank: int) -> list[Any]:
    comms = CommsFile(str(recording / f"rank-{rank}.comms.jsonl.zst"))
    records = list(comms.records())
    assert comms.issues.problems == []
    assert comms.end is not None
    assert comms.end["errors"] == 0
    return records


def _with_oracle(rank: int, caller: Task) -> int:
    """Run a caller and count what the flight recorder of torch saw of it."""
    before = _flight_count()
    caller(rank)
    return _flight_count() - before


def _flight_count() -> int:
    dump = json.loads(flight_dump.dump({}) or b"{}")
    return max((entry["record_id"] + 1 for entry in dump.get("entries", [])), default=0)


@pytest.mark.parametrize("caller", EXPECTED, ids=lambda c: c.__name__)
def test_caller_is_recorded_exactly_once(caller: Task, two_ranks: TwoRanks) -> None:
    two_ranks.run(caller)
    expected = EXPECTED[caller]
    for rank in (0, 1):
        wanted = expected[rank] if isinstance(expected, tuple) else expected
        seen = [(record.op, record.api) for record in two_ranks.recorded(rank).calls]
        assert seen == wanted


@names.needs_gloo_recorder
@pytest.mark.parametrize(
    "caller",
    # Left out: what gloo makes of several collectives (a list reduce_scatter), and P2P, which it does not count.
    [
        caller
        for caller in (callers.rooted, callers.ddp, callers.fsdp1, callers.fsdp2, callers.dtensor, callers.objects)
        if caller not in callers.ABSENT
    ],
    ids=lambda c: c.__name__,
)
def test_flight_recorder_counts_the_same_number_of_calls(caller: Task, two_ranks: TwoRanks) -> None:
    counts = two_ranks.run(_with_oracle, caller)
    for rank, count in enumerate(counts):
        assert len(two_ranks.recorded(rank).calls) == count


def _fake_and_meta(rank: int) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        dist.all_reduce(torch.ones(4))
        names.all_gather(torch.ones(8), torch.ones(4))
    dist.all_reduce(torch.ones(4, device="meta"))
    dist.all_reduce(torch.ones(4))


@pytest.mark.skipif(names.VERSION < (2, 11), reason=f"torch {torch.__version__} makes no calls with fake tensors")
def test_fake_and_meta_tensors_are_not_recorded(two_ranks: TwoRanks) -> None:
    two_ranks.run(_fake_and_meta)
    assert [record.op for record in two_ranks.recorded().calls] == ["all_reduce"]


def _recompiles(rank: int, directory: str) -> list[int]:
    from torch._dynamo.testing import CompileCounter

    import crossrank

    counter: Any = CompileCounter()
    function = torch.compile(callers._functional_sum, backend=counter, fullgraph=True)
    counts = []
    function(torch.ones(4))
    counts.append(counter.frame_count)
    with crossrank.enable(tracing="ALL", directory=directory, flight=False):
        function(torch.ones(4))
        counts.append(counter.frame_count)
    function(torch.ones(4))
    counts.append(counter.frame_count)
    return counts


def test_enable_and_disable_recompile_nothing(two_ranks: TwoRanks) -> None:
    assert two_ranks.run_bare(_recompiles) == [[1, 1, 1], [1, 1, 1]]
    assert len(two_ranks.recorded().calls) == 1


def _errors(rank: int) -> list[str]:
    messages = []
    calls: list[Callable[[], object]] = [
        lambda: names.all_gather(torch.ones(3), torch.ones(4)),
        lambda: dist.broadcast(torch.ones(4), 5),
    ]
    for call in calls:
        try:
            call()
        except Exception as error:
            messages.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return messages


def test_errors_of_a_call_reach_the_user_unchanged(two_ranks: TwoRanks) -> None:
    untraced = two_ranks.run(_errors, folder="off", record=False)
    traced = two_ranks.run(_errors, folder="on")
    assert traced == untraced
    assert len(traced[0]) == 2


def test_a_forked_child_takes_over_the_kernels_of_its_parent(scripts: Scripts) -> None:
    result = scripts.python("""
        def kernels():
            table = torch._C._dispatch_dump("c10d::allreduce_").splitlines()
            return sum(line.startswith("BackendSelect") for line in table)

        def in_child(work):
            child = os.fork()
            if child == 0:
                work()
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

        def enable():
            print("its child", crossrank.enable(directory="its-child").active, kernels(), flush=True)

        def enable_and_disable():
            with crossrank.enable(directory="child") as tracing:
                print("child", tracing.active, kernels(), flush=True)
                in_child(enable)
            print("child after", kernels(), flush=True)

        dist.destroy_process_group()
        print("before", kernels(), flush=True)
        crossrank.enable(directory="parent")
        in_child(enable_and_disable)
        print("parent", crossrank.enabled(), kernels(), flush=True)
        """)
    assert result.stdout.splitlines() == [
        "before 0",
        "child True 1",
        "its child True 1",
        "child after 1",
        "parent True 1",
    ]
    assert "Overriding" not in result.stderr
