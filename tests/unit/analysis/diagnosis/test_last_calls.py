"""What the last calls of every group say of a hang is what all of them say."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import zstandard

from crossrank.tools.analysis.diagnosis import call_history
from crossrank.tools.analysis.diagnosis.diagnose import diagnose
from crossrank.tools.analysis.diagnosis.evidence import Evidence, find_candidates, read_evidence
from crossrank.tools.analysis.diagnosis.findings import Diagnosis
from crossrank.tools.parallel import Fleet
from crossrank.tools.traces.growing import last_call_at
from tests.unit.analysis.diagnosis.moments import SECOND, Moment, write_moments
from tests.unit.analysis.diagnosis.random_faults import SEEDS, write_files
from tests.unit.analysis.diagnosis.simulated_jobs import Collective, CpuStall, Groups, Programs, SimulatedJob
from tests.unit.analysis.diagnosis.test_comms_beside import START, all_reduce, write_comms
from tests.unit.analysis.diagnosis.verdicts import diagnosis_of, roots

WORLD: Groups = {"0": ("default_pg", [0, 1, 2])}


def read_last(folder: Path, last: int) -> Evidence:
    return read_evidence(find_candidates([str(folder)]), Fleet(), last=last)


def of_last(folder: Path, last: int) -> Diagnosis:
    return diagnose(read_last(folder, last))[0]


def without_history(found: Diagnosis) -> list[str]:
    return sorted(f"{one.kind} {one.pg[1]} {one.culprit_ranks} <- {one.waiting_ranks}" for one in found.findings)


@pytest.mark.parametrize("first", SEEDS[:200:100])
def test_last_calls_give_the_same_verdict_on_random_faults(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_history, "WINDOW", 8)  # so many calls are looked back at, here as there
    shortened = 0
    for seed in SEEDS[first : first + 100]:
        with tempfile.TemporaryDirectory() as folder:
            write_files(seed, Path(folder))
            try:
                whole = diagnosis_of(Path(folder))
            except Exception as error:  # files of several jobs
                with pytest.raises(type(error)):
                    of_last(Path(folder), 1)
                continue
            shortened += any(one.dump.left_out for one in read_last(Path(folder), 8).ranks)
            assert of_last(Path(folder), 1).verdict == whole.verdict, seed
            assert without_history(of_last(Path(folder), 8)) == without_history(whole), seed
    assert shortened > 10


def test_calls_finished_on_only_some_ranks_are_read(tmp_path: Path) -> None:
    # The root of a broadcast is done with it before the others have begun: here it is 97 ahead of rank 2.
    programs: Programs = [[Collective("0", "broadcast")] * 100 for _ in range(3)]
    write_moments(SimulatedJob(programs, WORLD), tmp_path, dict.fromkeys(range(3), Moment()))
    path = tmp_path / "rank-2.flight.json"
    dump = json.loads(path.read_text())
    dump["entries"] = dump["entries"][:3]
    dump["entries"][2] |= {"state": "started", "time_discovered_completed_ns": 0, "retired": False}
    dump["pg_status"]["0"] |= {"last_enqueued_collective": "3", "last_completed_collective": "2"}
    path.write_text(json.dumps(dump))

    found = read_last(tmp_path, 4)

    assert [(one.rank, len(one), one.dump.left_out) for one in found.ranks] == [(0, 100, 0), (1, 100, 0), (2, 3, 0)]
    assert roots(diagnose(found)[0]) == roots(diagnosis_of(tmp_path))


def test_a_hang_after_many_calls_needs_only_the_last_calls(tmp_path: Path) -> None:
    programs: Programs = [[Collective("0")] * 200 for _ in range(3)]
    programs[1].append(CpuStall())
    for program in programs:
        program.append(Collective("0"))
    write_moments(SimulatedJob(programs, WORLD), tmp_path, dict.fromkeys(range(3), Moment()))
    evidence = read_last(tmp_path, 4)
    assert [one.dump.left_out for one in evidence.ranks] == [196, 196, 196]
    found = diagnose(evidence)[0]
    assert roots(found) == roots(diagnosis_of(tmp_path)) == [("missing_rank", "default_pg", 201, [1], [0, 2])]
    assert "crossrank read only the unfinished calls of each dump and 4 calls before them (--last)" in found.notes


@pytest.mark.parametrize("goes_on", [False, True])
def test_comms_files_are_read_if_they_continue_after_the_dump_or_it_is_missing(goes_on: bool, tmp_path: Path) -> None:
    programs: Programs = [[Collective("0")] * 20 for _ in range(3)]
    write_moments(SimulatedJob(programs, WORLD), tmp_path, dict.fromkeys(range(2), Moment(reason="window")))
    for rank in range(3):
        calls = 40 if goes_on else 1
        write_comms(tmp_path, rank, [all_reduce(seq + 1) for seq in range(calls)], groups=WORLD, until=60)
        _compress(tmp_path / f"rank-{rank}.comms.jsonl")
    sources = {one.rank: one.source for one in read_last(tmp_path, 4).ranks}
    assert sources == dict.fromkeys((0, 1), "comms" if goes_on else "flight") | {2: "comms"}


@pytest.mark.parametrize("seconds", [2, 30])
def test_a_rank_that_continues_is_not_accused_and_hides_no_rank(seconds: int, tmp_path: Path) -> None:
    programs: Programs = [[Collective("0")] * 20 for _ in range(3)]
    programs[1][19:] = [CpuStall()]
    write_moments(SimulatedJob(programs, WORLD), tmp_path, dict.fromkeys(range(3), Moment()))
    for rank in range(3):
        dump = json.loads((tmp_path / f"rank-{rank}.flight.json").read_text())
        first, taken = dump["entries"][0]["time_created_ns"], dump["crossrank"]["time_ns"]
        begin = (int(first) - START) // SECOND
        records = [all_reduce(seq + 1) | {"t": begin * SECOND} for seq in range(19 if rank == 1 else 20)]
        if rank == 1:
            records.append(all_reduce(20) | {"t": int(taken) - START + seconds * SECOND})
        write_comms(tmp_path, rank, records, groups=WORLD, until=1e6)
        _compress(tmp_path / f"rank-{rank}.comms.jsonl")

    found = of_last(tmp_path, 8)

    assert len(found.ranks) == 3
    assert without_history(found) == without_history(diagnosis_of(tmp_path))


def test_a_finished_coalesced_launch_is_kept_or_skipped_as_a_whole(tmp_path: Path) -> None:
    part = Collective("0", "_reduce_scatter_base")
    coalesced = Collective("0", "reduce_scatter_tensor_coalesced", members=(part, part))
    calls = [Collective("0")] * 4 + [coalesced] + [Collective("0")] * 30
    programs: Programs = [[*calls] for _ in range(3)]
    write_moments(SimulatedJob(programs, WORLD), tmp_path, dict.fromkeys(range(3), Moment()))
    assert diagnosis_of(tmp_path).verdict == "ok"
    for last in (1, 8, 31):
        assert of_last(tmp_path, last).verdict == "ok"


def test_the_last_call_of_a_long_file_is_found_at_its_end(tmp_path: Path) -> None:
    records = [all_reduce(seq + 1) | {"source": f"train.py:{seq * 7919 % 104_729}"} for seq in range(20_000)]
    write_comms(tmp_path, 0, records, groups=WORLD, until=30_000)
    path = tmp_path / "rank-0.comms.jsonl"
    assert last_call_at(str(path)) is None  # it is not in frames
    whole = _compress(path)
    assert last_call_at(str(whole)) == START + 19_999 * SECOND
    whole.write_bytes(whole.read_bytes() + b"\x28\xb5\x2f\xfd torn")
    assert last_call_at(str(whole)) == START + 19_999 * SECOND


def _compress(path: Path) -> Path:
    """Put a file of lines into frames of a few lines each, as the recorder does."""
    lines = path.read_bytes().splitlines(keepends=True)
    frames = [b"".join(lines[at : at + 50]) for at in range(0, len(lines), 50)]
    target = path.with_name(path.name + ".zst")
    target.write_bytes(b"".join(map(zstandard.ZstdCompressor(level=3).compress, frames)))
    path.unlink()
    return target
