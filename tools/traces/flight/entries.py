"""The entries of a dump: one for each call, or member of a coalesced call, checked for type and range."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, mul
from types import GenericAlias
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from crossrank.budget import EXTENTS, ROWS, Budget
from crossrank.comm import Int, Number
from crossrank.errors import BROKEN, one_line
from crossrank.privacy import Privacy

_LISTS = frozenset((list, tuple))
MANY = msgspec.Meta(max_length=1 << 16)
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Shape = Annotated[tuple[Int, ...], msgspec.Meta(max_length=32), Privacy.SIZE]
Shapes = Annotated[tuple[Shape, ...], MANY]
Dtypes = Annotated[tuple[Text, ...], MANY, Privacy.DTYPE]


class Entry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One call, or one member of a coalesced call. Times are ns since 1970; None = unknown."""

    record_id: Number
    profiling_name: Annotated[Text, Privacy.EVENT]
    """`nccl:all_reduce`, `nccl:send 0->1`: backend, operation, and for P2P the ranks within the group."""
    process_group: Annotated[tuple[Text, Text], Privacy.GROUP] = ("", "")
    """Name and description."""
    pg_id: Number = -1
    collective_seq_id: Number = 0
    p2p_seq_id: Number = 0
    op_id: Number = -1
    """Number of the call in its group, over collectives and P2P."""
    time_created_ns: Annotated[Int, Privacy.WALL] = 0
    input_sizes: Shapes = ()
    input_dtypes: Dtypes = ()
    output_sizes: Shapes = ()
    output_dtypes: Dtypes = ()
    state: Annotated[Text, Privacy.STATE] = ""
    """`scheduled`, `started` or `completed`; empty = unknown."""
    time_discovered_started_ns: Annotated[Int, Privacy.WALL] | None = None
    time_discovered_completed_ns: Annotated[Int, Privacy.WALL] | None = None
    duration_ms: Annotated[float, msgspec.Meta(ge=0, le=1e12), Privacy.NUMBER] | None = None
    retired: bool = False
    is_p2p: bool | None = None
    """None if the dump does not have it."""
    frames: Annotated[Any, Privacy.FRAMES] = ()
    """Innermost first, as decoded: `read_frame` checks each frame once."""


_DESCRIPTION = ("process_group", "profiling_name", "input_sizes", "output_sizes", "input_dtypes", "output_dtypes")
Columns = dict[str, list[Any]]
"""Fields of `Entry`, as decoded: None if an entry lacks one."""
_IDENTITY = ("record_id", "profiling_name", "process_group", "pg_id", "collective_seq_id", "p2p_seq_id")
LAUNCH = ("record_id", "state", "is_p2p", "pg_id", "collective_seq_id", "p2p_seq_id")
"""Fields that show the launch of an entry, and whether it is finished."""
_COLUMNS = {one.name: GenericAlias(list, one.type) for one in structs.fields(Entry) if one.name not in _DESCRIPTION}


_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class Entries:
    """The entries of a dump. Fields that are often equal are stored once, the others as columns."""

    kinds: dict[int, Entry]
    """Row -> entry, for the first entry of each kind: with the same group, operation, sizes and dtypes."""
    kind: list[int]
    """For each entry, the row of the first entry of its kind."""
    columns: dict[str, list[Any]]
    """The other fields, by the names of `Entry`."""
    lost_after: int | None = None
    """record_id of the entry before the last one that cannot be read; -1 = it is before all, None = there is none."""

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, row: int) -> Entry:
        own = {name: column[row] for name, column in self.columns.items()}
        return structs.replace(self.kinds[self.kind[row]], **own)

    def __iter__(self) -> Iterator[Entry]:
        return map(self.__getitem__, range(len(self)))

    def numbers(self, name: str) -> NDArray[Any]:
        """Return a column of numbers, with 0 for an unknown one."""
        column = self.columns[name]
        return np.array([value or 0 for value in column] if None in column else column)


def last_calls(columns: Columns, last: int) -> Sequence[int]:
    """The rows to read: those from `last` rows before the first unfinished one on. Before them, all sends and receives
    are read, and the last launch of each group. If the entries are not as torch writes them, all rows are read.
    `columns` has at least `LAUNCH`.

    The members of a coalesced launch never have the state "completed": its closing entry, the last one, has it.
    """
    record_id, state, p2p, *numbers = (columns[name] for name in LAUNCH)
    if type(next(iter(record_id), 0)) is not int or any(None in column for column in (state, p2p, *numbers)):
        return range(len(state))
    try:
        launches = list(zip(*numbers, strict=True))
        is_over = {launch: one == "completed" for launch, one in zip(launches, state, strict=True)}
    except TypeError:
        return range(len(state))
    open_from = next((place for place, launch in enumerate(launches) if not is_over[launch]), len(launches))
    kept = {launch for launch, one in zip(launches, p2p, strict=True) if one}
    kept.update({launch[0]: launch for launch in launches}.values())
    kept.update(launches[max(0, open_from - last) :])
    return [row for row, launch in enumerate(launches) if launch in kept]


def columns_of(dicts: list[dict[str, Any]], names: Iterable[str] = Entry.__struct_fields__) -> Columns:
    """The fields `names` of entries."""
    return {name: list(map(dict.get, dicts, repeat(name))) for name in names}


