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
from crossrank.tools.analysis.bandwidth import BY, KEYS, bandwidth_rows, line_rates
from crossrank.tools.analysis.diagnosis.diagnose import diagnose
from crossrank.tools.analysis.diagnosis.evidence import find_candidates, read_evidence
from crossrank.tools.analysis.diagnosis.findings import Diagnosis, Finding
from crossrank.tools.analysis.overlap import overlap_frame
from crossrank.tools.analysis.waiting import arrivals, openings
from crossrank.tools.graph.linking.link import link
from crossrank.tools.graph.linking.linked_file import read_linked
from crossrank.tools.graph.linking.linked_trace import LinkedTrace
from crossrank.tools.job.collectives import JobTables
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
    """A job, from a recording, a folder of Kineto traces, flight-recorder dumps or Nsight exports, or files.

    `ranks` are those to read (default: all), `source` is what to take times from (`nsight`, `kineto`, `flight`,
    `inspector`, `comms`; default: what says most), `jobs` the processes that read. `communication_kernels` is a regular
    expression: kernels whose names match communicate too. Files are read when the first table is asked for.

    Raises `CrossrankError` where nothing is there that could be read.
    """
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    wanted = None if ranks is None else set(ranks)
    found = find([os.fspath(one) for one in paths], wanted, source, also=communication_kernels)
    return LoadedJob([os.fspath(one) for one in paths], wanted, found, Fleet(jobs=jobs))


