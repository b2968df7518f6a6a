"""A recording on disk: which files it has, and how to read them, damaged or not.

Rank N writes `rank-N.comms.jsonl.zst` and, for torch's flight recorder, `rank-N.flight.json.zst`. For every window it
writes `rank-N.et.json.zst` and `rank-N.kineto.json.zst` (later windows `rank-N.w2.et.json.zst`, …), and `crossrank
link` adds `rank-N.linked.json.zst`. Every file can also be plain or gzipped, or at an fsspec URL. In a job of more
than 64 ranks, a few ranks share a folder: see `rank_folder`.

The comms file is JSON lines. A line that starts with `{"id":` is a `CommRecord`. Every other line is an object with one
key, its kind: `header` (always first), `gpu` (if it became known after the header), `group`, `step`, `wait`, `ran`,
`clock`, `counters`, `window`, `end` (last; a file without it is from a process that died). The file has all calls up to
its last `clock`. It consists of complete zstd frames. The reader reports and skips what follows the last complete one.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Annotated, Any, BinaryIO, Literal, TypeVar, cast

import msgspec
import zstandard

from crossrank.budget import BYTES, LINES, MEMBERS, Budget, BudgetError
from crossrank.comm import MOST, UNKNOWN_STEP, CommRecord, Count, Group, Int, Number
from crossrank.errors import BROKEN, CrossrankError, one_line
from crossrank.privacy import Privacy
from crossrank.unknown_values import Decoder, unknown_text

SCHEMA = "crossrank-comms 1"
"""First word and version of a comms header. The number rises if an old reader would misread the file."""

COMMS = "comms"
EXECUTION_TRACE = "et"
KINETO = "kineto"
FLIGHT = "flight"
LINKED = "linked"
SEEN = "seen"

VERDICT = "verdict.json"
"""File with the diagnosis of a hang, which the job itself writes next to the dumps."""
OVER = "over"
"""`verdict` in this file if the job continued. The file keeps the findings."""
SLOW = "slow"
"""`verdict` in this file while ranks wait for others that run."""
PROVEN = ("deadlock", "mismatch", "gone")
"""Values of `proof` in this file that mean: no rank can release those that wait."""

PYTHON_SLEEPS = "nanosleep"
"""The name of the call that Python itself sleeps in: until a moment, from 3.11 on."""
C_SLEEPS = "usleep"
"""The name of the call that C code sleeps in: for some time. A library does so if it tries something now and then."""
SLEEPS = (PYTHON_SLEEPS, C_SLEEPS)
POLLS = 0.1
"""Share of a CPU up to which a thread that runs may only look for something now and then."""
STORE = "store"
"""Replaces the name of a system call if a thread waits for an answer of torch's store."""

ANSWERS = ("hang", "asked")
"""Reasons of dumps that answer the question of a rank: nothing was communicated just before, or something was."""

DIAGNOSING = ".diagnosing-"
"""Prefix of a lock's name. One process of a node holds the lock while it diagnoses a hang."""
PAUSING = ".pausing-"
"""Prefix of a file's name; the rank follows. With this file a rank announces that the others will wait for it. The
content is the end of the pause in seconds since 1970."""
ASKED = ".asked"
"""Name of a file: it changes when a rank asks all ranks what they do."""
MOVED = ".moved-"
"""Prefix of a file's name; the rank follows. With this file a rank announces that it moves again after an answer."""

OF_A_BACKEND = re.compile(
    r"^Dist\w*Error\b|(?<![a-z0-9])(gloo|nccl|ucc_|c10d)|monitoredBarrier|ProcessGroup|TCPStore|Operation timed out!",
    re.IGNORECASE,
)
"""Matches the exceptions of torch.distributed, and of no other library."""

RANGE = "crossrank#"
"""Name of the range around a recorded launch in both traces of a window. The record's id follows."""

_MOST_RANKS_WITHOUT_FOLDERS = 64
"""Largest world size whose files are all in one folder."""
_MOST_FOLDERS = 1024
RANK_FOLDER = re.compile(r"ranks-\d+-\d+")

