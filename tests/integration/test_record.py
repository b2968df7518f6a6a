"""The numbers of a record are right, each where older shims had them wrong."""

from __future__ import annotations

import time
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import crossrank
from crossrank.comm import CommRecord
from crossrank.instrument import api
from crossrank.instrument.record.reductions import ReductionReader
from tests.integration.jobs import Scripts
from tests.integration.names import needs_reductions
from tests.integration.traces import records_of
from tests.integration.world import Task, TwoRanks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def _all_to_all(rank: int) -> None:
    dist.all_to_all_single(torch.ones(0), torch.ones(0))
    # Rank 0 keeps 1 row and sends 2; rank 1 sends 4 and keeps 5.
    sends = [1, 2] if rank == 0 else [4, 5]
    receives = [1, 4] if rank == 0 else [2, 5]
    dist.all_to_all_single(torch.ones(sum(receives), 2), torch.ones(sum(sends), 2), receives, sends)
    dist.all_to_all_single(torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16))


def test_all_to_all_single_is_recorded_with_its_splits(two_ranks: TwoRanks) -> None:
    records = two_ranks.calls(_all_to_all)
    for rank in (0, 1):
        empty, uneven, even = records[rank]
        assert (empty.bytes, empty.inputs, empty.in_split) == (0, [[0]], None)
        assert (even.bytes, even.dtype, even.in_split) == (8, "bfloat16", None)
        assert uneven.in_split == ([1, 2] if rank == 0 else [4, 5])
        assert uneven.out_split == ([1, 4] if rank == 0 else [2, 5])
        # The input's rows, two floats each.
        assert uneven.bytes == (3 * 8 if rank == 0 else 9 * 8)


def _gather_family(rank: int) -> None:
    dist.all_gather_into_tensor(torch.ones(8), torch.ones(4))
    dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4))
    dist.reduce_scatter_tensor(torch.ones(4), torch.ones(8))
    dist.reduce_scatter(torch.ones(4), [torch.ones(4), torch.ones(4)])
    dist.gather(torch.ones(4), [torch.ones(4), torch.ones(4)] if rank == 1 else None, dst=1)
    dist.scatter(torch.ones(4), [torch.ones(4), torch.ones(4)] if rank == 1 else None, src=1)


def test_bytes_match_nccl_tests_on_every_rank(two_ranks: TwoRanks) -> None:
    records = two_ranks.calls(_gather_family)
    for rank in (0, 1):
        # The output of a gather, the input of a reduce_scatter, and what the root holds: 2 ranks * 4 floats.
        assert [(r.op, r.bytes) for r in records[rank]] == [
            ("all_gather", 32),
            ("all_gather", 32),
            ("reduce_scatter", 32),
            ("reduce_scatter", 32),
            ("gather", 32),
            ("scatter", 32),
        ]
        assert [r.root for r in records[rank]] == [None, None, None, None, 1, 1]
    gather = records[0][4]
    assert (gather.inputs, gather.outputs) == ([[4]], [])
    assert records[1][4].outputs == [[4], [4]]


def _mixed_dtypes(rank: int) -> None:
    world = dist.group.WORLD
    assert world is not None
    inputs = [torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.uint8)]
    outputs = [torch.ones(6, dtype=torch.float64), torch.ones(6, dtype=torch.uint8)]
    world.allgather_into_tensor_coalesced(outputs, inputs).wait()


def _whole_record(rank: int) -> None:
    dist.all_reduce(torch.ones(2, 3, dtype=torch.float16), op=dist.ReduceOp.MAX, async_op=True).wait()


