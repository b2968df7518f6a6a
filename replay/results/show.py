"""A plan and a report for people: what stands on the terminal, and how amounts are written."""

from __future__ import annotations

from crossrank.replay.plan.memory_plan import bytes_needed
from crossrank.replay.plan.plan import Plan
from crossrank.replay.results.compare import Comparison
from crossrank.replay.results.report import JSON, Check, Report
from crossrank.text import amount, printable
from crossrank.tools.output.console import print_table

_MOST_ROWS = 24
_MOST_PROBLEMS = 5


def print_plan(plan: Plan) -> None:
    """Coverage, notes, and what the plan consists of."""
    coverage = plan.coverage()
    print(
        f"{printable(plan.source)}: {coverage.calls:,} of {coverage.recorded_calls:,} recorded calls "
        f"({_percent(coverage.share_of_calls)}) and {amount(coverage.bytes)} of "
        f"{amount(coverage.recorded_bytes, coverage.unsized)} "
        f"({_percent(coverage.share_of_bytes)}) are replayed, on {plan.world_size} rank(s) "
        f"and {len(plan.groups)} group(s)"
    )
    changed = [f"{plan.calls:,} calls"] * (plan.calls != coverage.calls)
    changed += [amount(plan.bytes)] * (plan.bytes != coverage.bytes)
    if changed:
        print(f"  changed to {' and '.join(changed)} per pass")
    needed = max(bytes_needed(rank.calls) for rank in plan.ranks)
    print(f"  memory for tensors: up to {amount(needed)} per rank")
    for reason, count in coverage.reasons.items():
        print(f"  left out: {count:,} call(s): {printable(reason)}")
    for problem in plan.damage[:_MOST_PROBLEMS]:
        print(f"  damaged: {printable(problem)}; calls may be missing that nobody counts")
    if len(plan.damage) > _MOST_PROBLEMS:
        print(f"  damaged: and {len(plan.damage) - _MOST_PROBLEMS} more")
    for note in plan.notes:
        print(f"  {printable(note)}")


def print_report(report: Report) -> None:
    """The tables of one replay."""
    for text, count in report.substitutes.items():
        print(f"  instead: {count:,} call(s): {printable(text)}")
    settings = report.settings
    rows = [
        (
            row.op,
            row.pg,
            row.ranks,
            size_text(row.size_to),
            row.calls,
            microseconds(row.time_us["p50"]),
            microseconds(row.time_us["p95"]),
            microseconds(row.time_us["p99"]),
            microseconds(row.issue_us["p50"]),
            microseconds(row.waiting_us["p50"]),
            rate(row.algbw_gb_per_s),
            rate(row.busbw_gb_per_s),
        )
        for row in report.rows[:_MOST_ROWS]
    ]
    print_table(
        f"Replayed with {settings.backend}, {settings.repeats} passes after {settings.warmup} to warm up; times in us",
        (
            "operation",
            "group",
            "#ranks",
            "size",
            "#calls",
            "#p50",
            "#p95",
            "#p99",
            "#issue",
            "#waiting",
            "#algbw GB/s",
            "#busbw GB/s",
        ),
        rows,
    )
    late = sum(row.late_ends for row in report.rows)
    if late:
        print(f"  of {late:,} call(s) only the wait tells the end: their times are upper bounds, and have no bandwidth")
    if len(report.rows) > _MOST_ROWS:
        print(f"  and {len(report.rows) - _MOST_ROWS} more rows, in {JSON} (-o)")
    end = report.end_to_end_us
    print(
        f"\nEnd to end {end['p50'] / 1000:,.1f} ms per pass (p95 {end['p95'] / 1000:,.1f}); "
        f"{report.cpu_us_per_call:.1f} us CPU per call and rank; time is from the last arrival to the last end"
        + (f"; clocks agree within {report.clock_error_us:.0f} us" if report.clock_error_us else "")
    )
    if report.comparison is not None:
        print_comparison(report.comparison)
        print(f"The recording was made under a profiler or torch's watch, the replay at pace {settings.pace}")
    elif not report.what_if:
        print("The recording has no durations to compare with; `crossrank link` gives them to the calls of a window")
    if report.check is not None:
        print_check(report.check)


def print_comparison(comparison: Comparison) -> None:
    rows = [
        (
            row.op,
            size_text(row.size_to),
            row.calls,
            microseconds(row.recorded_us),
            microseconds(row.replayed_us),
            f"{row.ratio:.2f}",
            percent(row.error_p50),
            percent(row.error_p95),
            microseconds(row.collective_recorded_us),
            microseconds(row.collective_replayed_us),
            percent(row.collective_error_p50),
        )
        for row in comparison.rows[:_MOST_ROWS]
    ]
    print_table(
        "Replayed against recorded: completion of each rank's calls, and the collectives themselves; median us",
        (
            "operation",
            "size",
            "#calls",
            "#recorded",
            "#replayed",
            "#ratio",
            "#error p50",
            "#error p95",
            "#collective recorded",
            "#replayed",
            "#error p50",
        ),
        rows,
    )
    if any(row.collective_recorded_us is None for row in comparison.rows):
        print("  - where recorded times do not tell that of the collective: a root or a sender may end early")
    text = (
        f"Relative error over {comparison.calls:,} calls: {percent(comparison.error_p50)} median, "
        f"{percent(comparison.error_p95)} at p95; {comparison.without_time:,} call(s) have no recorded time"
    )
    if comparison.recorded_end_to_end_us is not None:
        text += (
            f". End to end {comparison.recorded_end_to_end_us / 1000:,.1f} ms recorded (with computation), "
            f"{comparison.replayed_end_to_end_us / 1000:,.1f} ms replayed"
        )
    print(f"\n{text}")


def print_check(check: Check) -> None:
    if not check.failures:
        print(f"\nChecked: all {check.tensors:,} results are right")
        return
    rows = [
        (one.rank, one.call, one.op, one.pg, one.tensor, one.element, one.elements, f"{one.expected:g}", f"{one.got:g}")
        for one in check.failures[:_MOST_ROWS]
    ]
    print_table(
        f"Wrong results ({len(check.failures)} of {check.tensors:,} checked)",
        ("#rank", "#call id", "operation", "group", "#tensor", "#first element", "#wrong", "#expected", "#got"),
        rows,
    )


def size_text(most: int) -> str:
    """A size bucket for people, by its upper bound: binary units, as bounds are."""
    if most == 0:
        return "none"
    value, unit = float(most), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"up to {value:g} {unit}"


def microseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def rate(values: dict[str, float] | None) -> str:
    return "-" if values is None else f"{values['p50']:.3g}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def _percent(share: float) -> str:
    # Never rounded up to a coverage that it is not.
    return f"{int(share * 1000) / 10:.1f} %"