_SUFFIXES = {
    COMMS: "comms.jsonl",
    EXECUTION_TRACE: "et.json",
    KINETO: "kineto.json",
    FLIGHT: "flight.json",
    LINKED: "linked.json",
    SEEN: "seen.json",
}
KINDS = tuple(_SUFFIXES)
_KIND_OF = {suffix: kind for kind, suffix in _SUFFIXES.items()}
_NAME = re.compile(
    r"rank-(?P<rank>\d{1,18})\.(?:w(?P<window>\d{1,18})\.)?"
    rf"(?P<suffix>{'|'.join(map(re.escape, _KIND_OF))})(?:\.zst|\.gz|)"
)
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.part(\.zst)?")

_CHUNK = 1 << 20
_LONGEST_LINE = 16 << 20
_MOST_PROBLEMS = 100
_COMPRESSED_CHUNK = 1 << 13
"""Bytes that are decompressed at once. zstd can expand them 32,768 times, which nothing else limits."""


def file_name(kind: str, rank: int, window: int = 1) -> str:
    """Return the name of a rank's file. Windows count from 1.

    >>> file_name("kineto", 3, window=2)
    'rank-3.w2.kineto.json.zst'
    """
    infix = "" if window == 1 else f"w{window}."
    return f"rank-{rank}.{infix}{_SUFFIXES[kind]}.zst"


def rank_folder(rank: int, world_size: int) -> str:
    """Return the folder, within a recording, with the files of a rank; empty if that is the recording itself.

    File systems of clusters are slow if a folder has many files. So in a large job 8 ranks, usually one node, share a
    folder, or more ranks if that would make over 1,024 folders. The folder depends only on the two numbers: a rank
    finds the files of another rank without asking where that rank runs.

    >>> rank_folder(13, 64), rank_folder(13, 1024), rank_folder(13, 16384)
    ('', 'ranks-8-15', 'ranks-0-15')
    """
    if world_size <= _MOST_RANKS_WITHOUT_FOLDERS:
        return ""
    ranks_per_folder = 8
    while ranks_per_folder * _MOST_FOLDERS < world_size:
        ranks_per_folder *= 2
    first = rank - rank % ranks_per_folder
    return f"ranks-{first}-{first + ranks_per_folder - 1}"


def temporary_name(name: str) -> str:
    """Return the name of a file while it is being written. If a reader finds one later, the file was cut off."""
    return f".{name.removesuffix('.zst')}.part"


def rank_of(name: str) -> int | None:
    """Return the rank that wrote a file of this name, complete or cut off; None for an unrecognized file."""
    cut_off = _TEMPORARY.fullmatch(name)
    match = re.match(r"rank-(\d{1,18})\.", cut_off["name"] if cut_off else name)
    return int(match[1]) if match else None


def is_url(path: str) -> bool:
    return "://" in path


def is_folder(path: str) -> bool:
    """Return whether there is a folder at a path or URL."""
    if path and not is_url(path):
        return os.path.isdir(path)
    file_system, local = _file_system(path)
    return bool(file_system.isdir(local))


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """One file of a recording."""

    path: str
    rank: int
    kind: str
    window: int
    size: int
    """Bytes on disk."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The content of a folder."""

    files: tuple[RankFile, ...]
    partial: tuple[str, ...]
    """Names of files whose writing was cut off."""
    unrecognized: tuple[str, ...]
    """Names of files that belong to no recording."""
    folders: tuple[str, ...]
    """Names of folders."""
    special: tuple[str, ...] = ()
    """Names of everything else: pipes, devices, broken links."""

    def of_kind(self, kind: str) -> list[RankFile]:
        return [file for file in self.files if file.kind == kind]


