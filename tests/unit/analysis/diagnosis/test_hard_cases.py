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
    GpuStall,
    Groups,
    Programs,
    Recv,
    Send,
    SimulatedJob,
    StaleWatchdog,
)
from tests.unit.analysis.diagnosis.simulated_programs import pipeline, training
from tests.unit.analysis.diagnosis.verdicts import diagnose_job, diagnosis_of, roots

WORLD: Groups = {"0": ("default_pg", [0, 1, 2, 3])}
ALL_REDUCE = Collective("0", inputs=((1,),))


def test_batches_in_dumps_of_active_calls_are_over_although_their_members_never_say_so(tmp_path: Path) -> None:
    found = diagnose_job(SimulatedJob(*pipeline(2, 3)), tmp_path, active_only=True)

    assert (found.verdict, roots(found)) == ("ok", [])


def test_dumps_of_active_calls_of_a_pipeline_name_the_stage_that_stopped(tmp_path: Path) -> None:
    programs, groups = pipeline(4, 3)
    programs[2].insert(len(programs[2]) - 3, CpuStall())

    found = diagnose_job(SimulatedJob(programs, groups), tmp_path, active_only=True)

    assert [(row[0], row[3]) for row in roots(found)] == [("p2p_unmatched", [2])]


def test_a_group_without_a_status_was_never_used_by_its_rank(tmp_path: Path) -> None:
    programs, groups = training(8, 1)
    programs[3].insert(3, CpuStall())

    found = diagnose_job(SimulatedJob(programs, groups), tmp_path, active_only=True)

    assert roots(found) == [("missing_rank", "default_pg", 1, [3], [0, 1, 2, 4, 5, 6, 7])]


def test_a_ring_that_cuts_a_coalesced_call_does_not_make_it_a_mismatch(tmp_path: Path) -> None:
    parts = tuple(Collective("0", "_reduce_scatter_base", ((32 * i,),), ((8 * i,),)) for i in (1, 2, 3))
    coalesced = Collective("0", "REDUCE_SCATTER_coalesced", (), (), members=parts)
    for ring in (5, 6):
        job = SimulatedJob([[coalesced, ALL_REDUCE, ALL_REDUCE]] * 4, WORLD)
        job.run()
        job.write(tmp_path / str(ring), ranks=[0, 1, 2], ring=6)
        job.write(tmp_path / str(ring), ranks=[3], ring=ring)

        found = diagnosis_of(tmp_path / str(ring))

        assert (found.verdict, roots(found)) == ("ok", [])


def test_numbers_of_sends_in_the_status_are_not_taken_for_collectives(tmp_path: Path) -> None:
    programs: Programs = [[ALL_REDUCE, ALL_REDUCE] for _ in range(4)]
    programs[0][1:1] = [Send("0", 1), Send("0", 1)]
    programs[1][1:1] = [Recv("0", 0), Recv("0", 0)]
    programs[3].insert(1, CpuStall())

    found = diagnose_job(SimulatedJob(programs, WORLD), tmp_path)

    assert roots(found) == [("missing_rank", "default_pg", 2, [3], [0, 1, 2])]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_one_of_four_ranks_in_another_groups_barrier_is_named(backend: str, tmp_path: Path) -> None:
    barriers = [Collective("0", "barrier", (), ()), Collective("5", "barrier", (), ())]
    programs: Programs = [[*barriers[::-1], barriers[rank == 3]] for rank in range(4)]
    groups = WORLD | {"5": ("other", [0, 1, 2, 3])}

    found = diagnose_job(SimulatedJob(programs, groups, backend=backend), tmp_path)

    assert roots(found) == [("opposite_order", "default_pg", 2, [3], [0, 1, 2])]