@dataclass(frozen=True)
class Answer:
    """A table that answers a question, and a figure of it."""

    frame: pl.DataFrame
    draw: Callable[[pl.DataFrame], go.Figure] = field(repr=False)
    text: str = ""
    """The answer in a sentence."""

    def plot(self) -> go.Figure:
        """The figure, of plotly."""
        return self.draw(self.frame)

    def to_pandas(self) -> pd.DataFrame:
        """The table for pandas, which has to be installed."""
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
    """All ranks of a job, as polars frames; `crossrank.tools.tables` says what each column means.

    Frames are made when they are first asked for, and kept.
    """

    def __init__(self, paths: list[str], ranks: set[int] | None, found: Measurements, fleet: Fleet) -> None:
        self._paths = paths
        self._ranks = ranks
        self._fleet = fleet
        self._found = found

    @cached_property
    def _traces(self) -> list[RankTrace]:
        traces = read(self._found, self._fleet)
        if self._ranks is not None:
            traces = [one for one in traces if one.rank in self._ranks]
        if not traces:
            raise CrossrankError(f"{', '.join(self._paths)}: holds none of the ranks that are asked for")
        return traces

    @cached_property
    def _tables(self) -> JobTables:
        return job_of(self._traces, self._found)

    @cached_property
    def _calls(self) -> list[pl.DataFrame]:
        """The calls of each rank, which other tables are made of."""
        return job_frames.with_keys(self._tables, map(rank_frames.calls, self._traces))

    def _of_ranks(self, table: str) -> pl.DataFrame:
        parts = map(rank_frames.OF_RANK[table], self._traces, self._calls)
        return pl.concat([pl.DataFrame(schema=TABLES[table].schema), *parts], how="diagonal")

    # --- tables -------------------------------------------------------------------------------------------------------

    @cached_property
    def calls(self) -> pl.DataFrame:
        """Every call of every rank."""
        return self._of_ranks("calls")

    @cached_property
    def durations(self) -> pl.DataFrame:
        """The calls of which a duration was measured."""
        return self._of_ranks("durations")

    @cached_property
    def waits(self) -> pl.DataFrame:
        """When hosts stood still for communication."""
        return self._of_ranks("waits")

    @cached_property
    def steps(self) -> pl.DataFrame:
        """Iterations of every rank."""
        return self._of_ranks("steps")

    @cached_property
    def collectives(self) -> pl.DataFrame:
        """Collectives, matched over all ranks."""
        return job_frames.measured(self._tables, p2p=False)

    @cached_property
    def transfers(self) -> pl.DataFrame:
        """Sends matched with their receives."""
        return job_frames.measured(self._tables, p2p=True)

    @cached_property
    def groups(self) -> pl.DataFrame:
        """Process groups."""
        return job_frames.groups(self._tables)

    @cached_property
    def arrivals(self) -> pl.DataFrame:
        """How late each rank came to each collective, and how long it waited there."""
        return job_frames.arrivals_by_call(self._tables)

    @cached_property
    def ranks(self) -> pl.DataFrame:
        """Ranks, and what was read of them."""
        return job_frames.ranks(self._tables)

    @property
    def notes(self) -> list[str]:
        """What could not be read, was left out, or could not be compared, and why."""
        found = self._tables
        counted = Counter(found.unattributed) + Counter(found.unmatched)
        of_files = [text for one in self._traces for text in (*one.notes, *one.problems)]
        return [*self._found.skipped, *dict.fromkeys(of_files), *(f"{count:,} {why}" for why, count in counted.items())]

    # --- answers ------------------------------------------------------------------------------------------------------

    def bandwidth(self, by: Collection[str] = BY, line_rate: Sequence[str] = ()) -> Answer:
        """Times and rates of collectives grouped `by` some of op, group, size, locality and source, as `crossrank
        bandwidth` has them; `line_rate` as its option."""
        unknown = sorted(set(by) - set(KEYS))
        if unknown:
            raise CrossrankError(f"by={unknown[0]!r} is not one of {', '.join(KEYS)}")
        rows = bandwidth_rows(self._tables, list(by), line_rates(line_rate))
        return Answer(plots.flat(rows), plots.bandwidth, "" if len(rows) else "no bandwidth: no call has a time")

    def diagnose(self) -> Answer:
        """What is wrong, root cause first, as `crossrank diagnose` says it: `text` is the verdict."""
        evidence = read_evidence(find_candidates(self._paths), self._fleet)
        if not evidence.ranks:
            why = "no diagnosis: there is neither a comms file nor a flight-recorder dump that can be used"
            return Answer(_findings(None), plots.findings, why)
        diagnosis = diagnose(evidence)[0]
        return Answer(_findings(diagnosis), plots.findings, diagnosis.verdict)

    def stragglers(self) -> Answer:
        """Who arrives first and last, and who is waited for."""
        frame, left_out = arrivals(self._tables), openings(self._tables)
        texts = [f"left out: {plural(left_out, 'collective')} with which a rank's window begins"] if left_out else []
        if not frame["last"].sum():
            frame = frame.clear()
            texts.insert(0, "no stragglers: ranks cannot be compared, or none was later than clocks may be apart")
        return Answer(frame, plots.stragglers, "; ".join(texts))

    def overlap(self) -> Answer:
        """Computation, communication, exposed communication and idling of every rank and iteration in windows that were
        traced."""
        frame = overlap_frame(self._tables)
        why = "" if len(frame) else "no overlap: no window was traced; record one with TRACING_WINDOW=START:STOP"
        return Answer(frame, plots.overlap, why)

    def graph(self, rank: int, window: int = 1) -> LinkedTrace:
        """Everything that a rank did in a window, and why one thing waits for another; linked here where nobody has.
        Empty where the window was not traced: then its `text` says so."""
        for one in self._found.tasks:
            if one.rank != rank:
                continue
            for pair in one.pairs:
                if pair.window == window:
                    return link(pair.et, pair.kineto, pair.comms, rank=rank)
            linked = one.linked or ((one.path,) if one.kind == "linked" else ())
            if len(linked) >= window > 0:
                return read_linked(linked[window - 1])
        why = (
            f"no graph: there is no execution trace with a Kineto trace of rank {rank}, window {window}; record one "
            "with TRACING_WINDOW=START:STOP"
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
            groups = {(one.group.pg, tuple(one.group.ranks or ())) for trace in self._traces for one in trace.groups}
            counts = plural(len(self._traces), "rank"), plural(calls, "call"), plural(len(groups), "group")
            lines.append(f"  read        {', '.join(counts)}")
            lines.append(f"  timed by    {', '.join(sorted({one.timed_by for one in self._traces}))}")
        else:
            lines.append("  not read yet")
        if self._found.skipped:
            lines.append(f"  not usable  {plural(len(self._found.skipped), 'file')}: see .notes")
        return "\n".join([*lines, f"  tables      {', '.join(_TABLE_NAMES)}", f"  answers     {', '.join(_ANSWERS)}"])


_TABLE_NAMES = ("calls", "collectives", "transfers", "arrivals", "steps", "groups", "ranks", "waits", "durations")
_ANSWERS = ("bandwidth()", "diagnose()", "stragglers()", "overlap()", "graph(rank)")


def _findings(diagnosis: Diagnosis | None) -> pl.DataFrame:
    """One row per finding: what it is, about whom, and the sentence."""

    def rows(findings: Iterable[Finding], what: str) -> list[tuple[Any, ...]]:
        return [
            (what, one.kind, one.pg[0] if one.pg else "", one.op, one.collective_seq_id)
            + (rank_ranges(one.culprit_ranks), rank_ranges(one.waiting_ranks), one.text)
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
        "text": pl.String,
    }
    every = []
    if diagnosis is not None:
        every += rows(diagnosis.findings, "cause")
        every += rows(diagnosis.consequences, "consequence")
        every += rows(diagnosis.advisory, "advisory")
    return pl.DataFrame(every, schema=schema, orient="row")
