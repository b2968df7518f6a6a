"""Dumps of torch's flight recorder: the last calls of one rank, with their state, as one file.

A dump is a pickle (`TORCH_NCCL_DUMP_ON_TIMEOUT`, `_dump_fr_trace`), JSON (`_dump_fr_trace_json`) or our
`rank-N.flight.json.zst`, which is JSON with stack frames and a field `crossrank` of its own. All have the fields of
`c10d::FlightRecorder` (torch/csrc/distributed/c10d/FlightRecorder.hpp), versions 2.1 (torch 2.4) to 2.10 (2.13):

* JSON has no frames, writes the numbers of `pg_status` as strings, and 0 for an unknown time.
* A group's `ranks` is text, "[0, 1]"; gloo writes "[]".
* `entries` is absent if there are none.

A dump is data from another machine. It is decoded without running code (`safe_pickle`), and every field is checked for
type and range. Broken entries are counted and skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import structs

from crossrank.budget import MEMBERS, ROWS, VALUES, Budget, BudgetError
from crossrank.comm import MOST_RANKS, CommRecord, Group, Int, Number
from crossrank.errors import BROKEN, CrossrankError, one_line
from crossrank.privacy import Privacy
from crossrank.recording import ReadIssues, read_chunks, with_epoch
from crossrank.text import plural
from crossrank.tools.traces.activity import RankActivity
from crossrank.tools.traces.flight.entries import (
    LAUNCH,
    MANY,
    Columns,
    Entries,
    Entry,
    Text,
    columns_of,
    last_calls,
    read_columns,
    read_rows,
)
from crossrank.tools.traces.flight.pickled_entries import load_columns
from crossrank.tools.traces.flight.safe_pickle import RefusedPickleError, load_whole, spend_containers
from crossrank.tools.traces.json_document import parse
from crossrank.tools.traces.kept import shared

MOST_FRAMES = 256
_PICKLE = b"\x80"
_PG_ID = re.compile(r"[0-9]{1,9}")

WorldSize = Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS), Privacy.NUMBER]
Ranks = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]], msgspec.Meta(max_length=MOST_RANKS)]


NCCL2 = "nccl2"
"""Backend name of `ProcessGroupNCCL2`, which implements NCCL from torch 2.15 on."""


class Frame(msgspec.Struct, frozen=True):
    """One frame of a stack."""

    name: Text
    filename: Text
    line: Int


class Progress(msgspec.Struct, frozen=True):
    """Progress of a rank on one group, as sequence numbers; -1 = none. P2P calls put their numbers here as well."""

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
    causes: Annotated[list[Text], MANY, Privacy.MESSAGE] = []
    """Texts of the exceptions that it was raised from, or while handling them: the direct cause first."""
    frames: Frames = []


class OwnStack(msgspec.Struct, frozen=True):
    """Where a thread of the process was when crossrank's dump was taken, innermost frame first."""

    thread: Annotated[Text, Privacy.THREAD]
    frames: Frames
    number: Number | None = None
    """The operating system's id of the thread; None if unknown."""
    makes_group: list[Number] | None = None
    """Members of the process group that it is making: global ranks, empty for all; None if it makes none."""
    makes_name: Annotated[Text, Privacy.GROUP] = ""
    """Name of this group; empty if it is not known, and in older dumps."""
    handles: Raised | None = None
    """The exception that it handles at this moment, in an `except` or a `finally`."""
    tasks: Annotated[list[Frames], MANY] = []
    """If it waits in an event loop: the stacks of the loop's tasks."""

    @property
    def waits_at(self) -> list[Frame]:
        """The frames that show what it waits for: in an event loop those of its first task, above its own."""
        return [*self.tasks[0], *self.frames] if self.tasks else self.frames


