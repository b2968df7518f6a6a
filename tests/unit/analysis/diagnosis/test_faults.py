"""Faults that are put into simulated jobs are found, in the right rank, group and call, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from crossrank.tools.analysis.diagnosis.findings import LACKS_EVIDENCE, Diagnosis
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


REDUCE, BROADCAST, BARRIER = Collective("0"), Collective("0", "broadcast"), Collective("0", "barrier", (), ())
EXCHANGE = Collective("0", "all_to_all", ((16,),), ((16,),))
A, B, TP, DP = Collective("1"), Collective("2"), Collective("5", line=20), Collective("6", line=30)
TWO: Groups = {"0": ("default_pg", [0, 1]), "1": ("a", [0, 1]), "2": ("b", [0, 1])}
FOUR: Groups = {**WORLD, "1": ("a", [0, 1, 2, 3]), "2": ("b", [0, 1, 2, 3])}
PAIR: Groups = {**WORLD, "5": ("tp", [2, 3]), "6": ("dp", [0, 1, 3])}
SENDS_LATE = pipeline(4, 2)[0][2][5]
BOTH_WAYS = pipeline(4, 3)[0][1][2]
assert isinstance(BOTH_WAYS, Batch)
WITHOUT_A_RECEIVE = Batch((*BOTH_WAYS.ops[:2], BOTH_WAYS.ops[3]))
MESH: Groups = {
    **WORLD, "1": ("tp", [0, 1]), "2": ("tp", [2, 3]), "3": ("dp", [0, 2]), "4": ("dp", [1, 3])
}  # fmt: skip
IN_MESH: tuple[Programs, Groups] = (
    [
        [*(Collective(one, inputs=((4,),)) for _ in range(4) for one in (tp, dp)), REDUCE]
        for tp, dp in ("13", "14", "23", "24")
    ],
    MESH,
)
"""Both pairs of a mesh make the same calls, in groups of their own."""
OF_PAIR: Call = Collective("1", inputs=((4,),))
OF_A_PAIR: tuple[Programs, Groups] = (
    [[REDUCE, OF_PAIR, REDUCE, REDUCE, OF_PAIR, REDUCE]] * 2 + [[REDUCE] * 4] * 2,
    {**WORLD, "1": ("pair", [0, 1])},
)
"""Two ranks have a group of their own, on which the others make no calls."""
BARRIERS: tuple[Programs, Groups] = [[B, A, A if rank == 3 else B] for rank in range(4)], FOUR
ACTIVE = {"active_only": True}


Left = Callable[[Path], Diagnosis]
"""Runs a job, dumps it into a folder, and diagnoses that."""


def job(
    made: tuple[Sequence[Sequence[Call]], Groups],
    *faults: tuple[int, int, Call | None],
    dumped: Mapping[str, Any] = MappingProxyType({}),
    **how: Any,
) -> Left:
    """A job into whose programs calls are put, (rank, place, call), or from which they are taken: None."""
    programs, groups = [list(program) for program in made[0]], made[1]
    for rank, at, call in faults:
        programs[rank][at : at + 1] = [] if call is None else [call, *programs[rank][at:][:1]]
    return partial(diagnose_job, SimulatedJob(programs, groups, **how), **dumped)


def in_world(programs: Sequence[Sequence[Call]], *faults: tuple[int, int, Call | None], **how: Any) -> Left:
    return job((programs, {"0": ("default_pg", list(range(len(programs))))}), *faults, **how)


def sends_of_which_one_is_not_received(**how: Any) -> Left:
    sends = ((0, at, Send("0", 1)) for at in (0, 2, 4))
    return in_world(step(REDUCE), *sends, *((1, at, Recv("0", 0)) for at in (0, 2)), **how)


def each_waits_for_the_others_call_of_its_kind(**how: Any) -> Left:
    calls = (0, 1, Recv("0", 1)), (0, 1, Send("0", 1)), (1, 1, Send("0", 0))
    return in_world(step(REDUCE, steps=2), *calls, **how)


def with_odd(odd: Call, *ranks: int) -> Left:
    return in_world(step(REDUCE), *((rank, 1, call) for rank in ranks for call in (None, odd)))


def watchdog_and_stop(made: tuple[Programs, Groups], stale: tuple[int, int], stop: tuple[int, int], **how: Any) -> Left:
    return job(made, (*stale, StaleWatchdog()), (*stop, CpuStall()), timing=False, **how)


def forward(odd: int, at: int, call: Call) -> Left:
    ends: tuple[list[Call], list[Call]] = [Send("0", 1)], [Recv("0", 2)]
    chain: Programs = [ends[0], [Recv("0", 0), Send("0", 2)], [Recv("0", 1), Send("0", 3)], ends[1]]
    return in_world([calls * 6 for calls in chain], (odd, at, None), (odd, at, call), blocking=True)


def two_axes(steps: int, *, swapped: tuple[int, ...]) -> tuple[Programs, Groups]:
    """A mesh of two by two; some ranks use its axes in the other order in the last step."""
    groups: Groups = {"1": ("tp", [0, 1]), "2": ("tp", [2, 3]), "3": ("dp", [0, 2]), "4": ("dp", [1, 3])}
    programs: Programs = []
    for rank in range(4):
        tp, dp = Collective(str(1 + rank // 2), line=10), Collective(str(3 + rank % 2), line=20)
        programs.append([*[tp, dp] * (steps - 1), *((dp, tp) if rank in swapped else (tp, dp))])
    return programs, groups


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        # a call that all joined ends nowhere
        (job(training(4, 3), broken={("0", 2)}), "all_joined_not_completed default_pg 2 [] <- [0, 1, 2, 3]"),
        # without timing, too
        (
            job(training(4, 3), broken={("0", 2)}, timing=False),
            "all_joined_not_completed default_pg 2 [] <- [0, 1, 2, 3]",
        ),
        # a GPU is stuck where starts are reported
        (job(training(8, 3), (5, 5, GpuStall())), "not_started mesh_tp 4 [] <- [4, 5]"),
        # one stuck GPU in a pipeline of 4
        (job(pipeline(4, 2), (2, 3, GpuStall()), timing=False), "all_joined_not_completed mesh_pp 4 [] <- [1, 2, 3]"),
        # one stuck GPU in a pipeline of 8
        (job(pipeline(8, 2), (4, 3, GpuStall()), timing=False), "all_joined_not_completed mesh_pp 4 [] <- [3, 4, 5]"),
        # a rank without a dump is named once
        (
            job(training(8, 3), (6, 6, CpuStall()), dumped={"ranks": [0, 1, 2, 3, 4, 5, 7]}),
            "dump_missing mesh_dp 2 [6] <- [0, 2, 4]",
        ),
        # a send to a rank that does nothing more
        (in_world(step(REDUCE), (2, 6, Send("0", 3))), "p2p_unmatched default_pg 1 [3] <- [2]"),
        # all receive first
        (
            in_world(
                [[REDUCE, Recv("0", (rank - 1) % 4), Send("0", (rank + 1) % 4)] for rank in range(4)], blocking=True
            ),
            "p2p_wait_cycle default_pg 1 [] <- [0, 1, 2, 3]",
        ),
        # two stopped in nested groups
        (
            job(
                training(8, 6),
                *((rank, at, call) for rank in (3, 6) for at, call in ((9, StaleWatchdog()), (14, CpuStall()))),
                timing=False,
                dumped=ACTIVE,
            ),
            "missing_rank mesh_tp 8 [6] <- [7]; missing_rank mesh_tp 8 [3] <- [2]",
        ),
        # a rank without an active call does not wait
        (job(training(4, 6), (1, 13, CpuStall()), timing=False, dumped=ACTIVE), "missing_rank mesh_tp 8 [1] <- [0]"),
        (job(pipeline(2, 3), dumped=ACTIVE), ""),  # batches are over although their members never say so
        # a stage that stopped, in active dumps
        (job(pipeline(4, 3), (2, 18, CpuStall()), dumped=ACTIVE), "p2p_unmatched mesh_pp 17 [2] <- [1]"),
        # a group without a status was never used
        (
            job(training(8, 1), (3, 3, CpuStall()), dumped=ACTIVE),
            "missing_rank default_pg 1 [3] <- [0, 1, 2, 4, 5, 6, 7]",
        ),
        # numbers of sends in the status are not those of collectives
        (
            in_world(
                step(REDUCE, steps=2), *((0, 1, Send("0", 1)),) * 2, *((1, 1, Recv("0", 0)),) * 2, (3, 1, CpuStall())
            ),
            "missing_rank default_pg 2 [3] <- [0, 1, 2]",
        ),
        # each waits for the other's call of its kind
        (each_waits_for_the_others_call_of_its_kind(), "p2p_wait_cycle default_pg 1 [] <- [0, 1]"),
        # each waits for the other's call of its kind, and blocks
        (each_waits_for_the_others_call_of_its_kind(blocking=True), "p2p_wait_cycle default_pg 1 [] <- [0, 1]"),
        # a finished job with a watchdog that notices nothing
        (job(training(4, 4), (0, 5, StaleWatchdog()), dumped={"ring": 9}), ""),
        # members of a gloo group are unknown
        (
            job(training(4, 3, backend="gloo"), (0, 2, CpuStall()), backend="gloo"),
            "missing_rank default_pg 1 [0] <- [1, 3]",
        ),
        # no ends are noticed beside a rank that stopped
        (
            watchdog_and_stop(training(8, 6), (5, 9), (2, 18)),
            "not_completed mesh_tp 3 [5] <- []; missing_rank mesh_dp 5 [2] <- [0, 4, 6]",
        ),
        # no ends are noticed, in active dumps
        (
            watchdog_and_stop(training(8, 6), (5, 9), (2, 18), dumped=ACTIVE),
            "not_completed mesh_tp 3 [5] <- []; missing_rank mesh_dp 5 [2] <- [0, 4, 6]",
        ),
        # what was sent before a collective that is over
        (
            watchdog_and_stop(pipeline(4, 4), (2, 9), (2, 26), dumped=ACTIVE),
            "not_completed default_pg 1 [2] <- []; p2p_wait_cycle mesh_pp 23 [] <- [1, 2]",
        ),
        (job(training(4, 3), (2, 7, None)), "missing_rank default_pg 2 [2] <- [0, 1, 3]"),  # a collective left out
        (job(IN_MESH, (1, 2, None)), "opposite_order tp 4 [1] <- [0, 2, 3]"),  # a call left out in one of two pairs
        (job(OF_A_PAIR, (1, 4, None)), "opposite_order pair 2 [] <- [0, 1, 2, 3]"),  # only one pair makes such calls
        (job(BARRIERS), "opposite_order b 2 [3] <- [0, 1, 2]"),  # another group's barrier
        (job(BARRIERS, backend="gloo"), "opposite_order b 2 [3] <- [0, 1, 2]"),  # another group's barrier on gloo
        (sends_of_which_one_is_not_received(), "p2p_unmatched default_pg 3 [1] <- [0]"),  # a receive left out
        # a receive left out by a rank that blocks
        (sends_of_which_one_is_not_received(blocking=True), "p2p_unmatched default_pg 3 [1] <- [0]"),
        # a batch lacks a receive
        (job(pipeline(4, 3), (1, 2, None), (1, 2, WITHOUT_A_RECEIVE)), "p2p_unmatched mesh_pp 6 [] <- [2]"),
        # the many may wait unseen for the few
        (
            in_world(step(REDUCE, world=8), *((rank, 2, CpuStall()) for rank in range(2, 8))),
            "not_recorded default_pg 3 [] <- [0, 1]",
        ),
        # a rank that never came beside a mismatch
        (
            in_world(step(REDUCE, world=3, steps=2), (1, 1, CpuStall()), (2, 1, None), (2, 1, BROADCAST)),
            "type_mismatch default_pg 2 [] <- [0, 2]; missing_rank default_pg 2 [1] <- [0, 2]",
        ),
        # a cycle by a receive from elsewhere
        (forward(2, 6, Recv("0", 0)), "p2p_wait_cycle default_pg 5 [2] <- [0, 1]"),
        (forward(1, 7, Send("0", 3)), "p2p_wait_cycle default_pg 8 [1] <- [2, 3]"),  # a cycle by a send to elsewhere
        # the other order of four
        (
            job(([[REDUCE, B, A] if rank == 2 else [REDUCE, A, B] for rank in range(4)], FOUR)),
            "opposite_order a 1 [2] <- [0, 1, 3]",
        ),
        (job(([[REDUCE, A, B], [REDUCE, B, A]], TWO)), "opposite_order a 1 [] <- [0, 1]"),  # opposite order
        # opposite order, blocking
        (job(([[REDUCE, A, B], [REDUCE, B, A]], TWO), blocking=True), "opposite_order a 1 [] <- [0, 1]"),
        # two of four ranks change the order of their two axes
        (job(two_axes(6, swapped=(1, 2))), "opposite_order tp 6 [1, 2] <- [0, 3]"),
        # an all_to_all does not add up
        (
            in_world(step(EXCHANGE), (2, 1, None), (2, 1, replace(EXCHANGE, inputs=((17,),)))),
            "size_mismatch default_pg 2 [2] <- [0, 1, 3]",
        ),
        (with_odd(BROADCAST, 1, 2), "type_mismatch default_pg 2 [] <- [0, 1, 2, 3]"),  # two other operations of four
        # two other types of four
        (with_odd(Collective("0", dtype="Half"), 1, 2), "dtype_mismatch default_pg 2 [] <- [0, 1, 2, 3]"),
        # two other sizes of four
        (with_odd(Collective("0", inputs=((7,),)), 1, 2), "size_mismatch default_pg 2 [] <- [0, 1, 2, 3]"),
        # one too many in the middle
        (in_world(step(REDUCE, BROADCAST), (3, 2, BARRIER)), "extra_collective default_pg 3 [3] <- [0, 1, 2]"),
        # one too many at the end: the others may still make it, as far as torch's own dumps show
        (in_world(step(REDUCE, BROADCAST), (1, 6, BARRIER)), "not_recorded default_pg 7 [] <- [1]"),
        # one left out of two kinds
        (in_world(step(REDUCE, BROADCAST), (0, 2, None)), "missing_rank default_pg 3 [0] <- [1, 2, 3]"),
        # a rank in between says which of two comes first
        (
            job(([[REDUCE] * 2, [REDUCE] * 2, [REDUCE, TP, REDUCE], [REDUCE, CpuStall()]], PAIR), blocking=True),
            "missing_rank tp 1 [3] <- [2]",
        ),
        # the program says which of two comes first
        (
            job(
                (
                    [[REDUCE] * 4, [REDUCE] * 4, [REDUCE, *[TP, REDUCE] * 3], [REDUCE, *[TP, REDUCE] * 2, CpuStall()]],
                    PAIR,
                ),
                blocking=True,
            ),
            "missing_rank tp 3 [3] <- [2]",
        ),
        # the program alone says which of two comes first
        (
            job(([[DP] * 3, [DP] * 3, [TP] * 3, [TP, DP, TP, DP, CpuStall()]], PAIR), blocking=True),
            "missing_rank tp 3 [3] <- [2]",
        ),
        # a stage that receives before it sends as always left no send out
        (job(pipeline(4, 2), (2, 5, None), (2, 6, SENDS_LATE)), "p2p_unmatched mesh_pp 4 [] <- [0, 1]"),
    ],
)
def test_a_fault_gives_the_expected_findings(left: Left, expected: str, tmp_path: Path) -> None:
    """(kind, group, number, culprits <- who waits) of each root."""
    found = left(tmp_path)
    said = [f"{kind} {group} {seq} {who} <- {waiting}" for kind, group, seq, who, waiting in roots(found)]
    assert "; ".join(said) == expected
    lacks_evidence = all(one.kind in LACKS_EVIDENCE for one in found.findings)
    assert found.verdict == ("ok" if not expected else "incomplete" if lacks_evidence else "error")
    assert {one.because_of for one in found.consequences} <= set(range(len(said)))


@pytest.mark.parametrize(("how", "dumped"), WAYS)
def test_a_stopped_rank_is_missing_and_other_waits_for_it_are_consequences(
    how: dict[str, Any], dumped: dict[str, Any], tmp_path: Path
) -> None:
    found = job(training(world=4, steps=3), (2, 4, CpuStall()), dumped=dumped, **how)(tmp_path)
    assert (found.verdict, found.suspect_ranks) == ("error", [2])
    assert [one.kind for one in found.findings] == ["missing_rank"]
    assert all(consequence.because_of == 0 for consequence in found.consequences)


@pytest.mark.parametrize(("how", "dumped"), WAYS)
@pytest.mark.parametrize("make", [training, pipeline])
def test_a_job_that_ended_well_is_healthy(
    make: Any, how: dict[str, Any], dumped: dict[str, Any], tmp_path: Path
) -> None:
    found = diagnose_job(SimulatedJob(*make(4, 6), **how), tmp_path, **dumped)
    assert (found.verdict, roots(found), found.consequences, found.advisory) == ("ok", [], [], [])


@pytest.mark.parametrize("events", range(40, 400, 24))
def test_a_call_finished_on_some_ranks_is_in_progress_and_not_a_fault(events: int, tmp_path: Path) -> None:
    job = SimulatedJob(*training(4, 8), blocking=True)
    job.run(most_events=events)
    job.write(tmp_path)
    found = diagnosis_of(tmp_path)
    # Without the moment of the dump nobody can tell a rank that is late from one that hangs; but nobody else is named.
    assert {finding.kind for finding in found.findings} <= {"missing_rank", "all_joined_not_completed", "not_started"}


@pytest.mark.parametrize(("odd", "others"), [(0, "1-3"), (1, "0,2-3"), (3, "0-2")])
def test_the_culprit_of_a_mismatch_differs_from_the_majority(odd: int, others: str, tmp_path: Path) -> None:
    programs = step(Collective("0"), Collective("0", inputs=((100,),)))
    programs[odd][3] = Collective("0", inputs=((99,),))
    found = diagnose_job(SimulatedJob(programs, WORLD), tmp_path)
    assert roots(found) == [("size_mismatch", "default_pg", 4, [odd], [rank for rank in range(4) if rank != odd])]
    assert found.findings[0].text == (
        f"rank {others}: all_reduce of 100 elements float32; rank {odd}: all_reduce of 99 elements float32"
    )


def test_one_mistake_in_two_groups_is_one_root(tmp_path: Path) -> None:
    programs = step(Collective("0"), Collective("1"))
    odd = (Collective("0", dtype="Half"), Collective("1", dtype="Half"))
    programs[2] = step(*odd)[2]
    found = diagnose_job(SimulatedJob(programs, WORLD | {"1": ("mesh", [0, 1, 2, 3])}), tmp_path)
    assert roots(found) == [("dtype_mismatch", "default_pg", 1, [2], [0, 1, 3])]
    assert [(*in_short(one), one.because_of) for one in found.consequences] == [
        ("dtype_mismatch", "mesh", 1, [2], [], 0)
    ]


def test_no_rank_is_accused_if_the_missing_call_is_ambiguous(tmp_path: Path) -> None:
    programs = step(Collective("0"), steps=1)
    programs[0] += [Send("0", 1), Collective("0")]
    for rank in (1, 2, 3):
        programs[rank].append(Collective("0"))
    found = diagnose_job(SimulatedJob(programs, WORLD, blocking=True), tmp_path)
    assert roots(found) == [("p2p_unmatched", "default_pg", 1, [], [0])]
    assert found.findings[0].text == (
        "rank 0 waits for 1 in default_pg [0] send #1; rank 1 waits for 0 in default_pg [0] all_reduce #2"
    )


def test_a_transfer_size_mismatch_accuses_no_rank(tmp_path: Path) -> None:
    programs, groups = pipeline(4, 3)
    batch = programs[2][1]
    assert isinstance(batch, Batch)
    programs[2][1] = Batch(tuple(Send("1", op.peer, (3, 3), op.dtype) for op in batch.ops))
    found = diagnose_job(SimulatedJob(programs, groups), tmp_path)
    assert [(row[0], row[1], row[3]) for row in roots(found)] == [("p2p_size_mismatch", "mesh_pp", [])]
    assert found.findings[0].text == "rank 2 sends [3, 3] bfloat16, rank 3 receives [4, 512, 1024] bfloat16"
    assert [(place.rank, place.role) for place in found.findings[0].places] == [(2, "sender"), (3, "receiver")]


def test_uneven_all_gathers_and_all_to_alls_that_add_up_are_healthy(tmp_path: Path) -> None:
    parts = [Collective("0", "_broadcast_oop", ((8 * (rank + 1),),)) for rank in range(4)]
    gather = Collective("0", "ALLGATHER_coalesced", (), (), members=tuple(parts))
    splits = [[1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 1, 1], [9, 9, 9, 9]]
    programs: Programs = []
    for rank in range(4):
        sides = ((sum(splits[rank]),),), ((sum(row[rank] for row in splits),),)
        programs.append([gather, Collective("0", "all_to_all", *sides), Collective("0")] * 3)
    found = diagnose_job(SimulatedJob(programs, WORLD), tmp_path)
    assert (found.verdict, roots(found)) == ("ok", [])


def test_groups_with_one_name_and_other_members_differ(tmp_path: Path) -> None:
    programs = step(Collective("split"), Collective("0"))
    programs[3].insert(2, Collective("split", "broadcast"))
    for half in ([0, 1], [2, 3]):
        groups: Groups = WORLD | {"split": ("half", half)}
        job = SimulatedJob([program if rank in half else [] for rank, program in enumerate(programs)], groups)
        job.run()
        job.write(tmp_path, ranks=half)

    found = diagnosis_of(tmp_path)

    kinds = {(finding.pg[0], tuple(finding.pg_ranks)) for finding in found.findings + found.consequences}
    assert ("split", (2, 3)) in kinds
    assert ("split", (0, 1)) not in kinds


def test_cycles_come_before_cycles_that_lead_to_them() -> None:
    edges = {0: {1}, 1: {0, 2}, 2: {3}, 3: {2}, 4: {0}, 5: {9}}
    assert strongly_connected_components(edges) == [[2, 3], [0, 1]]
