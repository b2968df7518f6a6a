"""What a replay measured: tables for the console and pages, a page of its own, and the sections of the report."""

from __future__ import annotations

from crossrank.text import amount, microseconds, milliseconds, percent, plural, printable, significant, size_text
from crossrank.tools.output.charts import Rate, bandwidth_chart
from crossrank.tools.output.console import Table, table_of
from crossrank.tools.output.page import Block, Page, Points, Section, Text, Tile, Tiles
from crossrank.tools.traces.replayed import JSON, Check, Comparison, Percentiles, Report, Row

_ON_CONSOLE = 24
_MOST_DAMAGES = 50


def rows_table(rows: list[Row], limit: int) -> Table:
    return table_of(
        rows,
        (
            ("operation", lambda row: row.op),
            ("group", lambda row: row.pg),
            ("#ranks", lambda row: row.ranks),
            ("size", lambda row: size_text(row.size_to)),
            ("#calls", lambda row: row.calls),
            ("#time p50", lambda row: microseconds(row.time_us.p50)),
            ("#p95", lambda row: microseconds(row.time_us.p95)),
            ("#p99 us", lambda row: microseconds(row.time_us.p99)),
            ("#issue us", lambda row: microseconds(row.issue_us.p50)),
            ("#waiting us", lambda row: microseconds(row.waiting_us.p50)),
            ("#algbw", lambda row: _median(row.algbw_gb_per_s)),
            ("#busbw GB/s", lambda row: _median(row.busbw_gb_per_s)),
        ),
        limit=limit,
        more=f"{JSON} has all (-o)",
    )


def _median(rates: Percentiles | None) -> str:
    return significant(None if rates is None else rates.p50)


def comparison_table(comparison: Comparison, limit: int) -> Table:
    return table_of(
        comparison.rows,
        (
            ("operation", lambda row: row.op),
            ("size", lambda row: size_text(row.size_to)),
            ("#calls", lambda row: row.calls),
            ("#recorded us", lambda row: microseconds(row.recorded_us)),
            ("#replayed us", lambda row: microseconds(row.replayed_us)),
            ("#ratio", lambda row: f"{row.ratio:.2f}"),
            ("#error p50", lambda row: percent(row.error_p50)),
            ("#p95", lambda row: percent(row.error_p95)),
            ("#collective recorded us", lambda row: microseconds(row.collective_recorded_us)),
            ("#replayed us", lambda row: microseconds(row.collective_replayed_us)),
            ("#error p50", lambda row: percent(row.collective_error_p50)),
        ),
        limit=limit,
        more=f"{JSON} has all (-o)",
    )


def failures_table(check: Check, limit: int) -> Table:
    return table_of(
        check.failures,
        (
            ("#rank", lambda one: one.rank),
            ("#call id", lambda one: one.call),
            ("operation", lambda one: one.op),
            ("group", lambda one: one.pg),
            ("#tensor", lambda one: one.tensor),
            ("#first element", lambda one: one.element),
            ("#wrong", lambda one: one.elements),
            ("#expected", lambda one: f"{one.expected:g}"),
            ("#got", lambda one: f"{one.got:g}"),
        ),
        limit=limit,
        more=f"{JSON} has all (-o)",
    )


def comparison_text(comparison: Comparison) -> str:
    text = (
        f"Relative error over {comparison.calls:,} calls: {percent(comparison.error_p50)} median, "
        f"{percent(comparison.error_p95)} at p95; {comparison.without_time:,} call(s) have no recorded time"
    )
    if comparison.recorded_end_to_end_us is None:
        return text
    recorded, replayed = comparison.recorded_end_to_end_us, comparison.replayed_end_to_end_us
    return f"{text}. End to end {milliseconds(recorded / 1000)} recorded (with computation), " + (
        f"{milliseconds(replayed / 1000)} replayed"
    )


# --- the console -----------------------------------------------------------------------------------------------------


def print_report(report: Report) -> None:
    """The tables of one replay."""
    for text, count in report.substitutes.items():
        print(f"  instead: {count:,} call(s): {printable(text)}")
    settings = report.settings
    rows_table(report.rows, _ON_CONSOLE).print(
        f"Replayed with {settings.backend}, {settings.repeats} passes after {settings.warmup} to warm up"
    )
    late = sum(row.late_ends for row in report.rows)
    if late:
        print(f"  of {late:,} call(s) only the wait tells the end: their times are upper bounds, and have no bandwidth")
    end = report.end_to_end_us
    print(
        f"\nEnd to end {milliseconds(end.p50 / 1000)} per pass (p95 {milliseconds(end.p95 / 1000)}); "
        f"{report.cpu_us_per_call:.1f} us CPU per call and rank; time is from the last arrival to the last end"
        + (f"; clocks agree within {report.clock_error_us:.0f} us" if report.clock_error_us else "")
    )
    if report.comparison is not None:
        comparison_table(report.comparison, _ON_CONSOLE).print(
            "Replayed against recorded: completion of each rank's calls, and the collectives themselves; medians"
        )
        if any(row.collective_recorded_us is None for row in report.comparison.rows):
            print("  - where recorded times do not tell that of the collective: a root or a sender may end early")
        print(f"\n{comparison_text(report.comparison)}")
        print(f"The recording was made under a profiler or torch's watch, the replay at pace {settings.pace}")
    elif not report.what_if:
        print("The recording has no durations to compare with; `crossrank link` gives them to the calls of a window")
    if report.check is not None and report.check.failures:
        title = f"Wrong results ({len(report.check.failures)} of {report.check.tensors:,} checked)"
        failures_table(report.check, _ON_CONSOLE).print(title)
    elif report.check is not None:
        print(f"\nChecked: all {report.check.tensors:,} results are right")


