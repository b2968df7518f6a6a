"""Makes the outputs of a replay: `replay.json`, `replay.csv` and a page."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import polars as pl

from crossrank.atomic_file import join, make_folder
from crossrank.replay.plan.compute.compute_plan import coverage_of
from crossrank.replay.plan.memory_plan import bytes_needed
from crossrank.replay.plan.plan import Plan, RankPlan, number_of
from crossrank.replay.results.measure import batches, blocks, compare, end_to_end_ns, measure, percentiles_us, table
from crossrank.replay.results.whole_step import compare_step
from crossrank.replay.run.messages import RankResult
from crossrank.text import amount, csv_text, milliseconds, percent, plural, printable
from crossrank.tools.commands.options import write_output
from crossrank.tools.traces.replayed import (
    CSV,
    JSON,
    CheckResult,
    ComputeCoverage,
    DataComparison,
    ReplayReport,
    Settings,
)

HTML = "replay.html"
_MAX_SHOWN = 5


def make_report(
    plan: Plan,
    settings: Settings,
    results: list[RankResult],
    *,
    what_if: dict[str, str],
    variables: dict[str, str],
) -> tuple[ReplayReport, pl.DataFrame]:
    """Return the report of one replay, and the table of `measure` for it."""
    times = measure(plan, results)
    comparison = compare(plan, times, results)
    checks = [result.check for result in results if result.check is not None]
    failures = [failure for one in checks for failure in one.failures]
    calls = plan.calls * max(settings.repeats, 1)
    report = ReplayReport(
        source=plan.source,
        kind=plan.kind,
        world_size=plan.world_size,
        settings=settings,
        variables=variables,
        what_if=what_if,
        **_count_plan(plan),
        notes=plan.notes,
        damage=plan.damage,
        substitutes=dict(sum((Counter(result.substitutes) for result in results), Counter[str]())),
        hosts=dict(Counter(result.host for result in results)),
        devices=dict(Counter(result.device for result in results)),
        versions=results[0].versions,
        clock_error_us=max(result.offset_error_ns for result in results) / 1000,
        end_to_end_us=percentiles_us(end_to_end_ns(results)),
        cpu_us_per_call=sum(result.cpu_s for result in results) * 1e6 / calls if calls else 0.0,
        rows=table(times),
        comparison=comparison if comparison.calls or comparison.recorded_end_to_end_us is not None else None,
        check=CheckResult(tensors=sum(one.tensors for one in checks), failures=failures) if checks else None,
        data=_join_comparisons([result.data for result in results if result.data is not None]),
        by_source=blocks(times, plan, "source"),
        by_step=sorted(blocks(times, plan, "step"), key=lambda block: int(block.name)),
        batches=batches(times, settings.batch) if settings.batch is not None else None,
        step=compare_step(plan, results),
    )
    return report, times


def _join_comparisons(parts: list[DataComparison]) -> DataComparison | None:
    if not parts:
        return None
    return msgspec.structs.replace(
        parts[0],
        tensors=sum(one.tensors for one in parts),
        not_comparable=sum(one.not_comparable for one in parts),
        different=sum(one.different for one in parts),
        largest_difference=max(one.largest_difference for one in parts),
        failures=[failure for one in parts for failure in one.failures],
    )


def indented(content: object) -> bytes:
    """Return `content` as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def plan_json(plan: Plan) -> bytes:
    """Return the facts that `print_plan` prints, as JSON."""
    facts = {name: getattr(plan, name) for name in ("source", "kind", "world_size", "groups", "notes", "damage")}
    facts |= _count_plan(plan) | {"memory_per_rank": _max_memory_per_rank(plan)}
    if computed := plan.recorded_computation():
        facts["computation"] = coverage_of(computed)
    return indented(facts)


def _count_plan(plan: Plan) -> dict[str, Any]:
    """Return the counts of a plan, for its JSON and for the report of its replay."""
    coverage = plan.coverage()
    return {
        "coverage": coverage,
        "share_of_calls": coverage.share_of_calls,
        "share_of_bytes": coverage.share_of_bytes,
        "bytes_per_pass": plan.bytes,
        "calls_per_pass": plan.calls,
    }


def _max_memory_per_rank(plan: Plan) -> int:
    return max(rank_bytes(rank) for rank in plan.ranks)


