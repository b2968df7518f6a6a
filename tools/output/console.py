"""What the commands print: tables, rich on a terminal and plain columns in a pipe, and text that steers no terminal."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, TypeAlias, TypeVar

from crossrank.text import printable

Item = TypeVar("Item")
Columns: TypeAlias = Sequence[tuple[str, Callable[[Item], object]]]
"""Names of columns, and what they show of an item; a name that starts with `#` is of numbers, which go to the right."""


class Printable:
    """A text stream that passes on what can be seen, and line ends.

    What would steer a terminal goes as `\\u009b`, which is the same character in JSON. Whatever a command prints of a
    file goes through it.
    """

    def __init__(self, stream: TextIO) -> None:
        self.plain: TextIO = stream.plain if isinstance(stream, Printable) else stream
        """The stream itself, for what is safe and means to steer it."""

    def write(self, text: str) -> int:
        # The same question as the pattern's, several times as fast.
        is_safe = text.replace("\n", "").isprintable()
        return self.plain.write(text if is_safe else _STEERING.sub(_escaped, text))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


_STEERING = re.compile(r"[^\n\t -~]")
"""What may not be printable: every character that is not one of ASCII's."""


def _escaped(match: re.Match[str]) -> str:
    char = match[0]
    halves = char.encode("utf-16-be", "surrogatepass").hex(" ", 2).split()
    return char if char.isprintable() else "".join(f"\\u{half}" for half in halves)


def terminal(stream: TextIO) -> TextIO:
    """A stream without what keeps it safe, for text that is `printable` and comes with what means to steer it."""
    return stream.plain if isinstance(stream, Printable) else stream


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table, for a terminal or a page; see `Columns` for the names of columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    more: str = ""
    """Says how many rows are left out, and what has them."""
    id: str = ""
    choices: int = 0
    """On a page, so many of the first columns are what the reader may choose rows by."""

    def print(self, title: str) -> None:
        print_table(title, self.columns, self.rows)
        if self.more:
            print(f"  {self.more}")

    def lines(self) -> list[str]:
        """The table in plain columns."""
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
    """One row per item, of which the first `limit` are shown."""
    return Table(
        columns=[name for name, _ in columns],
        rows=[[cell(item) for _, cell in columns] for item in items[:limit]],
        more=f"… and {len(items) - limit:,} more ({more})" if len(items) > limit else "",
        id=id,
        choices=choices,
    )


def as_json(value: object) -> str:
    """What `--json` prints of a result: Structs, dataclasses and containers of them."""
    import msgspec
    import orjson

    option = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(msgspec.to_builtins(value, str_keys=True), option=option).decode()


def print_json(value: object) -> None:
    sys.stdout.write(as_json(value))


def print_counts(title: str, counts: Iterable[tuple[str, int]]) -> None:
    """What was counted under a title, or nothing."""
    for number, (text, count) in enumerate(counts):
        if number == 0:
            print(f"\n{title}")
        print(f"  {count:>9,}  {printable(text)}")


def print_notes(notes: Iterable[str], most: int = 8) -> None:
    """Each note once, and how many more there are."""
    different = list(dict.fromkeys(notes))
    for note in different[:most]:
        print(f"\nnote       {printable(note)}")
    if len(different) > most:
        print(f"\n… and {len(different) - most} more notes (--json shows all)")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A titled table; see `Columns` for the names of columns."""
    names, right, cells, widths = _cells(columns, rows)
    # Rich would break words of a table that is wider than the terminal; plain lines are broken by the terminal, whole.
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
    """(names, whether a column goes to the right, text of the cells, widths of the columns)."""
    names = [column.removeprefix("#") for column in columns]
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(names)]
    return names, [column.startswith("#") for column in columns], cells, widths


def _plain(names: list[str], right: list[bool], cells: list[list[str]], widths: list[int]) -> list[str]:
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in [names, *cells]
    ]
