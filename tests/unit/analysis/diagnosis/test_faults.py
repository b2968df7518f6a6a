"""Faults that are put into simulated jobs are found, in the right rank, group and call, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crossrank.tools.analysis.diagnosis.wait_for_graph import strongly_connected_components
from tests.unit.analysis.diagnosis.simulated_jobs import (
    Batch,
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
from tests.unit.analysis.diagnosis.verdicts import diagnose_job, diagnosis_of, in_short, roots

WORLD: Groups = {"0": ("default_pg", [0, 1, 2, 3])}
WAYS = [
    pytest.param({}, {}, id="nccl"),
    pytest.param({"timing": False}, {}, id="without-timing"),
    pytest.param({"blocking": True, "seed": 3}, {}, id="blocking"),
    pytest.param({}, {"form": "json"}, id="json"),
    pytest.param({"timing": False}, {"ring": 5}, id="wrapped"),
]


def step(*calls: Call, world: int = 4, steps: int = 3) -> Programs:
    return [[*calls] * steps for _ in range(world)]


@pytest.mark.parametrize(("how", "dumped"), WAYS)
def test_a_rank_that_stopped_is_missing_and_what_waits_for_it_elsewhere_is_a_consequence(
    how: dict[str, Any], dumped: dict[str, Any], tmp_path: Path
) -> None:
    programs, groups = training(world=4, steps=3)
    programs[2].insert(4, CpuStall())

    found = diagnose_job(SimulatedJob(programs, groups, **how), tmp_path, **dumped)

    assert (found.verdict, found.suspect_ranks) == ("error", [2])
    assert len(found.findings) == 1
    assert found.findings[0].kind == "missing_rank"
    assert all(consequence.because_of == 0 for consequence in found.consequences)


@pytest.mark.parametrize(("how", "dumped"), WAYS)
@pytest.mark.parametrize("make", [training, pipeline])
def test_a_job_that_ended_well_is_healthy(
    make: Any, how: dict[str, Any], dumped: dict[str, Any], tmp_path: Path
) -> None:
    found = diagnose_job(SimulatedJob(*make(4, 6), **how), tmp_path, **dumped)

    assert (found.verdict, roots(found), found.consequences, found.advisory) == ("ok", [], [], [])


@pytest.mark.parametrize("events", range(40, 400, 24))
def test_a_call_that_some_ranks_have_seen_the_end_of_is_under_way_and_no_fault(events: int, tmp_path: Path) -> None:
    job = SimulatedJob(*training(4, 8), blocking=True)
    job.run(most_events=events)
    job.write(tmp_path)

    found = diagnosis_of(tmp_path)

    # Without the moment of the dump nobody can tell a rank that is late from one that hangs; but nobody else is named.
    assert {finding.kind for finding in found.findings} <= {"missing_rank", "all_joined_not_completed", "not_started"}


def test_the_odd_one_in_a_mismatch_is_the_one_unlike_the_majority(tmp_path: Path) -> None:
    for odd in (0, 1, 3):
        programs = step(Collective("0"), Collective("0", inputs=((100,),)))
        programs[odd][3] = Collective("0", inputs=((99,),))

        found = diagnose_job(SimulatedJob(programs, WORLD), tmp_path / str(odd))

        others = [rank for rank in range(4) if rank != odd]
        assert roots(found) == [("size_mismatch", "default_pg", 4, [odd], others)]
        assert found.findings[0].text == (
            f"rank {','.join(_ranges(others))}: all_reduce of 100 elements float32; "
            f"rank {odd}: all_reduce of 99 elements float32"
        )


def test_one_mistake_of_one_rank_in_two_groups_is_one_root(tmp_path: Path) -> None:
    programs = step(Collective("0"), Collective("1"))
    odd = (Collective("0", dtype="Half"), Collective("1", dtype="Half"))
    programs[2] = step(*odd)[2]

    found = diagnose_job(SimulatedJob(programs, WORLD | {"1": ("mesh", [0, 1, 2, 3])}), tmp_path)

    assert roots(found) == [("dtype_mismatch", "default_pg", 1, [2], [0, 1, 3])]
    assert [(*in_short(one), one.because_of) for one in found.consequences] == [
        ("dtype_mismatch", "mesh", 1, [2], [], 0)
    ]


def _ranges(ranks: list[int]) -> list[str]:
    from crossrank.text import rank_ranges

    return rank_ranges(ranks).split(",")


@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        (Collective("0", "broadcast"), "type_mismatch"),
        (Collective("0", dtype="Half"), "dtype_mismatch"),
        (Collective("0", inputs=((7,),)), "size_mismatch"),
    ],
)
def test_without_a_majority_nobody_is_accused(odd: Collective, kind: str, tmp_path: Path) -> None:
    programs = step(Collective("0"))
    programs[1][1] = programs[2][1] = odd

    found = diagnose_job(SimulatedJob(programs, WORLD), tmp_path)

    assert roots(found) == [(kind, "default_pg", 2, [], [0, 1, 2, 3])]
    assert found.suspect_ranks == []


@pytest.mark.parametrize(
    ("rank", "at", "call", "root"),
    [
        (3, 2, Collective("0", "barrier", (), ()), ("extra_collective", "default_pg", 3, [3], [0, 1, 2])),
        (1, 6, Collective("0", "barrier", (), ()), ("extra_collective", "default_pg", 7, [1], [1])),
        (0, 2, None, ("missing_rank", "default_pg", 3, [0], [1, 2, 3])),
    ],
    ids=["in the middle", "at the end", "left out"],
)
def test_a_collective_too_many_or_left_out_is_the_fault_of_the_rank_that_made_it_or_not(
    rank: int, at: int, call: Collective | None, root: Any, tmp_path: Path
) -> None:
    programs = step(Collective("0"), Collective("0", "broadcast"))
    programs[rank][at : at + (call is None)] = [] if call is None else [call]

    assert roots(diagnose_job(SimulatedJob(programs, WORLD), tmp_path))[0] == root


def test_two_groups_entered_in_opposite_order_are_a_cycle(tmp_path: Path) -> None:
    groups: Groups = {"0": ("default_pg", [0, 1]), "1": ("a", [0, 1]), "2": ("b", [0, 1])}
    for blocking in (False, True):
        programs: Programs = [[Collective("0"), Collective("1"), Collective("2")] for _ in range(2)]
        programs[1][1:] = reversed(programs[1][1:])

        found = diagnose_job(SimulatedJob(programs, groups, blocking=blocking), tmp_path / str(blocking))

        assert [row[0] for row in roots(found)] == ["opposite_order"]
        assert (found.findings[0].culprit_ranks, found.findings[0].waiting_ranks) == ([], [0, 1])
        assert found.findings[0].text == (
            "rank 0 waits for 1 in a [1] all_reduce #1; rank 1 waits for 0 in b [2] all_reduce #1"
        )


def test_of_four_ranks_the_one_with_the_other_order_is_the_odd_one(tmp_path: Path) -> None:
    groups: Groups = {**WORLD, "1": ("a", [0, 1, 2, 3]), "2": ("b", [0, 1, 2, 3])}
    programs: Programs = [[Collective("0"), Collective("1"), Collective("2")] for _ in range(4)]
    programs[2][1:] = reversed(programs[2][1:])

    found = diagnose_job(SimulatedJob(programs, groups), tmp_path)

    assert [(row[0], row[3]) for row in roots(found)] == [("opposite_order", [2])]


def test_a_call_that_all_joined_and_that_ends_nowhere_accuses_nobody(tmp_path: Path) -> None:
    for timing in (True, False):
        programs, groups = training(4, 3)
        job = SimulatedJob(programs, groups, timing=timing, broken={("0", 2)})

        found = diagnose_job(job, tmp_path / str(timing))

        assert roots(found) == [("all_joined_not_completed", "default_pg", 2, [], [0, 1, 2, 3])]
        assert found.findings[0].op == "all_reduce"


def test_a_gpu_that_is_stuck_shows_where_starts_are_reported(tmp_path: Path) -> None:
    programs, groups = training(8, 3)
    programs[5].insert(5, GpuStall())

    found = diagnose_job(SimulatedJob(programs, groups), tmp_path)

    assert [(row[0], row[1], row[3]) for row in roots(found)] == [("not_started", "mesh_tp", [])]
    assert "rank 5" in found.findings[0].text
    assert set(found.findings[0].pg_ranks) == {4, 5}


def test_a_plain_receive_that_is_missing_names_that_rank_alone(tmp_path: Path) -> None:
    for blocking in (False, True):
        programs = step(Collective("0"))
        for place in (0, 2, 4):
            programs[0].insert(place, Send("0", 1))
            programs[1].insert(place, Recv("0", 0))
        del programs[1][4]

        found = diagnose_job(SimulatedJob(programs, WORLD, blocking=blocking), tmp_path / str(blocking))

        assert [(row[0], row[3], row[4]) for row in roots(found)] == [("p2p_unmatched", [1], [0])]
        assert found.findings[0].op == "send"


def test_where_a_receive_or_a_collective_may_have_been_left_out_nobody_is_accused(tmp_path: Path) -> None:
    programs = step(Collective("0"), steps=1)
    programs[0] += [Send("0", 1), Collective("0")]
    for rank in (1, 2, 3):
        programs[rank].append(Collective("0"))

    found = diagnose_job(SimulatedJob(programs, WORLD, blocking=True), tmp_path)

    assert roots(found) == [("p2p_unmatched", "default_pg", 1, [], [0])]
    assert found.findings[0].text == (
        "rank 0 waits for 1 in default_pg [0] send #1; rank 1 waits for 0 in default_pg [0] all_reduce #2"
    )


def test_a_send_to_a_rank_that_does_nothing_more_is_unmatched(tmp_path: Path) -> None:
    programs = step(Collective("0"))
    programs[2].append(Send("0", 3))

    found = diagnose_job(SimulatedJob(programs, WORLD), tmp_path)

    assert roots(found) == [("p2p_unmatched", "default_pg", 1, [3], [2])]


def test_a_send_and_a_receive_of_different_sizes_accuse_nobody(tmp_path: Path) -> None:
    programs, groups = pipeline(4, 3)
    batch = programs[2][1]
    assert isinstance(batch, Batch)
    programs[2][1] = Batch(tuple(Send("1", op.peer, (3, 3), op.dtype) for op in batch.ops))

    found = diagnose_job(SimulatedJob(programs, groups), tmp_path)

    assert [(row[0], row[1], row[3]) for row in roots(found)] == [("p2p_size_mismatch", "mesh_pp", [])]
    assert found.findings[0].text == "rank 2 sends [3, 3] bfloat16, rank 3 receives [4, 512, 1024] bfloat16"
    assert [(place.rank, place.role) for place in found.findings[0].places] == [(2, "sender"), (3, "receiver")]


def test_a_batch_that_lacks_one_receive_is_unmatched_there(tmp_path: Path) -> None:
    programs, groups = pipeline(4, 3)
    batch = programs[1][2]
    assert isinstance(batch, Batch)
    programs[1][2] = Batch(tuple(op for op in batch.ops if not (isinstance(op, Recv) and op.peer == 2)))

    found = diagnose_job(SimulatedJob(programs, groups), tmp_path)

    assert found.verdict == "error"
    assert found.findings[0].kind in ("p2p_unmatched", "p2p_wait_cycle")
    assert {1, 2} & {*found.findings[0].culprit_ranks, *found.findings[0].waiting_ranks}


def test_ranks_that_all_receive_first_wait_in_a_cycle(tmp_path: Path) -> None:
    programs: Programs = [[Collective("0"), Recv("0", (rank - 1) % 4), Send("0", (rank + 1) % 4)] for rank in range(4)]

    found = diagnose_job(SimulatedJob(programs, WORLD, blocking=True), tmp_path)

    assert [(row[0], row[3], row[4]) for row in roots(found)] == [("p2p_wait_cycle", [], [0, 1, 2, 3])]


def test_uneven_all_gathers_and_all_to_alls_that_add_up_are_healthy(tmp_path: Path) -> None:
    parts = [Collective("0", "_broadcast_oop", ((8 * (rank + 1),),)) for rank in range(4)]
    gather = Collective("0", "ALLGATHER_coalesced", (), (), members=tuple(parts))
    splits = [[1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 1, 1], [9, 9, 9, 9]]
    programs: Programs = [
        [
            gather,
            Collective("0", "all_to_all", ((sum(splits[rank]),),), ((sum(row[rank] for row in splits),),)),
            Collective("0"),
        ]
        * 3
        for rank in range(4)
    ]

    found = diagnose_job(SimulatedJob(programs, WORLD), tmp_path)

    assert (found.verdict, roots(found)) == ("ok", [])


def test_an_all_to_all_that_does_not_add_up_is_a_mismatch_of_nobody_in_particular(tmp_path: Path) -> None:
    programs = step(Collective("0", "all_to_all", ((16,),), ((16,),)))
    programs[2][1] = Collective("0", "all_to_all", ((17,),), ((16,),))

    found = diagnose_job(SimulatedJob(programs, WORLD), tmp_path)

    assert roots(found) == [("size_mismatch", "default_pg", 2, [], [0, 1, 2, 3])]
    assert found.findings[0].text == "the ranks send 65 elements in all and expect 64"


def test_a_rank_without_a_dump_is_named_once(tmp_path: Path) -> None:
    programs, groups = training(8, 3)
    programs[6].insert(6, CpuStall())

    found = diagnose_job(SimulatedJob(programs, groups), tmp_path, ranks=[0, 1, 2, 3, 4, 5, 7])

    assert found.verdict == "incomplete"
    assert [(row[0], row[3]) for row in roots(found)] == [("dump_missing", [6])]
    assert {consequence.because_of for consequence in found.consequences} <= {0}


def test_groups_of_one_name_with_other_members_are_different_groups(tmp_path: Path) -> None:
    groups_of_half: list[Groups] = [
        {"0": ("default_pg", [0, 1, 2, 3]), "split": ("half", half)} for half in ([0, 1], [2, 3])
    ]
    programs = step(Collective("split"), Collective("0"))
    programs[3].insert(2, Collective("split", "broadcast"))
    for half, groups in enumerate(groups_of_half):
        ranks = groups["split"][1]
        job = SimulatedJob([program if rank in ranks else [] for rank, program in enumerate(programs)], groups)
        job.run()
        job.write(tmp_path, ranks=ranks)
        assert half in (0, 1)

    found = diagnosis_of(tmp_path)

    kinds = {(finding.pg[0], tuple(finding.pg_ranks)) for finding in found.findings + found.consequences}
    assert ("split", (2, 3)) in kinds
    assert ("split", (0, 1)) not in kinds


def test_active_dumps_of_nested_groups_name_the_ranks_that_stopped(tmp_path: Path) -> None:
    programs, groups = training(8, 6)
    for culprit in (3, 6):
        programs[culprit].insert(9, StaleWatchdog())
        programs[culprit].insert(14, CpuStall())

    found = diagnose_job(SimulatedJob(programs, groups, timing=False), tmp_path, active_only=True)

    assert (found.verdict, found.suspect_ranks) == ("error", [3, 6])


def test_an_active_dump_without_entries_is_that_of_a_rank_that_waits_for_nobody(tmp_path: Path) -> None:
    programs, groups = training(4, 6)
    programs[1].insert(13, CpuStall())

    found = diagnose_job(SimulatedJob(programs, groups, timing=False), tmp_path, active_only=True)

    assert found.suspect_ranks == [1]
    assert found.findings[0].kind == "missing_rank"


def test_cycles_are_found_before_those_that_lead_to_them() -> None:
    edges = {0: {1}, 1: {0, 2}, 2: {3}, 3: {2}, 4: {0}, 5: {9}}

    assert strongly_connected_components(edges) == [[2, 3], [0, 1]]