def test_a_record_has_every_field(two_ranks: TwoRanks) -> None:
    before = time.monotonic_ns()
    records = two_ranks.calls(_whole_record, node="here")
    after = time.monotonic_ns()
    line = _whole_record.__code__.co_firstlineno + 1
    for (record,) in records:
        assert before < record.t < after
        assert record == CommRecord(
            id=0,
            op="all_reduce",
            api="all_reduce",
            c10d="allreduce_",
            pg="0",
            seq=1,
            inputs=[[2, 3]],
            outputs=[[2, 3]],
            dtype="float16",
            reduce="max",
            is_async=True,
            bytes=12,
            source=f"{Path(__file__).relative_to(Path.cwd())}:{line}",
            locality="intra_node",
            t=record.t,
            thread=record.thread,
        )


def _reductions(rank: int) -> None:
    for op in ("SUM", "PRODUCT", "MIN", "MAX"):
        dist.all_reduce(torch.ones(1), op=getattr(dist.ReduceOp, op))
    dist.reduce(torch.ones(1, dtype=torch.int64), 0, op=dist.ReduceOp.BOR)


def _reductions_not_in_a_frame(rank: int) -> None:
    world = dist.group.WORLD
    assert world is not None
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
    world.allreduce([torch.ones(1)], options).wait()
    for op in ("SUM", "MAX", "SUM"):  # one place, several reductions
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp(getattr(dist.ReduceOp, op)))
    with distributed_c10d._coalescing_manager():
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX)


def _a_frame_that_lies(rank: int) -> None:
    reader = ReductionReader()
    current = api._current
    assert current is not None
    vars(current.recorder).update(_reductions=reader, _read_reduction=reader.read)
    reader._constants = {dist.ReduceOp.SUM: "max"}
    for _ in range(3):
        dist.all_reduce(torch.ones(1))


def _two_groups(rank: int) -> None:
    reversed_group = dist.new_group([1, 0])
    only_one = dist.new_group([1])
    dist.broadcast(torch.ones(1), group_src=0, group=reversed_group)
    if rank == 1:
        dist.all_reduce(torch.ones(1), group=only_one)
    dist.all_reduce(torch.ones(1))
    dist.broadcast(torch.ones(1), src=1, group=reversed_group)
    dist.all_reduce(torch.ones(1), group=dist.group.WORLD)
    dist.all_reduce(torch.ones(1), group=None)


def test_groups_have_global_ranks_and_their_own_sequences(two_ranks: TwoRanks) -> None:
    both = two_ranks.calls(_two_groups)
    for rank, records in enumerate(both):
        world = [record for record in records if record.pg == "0"]
        assert [record.seq for record in world] == [1, 2, 3]
        broadcasts = [record for record in records if record.op == "broadcast"]
        # new_group sorts its ranks, so the first member is global rank 0.
        assert [(record.root, record.seq) for record in broadcasts] == [(0, 1), (1, 2)]
        ranks = {group.pg: group.ranks for group in two_ranks.recorded(rank).groups}
        assert ranks["0"] == [0, 1]
        assert ranks[broadcasts[0].pg] == [0, 1]
        assert [1] in ranks.values() if rank == 1 else [1] not in ranks.values()


def _point_to_point(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(4), 1)
        dist.send(torch.ones(2), dst=1, tag=3)
        dist.send(torch.ones(1), 1)
        dist.recv(torch.ones(5), src=1)
    else:
        dist.recv(torch.ones(4), src=0)
        dist.recv(torch.ones(2), src=0, tag=3)
        dist.recv(torch.ones(1))
        dist.send(torch.ones(5), 0)


