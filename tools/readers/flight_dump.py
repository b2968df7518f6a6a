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
from typing import Annotated, Any

import msgspec

from crossrank.comm import MOST_RANKS, CommRecord, Group
from crossrank.errors import CrossrankError, one_line
from crossrank.recording import Damage, read_chunks
from crossrank.tools.readers.safe_pickle import RefusedError, load_data

MOST_BYTES = 256 << 20
"""A dump of 100,000 entries with stacks is a quarter of it."""
_MOST_FRAMES = 256
_MOST_TENSORS = 1 << 16
_MOST_TEXT = 4096

Int = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
Text = Annotated[str, msgspec.Meta(max_length=_MOST_TEXT)]
Shape = Annotated[tuple[Int, ...], msgspec.Meta(max_length=64)]
Shapes = Annotated[tuple[Shape, ...], msgspec.Meta(max_length=_MOST_TENSORS)]
Dtypes = Annotated[tuple[Text, ...], msgspec.Meta(max_length=_MOST_TENSORS)]


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
    op_id: Int = 0
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
    timeout_ms: Int = 0
    is_p2p: bool | None = None
    """None in dumps that do not say."""
    thread_name: Text = ""
    frames: Any = ()
    """Innermost first, as decoded: `frames_of` checks them, once per stack."""


class Progress(msgspec.Struct, frozen=True):
    """How far a rank came on one group: sequence numbers, -1 = none. P2P calls put theirs here as well."""

    last_enqueued_collective: Int = -1
    last_started_collective: Int = -1
    last_completed_collective: Int = -1


class GroupConfig(msgspec.Struct, frozen=True):
    """A process group as the rank knows it."""

    name: Text = ""
    desc: Text = ""
    ranks: str = "[]"


class OwnStack(msgspec.Struct, frozen=True):
    """Where a thread of the process was when our dump was taken, innermost frame first."""

    thread: Text
    frames: list[Frame]


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """What crossrank adds to a dump that it takes itself."""

    rank: Int
    world_size: Int
    host: Text = ""
    reason: Text = ""
    """`hang`, `SIGUSR1`, `SIGTERM`, `window`, `disable`, `exit`."""
    error: Text | None = None
    """The exception that ended the process."""
    time_ns: Int
    """ns since 1970 when it was taken."""
    clock: dict[str, Int] = {}
    """The same moment on both clocks: `t` monotonic, `wall` since 1970."""
    groups: list[Group] = []
    calls: list[CommRecord] = []
    """The last calls that were recorded, whether or not they left the node; gloo's P2P is known from here alone."""
    stacks: list[OwnStack] = []


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    version: Text
    pg_config: dict[Text, GroupConfig] = {}
    pg_status: dict[Text, Progress] = {}
    nccl_version: Text = ""
    comm_lib_version: Text = ""
    crossrank: Moment | None = None


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
    problems: list[str]


class NoDumpError(CrossrankError):
    """The file is no flight-recorder dump. `refused` where it is one that asks for more than data."""

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


def read_flight_dump(path: str) -> FlightDump:
    """Read one dump, plain, gzip or zstd. Raises `NoDumpError` where nothing of it can be used."""
    problems: list[str] = []
    return decode_flight_dump(path, _read(path, problems), problems)


