"""Comms files beside gloo's dumps say what the dumps do not know: members, sends and receives, last words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crossrank.comm import CommRecord
from crossrank.tools.analysis.diagnosis.evidence import find_candidates, read_evidence
from crossrank.tools.parallel import Fleet
from tests.unit.analysis.diagnosis.moments import CLOSED, Moment, write_moments
from tests.unit.analysis.diagnosis.simulated_jobs import (
    Collective,
    CpuStall,
    Groups,
    Programs,
    Recv,
    SimulatedJob,
)
from tests.unit.analysis.diagnosis.verdicts import diagnose_job, diagnosis_of, roots

GROUPS: Groups = {"0": ("default_pg", [0, 1, 2]), "7": ("pair", [0, 2])}
START = 1_795_000_000_000_000_000


def write_comms(
    folder: Path,
    rank: int,
    records: list[dict[str, Any]],
    *,
    ended: bool = False,
    emit: str = "ALL",
    groups: Groups = GROUPS,
    until: float | None = None,
    reason: str = "exit",
    backend: str = "gloo",
    start: int = START,
    error: str | None = None,
) -> None:
    """A comms file of `rank`, of a job of the ranks in group "0"; record n is made n seconds after the start.

    `until` is up to when it lacks nothing, in seconds after the start; `reason` is why it ended, if it did.
    """
    folder.mkdir(exist_ok=True)
    header = {"schema": "crossrank-comms 1", "rank": rank, "world_size": len(groups["0"][1]), "host": "h", "node": "n"}
    lines: list[Any] = [{"header": header | {"config": {"emit": emit}, "clock": {"t": 0, "wall": start}}}]
    for name, (desc, ranks) in groups.items():
        if rank in ranks:
            lines.append({"group": {"pg": name, "size": len(ranks), "ranks": ranks, "desc": desc, "backend": backend}})
            lines[-1]["group"]["locality"] = "intra_node" if name == "7" else "cross_node"
    for number, fields in enumerate(records):
        whole = {"id": number, "c10d": fields["op"], "bytes": 32, "t": number * 10**9, "in": [[8]], "dtype": "float32"}
        record = msgspec.convert(whole | {"source": f"train.py:{number + 1}"} | fields, CommRecord)
        lines.append(msgspec.json.decode(msgspec.json.encode(record)))
    if until is not None:
        lines.append({"clock": {"t": int(until * 10**9), "wall": start + int(until * 10**9)}})
    if ended:
        raised = [{"thread": "MainThread", "error": error, "frames": []}] if error else []
        lines.append({"end": {"reason": reason, "exceptions": raised}})
    (folder / f"rank-{rank}.comms.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def all_reduce(seq: int, pg: str = "0") -> dict[str, Any]:
    return {"op": "all_reduce", "pg": pg, "seq": seq, "async": False}


def p2p(op: str, peer: int, seq: int, api: str | None = None) -> dict[str, Any]:
    return {"op": op, "pg": "0", "p2p_seq": seq, "peer": peer, "api": api or op}


def test_members_of_a_group_come_from_the_comms_files(tmp_path: Path) -> None:
    programs: Programs = [[Collective("0"), Collective("7")], [Collective("0")], [Collective("0"), CpuStall()]]
    before = diagnose_job(SimulatedJob(programs, GROUPS, backend="gloo"), tmp_path)
    for rank in range(3):
        write_comms(tmp_path, rank, [all_reduce(1)])
    found = diagnosis_of(tmp_path)
    # Alone, the dumps show one rank in a group of which nobody else is known.
    assert before.findings[0].culprit_ranks == []
    assert roots(found) == [("missing_rank", "pair", 1, [2], [0])]


def test_sends_and_receives_of_gloo_come_from_the_comms_files(tmp_path: Path) -> None:
    programs: Programs = [[Collective("0"), Recv("0", 2)], [Collective("0")] * 2, [Collective("0")] * 2]
    diagnose_job(SimulatedJob(programs, GROUPS, backend="gloo"), tmp_path)
    write_comms(tmp_path, 0, [all_reduce(1), p2p("recv", 2, 1)])
    for rank in (1, 2):
        write_comms(tmp_path, rank, [all_reduce(1), all_reduce(2)])
    found = diagnosis_of(tmp_path)
    assert roots(found) == [("p2p_unmatched", "default_pg", 1, [], [0])]
    assert found.findings[0].text == (
        "rank 0 waits for 2 in default_pg [0] recv #1; rank 2 waits for 0 in default_pg [0] all_reduce #2"
    )


def test_comms_files_alone_show_an_unmatched_receive(tmp_path: Path) -> None:
    write_comms(tmp_path, 0, [all_reduce(1), p2p("send", 1, 1), p2p("recv", 2, 1)])
    write_comms(tmp_path, 1, [all_reduce(1), p2p("recv", 0, 1)], ended=True)
    write_comms(tmp_path, 2, [all_reduce(1)], ended=True)
    assert roots(diagnosis_of(tmp_path)) == [("p2p_unmatched", "default_pg", 1, [2], [0])]


@pytest.mark.parametrize("api", ["irecv", "batch_isend_irecv"])
def test_an_async_receive_is_not_a_fault_once_it_is_matched(api: str, tmp_path: Path) -> None:
    write_comms(tmp_path, 0, [all_reduce(1), p2p("recv", 1, 1, api), all_reduce(2)])
    write_comms(tmp_path, 1, [all_reduce(1), p2p("send", 0, 1, "isend"), all_reduce(2)])
    write_comms(tmp_path, 2, [all_reduce(1), all_reduce(2)])
    assert diagnosis_of(tmp_path).verdict == "ok"


def test_known_roots_and_reductions_are_compared(tmp_path: Path) -> None:
    for rank in range(3):
        records = [
            {"op": "broadcast", "pg": "0", "seq": 1, "root": 0},
            {"op": "all_reduce", "pg": "0", "seq": 2, "reduce": "max" if rank == 1 else "sum"},
        ]
        write_comms(tmp_path / "reduce", rank, records, ended=True)
        records[0]["root"] = 2 if rank == 2 else 0
        write_comms(tmp_path / "root", rank, records, ended=True)
    assert roots(diagnosis_of(tmp_path / "reduce")) == [("reduce_op_mismatch", "default_pg", 2, [1], [])]
    assert roots(diagnosis_of(tmp_path / "root")) == [("root_mismatch", "default_pg", 1, [2], [])]


@pytest.mark.parametrize("seconds", [59, 61])
def test_comms_files_of_two_runs_are_noted(seconds: int, tmp_path: Path) -> None:
    write_comms(tmp_path, 0, [all_reduce(1)], until=2, ended=True)
    write_comms(tmp_path, 1, [all_reduce(1)], until=2, ended=True)
    write_comms(tmp_path, 2, [all_reduce(1)], until=2, ended=True, start=START + (2 + seconds) * 10**9)
    apart = f"{tmp_path}/rank-0.comms.jsonl ends {seconds} s before {tmp_path}/rank-2.comms.jsonl starts"
    told = f"the ranks are from different runs: {apart}; give the files of one run"
    assert (told in diagnosis_of(tmp_path).notes) == (seconds > 60)


def test_a_rank_without_a_dump_is_named_with_its_last_call(tmp_path: Path) -> None:
    programs: Programs = [[Collective("0", inputs=((8,),))] * 2 for _ in range(3)]
    programs[2][1] = CpuStall()
    job = SimulatedJob(programs, GROUPS, backend="gloo")
    job.run()
    job.write(tmp_path, ranks=[0, 1])
    write_comms(tmp_path, 2, [all_reduce(1)])

    found = diagnosis_of(tmp_path)

    assert roots(found) == [("missing_rank", "default_pg", 2, [2], [0, 1])]
    assert found.notes[0] == (
        "rank 2 has no dump, so crossrank uses its comms file; "
        "the last call in its comms file is all_reduce #1 on default_pg [0] at train.py:1"
    )


def test_an_invalid_number_skips_only_its_call(tmp_path: Path) -> None:
    write_comms(tmp_path, 0, [all_reduce(1), all_reduce(123), all_reduce(2)])
    file = tmp_path / "rank-0.comms.jsonl"
    file.write_text(file.read_text().replace('"seq": 123', f'"seq": {1 << 63}'))
    (evidence,) = read_evidence(find_candidates([str(tmp_path)]), Fleet()).ranks
    assert list(evidence.calls.number) == [1, 2]
    assert evidence.problems == [
        "line 5 is not a comms record: ValidationError: Expected `int` <= 4611686018427387903 - at `$.seq`"
    ]


def test_the_rank_whose_tags_counted_before_is_named(tmp_path: Path) -> None:
    sent, received = [0, 1, 2, 3, 4, 70], [0, 1, 2, 3, 4, 5]
    write_comms(tmp_path, 0, [p2p("send", 1, number) | {"tag": tag} for number, tag in enumerate(sent, 1)])
    write_comms(tmp_path, 1, [p2p("recv", 0, number) | {"tag": tag} for number, tag in enumerate(received, 1)])
    write_comms(tmp_path, 2, [])
    assert roots(diagnosis_of(tmp_path))[0] == ("p2p_tag_mismatch", "default_pg", 6, [0], [1])


def test_a_send_and_a_receive_with_different_tags_do_not_match(tmp_path: Path) -> None:
    write_comms(tmp_path, 0, [all_reduce(1), p2p("send", 1, 1) | {"tag": 1}])
    write_comms(tmp_path, 1, [all_reduce(1), p2p("recv", 0, 1) | {"tag": 2}])
    write_comms(tmp_path, 2, [all_reduce(1)], ended=True)
    assert roots(diagnosis_of(tmp_path)) == [("p2p_tag_mismatch", "default_pg", 1, [], [0, 1])]


@pytest.mark.parametrize(("last", "noted"), [("broadcast", "broadcast"), ("reduce_scatter", "all_reduce")])
def test_comms_files_add_roots_and_reductions_to_a_dump(last: str, noted: str, tmp_path: Path) -> None:
    """Also where the last call is one of which gloo makes another."""
    broadcasts = [Collective("0", "broadcast", ((8,),))] * 3
    job = SimulatedJob([[*broadcasts, Collective("0", noted, ((8,),))]] * 3, GROUPS, backend="gloo")
    job.run()
    for rank in range(3):
        # torch has counted one call more, from before the recording began.
        calls = []
        for seq, op in ((1, "broadcast"), (2, "broadcast"), (3, last)):
            call = {"id": seq, "op": op, "c10d": f"{op}_", "pg": "0", "bytes": 32, "seq": seq, "source": "train.py:7"}
            at = job.dump(rank)["entries"][seq]["time_created_ns"] - START
            calls.append(call | {"root": 1 if (rank, seq) == (2, 2) else 0, "t": at})
        moment = {"rank": rank, "world_size": 3, "time_ns": START + 10**12, "clock": {"t": 0, "wall": START}}
        moment |= {"groups": [{"pg": "0", "size": 3, "ranks": [0, 1, 2], "desc": "default_pg"}], "calls": calls}
        dump = json.dumps(job.dump(rank, frames=False) | {"crossrank": moment})
        (tmp_path / f"rank-{rank}.flight.json").write_text(dump)

    found = diagnosis_of(tmp_path)

    assert roots(found) == [("root_mismatch", "default_pg", 3, [2], [])]
    assert found.findings[0].places[0].frames == ["(C++) (train.py:7)"]


def test_a_crossnode_comms_file_does_not_prove_a_missing_call(tmp_path: Path) -> None:
    programs: Programs = [[Collective("0"), Collective("7")], [Collective("0")], [Collective("0"), Collective("7")]]
    job = SimulatedJob(programs, GROUPS, backend="gloo")
    job.run()
    for records in ([], [all_reduce(1)]):
        folder = tmp_path / str(len(records))
        job.write(folder, ranks=[0, 1])
        write_comms(folder, 2, records, emit="CROSSNODE")
    assert [(one.kind, one.culprit_ranks) for one in diagnosis_of(tmp_path / "0").findings] == [("dump_missing", [2])]
    assert diagnosis_of(tmp_path / "1").findings == []


def test_a_barrier_that_torch_does_not_record_comes_from_the_comms_files(tmp_path: Path) -> None:
    failed = "RuntimeError: [Rank 0]: Ranks 2 failed to pass monitoredBarrier in 2000 ms"
    job = SimulatedJob([[Collective("0", inputs=((8,),))]] * 3, GROUPS, backend="gloo")
    ends = {rank: Moment(reason="exit", after=9, error=failed) for rank in (0, 1)} | {
        2: Moment(reason="SIGTERM", after=30)
    }
    write_moments(job, tmp_path, ends)
    barrier = {"op": "barrier", "c10d": "monitored_barrier_", "pg": "0", "seq": 2, "in": [], "dtype": None}
    for rank in range(3):
        write_comms(tmp_path, rank, [all_reduce(1), *([barrier] if rank < 2 else [])], ended=True)
    assert roots(diagnosis_of(tmp_path)) == [("missing_rank", "default_pg", 1, [2], [0, 1])]


@pytest.mark.parametrize(
    ("until", "end", "suspects"),
    [
        pytest.param((1.1, 1.2, 0.9), {}, [], id="the last call may not have reached the disk"),
        pytest.param((31.0, 31.1, 30.9), {}, [2], id="all stand still"),
        pytest.param((31.0, 31.1, 0.5), {}, [2], id="one has died"),
        *(
            pytest.param((until,) * 3, {"ended": True, "reason": reason}, suspects, id=f"{reason} {what}")
            for reason in ("SIGTERM", "SIGINT")
            for until, suspects, what in ((1.5, [], "while it trained"), (60.0, [2], "in a hang"))
        ),
    ],
)
def test_the_times_of_comms_files_separate_hangs_from_training(
    until: tuple[float, ...], end: dict[str, Any], suspects: list[int], tmp_path: Path
) -> None:
    for rank in range(3):
        write_comms(tmp_path, rank, [all_reduce(1), all_reduce(2)][: 1 if rank == 2 else 2], until=until[rank], **end)
    found = diagnosis_of(tmp_path)
    assert (found.verdict, found.suspect_ranks) == ("error" if suspects else "ok", suspects)


def test_comms_files_without_newer_calls_do_not_replace_dumps_of_a_hang(tmp_path: Path) -> None:
    programs: Programs = [[Collective("0", inputs=((8,),))], [Collective("0", inputs=((8,),))], []]
    job = SimulatedJob(programs, GROUPS, backend="gloo")
    write_moments(job, tmp_path, {rank: Moment() for rank in range(3)})
    for rank in range(3):
        write_comms(tmp_path, rank, [], until=600)
    assert roots(diagnosis_of(tmp_path)) == [("missing_rank", "default_pg", 1, [2], [0, 1])]


@pytest.mark.parametrize(("until", "suspects"), [(3.5, []), (60.0, [2])])
def test_a_call_one_rank_skips_is_unfinished_even_if_other_threads_continue(
    until: float, suspects: list[int], tmp_path: Path
) -> None:
    for rank in range(3):
        of_thread = [] if rank == 2 else [all_reduce(2, "7") | {"t": 2_900_000_000}]
        records = [all_reduce(1, "7"), all_reduce(1), *of_thread, all_reduce(2) | {"t": 3_000_000_000}]
        write_comms(tmp_path, rank, records, until=until, groups={"0": GROUPS["0"], "7": ("metrics", [0, 1, 2])})
    found = diagnosis_of(tmp_path)
    assert (found.verdict, found.suspect_ranks) == ("error" if suspects else "ok", suspects)


def test_a_rank_that_died_silently_is_named_despite_exceptions_of_others(tmp_path: Path) -> None:
    error = "TrainingError: step 1 failed"
    job = SimulatedJob([[Collective("0", inputs=((8,),))]] * 3, GROUPS, backend="gloo")
    write_moments(job, tmp_path, dict.fromkeys((0, 1), Moment(reason="exit", after=0.1, error=error)))
    for rank in range(3):
        write_comms(tmp_path, rank, [all_reduce(1)], ended=rank < 2)
    assert [(one.kind, one.culprit_ranks) for one in diagnosis_of(tmp_path).findings] == [("dump_missing", [2])]


@pytest.mark.parametrize("op", ["gather", "reduce"])
def test_a_root_is_still_in_its_call_after_its_senders_leave(op: str, tmp_path: Path) -> None:
    for rank in range(3):
        to_root = {"op": op, "pg": "0", "seq": 2, "root": 0}
        records = [all_reduce(1), to_root, all_reduce(3)][: (2, 3, 1)[rank]]
        write_comms(tmp_path, rank, records, until=60)
    assert diagnosis_of(tmp_path).suspect_ranks == [2]


@pytest.mark.parametrize(("error", "state"), [(CLOSED, "gone"), (None, "silent")])
def test_a_rank_that_answered_has_been_killed_if_that_broke_the_communication_of_the_first_rank_that_ended(
    error: str | None, state: str, tmp_path: Path
) -> None:
    programs: Programs = [[Collective("0")] * 2, [Collective("0")] * 2, [Collective("0"), CpuStall()]]
    write_moments(SimulatedJob(programs, GROUPS, backend="gloo"), tmp_path, dict.fromkeys(range(3), Moment()))
    reason = "exit" if error else "SIGTERM"
    write_comms(tmp_path, 0, [all_reduce(1), all_reduce(2)], ended=True, until=9.0, reason=reason, error=error)
    write_comms(tmp_path, 1, [all_reduce(1), all_reduce(2)], ended=True, until=9.5, reason="SIGTERM")
    write_comms(tmp_path, 2, [all_reduce(1)], until=8.8)
    (root,) = diagnosis_of(tmp_path).findings
    assert (root.culprit_ranks, [one.state for one in root.late_ranks]) == ([2], [state])
