"""Sweeps: replays of one trace with every combination of the values in `--sweep`.

Each combination has its own folder with its `replay.json`. A result of the same trace with the same settings is not
computed again, so an interrupted sweep continues.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from crossrank.errors import CrossrankError
from crossrank.replay import replay_options
from crossrank.replay.results.replay_report import indented
from crossrank.text import microseconds
from crossrank.tools.output.console import print_table
from crossrank.tools.traces.replayed import JSON, ReplayReport, StepComparison

OPTIONS = {
    one.shown.removeprefix("--"): one for one in replay_options.OPTIONS.values() if one.name in replay_options.SWEPT
}
"""Options that may be swept. All names in capitals are environment variables."""
_NO_EFFECT = replay_options.NO_EFFECT | {"run", "command", "jobs", "cluster"}
"""Values that change no result."""

RECORDED = "recorded"
"""In a sweep: as recorded, without the option."""
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
STAMP = "settings.txt"


@dataclass(frozen=True)
class Combination:
    """One point of a sweep."""

    options: dict[str, str]
    variables: dict[str, str]

    @property
    def name(self) -> str:
        """Return the name of the folder for its results."""
        text = "_".join(f"{name}={value}" for name, value in {**self.options, **self.variables}.items())
        return re.sub(r"[^\w.=,-]", "-", text)[:120]


def parse_sweeps(texts: list[str]) -> list[Combination]:
    """Return all combinations of `NAME=VALUE,VALUE…`. Raises `CrossrankError` for a name that cannot be swept."""
    axes: list[list[tuple[str, str]]] = []
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().removeprefix("--")
        if not equals or not values or (name not in OPTIONS and not _VARIABLE.fullmatch(name)):
            raise CrossrankError(
                f"--sweep {text!r} is not NAME=VALUE,VALUE with NAME one of {', '.join(OPTIONS)} "
                "or an environment variable in capitals"
            )
        axes.append([(name, value.strip()) for value in values.split(",")])
    combinations = [
        Combination(
            options={name: value for name, value in point if name in OPTIONS},
            variables={name: value for name, value in point if name not in OPTIONS},
        )
        for point in itertools.product(*axes)
    ]
    if len({one.name for one in combinations}) < len(combinations):
        raise CrossrankError(f"--sweep {' '.join(texts)!r} has one combination twice")
    return combinations


def with_values(arguments: argparse.Namespace, values: dict[str, str]) -> argparse.Namespace:
    """Return `arguments` with the values of a sweep. Raises `CrossrankError` for an invalid value."""
    given = argparse.Namespace(**vars(arguments))
    for name, value in values.items():
        try:
            option = OPTIONS[name]
            is_left_out = value == RECORDED and option.name in replay_options.SWEPT_CHANGES
            setattr(given, option.name, option.default if is_left_out else option.type(value))
        except ValueError:
            raise CrossrankError(f"--sweep {name}: {value!r} is not a number") from None
    replay_options.check(given)
    return given


def stamp(given: argparse.Namespace, one: Combination, plan_digest: str) -> str:
    """Return a hash of all inputs of a result. A result with an equal stamp is used again."""
    values = {name: value for name, value in vars(given).items() if name not in _NO_EFFECT}
    words = [f"{name}={value}" for part in (values, one.variables) for name, value in sorted(part.items())]
    return hashlib.sha256("\0".join([*words, plan_digest]).encode()).hexdigest() + "\n"


def finished(folder: Path, expected: str) -> ReplayReport | None:
    """Return the report of an earlier run in `folder`, if it had the same inputs."""
    try:
        if (folder / STAMP).read_text() != expected:
            return None
        return msgspec.json.decode((folder / JSON).read_bytes(), type=ReplayReport)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def sweep_json(results: list[tuple[Combination, ReplayReport | str]]) -> bytes:
    """Return a list with one entry per combination: options, variables, and the report or why there is none."""
    rows = [
        {"options": one.options, "variables": one.variables}
        | ({"error": report} if isinstance(report, str) else {"report": report})
        for one, report in results
    ]
    return indented(rows)


def print_sweep(results: list[tuple[Combination, ReplayReport | str]]) -> None:
    """Print one table of all combinations; a string in place of a report is the reason why there is none."""
    values = [{**one.options, **one.variables} for one, _ in results]
    names = list(dict.fromkeys(name for one in values for name in one))
    steps = [report.step for _, report in results if isinstance(report, ReplayReport) and report.step is not None]
    title, headings = _STEP if steps else _PASS
    rows = []
    for one, (_, report) in zip(values, results, strict=True):
        if isinstance(report, str) or (steps and report.step is None):
            cells = ("-",) * (len(headings) - 1) + (report if isinstance(report, str) else "",)
        else:
            cells = _step_cells(report.step, steps[0]) if report.step is not None else _pass_cells(report)
        rows.append((*(one.get(name, "") for name in names), *cells))
    print_table(title, (*names, *headings), rows)


_PASS = (
    "Sweep: times per pass, one row per combination",
    ("#end to end ms p50", "#p95", "#CPU us/call", "#best busbw GB/s", "#time us p50", "operation with most time"),
)
_STEP = (
    "Sweep: times per step, one row per combination",
    ("#step ms p50", "#p95", "#exposed communication ms", "#ratio", ""),
)


def _step_cells(step: StepComparison, first: StepComparison) -> tuple[str, ...]:
    times = (step.replayed_ms, step.replayed_p95_ms, step.exposed_ms)
    return *(f"{ms:,.2f}" for ms in times), f"{step.replayed_ms / first.replayed_ms:.2f} x", ""


def _pass_cells(report: ReplayReport) -> tuple[str, ...]:
    rates = [row.busbw_gb_per_s.p50 for row in report.rows if row.busbw_gb_per_s is not None]
    return (
        f"{report.end_to_end_us.p50 / 1000:,.2f}",
        f"{report.end_to_end_us.p95 / 1000:,.2f}",
        f"{report.cpu_us_per_call:.1f}",
        f"{max(rates, default=0):.3g}",
        *next(((microseconds(row.time_us.p50), f"{row.op} on {row.pg}") for row in report.rows), ("-", "")),
    )
