"""Parts of shards are data: read into the types that a worker returns, or refused."""

from __future__ import annotations

import pickle
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import zstandard

from crossrank.comm import CommRecord, Group
from crossrank.errors import BROKEN
from crossrank.tools import part_file
from crossrank.tools.cli import main
from crossrank.tools.shards import Job


@dataclass
class Result:
    name: str
    counts: Counter[str]
    numbers: array[int]
    record: CommRecord | None
    groups: tuple[Group, ...] = ()
    share: float = 0.0
    pairs: dict[tuple[int, str], set[int]] = field(default_factory=dict)


RECORD = CommRecord(id=1, op="all_reduce", c10d="allreduce_", pg="0", bytes=4, t=5, inputs=[[1, 2]], source="a.py:1")


def test_a_result_is_read_as_it_was_written() -> None:
    result = Result(
        "rank 0",
        Counter(a=2),
        array("q", [1, -(1 << 60)]),
        RECORD,
        (Group(pg="0", size=2, ranks=[0, 1]),),
        0.5,
        {(1, "x"): {1, 2}},
    )

    again = part_file.decode(part_file.encode([result]), list[Result])

    assert again == [result]
    assert type(again[0].counts) is Counter


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b'{"Result":[]}',
        b'{"Job":["inspect",[],[],"0"]}',
        b'{"Result":["a",{"":[]},{"array":["q","AAA="]},null,[],0,{"":[]}]}',
        b'{"Result":[1,{"":[]},{"array":["q",""]},null,[],0,{"":[]}]}',
        b'{"Result":["a",{"":[]},{"array":["O",""]},null,[],0,{"":[]}]}',
        b'{"Result":["a",{"":[[[],1]]},{"array":["q",""]},null,[],0,{"":[]}]}',
        b"[" * 100_000,
        b"1" * 5_000,
    ],
)
def test_content_of_another_type_is_refused(content: bytes) -> None:
    with pytest.raises(BROKEN):
        part_file.decode(content, Result)


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (Path("ran"),))


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Harmful()),
        b"\x80\x02ccrossrank.instrument.__main__\nmain\n.",
        b"\x80\x02ccrossrank.tools.shards\nJob\n(N}X\x06\x00\x00\x00__eq__cbuiltins\nlist\nstb.",
        b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    ],
    ids=["runs a function", "imports a module", "changes a class", "takes 2 GB"],
)
def test_a_pickle_in_place_of_a_part_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    header = {"schema": "crossrank-comms 1", "rank": 0, "world_size": 1, "host": "a", "node": "a"}
    (tmp_path / "rank-0.comms.jsonl").write_bytes(msgspec.json.encode({"header": header}) + b"\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/crossrank-inspect-0-of-1.part").write_bytes(zstandard.compress(content))
    before = Job.__eq__

    assert main(["inspect", str(tmp_path), "--merge", str(tmp_path / "parts")]) == 2

    assert "is no part of crossrank" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert Job.__eq__ is before
