"""On gloo, what is not in the dumps: who belongs to a group, and ranks that gloo has aborted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.analysis.diagnosis.moments import CLOSED, Moment, write_moments
from tests.unit.analysis.diagnosis.simulated_jobs import Collective, CpuStall, Groups, Programs, SimulatedJob
from tests.unit.analysis.diagnosis.test_comms_beside import write_comms
from tests.unit.analysis.diagnosis.verdicts import diagnosis_of, roots

WORLD: Groups = {"0": ("default_pg", [0, 1, 2])}
FOUR: Groups = {"0": ("default_pg", [0, 1, 2, 3]), "5": ("pair", [0, 3])}
STEP = Collective("0", inputs=((64,),))
GATHER = Collective("0", "all_gather", ((2,),), ((4, 2),))


def stuck_on_gloo(folder: Path, programs: Programs, groups: Groups, present: list[int]) -> Path:
    """torch's own dumps, of the ranks in `present`, of a job that stands still."""
    job = SimulatedJob(programs, groups, backend="gloo")
    job.run()
    job.write(folder, ranks=present)
    return folder


def without_rank_3(*before: Collective) -> Programs:
    programs: Programs = [[*before, STEP, STEP] for _ in range(4)]
    programs[3][-1] = CpuStall()
    return programs


def test_a_group_is_not_called_complete_if_a_file_may_be_missing(tmp_path: Path) -> None:
    found = diagnosis_of(stuck_on_gloo(tmp_path, without_rank_3(), FOUR, [0, 1, 2]))
    assert (found.verdict, found.suspect_ranks) == ("error", [])
    assert found.findings[0].text.startswith("all known ranks of this group made the call; the group may have")


@pytest.mark.parametrize(
    ("programs", "missing", "options", "number"),
    [
        pytest.param(without_rank_3(), 3, {"world_size": 4}, 2, id="the user says how many ranks there are"),
        pytest.param(without_rank_3(GATHER), 3, {}, 3, id="an all_gather puts together what four ranks have"),
        pytest.param([[STEP] * 2, [STEP, CpuStall()], [STEP] * 2, [STEP] * 2], 1, {}, 2, id="ranks count from 0"),
    ],
)
def test_a_rank_without_a_dump_is_named_if_other_data_shows_it_exists(
    programs: Programs, missing: int, options: dict[str, int], number: int, tmp_path: Path
) -> None:
    present = [rank for rank in range(4) if rank != missing]
    found = diagnosis_of(stuck_on_gloo(tmp_path, programs, FOUR, present), **options)
    assert roots(found) == [("dump_missing", "default_pg", number, [missing], present)]


@pytest.mark.parametrize("gathered", [False, True])
def test_a_group_is_incomplete_if_it_may_have_a_missing_rank(gathered: bool, tmp_path: Path) -> None:
    pair = Collective("5", "all_gather", ((2,),), ((2, 2),)) if gathered else Collective("5")
    programs: Programs = [[STEP, pair, Collective("5")], [STEP], [STEP], [STEP, pair, CpuStall()]]
    folder = stuck_on_gloo(tmp_path, programs, FOUR, [0, 1, 2])
    found = diagnosis_of(folder, world_size=4)
    assert {(finding.kind, *finding.culprit_ranks) for finding in found.findings} == {("dump_missing", 3)}
    assert [(one.pg[1], one.waiting_ranks) for one in found.consequences] == [("pair", [0])]


def test_a_group_with_unknown_members_reports_its_size(tmp_path: Path) -> None:
    gather = Collective("5", "all_gather", ((2,),), ((2, 2),))
    programs: Programs = [[STEP, gather, Collective("5")], [STEP], [STEP], [STEP, gather, CpuStall()]]
    found = diagnosis_of(stuck_on_gloo(tmp_path, programs, FOUR, [0]))
    assert found.suspect_ranks == []
    assert found.findings[0].text == "rank 0 of the 2 ranks made the call; the others are unknown"


