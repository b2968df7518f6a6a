"""With NCCL a call returns before it is over: what our records show where torch's recorder was off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from crossrank.tools.analysis.diagnosis.findings import Diagnosis
from tests.unit.analysis.diagnosis.test_comms_beside import START, all_reduce, p2p, write_comms
from tests.unit.analysis.diagnosis.verdicts import diagnosis_of

FOUR = {"0": ("default_pg", [0, 1, 2, 3])}


def diagnosis_of_records(folder: Path, records: list[list[dict[str, Any]]], **facts: Any) -> Diagnosis:
    """Of ranks that were terminated together, a minute after the start."""
    for rank, made in enumerate(records):
        write_comms(folder, rank, made, groups=FOUR, backend="cuda:nccl", until=60, ended=True, **facts)
    return diagnosis_of(folder)


def short(found: Diagnosis) -> list[tuple[str, int | None, list[int]]]:
    return [(one.kind, one.collective_seq_id or one.p2p_seq_id, one.culprit_ranks) for one in found.findings]


def test_a_rank_waits_in_a_call_that_returned_before_the_missed_call(tmp_path: Path) -> None:
    # Rank 0 leaves out a send, and all go on to the next collective.
    made = [all_reduce(1), p2p("send", 1, 1), all_reduce(2)]
    missed = [all_reduce(1), p2p("recv", 0, 1), p2p("recv", 0, 2), all_reduce(2)]
    others = [all_reduce(1), all_reduce(2)]
    found = diagnosis_of_records(tmp_path, [made, missed, others, others], reason="SIGTERM")
    assert short(found) == [("p2p_unmatched", 2, [0])]


def test_ranks_with_hosts_ahead_of_a_dead_rank_do_not_miss_calls(tmp_path: Path) -> None:
    for rank, calls in enumerate((5, 6, 4, 7)):
        made = [all_reduce(seq + 1) for seq in range(calls)]
        write_comms(tmp_path, rank, made, groups=FOUR, backend="nccl", ended=rank != 2, reason="SIGTERM", until=60)
    assert short(diagnosis_of(tmp_path)) == [("missing_rank", 5, [2])]


def test_calls_after_a_mismatch_are_consequences_of_it(tmp_path: Path) -> None:
    wrong = [all_reduce(1), all_reduce(2) | {"in": [[4]]}, all_reduce(3) | {"in": [[4]]}]
    right = [all_reduce(1), all_reduce(2)]
    found = diagnosis_of_records(tmp_path, [right, right, wrong, right], reason="SIGTERM")
    assert short(found) == [("size_mismatch", 2, [2])]


def test_a_rank_that_changes_its_peer_is_named_instead_of_the_new_peer(tmp_path: Path) -> None:
    # Stages hand on microbatches; stage 2 receives the last one from stage 0, which never sends to it.
    def stage(rank: int, count: int) -> list[dict[str, Any]]:
        calls = []
        for number in range(1, count + 1):
            calls += [p2p("recv", rank - 1, number)] if rank else []
            calls += [p2p("send", rank + 1, number)] if rank < 3 else []
        return calls

    astray = [*stage(2, 3), p2p("recv", 0, 1), p2p("send", 3, 4)]
    found = diagnosis_of_records(tmp_path, [stage(0, 4), stage(1, 4), astray, stage(3, 4)], reason="SIGTERM")
    assert found.suspect_ranks == [2]
    assert [(one.kind, one.culprit_ranks) for one in found.findings] == [("p2p_unmatched", [2])]


def write_moment(folder: Path, rank: int, **facts: Any) -> None:
    """A dump beside the comms file of a rank that has no entries of torch, a minute after the start."""
    lines = [json.loads(line) for line in (folder / f"rank-{rank}.comms.jsonl").read_text().splitlines()]
    moment = {
        "rank": rank,
        "world_size": 4,
        "host": "h",
        "time_ns": START + 60 * 10**9,
        "clock": {"t": 60 * 10**9, "wall": START + 60 * 10**9},
        "groups": [line["group"] for line in lines if "group" in line],
        "calls": [line for line in lines if "op" in line],
    }
    dump = {"version": "2.10", "entries": [], "crossrank": moment | facts}
    (folder / f"rank-{rank}.flight.json").write_text(json.dumps(dump))


def test_a_silent_job_with_unknown_ends_of_calls_is_not_healthy(tmp_path: Path) -> None:
    for rank in range(4):
        write_comms(tmp_path, rank, [all_reduce(1)], groups=FOUR, backend="nccl")
        write_moment(tmp_path, rank, reason="hang")
    found = diagnosis_of(tmp_path)
    assert (found.verdict, [one.kind for one in found.findings]) == ("incomplete", ["not_recorded"])
    assert found.findings[0].waiting_ranks == [0, 1, 2, 3]


def test_an_exception_is_known_from_the_dump_if_the_comms_file_was_cut_off(tmp_path: Path) -> None:
    raised = {"thread": "MainThread", "error": "AcceleratorError: CUDA error: unspecified launch failure", "frames": []}
    for rank in range(4):
        write_comms(tmp_path, rank, [all_reduce(1)], groups=FOUR, backend="nccl", ended=rank != 1, reason="SIGTERM")
        if rank == 1:
            write_moment(tmp_path, rank, reason="exit", error=raised["error"], exceptions=[raised])
        else:
            write_moment(tmp_path, rank, reason="SIGTERM")
    found = diagnosis_of(tmp_path)
    assert (found.verdict, short(found)) == ("error", [("raised", None, [1])])


def test_a_finished_job_with_unknown_ends_of_calls_is_healthy(tmp_path: Path) -> None:
    assert diagnosis_of_records(tmp_path, [[all_reduce(1), all_reduce(2)]] * 4).verdict == "ok"
