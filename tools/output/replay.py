"""The results of a replay: tables for the console and pages, its own page, and the sections of the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossrank.text import amount, microseconds, milliseconds, percent, plural, printable, significant, size_text
from crossrank.tools.output.charts import Chart, Rate, Trace, axis, bandwidth_chart
from crossrank.tools.output.console import Columns, Table, table_of
from crossrank.tools.traces.replayed import (
    JSON,
    Batches,
    CallTimes,
    CheckFailure,
    Compared,
    Comparison,
    ComputedOperation,
    DataComparison,
    Percentiles,
    ReplayReport,
    ReplayRow,
    StepComparison,
)

_ON_CONSOLE = 24
_TOP = 20


def _median(rates: Percentiles | None) -> str:
    return significant(None if rates is None else rates.p50)


_ROWS: Columns[ReplayRow] = (
    ("operation", lambda row: row.op),
    ("group", lambda row: row.pg),
    ("#ranks", lambda row: row.ranks),
    ("size", lambda row: size_text(row.size_to)),
    ("#collectives", lambda row: row.calls),
    ("#time\np50 us", lambda row: microseconds(row.time_us.p50)),
    ("#time\np95 us", lambda row: microseconds(row.time_us.p95)),
    ("#time\np99 us", lambda row: microseconds(row.time_us.p99)),
    ("#issue\np50 us", lambda row: microseconds(row.issue_us.p50)),
    ("#waiting\np50 us", lambda row: microseconds(row.waiting_us.p50)),
    ("#algbw\np50 GB/s", lambda row: _median(row.algbw_gb_per_s)),
    ("#busbw\np50 GB/s", lambda row: _median(row.busbw_gb_per_s)),
)
_COMPARED: Columns[Compared] = (
    ("operation", lambda row: row.op),
    ("size", lambda row: size_text(row.size_to)),
    ("#timed\ncalls", lambda row: row.calls),
    ("#call\nrecorded us", lambda row: microseconds(row.recorded_us)),
    ("#call\nreplayed us", lambda row: microseconds(row.replayed_us)),
    ("#call\nratio p50", lambda row: f"{row.ratio:.2f}"),
    ("#call\nerror p50", lambda row: percent(row.error_p50)),
    ("#call\nerror p95", lambda row: percent(row.error_p95)),
    ("#collective\nrecorded us", lambda row: microseconds(row.collective_recorded_us)),
    ("#collective\nreplayed us", lambda row: microseconds(row.collective_replayed_us)),
    ("#collective\nerror p50", lambda row: percent(row.collective_error_p50)),
)
_OPERATIONS: Columns[ComputedOperation] = (
    ("operation", lambda row: row.name),
    ("#per step", lambda row: f"{row.count:,.0f}"),
    ("#recorded ms,\nprofiler on", lambda row: milliseconds_alone(row.recorded_us)),
    ("#replayed ms,\nprofiler on", lambda row: milliseconds_alone(row.profiled_us)),
    ("#ratio", lambda row: "-" if row.ratio is None else f"{row.ratio:.2f}"),
    ("#replayed ms,\nprofiler off", lambda row: milliseconds_alone(row.replayed_us)),
)


def _block_columns(what: str) -> Columns[CallTimes]:
    return (
        (what, lambda block: block.name),
        ("#calls", lambda block: block.calls),
        ("#bytes", lambda block: amount(block.bytes)),
        ("#time\np50 us", lambda block: microseconds(block.time_us.p50)),
        ("#time\np95 us", lambda block: microseconds(block.time_us.p95)),
        ("#time\np99 us", lambda block: microseconds(block.time_us.p99)),
        ("#waiting\np50 us", lambda block: microseconds(block.waiting_us.p50)),
        ("#first start to\nlast end us", lambda block: microseconds(block.span_us.p50)),
    )


_BLOCKS = {"source": "By source line", "step": "By step"}
"""Name in `--by` -> title."""
_MOST_KINDS = 4
"""Number of kinds of skipped operations that are named."""
_FAILURES: Columns[CheckFailure] = (
    ("#rank", lambda one: one.rank),
    ("#call id", lambda one: one.call),
    ("operation", lambda one: one.op),
    ("group", lambda one: one.pg),
    ("#tensor", lambda one: one.tensor),
    ("#first element", lambda one: one.element),
    ("#wrong", lambda one: one.elements),
    ("#expected", lambda one: f"{one.expected:g}"),
    ("#got", lambda one: f"{one.got:g}"),
)


def milliseconds_alone(us: float | None) -> str:
    """Return us as ms without a unit."""
    return "-" if us is None else f"{us / 1000:,.2f}"


def tables(report: ReplayReport, limit: int) -> dict[str, Table]:
    """Return every table with its first `limit` rows. A table that was not requested has no rows."""
    comparison, data, check, step = report.comparison, report.data, report.check, report.step
    contents: dict[str, tuple[Sequence[Any], Columns[Any]]] = {
        "rows": (report.rows, _ROWS),
        "source": (report.by_source, _block_columns("source line")),
        "step": (report.by_step, _block_columns("#step")),
        "operations": (step.operations if step else (), _OPERATIONS),
        "compared": (comparison.rows if comparison else (), _COMPARED),
        "different": (data.failures if data else (), _FAILURES),
        "failures": (check.failures if check else (), _FAILURES),
    }
    more = f"-o DIR writes all to {JSON}"
    return {name: table_of(items, columns, limit=limit, more=more) for name, (items, columns) in contents.items()}


def step_lines(step: StepComparison) -> list[str]:
    """Return sentences that compare a replayed step with the recorded steps."""
    lines = [
        f"A step took {milliseconds(step.replayed_ms)} (p95 {milliseconds(step.replayed_p95_ms)})"
        + (
            f", {step.ratio:.2f} x the recorded {milliseconds(step.recorded_ms)} (median of "
            f"{plural(step.recorded_steps, 'step')} outside windows, without a profiler"
            + (f"; {step.other_steps:,} other steps made other calls)" if step.other_steps else ")")
            if step.ratio is not None and step.recorded_ms is not None
            else ". No recorded step to compare with: steps with the same calls ran only under the profiler"
        )
    ]
    if step.error is not None and step.own_ratio is not None and step.noise is not None:
        lines.append(
            f"Estimated error: {percent(step.error)} of a step. Without waits, a step took {step.own_ratio:.2f} x the "
            f"recorded time, and the 95 % interval of the medians is {percent(step.noise)}. The error of a changed "
            "message size is not included"
        )
    if rows := step.coverage.left_out:
        idle = [f"{row.operations:,} x {printable(row.name)} ({printable(row.reason)})" for row in rows[:_MOST_KINDS]]
        idle += [f"{len(rows) - _MOST_KINDS} more kinds"] if len(rows) > _MOST_KINDS else []
        lines.append(
            f"{step.coverage.operations:,} of {step.coverage.recorded_operations:,} operations ran; idle instead: "
            + "; ".join(idle)
        )
    if step.operations_ratio is not None:
        lines.append(
            f"The operations took {step.operations_ratio:.2f} x their recorded time, both under the profiler; a ratio "
            "other than 1 means another machine, or other load"
        )
    exposed = f"Exposed communication: {milliseconds(step.exposed_ms)} per step"
    if step.recorded_exposed_ms is not None:
        exposed += f" (recorded: {milliseconds(step.recorded_exposed_ms)} per step)"
    host = f"Host time between operations: {milliseconds(step.host_ms)} per step"
    if step.host_once_ms >= 0.1:
        host += f". One-time pauses ({milliseconds(step.host_once_ms)} per step on average) are not replayed"
    lines += [exposed, host]
    lines.append(
        f"Memory: {amount(step.bytes_per_rank)} planned for the tensors of a rank, peak {amount(step.peak_bytes)} per "
        "process"
    )
    return lines


def batches_text(batches: Batches) -> str:
    time = batches.time_us
    return (
        f"{batches.calls:,} calls in a row take {microseconds(time.p50)} us on a rank from the first start to the "
        f"last end (p95 {microseconds(time.p95)}, p99 {microseconds(time.p99)}; {batches.batches:,} per pass)"
    )


def data_text(data: DataComparison) -> str:
    within = " and ".join(
        f"{name} {given:g}" if given is not None else f"{name} of 8 roundings of its type (at least 1e-4)"
        for name, given in (("rtol", data.rtol), ("atol", data.atol))
    )
    text = (
        f"Compared with {printable(data.folder)}: {data.tensors - data.different:,} of {data.tensors:,} results agree"
    )
    text += f" within {within}; the largest difference is {data.largest_difference:.3g}"
    if data.not_comparable:
        text += f"; {data.not_comparable:,} could not be compared, because they have another type or size"
    return text


def comparison_text(comparison: Comparison) -> str:
    text = (
        "No call has a recorded duration"
        if not comparison.calls
        else (
            f"Relative error of each timed call ({comparison.calls:,}): {percent(comparison.error_p50)} median, "
            f"{percent(comparison.error_p95)} p95; {plural(comparison.without_time, 'call')} without a recorded time"
        )
    )
    if comparison.recorded_end_to_end_us is None:
        return text
    recorded, replayed = comparison.recorded_end_to_end_us, comparison.replayed_end_to_end_us
    return f"{text}. End to end: recorded {milliseconds(recorded / 1000)} (with computation), " + (
        f"replayed {milliseconds(replayed / 1000)}"
    )


# --- the console -----------------------------------------------------------------------------------------------------


def print_report(report: ReplayReport, by: Sequence[str] = ()) -> None:
    """Print the tables of one replay, with the blocks that `by` names."""
    for text, count in report.substitutes.items():
        print(f"  changed: {plural(count, 'call')}: {printable(text)}")
    settings, found = report.settings, tables(report, _ON_CONSOLE)
    title = f"Replayed with {settings.backend}: {settings.repeats} passes after {settings.warmup} warm-up passes"
    if report.rows:
        found["rows"].print(title)
        print("  time: from the last rank's arrival to the last rank's end; waiting: until the last rank's arrival")
        print("  issue: time of the host in the call, until it returns")
    else:
        print(f"\n{title}; there is no communication")
    late = sum(row.late_ends for row in report.rows)
    if late:
        ops = ", ".join(dict.fromkeys(row.op for row in report.rows if row.late_ends))
        print(f"  {ops}: the end of {plural(late, 'call')} is known only from a wait, so the time is an upper bound")
    unknown = sum(row.unknown_times for row in report.rows)
    if unknown:
        ops = ", ".join(dict.fromkeys(row.op for row in report.rows if row.unknown_times))
        print(f"  {ops}: {plural(unknown, 'time')} of all passes are too short to measure, and have no bandwidth")
    for name in by:
        if found[name].rows:
            found[name].print(f"{_BLOCKS[name]}, all calls together, per pass")
        else:
            print(f"\n{_BLOCKS[name]}: not in the recording")
    if report.batches is not None:
        print(f"\n{batches_text(report.batches)}")
    elif report.settings.batch is not None:
        print(f"\nNo rank makes {report.settings.batch:,} calls, so --batch has no result")
    end = report.end_to_end_us
    text = f"End to end {milliseconds(end.p50 / 1000)} per pass (p95 {milliseconds(end.p95 / 1000)})"
    if report.step is None:  # with computation, the time is not the cost of the calls
        text += f"; {report.cpu_us_per_call:.1f} us CPU per call and rank"
    print(f"\n{text}" + (f"; clocks agree within {report.clock_error_us:.0f} us" if report.clock_error_us else ""))
    if report.step is not None:
        title = (
            f"Operations with most time, per step and rank ({report.step.coverage.operations:,} operations in total)"
        )
        table_of(report.step.operations[:_TOP], _OPERATIONS).print(title)
        for line in step_lines(report.step):
            print(f"\n{line}" if line.startswith("A step") else line)
    if report.comparison is not None:
        if report.comparison.rows:
            found["compared"].print("Replayed and recorded")
            print("  call: time on one rank, with waiting; collective: from the last rank's arrival to the end")
            print(
                "  ratio: replayed / recorded, error: |replayed - recorded| / recorded; of each call, then p50 and p95"
            )
        if any(row.collective_recorded_us is None for row in report.comparison.rows):
            print(
                "  -: the recorded times do not show the time of the collective, because a root or sender may end early"
            )
        print(f"\n{comparison_text(report.comparison)}")
        if report.comparison.calls:
            gaps = "without the recorded gaps" if settings.pace == "fast" else "with gaps"
            how = "recorded times are from a profiler or torch's timing"
            print(f"The methods differ: {how}, and the replay ran {gaps} (--pace {settings.pace})")
    if not (report.comparison and report.comparison.calls) and not report.what_if and report.rows:
        print("To compare with recorded durations, record with TRACING_TIMING=1, or run `crossrank link` on a window")
    if report.data is not None:
        print(f"\n{data_text(report.data)}")
        if report.data.failures:
            found["different"].print("Results that differ from the saved ones")
    if report.check is not None and report.check.failures:
        found["failures"].print(f"Wrong results ({len(report.check.failures)} of {report.check.tensors:,} checked)")
    elif report.check is not None:
        print(f"\nChecked: all {report.check.tensors:,} output tensors are correct")


# --- pages -----------------------------------------------------------------------------------------------------------


def shown(report: ReplayReport, limit: int) -> dict[str, Any]:
    """Return the arguments of the macro `replay_sections`, with `limit` rows per table."""
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
    chart = bandwidth_chart("replayed-sizes", rates)
    of_step = step_chart(report.step) if report.step is not None else None
    return {
        "report": report,
        "tables": tables(report, limit),
        "charts": [chart] if of_step is None else [of_step, chart],
        "chart": chart,
        "step_chart": of_step,
        "step_lines": step_lines(report.step) if report.step else [],
        "blocks": {f"by_{name}": (title, name) for name, title in _BLOCKS.items()},
        "batches": batches_text(report.batches) if report.batches else "",
        "data": data_text(report.data) if report.data else "",
        "comparison": comparison_text(report.comparison) if report.comparison else "",
    }


_PARTS = ("operations", "between operations", "waiting for communication")


def step_chart(step: StepComparison) -> Chart:
    """Return a chart of the recorded step above the replayed step."""
    operations = step.replayed_ms - step.exposed_ms - step.host_ms
    bars: dict[str, tuple[float | None, ...]] = {"replayed": (max(operations, 0.0), step.host_ms, step.exposed_ms)}
    if step.profiled_operations_ms is not None:
        profiled = (step.profiled_operations_ms, step.profiled_between_ms, step.recorded_exposed_ms)
        bars["recorded, with profiler"] = profiled
    traces = [
        _bars(part, list(bars), [parts[place] or 0.0 for parts in bars.values()], f"{part}: ")
        for place, part in enumerate(_PARTS)
    ]
    if step.recorded_ms is not None:
        traces.append(_bars("whole step", ["recorded, without a profiler"], [step.recorded_ms]))
    layout = {"barmode": "stack", "xaxis": axis("ms per step"), "yaxis": axis(automargin=True)}
    return Chart(id="replayed-step", height=230, traces=traces, layout=layout)


def _bars(name: str, y: Sequence[str], ms: Sequence[float], shown: str = "") -> Trace:
    hover = f"{shown}%{{x:,.2f}} ms<extra>%{{y}}</extra>"
    return {"type": "bar", "orientation": "h", "name": name, "y": y, "x": ms, "hovertemplate": hover}


def replay_page(report: ReplayReport) -> str:
    from crossrank.tools.output.page import render

    parts = shown(report, limit=200)
    return render("replay.html", parts["charts"], shown=parts)
