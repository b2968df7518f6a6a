"""Dumps of torch's flight recorder: the last calls of one rank, with their state, as one file.

A dump is a pickle (`TORCH_NCCL_DUMP_ON_TIMEOUT`, `_dump_fr_trace`), JSON (`_dump_fr_trace_json`) or our
`rank-N.flight.json.zst`, which is JSON with stack frames and a field `crossrank` of its own. All have the fields of
`c10d::FlightRecorder` (torch/csrc/distributed/c10d/FlightRecorder.hpp), versions 2.1 (torch 2.4) to 2.10 (2.13):

* JSON has no frames, writes the numbers of `pg_status` as strings, and 0 for a time that is not known.
* A group's `ranks` is text, "[0, 1]"; gloo writes "[]".
* `entries` is absent where there are none.
* Tools that keep dumps as literals write numbers as text, one dtype for all tensors of a side ("float32", "" for none),
  `[[]]` for no tensor, no `pg_id`, and the rank at the top, as torch's own tests do
  (test/distributed/flight_recorder/test_fr_analysis.py there).

A dump is data from another machine: it is decoded without running anything (`safe_pickle`), every field is checked
for type and range, and single entries that are broken are counted and left out.
"""

from __future__ import annotations

import contextlib
import re
from functools import lru_cache
from itertools import chain
from typing import Annotated, Any

import msgspec
import orjson

from crossrank.budget import EXTENTS, MEMBERS, ROWS, VALUES, Budget, BudgetError
from crossrank.comm import MOST_RANKS, CommRecord, Group, Int
from crossrank.errors import BROKEN, CrossrankError, one_line
from crossrank.recording import Damage, read_chunks
from crossrank.tools.traces.json_document import parse
from crossrank.tools.traces.safe_pickle import RefusedPickleError, load_data

MOST_FRAMES = 256
_LIST = (list, tuple)
_PICKLE = b"\x80"
_PG_ID = re.compile(r"[0-9]{1,9}")
_MANY = msgspec.Meta(max_length=1 << 16)

WorldSize = Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Shape = Annotated[tuple[Int, ...], msgspec.Meta(max_length=32)]
Shapes = Annotated[tuple[Shape, ...], _MANY]
Dtypes = Annotated[tuple[Text, ...], _MANY]
Ranks = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]], msgspec.Meta(max_length=MOST_RANKS)]


class Frame(msgspec.Struct, frozen=True):
    """One frame of a stack."""

    name: Text
    filename: Text
    line: Int


