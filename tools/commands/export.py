"""`crossrank export`: the tables of a job as files."""

from __future__ import annotations

import argparse
from array import array
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import orjson

import crossrank
from crossrank.atomic_file import join, make_folder
from crossrank.errors import CrossrankError
from crossrank.text import FORMULA, plural
from crossrank.tools.commands.options import (
    add_shared,
    add_source,
    complain,
    fleet_of,
    output_file,
    write_output,
)
from crossrank.tools.job import sources
from crossrank.tools.job.read_rank import RankSources
from crossrank.tools.output.console import print_fact, print_json
from crossrank.tools.output.frames.job_frames import OF_JOB
from crossrank.tools.output.frames.rank_frames import OF_RANK, calls
from crossrank.tools.parallel import map_ranks
from crossrank.tools.sharing.folders import refuse_full
from crossrank.tools.tables import FORMAT, TABLES
from crossrank.tools.traces.busy import Busy
from crossrank.tools.traces.discover import INSPECTOR
from crossrank.tools.traces.rank_trace import HostWaits, RankTrace

if TYPE_CHECKING:
    import polars as pl


_WRITERS = {"parquet": ("parquet", "parquet"), "csv": ("csv", "csv"), "arrow": ("arrow", "ipc")}
"""Format -> (extension, name of it in polars)."""
SCHEMA = "schema.json"