def _batches(rank: int) -> None:
    for size in (1, 2):
        ops = [dist.P2POp(dist.isend, torch.ones(size), 1 - rank), dist.P2POp(dist.irecv, torch.ones(size), 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)


def _coalesced_without_fast_path(rank: int) -> None:
    """What NCCL does for batches, on torch's own fake backend: gloo cannot coalesce, NCCL needs a GPU."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    with distributed_c10d._coalescing_manager(dist.group.WORLD, torch.device("cpu")):
        dist.broadcast(torch.ones(1), 0)
        dist.broadcast(torch.ones(1), 1)
    dist.broadcast(torch.ones(1), 2)
    crossrank.disable()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _steps(rank: int) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
        weight.sum().backward()
        optimizer.step()


def _explicit_steps(rank: int) -> None:
    for _ in range(3):
        _steps(rank)
        crossrank.step()


def _sizes_change(rank: int) -> None:
    for size in range(1, 5000):
        dist.all_reduce(torch.empty(size))


# What is shown: what the ranks do, fields of their calls, and these of both ranks, or of rank 0 and of rank 1.
CALLS: dict[str, tuple[Task, str, Any]] = {
    "bytes of tensors of several dtypes": (_mixed_dtypes, "bytes inputs dtype", [(54, [[3], [3]], "float64")]),
    "names of reductions": (_reductions, "reduce", ["sum", "product", "min", "max", "bor"]),
    "a reduction that no frame names": (_reductions_not_in_a_frame, "reduce", ["min", "sum", "max", "sum", "max"]),
    "a reduction whose frame differs from the dispatcher": (_a_frame_that_lies, "reduce", ["sum", "sum", "sum"]),
    "a batch has the id of its first call": (_batches, "id batch", [(0, 0), (1, 0), (2, 2), (3, 2), (4, None)]),
    "coalesced calls are a batch": (_coalesced_without_fast_path, "root batch", [(0, 0), (1, 0), (2, None)]),
    "steps of an optimizer": (_steps, "step", [0, 1, 2]),
    # The optimizers count until the first crossrank.step(), which ends iteration 0 whatever they have come to.
    "explicit steps win over those of optimizers": (_explicit_steps, "step", [0, 1, 2, 1, 1, 1, 2, 2, 2]),
    "sizes that never repeat": (_sizes_change, "bytes", [4 * size for size in range(1, 5000)]),
    # The source of the third receive is known only when it has arrived.
    "peer, tag and sequence per peer and direction": (
        _point_to_point,
        "op peer tag p2p_seq bytes",
        (
            [("send", 1, 0, 1, 16), ("send", 1, 3, 2, 8), ("send", 1, 0, 3, 4), ("recv", 1, 0, 1, 20)],
            [("recv", 0, 0, 1, 16), ("recv", 0, 3, 2, 8), ("recv", None, 0, 1, 4), ("send", 0, 0, 1, 20)],
        ),
    ),
    "a transfer has no sequence of its group": (_point_to_point, "seq", [None] * 4),
}


_NEED_REDUCTIONS = (_reductions_not_in_a_frame, _a_frame_that_lies)


@pytest.mark.parametrize(
    "shown",
    [pytest.param(key, marks=needs_reductions) if row[0] in _NEED_REDUCTIONS else key for key, row in CALLS.items()],
)
def test_calls_are_recorded_correctly(shown: str, two_ranks: TwoRanks) -> None:
    task, fields, expected = CALLS[shown]
    of_ranks = expected if isinstance(expected, tuple) else (expected, expected)
    values = attrgetter(*fields.split())
    assert [list(map(values, calls)) for calls in two_ranks.calls(task)] == list(of_ranks)


def _group_ranks_with_gap(rank: int) -> bool:
    import weakref

    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group)
    reference = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    return reference() is None


def test_a_destroyed_group_is_not_kept_alive(two_ranks: TwoRanks) -> None:
    assert two_ranks.run(_group_ranks_with_gap, folder="off", record=False) == [True, True]
    assert two_ranks.run(_group_ranks_with_gap, folder="on") == [True, True]


def test_a_call_on_a_destroyed_group_is_recorded(scripts: Scripts, tmp_path: Path) -> None:
    result = scripts(TRACING_DIR=str(tmp_path / "recording")).python("""
        forgotten = dist.group.WORLD
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        crossrank.enable()
        forgotten.allreduce([torch.ones(3)]).wait()
        """)
    assert result.stderr == ""
    (record,) = records_of(tmp_path / "recording", 0)
    assert (record.op, record.inputs) == ("all_reduce", [[3]])
