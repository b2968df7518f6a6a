"""Dumps of torch's flight recorder: the last calls of one rank, with their state, as one file.

A dump is a pickle (`TORCH_NCCL_DUMP_ON_TIMEOUT`, `_dump_fr_trace`), JSON (`_dump_fr_trace_json`) or our
`rank-N.flight.json.zst`, which is JSON with stack frames and a field `crossrank` of its own. All have the fields of
`c10d::FlightRecorder` (torch/csrc/distributed/c10d/FlightRecorder.hpp), versions 2.1 (torch 2.4) to 2.10 (2.13):

* JSON has no frames, writes the numbers of `pg_status` as strings, and 0 for a time that is not known.
* A group's `ranks` is text, "[0, 1]"; gloo writes "[]".
* `entries` is absent where there are none.

A dump is data from another machine: it is decoded without running anything (`safe_pickle`), every field is checked
for type and range, and single entries that are broken are counted and left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, repeat
from operator import attrgetter
from types import GenericAlias
from typing import Annotated, Any

import msgspec
import numpy as np
import orjson
from msgspec import structs
from numpy.typing import NDArray

from crossrank.budget import EXTENTS, MEMBERS, ROWS, VALUES, Budget, BudgetError
from crossrank.comm import MOST_RANKS, CommRecord, Group, Int, Number
from crossrank.errors import BROKEN, CrossrankError, one_line
from crossrank.privacy import Privacy
from crossrank.recording import ReadIssues, read_chunks
from crossrank.tools.traces.flight.pickled_entries import load_columns
from crossrank.tools.traces.flight.safe_pickle import RefusedPickleError, load_whole, spend_containers
from crossrank.tools.traces.json_document import parse
from crossrank.tools.traces.kept import shared

MOST_FRAMES = 256
_LISTS = frozenset((list, tuple))
_PICKLE = b"\x80"
_PG_ID = re.compile(r"[0-9]{1,9}")
_MANY = msgspec.Meta(max_length=1 << 16)

WorldSize = Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS), Privacy.NUMBER]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Shape = Annotated[tuple[Int, ...], msgspec.Meta(max_length=32), Privacy.SIZE]
Shapes = Annotated[tuple[Shape, ...], _MANY]
Dtypes = Annotated[tuple[Text, ...], _MANY, Privacy.DTYPE]
Ranks = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]], msgspec.Meta(max_length=MOST_RANKS)]


NCCL2 = "nccl2"
"""The backend of `ProcessGroupNCCL2`, which is NCCL's from torch 2.15 on."""


class Frame(msgspec.Struct, frozen=True):
    """One frame of a stack."""

    name: Text
    filename: Text
    line: Int


