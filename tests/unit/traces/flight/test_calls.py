"""The entries of a flight-recorder dump as calls: launches, states, groups, and what our own dumps carry beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crossrank.comm import Group, has_size
from crossrank.tools.analysis.diagnosis.mismatches import contradiction
from crossrank.tools.traces.flight.calls import GLOO_ALONE, SAME_TIME, read_flight
from crossrank.tools.traces.flight.dump import Frame, Progress
from crossrank.tools.traces.rank_trace import COMPLETED, RETIRED, SCHEDULED, STARTED, RankTrace
from tests.unit.traces.flight_entries import flight_entry as entry

DONE: dict[str, Any] = {"state": "completed", "duration_ms": 0.5, "retired": True}
DONE |= {"time_discovered_started_ns": 7000, "time_discovered_completed_ns": 9000}


def read(
    folder: Path, *entries: dict[str, Any], completed: dict[str, int] | None = None, own: bool = False, **content: Any
) -> RankTrace:
    config = {number: {"name": number, "desc": f"group {number}", "ranks": "[4, 6]"} for number in ("0", "1")}
    status = {pg_id: {"last_completed_collective": done} for pg_id, done in (completed or {}).items()}
    whole = {"version": "2.10", "pg_config": config, "pg_status": status, "entries": entries} | content
    (folder / "dump").write_text(json.dumps(whole))
    return read_flight(str(folder / "dump"), 4, own_calls=own)


STATES = {SCHEDULED: "scheduled", STARTED: "started", COMPLETED: "completed", RETIRED: "retired"}


def rows(trace: RankTrace) -> list[str]:
    """Operation, number, id and state of every call, its batch and members if there are some, its bytes if not 16."""
    found, calls = [], trace.calls
    columns = (calls.signature, calls.number, calls.id, calls.batch, calls.state)
    for signature, number, id, batch, state in zip(*columns, strict=True):
        kind = trace.signatures[signature]
        text = f"{kind.op} {number} id {id} {STATES[state]}" + f" in batch {batch}" * (batch != -1)
        text += f" of {kind.bytes} B" * (kind.bytes != 16)
        found.append(": ".join([text, *filter(None, [", ".join(member.op for member in kind.members)])]))
    return found


SEND, RECEIVE = entry(0, "send 0->1", p2p=3), entry(1, "recv 0<-1", p2p=3)
GATHERS = [entry(number, "all_gather", 5) for number in (0, 1)]


@pytest.mark.parametrize(
    ("entries", "calls"),
    [
        (
            [entry(0, "all_reduce", 1, **DONE), entry(1, "all_reduce", 2, state="started"), entry(2, "barrier", 3)],
            ["all_reduce 1 id 0 completed", "all_reduce 2 id 1 started", "barrier 3 id 2 scheduled of 0 B"],
        ),
        (
            [SEND, RECEIVE, entry(2, "coalesced", p2p=3, **DONE)],
            ["send 3 id 0 completed in batch 0", "recv 3 id 1 completed in batch 0"],
        ),
        ([SEND, entry(1, "coalesced", p2p=3, **DONE)], ["send 3 id 0 completed"]),
        ([SEND, RECEIVE], ["send 3 id 0 scheduled", "recv 3 id 1 scheduled"]),
        (
            [*GATHERS, entry(2, "coalesced", 5, **DONE), entry(3, "all_reduce", 6)],
            ["all_gather 5 id 2 completed of 32 B: all_gather, all_gather", "all_reduce 6 id 3 scheduled"],
        ),
        (
            [GATHERS[0], entry(1, "broadcast", 5), entry(2, "coalesced", 5)],
            ["coalesced 5 id 2 scheduled of 32 B: all_gather, broadcast"],
        ),
        ([GATHERS[0], entry(1, "all_reduce_coalesced", 5)], ["all_reduce 5 id 1 scheduled: all_gather"]),
        (GATHERS, ["all_gather 5 id 1 scheduled of 32 B: all_gather, all_gather"]),
        # Of a ring that has gone round, the first launch may lack members.
        ([entry(7, "coalesced", 5), entry(8, "all_reduce", 6)], ["all_reduce 6 id 8 scheduled"]),
        (
            [entry(7, "all_gather", 5), entry(8, "coalesced", 5), entry(9, "broadcast", 6), entry(10, "coalesced", 6)],
            ["all_gather 5 id 8 scheduled", "broadcast 6 id 10 scheduled: broadcast"],
        ),
        (
            [entry(0, "gloo:all_reduce", 1, retired=True), entry(1, "gloo:all_reduce", 2)],
            ["all_reduce 1 id 0 retired", "all_reduce 2 id 1 scheduled"],
        ),
        ([entry(0, "ucc:all_reduce", 1, retired=True)], ["all_reduce 1 id 0 retired"]),
        (
            [entry(0, "ucc:all_reduce", 1, retired=True), entry(1, "ucc:all_reduce", 2, **DONE)],
            ["all_reduce 1 id 0 scheduled", "all_reduce 2 id 1 completed"],
        ),
        ([entry(0, "all_reduce", 1, retired=True)], ["all_reduce 1 id 0 scheduled"]),
    ],
)
def test_entries_are_calls_and_launches(tmp_path: Path, entries: list[dict[str, Any]], calls: list[str]) -> None:
    trace = read(tmp_path, *entries)
    assert rows(trace) == calls
    assert trace.dump.wrapped == trace.starts_late == (entries[0]["record_id"] > 0)
    for row, state in enumerate(trace.calls.state):
        times = (trace.calls.began[row], trace.calls.ended[row], trace.calls.took[row])
        assert times == ((7000, 9000, 500_000) if state == COMPLETED else (0, 0, 0))


def test_an_entry_gives_the_fields_of_its_call(tmp_path: Path) -> None:
    frames = [{"name": "f", "filename": "a.py", "line": 3}]
    out: dict[str, Any] = {"output_sizes": [[4], [4]], "frames": frames}
    trace = read(
        tmp_path,
        entry(0, "gather", 1, **out),
        entry(1, "scatter", 2, input_sizes=[[4], [4]]),
        entry(2, "gather", 3, output_sizes=[]),
        entry(3, "send 0->1", p2p=1, group="1", collective_seq_id=4),
        entry(4, "recv 0<-2", p2p=2, output_sizes=[], output_dtypes=[], group="1"),
        entry(5, "all_reduce", 5, output_dtypes=["Half"], process_group=("", "")),
    )
    said = [(one.pg, one.root, one.peer, one.inputs, one.outputs, one.dtype, one.out_dtype) for one in trace.signatures]
    pair: list[list[int]] = [[4], [4]]
    assert said == [
        ("0", 4, None, [[4]], pair, "float32", None),
        ("0", 4, None, pair, [[4]], "float32", None),
        ("0", None, None, [[4]], [], "float32", None),
        ("1", None, 6, [[4]], [[4]], "float32", None),
        ("1", None, 2, [], [[4]], "float32", None),
        ("", None, None, [[4]], [[4]], "float32", "float16"),
    ]
    groups = [Group(pg=name, desc=f"group {name}", size=2, ranks=[4, 6]) for name in ("0", "1")]
    assert [one.group for one in trace.groups] == [*groups, Group(pg="", size=0)]
    assert (list(trace.calls.stack), trace.stacks[1]) == ([1, 0, 0, 0, 0, 0], (Frame("f", "a.py", 3),))
    assert list(trace.calls.called) == list(range(1000, 1006))
    assert trace.dump.collectives_seen == {0: 3, 1: 4, 2: 5}
    assert trace.dump.with_p2p == {1}
    assert (trace.rank, trace.timed_by, trace.placed, trace.notes) == (4, "flight", False, [])


@pytest.mark.parametrize(
    ("entries", "completed", "progress", "all_joined"),
    [
        ([], {}, {}, False),
        ([entry(0, "all_reduce", 1, group="1")], {"1": 1, "5": 1}, {1: 1}, False),
        ([entry(0, "all_reduce", 1, group="1", pg_id=7)], {"3": 1, "7": 2}, {0: 1, 1: 2}, True),
        ([], {"1": 2}, {1: 2}, True),
        ([], {"2": 2}, {}, False),
        ([entry(0, "all_reduce", 1, group="1", pg_id=0)], {"0": 1, "1": 2}, {1: 1}, False),
        ([entry(0, "all_reduce", 1), entry(1, "gloo:all_reduce", 1, pg_id=5)], {"0": 1, "1": 1}, {0: 1}, False),
        ([entry(0, "all_reduce", 1, process_group=("dp", ""))], {"0": 1, "1": 1, "2": 1}, {2: 1}, False),
    ],
)
def test_a_status_is_matched_to_its_group_by_entries_or_position(
    tmp_path: Path, entries: list[dict[str, Any]], completed: dict[str, int], progress: dict[int, int], all_joined: bool
) -> None:
    state = read(tmp_path, *entries, completed=completed).dump
    assert state.progress == {group: Progress(-1, done) for group, done in progress.items()}
    assert (state.has_status, state.all_joined) == (bool(completed), all_joined)


def later(number: int) -> dict[str, Any]:
    return entry(number, "all_reduce", 4)


@pytest.mark.parametrize(
    ("entries", "completed", "states"),
    [
        # Without a status, a gap between the entries shows that some were left out.
        ([later(0), entry(2, "all_reduce", 5)], {}, [SCHEDULED] * 2),
        ([later(0), entry(1, "all_reduce", 5)], {}, None),
        ([later(4)], {"0": 3}, [SCHEDULED]),
        ([later(4)], {"0": 1, "1": 1}, None),
        ([later(4)], {"0": 2}, None),
        ([later(4)], {"1": 1}, [SCHEDULED]),
        ([later(4)], {"1": 0}, None),
        ([entry(0, "all_reduce", 1)], {"0": -1, "1": 1}, [SCHEDULED]),
        ([entry(0, "all_reduce", 2)], {"0": -1, "1": 1}, None),
        ([later(4), entry(5, "all_reduce", 9)], {"0": 3}, [SCHEDULED] * 2),
        ([entry(0, "send 0->1", 9, p2p=1)], {"0": 3}, [SCHEDULED]),
        ([entry(0, "send 0->1", 9, p2p=1, is_p2p=None)], {"0": 3}, [SCHEDULED]),
        ([later(4) | DONE, entry(6, "all_reduce", 9)], {"0": 3}, None),
        ([entry(0, "gloo:all_reduce", 4), entry(2, "gloo:all_reduce", 5)], {}, None),
        ([entry(0, "gloo:all_reduce", 9), later(1)], {"0": 3}, [SCHEDULED] * 2),
        # A batch is over where the status has its number, or where its closing entry is not there and later ones are.
        ([SEND, RECEIVE], {"0": 3}, [COMPLETED] * 2),
        ([SEND, RECEIVE, later(5)], {"0": 4}, [COMPLETED] * 2 + [SCHEDULED]),
        ([SEND, RECEIVE, later(2)], {"0": 2}, None),
        ([SEND, RECEIVE, later(5)], {"1": 3}, [COMPLETED] * 2 + [SCHEDULED]),
        ([SEND, RECEIVE, later(2)], {"1": 3}, [SCHEDULED] * 3),
        ([SEND, RECEIVE], {"1": 3}, [SCHEDULED] * 2),
        ([SEND, later(5)], {"1": 3}, [SCHEDULED] * 2),
        ([SEND, RECEIVE], {"0": 2}, [SCHEDULED] * 2),
        ([SEND, RECEIVE, entry(2, "coalesced", p2p=3)], {"0": 3}, [SCHEDULED] * 2),
        ([*(entry(n, "all_gather", 4) for n in (0, 1)), entry(5, "barrier", 5)], {"0": 3}, [COMPLETED, SCHEDULED]),
        ([SEND | {"collective_seq_id": 1}], {"0": 3}, [SCHEDULED]),
    ],
)
def test_a_dump_without_completed_calls_is_recognized(
    tmp_path: Path, entries: list[dict[str, Any]], completed: dict[str, int], states: list[int] | None
) -> None:
    trace = read(tmp_path, *entries, completed=completed)
    assert trace.dump.active_only == (states is not None)
    assert trace.dump.wrapped == (states is None and entries[0]["record_id"] > 0)
    assert states in (None, list(trace.calls.state))


def test_a_status_counts_sends_if_their_number_is_the_last(tmp_path: Path) -> None:
    status = {"0": {"last_enqueued_collective": 3, "last_completed_collective": 3}}
    sends = [entry(0, "send 0->1", 1, p2p=2), entry(1, "send 0->1", 1, p2p=3)]
    assert list(read(tmp_path, *sends, pg_status=status).calls.state) == [COMPLETED] * 2


# --- what our own dumps carry beside torch's entries ------------------------------------------------------------------

CALL = {"op": "all_reduce", "c10d": "allreduce_", "pg": "0", "bytes": 16}


def moment(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    wall = {"clock": {"t": 0, "wall": 0}, "calls": [CALL | call for call in calls]}
    return {"rank": 4, "world_size": 8, "host": "h", "reason": "hang", "time_ns": 99} | wall | fields


def groups_of_calls(trace: RankTrace) -> list[str]:
    assert all(trace.signatures[kind].pg == trace.groups[one].group.pg for kind, one in rows_of(trace))
    return [trace.groups[one].group.pg for _, one in rows_of(trace)]


def rows_of(trace: RankTrace) -> list[tuple[int, int]]:
    return list(zip(trace.calls.signature, trace.calls.group, strict=True))


LATER = 1000 + 10 * SAME_TIME
# (pg_id, number, time)
FIRST, SECOND = (0, 1, 1000), (3, 1, LATER)


@pytest.mark.parametrize(
    ("made", "calls", "entries", "epochs"),
    [
        ([], [], [FIRST, (0, 2, 1001), SECOND], [-1, -1, 0]),
        ([], [], [FIRST, SECOND, (0, 2, LATER)], [0, 0, 0]),  # two groups of one name at the same time
        ([LATER], [], [FIRST, SECOND], [-1, 0]),  # the recording begins with the second group
        ([0, LATER], [], [FIRST, SECOND], [0, 1]),
        # The calls of the first group have fallen out of the ring, or those of the second one are yet to come.
        ([0, LATER], [], [SECOND, (3, 2, LATER + 1)], [1, 1]),
        ([0, LATER], [], [FIRST, (0, 2, 1001)], [0, 0]),
        ([0, LATER], [], [(3, 1, LATER - SAME_TIME)], [1]),
        # The wall clock was set forward since: crossrank's own records show that the calls are of the second group.
        ([0, 3 * LATER], [(0, 7, 0), (1, 1, 0), (1, 2, 0)], [SECOND, (3, 2, LATER + 1)], [1, 1]),
        ([0, 3 * LATER], [(0, 7, 0), (1, 1, 0), (1, 2, 0)], [FIRST, SECOND], [0, 1]),
        ([500, 600], [], [FIRST, SECOND], [0, 1]),
        # torch has yet to record the only call of the second group, which was made right after the calls of the first.
        ([500, 1100], [(0, 1, 900), (0, 2, 1000), (1, 1, 1100)], [FIRST, (0, 2, 1001)], [0, 0]),
        ([500, 1100], [(0, 1, 1000), (1, 1, 1100)], [FIRST], [0]),
        # The rank is in no earlier group of the name.
        ([None, 500], [], [FIRST, (0, 2, 1001)], [1, 1]),
    ],
)
def test_the_group_number_and_time_separate_groups_of_one_name(
    made: list[int | None],
    calls: list[tuple[int, int, int]],
    entries: list[tuple[int, int, int]],
    epochs: list[int],
    tmp_path: Path,
) -> None:
    given = [
        entry(place, "all_reduce", seq, pg_id=pg_id, time_created_ns=at)
        for place, (pg_id, seq, at) in enumerate(entries)
    ]
    known = [
        {"pg": "0", "size": 2, "ranks": [4, 6], "epoch": number, "t": at}
        for number, at in enumerate(made)
        if at is not None
    ]
    records = [{"id": id, "t": at, "seq": seq, "epoch": epoch} for id, (epoch, seq, at) in enumerate(calls)]
    trace = read(tmp_path, *given, crossrank=moment(*records, groups=known) if made else None)
    found = trace.calls.state.tolist()[: len(entries)]
    assert groups_of_calls(trace)[: len(entries)] == [{-1: "0 (no. 0)", 0: "0", 1: "0 (no. 2)"}[one] for one in epochs]
    # The rank has left its earlier groups, whose calls a recorder may never see end.
    newest = max([*epochs, len(made) - 1])
    assert found == [SCHEDULED if epoch == newest else RETIRED for epoch in epochs]


def test_groups_without_a_name_are_not_separated(tmp_path: Path) -> None:
    given = [entry(place, "all_reduce", 1, pg_id=place, process_group=("", "undefined")) for place in range(2)]
    assert read(tmp_path, *given).calls.state.tolist() == [SCHEDULED, SCHEDULED]


def test_roots_and_source_lines_come_from_the_records_of_the_same_calls(tmp_path: Path) -> None:
    entries = [
        entry(0, "broadcast", 3),
        entry(1, "all_reduce", 4, frames=[{"name": "f", "filename": "a.py", "line": 3}]),
        entry(2, "all_reduce", 1, group="1"),
        entry(3, "send 0->1", p2p=3),
    ]
    calls = [
        {"id": 1, "op": "broadcast", "t": 1000, "seq": 1, "root": 6, "source": "b.py:7"},
        {"id": 2, "t": 1001 + SAME_TIME - 1, "seq": 2, "reduce": "sum", "source": "c.py:8"},
        {"id": 3, "t": 1001, "seq": 3, "pg": "1", "op": "broadcast", "root": 4},
        {"id": 4, "t": 1001, "seq": 1, "pg": "2", "reduce": "sum"},
    ]
    trace = read(tmp_path, *entries, crossrank=moment(*calls))
    kinds = [trace.signatures[row] for row in trace.calls.signature]
    assert [(one.root, one.reduce) for one in kinds] == [(6, None), (None, "sum"), (None, None), (None, None)]
    stacks = [trace.stacks[one] for one in trace.calls.stack]
    assert stacks == [(Frame("(C++)", "b.py", 7),), (Frame("f", "a.py", 3),), (), ()]
    assert trace.dump.recorded_from == {"0": 2}
    assert (trace.host, trace.world_size, trace.ending.taken_at, trace.ending.reason) == ("h", 8, 99, "hang")
    assert (trace.starts_late, trace.dump.has_status, trace.numbered_pairs, len(trace)) == (True, True, False, 4)


@pytest.mark.parametrize(
    ("name", "call", "found"),
    [
        ("gloo:all_reduce", {"op": "reduce_scatter", "t": 1000}, {"0": 0}),
        ("gloo:reduce_scatter", {"op": "all_reduce", "t": 1000}, {}),
        ("all_reduce", {"t": 1000 + SAME_TIME}, {}),
        ("all_reduce", {"t": 1001 - SAME_TIME}, {"0": 0}),
        ("all_reduce", {"t": 1000, "pg": "1"}, {}),
        ("all_reduce", {"t": 1000, "op": "send", "seq": None, "p2p_seq": 1}, {}),
    ],
)
def test_the_last_call_of_a_group_gives_the_start_of_the_recording(
    tmp_path: Path, name: str, call: dict[str, Any], found: dict[str, int]
) -> None:
    trace = read(
        tmp_path, entry(0, name, 1), crossrank=moment({"id": 0, "seq": 1} | call, {"id": 1, "t": 0, "pg": "7"})
    )
    assert trace.dump.recorded_from == found
    assert trace.starts_late is False


@pytest.mark.parametrize(
    ("noted_later", "found"),
    [
        ((0, 0, SAME_TIME), {"0": 4}),  # the host was kept from going on within the last call
        ((SAME_TIME, 0, 0), {"0": 4}),
        ((0, SAME_TIME, SAME_TIME), {}),
        ((-1, -1, -SAME_TIME), {}),  # the last one is a call that torch has not noted
    ],
)
def test_most_last_calls_of_a_group_must_match_the_record_times(
    noted_later: tuple[int, ...], found: dict[str, int], tmp_path: Path
) -> None:
    entries = [entry(number, "all_reduce", 5 + number) for number in range(3)]
    at = [one["time_created_ns"] for one in entries]
    calls = [{"id": number, "t": at[number] - later, "seq": 1 + number} for number, later in enumerate(noted_later)]
    assert read(tmp_path, *entries, crossrank=moment(*calls)).dump.recorded_from == found


def test_sends_without_an_entry_are_added_in_call_order(tmp_path: Path) -> None:
    send = CALL | {"op": "send", "c10d": "send", "peer": 6}
    calls = [send | {"id": 5, "t": 900, "p2p_seq": 1}, send | {"id": 6, "t": 2000, "p2p_seq": 2, "api": "send"}]
    trace = read(tmp_path, entry(0, "gloo:all_reduce", 1, **DONE), crossrank=moment(*calls))
    assert rows(trace) == ["send 1 id 5 scheduled", "all_reduce 1 id 0 completed", "send 2 id 6 scheduled"]
    assert (trace.unawaited, trace.numbered_pairs, trace.notes) == ({0}, True, [])


def test_a_collective_of_nccl_is_awaited_if_it_is_synchronous_or_its_wait_has_ended_or_lasts(tmp_path: Path) -> None:
    asynchronous = {"api": "all_reduce", "async": True}
    calls = [
        asynchronous | {"id": 0, "t": 1000, "seq": 1},  # the first wait that is known ended after it
        asynchronous | {"id": 1, "t": 1001, "seq": 2},
        asynchronous | {"id": 2, "t": 1002, "seq": 3},
        asynchronous | {"id": 3, "t": 1003, "seq": 4},
        asynchronous | {"id": 4, "t": 1004, "seq": 5, "async": False},
        asynchronous | {"id": 5, "t": 1005, "seq": 6, "api": None},
        asynchronous | {"id": 6, "t": 2 * 10**9, "seq": 7, "async": False},  # just before the dump
    ]
    waits = [{"id": 3, "thread": "MainThread", "number": 7}]
    entries = [entry(one, "nccl:all_reduce", one + 1, time_created_ns=call["t"]) for one, call in enumerate(calls)]
    trace = read(tmp_path, *entries, crossrank=moment(*calls, waits=waits, waited=[1], time_ns=3 * 10**9))
    assert (trace.unawaited, trace.awaited, trace.row_of_thread) == ({2, 6}, {3}, {7: 3})


def test_sends_and_receives_of_nccl_get_their_source_lines_and_waits_from_the_records(tmp_path: Path) -> None:
    send = {"op": "send", "c10d": "send", "peer": 6, "api": "isend", "source": "a.py:3"}
    calls = [send | {"id": number, "t": 1000 + number, "p2p_seq": number + 1} for number in range(3)]
    waits = [{"id": 1, "thread": "MainThread", "number": 7}]
    entries = [entry(number, "nccl:send 0->1", p2p=number + 1) for number in range(3)]
    trace = read(tmp_path, *entries, crossrank=moment(*calls, waits=waits, waited=[0]))
    assert (trace.unawaited, trace.waited) == ({2}, {0})
    assert [trace.stacks[one][0].line for one in trace.calls.stack] == [3, 3, 3]


def test_own_calls_replace_only_gloo_entries(tmp_path: Path) -> None:
    call = {"id": 0, "t": 5, "seq": 1, "op": "reduce_scatter"}
    gloo, nccl = entry(0, "gloo:all_reduce", 1), entry(0, "nccl:all_reduce", 1)
    for entries, moments, ops in (
        ([gloo], moment(call), ["reduce_scatter"]),
        ([], moment(call), ["reduce_scatter"]),
        ([nccl], moment(call), ["all_reduce"]),
        ([gloo], moment(), ["all_reduce"]),
        ([gloo], None, ["all_reduce"]),
    ):
        trace = read(tmp_path, *entries, own=True, crossrank=moments)
        assert [trace.signatures[one].op for one in trace.calls.signature] == ops
        assert trace.notes == ([GLOO_ALONE] if moments is None else [])
        assert trace.dump.has_status == (moments is not None and ops == ["all_reduce"])
    assert read(tmp_path, gloo, crossrank=moment(call)).signatures[0].op == "all_reduce"


@pytest.mark.parametrize(
    ("inputs", "noted", "outputs"),
    [
        ([[3, 5]], [[2, 3, 5]], [[2, 3, 5]]),  # of a plain one, into a list or one tensor
        ([[3, 5]], [[1, 3, 5]], [[2, 3, 5]]),
        ([[3, 5], [2]], [[2, 3, 5]], [[2, 3, 5], [2, 2]]),
        ([[3, 5], [2], [7]], [[3, 3, 5]], [[2, 3, 5], [2, 2], [2, 7]]),
    ],
)
def test_coalesced_gloo_all_gather_outputs_come_from_its_inputs(
    tmp_path: Path, inputs: list[list[int]], noted: list[list[int]], outputs: list[list[int]]
) -> None:
    """As its dumps of torch 2.13 have them; DTensor's all_gathers are coalesced ones of one tensor."""
    sizes: dict[str, Any] = {"input_sizes": inputs, "output_sizes": noted}
    (found,) = read(tmp_path, entry(0, "gloo:all_gather", 1, **sizes)).signatures
    assert found.outputs == outputs
    assert contradiction(found, 2) == ""
    (found,) = read(tmp_path, entry(0, "all_gather", 1, **sizes)).signatures
    assert found.outputs == noted