def list_recording(path: str) -> Listing:
    """Return the files of the recording at `path`: a folder, one file, or an fsspec URL of either.

    Raise `CrossrankError` if there is nothing at `path`.
    """
    file_system, local = _file_system(path)
    try:
        if not file_system.exists(local):
            raise CrossrankError(
                f"{path}: no such file or folder; check the path (a recording is the folder TRACING_DIR)"
            )
        is_folder = file_system.isdir(local)
        entries = file_system.ls(local, detail=True) if is_folder else [file_system.info(local)]
    except CrossrankError:
        raise
    except Exception as error:  # each kind of file system has its own errors
        raise CrossrankError(f"{path}: cannot be listed ({one_line(error)})") from error
    files: list[RankFile] = []
    names: dict[str, list[str]] = {"partial": [], "unrecognized": [], "folders": [], "special": []}
    for entry in entries:
        name = PurePosixPath(entry["name"]).name
        is_file = entry["type"] == "file" or (entry.get("islink") and file_system.isfile(entry["name"]))
        if entry["type"] == "directory":
            names["folders"].append(name)
        elif not is_file:
            names["special"].append(name)
        elif match := _NAME.fullmatch(name):
            size = entry.get("size")  # unknown in some file systems, and untrusted in an archive
            files.append(
                RankFile(
                    path=_url_of_file(file_system, entry["name"], path) if is_url(path) else entry["name"],
                    rank=int(match["rank"]),
                    kind=_KIND_OF[match["suffix"]],
                    window=int(match["window"] or 1),
                    size=size if isinstance(size, int) else 0,
                )
            )
        elif name != VERDICT and not name.startswith((DIAGNOSING, PAUSING, ASKED, MOVED)):
            names["partial" if _TEMPORARY.fullmatch(name) else "unrecognized"].append(name)
    files.sort(key=lambda file: (file.rank, file.kind, file.window))
    return Listing(files=tuple(files), **{kind: tuple(sorted(found)) for kind, found in names.items()})


def _file_system(path: str) -> tuple[Any, str]:
    if not path:
        raise CrossrankError("the path is empty; give a recording (the folder TRACING_DIR)")
    import fsspec  # not available in a training process, which uses only local files

    if not is_url(path):  # fsspec would read `::` in a name as a chain of URLs
        return fsspec.filesystem("file"), os.path.abspath(path)
    try:
        return cast("tuple[Any, str]", fsspec.core.url_to_fs(path))
    except Exception as error:  # each kind of file system has its own errors
        raise CrossrankError(f"{path}: cannot be reached ({one_line(error)})") from error


def _size_on_disk(path: str) -> int:
    """Return the bytes on disk at a path or URL; for a member of an archive, those of the archive. 0 if unknown."""
    try:
        if not is_url(path):
            return os.path.getsize(path)
        file_system, local = _file_system(path.rpartition("::")[2])
        return int(file_system.size(local) or 0)
    except Exception:  # each kind of file system has its own errors
        return 0


def _url_of_file(file_system: Any, name: str, folder: str) -> str:
    """Return the URL of a file in the folder at a URL. For a member of an archive, it ends with the archive's URL."""
    first, chained, rest = folder.partition("::")
    return str(file_system.unstrip_protocol(name)) + (chained + rest if "://" in first else "")


