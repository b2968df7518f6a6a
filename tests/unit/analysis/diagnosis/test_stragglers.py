"""Who comes last, and how clocks are brought together by what collectives imply."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from crossrank.tools.analysis.diagnosis.findings import ClockAlignment, Diagnosis, Finding, GroupStragglers
from crossrank.tools.analysis.diagnosis.stragglers import find_stragglers
from tests.unit.analysis.diagnosis.ranks import Call, call, group, job, rank
from tests.unit.analysis.diagnosis.verdicts import diagnosis_of
from tests.unit.traces.flight_entries import flight_dump, flight_entry

START = 1_795_000_000_000_000_000
MS = 1_000_000


def write_dumps(folder: Path, arrivals_ms: list[list[float]], *, clock_ms: list[float] | None = None) -> Path:
    """A job of all_reduces, call n begun by rank r at `arrivals_ms[r][n]` and over 1 ms after the last arrival.

    `clock_ms` is how far the clock of each rank is ahead.
    """
    folder.mkdir()
    ahead = clock_ms or [0.0] * len(arrivals_ms)
    ends = [max(column) + 1 for column in zip(*arrivals_ms, strict=True)]
    for own, moments in enumerate(arrivals_ms):
        entries = []
        for number, (began, ended) in enumerate(zip(moments, ends, strict=True)):
            at, over = (START + int((moment + ahead[own]) * MS) for moment in (began, ended))
            times: dict[str, Any] = {"time_created_ns": at, "time_discovered_completed_ns": over, "state": "completed"}
            entries.append(flight_entry(number, "all_reduce", number + 1, **times))
        dump = flight_dump(entries, list(range(len(arrivals_ms))))
        (folder / f"rank_{own}").write_bytes(pickle.dumps(dump, 2))
    return folder


def stragglers(found: Diagnosis) -> tuple[int, float, float, float]:
    """(rank that is last most often, how often, median wait in ms, longest wait in ms)"""
    (row,) = found.stragglers
    return row.last_rank, row.last_share, row.wait_ms["p50"], row.wait_ms["max"]


def test_the_last_rank_is_named_with_the_waits_of_the_others(tmp_path: Path) -> None:
    arrivals = [
        [100.0 * call + (5 if rank == 2 and call != 3 else 0.5 * rank) for call in range(10)] for rank in range(4)
    ]

    found = diagnosis_of(write_dumps(tmp_path / "dumps", arrivals))

    about: dict[str, Any] = {"pg": ["0", "default_pg"], "pg_ranks": [0, 1, 2, 3]}
    times: dict[str, Any] = {"wait_ms": {"p50": 5.0, "p95": 5.0, "max": 5.0, "total": 46.5}}
    times |= {"late_ms": {"0": 0.0, "1": 0.5, "2": 5.0, "3": 1.5}}
    last = GroupStragglers(**about, **times, collectives=10, last_rank=2, last_share=0.9, max_rank=2)
    assert found.stragglers == [last]
    assert found.verdict == "ok"
    text = (
        "rank 2 arrived last in 90.0 % of 10 collectives, by the times of the hosts' calls; the first rank waited 5 ms"
    )
    text += " for it (median)"
    text += ", if the clocks of the ranks agree"
    assert found.advisory == [Finding(kind="straggler", **about, waiting_ranks=[0, 1, 3], text=text)]


@pytest.mark.parametrize(("calls", "late", "noted"), [(5, 1.0, [1]), (5, 0.99, [0]), (4, 1.0, [])])
def test_stragglers_have_at_least_five_collectives_and_a_1_ms_median(
    calls: int, late: float, noted: list[int], tmp_path: Path
) -> None:
    arrivals = [[100.0 * call for call in range(calls)], [100.0 * call + late for call in range(calls)]]
    found = diagnosis_of(write_dumps(tmp_path / "dumps", arrivals))
    assert [len(found.advisory) for _ in found.stragglers] == noted


def test_the_median_and_95th_percentile_of_waits_are_reported(tmp_path: Path) -> None:
    arrivals = [[100.0 * call for call in range(40)], [100.0 * call + call for call in range(40)]]
    (row,) = diagnosis_of(write_dumps(tmp_path / "dumps", arrivals)).stragglers
    assert (row.last_share, row.wait_ms) == (0.975, {"p50": 19.5, "p95": 37.05, "max": 39.0, "total": 780.0})


def test_clocks_are_aligned_over_groups_that_share_a_rank() -> None:
    def at(number: int, clock: int, ends: bool = True, **facts: Any) -> Call:
        return call(
            number=number, called=(100 * number + clock) * MS, ended=ends * (100 * number + clock + 1) * MS, **facts
        )

    groups = (group("a", 0, 1), group("b", 1, 2), group("c", 2, 3))
    numbers = range(1, 6)
    ranks = [
        rank(0, *(at(n, 0, pg="a") for n in numbers), groups=groups),
        rank(1, *(at(n, 70, pg=pg) for pg in "ab" for n in numbers), groups=groups),
        rank(2, *(at(n, 170, pg=pg) for pg in "bc" for n in numbers), groups=groups),
        rank(3, *(at(n, 270, ends=False, pg="c") for n in numbers), groups=groups),
    ]

    assert find_stragglers(job(*ranks))[1] == ClockAlignment(
        aligned=True,
        offset_ms={"1": -70.0, "2": -170.0, "3": -269.0},
        note="the clocks of 3 ranks were aligned with a bound on one side only, by the ends of collectives as torch "
        "noticed them",
        residual_ms=0.0,
    )


def test_clock_residuals_are_reported_and_alignment_requires_end_times() -> None:
    def made(*moments: int, ends: bool = True) -> list[Call]:
        return [call(number=n, called=at, ended=ends * (at + 2)) for n, at in enumerate(moments, 1)]

    drifts = job(rank(0, *made(10, 20, 30, 40, 50)), rank(1, *made(10, 20, 30, 40, 60)))
    assert find_stragglers(drifts)[1] == ClockAlignment(
        aligned=True,
        offset_ms={"1": -5e-6},
        within_ms=0.0,
        residual_ms=3e-6,
        note="the clocks of 1 rank were aligned to within 0 ms, by the ends of collectives as torch noticed them",
    )
    unknown = job(*(rank(one, *made(1, 2, 3, 4, 5, ends=False)) for one in (0, 1)))
    note = "clocks of the hosts, not aligned: no dump has the end times that an alignment needs"
    assert find_stragglers(unknown)[1] == ClockAlignment(aligned=False, note=note)


def test_a_rank_late_by_less_than_the_clock_error_is_not_a_straggler(tmp_path: Path) -> None:
    """The clock of rank 1 goes back and forth by 6 ms from call to call, and rank 2 comes 5 ms late."""
    arrivals = [[100.0 * call + (5 if rank == 2 else 0) for call in range(10)] for rank in range(3)]
    folder = write_dumps(tmp_path / "dumps", arrivals)
    assert [one.kind for one in diagnosis_of(folder).advisory] == ["straggler"]
    dump = pickle.loads((folder / "rank_1").read_bytes())
    for number, entry in enumerate(dump["entries"]):
        for moment in ("time_created_ns", "time_discovered_completed_ns"):
            entry[moment] += (12 if number % 2 else -12) * MS
    (folder / "rank_1").write_bytes(pickle.dumps(dump, 2))
    found = diagnosis_of(folder)
    assert found.clocks is not None
    assert (found.clocks.residual_ms or 0) >= 5
    assert found.advisory == []


def test_ranks_that_take_turns_arriving_last_are_not_stragglers(tmp_path: Path) -> None:
    arrivals = [[100.0 * call + (5 if call % 4 == rank else 0) for call in range(12)] for rank in range(4)]
    found = diagnosis_of(write_dumps(tmp_path / "dumps", arrivals))
    assert stragglers(found)[1:3] == (0.25, 5.0)
    assert found.advisory == []


@pytest.mark.parametrize("ahead", [-4000.0, 70.0])
def test_a_clock_that_a_collective_contradicts_is_aligned(ahead: float, tmp_path: Path) -> None:
    arrivals = [[100.0 * call + (2 if call % 2 == rank else 0) for call in range(10)] for rank in range(2)]
    found = diagnosis_of(write_dumps(tmp_path / "dumps", arrivals, clock_ms=[0, ahead]))
    assert found.clocks is not None
    assert found.clocks.aligned
    assert found.clocks.residual_ms == 0
    # A collective takes 1 ms after the last arrival: so far the bounds leave the offset open.
    assert found.clocks.offset_ms["1"] == pytest.approx(-ahead, abs=1.0)
    assert stragglers(found)[2] == pytest.approx(2, abs=1.0)


def test_clocks_without_contradictions_stay_unchanged(tmp_path: Path) -> None:
    arrivals = [[100.0 * call + rank for call in range(10)] for rank in range(3)]
    found = diagnosis_of(write_dumps(tmp_path / "dumps", arrivals, clock_ms=[0, 0.4, 0]))
    assert found.clocks is not None
    assert (found.clocks.offset_ms, found.clocks.note) == ({}, "the clocks do not contradict each other")


@pytest.mark.parametrize(
    ("clock_ms", "late", "noted"),
    [
        ([0, 0, 0, 0], 5, True),
        ([0, 3.5, -3, 1.5], 5, False),  # rank 1 seems last
        ([5, -0.2, 0.3, 9], 5, False),
        ([5, -0.2, 0.3, 9], 30, True),
        ([0, 70, -300, 12], 30, False),  # as late as at every call is a clock that is behind
    ],
)
def test_a_rank_is_late_only_if_no_error_of_the_clocks_explains_it(
    clock_ms: list[float], late: float, noted: bool, tmp_path: Path
) -> None:
    """Rank 2 is as late at every call."""
    arrivals = [[100.0 * call + late * (rank == 2) + 0.01 * (rank + call) for call in range(30)] for rank in range(4)]
    found = diagnosis_of(write_dumps(tmp_path / "dumps", arrivals, clock_ms=clock_ms))
    assert [one.waiting_ranks for one in found.advisory] == ([[0, 1, 3]] if noted else [])
    assert all(one.text.endswith("(median), if the clocks of the ranks agree") for one in found.advisory)


def test_a_rank_that_is_late_at_some_calls_is_named_with_any_clock(tmp_path: Path) -> None:
    """Calls to which it was not late show how far its clock is ahead."""
    arrivals = [[100.0 * call + 30 * (rank == 2 and call % 3 > 0) for call in range(30)] for rank in range(4)]
    found = diagnosis_of(write_dumps(tmp_path / "dumps", arrivals, clock_ms=[0, 70, -300, 12]))
    assert [one.waiting_ranks for one in found.advisory] == [[0, 1, 3]]
    assert found.advisory[0].text.endswith("waited 30 ms for it (median)")
    assert found.clocks is not None
    assert found.clocks.within_ms == pytest.approx(1, abs=0.01)


def test_ranks_along_a_long_chain_of_groups_without_end_times_are_compared(tmp_path: Path) -> None:
    """Nothing bounds how wrong their clocks may be, however long the chain is."""
    count = 20
    groups = [group(str(pair), pair, pair + 1) for pair in range(count - 1)]
    ranks = [
        rank(
            one,
            *(
                call(
                    number=n, called=START + 100 * n * MS, ended=(one == 0) * (START + (100 * n + 1) * MS), pg=str(pair)
                )
                for pair in (one - 1, one)
                if 0 <= pair < count - 1
                for n in range(1, 6)
            ),
            groups=tuple(groups),
        )
        for one in range(count)
    ]
    _, clocks, late = find_stragglers(job(*ranks))
    assert (clocks.within_ms, late) == (None, [])


def test_a_collective_with_an_unknown_time_does_not_count(tmp_path: Path) -> None:
    arrivals = [[100.0 * call + 5 * own for call in range(10)] for own in range(2)]
    folder = write_dumps(tmp_path / "dumps", arrivals)
    dump = pickle.loads((folder / "rank_1").read_bytes())
    dump["entries"][3]["time_created_ns"] = 0
    (folder / "rank_1").write_bytes(pickle.dumps(dump, 2))
    found = diagnosis_of(folder)
    assert (found.stragglers[0].collectives, stragglers(found)) == (9, (1, 1.0, 5.0, 5.0))