def test_shapes_of_a_coalesced_all_gather_are_unknown_without_a_group_size(tmp_path: Path) -> None:
    one = entry(0, "gloo:all_gather", 1, input_sizes=[[3, 5]], output_sizes=[[1, 3, 5]])
    (found,) = read(tmp_path, one, pg_config={}).signatures
    assert (found.inputs, found.outputs) == ([], [])
    of_size = moment() | {"groups": [{"pg": "0", "size": 2}]}  # of members that nothing names
    (found,) = read(tmp_path, one, pg_config={}, crossrank=of_size).signatures
    assert (found.inputs, found.outputs) == ([[3, 5]], [[2, 3, 5]])


def test_gloo_calls_count_separately_from_another_backend(tmp_path: Path) -> None:
    both = [entry(0, "gloo:all_reduce", 1, retired=True, pg_id=5), entry(1, "all_reduce", 1, retired=True)]
    trace = read(tmp_path, *both, crossrank=moment({"id": 0, "t": 1001, "seq": 1, "reduce": "sum"}))
    assert [(one.group.pg, one.apart) for one in trace.groups] == [("0", ""), ("1", ""), ("0", "gloo")]
    assert (list(trace.calls.group), list(trace.calls.state)) == ([2, 0], [RETIRED, SCHEDULED])
    assert [trace.signatures[one].reduce for one in trace.calls.signature] == [None, "sum"]
    assert trace.backend == "nccl"