class ReadIssues:
    """Problems while reading one file, and the file's budget. The reader fills it in."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problems: list[str] = []
        self.is_cut = False
        """Whether a compressed file ends in a part that is not complete: what follows is lost."""
        self.budget = Budget(path)


def read_chunks(path: str, issues: ReadIssues, size: int = _CHUNK) -> Iterator[bytes]:
    """Yield the uncompressed content of a plain, gzip or zstd file. Note in `issues` what is cut off.

    The first bytes decide the compression, not the name. A plain file is read `size` bytes at a time. Raise
    `BudgetError` if a small file expands too far.
    """
    file_system, local = _file_system(path) if is_url(path) or not path else (None, path)
    try:
        source = cast(BinaryIO, file_system.open(local, "rb")) if file_system else open(local, "rb")  # noqa: SIM115
    except Exception as error:  # each kind of file system has its own errors
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        issues.problems.append(f"cannot be opened: {reason}")
        return
    issues.budget.size = _size_on_disk(path)
    try:
        for chunk in _uncompressed(source, issues, size):
            # In pieces, so that the caller receives everything up to the limit.
            for start in range(0, len(chunk), _CHUNK):
                piece = chunk if len(chunk) <= _CHUNK else chunk[start : start + _CHUNK]
                issues.budget.spend(BYTES, len(piece))
                yield piece
    except (OSError, CrossrankError):
        raise
    except Exception as error:
        issues.problems.append(f"cannot be read further ({one_line(error)}); the part before it was read")


# First bytes, name of one part of the file, padding after it (allowed by RFC 1952), decompressor.
_FORMATS: tuple[tuple[bytes, str, bytes, Callable[[], Callable[[], Any]]], ...] = (
    (zstandard.FRAME_HEADER, "zstd frame", b"", lambda: zstandard.ZstdDecompressor().decompressobj),
    (b"\x1f\x8b", "gzip stream", b"\0", lambda: partial(zlib.decompressobj, wbits=31)),
)


def _uncompressed(source: BinaryIO, issues: ReadIssues, size: int) -> Iterator[bytes]:
    with source:
        start = source.read(4)
        source.seek(0)
        for magic, part, padding, prepare in _FORMATS:
            if start.startswith(magic):
                yield from _decompress(source, issues, part, padding, prepare())
                return
        while chunk := source.read(size):
            yield chunk


def _decompress(
    source: BinaryIO, issues: ReadIssues, part: str, padding: bytes, make: Callable[[], Any]
) -> Iterator[bytes]:
    """Yield the content of all parts of the file, one after the other as `cat a.gz b.gz`, pigz and bgzip write them."""
    stream, offset = make(), 0
    while chunk := source.read(_COMPRESSED_CHUNK):
        offset += len(chunk)
        while chunk and (not stream.eof or (chunk := chunk.lstrip(padding))):
            stream = make() if stream.eof else stream
            try:
                content = stream.decompress(chunk)
            except (zlib.error, zstandard.ZstdError) as error:
                issues.is_cut = True
                issues.problems.append(
                    f"broken {part} before byte {offset} ({one_line(error)}); the part before it was read"
                )
                return
            if content:
                yield content
            chunk = stream.unused_data
    if not stream.eof:
        issues.is_cut = True
        issues.problems.append(f"the last {part} is cut off; the part before it was read")


def read_lines(path: str, issues: ReadIssues) -> Iterator[bytes]:
    """Yield the lines of a plain, gzip or zstd file. Note in `issues` what cannot be read."""
    rest = b""
    try:
        for chunk in read_chunks(path, issues):
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            issues.budget.spend(LINES, len(lines))
            yield from lines
            if len(rest) > _LONGEST_LINE:
                issues.problems.append(f"a line is longer than {_LONGEST_LINE >> 20} MiB, which a real file never has")
                return
    except BudgetError as error:
        issues.problems.append(error.what)
        return
    if rest:
        if issues.problems:  # this line is cut off
            return
        yield rest


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a comms file: who wrote it, on which node, with which versions."""

    schema: Annotated[str, Privacy.SCHEMA]
    rank: Number
    world_size: Number = 0
    """0 = unknown."""
    host: Annotated[str, Privacy.HOST] = ""
    node: Annotated[str, Privacy.NODE] = ""
    boot_id: Annotated[str, Privacy.BOOT] | None = None
    local_rank: Number | None = None
    pid: Number | None = None
    pid_namespace: Number | None = None
    """The kernel's number of the namespace in which this is the process number."""
    gpu: Annotated[dict[str, Any], Privacy.MIXED] | None = None
    gpu_serial: Annotated[str, Privacy.SERIAL] | None = None
    """Value of the variable GPU_SERIAL."""
    vm_id: Annotated[str, Privacy.VM] | None = None
    """Value of the variable VM_ID."""
    clock: Annotated[dict[str, Int], Privacy.MIXED] = {}
    """`t` and `wall`: the same moment on the monotonic clock and in ns since 1970."""
    versions: dict[Annotated[str, Privacy.PACKAGE], Annotated[str, Privacy.VERSION] | None] = {}
    config: Annotated[dict[str, Any], Privacy.MIXED] = {}
    blind_spots: Annotated[list[str], Privacy.MESSAGE] = []
    """Calls of this rank that the recorder does not see."""
    part: tuple[Number, Number] | None = None
    """START and STOP of the steps in this file, if it is part of a longer recording. STOP is not included."""
    all_calls: bool = False
    """Whether the file has the calls inside a node with every `TRACING`. With CROSSNODE, older files lack them."""

    @property
    def leaves_out_calls(self) -> bool:
        """Whether the file may lack calls inside a node."""
        return self.config.get("emit") == "CROSSNODE" and not self.all_calls


