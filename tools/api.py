"""A recorded job in a notebook: `crossrank.load`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import polars as pl

from crossrank.errors import CrossrankError
from crossrank.text import plural, rank_ranges
from crossrank.tools.analysis.bandwidth import BY, KEYS, bandwidth_rows, line_rates, sentence
from crossrank.tools.analysis.diagnosis.diagnose import diagnose
from crossrank.tools.analysis.diagnosis.evidence import find_candidates, read_evidence
from crossrank.tools.analysis.diagnosis.findings import Diagnosis, Finding
from crossrank.tools.analysis.overlap import outside_ns, overlap_frame, shares_of
from crossrank.tools.analysis.waiting import count_arrivals, latest_of, openings
from crossrank.tools.graph.linking.current import read_current
from crossrank.tools.graph.linking.linked_trace import LinkedTrace
from crossrank.tools.job.collectives import JobTables
from crossrank.tools.job.job import notes_of
from crossrank.tools.job.sources import Measurements, find, job_of, read
from crossrank.tools.output import plots
from crossrank.tools.output.frames import job_frames, rank_frames
from crossrank.tools.parallel import Fleet
from crossrank.tools.tables import TABLES
from crossrank.tools.traces.rank_trace import RankTrace

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


def load(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    ranks: Iterable[int] | None = None,
    source: str | None = None,
    jobs: int = 1,
    communication_kernels: str = "",
) -> LoadedJob:
    """Return a job from a recording, or from Kineto traces, flight-recorder dumps or Nsight exports.

    Files are read when you use the first table.

    Args:
        path: A folder or a file, or several.
        ranks: The ranks to read (default: all).
        source: The source of times: `nsight`, `kineto`, `flight`, `inspector` or `comms` (default: the best one found).
        jobs: The number of processes that read.
        communication_kernels: A regular expression. Kernels whose names match it count as communication too.

    Raises:
        CrossrankError: No file can be read.
    """
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    wanted = None if ranks is None else set(ranks)
    found = find([os.fspath(one) for one in paths], wanted, source, also=communication_kernels)
    return LoadedJob([os.fspath(one) for one in paths], wanted, found, Fleet(jobs=jobs))


@dataclass(frozen=True)
class Answer:
    """A table that answers a question, with a figure."""

    frame: pl.DataFrame
    draw: Callable[[pl.DataFrame], go.Figure] = field(repr=False)
    text: str = ""
    """The answer in one sentence."""

    def plot(self) -> go.Figure:
        """Return a plotly figure of the table."""
        return self.draw(self.frame)

    def to_pandas(self) -> pd.DataFrame:
        """Return the table as a pandas frame. pandas must be installed."""
        return self.frame.to_pandas()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.frame.__arrow_c_stream__(requested_schema)

    def __len__(self) -> int:
        return len(self.frame)

    def __repr__(self) -> str:
        return f"{self.text}\n{self.frame!r}" if self.text else repr(self.frame)

    def _repr_html_(self) -> str:
        from html import escape

        return f"<p>{escape(self.text)}</p>{self.frame._repr_html_()}"


class LoadedJob:
    """All ranks of a job as polars frames. `crossrank.tools.tables` explains each column.

    A frame is made when you use it first, and kept.
    """

    def __init__(self, paths: list[str], ranks: set[int] | None, found: Measurements, fleet: Fleet) -> None:
        self._paths = paths
        self._ranks = ranks
        self._fleet = fleet
        self._found = found
        self._full: dict[str, pl.DataFrame] = {}

    @cached_property
    def _traces(self) -> list[RankTrace]:
        traces = read(self._found, self._fleet)
        if self._ranks is not None:
            traces = [one for one in traces if one.rank in self._ranks]
        if not traces:
            raise CrossrankError(f"{', '.join(self._paths)}: has none of the requested ranks")
        return traces

    @cached_property
    def _tables(self) -> JobTables:
        return job_of(self._traces, self._found)

    @cached_property
    def _calls(self) -> list[pl.DataFrame]:
        """The calls of each rank. Other tables are made from them."""
        return job_frames.with_keys(self._tables, map(rank_frames.calls, self._traces))

    def _of_ranks(self, table: str) -> pl.DataFrame:
        parts = map(rank_frames.OF_RANK[table], self._traces, self._calls)
        return pl.concat([pl.DataFrame(schema=TABLES[table].schema), *parts], how="diagonal")

    # --- tables -------------------------------------------------------------------------------------------------------

    def table(self, name: str) -> pl.DataFrame:
        """Return a table with all its columns. `calls`, `collectives` and `transfers` show only the most used ones.

        Raises `CrossrankError` if there is no such table.
        """
        if name not in self._full:
            if name not in _MAKERS:
                raise CrossrankError(f"table {name!r} is not one of {', '.join(_MAKERS)}")
            self._full[name] = _MAKERS[name](self)
        return self._full[name]

    def _main(self, name: str) -> pl.DataFrame:
        return self.table(name).select(TABLES[name].main)

    @property
    def calls(self) -> pl.DataFrame:
        """Every call of every rank."""
        return self._main("calls")

    @property
    def durations(self) -> pl.DataFrame:
        """Every call with a measured duration."""
        return self.table("durations")

    @property
    def waits(self) -> pl.DataFrame:
        """Every wait of a host thread for communication."""
        return self.table("waits")

    @property
    def steps(self) -> pl.DataFrame:
        """Training steps of every rank."""
        return self.table("steps")

    @property
    def collectives(self) -> pl.DataFrame:
        """Collectives, matched over all ranks."""
        return self._main("collectives")

    @property
    def transfers(self) -> pl.DataFrame:
        """Sends matched with their receives."""
        return self._main("transfers")

    @property
    def groups(self) -> pl.DataFrame:
        """Process groups."""
        return self.table("groups")

    @property
    def arrivals(self) -> pl.DataFrame:
        """Arrival and waiting time of each rank at each collective."""
        return self.table("arrivals")

    @property
    def ranks(self) -> pl.DataFrame:
        """Ranks, and what crossrank read of each."""
        return self.table("ranks")

    @property
    def notes(self) -> list[str]:
        """What crossrank could not read, skipped, or could not compare, and why."""
        found = self._tables
        counted = Counter(found.unattributed) + Counter(found.unmatched)
        of_files = notes_of((one.rank or 0, (*one.notes, *one.problems)) for one in self._traces)
        missing = [found.job.missing_text] if self._ranks is None and found.job.missing else []
        return [*self._found.skipped, *missing, *of_files, *(f"{count:,} {why}" for why, count in counted.items())]

    # --- answers ------------------------------------------------------------------------------------------------------

    def bandwidth(self, by: Collection[str] = BY, line_rate: Sequence[str] = ()) -> Answer:
        """Return times and rates of collectives, as `crossrank bandwidth` does.

        `by` names the columns to group by: op, group, size, locality, source. `line_rate` is as the option."""
        unknown = sorted(set(by) - set(KEYS))
        if unknown:
            raise CrossrankError(f"by={unknown[0]!r} is not one of {', '.join(KEYS)}")
        rows = bandwidth_rows(self._tables, list(by), line_rates(line_rate))
        return Answer(plots.flat(rows), plots.bandwidth, sentence(rows))

    def diagnose(self) -> Answer:
        """Return the faults of the job, root cause first, as `crossrank diagnose` does. `text` is the verdict."""
        evidence = read_evidence(find_candidates(self._paths), self._fleet)
        if not evidence.ranks:
            why = "no diagnosis: there is no usable comms file or flight-recorder dump"
            return Answer(_findings(None), plots.findings, why)
        diagnosis = diagnose(evidence)[0]
        return Answer(_findings(diagnosis), plots.findings, diagnosis.verdict)

    def stragglers(self) -> Answer:
        """Return how often each rank arrives first and last, and how long others wait for it."""
        frame, left_out = self.table("stragglers"), openings(self._tables)
        texts = [f"skipped: {plural(left_out, 'collective')} at the start of a rank's window"] if left_out else []
        texts.insert(0, latest_of(frame))
        if not frame["last"].sum():
            texts[0] = "no stragglers: ranks cannot be compared, or no rank was later than the error of the clocks"
        return Answer(frame, plots.stragglers, "; ".join(texts))

    def overlap(self) -> Answer:
        """Return computation, communication, exposed communication and idle time per rank and step in windows."""
        frame = self.table("overlap")
        text = "no overlap: the recording has no window; record one with TRACING_WINDOW=START:STOP"
        if len(frame):
            outside = outside_ns(self._tables, frame) / 1e6
            text = shares_of(frame)
            text += f"; {outside:,.3f} ms of communication, summed over ranks, is outside of these" if outside else ""
        return Answer(frame, plots.overlap, text)

    def graph(self, rank: int, window: int = 1) -> LinkedTrace:
        """Return the operations, kernels and communications of a rank in a window, with their dependencies.

        Links the traces if `crossrank link` has not done so. A rank with one window needs no number. The result is
        empty if the window was not recorded: then its `text` says so."""
        for one in self._found.tasks:
            if one.rank != rank:
                continue
            for found in one.windows:
                if found.window == window or (window == 1 and len(one.windows) == 1):
                    return read_current(found)
        why = (
            f"no graph: rank {rank} has no execution trace with a Kineto trace of window {window}; record one with "
            "TRACING_WINDOW=START:STOP"
        )
        return LinkedTrace.nothing(rank, why)

    def __repr__(self) -> str:
        tasks = self._found.tasks
        known = sorted({one.rank for one in tasks if one.rank is not None})
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(one.kind for one in tasks).most_common())
        lines = [f"crossrank job at {', '.join(self._paths)}", f"  files       {kinds}"]
        if known:
            lines.append(f"  ranks       {rank_ranges(known)}")
        if "_traces" in self.__dict__:
            calls = sum(map(len, self._traces))
            counts = [plural(len(self._traces), "rank"), plural(calls, "call")]
            if "_tables" in self.__dict__:  # only matched ranks show which groups are the same
                groups = self._tables.job.groups
                counts.append(plural(sum(not one.guessed and bool(one.name) for one in groups), "known group"))
            lines.append(f"  read        {', '.join(counts)}")
            if "_tables" in self.__dict__:
                by = ", ".join(sorted({*self._tables.timed_by.values()}))
                lines.append(f"  timed by    {by or 'nothing: no call has a measured time'}")
                lines += [f"  missing     {rank_ranges(missing)}" for missing in [self._tables.job.missing] if missing]
        else:
            lines.append("  not read yet")
        if self._found.skipped:
            lines.append(f"  not usable  {plural(len(self._found.skipped), 'file')}: see .notes")
        return "\n".join([*lines, f"  tables      {', '.join(_MAKERS)}", f"  answers     {', '.join(_ANSWERS)}"])


_MAKERS: dict[str, Callable[[LoadedJob], pl.DataFrame]] = {
    "calls": lambda job: job._of_ranks("calls"),
    "collectives": lambda job: job_frames.measured(job._tables, p2p=False),
    "transfers": lambda job: job_frames.measured(job._tables, p2p=True),
    "arrivals": lambda job: job_frames.arrivals_by_call(job._tables).collect(),
    "steps": lambda job: job._of_ranks("steps"),
    "groups": lambda job: job_frames.groups(job._tables),
    "ranks": lambda job: job_frames.ranks(job._tables),
    "overlap": lambda job: overlap_frame(job._tables),
    "stragglers": lambda job: count_arrivals(job._tables),
    "waits": lambda job: job._of_ranks("waits"),
    "durations": lambda job: job._of_ranks("durations"),
}
"""Name of a table -> the function that makes it with all its columns."""
_ANSWERS = ("bandwidth()", "diagnose()", "stragglers()", "overlap()", "graph(rank)")


def _findings(diagnosis: Diagnosis | None) -> pl.DataFrame:
    """Return one row per finding."""

    def rows(findings: Iterable[Finding], what: str) -> list[tuple[Any, ...]]:
        return [
            (what, one.kind, one.pg[0] if one.pg else "", one.op)
            + (one.p2p_seq_id if one.collective_seq_id is None else one.collective_seq_id,)
            + (rank_ranges(one.culprit_ranks), rank_ranges(one.waiting_ranks), rank_ranges(one.awaited_ranks), one.text)
            for one in findings
        ]

    schema = {
        "what": pl.String,
        "kind": pl.String,
        "pg": pl.String,
        "op": pl.String,
        "number": pl.Int64,
        "culprit_ranks": pl.String,
        "waiting_ranks": pl.String,
        "awaited_ranks": pl.String,
        "text": pl.String,
    }
    every = []
    if diagnosis is not None:
        every += rows(diagnosis.findings, "cause")
        every += rows(diagnosis.consequences, "consequence")
        every += rows(diagnosis.advisory, "advisory")
    return pl.DataFrame(every, schema=schema, orient="row")