class Entry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One call, or one member of a coalesced call. Times are ns since 1970 and None where they are not known."""

    record_id: Number
    profiling_name: Annotated[Text, Privacy.EVENT]
    """`nccl:all_reduce`, `nccl:send 0->1`: backend, operation, and for P2P the ranks within the group."""
    process_group: Annotated[tuple[Text, Text], Privacy.GROUP] = ("", "")
    """Name and description."""
    pg_id: Number = -1
    collective_seq_id: Number = 0
    p2p_seq_id: Number = 0
    op_id: Number = -1
    """Counts the calls of the group, of both kinds."""
    time_created_ns: Annotated[Int, Privacy.WALL] = 0
    input_sizes: Shapes = ()
    input_dtypes: Dtypes = ()
    output_sizes: Shapes = ()
    output_dtypes: Dtypes = ()
    state: Annotated[Text, Privacy.STATE] = "scheduled"
    time_discovered_started_ns: Annotated[Int, Privacy.WALL] | None = None
    time_discovered_completed_ns: Annotated[Int, Privacy.WALL] | None = None
    duration_ms: Annotated[float, msgspec.Meta(ge=0, le=1e12), Privacy.NUMBER] | None = None
    retired: bool = False
    is_p2p: bool | None = None
    """None in dumps that do not say."""
    frames: Annotated[Any, Privacy.FRAMES] = ()
    """Innermost first, as decoded: `read_frame` checks them, each once."""


_DESCRIPTION = ("process_group", "profiling_name", "input_sizes", "output_sizes", "input_dtypes", "output_dtypes")
_Columns = dict[str, list[Any]]
"""Fields of `Entry`, as decoded: None where an entry lacks one."""
_COLUMNS = {one.name: GenericAlias(list, one.type) for one in structs.fields(Entry) if one.name not in _DESCRIPTION}


@dataclass(frozen=True)
class Entries:
    """The entries of a dump. What is often equal stands once, the rest as columns."""

    kinds: dict[int, Entry]
    """The first entry of each kind, that is, with its group, operation, sizes and dtypes, by its row."""
    kind: list[int]
    """Of each entry the row of the first of its kind."""
    columns: dict[str, list[Any]]
    """The other fields, by the names of `Entry`."""

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


class Progress(msgspec.Struct, frozen=True):
    """How far a rank came on one group: sequence numbers, -1 = none. P2P calls put theirs here as well."""

    last_enqueued_collective: Number = -1
    last_completed_collective: Number = -1


class GroupConfig(msgspec.Struct, frozen=True):
    """A process group as the rank knows it."""

    name: Annotated[Text, Privacy.GROUP] = ""
    desc: Annotated[Text, Privacy.GROUP] = ""
    ranks: Annotated[str, Privacy.NUMBER] = "[]"


Frames = Annotated[list[Frame], msgspec.Meta(max_length=MOST_FRAMES), Privacy.FRAMES]


class Raised(msgspec.Struct, frozen=True):
    """An exception that ended a thread, or that it handles, innermost frame first."""

    thread: Annotated[Text, Privacy.THREAD] = ""
    error: Annotated[Text, Privacy.MESSAGE] = ""
    causes: Annotated[list[Text], _MANY, Privacy.MESSAGE] = []
    """Texts of the exceptions that it was raised from, or while handling them: the direct cause first."""
    frames: Frames = []


class OwnStack(msgspec.Struct, frozen=True):
    """Where a thread of the process was when our dump was taken, innermost frame first."""

    thread: Annotated[Text, Privacy.THREAD]
    frames: Frames
    handles: Raised | None = None
    """The exception that it handles at this moment, in an `except` or a `finally`."""


class WaitUnderWay(msgspec.Struct, frozen=True, kw_only=True):
    """A wait that is under way."""

    id: Number | None
    """Of the call; None where that is not known."""
    thread: Annotated[Text, Privacy.THREAD]


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """What crossrank adds to a dump that it takes itself."""

    rank: Number
    world_size: WorldSize
    host: Annotated[Text, Privacy.HOST] = ""
    reason: Annotated[Text, Privacy.REASON] = ""
    """`hang`, `SIGUSR1`, `SIGTERM`, `window`, `disable`, `exit`."""
    error: Annotated[Text, Privacy.MESSAGE] | None = None
    """The text of the first of `exceptions`."""
    exceptions: Annotated[list[Raised], _MANY] = []
    """What ended threads of the process, that of the main thread first."""
    time_ns: Annotated[Int, Privacy.WALL]
    """ns since 1970 when it was taken."""
    clock: Annotated[dict[str, Int], Privacy.MIXED] = {}
    """The same moment on both clocks: `t` monotonic, `wall` since 1970."""
    groups: Annotated[list[Group], _MANY] = []
    calls: Annotated[list[CommRecord], _MANY] = []
    """The last calls that were recorded, whether or not they left the node; gloo's P2P is known from here alone."""
    waits: Annotated[list[WaitUnderWay], _MANY] | None = None
    """What threads of Python wait for; None where waits are not followed."""
    waited: Annotated[list[Number], _MANY] | None = None
    """Ids of calls that they have waited for: on a GPU their stream has; None in older dumps."""
    moves: bool = False
    """Whether the main thread was seen to move since the last call."""
    busy: Annotated[float, Privacy.NUMBER] | None = None
    """Share of the time since then in which it had a processor."""
    stacks: Annotated[list[OwnStack], _MANY] = []