TP, DP = Collective("5", line=20), Collective("6", line=30)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (0, [("missing_rank", "tp", 1, [3], [2])]),  # Rank 2, which has not come to the others' call, says so.
        (2, [("missing_rank", "tp", 3, [3], [2])]),
    ],
)
def test_of_the_calls_that_a_rank_has_not_made_the_first_one_in_its_program_is_shown(
    steps: int, expected: list[object], tmp_path: Path
) -> None:
    groups = WORLD | {"5": ("tp", [2, 3])}
    programs: Programs = [[ALL_REDUCE, *([TP, ALL_REDUCE] * (steps + 1))] for _ in range(4)]
    programs[0] = programs[1] = [ALL_REDUCE] * (steps + 2)
    programs[3][1 + 2 * steps] = CpuStall()

    assert roots(diagnose_job(SimulatedJob(programs, groups, blocking=True), tmp_path)) == expected


def test_the_program_of_a_rank_says_which_of_two_groups_comes_first_where_no_other_rank_is_in_both(
    tmp_path: Path,
) -> None:
    groups: Groups = {"0": ("default_pg", [0, 1, 2, 3]), "5": ("tp", [2, 3]), "6": ("dp", [0, 1, 3])}
    programs: Programs = [[DP] * 3, [DP] * 3, [TP] * 3, [TP, DP, TP, DP, CpuStall()]]

    found = diagnose_job(SimulatedJob(programs, groups, blocking=True), tmp_path)

    assert roots(found) == [("missing_rank", "tp", 3, [3], [2])]