def decode_flight_dump(path: str, data: bytes, problems: list[str]) -> FlightDump:
    """The dump in `data`; `problems` is what reading it has met so far."""
    if not data:
        raise NoDumpError(f"{path}: {'; '.join(['is empty', *problems])}")
    content = _decode(path, data)
    if not isinstance(content, dict) or not {"version", "pg_config", "entries"} & content.keys():
        raise NoDumpError(f"{path}: is no flight-recorder dump: it lacks version, pg_config and entries")
    entries = content.pop("entries", None) or []
    try:
        head = msgspec.convert(content, _Head, strict=False)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise NoDumpError(f"{path}: is no flight-recorder dump ({one_line(error)})") from error
    if not isinstance(entries, list):
        raise NoDumpError(f"{path}: is no flight-recorder dump: entries is no list")
    groups = []
    for config in head.pg_config.values():
        ranks = rank_text(config.ranks)
        if ranks is None:
            problems.append(f"the ranks of group {config.name!r} are unusable: {config.ranks[:60]!r}")
        # gloo's only group is nameless and empty: it says nothing.
        if config.name or ranks:
            groups.append(Group(pg=config.name, desc=config.desc, size=len(ranks or ()), ranks=ranks or None))
    return FlightDump(
        path=path,
        version=head.version,
        groups=groups,
        status={int(key): value for key, value in head.pg_status.items() if key.isascii() and key.isdigit()},
        entries=_entries(entries, problems),
        moment=head.crossrank,
        problems=problems,
    )


def rank_text(text: str) -> list[int] | None:
    """The ranks in "[0, 1]"; None for any other text. Nothing is evaluated.

    >>> rank_text("[0, 4]"), rank_text("[]"), rank_text("__import__('os')")
    ([0, 4], [], None)
    """
    if re.fullmatch(r"\s*\[[\d,\s]*\]\s*", text, re.ASCII) is None:
        return None
    numbers = re.findall(r"\d+", text)
    if any(len(number) > 8 or int(number) >= MOST_RANKS for number in numbers):
        return None
    ranks = list(map(int, numbers))
    return ranks if len(set(ranks)) == len(ranks) else None


def frames_of(frames: Any) -> tuple[Frame, ...]:
    """The frames of one entry, innermost first; those that are broken are left out."""
    if not isinstance(frames, list | tuple):
        return ()
    found = []
    for frame in frames[:_MOST_FRAMES]:
        try:
            found.append(msgspec.convert(frame, Frame, strict=False))
        except (msgspec.MsgspecError, RecursionError):
            continue
    return tuple(found)


def _entries(rows: list[Any], problems: list[str]) -> list[Entry]:
    try:
        return msgspec.convert(rows, list[Entry])
    except (msgspec.MsgspecError, RecursionError, OverflowError):
        pass
    entries, broken, first = [], 0, ""
    for number, row in enumerate(rows):
        try:
            entries.append(msgspec.convert(row, Entry))
        except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
            broken += 1
            first = first or f"entry {number}: {one_line(error)}"
    problems.append(f"{broken} of {len(rows)} entries are unusable ({first}) and were left out")
    return entries


def _decode(path: str, data: bytes) -> Any:
    if data[:1] == b"\x80":
        try:
            return load_data(data)
        except RefusedError as error:
            cut_off = "no whole pickle" in str(error) or "is cut off" in str(error)
            raise NoDumpError(
                f"{path}: {'' if cut_off else 'is refused: '}the pickle {error}"
                f"{'; take the dump again' if cut_off else '; a genuine dump holds data alone'}",
                refused=not cut_off,
            ) from error
    if data.lstrip()[:1] == b"{":
        try:
            return msgspec.json.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise NoDumpError(f"{path}: is no whole JSON ({one_line(error)}); take the dump again") from error
    raise NoDumpError(f"{path}: is no flight-recorder dump: it starts neither as a pickle nor as JSON")


def _read(path: str, problems: list[str]) -> bytes:
    damage = Damage(path)
    chunks, size = [], 0
    try:
        for chunk in read_chunks(path, damage):
            chunks.append(chunk)
            size += len(chunk)
            if size > MOST_BYTES:
                raise NoDumpError(
                    f"{path}: is refused: it holds more than {MOST_BYTES >> 20} MiB, far more than any dump",
                    refused=True,
                )
    except OSError as error:
        raise NoDumpError(f"{path}: cannot be read ({one_line(error)})") from error
    problems.extend(damage.problems)
    return b"".join(chunks)
