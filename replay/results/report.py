"""What a replay gives: `replay.json`, `replay.csv` and a page."""

from __future__ import annotations

import csv
import io
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from crossrank.atomic_file import whole_file
from crossrank.errors import CrossrankError, one_line
from crossrank.replay.plan.memory_plan import bytes_needed
from crossrank.replay.plan.plan import Plan, number_of
from crossrank.replay.results.compare import compare
from crossrank.replay.results.measure import (
    RankResult,
    end_to_end_ns,
    measure,
    percentiles_us,
    table,
)
from crossrank.text import csv_text
from crossrank.tools.traces.replayed import CSV, JSON, Check, Report, Settings

if TYPE_CHECKING:
    import polars as pl

HTML = "replay.html"


def make_report(
    plan: Plan,
    settings: Settings,
    results: list[RankResult],
    *,
    what_if: dict[str, str],
    variables: dict[str, str],
) -> tuple[Report, pl.DataFrame]:
    """The report of one replay, and the table of `measure` that it is made of."""
    times = measure(plan, results)
    coverage = plan.coverage()
    comparison = compare(plan, times, results)
    substitutes: Counter[str] = Counter()
    for result in results:
        substitutes.update(result.substitutes)
    check = None
    if any(result.check_failures is not None for result in results):
        failures = [failure for result in results for failure in result.check_failures or ()]
        check = Check(tensors=sum(result.checked for result in results), failures=failures)
    calls = plan.calls * max(settings.repeats, 1)
    return (
        Report(
            source=plan.source,
            kind=plan.kind,
            world_size=plan.world_size,
            settings=settings,
            variables=variables,
            what_if=what_if,
            coverage=coverage,
            share_of_calls=coverage.share_of_calls,
            share_of_bytes=coverage.share_of_bytes,
            bytes_per_pass=plan.bytes,
            calls_per_pass=plan.calls,
            notes=plan.notes,
            damage=plan.damage,
            substitutes=dict(substitutes),
            hosts=dict(Counter(result.host for result in results)),
            devices=dict(Counter(result.device for result in results)),
            versions=results[0].versions,
            clock_error_us=max(result.offset_error_ns for result in results) / 1000,
            end_to_end_us=percentiles_us(end_to_end_ns(results)),
            cpu_us_per_call=sum(result.cpu_s for result in results) * 1e6 / calls if calls else 0.0,
            rows=table(times, plan),
            comparison=comparison if comparison.calls else None,
            check=check,
        ),
        times,
    )


def indented(content: object) -> bytes:
    """JSON that people can read as well."""
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def plan_json(plan: Plan) -> bytes:
    """What `show.print_plan` prints, as JSON."""
    coverage = plan.coverage()
    facts = {
        "source": plan.source,
        "kind": plan.kind,
        "world_size": plan.world_size,
        "groups": plan.groups,
        "coverage": coverage,
        "share_of_calls": coverage.share_of_calls,
        "share_of_bytes": coverage.share_of_bytes,
        "bytes_per_pass": plan.bytes,
        "calls_per_pass": plan.calls,
        "memory_per_rank": max(bytes_needed(rank.calls) for rank in plan.ranks),
        "notes": plan.notes,
        "damage": plan.damage,
    }
    return indented(facts)


_RECORD_COLUMNS = ("op", "pg", "seq", "peer", "bytes", "dtype", "source")


def to_csv(plan: Plan, times: pl.DataFrame) -> str:
    """One line per call and rank; times in us, over the passes."""
    import polars as pl

    def in_us(column: str, share: float) -> pl.Expr:
        return (pl.col(column).quantile(share, "linear") / 1000).round(3).alias(f"{column}_us_p{100 * share:.0f}")

    recorded, completion = pl.col("recorded").first(), pl.col("completion").median()
    of_calls = (
        times.group_by("rank", "index")
        .agg(
            in_us("issue", 0.5),
            in_us("completion", 0.5),
            in_us("completion", 0.95),
            in_us("waiting", 0.5),
            in_us("time", 0.5),
            has_rate=(pl.col("has_rate") | (pl.col("bytes") == 0)).first().cast(pl.Int8),
            recorded_us=(recorded / 1000).round(3),
            relative_error=((completion - recorded).abs() / recorded).round(4),
        )
        .sort("rank", "index")
    )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("rank", "call", *_RECORD_COLUMNS, *of_calls.columns[2:]))
    for rank, index, *measured in of_calls.iter_rows():
        record = plan.ranks[rank].calls[index].record
        own = (record.op, record.pg, number_of(record), record.peer, record.bytes, record.dtype, record.source)
        writer.writerow([csv_text(value) for value in (rank, index, *own, *measured)])
    return text.getvalue()


def write_report(folder: str, report: Report, plan: Plan, times: pl.DataFrame) -> list[str]:
    """Write `replay.json`, `replay.csv` and `replay.html` into `folder`; returns their paths."""
    from crossrank.tools.output.replay import replay_page

    contents = {
        JSON: indented(report),
        CSV: to_csv(plan, times).encode(),
        HTML: replay_page(report).encode(),
    }
    paths = []
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            path = Path(folder) / name
            with whole_file(path) as temporary:
                temporary.write_bytes(content)
            paths.append(str(path))
    except OSError as error:
        raise CrossrankError(f"{folder}: cannot be written to ({one_line(error)}); give another with -o") from error
    return paths