@pytest.mark.parametrize(
    ("written_after", "expected"),
    [
        (200_000_000, ("ok", [])),
        (5_000_000_000, ("error", [("missing_rank", "default_pg", 3, [2, 3], [0, 1])])),
        (-1_000_000_000, ("error", [("missing_rank", "default_pg", 3, [2, 3], [0, 1])])),  # not by the job's clock
    ],
)
def test_calls_are_under_way_in_dumps_that_were_written_a_moment_after_them(
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


def test_two_ranks_that_wait_for_each_others_calls_of_one_kind_are_a_cycle(tmp_path: Path) -> None:
    programs: Programs = [[ALL_REDUCE, ALL_REDUCE] for _ in range(4)]
    programs[0][1:1] = [Send("0", 1), Recv("0", 1)]
    programs[1].insert(1, Send("0", 0))
    for blocking in (True, False):
        found = diagnose_job(SimulatedJob(programs, WORLD, blocking=blocking), tmp_path / str(blocking))

        assert roots(found) == [("p2p_wait_cycle", "default_pg", 1, [], [0, 1])]
        assert [consequence.because_of for consequence in found.consequences] == [0]


def test_a_rank_that_left_out_a_collective_and_went_on_is_named_by_what_it_used_to_do(tmp_path: Path) -> None:
    programs, groups = training(4, 3)
    del programs[2][7]

    found = diagnose_job(SimulatedJob(programs, groups), tmp_path)

    assert roots(found) == [("missing_rank", "default_pg", 2, [2], [0, 1, 3])]


@pytest.mark.parametrize("stages", [4, 8])
def test_one_stuck_gpu_in_a_pipeline_is_one_finding(stages: int, tmp_path: Path) -> None:
    programs, groups = pipeline(stages, 2)
    culprit = stages // 2
    programs[culprit].insert(3, GpuStall())

    found = diagnose_job(SimulatedJob(programs, groups, timing=False), tmp_path)

    assert [(row[0], row[3]) for row in roots(found)] == [("all_joined_not_completed", [])]
    assert culprit in found.findings[0].waiting_ranks
    assert {consequence.because_of for consequence in found.consequences} == {0}


def test_the_many_that_have_not_made_a_usual_call_may_wait_unseen_and_the_few_in_it_made_none_too_many(
    tmp_path: Path,
) -> None:
    programs: Programs = [[Collective("0")] * 3 for _ in range(8)]
    for rank in range(2, 8):
        programs[rank] = [*programs[rank][:2], CpuStall()]

    found = diagnose_job(SimulatedJob(programs, {"0": ("default_pg", list(range(8)))}), tmp_path)

    assert roots(found) == [("not_recorded", "default_pg", 3, [], [0, 1])]
    assert found.verdict == "incomplete"


def test_a_finished_job_with_a_watchdog_that_notices_nothing_is_healthy(tmp_path: Path) -> None:
    programs, groups = training(4, 4)
    programs[0].insert(5, StaleWatchdog())

    found = diagnose_job(SimulatedJob(programs, groups), tmp_path, ring=9)

    assert (found.verdict, roots(found)) == ("ok", [])


def test_of_a_gloo_group_whose_members_are_unknown_nobody_is_said_to_be_complete(tmp_path: Path) -> None:
    programs, groups = training(4, 3, backend="gloo")
    programs[0].insert(2, CpuStall())  # before its first call on the group of ranks 0 and 2

    found = diagnose_job(SimulatedJob(programs, groups, backend="gloo"), tmp_path)

    assert roots(found) == [("missing_rank", "default_pg", 1, [0], [1, 3])]
    assert [(one.pg_ranks, one.because_of) for one in found.consequences] == [([2], 0)]


def test_a_mismatch_does_not_hide_a_rank_that_never_came(tmp_path: Path) -> None:
    programs: Programs = [[Collective("0")] * 2 for _ in range(3)]
    programs[1][1] = CpuStall()
    programs[2][1] = Collective("0", "broadcast")

    found = diagnose_job(SimulatedJob(programs, {"0": ("default_pg", [0, 1, 2])}), tmp_path)

    assert [(row[0], row[3]) for row in roots(found)] == [("type_mismatch", []), ("missing_rank", [1])]


def test_a_ring_that_lost_the_stuck_call_says_so(tmp_path: Path) -> None:
    found = diagnose_job(SimulatedJob(*training(4, 6), timing=False, broken={("0", 2)}), tmp_path, ring=8)

    assert found.verdict == "error"
    assert found.suspect_ranks == []
    assert found.notes == [
        "rank 0-3 has more calls open than its ring holds: the one that it is stuck in fell out, "
        "and it is accused of nothing. Raise TORCH_FR_BUFFER_SIZE"
    ]


@pytest.mark.parametrize("active_only", [False, True])
def test_a_rank_that_notices_no_ends_is_a_root_beside_the_rank_that_stopped(active_only: bool, tmp_path: Path) -> None:
    programs, groups = training(8, 6)
    programs[5].insert(9, StaleWatchdog())
    programs[2].insert(18, CpuStall())

    found = diagnose_job(SimulatedJob(programs, groups, timing=False), tmp_path, active_only=active_only)

    assert [(row[0], row[3]) for row in roots(found)] == [("not_completed", [5]), ("missing_rank", [2])]
    assert "notices no end of" in found.findings[0].text


def test_transfers_from_before_a_collective_that_is_over_answer_nothing_on_a_rank_that_notices_no_ends(
    tmp_path: Path,
) -> None:
    programs, groups = pipeline(4, 4)
    programs[2].insert(9, StaleWatchdog())
    programs[2].insert(-3, CpuStall())

    found = diagnose_job(SimulatedJob(programs, groups, timing=False), tmp_path, active_only=True)

    assert found.suspect_ranks == [2]


def test_dumps_without_a_status_show_by_their_gaps_that_completed_calls_were_left_out(tmp_path: Path) -> None:
    programs, groups = training(4, 6)
    programs[1].insert(13, CpuStall())
    job = SimulatedJob(programs, groups, timing=False, concurrent_groups=True)
    job.run()
    for rank in range(4):
        dump = job.dump(rank, active_only=True) | {"pg_status": {}}
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(dump, 2))

    found = diagnosis_of(tmp_path)

    assert [(row[0], row[3]) for row in roots(found)] == [("missing_rank", [1])]


@pytest.mark.parametrize(("odd", "call"), [(2, Recv("0", 0)), (1, Send("0", 3))], ids=["receives", "sends"])
def test_in_a_cycle_of_transfers_the_rank_that_did_what_it_never_did_is_the_odd_one(
    odd: int, call: Recv | Send, tmp_path: Path
) -> None:
    programs: Programs = []
    for rank in range(4):
        step: list[Call] = [Recv("0", rank - 1)] if rank > 0 else []
        step += [Send("0", rank + 1)] if rank < 3 else []
        programs.append(step * 6)
    programs[odd][6 if isinstance(call, Recv) else 7] = call

    found = diagnose_job(SimulatedJob(programs, WORLD, blocking=True), tmp_path)

    assert [(row[0], row[3]) for row in roots(found)] == [("p2p_wait_cycle", [odd])]