class WaitUnderWay(msgspec.Struct, frozen=True, kw_only=True):
    """An unfinished wait."""

    id: Number | None
    """Id of the call; None = unknown."""
    thread: Annotated[Text, Privacy.THREAD]
    number: Number | None = None
    """The operating system's id of the thread; None in older dumps."""
    limited: bool = False
    """The script gave this wait a timeout."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Data that crossrank adds to its own dumps."""

    rank: Number
    world_size: WorldSize
    host: Annotated[Text, Privacy.HOST] = ""
    process: Number | None = None
    """Its number in the system; None in older dumps."""
    groups_made: Number | None = None
    """How many process groups torch has counted on this rank, those of other ranks included."""
    failed_groups: Annotated[list[Annotated[Text, Privacy.GROUP]], MANY] = []
    """Names of the process groups whose communicator has failed, as its backend says."""
    limited_groups: Annotated[list[Annotated[Text, Privacy.GROUP]], MANY] = []
    """Names of the process groups with a shorter timeout than the default group."""
    reason: Annotated[Text, Privacy.REASON] = ""
    """`hang` or `asked`: a rank asked what it does, and it had just communicated nothing, or something; `SIGUSR1`,
    `SIGTERM`, `window`, `disable`, `exit`."""
    error: Annotated[Text, Privacy.MESSAGE] | None = None
    """The text of the first of `exceptions`."""
    exceptions: Annotated[list[Raised], MANY] = []
    """Exceptions that ended threads of the process, that of the main thread first."""
    time_ns: Annotated[Int, Privacy.WALL]
    """ns since 1970 when it was taken."""
    clock: Annotated[dict[str, Int], Privacy.MIXED] = {}
    """The same moment on both clocks: `t` monotonic, `wall` since 1970."""
    groups: Annotated[list[Group], MANY] = []
    calls: Annotated[list[CommRecord], MANY] = []
    """The last recorded calls, inside a node or not. Only this field has gloo's P2P calls."""
    waits: Annotated[list[WaitUnderWay], MANY] | None = None
    """Unfinished waits of Python threads; None if waits are not recorded."""
    waited: Annotated[list[Number], MANY] | None = None
    """Ids of calls that these threads have waited for (on a GPU: their stream has); None in older dumps."""
    activity: RankActivity | None = None
    """What the process did just before; None if the dump answers no question, and in older dumps."""
    stacks: Annotated[list[OwnStack], MANY] = []


