"""Whole steps replayed on real gloo ranks: computation with communication at its place between the operations."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import crossrank
from crossrank.recording import CommsFile
from crossrank.replay.plan.compute.windows import find_windows, read_windows
from crossrank.replay.plan.plan import Plan, save_plan
from crossrank.tools.parallel import Fleet
from tests.integration.commands import Commands
from tests.integration.world import TwoRanks, World

pytestmark = pytest.mark.touches("tools", "replay", traced=False)

STEPS = range(2, 4)


def _model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, nhead=2, dim_feedforward=64, batch_first=True, dropout=0.1)
    return nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)


def _train(model: nn.Module, width: int = 32) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(8):
        output = model(torch.randn(2, 8, width))
        (output[0] if isinstance(output, tuple) else output).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_ddp(rank: int) -> None:
    _train(DistributedDataParallel(_model(), bucket_cap_mb=0.02))


def train_fsdp2(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = _model()
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    _train(model)


def train_lstm(rank: int) -> None:
    _train(DistributedDataParallel(nn.LSTM(16, 16, num_layers=2, batch_first=True)), 16)


def exchange(rank: int) -> None:
    """Every step exchanges another number of rows, after 100 ms of the host's own that no operation takes."""
    weight = torch.ones(8, 8)
    for step in range(8):
        rows = torch.ones(2 * (step + 1), 8) @ weight
        time.sleep(0.1)
        dist.all_to_all_single(torch.empty_like(rows), rows)
        crossrank.step()


