"""How a replay is run on real gloo ranks: barriers, saved results, a profile, what is told of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

import crossrank
from crossrank.comm import CommRecord
from crossrank.recording import CommsFile
from crossrank.replay.plan.plan import load_plan, save_plan
from crossrank.replay.results.measure import measure
from crossrank.replay.results.saved_data import tolerance
from crossrank.replay.run.processes import run_local
from crossrank.tools.traces.replayed import Settings
from tests.integration import callers
from tests.integration.commands import Commands
from tests.integration.test_replay import plan_of_recording, record_job
from tests.integration.world import TwoRanks, World

pytestmark = pytest.mark.touches("tools", "replay", traced=False)


def _reductions(rank: int) -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(1000))
        dist.reduce(torch.ones(50, dtype=torch.bfloat16), 1)
        crossrank.step()
    callers.lists(rank)
    callers.batch_p2p(rank)


@pytest.fixture(scope="module")
def recorded(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_job(world, _reductions, tmp_path_factory.mktemp("reductions"))


def replayed(command: Commands, path: Path, *words: object, code: int = 0) -> Any:
    few = ("--warmup", "0", "--repeat", "2", "--timeout", "60")
    return command.json("replay", path, *few, *words, code=code)


def test_a_call_between_barriers_does_not_wait_for_a_late_rank(two_ranks: TwoRanks) -> None:
    waited = {}
    for blocking in (False, True):
        plan = plan_of_recording(two_ranks.record(callers.all_reduce, folder=str(blocking)))
        plan.ranks[1].calls[0].gap_ns = 400_000_000
        settings = Settings(backend="gloo", device="cpu", warmup=0, repeats=1, pace="recorded", blocking=blocking)
        times = measure(plan, run_local(plan, settings))
        waited[blocking] = times.filter(rank=0)["completion"][0]
    assert waited[False] > 300_000_000
    assert waited[True] < 200_000_000


def test_a_blocking_replay_makes_the_recorded_calls_and_records_no_barriers(
    recorded: Path, tmp_path: Path, command: Commands
) -> None:
    again = tmp_path / "again"
    report = replayed(command, recorded, "--blocking", "--check", "--record", again)
    assert report["what_if"] == {"--blocking": "yes"}
    assert report["check"]["failures"] == []
    made = [one.op for one in CommsFile(str(again / "rank-0.comms.jsonl.zst")).records()]
    assert made == 2 * [one.op for one in CommsFile(str(recorded / "rank-0.comms.jsonl.zst")).records()]


def test_results_match_another_replay_and_a_different_result_is_reported(
    recorded: Path, tmp_path: Path, command: Commands
) -> None:
    saved = tmp_path / "saved"
    replayed(command, recorded, "--save-data", saved)
    exactly = ["--compare-data", str(saved), "--rtol", "0", "--atol", "0"]
    data = replayed(command, recorded, *exactly)["data"]
    assert (data["different"], data["largest_difference"], data["failures"]) == (0, 0.0, [])
    assert data["tensors"] > 10
    # The first result of rank 1 is that of an all_reduce of 1,000 floats; its element 3 is another one now.
    with (saved / "rank-1.data").open("r+b") as file:
        file.seek(12)
        file.write(b"\0\0\xc8\x42")  # 100.0
    data = replayed(command, recorded, *exactly, code=1)["data"]
    (failure,) = data["failures"]
    assert (data["different"], failure["rank"], failure["op"], failure["element"]) == (1, 1, "all_reduce", 3)
    assert failure["expected"] == 100
    assert abs(failure["got"]) < 2  # the sum of two numbers from -1 to 1
    assert data["largest_difference"] == pytest.approx(100 - failure["got"])
    assert replayed(command, recorded, "--compare-data", saved, "--atol", "200")["data"]["different"] == 0


def test_another_root_gives_other_results(two_ranks: TwoRanks, tmp_path: Path, command: Commands) -> None:
    saved, plan_file = tmp_path / "saved", tmp_path / "plan.json"
    path = two_ranks.record(_broadcast)
    replayed(command, path, "--save-data", saved, "--save-plan", plan_file)
    plan = load_plan(str(plan_file))
    for rank in plan.ranks:
        rank.calls = [msgspec.structs.replace(call, record=_from_rank_1(call.record)) for call in rank.calls]
    save_plan(plan, plan_file)
    data = replayed(command, plan_file, "--compare-data", saved, code=1)["data"]
    assert (data["tensors"], data["different"]) == (2, 2)


def _broadcast(rank: int) -> None:
    dist.broadcast(torch.ones(100), 0)


def _from_rank_1(record: CommRecord) -> CommRecord:
    return msgspec.structs.replace(record, root=1)


@pytest.mark.parametrize(
    ("dtype", "least"),
    [(torch.float32, 1e-4), (torch.bfloat16, 0.0625), (torch.float16, 0.0078125), (torch.int8, 1e-4)],
)
def test_the_default_tolerance_depends_on_the_type(dtype: torch.dtype, least: float) -> None:
    assert tolerance(dtype) == least


def test_results_of_another_type_are_counted_as_not_comparable(recorded: Path, command: Commands) -> None:
    saved = command.folder / "saved"
    replayed(command, recorded, "--ops", "all_reduce", "--save-data", saved)
    words = ["--ops", "all_reduce", "--compare-data", saved]
    data = replayed(command, recorded, *words, "--dtype", "float64", code=1)["data"]
    assert (data["tensors"], data["not_comparable"]) == (0, 6)


def test_results_are_not_compared_with_their_replacements(recorded: Path, command: Commands) -> None:
    saved = command.folder / "saved"
    replayed(command, recorded, "--save-data", saved)
    before = (saved / "rank-0.data").read_bytes()
    words = ["replay", recorded, "--save-data", saved]
    assert "are one folder; give two" in command.said(*words, "--compare-data", f"{saved}/../saved")
    assert "--save-data would save all combinations to one folder; remove --sweep" in command.said(
        *words, "--sweep", "dtype=float32,float64"
    )
    assert "--save-data s3://bucket/x: is not a folder" in command.said(
        "replay", recorded, "--save-data", "s3://bucket/x"
    )
    assert (saved / "rank-0.data").read_bytes() == before


def test_results_of_other_calls_and_damaged_results_are_refused_before_the_start(
    recorded: Path, tmp_path: Path, command: Commands
) -> None:
    saved = tmp_path / "saved"
    replayed(command, recorded, "--save-data", saved, "--drop", "all_reduce")
    words = ["replay", recorded, "--compare-data"]
    assert "rank-0.data: was saved by a replay with other calls" in command.said(*words, saved)
    (saved / "rank-0.data").write_bytes(b"1234")
    assert "its results have 4 bytes, not" in command.said(*words, saved)
    assert "has no results of rank 0" in command.said(*words, tmp_path)


def test_times_are_reported_by_source_line_step_and_batch(recorded: Path, command: Commands) -> None:
    report = replayed(command, recorded, "--batch", "2")
    by_step = {block["name"]: block for block in report["by_step"]}
    assert [by_step[name]["calls"] for name in ("0", "1", "2")] == [2, 2, 2]
    assert by_step["1"]["bytes"] == 4000 + 100
    lines = [block for block in report["by_source"] if "test_replay_options.py" in block["name"]]
    assert sorted((block["calls"], block["bytes"]) for block in lines) == [(3, 300), (3, 12000)]
    for block in by_step.values():
        assert 0 < block["time_us"]["p50"] <= block["span_us"]["p50"] * block["calls"]
    calls = report["calls_per_pass"] // 2
    assert report["batches"]["batches"] == 2 * (calls // 2)
    assert report["batches"]["time_us"]["p50"] > 0
    output = command("replay", recorded, "--repeat", "1", "--by", "source,step", "--batch", "2")
    assert "By source line, all calls together, per pass" in output
    assert "By step" in output
    assert "2 calls in a row take" in output
    assert "No rank makes 1,000 calls" in command("replay", recorded, "--repeat", "1", "--batch", "1000")
    assert "--by 'line' is neither source nor step" in command.said("replay", recorded, "--by", "line")


def test_a_profiled_replay_leaves_a_recording_with_a_window(recorded: Path, tmp_path: Path, command: Commands) -> None:
    profile = tmp_path / "profile"
    replayed(command, recorded, "--profile", profile)
    command("link", profile)
    made = [one.op for one in CommsFile(str(profile / "rank-0.comms.jsonl.zst")).records() if one.step in (1, 2)]
    assert made == 2 * [one.op for one in CommsFile(str(recorded / "rank-0.comms.jsonl.zst")).records()]
    assert sum(row["calls"] for row in command.json("bandwidth", profile)["rows"]) > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--compute --save-data x", "--save-data applies only to a replay of communication"),
        ("--rtol 2", "--rtol needs --compare-data"),
        ("--graph --blocking", "--blocking has no effect with --graph"),
        ("--graph --pace recorded", "--pace has no effect with --graph"),
        ("--graph", "--graph needs nccl on a GPU, and this replay uses gloo on cpu"),
        ("--init-method tcp://localhost:29500", "rank and number of ranks are unknown"),
        ("--init-method tcp://localhost:29500?rank=1", "rank and number of ranks are unknown"),
        ("--init-method tcp://localhost:29500?rank=", "rank and number of ranks are unknown"),
        ("--init-method file://meeting", "give tcp://HOST:PORT, file:///PATH or env://"),
        (
            "--init-method file:///meeting --master-ip h",
            "--master-ip sets the meeting point of the ranks, as --init-method does",
        ),
    ],
)
def test_unsuitable_options_are_refused(words: str, said: str, recorded: Path, command: Commands) -> None:
    assert said in command.said("replay", recorded, *words.split(), "--backend", "gloo", "--device", "cpu")
