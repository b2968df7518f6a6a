"""`crossrank export`: files that others read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pytest

import crossrank
from crossrank.tools.cli import main
from crossrank.tools.tables import KEYS, TABLES

RECORDING = Path(__file__).parents[1] / "fuzz" / "seeds" / "recording"
READERS: dict[str, Callable[[Path], pl.DataFrame]] = {
    "parquet": pl.read_parquet,
    "csv": pl.read_csv,
    "arrow": pl.read_ipc,
}


def export(output: Path, *words: str, recording: Path = RECORDING) -> int:
    return main(["export", str(recording), "-o", str(output), "--jobs", "1", *words])


def test_duckdb_and_pandas_read_the_same_rows_as_load(tmp_path: Path) -> None:
    assert export(tmp_path / "out") == 0
    job = crossrank.load(RECORDING)
    query = f"SELECT rank, op, count(*), sum(bytes) FROM '{tmp_path}/out/calls/*.parquet' GROUP BY ALL ORDER BY ALL"
    database = duckdb.connect()
    own = job.table("calls").group_by("rank", "op").agg(pl.len(), pl.sum("bytes")).sort("rank", "op")
    assert database.execute(query).fetchall() == own.rows()
    joined = database.execute(
        f"SELECT count(*) FROM '{tmp_path}/out/calls/*.parquet' JOIN '{tmp_path}/out/collectives/*.parquet' "
        "USING (pg, members, number, op)"
    )
    assert joined.fetchall() == [(int(job.table("collectives")["expected"].sum()),)]
    collectives = pd.read_parquet(tmp_path / "out" / "collectives")
    assert collectives["time_ns"].sum() == job.table("collectives")["time_ns"].sum()


@pytest.mark.parametrize("form", READERS)
def test_every_format_has_the_same_tables_with_the_schema_columns(form: str, tmp_path: Path) -> None:
    assert export(tmp_path / "out", "--format", form) == 0
    schema = json.loads((tmp_path / "out" / "schema.json").read_text())
    assert schema["schema"] == "crossrank-frames 1"
    assert list(schema["tables"]) == list(TABLES)
    for name, table in TABLES.items():
        files = sorted((tmp_path / "out" / name).iterdir())
        parts = ("rank-0", "rank-1") if table.of_rank else ("job",)
        assert [one.name for one in files] == [f"{part}.{form}" for part in parts]
        frame = READERS[form](files[0])
        columns = schema["tables"][name]["columns"]
        assert frame.columns == list(columns)
        assert all(one["unit"] == "ns" for column, one in columns.items() if column.endswith("_ns"))
        if form != "csv":
            assert frame.schema == table.schema


def test_only_chosen_tables_and_ranks_are_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(tmp_path / "out", "--tables", "calls,steps", "--ranks", "1", "--json") == 0
    names = sorted(path.name for path in (tmp_path / "out").rglob("*.*"))
    assert names == ["rank-1.parquet", "rank-1.parquet", "schema.json"]
    own = crossrank.load(RECORDING, ranks=[1])
    calls = own.table("calls")
    assert json.loads(capsys.readouterr().out)["rows"] == {"calls": len(calls), "steps": len(own.steps)}
    assert pl.read_parquet(tmp_path / "out" / "calls" / "rank-1.parquet").equals(calls.drop(*KEYS))


def test_a_broken_rank_is_reported_and_others_are_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(RECORDING, tmp_path / "recording")
    (tmp_path / "recording" / "rank-1.comms.jsonl.zst").write_bytes(b"no zstd")
    for name in ("et", "kineto", "flight"):
        (tmp_path / "recording" / f"rank-1.{name}.json.zst").unlink()
    assert export(tmp_path / "out", "--tables", "calls", recording=tmp_path / "recording") == 1
    assert "rank-1.comms.jsonl.zst" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out" / "calls").iterdir()] == ["rank-0.parquet"]


def test_a_nonempty_folder_stays_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(tmp_path / "out", "--tables", "calls") == 0
    before = (tmp_path / "out" / "schema.json").read_bytes()
    assert export(tmp_path / "out", "--tables", "steps") == 2
    assert "is not empty; choose a new folder with -o" in capsys.readouterr().err
    assert (tmp_path / "out" / "schema.json").read_bytes() == before


def test_an_unknown_table_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        export(tmp_path / "out", "--tables", "kalls")
    assert raised.value.code == 2
    assert "'kalls' is not one of the tables: calls, durations" in capsys.readouterr().err