class FlightDump(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's dump."""

    path: str
    version: str
    groups: list[Group]
    """Those of `pg_config`; `ranks` is None where the dump does not know the members."""
    status: dict[int, Progress]
    """By the `pg_id` of the entries."""
    entries: Entries
    left_out: int = 0
    """Entries that were not asked for."""
    first_record: int = 0
    """Number of the first entry, whether it was asked for or not: above 0 those before it fell out of the ring."""
    moment: Moment | None
    problems: list[str]


class NoDumpError(CrossrankError):
    """The file cannot be used: it is no dump (`unrecognized`), or one that asks for more than data (`refused`)."""

    def __init__(self, text: str, *, refused: bool = False, unrecognized: bool = False) -> None:
        super().__init__(text)
        self.refused = refused
        self.unrecognized = unrecognized


@shared
def read_flight_dump(path: str, last: int | None = None) -> FlightDump:
    """Read one dump, plain, gzip or zstd; with `last` what is not over and so many calls before it.

    Raises `NoDumpError` where nothing of it can be used.
    """
    issues = ReadIssues(path)
    try:
        data = b"".join(read_chunks(path, issues))
        return decode_flight_dump(path, data, issues.problems, issues.budget, last)
    except BudgetError as error:
        raise NoDumpError(str(error), refused=True) from error
    except MemoryError:
        raise NoDumpError(f"{path}: is refused: it needs more memory than there is", refused=True) from None
    except OSError as error:
        raise NoDumpError(f"{path}: cannot be read ({one_line(error)})") from error


def decode_flight_dump(
    path: str, data: bytes, problems: list[str], budget: Budget, last: int | None = None
) -> FlightDump:
    """The dump in `data`; `problems` is what reading it has met so far, `budget` what it has used.

    Raises `BudgetError` where it asks for more than a dump has.
    """
    if not data:
        raise NoDumpError(f"{path}: {'; '.join(['is empty', *problems])}")
    content, columns = _decode(path, data, budget)
    if not isinstance(content, dict) or not any(name in content for name in ("version", "pg_config", "entries")):
        raise NoDumpError(
            f"{path}: is not a flight-recorder dump: it lacks version, pg_config and entries", unrecognized=True
        )

    def convert(value: Any, into: Any, what: str) -> Any:
        """`value` as `into`, or None and a problem."""
        try:
            return msgspec.convert(value, into, strict=False)
        except BROKEN as error:
            problems.append(f"{what} is unusable ({one_line(error)[:200]}) and was left out")
            return None

    def rows(name: str, row: Any) -> dict[str, Any]:
        """The rows of a dictionary, each by itself: one that is broken does not cost the others."""
        given = content.get(name) or {}
        if not isinstance(given, dict):
            problems.append(f"{name} is no dictionary and was left out")
            return {}
        budget.spend(ROWS, len(given))
        found = {key: convert(value, row, f"an entry of {name}") for key, value in given.items()}
        return {key: value for key, value in found.items() if value is not None and isinstance(key, str)}

    entries = content.get("entries") or []
    if not isinstance(entries, list):
        problems.append("entries is no list")
        entries = []
    columns = _columns(entries) if columns is None else columns
    wanted: Sequence[int] = range(len(entries))
    if last is not None and columns is not None:
        wanted = _last_calls(columns, last)
    budget.spend(ROWS, len(wanted))
    found = None if columns is None else _plain_entries(columns, wanted, budget)
    if found is None:
        rows_of = _whole_entries(path, data) if columns is not None and None in entries else entries
        found = _row_by_row([rows_of[row] for row in wanted if row < len(rows_of)], problems)
    left_out = len(entries) - len(wanted)
    record_ids = columns["record_id"] if left_out and columns is not None else found.columns["record_id"]
    moment = None
    if data[:1] != _PICKLE and content.get("crossrank") is not None:
        moment = convert(content["crossrank"], Moment, "crossrank")
    return FlightDump(
        path=path,
        version=whole(convert(content.get("version", ""), Text, "version") or ""),
        groups=_groups(rows("pg_config", GroupConfig), problems, budget),
        status=_status_of(
            {int(key): value for key, value in rows("pg_status", Progress).items() if _PG_ID.fullmatch(key)}, found
        ),
        entries=found,
        left_out=left_out,
        first_record=next(iter(record_ids), 0),
        moment=moment,
        problems=problems,
    )


def _status_of(status: dict[int, Progress], entries: Entries) -> dict[int, Progress]:
    """How far each group came, in sequence numbers: of groups of `ProcessGroupNCCL2` the status has numbers of calls of
    both kinds, counted from 0 (torch 2.15, FlightRecorderHook)."""
    if not any(entry.profiling_name.startswith(f"{NCCL2}:") for entry in entries.kinds.values()):
        return status
    columns = entries.columns
    seq_of = {
        (pg_id, call): seq
        for pg_id, call, seq in zip(columns["pg_id"], columns["op_id"], columns["collective_seq_id"], strict=True)
    }
    return {
        pg_id: Progress(*(seq_of.get((pg_id, call), -1) for call in structs.astuple(progress)))
        for pg_id, progress in status.items()
    }


def _groups(configs: dict[str, GroupConfig], problems: list[str], budget: Budget) -> list[Group]:
    groups = []
    ranks_in = lru_cache(_ranks_in)  # groups that have the same members share the text
    for config in configs.values():
        ranks = ranks_in(config.ranks)
        budget.spend(MEMBERS, len(ranks or ()))
        if ranks is None:
            problems.append(f"the ranks of group {config.name[:60]!r} are unusable: {config.ranks[:60]!r}")
        # gloo's only group is nameless and empty: it says nothing.
        if config.name or ranks:
            groups.append(
                Group(pg=whole(config.name), desc=whole(config.desc), size=len(ranks or ()), ranks=ranks or None)
            )
    return groups


def _ranks_in(text: str) -> list[int] | None:
    """The ranks in "[0, 1]"; None for any other text."""
    ranks = parse(text, Ranks)
    return ranks if ranks is not None and len(set(ranks)) == len(ranks) else None


@lru_cache(maxsize=1024)  # a pickle may name one long text a million times
def whole(text: str) -> str:
    """`text` without halves of surrogate pairs, which pickle lets pass and which nothing can write.

    >>> whole("a\\ud800b")
    'a\\\\ud800b'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def read_frame(frame: Any) -> Frame | None:
    """A frame of an entry, as decoded; None where it is broken."""
    try:
        known = msgspec.convert(frame, Frame, strict=False)
    except BROKEN:
        return None
    return Frame(whole(known.name), whole(known.filename), known.line)


def _last_calls(columns: _Columns, last: int) -> Sequence[int]:
    """The rows from `last` before the first call that is not over on, and of those before it all sends and receives and
    the last launch of each group; all, where the entries are not as torch writes them.

    The members of a coalesced launch never say that they are over: its closing entry, the last one, does.
    """
    record_id, state, p2p = columns["record_id"], columns["state"], columns["is_p2p"]
    numbers = [columns[name] for name in ("pg_id", "collective_seq_id", "p2p_seq_id")]
    is_known = not any(None in column for column in (state, p2p, *numbers))
    if not is_known or {type(number) for number in record_id[:1]} != {int}:
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


def _columns(rows: list[Any]) -> _Columns | None:
    """The fields of entries; None where one of them is no dictionary."""
    if not {dict}.issuperset(map(type, rows)):
        return None
    return {name: list(map(dict.get, rows, repeat(name))) for name in Entry.__struct_fields__}


def _plain_entries(columns: _Columns, rows: Sequence[int], budget: Budget) -> Entries | None:
    """The entries in `rows`, checked column by column; None where one of them is not as torch writes it."""
    if len(rows) < len(columns["record_id"]):
        columns = {name: list(map(column.__getitem__, rows)) for name, column in columns.items()}
    described = [columns[name] for name in _DESCRIPTION]
    _, kind = _by_kind(zip(*(map(id, column) for column in described), strict=True))
    if not _spend_extents(columns, Counter(kind), budget):
        return None
    try:
        checked = {name: msgspec.convert(columns[name], column) for name, column in _COLUMNS.items()}
        # Those that share all objects are of one kind. Bytes of others are compared in a fraction of the time that it
        # takes to make tuples of their lists of lists.
        encode, first_of = msgspec.msgpack.Encoder().encode, dict[bytes, int]()
        kind_of = {
            row: first_of.setdefault(encode([one[row] for one in described]), row) for row in dict.fromkeys(kind)
        }
        kinds = {
            row: msgspec.convert({name: column[row] for name, column in columns.items()}, Entry)
            for row in first_of.values()
        }
    except BROKEN:
        return None
    return Entries(kinds, list(map(kind_of.__getitem__, kind)), checked)


def _row_by_row(rows: list[Any], problems: list[str]) -> Entries:
    """The entries, each checked by itself; those that are broken are counted and left out."""
    entries, broken, first = [], 0, ""
    for number, row in enumerate(rows):
        try:
            entries.append(msgspec.convert(row, Entry))
        except BROKEN as error:
            broken += 1
            first = first or f"entry {number}: {one_line(error)[:200]}"
    if broken:
        problems.append(f"{broken} of {len(rows)} entries are unusable ({first}) and were left out")
    kinds, kind = _by_kind(map(attrgetter(*_DESCRIPTION), entries))
    columns = {name: list(map(attrgetter(name), entries)) for name in _COLUMNS}
    return Entries({row: entries[row] for row in kinds}, kind, columns)


def _by_kind(keys: Iterable[Hashable]) -> tuple[Iterable[int], list[int]]:
    """(The first row of each key, that of each row.)"""
    known = list(keys)
    first_of = dict(zip(reversed(known), reversed(range(len(known))), strict=True))
    return sorted(first_of.values()), list(map(first_of.__getitem__, known))


def _spend_extents(columns: _Columns, times: Mapping[int, int], budget: Budget) -> bool:
    """Spend what the lists of the entries hold; returns whether they are as torch writes them.

    `times` is how many entries have the same lists as one of them. A pickle may name one list a million times: what
    counts is what each entry makes of it.
    """
    names, groups = ([columns[name][row] for row in times] for name in ("profiling_name", "process_group"))
    is_plain = {str}.issuperset(map(type, names)) and _LISTS.issuperset(map(type, groups))
    is_plain = is_plain and {str}.issuperset(map(type, chain.from_iterable(groups)))
    for name in _DESCRIPTION[2:]:
        lists = [(columns[name][row], count) for row, count in times.items() if type(columns[name][row]) in _LISTS]
        is_plain = is_plain and len(lists) == len(times)
        budget.spend(EXTENTS, sum(len(one) * count for one, count in lists))
        cell: type = str
        if name.endswith("_sizes"):
            values, cell = sum(len(one) for one, _ in lists), int
            lists = [(shape, count) for one, count in lists for shape in one if type(shape) in _LISTS]
            is_plain = is_plain and len(lists) == values
            budget.spend(EXTENTS, sum(len(shape) * count for shape, count in lists))
        is_plain = is_plain and {cell}.issuperset(map(type, chain.from_iterable(one for one, _ in lists)))
    return is_plain


def _whole_entries(path: str, data: bytes) -> list[Any]:
    """The entries of a pickle of which most were read as columns."""
    content = _whole(path, data)
    entries = content.get("entries") if isinstance(content, dict) else None
    return entries if isinstance(entries, list) else []


def _whole(path: str, data: bytes) -> Any:
    try:
        return load_whole(data)
    except RefusedPickleError as error:
        step = "take the dump again" if error.cut_off else "a genuine dump holds data alone"
        refused = "" if error.cut_off else "is refused: "
        raise NoDumpError(f"{path}: {refused}the pickle {error}; {step}", refused=not error.cut_off) from error


def _decode(path: str, data: bytes, budget: Budget) -> tuple[Any, _Columns | None]:
    """What a dump holds, and its entries as columns, where they were read as these."""
    if data[:1] == _PICKLE:
        spend_containers(data, budget)
        return load_columns(data, Entry.__struct_fields__) or (_whole(path, data), None)
    if data.lstrip()[:1] != b"{":
        lacks = "it is neither a pickle nor JSON"
        raise NoDumpError(f"{path}: is not a flight-recorder dump: {lacks}", unrecognized=True)
    budget.spend(VALUES, data.count(b"{") + data.count(b"[") + data.count(b","))
    try:
        return orjson.loads(data), None
    except BROKEN as error:
        raise NoDumpError(f"{path}: is no whole JSON ({one_line(error)[:200]}); take the dump again") from error