class Entry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One call, or one member of a coalesced call. Times are ns since 1970 and None where they are not known."""

    record_id: Int
    profiling_name: Text
    """`nccl:all_reduce`, `nccl:send 0->1`: backend, operation, and for P2P the ranks within the group."""
    process_group: tuple[Text, Text] = ("", "")
    """Name and description."""
    pg_id: Int = -1
    collective_seq_id: Int = 0
    p2p_seq_id: Int = 0
    time_created_ns: Int = 0
    input_sizes: Shapes = ()
    input_dtypes: Dtypes = ()
    output_sizes: Shapes = ()
    output_dtypes: Dtypes = ()
    state: Text = "scheduled"
    time_discovered_started_ns: Int | None = None
    time_discovered_completed_ns: Int | None = None
    duration_ms: float | None = None
    retired: bool = False
    is_p2p: bool | None = None
    """None in dumps that do not say."""
    frames: Any = ()
    """Innermost first, as decoded: `frames_of` checks them, once per stack."""


class Progress(msgspec.Struct, frozen=True):
    """How far a rank came on one group: sequence numbers, -1 = none. P2P calls put theirs here as well."""

    last_enqueued_collective: Int = -1
    last_completed_collective: Int = -1


class GroupConfig(msgspec.Struct, frozen=True):
    """A process group as the rank knows it."""

    name: Text = ""
    desc: Text = ""
    ranks: str = "[]"


Frames = Annotated[list[Frame], msgspec.Meta(max_length=MOST_FRAMES)]


class OwnStack(msgspec.Struct, frozen=True):
    """Where a thread of the process was when our dump was taken, innermost frame first."""

    thread: Text
    frames: Frames


class Raised(msgspec.Struct, frozen=True):
    """An exception that ended a thread, innermost frame first."""

    thread: Text = ""
    error: Text = ""
    causes: Annotated[list[Text], _MANY] = []
    """Texts of the exceptions that it was raised from, or while handling them: the direct cause first."""
    frames: Frames = []


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """What crossrank adds to a dump that it takes itself."""

    rank: Int
    world_size: WorldSize
    host: Text = ""
    reason: Text = ""
    """`hang`, `SIGUSR1`, `SIGTERM`, `window`, `disable`, `exit`."""
    error: Text | None = None
    """The text of the first of `exceptions`."""
    exceptions: Annotated[list[Raised], _MANY] = []
    """What ended threads of the process, that of the main thread first."""
    time_ns: Int
    """ns since 1970 when it was taken."""
    clock: dict[str, Int] = {}
    """The same moment on both clocks: `t` monotonic, `wall` since 1970."""
    groups: Annotated[list[Group], _MANY] = []
    calls: Annotated[list[CommRecord], _MANY] = []
    """The last calls that were recorded, whether or not they left the node; gloo's P2P is known from here alone."""
    stacks: Annotated[list[OwnStack], _MANY] = []


