"""What torch's own analyzer compares is compared: both sides of a call, their types, and how far each rank came."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.unit.analysis.diagnosis.moments import Moment, write_moments
from tests.unit.analysis.diagnosis.simulated_jobs import Collective, Groups, Programs, SimulatedJob
from tests.unit.analysis.diagnosis.verdicts import diagnose_job, diagnosis_of, in_short, roots
from tests.unit.traces.flight_entries import flight_dump, flight_entry

Finding = tuple[str, str, int | None, list[int], list[int]]

SQUARE = [[4, 4]]


def entry(op: str = "all_reduce", seq: int = 1, **fields: Any) -> dict[str, Any]:
    """One call on a group of two as a dump of NCCL has it."""
    sizes: dict[str, Any] = {"input_sizes": SQUARE, "output_sizes": SQUARE}
    return flight_entry(seq - 1, op, seq, **sizes | {"time_created_ns": 0, "state": "scheduled"} | fields)


def found_in(folder: Path, *entries: dict[str, Any]) -> list[Finding]:
    """What is found where rank n made the call `entries[n]`."""
    for rank, one in enumerate(entries):
        dump = flight_dump([one], list(range(len(entries))))
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump, 2))
    found = diagnosis_of(folder)
    assert found.verdict == "error"
    return [in_short(finding) for finding in found.findings]


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"output_sizes": [[5, 4]]}, "size_mismatch"),
        ({"input_sizes": [[5, 4]]}, "size_mismatch"),
        ({"output_dtypes": ["Half"]}, "dtype_mismatch"),
    ],
)
def test_a_rank_with_an_inconsistent_call_is_the_culprit_without_a_majority(
    wrong: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    assert found_in(tmp_path, entry(), entry(**wrong))[0][:4] == (kind, "default_pg", 1, [1])


@pytest.mark.parametrize(
    "wrong",
    [
        entry(output_sizes=[[5, 4]]),
        entry("_all_gather_base", output_sizes=[[33]]),
        entry("all_gather", output_sizes=[[4, 4]] * 3),
        entry("_reduce_scatter_base", output_sizes=[[9]]),
        entry("reduce_scatter", input_sizes=[[4, 4]] * 3),
        entry("reduce_scatter_tensor_coalesced", input_sizes=[[4, 4], [8, 4]], output_sizes=[[8], [8]]),
        entry("all_gather_into_tensor_coalesced", input_sizes=[[4], [2]], output_sizes=[[8], [5]]),
    ],
    ids=lambda wrong: wrong["profiling_name"],
)
def test_a_call_inconsistent_on_every_rank_has_no_culprit(wrong: dict[str, Any], tmp_path: Path) -> None:
    assert found_in(tmp_path, wrong, wrong)[0][:4] == ("size_mismatch", "default_pg", 1, [])


@pytest.mark.parametrize(
    "call",
    [
        Collective("0", "_all_gather_base", ((16,),), ((64,),)),
        Collective("0", "all_gather", ((16,),), ((16,),) * 4),
        Collective("0", "all_gather", ((16,),), ((16,), (8,), (4,), (2,))),
        Collective("0", "_reduce_scatter_base", ((64,),), ((16,),)),
        Collective("0", "reduce_scatter", ((16,),) * 4, ((16,),)),
        Collective("0", "allreduce_coalesced", ((16,), (2,)), ((16,), (2,))),
        Collective("0", "broadcast"),
        Collective("0", "barrier", (), ()),
    ],
    ids=lambda call: f"{call.op}-{len(call.output_sizes)}",
)
def test_calls_made_by_torch_are_consistent(call: Collective, tmp_path: Path) -> None:
    job = SimulatedJob([[call] * 2] * 4, {"0": ("default_pg", [0, 1, 2, 3])})
    assert diagnose_job(job, tmp_path).verdict == "ok"


@pytest.mark.parametrize("name", ["UNKNOWN_SCALAR", "Undefined"])
def test_a_gather_without_output_types_on_non_roots_matches(name: str, tmp_path: Path) -> None:
    root = entry("gather", input_sizes=[[64]], output_sizes=[[64]] * 3)
    other = entry("gather", input_sizes=[[64]], output_sizes=[], output_dtypes=[name])
    assert found_in(tmp_path, root, other, other)[0][0] == "all_joined_not_completed"


def test_gather_and_scatter_roots_may_have_other_sizes(tmp_path: Path) -> None:
    groups: Groups = {"0": ("default_pg", [0, 1])}
    programs: Programs = [
        [Collective("0", "gather", SIDE, SIDE * 2), Collective("0", "scatter", SIDE * 2, SIDE)],
        [Collective("0", "gather", SIDE, ()), Collective("0", "scatter", (), SIDE)],
    ]
    found = roots(diagnose_job(SimulatedJob(programs, groups), tmp_path))
    assert not [row for row in found if row[0] in ("size_mismatch", "dtype_mismatch")]


@pytest.mark.parametrize(
    ("size", "found"),
    [
        (19, ("all_joined_not_completed", "default_pg", 1, [])),
        (20, ("size_mismatch", "default_pg", 1, [2])),
    ],
)
def test_ranks_of_a_scatter_are_compared_as_nccl_notes_it(
    size: int, found: tuple[str, str, int, list[int]], tmp_path: Path
) -> None:
    # The two sides are exchanged there, and ranks other than the root have an undefined tensor.
    root = entry("scatter", input_sizes=[[19]], output_sizes=[[19]] * 3)
    others = (entry("scatter", input_sizes=[[one]], output_sizes=[[0]]) for one in (19, size))
    assert found_in(tmp_path, root, *others)[0][:4] == found


SIDE = ((4, 4),)


def test_a_call_finished_on_only_one_rank_is_not_healthy(tmp_path: Path) -> None:
    assert found_in(tmp_path, entry(), entry(state="completed")) == [
        ("all_joined_not_completed", "default_pg", 1, [], [0])
    ]


@pytest.mark.parametrize(("after", "kinds"), [(60.0, [("not_completed", [1])]), (0.01, [])])
def test_a_rank_hangs_if_its_last_call_ended_long_ago_elsewhere(
    after: float, kinds: list[tuple[str, list[int]]], tmp_path: Path
) -> None:
    job = SimulatedJob([[Collective("0")] * 3] * 4, {"0": ("default_pg", [0, 1, 2, 3])}, timing=False)
    write_moments(job, tmp_path, dict.fromkeys(range(4), Moment(after=after)))
    path = tmp_path / "rank-1.flight.json"
    last = path.read_text().rpartition('"state": "completed"')
    path.write_text('"state": "scheduled"'.join((last[0], last[2])))
    assert [(finding.kind, finding.culprit_ranks) for finding in diagnosis_of(tmp_path).findings] == kinds


@pytest.mark.parametrize(("sizes", "culprits"), [((8, 8, 16, 8), [2]), ((8, 8, 16, 16, 8), []), ((8, 16, 8), [])])
def test_half_of_a_group_is_its_majority_if_the_files_of_one_rank_are_missing(
    sizes: tuple[int, ...], culprits: list[int], tmp_path: Path
) -> None:
    ranks = [*range(len(sizes))]
    programs: Programs = [[Collective("0", inputs=((size,),))] for size in sizes]
    job = SimulatedJob(programs, {"0": ("default_pg", ranks)})
    job.run()
    job.write(tmp_path, ranks={*ranks[1:]} if len(sizes) == 3 else {*ranks[:-1]})
    mismatch = next(finding for finding in diagnosis_of(tmp_path).findings if finding.kind == "size_mismatch")
    assert mismatch.culprit_ranks == culprits
    missing = f"the files of rank {ranks[-1]} are missing, which may have made either call"
    assert mismatch.text.endswith(missing) is bool(culprits)
