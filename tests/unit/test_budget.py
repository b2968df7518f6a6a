"""What one file may expand to: a small one that counts, repeats or unpacks far more than it holds is refused."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from crossrank.budget import MEMBERS, Budget, BudgetError
from crossrank.recording import CommsFile
from crossrank.tools.cli import main


def test_an_exceeded_budget_reports_the_file_its_size_and_the_limit() -> None:
    budget = Budget("a.json", 1000)
    budget.spend(MEMBERS, MEMBERS.base)
    with pytest.raises(BudgetError) as error:
        budget.spend(MEMBERS, 1)
    assert str(error.value) == (
        "a.json: is refused: it has, or asks for, more than 1,048,576 members of groups, far more than a real "
        "file of 1,000 bytes does; give another file"
    )


def test_a_larger_file_has_a_larger_budget() -> None:
    budget = Budget("a.json", 2_000_000)
    budget.spend(MEMBERS, MEMBERS.base + MEMBERS.per_byte * 1_000_000)
    with pytest.raises(BudgetError):
        budget.spend(MEMBERS, 1)


def _execution_trace(*nodes: tuple[str, list[Any]]) -> str:
    attributes = {"rf_id": 1, "fw_parent": 0, "seq_id": -1, "scope": 7, "tid": 1, "fw_tid": 0}
    attrs = [{"name": name, "type": "uint64", "value": value} for name, value in attributes.items()]
    rows: list[Any] = []
    none: dict[str, Any] = {"values": [], "shapes": [], "types": []}
    for number, (name, values) in enumerate([("[pytorch|profiler|execution_trace|thread]", []), *nodes], start=1):
        inputs = {"values": values, "shapes": [[]] * len(values), "types": ["String"] * len(values)}
        node = {"id": number, "name": name, "ctrl_deps": 1, "inputs": inputs, "outputs": none}
        rows.append(node | {"attrs": attrs})
    return json.dumps({"schema": "1.1.1-chakra.0.0.4", "pid": 1, "start_ts": 1, "nodes": rows, "finish_ts": 2})


def counted_groups(folder: Path) -> None:
    """300 groups of a million ranks, which are counted and not listed."""
    groups = json.dumps([{"pg_name": str(number), "group_size": 1 << 20} for number in range(300)])
    call = [[], 1, "0", 0, "allreduce", [], [], 0, 1, 2]
    trace = _execution_trace(("## process_group:init ##", [groups]), ("record_param_comms", call))
    (folder / "rank-0.et.json").write_text(trace)


def strided_groups(folder: Path) -> None:
    calls = [[[], number, [str(number), ""], 0, "allreduce", [], [], 0, 1, 1 << 20] for number in range(300)]
    (folder / "rank-0.et.json").write_text(_execution_trace(*(("record_param_comms", call) for call in calls)))


def one_entry_named_again_and_again(folder: Path) -> None:
    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    entry = b"}q\x01(" + text("record_id") + b"K\x01" + text("profiling_name") + text("nccl:all_reduce") + b"u"
    dump = (
        b"\x80\x02}(" + text("version") + text("2.10") + text("entries") + b"](" + entry + b"h\x01" * 1_000_000 + b"e"
    )
    (folder / "rank_0").write_bytes(zstandard.compress(dump + text("pg_config") + b"}u.", 19))


def endless_spaces(folder: Path) -> None:
    (folder / "rank-0.flight.json.gz").write_bytes(gzip.compress(b'{"entries":' + b" " * (80 << 20), 9))


@pytest.mark.parametrize(
    ("make", "command", "what"),
    [
        (counted_groups, "replay --dry-run", "members of groups"),
        (strided_groups, "replay --dry-run", "members of groups"),
        (one_entry_named_again_and_again, "diagnose", "rows"),
        (one_entry_named_again_and_again, "bandwidth", "rows"),
        (endless_spaces, "diagnose", "bytes of content"),
    ],
)
def test_a_small_file_that_asks_for_too_much_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], None], command: str, what: str
) -> None:
    make(tmp_path)
    assert main([*command.split(), str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f" {what}, far more than a real file of " in error
    assert error.count("\n") == 1


def test_lines_within_the_budget_are_read(tmp_path: Path) -> None:
    header = {"schema": "crossrank-comms 1", "rank": 0, "world_size": 2, "host": "a", "node": "a"}
    call = {"id": 0, "op": "barrier", "c10d": "barrier", "pg": "0", "bytes": 0, "t": 0}
    lines = json.dumps({"header": header}) + "\n" + (json.dumps(call) + "\n") * 300_000
    path = tmp_path / "rank-0.comms.jsonl.zst"
    path.write_bytes(zstandard.compress(lines.encode(), 3))
    file = CommsFile(str(path))
    assert 100_000 < sum(1 for _ in file.records()) < 131_072
    assert len(file.issues.problems) == 1
    assert "more than 131,072 lines" in file.issues.problems[0]
