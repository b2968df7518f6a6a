"""Dumps that hold the calls of two backends: training on NCCL, checkpoints on gloo, each counted for itself."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.unit.analysis.diagnosis.simulated_jobs import Collective, CpuStall, Groups, Programs, SimulatedJob
from tests.unit.analysis.diagnosis.simulated_programs import training
from tests.unit.analysis.diagnosis.verdicts import diagnosis_of, roots

WORLD: Groups = {"0": ("default_pg", [0, 1, 2, 3])}


def merged(nccl: dict[str, Any], gloo: dict[str, Any]) -> dict[str, Any]:
    """Both recorders of a rank as one dump, in the order of their times."""
    groups = 1 + max((entry["pg_id"] for entry in nccl["entries"]), default=-1)
    moved = [entry | {"pg_id": entry["pg_id"] + groups} for entry in gloo["entries"]]
    entries = sorted(nccl["entries"] + moved, key=lambda entry: int(entry["time_created_ns"]))
    status = nccl["pg_status"] | {str(int(key) + groups): value for key, value in gloo["pg_status"].items()}
    numbered = [entry | {"record_id": number} for number, entry in enumerate(entries)]
    return nccl | {"entries": numbered, "pg_status": status}


def write(folder: Path, nccl: SimulatedJob, gloo: SimulatedJob) -> None:
    for job in (nccl, gloo):
        job.run()
    for rank in range(4):
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(merged(nccl.dump(rank), gloo.dump(rank)), 2))


@pytest.mark.parametrize("timing", [True, False])
def test_a_job_on_two_backends_that_ended_well_is_healthy(timing: bool, tmp_path: Path) -> None:
    gloo = SimulatedJob([[Collective("0", inputs=((3,),))] * 5] * 4, WORLD, backend="gloo")
    write(tmp_path, SimulatedJob(*training(4, 3), timing=timing), gloo)
    assert diagnosis_of(tmp_path).verdict == "ok"


def test_a_gloo_hang_next_to_nccl_is_found_on_their_shared_group(tmp_path: Path) -> None:
    programs: Programs = [[Collective("0", inputs=((3,),))] * 5 for _ in range(4)]
    programs[2][4] = CpuStall()
    write(tmp_path, SimulatedJob(*training(4, 3)), SimulatedJob(programs, WORLD, backend="gloo"))
    assert roots(diagnosis_of(tmp_path)) == [("missing_rank", "default_pg", 5, [2], [0, 1, 3])]


def test_a_rank_that_never_used_nccl_shares_the_calls_on_gloo(tmp_path: Path) -> None:
    programs: Programs = [[Collective("0", inputs=((3,),))] * 5 for _ in range(4)]
    programs[2][4] = CpuStall()
    groups: Groups = {"0": ("default_pg", [0, 1, 2, 3]), "1": ("model", [0, 1, 3])}
    nccl = SimulatedJob([[Collective("1")] * 3 if rank != 2 else [] for rank in range(4)], groups)
    write(tmp_path, nccl, SimulatedJob(programs, WORLD, backend="gloo"))
    assert roots(diagnosis_of(tmp_path)) == [("missing_rank", "default_pg", 5, [2], [0, 1, 3])]
