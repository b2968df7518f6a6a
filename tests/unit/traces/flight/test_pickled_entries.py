"""Entries of pickled dumps are read as columns, and say what they say as dictionaries; anything else is not."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrank.budget import Budget, BudgetError
from crossrank.tools.traces.flight.dump import NoDumpError, decode_flight_dump
from crossrank.tools.traces.flight.entries import Entry
from crossrank.tools.traces.flight.pickled_entries import load_columns

NAMES = Entry.__struct_fields__
SHAPES = st.lists(st.lists(st.integers(0, 70_000), max_size=3), max_size=3)


def entries(count: int, **changed: Any) -> list[dict[str, Any]]:
    texts = {"frames": [{"name": "f", "filename": "a.py", "line": 3}], "state": "completed", "dtypes": "Float"}
    group, name = ("0", "d" * 300), "nccl:all_reduce"
    return [
        {
            "frames": texts["frames"],
            "record_id": number,
            "pg_id": 0,
            "process_group": group,
            "thread_name": texts["state"],
            "collective_seq_id": number + 1,
            "p2p_seq_id": 0,
            "op_id": number + 1,
            "profiling_name": name,
            "time_created_ns": 1_795_000_000_000_000_000 + number,
            **({} if number == count - 1 else {"duration_ms": number / 8}),
            "input_sizes": [[4096]],
            "input_dtypes": [texts["dtypes"]],
            "output_sizes": [[2, 4], [number]],
            "output_dtypes": [texts["dtypes"]] * 2,
            "state": texts["state"],
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": number % 2 == 0,
            "is_p2p": False,
        }
        | changed
        for number in range(count)
    ]


def dump_of(rows: list[Any]) -> dict[str, Any]:
    return {"version": "2.10", "pg_config": {}, "entries": rows}


def columns_of(content: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [row.get(name) for row in content["entries"]] for name in NAMES}


def typed(columns: dict[str, list[Any]]) -> str:
    """1, 1.0 and True are equal, but not the same."""
    return repr(columns)


def test_most_entries_become_columns_and_the_others_keep_their_place() -> None:
    rows = entries(2500)
    rows[700]["profiling_name"] = "nccl:broadcast"
    rows[900] = dict(reversed(rows[900].items()))

    found = load_columns(pickle.dumps(dump_of(rows), 2), NAMES)

    assert found is not None
    assert found[0]["entries"].count(None) > 2400
    assert typed(found[1]) == typed(columns_of(dump_of(rows)))


@given(st.lists(st.tuples(SHAPES, st.sampled_from([1, 1.5, None, True, 1 << 40])), min_size=1, max_size=8))
def test_columns_match_dictionaries(kinds: list[tuple[Any, Any]]) -> None:
    rows = [
        row
        | {"input_sizes": kinds[row["record_id"] % len(kinds)][0][:], "pg_id": kinds[row["record_id"] % len(kinds)][1]}
        for row in entries(60)
    ]
    content = pickle.dumps(dump_of(rows), 2)

    found = load_columns(content, NAMES)

    assert found is None or typed(found[1]) == typed(columns_of(pickle.loads(content)))


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_other_protocols_are_read_as_a_whole(protocol: int) -> None:
    assert load_columns(pickle.dumps(dump_of(entries(20)), protocol), NAMES) is None


def test_values_shared_by_entries_are_not_cut_out() -> None:
    rows = entries(20)
    rows[15]["input_sizes"] = rows[10]["input_sizes"]
    content = pickle.dumps(dump_of(rows), 2)
    assert load_columns(content, NAMES) is None
    assert len(decode_flight_dump("rank_0", content, [], Budget("dump")).entries) == 20


def test_entry_bytes_in_a_text_are_not_read_as_entries() -> None:
    whole = pickle.dumps(dump_of(entries(20)), 2)
    text = whole[whole.index(b"}q", 300) :].decode("latin-1")
    rows = [row | {"state": text} for row in entries(20)]
    content = pickle.dumps(dump_of(rows), 2)
    found = load_columns(content, NAMES)
    assert found is None or typed(found[1]) == typed(columns_of(pickle.loads(content)))


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6), st.integers(0, 9999))
def test_a_pickle_with_changed_bytes_is_read_or_refused(changes: list[tuple[int, int]], end: int) -> None:
    content = bytearray(pickle.dumps(dump_of(entries(40)), 2))
    for position, value in changes:
        content[position % len(content)] = value
    for data in (bytes(content), bytes(content[: end % len(content)]) + b"."):
        try:
            decode_flight_dump("rank_0", data, [], Budget("dump"))
        except NoDumpError:
            pass


@pytest.mark.parametrize("opcode", [b"cos\nsystem\n", b"r\xff\xff\xff\x7f", b"\x85", b"0", b"R"])
def test_refused_opcodes_are_also_refused_between_cut_out_entries(opcode: bytes) -> None:
    content = pickle.dumps(dump_of(entries(40)), 2)
    later = content.index(b"}q", content.index(b"K\x14"))
    for place in (later, later + 2, len(content) - 1):
        with pytest.raises(NoDumpError, match="refused"):
            decode_flight_dump("rank_0", content[:place] + opcode + content[place:], [], Budget("dump"))


def read(rows: list[Any], protocol: int, last: int | None = None) -> tuple[list[Entry], list[str], int]:
    problems: list[str] = []
    dump = decode_flight_dump("rank_0", pickle.dumps(dump_of(rows), protocol), problems, Budget("dump"), last)
    return list(dump.entries), problems, dump.left_out


@pytest.mark.parametrize("last", [None, 5])
@pytest.mark.parametrize("changed", [{}, {"pg_id": None}, {"retired": 1}, {"process_group": ["0", 7]}])
def test_both_ways_of_reading_give_the_same_entries(changed: dict[str, Any], last: int | None) -> None:
    rows = entries(60)
    rows[40:44] = entries(44, **changed)[40:]
    whole = read(rows, 4, last)  # which is never read as columns
    assert read(rows, 2, last) == whole
    assert len(whole[0]) == (60 if not changed else 56) or last is not None


def test_a_list_shared_by_many_entries_counts_for_each_entry() -> None:
    shapes = [[7] * 31] * 64
    rows = entries(2) + entries(602, input_sizes=shapes)[2:]
    assert len(decode_flight_dump("rank_0", pickle.dumps(dump_of(rows[:500]), 2), [], Budget("dump")).entries) == 500
    with pytest.raises(BudgetError, match="extents"):
        decode_flight_dump("rank_0", pickle.dumps(dump_of(rows), 2), [], Budget("dump"))
