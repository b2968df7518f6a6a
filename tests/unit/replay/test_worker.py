"""What a rank does before its first call, as far as that needs no GPU."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import HashStore

from crossrank.comm import Group
from crossrank.errors import CrossrankError, one_line
from crossrank.replay.plan.build_plan import build
from crossrank.replay.run.executor import event_times
from crossrank.replay.run.failure_report import Failed
from crossrank.replay.run.messages import State
from crossrank.replay.run.rendezvous import Rendezvous
from crossrank.replay.run.worker import bound_device, check_backend, claim_gpu
from crossrank.tools.traces.rank_trace import RankGroup
from tests.unit.replay.plans import built, rank_trace, record

_GPU = torch.device("cuda", 3)


def test_only_groups_recorded_as_bound_are_bound_to_their_gpu() -> None:
    lazy, eager = Group(pg="0", size=2, ranks=[0, 1]), Group(pg="0", size=2, ranks=[0, 1], eager=True)
    assert bound_device(lazy, _GPU) is None
    assert bound_device(None, _GPU) is None
    assert bound_device(eager, _GPU) == _GPU
    assert bound_device(eager, torch.device("cpu")) is None


def test_a_plan_keeps_the_gpu_binding_of_a_group() -> None:
    ranks = [rank_trace(rank, [record("barrier")]) for rank in (0, 1)]
    for rank in ranks:
        rank.groups = [RankGroup(Group(pg="0", size=2, ranks=[0, 1], eager=True))]
    assert [group.eager for group in build(ranks, "job", "comms").groups] == [True]
    assert [group.eager for group in built([record("barrier")], [record("barrier")]).groups] == [False]


def test_each_rank_may_claim_its_own_gpu() -> None:
    rendezvous = Rendezvous(HashStore(), 4)
    for rank, gpu in enumerate(("node-0/a", "node-0/b", "node-1/a", "node-1/b")):
        claim_gpu(rendezvous, rank, gpu)


def test_ranks_that_share_a_gpu_are_refused() -> None:
    rendezvous = Rendezvous(HashStore(), 3)
    claim_gpu(rendezvous, 0, "node-0/a")
    claim_gpu(rendezvous, 1, "node-0/b")
    with pytest.raises(CrossrankError) as refused:
        claim_gpu(rendezvous, 2, "node-0/a")
    states = {rank: State(phase="joining", asked_to_end=rank < 2) for rank in range(3)}
    states[2].error = one_line(refused.value)
    assert Failed(states).summary() == (
        "rank 2 shares a GPU with rank 0, and NCCL needs one each; start fewer ranks, set NCCL_HOSTID, or use "
        "--backend gloo"
    )


@pytest.mark.parametrize("name", ["carrier_pigeon", "undefined", "fake", "backend", "GLOO", "cpu:gloo", ""])
def test_an_unknown_backend_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(CrossrankError, match=r"^--backend '.*' is not one of gloo, nccl, .*") as refused:
        check_backend(name, "cpu", 2)
    assert repr(name) in str(refused.value)
    assert check_backend("gloo", None, 2) == ("gloo", "cpu")


def _float32(ms: float) -> float:
    """As CUDA gives the time between two events."""
    return torch.tensor(ms, dtype=torch.float32).item()


def test_a_short_call_late_in_a_long_pass_keeps_its_duration() -> None:
    minute, microseconds = 60_000.0, 0.0301
    after = [_float32(minute), _float32(microseconds), _float32(0.5)]
    took = [_float32(microseconds)] * 3
    began, ended = event_times(1_000, after, took)
    assert [end - begin for begin, end in zip(began, ended, strict=True)] == [30_100] * 3
    assert list(began) == [60_000_001_000, 60_000_031_100, 60_000_531_100]
    # From the start of the pass the same end is known to some us.
    assert abs(round((_float32(minute + microseconds) - _float32(minute)) * 1e6) - 30_100) > 1_000
