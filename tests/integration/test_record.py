"""The numbers of a record are right, each where older shims had them wrong."""

from __future__ import annotations

import time
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
from tests.integration import jobs
from tests.integration.names import needs_reductions
from tests.integration.test_interception import records_of
from tests.integration.world import World

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def run(world: World, folder: Path, task: Any, *arguments: Any, **options: Any) -> tuple[list[CommRecord], ...]:
    world.run(task, folder, *arguments, **options)
    return tuple(records_of(folder / "recording", rank) for rank in range(world.size))


def _all_to_all(rank: int) -> None:
    dist.all_to_all_single(torch.ones(0), torch.ones(0))
    # Rank 0 keeps 1 row and sends 2; rank 1 sends 4 and keeps 5.
    sends = [1, 2] if rank == 0 else [4, 5]
    receives = [1, 4] if rank == 0 else [2, 5]
    dist.all_to_all_single(torch.ones(sum(receives), 2), torch.ones(sum(sends), 2), receives, sends)
    dist.all_to_all_single(torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16))


def test_all_to_all_single(two_ranks: World, tmp_path: Path) -> None:
    records = run(two_ranks, tmp_path, _all_to_all)
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


def test_bytes_are_those_of_nccl_tests_on_every_rank(two_ranks: World, tmp_path: Path) -> None:
    records = run(two_ranks, tmp_path, _gather_family)
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


def test_bytes_of_coalesced_tensors_of_several_dtypes(two_ranks: World, tmp_path: Path) -> None:
    (record,), _ = run(two_ranks, tmp_path, _mixed_dtypes)
    assert (record.bytes, record.inputs, record.dtype) == (6 * 8 + 6, [[3], [3]], "float64")


def _whole_record(rank: int) -> None:
    dist.all_reduce(torch.ones(2, 3, dtype=torch.float16), op=dist.ReduceOp.MAX, async_op=True).wait()


def test_a_whole_record(two_ranks: World, tmp_path: Path) -> None:
    before = time.monotonic_ns()
    records = run(two_ranks, tmp_path, _whole_record, node="here")
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


@needs_reductions
def test_reductions_that_no_frame_names_are_asked_of_the_dispatcher(two_ranks: World, tmp_path: Path) -> None:
    records, _ = run(two_ranks, tmp_path, _reductions_not_in_a_frame)
    assert [record.reduce for record in records] == ["min", "sum", "max", "sum", "max"]


def _a_frame_that_lies(rank: int) -> None:
    reader = ReductionReader()
    current = api._current
    assert current is not None
    vars(current.recorder).update(_reductions=reader, _read_reduction=reader.read)
    reader._constants = {dist.ReduceOp.SUM: "max"}
    for _ in range(3):
        dist.all_reduce(torch.ones(1))


@needs_reductions
def test_a_frame_that_differs_from_the_dispatcher_is_not_believed(two_ranks: World, tmp_path: Path) -> None:
    records, _ = run(two_ranks, tmp_path, _a_frame_that_lies)
    assert [record.reduce for record in records] == ["sum", "sum", "sum"]


def test_reductions_are_named(two_ranks: World, tmp_path: Path) -> None:
    records, _ = run(two_ranks, tmp_path, _reductions)
    assert [record.reduce for record in records] == ["sum", "product", "min", "max", "bor"]


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


def test_groups_have_global_ranks_and_sequences_of_their_own(two_ranks: World, tmp_path: Path) -> None:
    from crossrank.recording import CommsFile

    both = run(two_ranks, tmp_path, _two_groups)
    for rank, records in enumerate(both):
        world = [record for record in records if record.pg == "0"]
        assert [record.seq for record in world] == [1, 2, 3]
        broadcasts = [record for record in records if record.op == "broadcast"]
        # new_group sorts its ranks, so the first member is global rank 0.
        assert [(record.root, record.seq) for record in broadcasts] == [(0, 1), (1, 2)]
        comms = CommsFile(str(tmp_path / "recording" / f"rank-{rank}.comms.jsonl.zst"))
        list(comms.records())
        ranks = {group.pg: group.ranks for group in comms.groups}
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