@pytest.fixture(scope="module")
def ddp(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    world.run(train_ddp, folder, window="2:4")
    return folder / "recording"


def plan_of(path: Path) -> Plan:
    return read_windows(find_windows(str(path)), str(path), Fleet(jobs=1))


def replayed(command: Commands, path: Path, *words: object, code: int = 0) -> Any:
    few = ("--warmup", "0", "--repeat", "2", "--timeout", "60")
    return command.json("replay", path, "--compute", *few, *words, code=code)


def calls_of(path: Path, rank: int, steps: range) -> list[Any]:
    records = CommsFile(str(path / f"rank-{rank}.comms.jsonl.zst")).records()
    return [(one.op, one.inputs, one.outputs, one.dtype, one.bytes) for one in records if one.step in steps]


@pytest.mark.parametrize("train", [train_ddp, train_fsdp2])
def test_every_operation_and_every_call_of_a_window_runs_again(
    two_ranks: TwoRanks, tmp_path: Path, command: Commands, train: Any
) -> None:
    two_ranks.run(train, window="2:4")
    recorded, again = tmp_path / "recording", tmp_path / "again"
    report = replayed(command, recorded, "--strict", "--record", again)
    step = report["step"]
    assert step["coverage"]["operations"] == step["coverage"]["recorded_operations"] > 300
    assert step["coverage"]["left_out"] == []
    assert report["share_of_calls"] == 1.0
    for rank in (0, 1):
        assert calls_of(again, rank, range(100)) == 2 * calls_of(recorded, rank, STEPS)
    assert step["steps"] == len(STEPS)
    # Of eight steps the first has no begin, and one on each side of the window is left out: three are, on each rank.
    assert step["recorded_steps"] == 2 * 3
    assert 0 < step["exposed_ms"] <= step["replayed_p95_ms"]
    assert step["replayed_ms"] <= step["replayed_p95_ms"]
    assert step["operations"][0]["replayed_us"] >= step["operations"][-1]["replayed_us"] > 0
    named = {row["name"]: row for row in step["operations"]}
    assert named["aten::addcdiv_"]["count"] == len(list(_model().parameters()))
    assert ("fsdp::split_with_sizes_copy" in named) == (train is train_fsdp2)


def test_an_operation_with_extra_outputs_for_gradients_gives_them_again(
    two_ranks: TwoRanks, tmp_path: Path, command: Commands
) -> None:
    """The workspace of an LSTM's forward is what its backward takes."""
    two_ranks.run(train_lstm, window="2:4")
    report = replayed(command, tmp_path / "recording", "--strict")
    assert report["step"]["coverage"]["left_out"] == []
    assert "aten::mkldnn_rnn_layer_backward" in {row["name"] for row in report["step"]["operations"]}


def test_a_step_takes_as_long_as_unprofiled_steps_even_if_sizes_change(
    two_ranks: TwoRanks, tmp_path: Path, command: Commands
) -> None:
    two_ranks.run(exchange, window="2:4")
    report = replayed(command, tmp_path / "recording")
    step = report["step"]
    assert (step["recorded_steps"], step["other_steps"]) == (2 * 3, 0)
    assert any("no step outside the window moved as many bytes" in note for note in report["notes"])
    # The 100 ms of the host are fitted; what else a step takes is a busy machine's.
    assert 75 < step["host_ms"] < 125


def test_a_call_works_on_the_tensors_of_the_operations_around_it(ddp: Path) -> None:
    """A bucket is filled by one operation, reduced, and copied to the gradients by others."""
    compute = plan_of(ddp).ranks[0].compute
    assert compute is not None
    calls = [one for one in compute.operations if one.call >= 0]
    assert len(calls) > 4
    for call in calls:
        assert call.inputs == call.outputs
        assert compute.slots[call.inputs[0]].block >= 0


def test_ddp_waits_for_its_buckets_after_the_backward_and_not_at_their_launch(ddp: Path) -> None:
    plan = plan_of(ddp)
    for rank in plan.ranks:
        assert rank.compute is not None
        waited = [call for one in rank.compute.operations for call in one.waits]
        assert sorted(waited) == [call.record.id for call in rank.calls]
        of_a_step = len(rank.calls) // len(STEPS)
        # All buckets of a step are launched before the first is waited for.
        assert [call.wait_before for call in rank.calls] == [of_a_step] * of_a_step + [2 * of_a_step] * of_a_step
        assert not any(call.blocking for call in rank.calls)


def halves(rank: int) -> None:
    """Two asynchronous calls on one buffer, and a batch of a send and a receive."""
    buffer = torch.ones(1000)
    for _ in range(6):
        first = dist.all_reduce(buffer[:500], async_op=True)
        second = dist.all_reduce(buffer[500:], async_op=True)
        assert first is not None
        assert second is not None
        first.wait()
        second.wait()
        received = torch.empty(3)
        given = torch.full((3,), 1.0).clone()
        ops = [dist.P2POp(dist.isend, given, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        buffer.add_(received.sum())
        crossrank.step()


def test_calls_on_parts_of_one_tensor_overlap_and_a_batch_keeps_its_tensors(
    two_ranks: TwoRanks, tmp_path: Path, command: Commands
) -> None:
    two_ranks.run(halves, window="2:4")
    recorded = tmp_path / "recording"
    for rank in plan_of(recorded).ranks:
        reduced = [(index, call) for index, call in enumerate(rank.calls) if call.record.op == "all_reduce"]
        assert [call.wait_before - index for index, call in reduced] == [2, 1] * len(STEPS)
    again = tmp_path / "again"
    assert replayed(command, recorded, "--strict", "--record", again)["step"]["coverage"]["left_out"] == []
    assert calls_of(again, 0, range(100)) == 2 * calls_of(recorded, 0, STEPS)


def test_a_saved_plan_says_whether_it_has_computation_and_has_no_code(ddp: Path, command: Commands) -> None:
    plan, path = plan_of(ddp), command.folder / "plan.json"
    save_plan(plan, path)
    assert "is a plan with computation; add --compute" in command.said("replay", path)
    first = plan.ranks[0].compute
    assert first is not None
    next(one for one in first.operations if one.results).results = ["0]; print('code'); s[0"]
    save_plan(plan, path)
    assert "has a tensor that is not a number; save the plan again" in command.said("replay", path, "--compute")


def test_changes_apply_to_the_calls_and_leave_the_operations(ddp: Path, command: Commands) -> None:
    plain, dropped, merged, split = (
        replayed(command, ddp, "--dry-run", *words)
        for words in ([], ["--drop", "all_reduce"], ["--bucket-mb", "1"], ["--bucket-mb", "0.005"])
    )
    assert dropped["calls_per_pass"] == 0
    assert dropped["coverage"]["reasons"] == {"--drop": plain["calls_per_pass"]}
    assert merged["calls_per_pass"] == 2 * len(STEPS)
    assert split["calls_per_pass"] > plain["calls_per_pass"]
    for changed in (merged, split):
        assert changed["bytes_per_pass"] == plain["bytes_per_pass"]
        assert changed["coverage"] == plain["coverage"]
    words = ["--bucket-mb", "0.005", "--scale-bytes", "0.5", "--overlap", "none"]
    report = replayed(command, ddp, *words)
    assert report["what_if"] == {"--scale-bytes": "0.5", "--bucket-mb": "0.005", "--overlap": "none"}
    assert report["calls_per_pass"] == split["calls_per_pass"]
    assert report["step"]["coverage"]["left_out"] == []
    alone = replayed(command, ddp, "--dry-run", "--nproc", "1")
    assert alone["world_size"] == 1
    computation = alone["computation"]
    assert computation["operations"] == computation["recorded_operations"] > 100


def test_a_sweep_of_whole_steps_gives_one_table(ddp: Path, command: Commands) -> None:
    words = ("--compute", "--warmup", "0", "--repeat", "1", "--sweep", "drop=recorded,all_reduce")
    table = command("replay", ddp, *words).split("Sweep: times per step, one row per combination")[1].splitlines()
    assert [line.split()[0] for line in table[2:4]] == ["recorded", "all_reduce"]
    assert table[2].split()[-2:] == ["1.00", "x"]
    assert float(table[3].split()[3]) < 0.1  # nothing is communicated, so nothing is waited for


def test_a_window_that_lacks_a_rank_or_a_trace_is_refused_in_one_line(ddp: Path, command: Commands) -> None:
    half, none = command.folder / "half", command.folder / "none"
    shutil.copytree(ddp, half)
    (half / "rank-1.et.json.zst").unlink()
    assert "rank 1: has no execution trace with its Kineto trace in window 1; record" in command.said(
        "replay", half, "--compute"
    )
    none.mkdir()
    shutil.copy(ddp / "rank-0.comms.jsonl.zst", none)
    error = command.said("replay", none, "--compute")
    assert f"{none}: it has no window with an execution trace" in error
    assert error.count("\n") == 1
    assert "has no window 3; it has 1" in command.said("replay", ddp, "--compute", "--window", "3")


def test_an_operation_of_a_missing_library_idles_and_is_reported(ddp: Path, command: Commands) -> None:
    plan = plan_of(ddp)
    path = command.folder / "plan.json"
    for rank in plan.ranks:
        assert rank.compute is not None
        rank.compute.schemas = [text.replace("aten::relu(", "nobody::relu(") for text in rank.compute.schemas]
        for one in rank.compute.operations:
            one.name = one.name.replace("aten::relu", "nobody::relu")
    save_plan(plan, path)
    report = replayed(command, path, "--strict", code=1)
    (row,) = report["step"]["coverage"]["left_out"]
    assert row["name"] == "nobody::relu"
    assert row["operations"] == 2 * 2 * len(STEPS)  # ranks, layers
    assert "--import MODULE can define it" in row["reason"]


def test_computation_options_need_compute(ddp: Path, command: Commands) -> None:
    for words, said in (
        (["--window", "1"], "--window needs --compute"),
        (["--import", "os"], "--import needs --compute"),
        (["--compute", "--check"], "--check applies only to a replay of communication"),
        (["--compute", "--pace", "compute"], "--pace compute replaces computation"),
        (["--compute", "--steps", "1:2"], "--steps selects calls of a comms file"),
        (["--compute", "--bucket-mb", "0"], "--bucket-mb 0 is not a number of MiB above 0"),
        (["--compute", "--drop", "nothing"], "--drop: 'nothing' is not an operation"),
    ):
        assert said in command.said("replay", ddp, *words)