@pytest.mark.parametrize("left", ["nothing", "an unfinished comms file"])
def test_a_rank_gloo_aborted_for_a_mismatch_is_not_a_culprit(left: str, tmp_path: Path) -> None:
    programs: Programs = [[STEP, STEP] for _ in range(4)]
    programs[1][-1] = Collective("0", inputs=((1024,),))
    failed = Moment(reason="exit", after=0.02, error=CLOSED, timed_out=True)
    killed = Moment(reason="SIGTERM", after=0.1, timed_out=True)
    world: Groups = {"0": ("default_pg", [0, 1, 2, 3])}
    write_moments(SimulatedJob(programs, world, backend="gloo"), tmp_path, {1: failed, 2: killed, 3: failed})
    if left == "an unfinished comms file":
        write_comms(tmp_path, 0, [], groups=world)

    found = diagnosis_of(tmp_path)

    assert [(finding.kind, finding.culprit_ranks) for finding in found.findings] == [("size_mismatch", [1])]
    assert [(one.kind, one.culprit_ranks, one.because_of) for one in found.consequences] == [("dump_missing", [], 0)]


def test_no_rank_is_accused_if_several_ranks_ended_without_a_reason(tmp_path: Path) -> None:
    programs: Programs = [[STEP, STEP] for _ in range(3)]
    programs[1][-1] = programs[2][-1] = CpuStall()
    failed = Moment(reason="exit", after=0.02, error=CLOSED, timed_out=True)
    write_moments(SimulatedJob(programs, WORLD, backend="gloo"), tmp_path, {0: failed})
    for rank in (1, 2):
        write_comms(tmp_path, rank, [])
    found = diagnosis_of(tmp_path)
    assert roots(found) == [("dump_missing", "default_pg", 2, [1, 2], [0])]
    assert "one of them may have ended the others" in found.findings[0].text


def test_the_last_call_of_a_truncated_comms_file_is_not_a_hang(tmp_path: Path) -> None:
    programs: Programs = [[Collective("0", "broadcast", ((8,),)), STEP] for _ in range(3)]
    programs[2][-1] = CpuStall()
    write_moments(SimulatedJob(programs, WORLD, backend="gloo"), tmp_path, {0: Moment(), 1: Moment()})
    write_comms(tmp_path, 2, [{"op": "broadcast", "pg": "0", "seq": 1, "root": 2}])
    assert roots(diagnosis_of(tmp_path)) == [("missing_rank", "default_pg", 2, [2], [0, 1])]


def test_a_rank_with_calls_after_its_dump_uses_its_comms_file(tmp_path: Path) -> None:
    programs: Programs = [[STEP] * 4 for _ in range(3)]
    programs[2][-1] = CpuStall()
    job = SimulatedJob(programs, WORLD, backend="gloo")
    write_moments(job, tmp_path, {0: Moment(), 1: Moment()})
    paused = SimulatedJob([[STEP]] * 3, WORLD, backend="gloo")
    write_moments(paused, tmp_path, {2: Moment(after=0.5)})
    write_comms(tmp_path, 2, [{"op": "all_reduce", "pg": "0", "seq": seq} for seq in (1, 2, 3)])
    found = diagnosis_of(tmp_path)
    assert roots(found) == [("missing_rank", "default_pg", 4, [2], [0, 1])]
    assert found.notes[0].startswith(
        "rank 2 made calls after its dump, so crossrank uses its comms file; the last call in its"
    )


def test_a_rank_that_ended_without_a_reason_is_named_if_no_call_explains_failures(tmp_path: Path) -> None:
    failed = Moment(reason="exit", after=0.02, error=CLOSED)
    write_moments(SimulatedJob([[STEP]] * 3, WORLD, backend="gloo"), tmp_path, {0: failed, 1: failed})
    write_comms(tmp_path, 2, [{"op": "all_reduce", "pg": "0", "seq": 1}])
    found = diagnosis_of(tmp_path)
    assert [(finding.kind, finding.culprit_ranks) for finding in found.findings] == [("dump_missing", [2])]