def test_the_unnamed_group_of_gloo_is_the_world(tmp_path: Path) -> None:
    config = {"": {"name": "", "desc": "", "ranks": "[0, 1, 2]"}}
    assert read(tmp_path, entry(0, "gloo:all_reduce", 1), pg_config=config).world_size == 3
    own = moment(groups=[{"pg": "9", "size": 1}])
    assert [one.group.pg for one in read(tmp_path, pg_config={}, crossrank=own).groups] == ["9"]


@pytest.mark.parametrize(("enqueued", "state"), [(2, "scheduled"), (3, "completed")])
def test_a_batch_that_its_rank_still_launches_is_not_finished(enqueued: int, state: str, tmp_path: Path) -> None:
    """torch queries an end that was never recorded. The number of the last collective says nothing of a batch."""
    batch = [entry(1, "send 0->1", seq=2, p2p=3), entry(2, "recv 0<-1", seq=2, p2p=3)]
    closing = entry(3, "coalesced", seq=2, p2p=3, is_p2p=False, state="completed", retired=False)
    status = {"0": {"last_enqueued_collective": enqueued, "last_completed_collective": 2}}
    found = read(tmp_path, entry(0, "all_reduce", 2, **DONE), *batch, closing, pg_status=status)
    assert [row.split(" in ")[0] for row in rows(found)[1:]] == [f"send 3 id 1 {state}", f"recv 3 id 2 {state}"]


