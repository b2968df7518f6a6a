"""Logs of NCCL Inspector. Those in `inspector/` were written by NCCL's own plug-in, of events made for this: four ranks
with a communicator of all and two of two ranks each, three rounds of an all_reduce of all, and in each pair an
all_gather, a reduce_scatter, an all_reduce that is too small to be kept, and a send."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from crossrank.errors import CrossrankError
from crossrank.tools.analysis.bandwidth import bandwidth
from crossrank.tools.job.collectives import match_collectives
from crossrank.tools.job.job import Job
from crossrank.tools.job.sources import find, read
from crossrank.tools.parallel import Fleet
from crossrank.tools.traces.discover import INSPECTOR, look
from crossrank.tools.traces.nccl_inspector import LEAVES_OUT, NO_START, ODD_TIME, TOO_LONG, TWICE, read_inspector
from crossrank.tools.traces.rank_trace import RankTrace

LOGS = Path(__file__).parent / "inspector"
WORLD = "0xabcdef01"


def traces(*paths: Path | str) -> list[RankTrace]:
    return read(find(list(map(str, paths))), Fleet())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def copy_without_world(folder: Path) -> None:
    for path in LOGS.iterdir():
        kept = [line for line in path.read_text().splitlines() if WORLD not in line]
        (folder / path.name).write_text("\n".join(kept) + "\n")


def test_ranks_are_positions_in_the_communicator_of_all_processes() -> None:
    found = traces(LOGS)
    assert [(one.rank, one.world_size, len(one)) for one in found] == [(rank, 4, 12) for rank in range(4)]
    groups = {(one.group.pg, one.group.desc, tuple(one.group.ranks or ())) for one in found[3].groups}
    assert groups == {(WORLD, "default_pg", (0, 1, 2, 3)), ("0x1001", "tp", (2, 3))}
    sends = [record for record in found[2].records() if record.op == "send"]
    assert [(one.peer, one.bytes, one.p2p_seq) for one in sends] == [(3, 1 << 17, number) for number in (1, 2, 3)]
    assert found[0].notes == [LEAVES_OUT]


def test_collectives_are_matched_with_the_bandwidth_of_the_plug_in() -> None:
    found = traces(LOGS)
    together = match_collectives(Job.match(found))
    rows = bandwidth(together, inputs=["logs"], by=["op", "group"]).rows
    busbw = {row["op"]: row["busbw_gb_per_s"]["p50"] for row in rows if row["busbw_gb_per_s"] is not None}
    assert [row["collectives"] for row in rows] == [3] * 7
    own: dict[str, list[float]] = {}
    for path in LOGS.iterdir():
        for line in lines(path):
            facts = line.get("coll_perf") or line["p2p_perf"]
            name = facts.get("coll") or "send/recv"
            own.setdefault(name, []).append(facts.get("coll_busbw_gbs") or facts["p2p_busbw_gbs"])
    assert busbw["all_reduce"] == pytest.approx(max(own["AllReduce"]), rel=0.01)
    assert busbw["all_gather"] == pytest.approx(max(own["AllGather"]), rel=0.01)
    assert busbw["reduce_scatter"] == pytest.approx(max(own["ReduceScatter"]), rel=0.01)
    assert busbw["send/recv"] == pytest.approx(min(own["send/recv"]), rel=0.01)
    assert together.unmatched == {}


def test_processes_are_numbered_with_a_note_if_no_communicator_has_all(tmp_path: Path) -> None:
    copy_without_world(tmp_path)
    found = traces(tmp_path)
    assert [one.rank for one in found] == [0, 1, 2, 3]
    assert sorted({tuple(one.group.ranks or ()) for trace in found for one in trace.groups}) == [(0, 1), (2, 3)]
    assert found[0].notes[1].startswith("no communicator has all processes")


def test_the_members_of_a_group_are_unknown_if_a_process_is_missing(tmp_path: Path) -> None:
    first, *_ = sorted(LOGS.iterdir())
    shutil.copy(first, tmp_path)
    (found,) = traces(tmp_path)
    assert found.rank == 0
    assert {one.group.ranks for one in found.groups if one.group.size == 4} == {None}
    assert {record.peer for record in found.records()} == {None}


def test_the_members_of_a_group_are_unknown_if_a_place_is_impossible(tmp_path: Path) -> None:
    for path in LOGS.iterdir():
        place = '"id":"0x1000","comm_name":"tp","rank":'
        (tmp_path / path.name).write_text(path.read_text().replace(f"{place}1", f"{place}7"))
    found = traces(tmp_path)
    pairs = {one.group.pg: one.group.ranks for trace in found for one in trace.groups if one.group.size == 2}
    assert [ranks for pg, ranks in sorted(pairs.items())] == [None, [2, 3]]


def test_a_verbose_log_gives_the_start_of_operations(tmp_path: Path) -> None:
    event = {
        "coll_start_ts": 1_000_000,
        "kernel_events": [{"kernel_start_ts": 1_000_010}, {"kernel_start_ts": 1_000_005}],
    }
    line = lines(sorted(LOGS.iterdir())[0])[0]
    line["coll_perf"] |= {"event_trace_ts": event, "coll_exec_time_us": 7, "coll_timing_source": "kernel_cpu"}
    path = tmp_path / "node0-pid7.log"
    path.write_text(json.dumps(line))
    trace = read_inspector(str(path))
    calls = trace.calls
    assert (calls.called[0], calls.began[0], calls.ended[0]) == (1_000_000_000, 1_000_005_000, 1_000_012_000)
    assert (trace.timed, calls.took[0]) == (True, 7000)
    assert trace.attributed == {"NCCL Inspector: the kernel, by the CPU's clock": 1}


def test_invalid_lines_are_reported_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "node0-pid7.log"
    text = sorted(LOGS.iterdir())[0].read_text()
    path.write_text(text.replace('"coll_sn":1', '"coll_sn":-1', 1) + text[:50])
    assert look(str(path)).kind == INSPECTOR
    trace = read_inspector(str(path))
    assert len(trace) == 12, "a number that cannot be read costs the number alone"
    of_line, of_call, of_number = trace.problems
    assert of_call == "1 collective without a number"
    assert of_line.startswith("line 13 is not")
    assert of_number == "values that cannot be read are unknown: coll_perf.coll_sn 1"
    path.write_text(text[:300])
    with pytest.raises(CrossrankError, match=r"has no operation that NCCL Inspector measured: line 1 is not from"):
        read_inspector(str(path))


def test_logs_next_to_a_recording_are_skipped_unless_requested(tmp_path: Path) -> None:
    for path in LOGS.iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / "trace_0.json").write_text('{"traceEvents": []}')
    found = find([str(tmp_path)])
    assert [one.kind for one in found.tasks] == ["kineto"]
    assert found.notes == ["skipped 4 log(s) of NCCL Inspector; --source inspector reads only them"]
    assert len(find([str(tmp_path)], source="inspector").tasks) == 4


@pytest.mark.parametrize(
    ("start", "took", "known", "said"),
    [(-500, 90, True, None), (-500, 2_000_000, False, TOO_LONG), (None, 90, True, NO_START)],
)
def test_a_duration_must_end_before_its_line(
    tmp_path: Path, start: int | None, took: int, known: bool, said: str | None
) -> None:
    """The other lines have start times: one without is counted."""
    given = lines(LOGS / "node0-pid100.log")
    for number, line in enumerate(given):
        operation, moment = line.get("coll_perf") or line["p2p_perf"], line["metadata"]["dump_timestamp_us"]
        name = "coll" if "coll_perf" in line else "p2p"
        own = start if number == 2 else -200
        operation["event_trace_ts"] = {} if own is None else {f"{name}_start_ts": moment + own}
        operation[f"{name}_exec_time_us"] = took if number == 2 else 90
    path = tmp_path / "a.log"
    path.write_text("".join(json.dumps(line) + "\n" for line in given))
    found = read_inspector(str(path))
    assert found.timed
    assert [began > 0 for began in found.calls.began] == [known if number == 2 else True for number in range(12)]
    assert found.unattributed == ({said: 1} if said else {})


def test_a_repeated_line_counts_once(tmp_path: Path) -> None:
    given = (LOGS / "node0-pid100.log").read_text().splitlines()
    path = tmp_path / "a.log"
    path.write_text("\n".join([*given[:4], *given[3:]]) + "\n")
    found = read_inspector(str(path))
    assert (len(found), found.unattributed) == (12, {TWICE: 1})


def test_a_line_that_is_a_day_later_than_those_around_it_has_no_time(tmp_path: Path) -> None:
    content = lines(sorted(LOGS.iterdir())[0])
    content[5]["metadata"]["dump_timestamp_us"] += 86_400_000_000
    path = tmp_path / "node0-pid7.log"
    path.write_text("".join(json.dumps(line) + "\n" for line in content))
    trace = read_inspector(str(path))
    assert [row for row, called in enumerate(trace.calls.called) if not called] == [5]
    assert (trace.calls.took[5] > 0, trace.unattributed) == (True, {ODD_TIME: 1})