def test_a_stage_that_receives_before_it_sends_as_always_did_not_leave_the_send_out(tmp_path: Path) -> None:
    programs, groups = pipeline(4, 2)
    programs[2][5:7] = reversed(programs[2][5:7])  # it reduces before it sends to stage 1, which then sends to stage 0

    found = diagnose_job(SimulatedJob(programs, groups), tmp_path)

    assert [(row[0], row[3]) for row in roots(found)] == [("p2p_unmatched", [])]


@pytest.mark.parametrize("first", ["a", "b"])
def test_of_what_nobody_explains_the_earliest_is_the_root_however_few_wait_in_it(first: str, tmp_path: Path) -> None:
    groups: Groups = {
        "0": ("default_pg", [0, 1, 2, 3, 4]),
        "1": ("a", [0, 1]),
        "2": ("b", [2, 3, 4]),
    }
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


def test_two_ranks_that_stopped_independently_are_both_named_the_earlier_first(tmp_path: Path) -> None:
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
def test_ranks_that_wait_for_a_group_which_one_does_not_make_hang(reason: str, tmp_path: Path) -> None:
    job = SimulatedJob([[Collective("0")]] * 4, WORLD, backend="gloo")
    moments = {rank: Moment(reason=reason, after=9, stacks=IDLES if rank == 2 else MEETS) for rank in range(4)}
    write_moments(job, tmp_path, moments)

    assert roots(diagnosis_of(tmp_path)) == [("missing_rank", "default_pg", None, [2], [0, 1, 3])]


def test_a_job_that_is_cancelled_while_it_enters_a_call_is_healthy(tmp_path: Path) -> None:
    job = SimulatedJob([[Collective("0")]] * 4, WORLD, backend="gloo")
    write_moments(job, tmp_path, dict.fromkeys(range(4), Moment(reason="SIGTERM", after=0.2, stacks=MEETS)))

    assert diagnosis_of(tmp_path).verdict == "ok"


def test_ranks_that_make_groups_in_another_order_than_the_rest_are_not_accused_of_missing_its_calls(
    tmp_path: Path,
) -> None:
    programs: Programs = [[Collective("0")], [Collective("0")] * 2, [Collective("0")] * 2, [Collective("0")]]
    moments = {rank: Moment(after=9, stacks=MEETS if rank in (0, 3) else ()) for rank in range(4)}
    write_moments(SimulatedJob(programs, WORLD, backend="gloo"), tmp_path, moments)

    assert roots(diagnosis_of(tmp_path)) == [("opposite_order", "default_pg", None, [], [0, 1, 2, 3])]


def test_a_rank_that_was_dumped_in_a_call_that_is_over_by_now_does_not_wait(tmp_path: Path) -> None:
    slow = Moment(after=2.5, stacks=MEETS, source="train.py:7")
    moments = {0: slow, 1: slow, 2: Moment(reason="exit"), 3: Moment(reason="exit")}
    write_moments(SimulatedJob([[ALL_REDUCE]] * 4, WORLD, backend="gloo"), tmp_path, moments)

    assert diagnosis_of(tmp_path).verdict == "ok"


def test_a_rank_that_makes_a_group_alone_while_all_others_are_in_a_call_is_the_culprit(tmp_path: Path) -> None:
    programs: Programs = [[ALL_REDUCE] * steps for steps in (1, 2, 2, 2)]
    moments = {rank: Moment(after=9, stacks=MEETS if rank == 0 else ()) for rank in range(4)}
    write_moments(SimulatedJob(programs, WORLD, backend="gloo"), tmp_path, moments)

    assert roots(diagnosis_of(tmp_path)) == [("missing_rank", "default_pg", 2, [0], [1, 2, 3])]
