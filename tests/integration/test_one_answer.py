"""The same folder through every command: the same ranks, groups and calls, whatever its files are called."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crossrank.recording import COMMS, EXECUTION_TRACE, FLIGHT, KINETO, file_name
from tests.integration import jobs
from tests.integration.commands import Commands

pytestmark = pytest.mark.touches("tools", traced=False)

GROUPS = [[0], [0, 1], [1]]
COLLECTIVES = 4
CALLS = 2 * (COLLECTIVES + 1 + 1)


TRAIN = f"""
import torch, torch.distributed as dist
import crossrank
dist.init_process_group("gloo")
crossrank.enable(window="0:1")
rank = dist.get_rank()
alone = [dist.new_group([0]), dist.new_group([1])][rank]
for _ in range({COLLECTIVES}):
    dist.all_reduce(torch.ones(5))
dist.all_reduce(torch.ones(7), group=alone)
if rank == 0:
    dist.send(torch.ones(3), 1)
else:
    dist.recv(torch.ones(3), 0)
crossrank.disable()
dist.destroy_process_group()
"""


NAMES: dict[str, Callable[[str, int], str]] = {
    "a recording": lambda kind, rank: file_name(kind, rank),
    "a host's number before that of the rank": lambda kind, rank: f"host7_{kind}_{rank}.json.zst",
    "ranks that are called so": lambda kind, rank: f"{kind}_rank{rank}_host-07.zst",
    "a folder per node": lambda kind, rank: f"node-{rank + 3}/{kind}-{rank}",
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    jobs.Scripts(folder).ranks(TRAIN)
    return folder / jobs.RECORDING


def answers(folder: Path, out: Path, command: Commands) -> dict[str, dict[str, Any]]:
    """What every command says of a folder."""
    found = {}
    for name, *words in (
        ("inspect",),
        ("link", "-o", out / "linked"),
        ("convert", "-o", out / "chakra"),
        ("diagnose", "--database", out / "job.sqlite"),
        ("bandwidth",),
        ("timeline", "-o", out / "timeline.pftrace"),
        ("report", "-o", out / "report.html"),
        ("replay", "--dry-run"),
    ):
        found[name] = command.json(name, folder, *words, "--jobs", "1")
    return found


@pytest.mark.parametrize("names", NAMES)
def test_every_command_names_the_same_ranks_groups_and_calls(recorded: Path, command: Commands, names: str) -> None:
    folder = command.folder / "job9_32ranks"
    for rank in (0, 1):
        for kind in (COMMS, EXECUTION_TRACE, KINETO, FLIGHT):
            target = folder / NAMES[names](kind, rank)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((recorded / file_name(kind, rank)).read_bytes())

    said = answers(folder, command.folder, command)

    for name in ("inspect", "diagnose", "bandwidth"):
        assert said[name]["ranks"] == [0, 1], name
    for name in ("link", "convert"):
        assert [row["rank"] for row in said[name]["ranks"]] == [0, 1]
    assert (said["timeline"]["ranks"], said["report"]["ranks"], said["replay"]["world_size"]) == (2, 2, 2)

    for name in ("inspect", "link", "replay"):
        assert sorted(group["ranks"] for group in said[name]["groups"]) == GROUPS, name
    with sqlite3.connect(command.folder / "job.sqlite") as connection:
        members: dict[int, list[int]] = {}
        for group, rank in connection.execute("SELECT group_id, rank FROM memberships ORDER BY rank"):
            members.setdefault(group, []).append(rank)
    connection.close()
    assert sorted(members.values()) == GROUPS
    assert sorted(json.loads((command.folder / "chakra/comm_groups.json").read_bytes()).values()) == [[0], [1]]

    assert said["inspect"]["calls"]["calls"] == CALLS
    assert said["diagnose"]["counts"]["calls"] == CALLS
    assert said["replay"]["coverage"]["calls"] == said["replay"]["coverage"]["recorded_calls"] == CALLS
    for name in ("bandwidth", "timeline", "report"):
        assert said[name]["calls"] == CALLS, name


@pytest.mark.parametrize("kinds", [(FLIGHT,), (EXECUTION_TRACE, KINETO), (COMMS,)], ids="+".join)
@pytest.mark.parametrize("names", list(NAMES)[1:])
def test_ranks_do_not_depend_on_names_if_some_file_kinds_are_missing(
    recorded: Path, tmp_path: Path, command: Commands, kinds: tuple[str, ...], names: str
) -> None:
    plain, other = tmp_path / "plain", tmp_path / "other"
    for rank in (0, 1):
        for kind in kinds:
            content = (recorded / file_name(kind, rank)).read_bytes()
            for target in (plain / file_name(kind, rank), other / NAMES[names](kind, rank)):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
    for words in (["diagnose"], ["bandwidth"], ["replay", "--dry-run"], ["inspect"], ["link"]):
        results = []
        for folder in (plain, other):
            extra = ["-o", str(tmp_path / f"{folder.name}-linked")] if words == ["link"] else []
            code, out, _ = command.ended(words[0], folder, *words[1:], *extra, "--jobs", "1", "--json")
            found = json.loads(out) if code != 2 else {}
            results.append((code, found.get("ranks", found.get("world_size")), found.get("calls"), found.get("counts")))
        if words == ["link"]:
            results = [(code, [row["rank"] for row in ranks or ()], None, None) for code, ranks, _, _ in results]
        assert results[0] == results[1], words


def test_a_replay_recorded_below_the_recording_changes_no_answer(recorded: Path, command: Commands) -> None:
    folder = command.folder / "job"
    for rank in (0, 1):
        for target in (folder, folder / "replayed"):
            target.mkdir(parents=True, exist_ok=True)
            (target / file_name(COMMS, rank)).write_bytes((recorded / file_name(COMMS, rank)).read_bytes())
    told = f"{folder}/replayed/{file_name(COMMS, 0)}: is of rank 0, as {folder}/{file_name(COMMS, 0)} is"
    for name, *words in (
        ("inspect",),
        ("diagnose",),
        ("replay", "--dry-run"),
        ("timeline", "-o", command.folder / "t"),
    ):
        code, printed, said = command.ended(name, folder, *words, "--jobs", "1")
        assert (code, told in printed + said) == (0, True), name
