"""`crossrank diagnose` as a user runs it: verdicts on real dumps, exit codes, every output, bad input."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import crossrank.tools.analysis.diagnosis
from crossrank.tools.analysis.diagnosis.findings import Diagnosis
from tests.unit.analysis.diagnosis.simulated_jobs import (
    CpuStall,
    Programs,
    Recv,
    Send,
    SimulatedJob,
    StaleWatchdog,
)
from tests.unit.analysis.diagnosis.simulated_programs import training
from tests.unit.command import Command
from tests.unit.graph.linking.public_traces import needs_traces, public

CASES = ["all_started_hang", "alltoallv_clean", "clean", "clean_no_timing", "gloo_clean", "gloo_missing"]
CASES += ["gloo_missing_json", "missing_one", "p2p_single_clean", "rank_died", "size_mismatch", "wrapped_clean"]
EMPTY = pickle.dumps({"version": "2.10", "pg_config": {}, "pg_status": {}}, 2)
"""A dump that knows nothing."""


@pytest.fixture
def diagnose(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "diagnose")


def dumps(folder: Path, steps: int, *stalls: tuple[int, int]) -> Path:
    """Dumps of four ranks, of which some, (rank, call), have stopped."""
    programs, groups = training(4, steps)
    for rank, at in stalls:
        programs[rank].insert(at, CpuStall())
    job = SimulatedJob(programs, groups)
    job.run()
    job.write(folder)
    return folder


@pytest.fixture
def stuck(tmp_path: Path) -> Path:
    """Dumps of which rank 2 has stopped before step 2."""
    return dumps(tmp_path / "stuck", 3, (2, 4))


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    return dumps(tmp_path / "healthy", 6)


@needs_traces
@pytest.mark.parametrize("case", CASES)
def test_dumps_of_known_cases_get_the_expected_verdict(case: str, diagnose: Command) -> None:
    folder = Path(public("flight"), case)
    wanted = json.loads((folder / "expected.json").read_text())
    code, found, err = diagnose.json(folder)
    assert (found["verdict"], found["world_size"]) == (wanted["verdict"], wanted["world_size"])
    for one, two in zip(found["findings"], wanted["findings"], strict=True):
        assert one | two == one
    assert (code, err) == (0 if wanted["verdict"] == "ok" else 1, "")


@needs_traces
def test_both_faulty_ranks_of_a_real_hung_job_are_named(diagnose: Command) -> None:
    folder = Path(public("flight_real"), "gpu_error")
    wanted = json.loads((folder / "expected.json").read_text())
    code, found, _ = diagnose.json(folder)
    assert (code, found["verdict"], found["suspect_ranks"]) == (1, "error", wanted["suspect_ranks"])
    assert len(found["findings"]) == 1
    assert {one["because_of"] for one in found["consequences"]} == {0}
    waiting = sorted(rank for one in found["consequences"] for rank in one["waiting_ranks"])
    assert waiting == sorted(set(range(16)) - set(wanted["suspect_ranks"]))


def test_the_order_of_the_files_does_not_matter(stuck: Path, tmp_path: Path, diagnose: Command) -> None:
    for number, rank in enumerate((3, 1, 0, 2)):
        folder = tmp_path / "shuffled" / f"node{number}"
        folder.mkdir(parents=True)
        shutil.copy(stuck / f"rank_{rank}", folder / f"trace.host{9 - number}.rank{rank}.pkl")
    assert diagnose.json(stuck)[1] == diagnose.json(tmp_path / "shuffled", "--jobs", "2")[1]


def test_the_text_names_the_culprit_and_shows_both_stacks(stuck: Path, diagnose: Command) -> None:
    code, out, _ = diagnose(stuck)

    assert code == 1
    assert out.startswith(
        "verdict    error: ranks wait; it is not proven that they wait for ever\n"
        "culprit    rank 2\n"
        "\n"
        "1. missing_rank: a rank has not made a collective, and other ranks wait in it\n"
    )
    assert re.search(r"rank 2, culprit: its last call, all_reduce #1 on default_pg \[0\]", out)
    assert re.search(r"\(train\.py:140\) +\S+ \(train\.py:1[13]0\)", out)
    assert "more calls in which rank" in out
    assert "\n\nread       4 of 4 ranks (0-3)\ncompared   40 calls on 5 groups (21 collectives)\n" in out


def test_a_healthy_job_exits_0(healthy: Path, diagnose: Command) -> None:
    code, out, err = diagnose(healthy)
    assert (code, err) == (0, "")
    assert out.startswith("verdict    ok: no fault found\n")
    assert "mesh_tp [1]" in out.split("Last ranks to arrive")[1]


def test_ranks_and_groups_limit_what_is_shown(stuck: Path, diagnose: Command) -> None:
    assert "1. missing_rank" in diagnose(stuck, "--ranks", "2-3")[1]
    assert "1. missing_rank" not in diagnose(stuck, "--ranks", "0", "--groups", "nobody")[1]
    code, out, _ = diagnose(stuck, "--ranks", "0", "--groups", "mesh_tp")
    assert (code, "culprit    rank 2\n" in out) == (1, True)
    assert diagnose.json(stuck, "--ranks", "0", "--groups", "mesh_tp")[1] == diagnose.json(stuck)[1]
    entries = diagnose(stuck, "--print-entries", "--groups", "default_pg", "--ranks", "1-2")[1]
    table = entries.split("Collectives of default_pg [0]\n")[1]
    assert [line.split() for line in table.splitlines()] == [
        ["number", "call", "rank", "1", "rank", "2"],
        ["1", "all_reduce", "1", "float32", "completed", "completed"],
        ["2", "all_reduce", "1", "float32", "scheduled", "-"],
        ["3", "all_reduce", "1", "float32", "scheduled", "-"],
    ]


@pytest.mark.parametrize("job", ["stuck", "healthy"])
def test_only_findings_of_the_chosen_ranks_and_groups_are_shown(
    job: str, request: pytest.FixtureRequest, diagnose: Command
) -> None:
    folder: Path = request.getfixturevalue(job)
    code, whole, _ = diagnose.json(folder)
    groups = {tuple(row["pg"]): row["pg_ranks"] for row in whole["stragglers"]}
    pgs = {tuple(one["pg"]) for one in (*whole["findings"], *whole["consequences"])} | set(groups)
    assert len(pgs) > 2
    for words, ranks, names in [
        *((("--ranks", rank), {rank}, None) for rank in range(4)),
        *((("--groups", name), None, {name}) for pg in pgs for name in pg),
    ]:
        shown_code, out, _ = diagnose(folder, *words)
        assert shown_code == code
        about = [
            one
            for one in (*whole["findings"], *whole["consequences"])
            if (ranks is None or ranks & {*one["culprit_ranks"], *one["waiting_ranks"]})
            and (names is None or names & set(one["pg"]))
        ]
        assert ("1. missing_rank" in out) == bool(about), words
        hidden = "not shown: 1 finding about other ranks or groups"
        assert (hidden in out) == bool(whole["findings"] and not about), words
        last = out.partition("Last ranks to arrive")[2]
        shown = {pg for pg in groups if f"{pg[1]} [{pg[0]}]" in last}
        assert shown == {
            pg
            for pg, members in groups.items()
            if (ranks is None or ranks & set(members)) and (names is None or names & set(pg))
        }, words


def test_the_example_of_the_package_runs(stuck: Path) -> None:
    lines = (crossrank.tools.analysis.diagnosis.__doc__ or "").splitlines()
    code = "\n".join(line[4:] for line in lines if line.startswith("    ")).replace("/data/run1", str(stuck))
    names: dict[str, object] = {}
    exec(code, names)
    found = names["diagnosis"]
    assert isinstance(found, Diagnosis)
    assert found.suspect_ranks == [2]


def test_a_missing_dump_can_be_allowed(healthy: Path, diagnose: Command) -> None:
    (healthy / "rank_3").unlink()
    code, found, _ = diagnose.json(healthy)
    assert (code, found["verdict"], found["suspect_ranks"]) == (1, "incomplete", [3])
    assert [one["kind"] for one in found["findings"]] == ["dump_missing"]
    code, found, _ = diagnose.json(healthy, "--allow-missing")
    assert (code, found["verdict"], found["findings"]) == (0, "ok", [])
    assert "rank 3 has no usable dump; crossrank assumes that it made every call (--allow-missing)" in found["notes"]


def test_the_diagnosis_is_written_to_a_file(stuck: Path, tmp_path: Path, diagnose: Command) -> None:
    _, out, _ = diagnose(stuck, "--json", "-o", tmp_path / "diagnosis.json")
    assert (tmp_path / "diagnosis.json").read_text() == out
    assert list(tmp_path.glob(".*")) == []


def test_the_database_answers_questions(stuck: Path, tmp_path: Path, diagnose: Command) -> None:
    diagnose(stuck, "--database", tmp_path / "job.sqlite")

    with sqlite3.connect(tmp_path / "job.sqlite") as database:
        unfinished = database.execute(
            "SELECT g.description, c.seq, c.op, c.members, c.made_by FROM collectives c "
            "JOIN groups g ON g.id = group_id WHERE made_by < members ORDER BY g.id"
        ).fetchall()
        lines = database.execute(
            "SELECT DISTINCT t.file, t.line FROM calls JOIN tracebacks t ON t.id = traceback "
            "WHERE rank = 2 AND depth = (SELECT MAX(depth) FROM tracebacks WHERE id = t.id) ORDER BY t.line"
        ).fetchall()
        kinds = database.execute("SELECT role, kind FROM findings WHERE role = 'findings'").fetchall()
    assert ("mesh_tp", 3, "all_gather", 2, 1) in unfinished
    assert all(members - made_by == 1 for *_, members, made_by in unfinished)
    assert lines == [("train.py", line) for line in (110, 120, 130, 140)]
    assert kinds == [("findings", "missing_rank")]


# --- bad input ---------------------------------------------------------------------------------------------------


def test_a_folder_without_dumps_exits_2(tmp_path: Path, diagnose: Command) -> None:
    assert diagnose(tmp_path) == (
        2,
        "",
        f"crossrank: {tmp_path}: the folder is empty; give a recording (the folder TRACING_DIR), traces or dumps\n",
    )
    (tmp_path / "notes.txt").write_text("nothing")
    code, out, err = diagnose(tmp_path)
    assert (code, out) == (2, "")
    assert err == (
        f"crossrank: {tmp_path}: nothing to diagnose (none of 1 file(s) is a dump with a known rank, "
        "or a log that has one); give a folder of flight-recorder dumps, a recording or logs\n"
    )
    assert diagnose(tmp_path / "nowhere")[0] == 2


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ('{"traceEvents": []}', "is a Kineto trace, not a flight-recorder dump"),
        ('{"events": []}', "is not a flight-recorder dump: it lacks version, pg_config and entries"),
    ],
)
def test_json_that_is_not_a_dump_exits_2_with_its_name(
    content: str, what: str, tmp_path: Path, diagnose: Command
) -> None:
    file = tmp_path / "rank_0.json"
    file.write_text(content)
    code, _, err = diagnose(file)
    assert (code, f"{file}: {what}" in err) == (2, True)


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("should-not-exist"),)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        pytest.param(pickle.dumps({"version": "2.10", "entries": [_Evil()]}, 2), "refused_dump", id="code"),
        pytest.param(EMPTY[:-4], "unreadable_dump", id="torn"),
        pytest.param(b"", "unreadable_dump", id="empty"),
    ],
)
def test_one_bad_file_is_named_and_the_others_are_analysed(
    content: bytes, kind: str, stuck: Path, monkeypatch: pytest.MonkeyPatch, diagnose: Command
) -> None:
    monkeypatch.chdir(stuck.parent)
    (stuck / "rank_3").write_bytes(content)
    code, found, err = diagnose.json(stuck)
    assert (code, found["ranks"], found["suspect_ranks"]) == (1, [0, 1, 2], [2])
    assert {"missing_rank", kind} == {one["kind"] for one in found["findings"]}
    assert f"{stuck}/rank_3: " in err
    assert not Path("should-not-exist").exists()


@pytest.mark.parametrize("name", [".verdict.json.0a5f3c7788990011.part", ".verdict.json.5.part", ".plan.json.77.part"])
@pytest.mark.parametrize("content", [b"", b'{"verdict": "ha'])
def test_a_file_that_was_cut_off_during_writing_is_not_a_dump(
    content: bytes, name: str, stuck: Path, diagnose: Command
) -> None:
    (stuck / name).write_bytes(content)
    code, found, err = diagnose.json(stuck)
    assert (code, found["suspect_ranks"], err) == (1, [2], "")
    assert {one["kind"] for one in found["findings"]} == {"missing_rank"}


def test_the_newer_of_two_files_of_a_rank_counts(stuck: Path, diagnose: Command) -> None:
    early = SimulatedJob(*training(4, 1))
    early.run()
    early.write(stuck / "before", ranks=[1])
    (stuck / "before" / "rank_1").rename(stuck / "before_rank_1")
    code, found, err = diagnose.json(stuck)
    assert (code, found["suspect_ranks"]) == (1, [2])
    assert err == (f"crossrank: {stuck}/before_rank_1: skipped; {stuck}/rank_1 of the same rank 1 is newer\n")


def test_folders_of_several_jobs_are_not_mixed(stuck: Path, healthy: Path, tmp_path: Path, diagnose: Command) -> None:
    assert diagnose(tmp_path) == (
        2,
        "",
        f"crossrank: {healthy} and {stuck} both have dumps of rank 0-3: 2 folders, probably of several jobs; "
        "name the folder of one job\n",
    )


def test_a_rank_outside_the_world_is_skipped(healthy: Path, diagnose: Command) -> None:
    shutil.copy(healthy / "rank_3", healthy / "rank_7")
    code, found, _ = diagnose.json(healthy)
    assert (code, found["world_size"], found["ranks"]) == (0, 4, [0, 1, 2, 3])
    assert f"{healthy}/rank_7: rank 7 is outside the world of 4 ranks; the file was skipped" in found["notes"]


def test_a_larger_world_size_has_missing_ranks(healthy: Path, diagnose: Command) -> None:
    code, found, _ = diagnose.json(healthy, "--world-size", "6")
    assert (code, found["verdict"], found["suspect_ranks"]) == (1, "incomplete", [4, 5])


def test_dumps_without_calls_exit_2(tmp_path: Path, diagnose: Command) -> None:
    for rank in range(2):
        (tmp_path / f"rank_{rank}").write_bytes(EMPTY)
    code, _, err = diagnose(tmp_path)
    assert code == 2
    assert "no dump has a call. Possible reasons: TORCH_FR_BUFFER_SIZE=0" in err


def test_a_dump_without_entries_or_progress_among_others_is_named(stuck: Path, diagnose: Command) -> None:
    (stuck / "rank_0").write_bytes(EMPTY)
    found = diagnose.json(stuck)[1]
    given = {one["kind"]: one["culprit_ranks"] for one in found["findings"]}
    assert given == {"missing_rank": [2], "no_entries": [0]}


def test_the_page_names_both_ranks_of_a_mismatched_transfer(tmp_path: Path, diagnose: Command) -> None:
    programs: Programs = [[Send("0", 1, (3,))], [Recv("0", 0, (4,))]]
    job = SimulatedJob(programs, {"0": ("default_pg", [0, 1])})
    job.run()
    job.write(tmp_path / "job")
    assert diagnose(tmp_path / "job", "--html", tmp_path / "page.html")[0] == 1
    page = (tmp_path / "page.html").read_text()
    assert '<b class="warn">rank 0, sender</b>' in page
    assert '<b class="warn">rank 1, receiver</b>' in page


def test_an_output_that_cannot_be_written_exits_2(stuck: Path, tmp_path: Path, diagnose: Command) -> None:
    for option in ("-o", "--html", "--database"):
        code, _, err = diagnose(stuck, option, tmp_path / "no" / "such" / "folder")
        assert code == 2, option
        assert "cannot be written" in err


def test_dump_versions_and_formats_may_be_mixed(tmp_path: Path, diagnose: Command) -> None:
    programs, groups = training(4, 3)
    programs[1].insert(6, StaleWatchdog())
    programs[1].insert(8, CpuStall())
    job = SimulatedJob(programs, groups)
    job.run()
    job.write(tmp_path, ranks=[0, 1], version="2.5")
    job.write(tmp_path, ranks=[2], form="json")
    job.write(tmp_path, ranks=[3], frames=False)
    code, found, _ = diagnose.json(tmp_path)
    assert (code, found["suspect_ranks"]) == (1, [1])


def changed_entries(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    dump = pickle.loads(path.read_bytes())
    change(dump["entries"])
    path.write_bytes(pickle.dumps(dump, 2))


@pytest.mark.parametrize("place", [0, 3, -1])
@pytest.mark.parametrize("rank", range(4))
def test_a_rank_whose_dump_has_lost_a_call_is_not_accused(
    rank: int, place: int, stuck: Path, diagnose: Command
) -> None:
    """Rank 2 is the culprit. Its own dump may no longer show that, if the lost call may be the one that it lacks."""
    changed_entries(stuck / f"rank_{rank}", lambda entries: entries[place].update(profiling_name=None))
    _, found, err = diagnose.json(stuck)
    assert found["suspect_ranks"] == ([] if rank == 2 and place else [2])
    assert "entries are unusable (entry" in err + str(found["notes"])


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries.insert(3, dict(entries[3])),
        lambda entries: entries[3].update(state="exploded"),
        lambda entries: entries[3].pop("state"),
        lambda entries: entries[3].update(collective_seq_id=entries[3]["collective_seq_id"] + 1000),
        lambda entries: entries[3].update(input_dtypes=None),
    ],
    ids=["doubled", "unknown state", "no state", "jumping number", "no type"],
)
@pytest.mark.parametrize("rank", range(4))
def test_a_damaged_entry_of_a_healthy_job_is_not_a_fault(
    rank: int, change: Callable[[list[dict[str, Any]]], None], healthy: Path, diagnose: Command
) -> None:
    changed_entries(healthy / f"rank_{rank}", change)
    code, found, _ = diagnose.json(healthy)
    assert (code, found["verdict"], found["suspect_ranks"]) == (0, "ok", [])
