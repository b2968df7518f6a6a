"""A recording of a newer version is read: a value that this version does not know is unknown, and is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import crossrank
from crossrank.comm import CommRecord, Group
from crossrank.recording import IDENTITY, SCHEMA, Header, Ran, Wait
from crossrank.tools.cli import main
from crossrank.tools.traces.comms import read_comms

Row = dict[str, Any]
WALL = 1_780_000_000_000_000_000
CALLS = 3
FROM_THE_FUTURE: tuple[object, ...] = ("newer", {"a": "newer version"}, ["newer"], 1.5, True)
_KINDS: dict[str, type[msgspec.Struct]] = {"header": Header, "group": Group, "": CommRecord, "wait": Wait, "ran": Ran}
"""Kind of a line -> what it is read as."""


def lines_of(rank: int) -> list[Row]:
    """Three all_reduces with their waits and durations."""
    clock = {"t": 0, "wall": WALL}
    rows: list[Row] = [
        {"header": {"schema": SCHEMA, "rank": rank, "world_size": 2, "host": "a", "node": "n", "boot_id": "b"}},
        {"group": {"pg": "0", "size": 2, "ranks": [0, 1], "desc": "default_pg", "backend": "gloo"}},
    ]
    rows[0]["header"] |= {"clock": clock, "versions": {"torch": "2.13.0"}, "config": {"emit": "ALL"}}
    for number in range(CALLS):
        at = 1_000_000 * (number + 1)
        call = {"id": number, "seq": number + 1, "t": at, "op": "all_reduce", "pg": "0", "bytes": 400, "step": 0}
        call |= {"dtype": "float32", "reduce": "sum", "c10d": "allreduce_", "api": "all_reduce", "async": False}
        rows.append(call | {"in": [[100]], "out": [[100]], "source": "train.py:7", "thread": 1})
        rows.append({"wait": {"t": at + 1000, "took": 50_000, "thread": 1, "id": number}})
        rows.append({"ran": {"id": number, "t": at, "took": 60_000}})
    return [*rows, {"clock": {"t": 9_000_000, "wall": WALL + 9_000_000}}, {"end": {"reason": "exit", "calls": CALLS}}]


def write(folder: Path, kind: str = "", field: str = "", value: object = None) -> Path:
    """Write the recording of two ranks, with `value` for a field of each line of a kind on rank 1."""
    folder.mkdir(exist_ok=True)
    for rank in range(2):
        rows = lines_of(rank)
        for row in rows if rank and field else ():
            if kind in row or (not kind and "op" in row):
                (row[kind] if kind else row)[field] = value
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        (folder / f"rank-{rank}.comms.jsonl").write_text(text)
    return folder


def _unknown() -> list[tuple[str, str, object]]:
    """(kind of a line, field, a value that it cannot have) of each field that a line may lack, with two values each."""
    found = []
    for kind, struct in _KINDS.items():
        for one in msgspec.structs.fields(struct):
            may_lack = not one.required and (kind or one.name not in IDENTITY)
            wrong = [value for value in FROM_THE_FUTURE if may_lack and not _is(value, one.type)]
            found += [(kind, one.encode_name, value) for value in wrong[:2]]
    return found


def _is(value: object, kind: object) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


@pytest.mark.parametrize(("kind", "field", "value"), _unknown())
def test_a_value_of_a_newer_version_costs_no_call(kind: str, field: str, value: object, tmp_path: Path) -> None:
    path = str(write(tmp_path / "newer", kind, field, value) / "rank-1.comms.jsonl")
    trace = read_comms(path)
    assert (len(trace), trace.problems) == (CALLS, [])
    lines = {"header": 1, "group": 1}.get(kind, CALLS)
    (note,) = (one for one in trace.notes if "this version of crossrank does not know" in one)
    assert note.startswith(f"{path}: {lines} value")
    assert f"({kind}.{field}".replace("(.", "(") in note


def test_a_way_to_wait_of_a_newer_version_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "newer", "wait", "in", "graph")
    waits = crossrank.load(folder).table("waits")
    assert waits["waited_in"].to_list() == [*["wait"] * CALLS, *["unknown"] * CALLS]
    assert main(["inspect", str(folder)]) == 0
    assert (
        "3 values that this version of crossrank does not know are unknown here (wait.in 3)" in capsys.readouterr().out
    )
    assert main(["replay", str(folder), "--dry-run"]) == 0


def test_kinds_of_lines_and_fields_of_a_newer_version_are_ignored(tmp_path: Path) -> None:
    folder = write(tmp_path / "newer", "", "priority", "high")
    with (folder / "rank-0.comms.jsonl").open("a") as file:
        file.write('{"energy":{"joules":3}}\n')
    assert crossrank.load(folder).table("calls").equals(crossrank.load(write(tmp_path / "own")).table("calls"))


def test_a_wait_without_its_start_is_counted_and_left_out(tmp_path: Path) -> None:
    job = crossrank.load(write(tmp_path / "newer", "wait", "t", "later"))
    assert len(job.table("waits")) == CALLS
    assert any("(wait 3)" in note for note in job.notes)