def read_columns(columns: Columns, budget: Budget) -> Entries | None:
    """Check columns in which equal entries share their lists, and return the entries. If one is not as torch writes it,
    return None and spend nothing."""
    used = budget.used.copy()
    budget.spend(ROWS, len(columns["record_id"]))
    firsts, same = _by_kind(zip(*(map(id, columns[name]) for name in _DESCRIPTION), strict=True))
    times = Counter(same)
    described = {name: [columns[name][row] for row in firsts] for name in _DESCRIPTION}
    found = None
    if _spend_extents(described, [times[row] for row in firsts], budget):
        try:
            keys = dict(zip(firsts, map(_encode, zip(*described.values(), strict=True)), strict=True))
            found = _checked(columns, [keys[row] for row in same])
        except BROKEN:
            pass
    budget.used = used if found is None else budget.used
    return found


def read_rows(rows: list[Any], problems: list[str], budget: Budget) -> Entries:
    """Check the entries column by column, or if one is not as torch writes it, row by row."""
    budget.spend(ROWS, len(rows))
    dicts = [row for row in rows if type(row) is dict]
    given = columns_of(dicts)
    is_plain = _spend_extents(given, None, budget)
    try:
        if is_plain and len(dicts) == len(rows):
            # Comparing the bytes of nested lists is several times as fast as making tuples of them.
            return _checked(given, map(_encode, zip(*(given[name] for name in _DESCRIPTION), strict=True)))
    except BROKEN:
        pass
    entries, lost_after = _row_by_row(rows, problems)
    kinds, kind = _by_kind(map(attrgetter(*_DESCRIPTION), entries))
    columns = {name: list(map(attrgetter(name), entries)) for name in _COLUMNS}
    return Entries({row: entries[row] for row in kinds}, kind, columns, lost_after)


def _checked(given: Columns, keys: Iterable[Hashable]) -> Entries:
    """Entries of these columns; those with equal `keys` are of one kind."""
    if len(set(given["record_id"])) < len(given["record_id"]):
        raise ValueError("two entries have one number")
    columns = {name: msgspec.convert(given[name], column) for name, column in _COLUMNS.items()}
    kinds, kind = _by_kind(keys)
    first = {row: {name: column[row] for name, column in given.items()} for row in kinds}
    return Entries({row: msgspec.convert(own, Entry) for row, own in first.items()}, kind, columns)


def _by_kind(keys: Iterable[Hashable]) -> tuple[list[int], list[int]]:
    """(first row of each key, for each row the first one with its key)"""
    known = list(keys)
    first_of = dict(zip(reversed(known), reversed(range(len(known))), strict=True))
    return sorted(first_of.values()), list(map(first_of.__getitem__, known))


def _spend_extents(given: Columns, times: list[int] | None, budget: Budget) -> bool:
    """Spend the sizes of the entries' lists, and return whether they are as torch writes them. A pickle may have a
    million references to one list, so a row counts once for each entry that shares it (`times`)."""
    is_plain = {str}.issuperset(map(type, given["profiling_name"]))
    for name in _DESCRIPTION[2:]:
        lists, weights = _lists(given[name]), times
        is_plain = is_plain and len(lists) == len(given[name])
        if times is not None and not is_plain:
            return False
        budget.spend(EXTENTS, _sum_of_lengths(lists, weights))
        cell: type = str
        values = list(chain.from_iterable(lists))
        if name.endswith("_sizes"):
            shapes, cell = _lists(values), int
            is_plain = is_plain and len(shapes) == len(values)
            if weights is not None:
                weights = list(chain.from_iterable(map(repeat, weights, map(len, lists))))
            budget.spend(EXTENTS, _sum_of_lengths(shapes, weights))
            values = list(chain.from_iterable(shapes))
        is_plain = is_plain and {cell}.issuperset(map(type, values))
    groups = _lists(given["process_group"])
    return is_plain and len(groups) == len(given["process_group"]) and {str}.issuperset(map(type, chain(*groups)))


def _sum_of_lengths(lists: list[Any], times: list[int] | None) -> int:
    return sum(map(len, lists)) if times is None else sum(map(mul, map(len, lists), times))


def _lists(values: list[Any]) -> list[Any]:
    """The lists among `values`. Usually all are lists: the set of types shows that without a loop."""
    return values if _LISTS.issuperset(map(type, values)) else [one for one in values if type(one) in _LISTS]


def _row_by_row(rows: list[Any], problems: list[str]) -> tuple[list[Entry], int | None]:
    """Return (the entries, `Entries.lost_after`). What an entry lacks, or has as null, is unknown,
    but what says which call it is. The first of several entries with one number counts."""
    entries: dict[int, Entry] = {}
    broken, twice, first = 0, 0, ""
    last, lost_after = -1, None
    for number, row in enumerate(rows):
        try:
            given = row.items() if type(row) is dict else ()
            known = {name: value for name, value in given if value is not None or name in _IDENTITY}
            entry = msgspec.convert(known, Entry)
        except BROKEN as error:
            broken += 1
            lost_after = last
            first = first or f"entry {number}: {one_line(error)[:200]}"
            continue
        twice += entry.record_id in entries
        entries.setdefault(entry.record_id, entry)
        last = entry.record_id
    if broken:
        problems.append(f"{broken} of {len(rows)} entries are unusable ({first}) and were skipped")
    if twice:
        problems.append(f"{twice} entries have the number of an earlier one and were skipped")
    return list(entries.values()), lost_after
