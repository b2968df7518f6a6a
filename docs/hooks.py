"""What the pages take from the code when they are built: options of commands, tables of columns, kinds of findings."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from unittest.mock import patch

import griffe
import polars as pl

from crossrank.tools.analysis.diagnosis.findings import KINDS
from crossrank.tools.cli import main
from crossrank.tools.tables import ANSWERS, TABLES, TableSchema

_WIDTH = "96"
_PLACE = re.compile(
    r"^<!-- (?P<what>options|tables|answers|findings|records)(?: (?P<name>[\w. ]+))? -->$", re.MULTILINE
)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fills in what stands as `<!-- options COMMAND -->`, `<!-- records MODULE CLASS … -->` and so on."""
    return _PLACE.sub(lambda match: _MAKERS[match["what"]](match["name"] or ""), markdown)


def _options(command: str) -> str:
    printed = io.StringIO()
    with patch.dict(os.environ, COLUMNS=_WIDTH), contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return f"```text\n{printed.getvalue().rstrip()}\n```"


def _tables(_: str) -> str:
    parts = {True: "; one part for each rank", False: "; one for the job"}
    return "\n".join(
        line for name, one in TABLES.items() for line in _table_lines(f"## {name}", one, parts[one.of_rank])
    )


def _answers(names: str) -> str:
    return "\n".join(line for name in names.split() for line in _table_lines(f"### {name}", ANSWERS[name]))


def _table_lines(heading: str, table: TableSchema, parts: str = "") -> Iterator[str]:
    yield f"\n{heading}\n\n{table.meaning[0].upper()}{table.meaning[1:]}{parts}.\n"
    yield "| column | type | unit | meaning |\n|---|---|---|---|"
    for name, one in table.columns.items():
        kind = " ".join(one.dtype.to_schema()) if isinstance(one.dtype, pl.Struct) else one.dtype
        yield f"| `{name}` | {kind} | {one.unit} | {one.meaning} |"


def _findings(_: str) -> str:
    rows = (f"| `{name}` | {kind.meaning} | {kind.next_step or '-'} |" for name, kind in KINDS.items())
    return "\n".join(["| kind | meaning | what to do next |", "|---|---|---|", *rows])


def _records(words: str) -> str:
    module, *classes = words.split()
    found = _package()[module.removeprefix("crossrank.")]
    return "\n".join(line for name in classes for line in _record_lines(found[name]))


@cache
def _package() -> griffe.Object | griffe.Alias:
    return griffe.load("crossrank")


def _record_lines(record: griffe.Object | griffe.Alias) -> Iterator[str]:
    yield f"\n### {record.name}\n\n{_sentence(record)}\n"
    yield "| field | type | meaning |\n|---|---|---|"
    for name, one in record.all_members.items():
        if one.is_attribute and not name.startswith("_") and "property" not in one.labels:
            kind = str(one.annotation).replace("|", "\\|")
            yield f"| `{name}` | {kind} | {_sentence(one)} |"


def _sentence(one: griffe.Object | griffe.Alias) -> str:
    return " ".join(one.docstring.value.split()).replace("|", "\\|") if one.docstring is not None else ""


_MAKERS: dict[str, Callable[[str], str]] = {
    "options": _options,
    "tables": _tables,
    "answers": _answers,
    "findings": _findings,
    "records": _records,
}