WAITED_IN = ("wait", "wait_tensor", "launch", "backward")
"""Where a thread waited: in `Work.wait`; in `wait_tensor` of a functional collective; in the launch of a blocking call,
or in one of over 1 ms, such as the first one of a communicator; or at the end of a backward pass in which C++ made
calls, such as DDP's reducer. This last wait names the last of these calls."""
READ_WAITS = (*WAITED_IN, "unknown")
"""`WAITED_IN`, and a way to wait that this version does not know."""


class Wait(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A time during which a thread of this rank waited for a call.

    On a GPU, a wait in Python usually makes only the stream wait and returns at once. Then it shows where the program
    needed the result, not how long it waited.
    """

    t: Number
    """Start on the monotonic clock in ns."""
    took: Annotated[Count, Privacy.NUMBER]
    """Duration in ns."""
    thread: Number
    """The operating system's id of the thread."""
    id: Number | None = None
    """Id of the call's record; None if the call was not recorded, or if its Work could not be kept."""
    waited_in: Literal["wait", "wait_tensor", "launch", "backward", "unknown"] = msgspec.field(
        name="in", default="wait"
    )
    """See `WAITED_IN`. Other waits in C++ are not recorded."""
    raised: bool = False
    """Whether it ended with an exception, such as a timeout."""


class Ran(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """The duration of a call, if the recorder was asked to measure it."""

    id: Number
    t: Number
    """Start on the monotonic clock in ns: the launch. On a device it is approximate: the end is noticed up to 0.1 s
    late."""
    took: Annotated[Count, Privacy.NUMBER]
    """Duration in ns until the end of its Work; on a device, of the kernel only."""
    on_device: bool = False
    """Whether torch's events on the device measured it, for torch's flight recorder (NCCL)."""
    raised: bool = False
    """Whether it ended with an error."""


class Line(msgspec.Struct):
    """A line that is not a record. The reader counts kinds that this version does not know."""

    header: Header | None = None
    group: Group | None = None
    end: Annotated[dict[str, Any], Privacy.MIXED] | None = None
    window: Annotated[dict[str, Any], Privacy.MIXED] | None = None
    clock: Annotated[dict[str, Int], Privacy.MIXED] | None = None
    step: Annotated[dict[str, Int], Privacy.MIXED] | None = None
    gpu: Annotated[dict[str, Any], Privacy.MIXED] | None = None


_NO_KIND = Line()
_NO_CALLS = tuple(f'{{"{kind}":'.encode() for kind in ("wait", "ran", "clock", "step", "window", "group", "gpu", "end"))
"""How lines begin that are no calls."""
IDENTITY = ("seq", "p2p_seq", "peer", "batch", "epoch")
"""Fields that say which call a record is of. A call without its number would count as another one."""
_LISTS_BY_KIND = {"group": "groups", "window": "windows", "clock": "clocks", "step": "steps"}
"""Kind of line -> attribute of `CommsFile` that collects such lines."""


def _is_impossible(value: object) -> bool:
    return isinstance(value, int) and abs(value) > MOST


T = TypeVar("T", Group, CommRecord)
Span = TypeVar("Span", Wait, Ran)


def with_epoch(one: T) -> T:
    """Return a group, or the record of a call, with a name that no group of another epoch has: `NAME (no. 2)`."""
    return one if one.epoch == 0 else msgspec.structs.replace(one, pg=name_in_epoch(one.pg, one.epoch))


def name_in_epoch(pg: str, epoch: int) -> str:
    """Return the name of a group of an epoch; that of the first one is torch's name."""
    return pg if epoch == 0 else f"{pg} (no. {epoch + 1})"


class CommsFile:
    """The comms file of one rank. Iterate `records()` first; it fills in everything else.

    A damaged file raises no error: `issues.problems` says what is missing. It also says if another rank than `rank`
    wrote the file.
    """

    def __init__(self, path: str, rank: int | None = None) -> None:
        self.path = path
        self.rank = rank
        self.issues = ReadIssues(path)
        self.header: Header | None = None
        self.groups: list[Group] = []
        self.windows: list[dict[str, Any]] = []
        self.clocks: list[dict[str, int]] = []
        self.steps: list[dict[str, int]] = []
        self.waits: list[Wait] = []
        self.ran: list[Ran] = []
        self.end: dict[str, Any] | None = None
        self.lost_after: int | None = None
        """Id of the call before the last line that may be a call and cannot be read; -1 = it is before all calls, None
        = there is no such line."""
        self.unknown = Counter[str]()
        """Name of a field -> number of its values that this version does not know."""

    @property
    def notes(self) -> list[str]:
        """What the file has and this version does not know."""
        return [f"{self.path}: {unknown_text(self.unknown)}"] if self.unknown else []

    def records(self) -> Iterator[CommRecord]:
        """Yield the records in the order of the file."""
        instead = {"step": UNKNOWN_STEP, "bytes": -1, "t": 0}
        decode_record = Decoder(CommRecord, self.unknown, instead, needed=IDENTITY).decode
        decode_line = Decoder(Line, self.unknown).decode
        decode_wait = Decoder(dict[str, Wait], self.unknown, {"wait.in": "unknown"}).decode
        decode_ran = Decoder(dict[str, Ran], self.unknown).decode
        number = more = 0
        last = -1
        for number, line in enumerate(read_lines(self.path, self.issues), 1):
            try:
                if line.startswith(b'{"id":'):
                    record = with_epoch(decode_record(line))
                    last = record.id
                    yield record
                    continue
                if line.startswith(b'{"wait":'):
                    self._add_span("wait", decode_wait, line, self.waits)
                    continue
                if line.startswith(b'{"ran":'):
                    self._add_span("ran", decode_ran, line, self.ran)
                    continue
                other = decode_line(line)
            except BROKEN as error:
                if not line.startswith(_NO_CALLS):
                    self.lost_after = last
                if len(self.issues.problems) < _MOST_PROBLEMS:
                    self.issues.problems.append(f"line {number} is not a comms record: {one_line(error)}")
                else:
                    more += 1
                if self.header is None:
                    return  # an unrecognized file: one problem is enough
                continue
            if other.group is not None:
                try:
                    self.issues.budget.spend(MEMBERS, len(other.group.ranks or ()))
                except BudgetError as error:
                    self.issues.problems.append(error.what)
                    return
            self._add_line(other)
            if number == 1 and self.header is None:
                self.issues.problems.append("line 1 is not a crossrank header")
                return
        if self.issues.is_cut:
            self.lost_after = last
        if more:
            self.issues.problems.append(f"{more} more lines are not comms records")
        if number == 0 and not self.issues.problems:
            self.issues.problems.append("the file is empty")

    def _add_span(self, kind: str, decode: Callable[[bytes], dict[str, Span]], line: bytes, spans: list[Span]) -> None:
        try:
            spans.append(decode(line)[kind])
        except msgspec.ValidationError:  # nothing else in the file depends on it
            self.unknown[kind] += 1

    def _add_line(self, line: Line) -> None:
        if line.header is not None:
            self.header = line.header
            if self.rank not in (None, line.header.rank):
                self.issues.problems.append(f"is named rank {self.rank} and was written by rank {line.header.rank}")
            if line.header.schema != SCHEMA:
                self.issues.problems.append(
                    f"written as {line.header.schema!r}, read as {SCHEMA!r}: use the crossrank that wrote it"
                )
        if line.gpu is not None and self.header is not None:
            versions = self.header.versions | {"driver": line.gpu.get("driver")}
            self.header = msgspec.structs.replace(self.header, gpu=line.gpu, versions=versions)
        if line == _NO_KIND:
            self.unknown["kind of a line"] += 1
        for one, several in _LISTS_BY_KIND.items():
            if (content := getattr(line, one)) is not None:
                getattr(self, several).append(with_epoch(content) if one == "group" else content)
        if line.end is not None:
            self.end = {name: value for name, value in line.end.items() if not _is_impossible(value)}
            if impossible := line.end.keys() - self.end.keys():
                self.issues.problems.append(f"the last line has impossible numbers ({', '.join(sorted(impossible))})")
