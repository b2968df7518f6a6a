"""Cases in which the obvious reading of the dumps accuses the wrong rank, or nobody, or a healthy job."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from tests.unit.analysis.diagnosis.moments import Moment, write_moments
from tests.unit.analysis.diagnosis.simulated_jobs import (
    Call,
    Collective,
    CpuStall,
    Groups,
    Programs,
    SimulatedJob,
)
from tests.unit.analysis.diagnosis.simulated_programs import training
from tests.unit.analysis.diagnosis.verdicts import diagnose_job, diagnosis_of, roots

WORLD: Groups = {"0": ("default_pg", [0, 1, 2, 3])}
ALL_REDUCE = Collective("0", inputs=((1,),))


def test_a_coalesced_call_cut_by_the_ring_is_not_a_mismatch(tmp_path: Path) -> None:
    parts = tuple(Collective("0", "_reduce_scatter_base", ((32 * i,),), ((8 * i,),)) for i in (1, 2, 3))
    coalesced = Collective("0", "REDUCE_SCATTER_coalesced", (), (), members=parts)
    for ring in (5, 6):
        job = SimulatedJob([[coalesced, ALL_REDUCE, ALL_REDUCE]] * 4, WORLD)
        job.run()
        job.write(tmp_path / str(ring), ranks=[0, 1, 2], ring=6)
        job.write(tmp_path / str(ring), ranks=[3], ring=ring)

        found = diagnosis_of(tmp_path / str(ring))

        assert (found.verdict, roots(found)) == ("ok", [])


@pytest.mark.parametrize(
    ("written_after", "expected"),
    [
        (200_000_000, ("ok", [])),
        (5_000_000_000, ("error", [("missing_rank", "default_pg", 3, [2, 3], [0, 1])])),
        (-1_000_000_000, ("error", [("missing_rank", "default_pg", 3, [2, 3], [0, 1])])),  # not by the job's clock
    ],
)
def test_calls_made_just_before_the_dump_are_in_progress(
    written_after: int, expected: tuple[str, list[object]], tmp_path: Path
) -> None:
    ahead: list[Call] = [ALL_REDUCE] * 3
    behind: list[Call] = [ALL_REDUCE, ALL_REDUCE, CpuStall()]
    job = SimulatedJob([ahead, ahead, behind, behind], WORLD)
    job.run()
    job.write(tmp_path)
    dumps = list(tmp_path.iterdir())
    last = max(entry["time_created_ns"] for dump in dumps for entry in pickle.loads(dump.read_bytes())["entries"])
    for dump in dumps:
        os.utime(dump, ns=(last + written_after,) * 2)

    found = diagnosis_of(tmp_path)

    assert (found.verdict, roots(found)) == expected
    assert [finding.kind for finding in found.advisory] == ["in_progress"] * (found.verdict == "ok")


def test_a_lost_unfinished_call_is_reported(tmp_path: Path) -> None:
    found = diagnose_job(SimulatedJob(*training(4, 6), timing=False, broken={("0", 2)}), tmp_path, ring=8)
    assert found.verdict == "error"
    assert found.suspect_ranks == []
    assert found.notes == [
        "rank 0-3 has more unfinished calls than its recorder keeps, so the call that it waits in may be lost, "
        "and it is named as no culprit; increase TORCH_FR_BUFFER_SIZE"
    ]


def test_gaps_in_dumps_without_a_status_show_skipped_completed_calls(tmp_path: Path) -> None:
    programs, groups = training(4, 6)
    programs[1].insert(13, CpuStall())
    job = SimulatedJob(programs, groups, timing=False, concurrent_groups=True)
    job.run()
    for rank in range(4):
        dump = job.dump(rank, active_only=True) | {"pg_status": {}}
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(dump, 2))
    assert [(row[0], row[3]) for row in roots(diagnosis_of(tmp_path))] == [("missing_rank", [1])]


@pytest.mark.parametrize("first", ["a", "b"])
def test_the_earliest_unexplained_call_is_the_first_root(first: str, tmp_path: Path) -> None:
    groups: Groups = {"0": ("default_pg", [0, 1, 2, 3, 4]), "1": ("a", [0, 1]), "2": ("b", [2, 3, 4])}
    programs: Programs = [[Collective("0"), Collective("1")] for _ in range(2)]
    programs += [[Collective("0"), Collective("2")] for _ in range(3)]
    job = SimulatedJob(programs, groups, broken={("1", 1), ("2", 1)})
    job.run()
    for rank in range(5):
        dump = job.dump(rank)
        if (rank < 2) == (first == "b"):
            dump["entries"][-1]["time_created_ns"] += 10**9
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(dump, 2))

    found = diagnosis_of(tmp_path)

    assert {row[1] for row in roots(found)} == {"a", "b"}
    assert roots(found)[0][1] == first


def test_two_independent_stopped_ranks_are_named_earlier_first(tmp_path: Path) -> None:
    groups: Groups = {"0": ("default_pg", list(range(8))), "1": ("a", [0, 1]), "2": ("b", [2, 3, 4, 5, 6, 7])}
    programs: Programs = [[Collective("0"), Collective("1" if rank < 2 else "2")] * 2 for rank in range(8)]
    programs[1][3] = CpuStall()
    programs[6][3] = CpuStall()
    job = SimulatedJob(programs, groups)
    job.run()
    for rank in range(8):
        dump = job.dump(rank)
        if rank >= 2 and rank != 6:
            dump["entries"][-1]["time_created_ns"] += 10**9
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(dump, 2))

    assert [(row[0], row[3]) for row in roots(diagnosis_of(tmp_path))] == [("missing_rank", [1]), ("missing_rank", [6])]


MEETS = (("MainThread", (("new_group", "/opt/torch/distributed/distributed_c10d.py", 5863), ("main", "train.py", 7))),)
IDLES = (("MainThread", (("load", "train.py", 9),)),)


@pytest.mark.parametrize("reason", ["hang", "SIGTERM"])
def test_ranks_hang_if_one_rank_does_not_create_a_group(reason: str, tmp_path: Path) -> None:
    job = SimulatedJob([[Collective("0")]] * 4, WORLD, backend="gloo")
    moments = {rank: Moment(reason=reason, after=9, stacks=IDLES if rank == 2 else MEETS) for rank in range(4)}
    write_moments(job, tmp_path, moments)
    assert roots(diagnosis_of(tmp_path)) == [("missing_rank", "default_pg", None, [2], [0, 1, 3])]


def test_a_job_cancelled_while_it_enters_a_call_is_healthy(tmp_path: Path) -> None:
    job = SimulatedJob([[Collective("0")]] * 4, WORLD, backend="gloo")
    write_moments(job, tmp_path, dict.fromkeys(range(4), Moment(reason="SIGTERM", after=0.2, stacks=MEETS)))
    assert diagnosis_of(tmp_path).verdict == "ok"


def test_ranks_that_create_groups_in_another_order_miss_no_call(
    tmp_path: Path,
) -> None:
    programs: Programs = [[Collective("0")], [Collective("0")] * 2, [Collective("0")] * 2, [Collective("0")]]
    moments = {rank: Moment(after=9, stacks=MEETS if rank in (0, 3) else ()) for rank in range(4)}
    write_moments(SimulatedJob(programs, WORLD, backend="gloo"), tmp_path, moments)
    assert roots(diagnosis_of(tmp_path)) == [("opposite_order", "default_pg", None, [], [0, 1, 2, 3])]


def test_a_rank_dumped_in_a_call_that_later_finished_is_not_waiting(tmp_path: Path) -> None:
    slow = Moment(after=2.5, stacks=MEETS, source="train.py:7")
    moments = {0: slow, 1: slow, 2: Moment(reason="exit"), 3: Moment(reason="exit")}
    write_moments(SimulatedJob([[ALL_REDUCE]] * 4, WORLD, backend="gloo"), tmp_path, moments)
    assert diagnosis_of(tmp_path).verdict == "ok"


def test_a_rank_that_creates_a_group_while_others_are_in_a_call_is_the_culprit(tmp_path: Path) -> None:
    programs: Programs = [[ALL_REDUCE] * steps for steps in (1, 2, 2, 2)]
    moments = {rank: Moment(after=9, stacks=MEETS if rank == 0 else ()) for rank in range(4)}
    write_moments(SimulatedJob(programs, WORLD, backend="gloo"), tmp_path, moments)
    assert roots(diagnosis_of(tmp_path)) == [("missing_rank", "default_pg", 2, [0], [1, 2, 3])]
