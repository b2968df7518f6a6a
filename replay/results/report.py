"""What a replay gives: `replay.json`, `replay.csv` and a page; `show` prints it."""

from __future__ import annotations

import csv
import io
from collections import Counter
from pathlib import Path

import msgspec

import crossrank
from crossrank.atomic_file import whole_file
from crossrank.errors import CrossrankError, one_line
from crossrank.replay.plan.memory_plan import bytes_needed
from crossrank.replay.plan.plan import Coverage, Plan, number_of
from crossrank.replay.results.compare import Comparison, compare
from crossrank.replay.results.measure import (
    CheckFailure,
    Measured,
    RankResult,
    Row,
    end_to_end_ns,
    measure,
    percentile,
    percentiles_us,
    table,
)
from crossrank.replay.settings import Settings
from crossrank.tools.output.console import csv_text

JSON, CSV, HTML = "replay.json", "replay.csv", "replay.html"


class Check(msgspec.Struct, kw_only=True):
    """What `--check` found."""

    tensors: int
    """Output tensors that were compared, over all ranks and passes."""
    failures: list[CheckFailure]


class Report(msgspec.Struct, kw_only=True):
    """`replay.json`."""

    source: str
    kind: str
    world_size: int
    settings: Settings
    variables: dict[str, str]
    """Environment variables that a sweep set."""
    what_if: dict[str, str]
    """How the plan differs from the recording: option -> value."""
    coverage: Coverage
    share_of_calls: float
    share_of_bytes: float
    bytes_per_pass: int
    """S of nccl-tests, summed over calls and ranks, as replayed; `coverage` counts as recorded."""
    calls_per_pass: int = 0
    """Calls over all ranks, as replayed; `coverage` counts as recorded. 0 in reports of older versions."""
    notes: list[str]
    damage: list[str]
    """What of the trace could not be read."""
    substitutes: dict[str, int]
    """What the backend could not do as recorded, and what it did instead -> calls, over all ranks."""
    hosts: dict[str, int]
    """Host -> ranks."""
    devices: dict[str, int]
    versions: dict[str, str]
    clock_error_us: float
    """By how much the ranks' clocks may be apart, at worst: what "waiting" and "time" may be wrong by."""
    end_to_end_us: dict[str, float]
    """p50, p95 and p99 over the passes, from the first rank's start to the last rank's end."""
    cpu_us_per_call: float
    """CPU time of the process per launch-and-wait, all threads, mean over the ranks."""
    rows: list[Row]
    comparison: Comparison | None
    """None where the recording has no durations."""
    check: Check | None
    schema: str = "crossrank-replay 1"
    crossrank: str = crossrank.__version__


def make_report(
    plan: Plan,
    settings: Settings,
    results: list[RankResult],
    *,
    what_if: dict[str, str],
    variables: dict[str, str],
) -> tuple[Report, list[Measured]]:
    """The report of one replay, and the calls that it is made of."""
    measured = measure(plan, results)
    coverage = plan.coverage()
    comparison = compare(plan, measured, results)
    substitutes: Counter[str] = Counter()
    for result in results:
        substitutes.update(result.said)
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
            rows=table(measured, plan),
            comparison=comparison if comparison.calls else None,
            check=check,
        ),
        measured,
    )


def indented(content: object) -> bytes:
    """JSON that people can read as well."""
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def plan_json(plan: Plan) -> bytes:
    """What `show.print_plan` says, as JSON."""
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


def to_json(report: Report) -> bytes:
    return indented(report)


_COLUMNS = (
    "rank",
    "call",
    "op",
    "pg",
    "seq",
    "peer",
    "bytes",
    "dtype",
    "source",
    "issue_us_p50",
    "completion_us_p50",
    "completion_us_p95",
    "waiting_us_p50",
    "time_us_p50",
    "has_rate",
    "recorded_us",
    "relative_error",
)


def to_csv(plan: Plan, measured: list[Measured]) -> str:
    """One line per call and rank; times in us, over the passes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    rows = []
    for call in measured:
        for rank, (index, record) in call.records.items():
            recorded = plan.ranks[rank].calls[index].took_ns
            completion = percentile(call.completion[rank], 0.5)
            rows.append(
                (
                    rank,
                    index,
                    record.op,
                    record.pg,
                    number_of(record),
                    record.peer,
                    record.bytes,
                    record.dtype,
                    record.source,
                    _us(percentile(call.issue[rank], 0.5)),
                    _us(completion),
                    _us(percentile(call.completion[rank], 0.95)),
                    _us(percentile(call.waiting[rank], 0.5)),
                    _us(percentile(call.time, 0.5)),
                    int(call.has_rate or not call.bytes),
                    _us(recorded) if recorded else None,
                    round(abs(completion - recorded) / recorded, 4) if recorded else None,
                )
            )
    rows.sort(key=lambda row: row[:2])
    writer.writerows(map(csv_text, row) for row in rows)
    return text.getvalue()


def _us(nanoseconds: float) -> float:
    return round(nanoseconds / 1000, 3)


def write_report(folder: str, report: Report, plan: Plan, measured: list[Measured]) -> list[str]:
    """Write `replay.json`, `replay.csv` and `replay.html` into `folder`; returns their paths."""
    from crossrank.replay.results.page import page

    contents = {
        JSON: to_json(report),
        CSV: to_csv(plan, measured).encode(),
        HTML: page(report).encode(),
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