class FlightDump(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's dump."""

    path: str
    version: str
    groups: list[Group]
    """Those of `pg_config`; `ranks` is None where the dump does not know the members."""
    status: dict[int, Progress]
    """By the `pg_id` of the entries."""
    entries: list[Entry]
    moment: Moment | None
    rank: int | None = None
    """What the dump says itself; torch's own do not."""
    problems: list[str]


class NoDumpError(CrossrankError):
    """The file cannot be used: it is no dump (`foreign`), or one that asks for more than data (`refused`)."""

    def __init__(self, text: str, *, refused: bool = False, foreign: bool = False) -> None:
        super().__init__(text)
        self.refused = refused
        self.foreign = foreign


def read_flight_dump(path: str) -> FlightDump:
    """Read one dump, plain, gzip or zstd. Raises `NoDumpError` where nothing of it can be used."""
    damage = Damage(path)
    try:
        data = b"".join(read_chunks(path, damage))
        return decode_flight_dump(path, data, damage.problems, damage.budget)
    except BudgetError as error:
        raise NoDumpError(str(error), refused=True) from error
    except MemoryError:
        raise NoDumpError(f"{path}: is refused: it needs more memory than there is", refused=True) from None
    except OSError as error:
        raise NoDumpError(f"{path}: cannot be read ({one_line(error)})") from error


def decode_flight_dump(path: str, data: bytes, problems: list[str], budget: Budget) -> FlightDump:
    """The dump in `data`; `problems` is what reading it has met so far, `budget` what it has used.

    Raises `BudgetError` where it asks for more than a dump has.
    """
    if not data:
        raise NoDumpError(f"{path}: {'; '.join(['is empty', *problems])}")
    content = _decode(path, data, budget)
    if not isinstance(content, dict) or not any(name in content for name in ("version", "pg_config", "entries")):
        raise NoDumpError(f"{path}: is no flight-recorder dump: it lacks version, pg_config and entries", foreign=True)

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
    moment = None
    if data[:1] != _PICKLE and content.get("crossrank") is not None:
        moment = convert(content["crossrank"], Moment, "crossrank")
    return FlightDump(
        path=path,
        version=whole(convert(content.get("version", ""), Text, "version") or ""),
        groups=_groups(rows("pg_config", GroupConfig), problems, budget),
        status={int(key): value for key, value in rows("pg_status", Progress).items() if _PG_ID.fullmatch(key)},
        entries=_entries(entries, problems, budget),
        moment=moment,
        rank=moment.rank if moment is not None else convert(content.get("rank"), int | None, "rank"),
        problems=problems,
    )


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


def frames_of(frames: Any) -> tuple[Frame, ...]:
    """The frames of one entry, innermost first; those that are broken are left out."""
    known = []
    for one in frames[:MOST_FRAMES] if isinstance(frames, _LIST) else ():
        with contextlib.suppress(*BROKEN):
            frame = msgspec.convert(one, Frame, strict=False)
            known.append(Frame(whole(frame.name), whole(frame.filename), frame.line))
    return tuple(known)


def _entries(rows: list[Any], problems: list[str], budget: Budget) -> list[Entry]:
    budget.spend(ROWS, len(rows))
    _count_extents(rows, budget)
    try:
        return msgspec.convert(rows, list[Entry])
    except BROKEN:
        pass
    entries, broken, first = [], 0, ""
    group_ids: dict[str, int] = {}
    for number, row in enumerate(rows):
        try:
            literal = isinstance(row, dict) and isinstance(row.get("collective_seq_id"), str)
            entries.append(msgspec.convert(_of_literal(row, group_ids) if literal else row, Entry, strict=not literal))
        except BROKEN as error:
            broken += 1
            first = first or f"entry {number}: {one_line(error)[:200]}"
    if broken:
        problems.append(f"{broken} of {len(rows)} entries are unusable ({first}) and were left out")
    return entries


def _count_extents(rows: list[Any], budget: Budget) -> None:
    """Spend what the lists of the entries hold. A pickle may name one list a million times: what counts is what each
    entry makes of it."""
    dicts = [row for row in rows if isinstance(row, dict)]
    for name in ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes"):
        lists = [found for row in dicts if isinstance(found := row.get(name), _LIST)]
        budget.spend(EXTENTS, sum(map(len, lists)))
        if name.endswith("_sizes"):
            budget.spend(EXTENTS, sum(len(one) for one in chain.from_iterable(lists) if isinstance(one, _LIST)))


def _of_literal(row: dict[str, Any], group_ids: dict[str, int]) -> dict[str, Any]:
    """A row of the literal form in torch's own; its numbers may still be text.

    `group_ids`: the `pg_id` that each group is given, below those that the recorder gives (-1 is that of none).
    """
    group_id = group_ids.setdefault(str(row.get("process_group")), -2 - len(group_ids))
    found = {"pg_id": group_id} | row
    for side in ("input", "output"):
        sizes, dtypes = row.get(f"{side}_sizes"), row.get(f"{side}_dtypes")
        if isinstance(dtypes, str):
            found[f"{side}_dtypes"] = [dtypes] * len(sizes) if dtypes and isinstance(sizes, list | tuple) else []
        if isinstance(sizes, list | tuple) and not any(sizes):
            found[f"{side}_sizes"] = found[f"{side}_dtypes"] = []
    return found


def _decode(path: str, data: bytes, budget: Budget) -> Any:
    if data[:1] == _PICKLE:
        try:
            return load_data(data, budget)
        except RefusedPickleError as error:
            step = "take the dump again" if error.cut_off else "a genuine dump holds data alone"
            refused = "" if error.cut_off else "is refused: "
            raise NoDumpError(f"{path}: {refused}the pickle {error}; {step}", refused=not error.cut_off) from error
    if data.lstrip()[:1] != b"{":
        lacks = "it starts neither as a pickle nor as JSON"
        raise NoDumpError(f"{path}: is no flight-recorder dump: {lacks}", foreign=True)
    budget.spend(VALUES, data.count(b"{") + data.count(b"[") + data.count(b","))
    try:
        return orjson.loads(data)
    except BROKEN as error:
        raise NoDumpError(f"{path}: is no whole JSON ({one_line(error)[:200]}); take the dump again") from error