def test_a_call_whose_state_is_lost_is_completed_if_torch_saw_its_end(tmp_path: Path) -> None:
    lost = {name: value for name, value in entry(0, "all_reduce", 1, **DONE).items() if name != "state"}
    assert rows(read(tmp_path, lost)) == ["all_reduce 1 id 0 completed"]
    assert rows(read(tmp_path, lost | {"retired": False})) == ["all_reduce 1 id 0 scheduled"]


@pytest.mark.parametrize("sizes", ["input_sizes", "output_sizes"])
def test_a_negative_size_is_unknown_and_said(tmp_path: Path, sizes: str) -> None:
    negative: dict[str, Any] = DONE | {sizes: [[-4]]}
    found = read(tmp_path, entry(0, "all_reduce", 1, **DONE), entry(5, "all_reduce", 2, **negative))
    assert [has_size(found.signatures[kind]) for kind in found.calls.signature] == [True, False]
    assert found.signatures[found.calls.signature[1]].inputs == []
    assert found.problems == ["entries with impossible sizes, which are unknown: the first is 5"]


def test_a_duration_longer_than_from_the_launch_to_the_end_is_unknown(tmp_path: Path) -> None:
    found = read(
        tmp_path, *(entry(n, "all_reduce", n + 1, **DONE | {"duration_ms": ms}) for n, ms in enumerate((0.001, 2000)))
    )
    assert list(found.calls.took) == [1000, 0]
    assert found.problems == ["1 durations are longer than from the launch to the end: they are unknown"]


