"""A rank's comms file as a trace, and its monotonic times as wall times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from crossrank.comm import UNKNOWN_STEP, CommRecord, Group
from crossrank.errors import CrossrankError
from crossrank.tools.output.frames.rank_frames import steps as steps_table
from crossrank.tools.traces.comms import IMPOSSIBLE_TIMES, STRANGE_RANKS, WallClock, read_comms, stack_of
from crossrank.tools.traces.ending import Ending
from crossrank.tools.traces.flight.dump import Frame, Raised
from crossrank.tools.traces.rank_trace import IMPOSSIBLE, RETIRED, SCHEDULED, RankGroup, RankTrace

SECOND = 1_000_000_000
WALL = 1_780_000_000 * SECOND
HEADER = {"schema": "crossrank-comms 1", "rank": 3, "world_size": 4, "host": "h", "node": "n", "boot_id": "b"}
HEADER |= {"clock": {"t": 0, "wall": WALL}, "versions": {"torch": "2.13", "driver": None}, "config": {"emit": "ALL"}}
GROUP = {"pg": "0", "size": 4, "ranks": [0, 1, 2, 3], "backend": "gloo"}
REDUCE = {"id": 7, "op": "all_reduce", "c10d": "allreduce_", "pg": "0", "bytes": 8, "t": 1000, "seq": 1}
GROUP_LINE = {"group": GROUP}
SEND = {"id": 8, "op": "send", "c10d": "send", "pg": "0", "bytes": -1, "t": 2000, "p2p_seq": 5, "peer": 1, "batch": 8}
LAST = REDUCE | {"id": 9, "t": 3000, "seq": 2, "step": 1, "api": "all_reduce", "source": "a.py:12"}
ENDED = {"reason": "exit", "dropped": 2, "filtered": "many"}


def write(path: Path, *lines: dict[str, Any], **header: Any) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in ({"header": HEADER | header}, *lines)))
    return str(path)


def trace(path: str, *ids: int, **differs: Any) -> RankTrace:
    """What is read of a file with those of the calls 7, 8 and 9, as far as it is the same with any ending."""
    first = CommRecord(id=0, op="all_reduce", c10d="allreduce_", pg="0", bytes=8, t=0)
    send = CommRecord(id=0, op="send", c10d="send", pg="0", bytes=-1, t=0, peer=1)
    last = CommRecord(
        id=0, op="all_reduce", c10d="allreduce_", pg="0", bytes=8, t=0, api="all_reduce", source="a.py:12"
    )
    of = {7: (first, 1, -1, 0, RETIRED), 8: (send, 5, 8, 0, RETIRED), 9: (last, 2, -1, 1, RETIRED)}
    found = RankTrace(rank=3, path=path, source="comms", world_size=4, version="crossrank-comms 1", host="h", node="n")
    found.records_steps, found.profiler_steps = True, frozenset()
    found.signatures = [of[one][0] for one in ids]
    for signature, one in enumerate(ids):
        _, number, batch, step, state = of[one]
        state = differs.get("states", {}).get(one, state)
        times = {"called": WALL + 1000 * (one - 6), "step": step, "state": state}
        found.calls.append(group=0, signature=signature, number=number, id=one, batch=batch, **times)
    found.groups = [RankGroup(Group(pg="0", size=4, ranks=[0, 1, 2, 3], backend="gloo"))]
    found.backend, found.clock, found.numbered_pairs = "gloo", "b", True
    found.about = {"torch": "2.13", "TRACING": "ALL"}
    found.unawaited = {ids.index(8)} if 8 in ids else set()
    return replace(found, **{name: value for name, value in differs.items() if name != "states"})


def test_a_finished_recording_has_only_finished_calls(tmp_path: Path) -> None:
    raised = {"thread": "MainThread", "error": "ValueError: x", "causes": ["y"], "frames": []}
    step, clock = {"step": {"step": 1, "t": 2500}}, {"clock": {"t": 4000, "wall": WALL + 4000}}
    end = {"end": ENDED | {"exceptions": [raised, raised | {"thread": "loader"}]}}
    path = write(tmp_path / "c", {"group": GROUP}, REDUCE, SEND, step, {"step": {"step": 2}}, LAST, clock, end)
    ending = Ending(reason="exit", ended=True, error="ValueError: x", causes=("y",))
    ending.of_threads = [Raised(thread="loader", error="ValueError: x", causes=["y"])]
    whole = {"ending": ending, "dropped": 2, "steps": [(1, WALL + 2500)], "span": (WALL, WALL + 4000)}
    assert read_comms(path, 3) == trace(path, 7, 8, 9, **whole, skipped=(0, 0))
    assert read_comms(path, steps=(0, 1)) == trace(path, 7, 8, **whole, skipped=(1, 8), until=WALL + 3000)
    assert read_comms(path, steps=(1, 2)) == trace(path, 9, **whole, skipped=(2, 8))  # sizes below 0 count as none


def test_the_steps_in_which_a_window_opens_or_closes_are_those_of_the_profiler(tmp_path: Path) -> None:
    steps = [{"step": {"step": number, "t": 1000 * number}} for number in range(1, 6)]
    edges = [{"window": {"window": 1, "edge": edge, "t": t}} for edge, t in (("open", 2900), ("close", 4000))]
    found = read_comms(write(tmp_path / "c", {"group": GROUP}, REDUCE, *steps, *edges, {"end": ENDED}))
    assert found.profiler_steps == frozenset([2, 4])
    assert steps_table(found, pl.DataFrame())["profiler"].to_list() == [False, True, False, True, False]


def groups_of_calls(trace: RankTrace) -> list[tuple[str, list[int] | None]]:
    groups = [trace.groups[one].group for one in trace.calls.group]
    return [(group.pg, group.ranks) for group in groups]


def test_the_groups_of_each_epoch_have_names_of_their_own(tmp_path: Path) -> None:
    groups = [{"group": GROUP | {"size": 2, "ranks": ranks, "epoch": n}} for n, ranks in enumerate(([2, 3], [3, 1]))]
    calls = [REDUCE | {"id": id, "epoch": epoch} for id, epoch in enumerate((0, 1, 0))]
    trace = read_comms(write(tmp_path / "c", *groups, *calls))
    assert groups_of_calls(trace) == [("0", [2, 3]), ("0 (no. 2)", [3, 1]), ("0", [2, 3])]


@pytest.mark.parametrize(("until", "taken_at"), [(4000, WALL + 4000), (3000, None), (0, None), ((1 << 62) - 1, None)])
def test_the_last_call_and_isends_of_an_unfinished_recording_are_unfinished(
    tmp_path: Path, until: int, taken_at: int | None
) -> None:
    path = write(tmp_path / "c", {"group": GROUP}, REDUCE, SEND, LAST, {"clock": {"t": until}}, {"clock": {}})
    assert read_comms(path) == trace(
        path,
        *(7, 8, 9),
        states={8: SCHEDULED, 9: SCHEDULED},
        ending=Ending(taken_at=taken_at, unseen=True),
        notes=[f"{path}: has no last line: the process died, or still runs"],
    )


def test_a_stopped_rank_may_still_be_in_its_last_call(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c", {"group": GROUP}, REDUCE, SEND | {"api": "send"}, {"end": {"reason": "SIGTERM"}}, world_size=1
    )
    found = read_comms(path)
    assert (list(found.calls.state), found.unawaited) == ([RETIRED, SCHEDULED], set())
    assert (found.span, found.world_size) == ((WALL, WALL + 2000), 1)


def test_invalid_header_and_record_values_are_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "c", REDUCE | {"t": -WALL - 1, "id": 1 << 61, "step": 1 << 31}, {"end": {}}, world_size=0)
    found = read_comms(path)
    assert (found.world_size, found.unattributed) == (None, {IMPOSSIBLE: 1, IMPOSSIBLE_TIMES: 1})
    calls = found.calls
    assert (*calls.called, *calls.step, *calls.number, *calls.id) == (0, UNKNOWN_STEP, 1, 1 << 61)
    assert read_comms(write(tmp_path / "e", {"end": {}})).span == (WALL, WALL)
    assert found.notes == [f"{path}: reports 0 ranks for the job, which is not a valid number"]
    (tmp_path / "d").write_text("{}")
    with pytest.raises(CrossrankError, match="d: line 1 is not a crossrank header; record it again"):
        read_comms(str(tmp_path / "d"))


@pytest.mark.parametrize(
    ("source", "filename", "line"),
    [("a.py:12", "a.py", 12), ("C:b.py:123456789", "C:b.py", 123456789), ("a:1234567890", "a", 0), ("a:²", "a", 0)],
)
def test_the_source_line_of_a_record_is_a_stack_of_one_frame(source: str, filename: str, line: int) -> None:
    record = CommRecord(id=0, op="send", c10d="send", pg="", bytes=0, t=0, source=source)
    assert stack_of(record) == (Frame(name="(C++)", filename=filename, line=line),)


# --- clocks -----------------------------------------------------------------------------------------------------------


def test_the_clock_offset_is_interpolated_between_two_readings() -> None:
    clock = WallClock(
        [{"t": 2 * SECOND, "wall": WALL + 2 * SECOND}, {"t": 12 * SECOND, "wall": WALL + 12 * SECOND + 4000}]
    )
    assert [clock.at(second * SECOND) - WALL - second * SECOND for second in (2, 7, 12)] == [0, 2000, 4000]


def test_the_first_and_last_clock_offsets_apply_outside_the_readings() -> None:
    clock = WallClock([{"t": SECOND, "wall": WALL}, {"t": 11 * SECOND, "wall": WALL + 10 * SECOND + 4000}])
    assert (clock.at(0), clock.at(21 * SECOND)) == (WALL - SECOND, WALL + 20 * SECOND + 4000)


def test_a_clock_change_is_removed_from_times_and_its_size_is_reported() -> None:
    moments = [{"t": 0, "wall": WALL}, {"t": 10 * SECOND, "wall": WALL + 15 * SECOND}]
    moments.append({"t": 20 * SECOND, "wall": WALL + 25 * SECOND + 1000})
    clock = WallClock(moments)
    assert clock.set_by == 5 * SECOND
    assert [clock.at(second * SECOND) - WALL for second in (5, 10, 20)] == [5 * SECOND, 10 * SECOND, 20 * SECOND + 1000]


@pytest.mark.parametrize(("by", "set_by"), [(11_000_000, 0), (11_000_001, 11_000_001), (-11_000_001, -11_000_001)])
def test_a_clock_jump_beyond_normal_drift_counts_as_a_change(by: int, set_by: int) -> None:
    moments = [(5, 0), (10, 1000), (20, 1000 + by)]
    clock = WallClock({"t": at * SECOND, "wall": WALL + at * SECOND + off} for at, off in moments)
    assert (clock.set_by, clock.at(20 * SECOND) - WALL - 20 * SECOND) == (set_by, 1000 + by - set_by)


def test_readings_without_a_clock_or_going_back_are_skipped() -> None:
    assert WallClock([{"t": 10, "wall": WALL}, {"t": 20}, {"t": 5, "wall": 0}, {}]).at(20) == WALL + 10
    assert WallClock([{}]).at(7) == 7


def test_waits_are_joined_to_their_calls_and_placed_before_the_next_call(tmp_path: Path) -> None:
    def wait(t: int, took: int, **more: object) -> dict[str, Any]:
        return {"wait": {"t": t, "took": took, "thread": 5, **more}}

    lines = (
        *({"group": GROUP}, REDUCE, SEND, wait(2500, 100, id=7), LAST, wait(3500, 10, id=7), wait(3600, 5)),
        *(wait(1000, 1, id=8, **{"in": "launch"}), wait(-2 * WALL, 1, id=8), {"end": ENDED}),
    )
    found = read_comms(write(tmp_path / "rank-3.comms.jsonl", *lines))
    host = found.host_waits
    assert list(zip(host.row, host.began, host.ended, host.waited_in, strict=True)) == [
        (0, WALL + 2500, WALL + 2600, 0),
        (0, WALL + 3500, WALL + 3510, 0),
        (-1, WALL + 3600, WALL + 3605, 0),
        (1, WALL + 1000, WALL + 1001, 2),
    ]
    assert found.unattributed[IMPOSSIBLE_TIMES] == 1
    assert found.waits is not None
    assert list(found.waits.before) == [2, -1, -1]
    assert (found.waits.recorded, list(found.waits.blocking)) == (1, [-1, -1, -1])


def test_times_before_the_start_of_the_recording_are_unknown(tmp_path: Path) -> None:
    start = 100 * SECOND
    clock = {"clock": {"t": start, "wall": WALL}}
    steps = [{"step": {"step": number, "t": 0 if number == 2 else start + number * SECOND}} for number in range(1, 5)]
    waits = [{"wait": {"id": 7, "t": t, "took": 10, "in": "wait", "thread": 1}} for t in (start + 5000, 0)]
    ran = [{"ran": {"id": number, "t": 0, "took": 10}} for number in (7, 9)]
    calls = REDUCE | {"t": start + 1000}, LAST | {"t": 0}
    found = read_comms(write(tmp_path / "c", GROUP_LINE, *calls, *waits, *ran, *steps, **clock))
    assert list(found.calls.called) == [WALL + 1000, 0]
    assert (list(found.calls.began), list(found.host_waits.began)) == ([0, 0], [WALL + 5000])
    assert found.unattributed == {IMPOSSIBLE_TIMES: 5}
    # Step 2 is lost, so the end of step 1 is unknown.
    assert found.step_spans == [(3, WALL + 3 * SECOND, WALL + 4 * SECOND)]
    assert steps_table(found, pl.DataFrame())["duration_ns"].to_list() == [None, SECOND, None]


def test_a_line_without_a_kind_is_counted(tmp_path: Path) -> None:
    found = read_comms(write(tmp_path / "c", GROUP_LINE, REDUCE, {}, {"from the future": 5}, {"end": {}}))
    assert len(found) == 1
    assert found.notes == [
        f"{tmp_path / 'c'}: 2 values that this version of crossrank does not know are unknown here (kind of a line 2)"
    ]


def test_an_unknown_step_is_not_the_first_one(tmp_path: Path) -> None:
    found = read_comms(write(tmp_path / "c", GROUP_LINE, REDUCE | {"step": "abc"}, LAST, {"end": {}}))
    assert list(found.calls.step) == [UNKNOWN_STEP, 1]


@pytest.mark.parametrize("place", ["peer", "root"])
@pytest.mark.parametrize("rank", [4, 42, -1])
def test_a_rank_outside_of_the_job_is_unknown(tmp_path: Path, place: str, rank: int) -> None:
    found = read_comms(write(tmp_path / "c", GROUP_LINE, SEND | {place: rank}, LAST, {"end": {}}))
    first = found.signatures[found.calls.signature[0]]
    assert (first.peer, first.root) == (None, None)
    assert found.unattributed[STRANGE_RANKS] == 1


def test_a_time_after_the_last_one_of_the_file_is_unknown(tmp_path: Path) -> None:
    clock = {"clock": {"t": 10 * SECOND, "wall": WALL + 10 * SECOND}}
    far = LAST | {"t": 86_400 * SECOND}
    wait = {"wait": {"id": 7, "t": 2000, "took": 10**17, "thread": 1}}
    found = read_comms(write(tmp_path / "c", GROUP_LINE, REDUCE, far, wait, clock, {"end": {}}))
    assert (list(found.calls.called), len(found.host_waits)) == ([WALL + 1000, 0], 0)
    assert found.unattributed == {IMPOSSIBLE_TIMES: 2}


def test_a_line_that_cannot_be_read_may_be_a_call(tmp_path: Path) -> None:
    path = write(tmp_path / "c", GROUP_LINE, REDUCE, LAST)
    with Path(path).open("a") as file:
        file.write('{"id":10,"op":"all_red\n')
    assert read_comms(path).lost_after == 9


def test_a_dump_has_calls_from_long_before_its_moment() -> None:
    dump, file = (WallClock([{"t": 900 * SECOND, "wall": WALL}], starts=starts) for starts in (False, True))
    assert (dump.is_possible(0), file.is_possible(0), file.is_possible(2000 * SECOND)) == (True, False, True)


def test_a_number_that_jumps_and_returns_is_corrected(tmp_path: Path) -> None:
    calls = [REDUCE | {"id": 7 + n, "t": 1000 + n, "seq": 1005 if n == 2 else n + 1} for n in range(5)]
    found = read_comms(write(tmp_path / "c", GROUP_LINE, *calls, {"end": {}}))
    assert list(found.calls.number) == [1, 2, 3, 4, 5]
    assert found.problems == ["1 calls have a number that is not between those of the calls around them"]
    assert found.lost_after is None


def test_numbers_in_another_order_stay(tmp_path: Path) -> None:
    calls = [REDUCE | {"id": 7 + n, "t": 1000 + n, "seq": seq} for n, seq in enumerate((1, 3, 2, 4))]
    found = read_comms(write(tmp_path / "c", GROUP_LINE, *calls, {"end": {}}))
    assert (list(found.calls.number), found.problems) == ([1, 3, 2, 4], [])


def test_waits_and_ends_of_an_id_that_two_calls_have_belong_to_neither(tmp_path: Path) -> None:
    waits = [{"wait": {"id": number, "t": 5000, "took": 10, "thread": 5}} for number in (7, 9)]
    calls = REDUCE, REDUCE | {"seq": 2}, LAST | {"seq": 3}
    ran = {"ran": {"id": 7, "t": 1000, "took": 10}}
    found = read_comms(write(tmp_path / "c", GROUP_LINE, *calls, *waits, ran, {"end": {}}))
    assert list(found.host_waits.row) == [-1, 2]
    assert list(found.calls.began) == [0, 0, 0]
    assert found.problems == ["ids of several calls: 1 id, whose ends and waits are unknown"]


@pytest.mark.parametrize("ranks", [[0, 1, 2, 9], [0, 1, 1, 2], [-1, 0, 1, 2]])
def test_members_outside_of_the_job_are_unknown(tmp_path: Path, ranks: list[int]) -> None:
    found = read_comms(write(tmp_path / "c", {"group": GROUP | {"ranks": ranks}}, REDUCE, {"end": {}}))
    assert found.groups[0].group.ranks is None
    assert found.problems == ["the ranks of group '0' are not ranks of the job: they are unknown"]


def test_a_call_that_the_file_has_twice_counts_once(tmp_path: Path) -> None:
    found = read_comms(write(tmp_path / "c", GROUP_LINE, REDUCE, REDUCE, LAST, {"end": {}}))
    assert list(found.calls.id) == [7, 9]
    assert found.problems == ["1 call that the file has twice: counted once"]


def test_a_call_of_an_unknown_group_or_without_a_number_may_be_any_call(tmp_path: Path) -> None:
    found = read_comms(write(tmp_path / "c", GROUP_LINE, REDUCE, LAST | {"pg": "77"}, {"end": {}}))
    assert (found.lost_after, found.problems) == (9, ["1 call on a group that the file does not have"])
    found = read_comms(write(tmp_path / "c", GROUP_LINE, REDUCE, LAST | {"seq": None}, {"end": {}}))
    assert (found.lost_after, found.problems) == (9, ["1 collective without a number"])


def test_a_size_that_cannot_be_read_costs_itself_alone(tmp_path: Path) -> None:
    found = read_comms(write(tmp_path / "c", GROUP_LINE, REDUCE | {"bytes": 1 << 63}, LAST, {"end": {}}))
    assert [one.bytes for one in found.records()] == [-1, 8]
    assert found.lost_after is None


def test_a_broken_line_of_another_kind_hides_no_call(tmp_path: Path) -> None:
    path = write(tmp_path / "c", GROUP_LINE, REDUCE, LAST)
    with Path(path).open("a") as file:
        file.write('{"wait":broken\n{"end":broken\n')
    assert read_comms(path).lost_after is None
