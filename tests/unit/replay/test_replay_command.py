"""The command line of a replay, as far as it goes without starting a process."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torchrun

from crossrank.errors import CrossrankError
from crossrank.replay import replay_options
from crossrank.replay.plan.plan import save_plan
from crossrank.replay.sweep import parse_sweeps, with_values
from crossrank.tools.graph.linking import current
from tests.unit.command import Command
from tests.unit.replay.plans import built, record

RECORDING = Path(__file__).parents[2] / "fuzz" / "seeds" / "recording"
_ON_TWO = ", on 2 ranks and 1 group\n"


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    call = record("all_reduce", is_async=False)
    save_plan(built([call, record("barrier")], [call, record("barrier")]), path)
    return str(path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "replay")


def test_a_dry_run_reports_the_planned_replay(plan: str, run: Command) -> None:
    code, out, err = run(plan, "--dry-run")
    assert (code, err) == (0, "")
    assert out == (
        f"job: the replay covers 4 of 4 recorded calls (100.0 %) and 32 B of 32 B (100.0 %){_ON_TWO}"
        "  memory for tensors: up to 16 B per rank\n"
    )


def test_a_dry_run_links_windows_only_if_times_are_requested(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*files: str, rank: int) -> object:
        raise CrossrankError(f"rank {rank} is linked")

    monkeypatch.setattr(current, "link", link)
    for words, ranks in (([], ()), (["--pace", "recorded"], (0, 1)), (["--pace", "1", "--one-trace"], (0,))):
        code, out, err = run(str(RECORDING), "--dry-run", *words)
        assert (code, err) == (0, "")
        linked = [line for line in out.splitlines() if "its durations are not used" in line]
        assert linked == [f"  its durations are not used: rank {rank} is linked" for rank in ranks]


def test_strict_makes_skipped_calls_an_error(plan: str, run: Command) -> None:
    assert run(plan, "--dry-run", "--strict")[0] == 0
    code, out, _ = run(plan, "--dry-run", "--strict", "--ops", "barrier")
    assert code == 1
    assert out == (
        f"job: the replay covers 2 of 4 recorded calls (50.0 %) and 0 B of 32 B (0.0 %){_ON_TWO}"
        "  memory for tensors: up to 0 B per rank\n"
        "  left out: 2 calls: not in --ops\n"
    )


def test_a_plan_is_saved_with_its_changes(plan: str, tmp_path: Path, run: Command) -> None:
    saved = str(tmp_path / "saved.json.zst")
    assert run(plan, "--dry-run", "--nproc", "4", "--scale-bytes", "2", "--save-plan", saved)[0] == 0
    _, out, _ = run(saved, "--dry-run")
    assert out.startswith("job: the replay covers 4 of 4 recorded calls (100.0 %) and 32 B of 32 B (100.0 %)")
    assert "on 4 ranks" in out
    assert "  changed to 8 calls and 128 B per pass\n" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one trace"),
        (["{plan}", "--trace-path", "x"], "give one trace"),
        (["/nowhere"], "/nowhere: no such file or folder"),
        (["{plan}", "--repeat", "0"], "--repeat 0 is not a number from 1 to "),
        (["{plan}", "--nproc", "3", "--ops", "tree_reduce"], "--ops: 'tree_reduce' is not an operation"),
        (["{plan}", "--timeout", "-1"], "--timeout -1.0 is not a number from 1 to 1,000,000"),
        (["{plan}", "--master-port", "99999"], "--master-port 99999 is not a number from 1 to 65,535"),
        (["{plan}", "--pace", "slow"], "--pace 'slow' is not fast, recorded, compute, or a factor"),
        (["{plan}", "--scale-bytes", "nan"], "--scale-bytes nan is not above 0"),
        (["{plan}", "--scale-bytes", "0"], "--scale-bytes 0 is not above 0"),
        (["{plan}", "--sweep", "speed=1,2"], "--sweep 'speed=1,2' is not NAME=VALUE,VALUE"),
        (["{plan}", "--backend", "carrier_pigeon"], "--backend 'carrier_pigeon' is not one of gloo, nccl, "),
        (["{plan}", "--backend", "carrier_pigeon", "--dry-run"], "--backend 'carrier_pigeon' is not one of gloo, "),
        (["{plan}", "--record", "{plan}"], "is the recording to replay; choose another folder"),
        (["{plan}", "--device", "tpu"], "--device 'tpu' is neither cpu nor cuda"),
        (["{plan}", "--nproc", "1000"], "1000 ranks are too many for one machine"),
    ],
)
def test_invalid_input_is_refused_in_one_line(words: list[str], message: str, plan: str, run: Command) -> None:
    code, _, err = run(*(word.replace("{plan}", plan) for word in words))
    assert code == 2
    assert err.startswith(f"crossrank: {message}") or message in err
    assert err.count("\n") == 1


def _parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    replay_options.add_arguments(parser)
    return parser.parse_args(["job", *words])


def _words(option: replay_options.Option) -> list[str]:
    """The option as a user gives it."""
    name = option.shown if option.shown.startswith("--") else f"--{option.name}"
    if option.choices:
        return [name, next(str(one) for one in option.choices if one != option.default)]
    value = "1:2" if option.metavar == "START:STOP" else "1" if option.type is not str else "x"
    return [name, value] if option.metavar else [name]


@pytest.mark.parametrize(
    ("one", "other"),
    [(one, other) for one in replay_options.OPTIONS.values() for other in one.not_with],
    ids=lambda value: getattr(value, "name", value),
)
def test_options_that_contradict_each_other_are_refused(one: replay_options.Option, other: str) -> None:
    beside = replay_options.OPTIONS[other]
    with pytest.raises(CrossrankError, match=rf"^{one.shown} .*; remove {beside.shown}$"):
        replay_options.check(_parsed(*_words(one), *_words(beside)))


@pytest.mark.parametrize(
    "one", [one for one in replay_options.OPTIONS.values() if one.needs], ids=lambda one: str(one.name)
)
def test_an_option_is_refused_without_the_option_it_needs(one: replay_options.Option) -> None:
    with pytest.raises(CrossrankError, match=rf"^{one.shown} needs --{one.needs}$"):
        replay_options.check(_parsed(*_words(one)))


def test_a_probe_has_only_the_replay_options_it_needs() -> None:
    parser = argparse.ArgumentParser()
    replay_options.add_arguments(parser, replay_options.PROBE)
    given = parser.parse_args(["job", "--groups", "ring", "--scale-bytes", "2"])
    replay_options.check(given)
    assert (given.groups, given.tolerance, given.scale_bytes, given.check, given.sweep) == ("ring", 1.5, 2, False, [])
    with pytest.raises(SystemExit):
        parser.parse_args(["job", "--compute"])


def test_a_pace_needs_times(tmp_path: Path, run: Command) -> None:
    made = built([record("barrier")], [record("barrier")])  # one call has no gap before it
    save_plan(made, tmp_path / "plan.json")
    code, _, err = run(str(tmp_path / "plan.json"), "--pace", "recorded")
    assert code == 2
    assert "has no times, so no gaps" in err


def test_a_launcher_decides_the_number_of_ranks(plan: str, run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    code, _, err = run(plan, "--nproc", "4")
    assert (code, "started 2 ranks; remove --nproc" in err) == (2, True)
    code, _, err = run(plan, "--sweep", "NCCL_ALGO=Ring,Tree")
    assert (code, "start one replay per value" in err) == (2, True)


def _reaches_a_replay(words: list[str], capsys: pytest.CaptureFixture[str]) -> bool:
    try:
        parsed = torchrun.parse_args(["--nproc-per-node", "2", "-m", "crossrank.replay", "trace", *words])
    except SystemExit:
        assert "ambiguous option" in capsys.readouterr().err
        return False
    return bool(parsed.training_script_args == ["trace", *words])


@pytest.mark.parametrize("mode", [replay_options.REPLAY, replay_options.PROBE])
def test_torchrun_passes_every_option_under_one_of_its_names(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    replay_options.add_arguments(parser, mode)
    kept_back = [
        action.option_strings
        for action in parser._actions
        if action.option_strings and not any(_reaches_a_replay([name, "2"], capsys) for name in action.option_strings)
    ]
    assert kept_back == []
    assert parser.parse_args(["trace", "--num-ranks", "2"]).nproc == 2


def test_recorded_in_a_sweep_disables_a_what_if_or_sets_the_pace() -> None:
    parser = argparse.ArgumentParser()
    replay_options.add_arguments(parser)
    given = parser.parse_args(["job", "--drop", "barrier", "--scale-bytes", "3"])
    changed = with_values(given, {"drop": "recorded", "scale-bytes": "recorded", "pace": "recorded"})
    assert (changed.drop, changed.scale_bytes, changed.pace) == (None, 1.0, "recorded")
    assert with_values(given, {"overlap": "none"}).overlap == "none"
    for name, choices in (("overlap", "recorded, none"), ("indices", "uniform, zipf")):
        with pytest.raises(CrossrankError, match=f"^--{name} 'some' is not one of {choices}$"):
            with_values(given, {name: "some"})


def test_sweeps_make_all_combinations() -> None:
    found = parse_sweeps(["scale-bytes=0.5,1", "NCCL_ALGO=Ring,Tree"])
    assert [(one.options, one.variables) for one in found] == [
        ({"scale-bytes": scale}, {"NCCL_ALGO": algorithm}) for scale in ("0.5", "1") for algorithm in ("Ring", "Tree")
    ]
    assert found[0].name == "scale-bytes=0.5_NCCL_ALGO=Ring"


def test_option_names_of_param_are_known(plan: str, run: Command) -> None:
    words: list[Any] = ["--trace-path", plan, "--num-replays", "3", "--warmup-iter", "0", "--allow-ops", "barrier"]
    assert run(*words, "--max-msg-cnt", "2", "--dry-run")[0] == 0


def test_missing_memory_is_reported_before_the_replay(plan: str, run: Command) -> None:
    assert "memory for tensors: up to 16 MB per rank\n" in run(plan, "--dry-run", "--scale-bytes", "1e6")[1]
    grown = str(Path(plan).with_name("grown.json"))
    assert run(plan, "--dry-run", "--scale-bytes", "1e6", "--save-plan", grown)[0] == 0
    code, _, err = run(grown, "--scale-bytes", "1e6")
    assert (code, "2 ranks need 32 TB" in err) == (2, True)


def test_a_dry_run_has_json_output(plan: str, run: Command) -> None:
    code, out, _ = run(plan, "--dry-run", "--json")
    answer = json.loads(out)
    assert (code, answer["world_size"], answer["coverage"]["calls"], answer["memory_per_rank"]) == (0, 2, 4, 16)