class FlightDump(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's dump."""

    path: str
    version: str
    groups: list[Group]
    """Groups of `pg_config`; `ranks` is None if the dump does not have the members."""
    status: dict[int, Progress]
    """`pg_id` of the entries -> progress."""
    entries: Entries
    left_out: int = 0
    """Number of entries that were not requested."""
    first_record: int = 0
    """Number of the first entry, requested or not. Above 0, earlier entries fell out of the ring."""
    moment: Moment | None
    problems: list[str]


class NoDumpError(CrossrankError):
    """The file cannot be used: it is not a dump (`unrecognized`), or it asks for more than data (`refused`)."""

    def __init__(self, text: str, *, refused: bool = False, unrecognized: bool = False) -> None:
        super().__init__(text)
        self.refused = refused
        self.unrecognized = unrecognized


@shared
def read_flight_dump(path: str, last: int | None = None) -> FlightDump:
    """Read one dump, plain, gzip or zstd; with `last`, only the unfinished calls and that many calls before them.

    Raises `NoDumpError` if nothing of it can be used.
    """
    issues = ReadIssues(path)
    try:
        data = b"".join(read_chunks(path, issues))
        return decode_flight_dump(path, data, issues.problems, issues.budget, last)
    except BudgetError as error:
        raise NoDumpError(str(error), refused=True) from error
    except MemoryError:
        raise NoDumpError(f"{path}: is refused: it needs more memory than is available", refused=True) from None
    except OSError as error:
        raise NoDumpError(f"{path}: cannot be read ({one_line(error)})") from error


def decode_flight_dump(
    path: str, data: bytes, problems: list[str], budget: Budget, last: int | None = None
) -> FlightDump:
    """Decode the dump in `data`. `problems` and `budget` are those of reading it so far.

    Raises `BudgetError` if it asks for more than a dump has.
    """
    if not data:
        raise NoDumpError(f"{path}: {'; '.join(['is empty', *problems])}")
    content, columns = _decode(path, data, problems, budget)
    if not isinstance(content, dict) or not any(name in content for name in ("version", "pg_config", "entries")):
        raise NoDumpError(
            f"{path}: is not a flight-recorder dump: it lacks version, pg_config and entries", unrecognized=True
        )

    def convert(value: Any, into: Any, what: str) -> Any:
        """`value` as `into`, or None with a problem."""
        try:
            return msgspec.convert(value, into, strict=False)
        except BROKEN as error:
            problems.append(f"{what} is unusable ({one_line(error)[:200]}) and was skipped")
            return None

    def rows(name: str, row: Any) -> dict[str, Any]:
        """The rows of a dictionary. Each is converted separately, so a broken one does not affect the others."""
        given = content.get(name) or {}
        if not isinstance(given, dict):
            problems.append(f"{name} is not a dictionary and was skipped")
            return {}
        budget.spend(ROWS, len(given))
        found = {key: convert(value, row, f"an entry of {name}") for key, value in given.items()}
        return {key: value for key, value in found.items() if value is not None and isinstance(key, str)}

    entries = content.get("entries") or []
    if not isinstance(entries, list):
        problems.append("entries is not a list")
        entries = []
    wanted: Sequence[int] = range(len(entries))
    launches = columns
    if last is not None:
        launches = columns_of(entries, LAUNCH) if columns is None and {dict}.issuperset(map(type, entries)) else columns
        wanted = wanted if launches is None else last_calls(launches, last)
    found = None if columns is None else read_columns(_rows_of(columns, wanted), budget)
    if found is None:
        rows_of = entries if columns is None else _whole_entries(path, data)
        found = read_rows([rows_of[row] for row in wanted if row < len(rows_of)], problems, budget)
    left_out = len(entries) - len(wanted)
    record_ids = launches["record_id"] if left_out and launches is not None else found.columns["record_id"]
    moment = None
    if data[:1] != _PICKLE and content.get("crossrank") is not None:
        moment = convert(content["crossrank"], Moment, "crossrank")
    if moment is not None:
        groups, calls = list(map(with_epoch, moment.groups)), list(map(with_epoch, moment.calls))
        moment = msgspec.structs.replace(moment, groups=groups, calls=calls)
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


def _rows_of(columns: Columns, rows: Sequence[int]) -> Columns:
    if len(rows) == len(columns["record_id"]):
        return columns
    return {name: list(map(column.__getitem__, rows)) for name, column in columns.items()}


def _status_of(status: dict[int, Progress], entries: Entries) -> dict[int, Progress]:
    """Progress of each group in sequence numbers. For `ProcessGroupNCCL2`, the status counts calls of both kinds from 0
    (torch 2.15, FlightRecorderHook)."""
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
        # gloo's only group may have neither a name nor members: it is skipped.
        if config.name or ranks:
            groups.append(
                Group(pg=whole(config.name), desc=whole(config.desc), size=len(ranks or ()), ranks=ranks or None)
            )
    return groups


def _ranks_in(text: str) -> list[int] | None:
    """The ranks in "[0, 1]"; None for any other text."""
    ranks = parse(text, Ranks)
    return ranks if ranks is not None and len(set(ranks)) == len(ranks) else None


@lru_cache(maxsize=1024)  # a pickle may have a million references to one long text
def whole(text: str) -> str:
    """`text` with halves of surrogate pairs escaped: pickle allows them, but no file can have them.

    >>> whole("a\\ud800b")
    'a\\\\ud800b'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def read_frame(frame: Any) -> Frame | None:
    """A frame of an entry, as decoded; None if it is broken."""
    try:
        known = msgspec.convert(frame, Frame, strict=False)
    except BROKEN:
        return None
    return Frame(whole(known.name), whole(known.filename), known.line)


def _whole_entries(path: str, data: bytes) -> list[Any]:
    """The entries of a pickle, each as a dictionary."""
    content = _whole(path, data)
    entries = content.get("entries") if isinstance(content, dict) else None
    return entries if isinstance(entries, list) else []


def _whole(path: str, data: bytes) -> Any:
    try:
        return load_whole(data)
    except RefusedPickleError as error:
        step = "take the dump again" if error.cut_off else "a real dump has only data"
        refused = "" if error.cut_off else "is refused: "
        raise NoDumpError(f"{path}: {refused}the pickle {error}; {step}", refused=not error.cut_off) from error


def _decode(path: str, data: bytes, problems: list[str], budget: Budget) -> tuple[Any, Columns | None]:
    """The content of a dump, and its entries as columns if they were read as columns."""
    if data[:1] == _PICKLE:
        spend_containers(data, budget)
        return load_columns(data, Entry.__struct_fields__) or (_whole(path, data), None)
    if data.lstrip()[:1] != b"{":
        lacks = "it is neither a pickle nor JSON"
        raise NoDumpError(f"{path}: is not a flight-recorder dump: {lacks}", unrecognized=True)
    budget.spend(VALUES, data.count(b"{") + data.count(b"[") + data.count(b","))
    try:
        return orjson.loads(data), None
    except BROKEN:
        text = data.decode(errors="replace")
    try:
        # NaN and Infinity. orjson refuses other things that json takes: lone surrogates, numbers beyond 64 bits.
        content = orjson.loads(orjson.dumps(json.loads(text, parse_constant=lambda _: None)))
    except BROKEN as error:
        # Not row by row: a call that the dump has lost would look like one that its rank has not made.
        raise NoDumpError(f"{path}: is not complete JSON ({one_line(error)[:200]}); take the dump again") from error
    if odd := len(data) - len(data.decode(errors="ignore").encode()):
        problems.append(f"values with {plural(odd, 'byte')} that {'is' if odd == 1 else 'are'} not UTF-8 are wrong")
    return content, None