def test_p2p_has_peer_tag_and_a_sequence_per_peer_and_direction(two_ranks: World, tmp_path: Path) -> None:
    first, second = run(two_ranks, tmp_path, _point_to_point)
    assert [(r.op, r.peer, r.tag, r.p2p_seq, r.seq, r.bytes) for r in first] == [
        ("send", 1, 0, 1, None, 16),
        ("send", 1, 3, 2, None, 8),
        ("send", 1, 0, 3, None, 4),
        ("recv", 1, 0, 1, None, 20),
    ]
    # The source of the third one is known only when it has arrived.
    assert [(r.op, r.peer, r.tag, r.p2p_seq, r.bytes) for r in second] == [
        ("recv", 0, 0, 1, 16),
        ("recv", 0, 3, 2, 8),
        ("recv", None, 0, 1, 4),
        ("send", 0, 0, 1, 20),
    ]


def _batches(rank: int) -> None:
    for size in (1, 2):
        ops = [
            dist.P2POp(dist.isend, torch.ones(size), 1 - rank),
            dist.P2POp(dist.irecv, torch.ones(size), 1 - rank),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)


def test_a_batch_shares_the_id_of_its_first_record(two_ranks: World, tmp_path: Path) -> None:
    for records in run(two_ranks, tmp_path, _batches):
        assert [(record.id, record.batch) for record in records] == [(0, 0), (1, 0), (2, 2), (3, 2), (4, None)]


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


def test_ops_between_start_and_end_of_coalescing_share_a_batch(two_ranks: World, tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    two_ranks.run(_coalesced_without_fast_path, tmp_path)
    for rank in (0, 1):
        records = records_of(folder, rank)
        assert [(record.root, record.batch) for record in records] == [(0, 0), (1, 0), (2, None)]


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


def test_optimizer_steps_count_iterations(two_ranks: World, tmp_path: Path) -> None:
    for records in run(two_ranks, tmp_path, _steps):
        assert [record.step for record in records] == [0, 1, 2]


def test_explicit_steps_win_over_the_optimizers(two_ranks: World, tmp_path: Path) -> None:
    for records in run(two_ranks, tmp_path, _explicit_steps):
        # The optimizers count until the first crossrank.step(), which ends iteration 0 whatever they have come to.
        assert [record.step for record in records] == [0, 1, 2, 1, 1, 1, 2, 2, 2]


def _sizes_change(rank: int) -> None:
    for size in range(1, 5000):
        dist.all_reduce(torch.empty(size))


def test_every_call_is_recorded_when_sizes_never_repeat(two_ranks: World, tmp_path: Path) -> None:
    records, _ = run(two_ranks, tmp_path, _sizes_change)
    assert [record.bytes for record in records] == [4 * size for size in range(1, 5000)]


def _group_ranks_with_gap(rank: int) -> bool:
    import weakref

    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group)
    reference = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    return reference() is None


def test_a_destroyed_group_is_not_kept_alive(two_ranks: World, tmp_path: Path) -> None:
    assert two_ranks.run(_group_ranks_with_gap, tmp_path / "off", record=False) == [True, True]
    assert two_ranks.run(_group_ranks_with_gap, tmp_path / "on") == [True, True]


def test_a_call_on_a_group_that_torch_has_forgotten_is_recorded(tmp_path: Path) -> None:
    result = jobs.python(
        tmp_path,
        """
        forgotten = dist.group.WORLD
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        crossrank.enable()
        forgotten.allreduce([torch.ones(3)]).wait()
        """,
        TRACING_DIR=str(tmp_path / "recording"),
    )
    assert (result.returncode, result.stderr) == (0, "")
    (record,) = records_of(tmp_path / "recording", 0)
    assert (record.op, record.inputs) == ("all_reduce", [[3]])