# --- pages -----------------------------------------------------------------------------------------------------------


def replay_page(report: Report) -> Page:
    settings = report.settings
    hosts = ", ".join(f"{host} ({count})" for host, count in report.hosts.items())
    parts = [
        f"{report.world_size} ranks with {settings.backend} on {hosts}",
        f"{settings.repeats} passes after {settings.warmup} to warm up, pace {settings.pace}",
        f"torch {report.versions.get('torch', 'unknown')}, crossrank {report.crossrank}",
        *(f"{name} {value}" for name, value in report.what_if.items()),
        *(f"{name}={value}" for name, value in report.variables.items()),
    ]
    return Page(
        title=f"Replay on {report.world_size} ranks",
        heading=f"Replay of {report.source}",
        subtitle="; ".join(parts),
        sections=replay_sections(report, limit=200),
    )


def replay_sections(report: Report, limit: int) -> list[Section]:
    """What was replayed, how it differs, bandwidths, all rows, and the recording beside them."""
    sections = [Section("Replay", [_tiles(report)], id="replay")]
    if differences := _differences(report):
        sections.append(Section("How it differs from the recording", [Points(differences)]))
    rates = [
        Rate(
            op=row.op,
            size=row.bytes / row.calls,
            low=row.busbw_gb_per_s.p95,  # at the p95 of the time
            busbw=row.busbw_gb_per_s.p50,
            high=row.busbw_gb_per_s.p50,
            text=f"{row.op} on {row.pg} ({plural(row.ranks, 'rank')}), {size_text(row.size_to)}, "
            + plural(row.calls, "call"),
            is_bound=bool(row.late_ends),
        )
        for row in report.rows[:limit]
        if row.busbw_gb_per_s is not None and row.busbw_gb_per_s.p50 > 0 and row.calls > 0 and row.bytes > 0
    ]
    blocks: list[Block] = [bandwidth_chart("replayed-sizes", rates)] if rates else []
    clocks = f" The ranks' clocks agree within {report.clock_error_us:.0f} us." if report.clock_error_us else ""
    blocks += [
        Text(
            "Time is from the last rank's arrival to the last rank's end, waiting what a rank waits for the last to "
            f"arrive. The chart has medians, down to the bandwidth at the p95 of the time.{clocks}",
            "soft",
        ),
        rows_table(report.rows, limit),
    ]
    sections.append(Section("Replayed, by operation, group and size", blocks))
    if report.comparison is not None:
        text = (
            "Completion: of each rank's call, waiting for others included. Collective: from the last arrival; in the "
            "recording, the shortest completion among the ranks."
        )
        blocks = [Text(comparison_text(report.comparison) + "."), Text(text, "soft")]
        sections.append(
            Section("Replayed against recorded", [*blocks, comparison_table(report.comparison, limit)], id="comparison")
        )
    if report.check is not None and report.check.failures:
        sections.append(Section("Wrong results", [failures_table(report.check, limit)]))
    return sections


def _tiles(report: Report) -> Tiles:
    coverage = report.coverage
    calls = f"of the calls replayed: {coverage.calls:,} of {coverage.recorded_calls:,}"
    if report.calls_per_pass not in (0, coverage.calls):
        calls += f", changed to {report.calls_per_pass:,}"
    size = f"of the bytes: {amount(coverage.bytes)} of {amount(coverage.recorded_bytes, coverage.unsized)}"
    if report.bytes_per_pass != coverage.bytes:
        size += f", changed to {amount(report.bytes_per_pass)}"
    end = report.end_to_end_us
    tiles = [
        Tile(percent(report.share_of_calls), calls),
        Tile(percent(report.share_of_bytes), size),
        Tile(milliseconds(end.p50 / 1000), f"end to end per pass, p95 {milliseconds(end.p95 / 1000)}"),
    ]
    if (comparison := report.comparison) is not None:
        text = f"relative error of completions, p95 {percent(comparison.error_p95)}, over {comparison.calls:,} calls"
        tiles.append(Tile(percent(comparison.error_p50), text))
    if (check := report.check) is not None:
        wrong = bool(check.failures)
        text = f"{check.tensors:,} results checked"
        tiles.append(Tile("wrong" if wrong else "all right", text, "bad" if wrong else "good"))
    return Tiles(tiles)


def _differences(report: Report) -> list[Text]:
    reasons, substitutes = report.coverage.reasons.items(), report.substitutes.items()
    return [
        *(Text(f"left out: {count:,} call(s): {reason}", "bad") for reason, count in reasons),
        *(Text(f"instead: {count:,} call(s): {text}") for text, count in substitutes),
        *(Text(f"damaged: {text}", "bad") for text in report.damage[:_MOST_DAMAGES]),
        *(Text(note) for note in report.notes),
    ]