def test_a_send_whose_peer_is_damaged_is_a_send(tmp_path: Path) -> None:
    (record,) = read(tmp_path, entry(0, "send 0->x", p2p=3)).records()
    assert (record.op, record.peer) == ("send", None)


DAY = 86_400 * 1_000_000_000


@pytest.mark.parametrize("place", [1, 3])
def test_a_call_that_was_made_after_its_end_has_no_times(tmp_path: Path, place: int) -> None:
    entries = [entry(number, "all_reduce", number + 1, **DONE) for number in range(4)]
    entries[place]["time_created_ns"] += DAY
    found = read(tmp_path, *entries)
    assert [called == 0 for called in found.calls.called] == [number == place for number in range(4)]
    assert [ended == 0 for ended in found.calls.ended] == [number == place for number in range(4)]
    assert found.problems == ["1 entries have times in an impossible order: they are unknown"]


def test_a_number_that_is_not_between_its_neighbours_is_corrected(tmp_path: Path) -> None:
    entries = [entry(number, "all_reduce", number + 1, **DONE) for number in range(5)]
    entries[2]["collective_seq_id"] = 1003
    found = read(tmp_path, *entries)
    assert list(found.calls.number) == [1, 2, 3, 4, 5]
    assert (found.lost_after, found.problems) == (
        None,
        ["1 calls have a number that is not between those of the calls around them"],
    )
    entries[3]["collective_seq_id"] = 9  # 2, ?, 9, 5: nobody can tell which numbers these are
    assert read(tmp_path, *entries).problems


def test_an_unknown_state_is_counted(tmp_path: Path) -> None:
    entries = [entry(number, "all_reduce", number + 1, **DONE) for number in range(3)]
    entries[1]["state"] = "exploded"
    assert read(tmp_path, *entries).problems == ["1 entries have a state that crossrank does not know"]
