"""Sweeps: the same trace replayed under every combination of the values that `--sweep` names.

Each combination has a folder of its own with its `replay.json`. One that is there and was made of the same trace with
the same settings is not run again, so a sweep that was ended goes on where it stopped.
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
"""Options of the command that may be swept; any name in capitals is an environment variable."""
_WITHOUT_EFFECT = replay_options.NO_EFFECT | {"run", "command", "jobs", "cluster"}
"""Values that change no result."""

RECORDED = "recorded"
"""In a sweep, as the recording is: the option is left out."""
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
STAMP = "settings.txt"


@dataclass(frozen=True)
class Combination:
    """One point of a sweep."""

    options: dict[str, str]
    variables: dict[str, str]

    @property
    def name(self) -> str:
        """Folder of its results."""
        text = "_".join(f"{name}={value}" for name, value in {**self.options, **self.variables}.items())
        return re.sub(r"[^\w.=,-]", "-", text)[:120]


def parse_sweeps(texts: list[str]) -> list[Combination]:
    """All combinations of `NAME=VALUE,VALUE…`. Raises `CrossrankError` for a name that cannot be swept."""
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
        raise CrossrankError(f"--sweep {' '.join(texts)!r} names one combination twice")
    return combinations


def with_values(arguments: argparse.Namespace, values: dict[str, str]) -> argparse.Namespace:
    """`arguments` with the values that a sweep gives. Raises `CrossrankError` for an invalid one."""
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
    """What a result was made of: it is used again only where this is the same."""
    values = {name: value for name, value in vars(given).items() if name not in _WITHOUT_EFFECT}
    words = [f"{name}={value}" for part in (values, one.variables) for name, value in sorted(part.items())]
    return hashlib.sha256("\0".join([*words, plan_digest]).encode()).hexdigest() + "\n"


def finished(folder: Path, expected: str) -> ReplayReport | None:
    """The report that an earlier run left in `folder`, if it was made of the same."""
    try:
        if (folder / STAMP).read_text() != expected:
            return None
        return msgspec.json.decode((folder / JSON).read_bytes(), type=ReplayReport)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def sweep_json(results: list[tuple[Combination, ReplayReport | str]]) -> bytes:
    """A list with an entry per combination: its options and variables, and its report or why there is none."""
    rows = [
        {"options": one.options, "variables": one.variables}
        | ({"error": report} if isinstance(report, str) else {"report": report})
        for one, report in results
    ]
    return indented(rows)


def print_sweep(results: list[tuple[Combination, ReplayReport | str]]) -> None:
    """One table over all combinations; a text in the place of a report says why there is none."""
    values = [{**one.options, **one.variables} for one, _ in results]
    names = list(dict.fromkeys(name for one in values for name in one))
    first = next((report.step for _, report in results if isinstance(report, ReplayReport)), None)
    title, measured = _PASS if first is None else _STEP
    rows = [
        (*(one.get(name, "") for name in names), *(_summary(report) if first is None else _of_step(report, first)))
        for one, (_, report) in zip(values, results, strict=True)
    ]
    print_table(title, (*names, *measured), rows)


_PASS = (
    "Sweep: each combination, per pass",
    ("#end to end ms p50", "#p95", "#CPU us/call", "#best busbw GB/s", "#longest row us", "which"),
)
_STEP = ("Sweep: a whole step", ("#step ms p50", "#p95", "#exposed communication ms", "#against the first", ""))


def _of_step(report: ReplayReport | str, first: StepComparison) -> tuple[str, ...]:
    if isinstance(report, str) or report.step is None:
        return "-", "-", "-", "-", report if isinstance(report, str) else ""
    step = report.step
    return (
        f"{step.replayed_ms:,.2f}",
        f"{step.replayed_p95_ms:,.2f}",
        f"{step.exposed_ms:,.2f}",
        f"{step.replayed_ms / first.replayed_ms:.2f} x",
        "",
    )


def _summary(report: ReplayReport | str) -> tuple[str, ...]:
    if isinstance(report, str):
        return "-", "-", "-", "-", "-", report
    rates = [row.busbw_gb_per_s.p50 for row in report.rows if row.busbw_gb_per_s is not None]
    return (
        f"{report.end_to_end_us.p50 / 1000:,.2f}",
        f"{report.end_to_end_us.p95 / 1000:,.2f}",
        f"{report.cpu_us_per_call:.1f}",
        f"{max(rates, default=0):.3g}",
        *next(((microseconds(row.time_us.p50), f"{row.op} on {row.pg}") for row in report.rows), ("-", "")),
    )
