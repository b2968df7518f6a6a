"""Output of commands: tables (styled on a terminal, plain columns in a pipe), and text without control characters."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TextIO, TypeAlias, TypeVar

from crossrank.text import printable

Item = TypeVar("Item")
_INDENT = 11
"""Column in which the text of a fact starts."""
Columns: TypeAlias = Sequence[tuple[str, Callable[[Item], object]]]
"""(name of a column, function from an item to its cell). Columns whose name starts with `#` are right-aligned. After a
line end in a name, a second line starts on a terminal; on a page it is a space."""


class Printable:
    """A text stream that passes on only printable characters and line ends.

    Control characters are written as escapes such as `\\u009b`, which JSON reads as the same character. Commands print
    all text from files through it.
    """

    def __init__(self, stream: TextIO) -> None:
        self.plain: TextIO = stream.plain if isinstance(stream, Printable) else stream
        """The stream itself, for safe text with control characters."""

    def write(self, text: str) -> int:
        # Same test as the pattern, several times as fast.
        is_safe = text.replace("\n", "").isprintable()
        return self.plain.write(text if is_safe else _NOT_ASCII.sub(_escaped, text))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


_NOT_ASCII = re.compile(r"[^\n\t -~]")
"""Characters that may not be printable."""


def _escaped(match: re.Match[str]) -> str:
    char = match[0]
    halves = char.encode("utf-16-be", "surrogatepass").hex(" ", 2).split()
    return char if char.isprintable() else "".join(f"\\u{half}" for half in halves)


def terminal(stream: TextIO) -> TextIO:
    """Return the stream without its filter, for text that is already `printable` and has control characters."""
    return stream.plain if isinstance(stream, Printable) else stream


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table for a terminal or a page; see `Columns` for the names of columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    more: str = ""
    """Number of rows that are not shown, and which output has them."""
    id: str = ""
    choices: int = 0
    """Number of first columns that have a filter on a page."""

    def print(self, title: str) -> None:
        print_table(title, self.columns, self.rows)
        if self.more:
            print(f"  {self.more}")

    def lines(self) -> list[str]:
        """Return the table in plain columns."""
        return _plain(*_cells(self.columns, self.rows)) + ([f"  {self.more}"] if self.more else [])


def table_of(
    items: Sequence[Item],
    columns: Columns[Item],
    *,
    limit: int = sys.maxsize,
    more: str = "--json shows all",
    id: str = "",
    choices: int = 0,
) -> Table:
    """Return a table with one row for each of the first `limit` items."""
    return Table(
        columns=[name for name, _ in columns],
        rows=[[cell(item) for _, cell in columns] for item in items[:limit]],
        more=f"… and {len(items) - limit:,} more ({more})" if len(items) > limit else "",
        id=id,
        choices=choices,
    )


def as_json(value: object) -> str:
    """Return a result as JSON for `--json`: Structs, dataclasses and containers of them."""
    import msgspec
    import orjson

    option = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(msgspec.to_builtins(value, str_keys=True), option=option).decode()


def print_json(value: object) -> None:
    sys.stdout.write(as_json(value))


def print_fact(name: str, text: str) -> None:
    """Print a name and text next to it. On a terminal, the text is wrapped below itself."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    lines = textwrap.wrap(
        printable(text), max(width - _INDENT, 40), break_long_words=False, break_on_hyphens=False
    ) or [""]
    for number, line in enumerate(lines):
        print(f"{'' if number else name:<{_INDENT - 1}} {line}")


def print_counts(title: str, counts: Iterable[tuple[str, int]]) -> None:
    """Print counts under a title; nothing if there are none."""
    for number, (text, count) in enumerate(counts):
        if number == 0:
            print(f"\n{title}")
        print(f"  {count:>9,}  {printable(text)}")


def print_notes(notes: Iterable[str], most: int = 8) -> None:
    """Print each note once, at most `most`, and the number of the others."""
    different = list(dict.fromkeys(notes))
    for note in different[:most]:
        print()
        print_fact("note", note)
    if len(different) > most:
        print(f"\n… and {len(different) - most} more notes (--json shows all)")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table with a title; see `Columns` for the names of columns."""
    names, right, cells, widths = _cells(columns, rows)
    # In a table wider than the terminal, rich would break words. Print plain lines instead.
    if sys.stdout.isatty() and sum(widths) + 3 * len(widths) + 1 <= shutil.get_terminal_size().columns:
        from rich import console, table, text

        shown = table.Table(title=text.Text(printable(title)), title_justify="left", title_style="bold")
        for name, is_right in zip(names, right, strict=True):
            shown.add_column(name, justify="right" if is_right else "left", overflow="fold")
        for row in cells:
            shown.add_row(*map(text.Text, row))
        console.Console(file=terminal(sys.stdout)).print(shown)
        return
    print(f"\n{printable(title)}")
    for line in _plain(names, right, cells, widths):
        print(line)


def _cells(
    columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> tuple[list[str], list[bool], list[list[str]], list[int]]:
    """Return (names, whether each column is right-aligned, text of the cells, widths of the columns)."""
    names = [column.removeprefix("#") for column in columns]
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, [*name.split("\n"), *(row[i] for row in cells)])) for i, name in enumerate(names)]
    return names, [column.startswith("#") for column in columns], cells, widths


def _plain(names: list[str], right: list[bool], cells: list[list[str]], widths: list[int]) -> list[str]:
    upwards = zip_longest(*(reversed(name.split("\n")) for name in names), fillvalue="")
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in [*reversed(list(upwards)), *cells]
    ]