def rank_bytes(rank: RankPlan) -> int:
    """Return the bytes of a rank's tensors. With computation, its calls use the same tensors."""
    if rank.compute is None:
        return bytes_needed(rank.calls)
    changed = [call for call in rank.calls if call.merged or call.record.bytes != call.recorded_bytes]
    return rank.compute.bytes + (bytes_needed(rank.calls) if changed else 0)


def print_plan(plan: Plan) -> None:
    """Print coverage and notes of the plan."""
    coverage = plan.coverage()
    print(
        f"{printable(plan.source)}: the replay covers {coverage.calls:,} of {coverage.recorded_calls:,} recorded calls "
        f"({percent(coverage.share_of_calls)}) and {amount(coverage.bytes)} of "
        f"{amount(coverage.recorded_bytes, coverage.unsized)} "
        f"({percent(coverage.share_of_bytes)}), on {plural(plan.world_size, 'rank')} "
        f"and {plural(len(plan.groups), 'group')}"
    )
    changed = [f"{plan.calls:,} calls"] * (plan.calls != coverage.calls)
    changed += [amount(plan.bytes)] * (plan.bytes != coverage.bytes)
    if changed:
        print(f"  changed to {' and '.join(changed)} per pass")
    if computed := plan.recorded_computation():
        for line in coverage_lines(coverage_of(computed)):
            print(f"  {line}")
    print(f"  memory for tensors: up to {amount(_max_memory_per_rank(plan))} per rank")
    for reason, count in coverage.reasons.items():
        print(f"  left out: {plural(count, 'call')}: {printable(reason)}")
    for problem in plan.damage[:_MAX_SHOWN]:
        print(f"  damaged: {printable(problem)}; an unknown number of calls is missing")
    if len(plan.damage) > _MAX_SHOWN:
        print(f"  damaged: and {len(plan.damage) - _MAX_SHOWN} more")
    for note in plan.notes:
        print(f"  {printable(note)}")


def coverage_lines(coverage: ComputeCoverage) -> Iterator[str]:
    """Yield lines about the computation that runs and that does not."""
    yield (
        f"computation: {coverage.operations:,} of {coverage.recorded_operations:,} operations "
        f"({percent(coverage.share_of_operations)}), {percent(coverage.share_of_time)} of their recorded time"
    )
    for row in coverage.left_out[:_MAX_SHOWN]:
        yield (
            f"idles instead: {row.operations:,} x {printable(row.name)} ({milliseconds(row.ns / 1e6)}): "
            f"{printable(row.reason)}"
        )
    if len(coverage.left_out) > _MAX_SHOWN:
        yield f"idle instead: and {len(coverage.left_out) - _MAX_SHOWN} more kinds"


_RECORD_COLUMNS = ("op", "pg", "seq", "peer", "bytes", "dtype", "source")


def to_csv(plan: Plan, times: pl.DataFrame) -> str:
    """Return one line per call and rank; times in us, over the passes."""

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
            time_us_p50=(pl.col("time").filter("is_known").quantile(0.5, "linear") / 1000).round(3),
            has_rate=(pl.col("has_rate") | (pl.col("bytes") == 0)).first().cast(pl.Int8),
            recorded_us=(recorded / 1000).round(3),
            relative_error=pl.when(completion > 0).then(((completion - recorded).abs() / recorded).round(4)),
        )
        .sort("rank", "index")
    )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("rank", "call", *_RECORD_COLUMNS, *of_calls.columns[2:]))
    for rank, index, *measured in of_calls.iter_rows():
        record = plan.ranks[rank].calls[index].record
        own = (record.op, record.pg, number_of(record), record.peer, record.bytes, record.dtype, record.source)
        writer.writerow(map(csv_text, (rank, index, *own, *measured)))
    return text.getvalue()


def write_report(folder: str, report: ReplayReport, plan: Plan, times: pl.DataFrame) -> list[str]:
    """Write `replay.json`, `replay.csv` and `replay.html` into `folder`; return their paths."""
    from crossrank.tools.output.replay import replay_page

    contents = {
        JSON: indented(report),
        CSV: to_csv(plan, times).encode(),
        HTML: replay_page(report).encode(),
    }
    make_folder(folder)
    paths = {join(folder, name): content for name, content in contents.items()}
    for path, content in paths.items():
        write_output(path, content)
    return list(paths)