class ExportCommand:
    """Write the tables of a job as Parquet, CSV or Arrow files. Tables of ranks have one file per rank
    (DIR/calls/rank-0.parquet), tables of the job one file (DIR/collectives/job.parquet). schema.json has type, unit and
    meaning of each column. Tables of the job need the calls of all ranks in memory. Exit code 1: a file is not
    usable."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("path", nargs="+", help="a recording, a folder of traces or exports, or files")
        add("-o", "--output", metavar="DIR", required=True, help="a new folder")
        add("--format", choices=_WRITERS, default="parquet", help="file format (default parquet)")
        meaning = f"tables to write, for example calls,steps (default: all): {', '.join(TABLES)}"
        add("--tables", type=_tables, default=frozenset(TABLES), metavar="LIST", help=meaning)
        add_source(parser, sources.CHOICES)
        add_shared(parser, "ranks", "json")

    def run(self, arguments: argparse.Namespace) -> int:
        found = sources.find(arguments.path, arguments.ranks, arguments.source, also=arguments.communication_kernels)
        refuse_full(arguments.output)
        export = _Export(arguments.output, arguments.format, arguments.tables, arguments.ranks)
        export.make_folders()
        results = map_ranks(export.read_and_write, found.tasks, fleet_of(arguments), failed=_failed, what="exporting")
        written = [one for one in results if isinstance(one, _Written)]
        traces = sources.settle((one.traces if isinstance(one, _Written) else one for one in results), found)
        rows = sum((one.rows for one in written), Counter[str]())
        for one in (trace for result in written for trace in result.unnamed):
            rows += export.write_rank(one)
        if export.of_job:
            tables = sources.job_of(traces, found, release=True)
            for table in export.of_job:
                rows[table] = export.write(OF_JOB[table](tables), table, "job")
        export.write_schema()
        if arguments.json:
            print_json({"schema": FORMAT, "rows": {name: rows[name] for name in TABLES if name in arguments.tables}})
        else:
            print_fact("exported", f"{plural(len(traces), 'rank')} to {arguments.output}, as {arguments.format}")
            for table in TABLES:
                if table in arguments.tables:
                    print(f"  {table:<12} {plural(rows[table], 'row')}")
        complain(*found.skipped, most=8)
        return 1 if found.skipped else 0


def _failed(task: RankSources, error: CrossrankError) -> _Written | str:
    return str(sources.failed(task, error))


def _tables(text: str) -> frozenset[str]:
    names = frozenset(part.strip() for part in text.split(","))
    unknown = sorted(names - TABLES.keys())
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of the tables: {', '.join(TABLES)}")
    return names


def _write(table: pl.DataFrame | pl.LazyFrame, kind: str, path: str) -> int:
    """Write a table, in parts if it is made in parts, and return its number of rows. `kind` is the format's name in
    polars."""
    import polars as pl

    frame = _without_formulas(table) if kind == "csv" else table
    if isinstance(frame, pl.LazyFrame):
        try:
            getattr(frame, f"sink_{kind}")(path)
            return int(getattr(pl, f"scan_{kind}")(path).select(pl.len()).collect().item())
        except pl.exceptions.InvalidOperationError:  # polars 1.24 cannot write this in parts
            frame = frame.collect()
    getattr(frame, f"write_{kind}")(path)
    return len(frame)


def _without_formulas(frame: pl.DataFrame | pl.LazyFrame) -> pl.DataFrame | pl.LazyFrame:
    """Put a quote before each text that a spreadsheet would run as a formula, as in `csv_text`."""
    import polars as pl

    texts = [name for name, kind in frame.collect_schema().items() if kind in (pl.String, pl.Categorical, pl.Enum)]
    columns = [pl.col(name).cast(pl.String) for name in texts]
    is_formula = [pl.any_horizontal(column.str.starts_with(one) for one in FORMULA) for column in columns]
    return frame.with_columns(
        pl.when(found).then(pl.lit("'") + column).otherwise(column).alias(name)
        for name, column, found in zip(texts, columns, is_formula, strict=True)
    )


@dataclass(frozen=True)
class _Export:
    """The tables to write, and where. Sent to the workers."""

    folder: str
    format: str
    tables: Collection[str]
    ranks: Collection[int] | None

    @property
    def of_rank(self) -> list[str]:
        return [name for name in OF_RANK if name in self.tables]

    @property
    def of_job(self) -> list[str]:
        return [name for name in OF_JOB if name in self.tables]

    def make_folders(self) -> None:
        for table in self.tables:
            make_folder(join(self.folder, table))

    def read_and_write(self, task: RankSources) -> _Written | str:
        """Read a file and write the tables of its ranks. Runs in a worker."""
        traces = sources.read_task(task)
        if isinstance(traces, str):
            return traces
        if self.ranks is not None:
            traces = [one for one in traces if one.rank is None or one.rank in self.ranks]
        if any(one.rank is None for one in traces) or task.kind == INSPECTOR:
            return _Written(traces, Counter(), traces)
        rows = sum(map(self.write_rank, traces), Counter[str]())
        return _Written(list(map(_for_job if self.of_job else _ends_of, traces)), rows, [])

    def write_rank(self, trace: RankTrace) -> Counter[str]:
        """Write the tables of a rank, and return their numbers of rows."""
        name = f"rank-{trace.rank or 0}"
        if not self.of_rank:
            return Counter()
        made = calls(trace)
        return Counter({table: self.write(OF_RANK[table](trace, made), table, name) for table in self.of_rank})

    def write(self, frame: pl.DataFrame | pl.LazyFrame, table: str, name: str) -> int:
        """Write one file, and return its number of rows."""
        ending, kind = _WRITERS[self.format]
        with output_file(join(self.folder, f"{table}/{name}.{ending}")) as path:
            return _write(frame, kind, str(path))

    def write_schema(self) -> None:
        tables = {
            name: {
                "meaning": TABLES[name].meaning,
                "files": f"{name}/{'rank-N' if name in OF_RANK else 'job'}.{_WRITERS[self.format][0]}",
                "columns": {
                    column: {"type": str(one.dtype), "unit": one.unit, "meaning": one.meaning}
                    for column, one in TABLES[name].columns.items()
                },
            }
            for name in TABLES
            if name in self.tables
        }
        content = {"schema": FORMAT, "crossrank": crossrank.__version__, "tables": tables}
        write_output(join(self.folder, SCHEMA), orjson.dumps(content, option=orjson.OPT_INDENT_2))


@dataclass(frozen=True)
class _Written:
    """The result of a worker."""

    traces: list[RankTrace]
    rows: Counter[str]
    unnamed: list[RankTrace]
    """Traces whose rank depends on the other files; not written yet."""


def _for_job(trace: RankTrace) -> RankTrace:
    """Return the part of a trace that the tables of the job need."""
    calls = replace(trace.calls, state=array("B"), stack=array("I"), thread=array("q"))
    return replace(trace, calls=calls, waits=None, host_waits=HostWaits())


def _ends_of(trace: RankTrace) -> RankTrace:
    """Return the first and last call of a rank, which show whether ranks are of one run."""
    last = len(trace) - 1
    calls = trace.calls.take(sorted({0, last}) if last >= 0 else [])
    return replace(trace, calls=calls, waits=None, host_waits=HostWaits(), busy=Busy(), unawaited=set(), awaited=set())
