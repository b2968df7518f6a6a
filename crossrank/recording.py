"""A recording on disk: which files it has, and how to read them whatever state they are in.

Rank N writes `rank-N.comms.jsonl.zst`, and for every window `rank-N.et.json.zst` and `rank-N.kineto.json.zst`
(later windows `rank-N.w2.et.json.zst`, …), and `rank-N.flight.json.zst` for torch's flight recorder. `crossrank link`
adds `rank-N.linked.json.zst` for every window. Every file is also read plain or gzipped, and from an fsspec URL. In a
job of more than 64 ranks they lie in folders of a few ranks each: `rank_folder`.

The comms file is JSON lines. A line that starts with `{"id":` is a `CommRecord`; every other line is an object with one
key that says what it is: `header` (always first), `gpu` (where it was known too late for the header), `group`, `step`,
`wait`, `ran`, `clock`, `counters`, `window`, `end` (last; without it the process died). The last `clock` of a file says
until when no call is missing in it. The file consists of complete zstd frames, so whatever follows the last whole frame
is cut off, and is reported rather than raised.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Annotated, Any, BinaryIO, Literal, cast

import msgspec
import zstandard

from crossrank.budget import BYTES, LINES, MEMBERS, Budget, BudgetError
from crossrank.comm import MOST, CommRecord, Count, Group, Int, Number
from crossrank.errors import BROKEN, CrossrankError, one_line
from crossrank.privacy import Privacy

SCHEMA = "crossrank-comms 1"
"""First word and version of a comms header. The number rises when an old reader would misread the file."""

COMMS = "comms"
EXECUTION_TRACE = "et"
KINETO = "kineto"
FLIGHT = "flight"
LINKED = "linked"

VERDICT = "verdict.json"
"""The diagnosis of a hang, as the job itself wrote it beside the dumps."""
OVER = "over"
"""The verdict in it of a job that went on: what was found is beside it."""

SLOW = "slow"
"""The verdict in it while the ranks that others wait for move, or are not known: what was found is beside it."""

DIAGNOSING = ".diagnosing-"
"""How the name of a lock begins that one process of a node holds while it diagnoses a hang."""
PAUSING = ".pausing-"
"""How the name of a file begins by which a rank says that the others will wait for it: its rank follows, and in it are
the seconds since 1970 until when."""

OF_A_BACKEND = re.compile(
    r"^Dist\w*Error\b|(?<![a-z0-9])(gloo|nccl|ucc_|c10d)|monitoredBarrier|ProcessGroup|TCPStore|Operation timed out!",
    re.IGNORECASE,
)
"""What no library but torch.distributed writes into its exceptions."""

RANGE = "crossrank#"
"""Name of the range around a recorded launch in both traces of a window; the record's id follows."""

_MOST_TOGETHER = 64
"""Ranks that share one folder in a small job."""
_MOST_FOLDERS = 1024
RANK_FOLDER = re.compile(r"ranks-\d+-\d+")

_SUFFIXES = {
    COMMS: "comms.jsonl",
    EXECUTION_TRACE: "et.json",
    KINETO: "kineto.json",
    FLIGHT: "flight.json",
    LINKED: "linked.json",
}
KINDS = tuple(_SUFFIXES)
_KIND_OF = {suffix: kind for kind, suffix in _SUFFIXES.items()}
_NAME = re.compile(
    r"rank-(?P<rank>\d{1,18})\.(?:w(?P<window>\d{1,18})\.)?"
    rf"(?P<suffix>{'|'.join(map(re.escape, _KIND_OF))})(?:\.zst|\.gz|)"
)
_TEMPORARY = re.compile(r"\.(?P<name>rank-\d{1,18}\..*)\.part(\.zst)?")

_CHUNK = 1 << 20
_LONGEST_LINE = 16 << 20
_MOST_PROBLEMS = 100
_COMPRESSED = 1 << 13
"""Bytes that are decompressed at once: zstd makes up to 32,768 times as much of them, which nothing else limits."""


def file_name(kind: str, rank: int, window: int = 1) -> str:
    """Name of a rank's file; windows count from 1.

    >>> file_name("kineto", 3, window=2)
    'rank-3.w2.kineto.json.zst'
    """
    infix = "" if window == 1 else f"w{window}."
    return f"rank-{rank}.{infix}{_SUFFIXES[kind]}.zst"


def rank_folder(rank: int, world_size: int) -> str:
    """The folder of a recording that holds the files of a rank; empty where that is the recording itself.

    File systems of clusters are slow in folders of many files. In a large job 8 ranks, which most often are a node,
    share a folder, or as many more as make no more than 1,024 folders. Where a rank's files are follows from the two
    numbers alone: a rank finds another one's without asking where that runs.

    >>> rank_folder(13, 64), rank_folder(13, 1024), rank_folder(13, 16384)
    ('', 'ranks-8-15', 'ranks-0-15')
    """
    if world_size <= _MOST_TOGETHER:
        return ""
    together = 8
    while together * _MOST_FOLDERS < world_size:
        together *= 2
    first = rank - rank % together
    return f"ranks-{first}-{first + together - 1}"


def temporary_name(name: str) -> str:
    """Name under which a file grows until it is whole. One that is found later was cut off."""
    return f".{name.removesuffix('.zst')}.part"


def rank_of(name: str) -> int | None:
    """The rank that wrote a file of this name, whole or cut off; None for an unrecognized file."""
    cut_off = _TEMPORARY.fullmatch(name)
    match = re.match(r"rank-(\d{1,18})\.", cut_off["name"] if cut_off else name)
    return int(match[1]) if match else None


def is_url(path: str) -> bool:
    return "://" in path


def is_folder(path: str) -> bool:
    """Whether there is a folder at a path or URL."""
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
    """What a folder holds."""

    files: tuple[RankFile, ...]
    partial: tuple[str, ...]
    """Files that were cut off while they were written, by their names."""
    unrecognized: tuple[str, ...]
    """Files that are none of a recording's, by their names."""
    folders: tuple[str, ...]
    """Folders in it, by their names."""
    special: tuple[str, ...] = ()
    """What is neither file nor folder, by their names: pipes, devices, links that lead to none."""

    def of_kind(self, kind: str) -> list[RankFile]:
        return [file for file in self.files if file.kind == kind]


def list_recording(path: str) -> Listing:
    """The files of the recording at `path`: a folder, one file, or an fsspec URL of either.

    Raises `CrossrankError` where there is nothing at `path`.
    """
    file_system, local = _file_system(path)
    try:
        if not file_system.exists(local):
            raise CrossrankError(f"{path}: no such file or folder; name the folder given as TRACING_DIR")
        is_folder = file_system.isdir(local)
        entries = file_system.ls(local, detail=True) if is_folder else [file_system.info(local)]
    except CrossrankError:
        raise
    except Exception as error:  # every kind of file system has errors of its own
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
            size = entry.get("size")  # some file systems do not know it, and an archive may say anything
            files.append(
                RankFile(
                    path=_url(file_system, entry["name"], path) if is_url(path) else entry["name"],
                    rank=int(match["rank"]),
                    kind=_KIND_OF[match["suffix"]],
                    window=int(match["window"] or 1),
                    size=size if isinstance(size, int) else 0,
                )
            )
        elif name != VERDICT and not name.startswith((DIAGNOSING, PAUSING)):
            names["partial" if _TEMPORARY.fullmatch(name) else "unrecognized"].append(name)
    files.sort(key=lambda file: (file.rank, file.kind, file.window))
    return Listing(files=tuple(files), **{kind: tuple(sorted(found)) for kind, found in names.items()})


def _file_system(path: str) -> tuple[Any, str]:
    if not path:
        raise CrossrankError("the path is empty; name the folder given as TRACING_DIR")
    import fsspec  # a training process has none: it reads and writes local files alone

    if not is_url(path):  # fsspec would read `::` in a name as a chain of URLs
        return fsspec.filesystem("file"), os.path.abspath(path)
    try:
        return cast("tuple[Any, str]", fsspec.core.url_to_fs(path))
    except Exception as error:  # every kind of file system has errors of its own
        raise CrossrankError(f"{path}: cannot be reached ({one_line(error)})") from error


def _size(path: str) -> int:
    """Bytes on disk of what is at a path or URL: of an archive's member, of the archive. 0 where it is not known."""
    try:
        if not is_url(path):
            return os.path.getsize(path)
        file_system, local = _file_system(path.rpartition("::")[2])
        return int(file_system.size(local) or 0)
    except Exception:  # every kind of file system has errors of its own
        return 0


def _url(file_system: Any, name: str, folder: str) -> str:
    """URL of a file that was found through the URL of its folder: of an archive's member, with that of the archive."""
    first, chained, rest = folder.partition("::")
    return str(file_system.unstrip_protocol(name)) + (chained + rest if "://" in first else "")


class ReadIssues:
    """What could not be read of a file, and what the file has used of its budget. Filled in while it is read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problems: list[str] = []
        self.budget = Budget(path)


def read_chunks(path: str, issues: ReadIssues, size: int = _CHUNK) -> Iterator[bytes]:
    """The uncompressed content of a plain, gzip or zstd file; what is cut off is noted in `issues`.

    The first bytes, not the name, decide the compression. `size` bytes of a plain file are read at a time. Raises
    `BudgetError` where a small file has no end.
    """
    file_system, local = _file_system(path) if is_url(path) or not path else (None, path)
    try:
        source = cast(BinaryIO, file_system.open(local, "rb")) if file_system else open(local, "rb")  # noqa: SIM115
    except Exception as error:  # every kind of file system has errors of its own
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        issues.problems.append(f"cannot be opened: {reason}")
        return
    issues.budget.size = _size(path)
    try:
        for chunk in _content(source, issues, size):
            # In pieces, so that what comes before the end of the budget is read.
            for start in range(0, len(chunk), _CHUNK):
                piece = chunk if len(chunk) <= _CHUNK else chunk[start : start + _CHUNK]
                issues.budget.spend(BYTES, len(piece))
                yield piece
    except (OSError, CrossrankError):
        raise
    except Exception as error:
        issues.problems.append(f"cannot be read further ({one_line(error)}); what comes before it was read")


# First bytes; what each part of the file is called; the padding behind it, which RFC 1952 allows; its decompressor.
_FORMATS: tuple[tuple[bytes, str, bytes, Callable[[], Callable[[], Any]]], ...] = (
    (zstandard.FRAME_HEADER, "zstd frame", b"", lambda: zstandard.ZstdDecompressor().decompressobj),
    (b"\x1f\x8b", "gzip stream", b"\0", lambda: partial(zlib.decompressobj, wbits=31)),
)


def _content(source: BinaryIO, issues: ReadIssues, size: int) -> Iterator[bytes]:
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
    """The content of all parts of the file, which follow each other as those of `cat a.gz b.gz`, pigz and bgzip do."""
    stream, offset = make(), 0
    while chunk := source.read(_COMPRESSED):
        offset += len(chunk)
        while chunk and (not stream.eof or (chunk := chunk.lstrip(padding))):
            stream = make() if stream.eof else stream
            try:
                content = stream.decompress(chunk)
            except (zlib.error, zstandard.ZstdError) as error:
                issues.problems.append(
                    f"broken {part} before byte {offset} ({one_line(error)}); what comes before it was read"
                )
                return
            if content:
                yield content
            chunk = stream.unused_data
    if not stream.eof:
        issues.problems.append(f"the last {part} is cut off; what comes before it was read")


def read_lines(path: str, issues: ReadIssues) -> Iterator[bytes]:
    """The lines of a plain, gzip or zstd file; what cannot be read is noted in `issues`."""
    rest = b""
    try:
        for chunk in read_chunks(path, issues):
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            issues.budget.spend(LINES, len(lines))
            yield from lines
            if len(rest) > _LONGEST_LINE:
                issues.problems.append(f"a line is longer than {_LONGEST_LINE >> 20} MiB, which such a file never has")
                return
    except BudgetError as error:
        issues.problems.append(error.what)
        return
    if rest:
        if issues.problems:  # the cut goes through this line
            return
        yield rest


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a comms file: who wrote it, on what machine, with which versions."""

    schema: Annotated[str, Privacy.SCHEMA]
    rank: Number
    world_size: Number
    host: Annotated[str, Privacy.HOST]
    node: Annotated[str, Privacy.NODE]
    boot_id: Annotated[str, Privacy.BOOT] | None = None
    local_rank: Number | None = None
    pid: Number | None = None
    gpu: Annotated[dict[str, Any], Privacy.MIXED] | None = None
    gpu_serial: Annotated[str, Privacy.SERIAL] | None = None
    """The variable GPU_SERIAL, unchanged."""
    vm_id: Annotated[str, Privacy.VM] | None = None
    """The variable VM_ID, unchanged."""
    clock: Annotated[dict[str, Int], Privacy.MIXED] = {}
    """`t` and `wall`: one moment on the monotonic clock and in ns since 1970."""
    versions: dict[Annotated[str, Privacy.PACKAGE], Annotated[str, Privacy.VERSION] | None] = {}
    config: Annotated[dict[str, Any], Privacy.MIXED] = {}
    blind_spots: Annotated[list[str], Privacy.MESSAGE] = []
    """Calls of this rank that the recorder does not see."""
    part: tuple[Number, Number] | None = None
    """The first iteration, and the first that is left out, of a part of a longer recording."""
    all_calls: bool = False
    """The file holds calls inside a node too, whatever `TRACING` says is emitted. Older files do not with CROSSNODE."""

    @property
    def leaves_out_calls(self) -> bool:
        """Whether calls inside a node may be missing in the file."""
        return self.config.get("emit") == "CROSSNODE" and not self.all_calls


STOOD = ("wait", "wait_tensor", "launch", "backward")
"""In what a thread waited: in `Work.wait`; in `wait_tensor` of a functional collective; in the launch of an operation
that blocks, or of one that took over 1 ms, as the first one of a communicator does; or at the end of a backward pass in
which C++ made calls, as DDP's reducer does when all is computed. That wait names the last of these calls."""


class Wait(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A time during which a thread of this rank waited for a call.

    On a GPU a wait in Python most often makes the stream wait, and returns at once: then it says where the program
    needed the result, and not for how long.
    """

    t: Number
    """When it began, on the monotonic clock in ns."""
    took: Annotated[Count, Privacy.NUMBER]
    """ns."""
    thread: Number
    """As the operating system numbers it."""
    id: Number | None = None
    """Of the record of the call; None where the Work is of none that was recorded, or could not be kept."""
    stood: Literal["wait", "wait_tensor", "launch", "backward"] = msgspec.field(name="in", default="wait")
    """See `STOOD`. What else waits in C++ is not seen."""
    raised: bool = False
    """It ended with an exception: after a timeout, say."""


class Ran(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """How long a call took, where the recorder was told to follow that."""

    id: Number
    t: Number
    """When it began, on the monotonic clock in ns: its launch; on a device about, for when it ended was noticed up to
    some 0.1 s later."""
    took: Annotated[Count, Privacy.NUMBER]
    """ns: to the end of its Work; on a device those of the kernel alone."""
    on_device: bool = False
    """torch's events on the device measured it, for its flight recorder (NCCL)."""
    raised: bool = False
    """It ended with an error."""


class Line(msgspec.Struct):
    """A line that is not a record. Kinds that this version does not know are ignored."""

    header: Header | None = None
    group: Group | None = None
    end: Annotated[dict[str, Any], Privacy.MIXED] | None = None
    window: Annotated[dict[str, Any], Privacy.MIXED] | None = None
    clock: Annotated[dict[str, Int], Privacy.MIXED] | None = None
    step: Annotated[dict[str, Int], Privacy.MIXED] | None = None
    gpu: Annotated[dict[str, Any], Privacy.MIXED] | None = None


_SEVERAL = {"group": "groups", "window": "windows", "clock": "clocks", "step": "steps"}
"""Kind of line -> the list of a `CommsFile` that gathers its lines."""


def _is_impossible(value: object) -> bool:
    return isinstance(value, int) and abs(value) > MOST


class CommsFile:
    """One rank's comms file. Iterate `records()` first; the rest is known when that is through.

    Nothing is raised for a damaged file: `issues.problems` says what is missing, and where a rank other than `rank`
    wrote it.
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

    def records(self) -> Iterator[CommRecord]:
        """The records in the order of the file."""
        decode_record = msgspec.json.Decoder(CommRecord).decode
        decode_line = msgspec.json.Decoder(Line).decode
        decode_wait = msgspec.json.Decoder(dict[str, Wait]).decode
        decode_ran = msgspec.json.Decoder(dict[str, Ran]).decode
        number = more = 0
        for number, line in enumerate(read_lines(self.path, self.issues), 1):
            try:
                if line.startswith(b'{"id":'):
                    yield decode_record(line)
                    continue
                if line.startswith(b'{"wait":'):
                    self.waits.append(decode_wait(line)["wait"])
                    continue
                if line.startswith(b'{"ran":'):
                    self.ran.append(decode_ran(line)["ran"])
                    continue
                other = decode_line(line)
            except BROKEN as error:
                if len(self.issues.problems) < _MOST_PROBLEMS:
                    self.issues.problems.append(f"line {number} is not a comms record: {one_line(error)}")
                else:
                    more += 1
                if self.header is None:
                    return  # an unrecognized file: one complaint is enough
                continue
            if other.group is not None:
                try:
                    self.issues.budget.spend(MEMBERS, len(other.group.ranks or ()))
                except BudgetError as error:
                    self.issues.problems.append(error.what)
                    return
            self._take(other)
            if number == 1 and self.header is None:
                self.issues.problems.append("line 1 is not a crossrank header")
                return
        if more:
            self.issues.problems.append(f"{more} more lines are not comms records")
        if number == 0 and not self.issues.problems:
            self.issues.problems.append("the file is empty")

    def _take(self, line: Line) -> None:
        if line.header is not None:
            self.header = line.header
            if self.rank not in (None, line.header.rank):
                self.issues.problems.append(f"is named for rank {self.rank} and was written by rank {line.header.rank}")
            if line.header.schema != SCHEMA:
                self.issues.problems.append(
                    f"written as {line.header.schema!r}, read as {SCHEMA!r}: use the crossrank that wrote it"
                )
        if line.gpu is not None and self.header is not None:
            versions = self.header.versions | {"driver": line.gpu.get("driver")}
            self.header = msgspec.structs.replace(self.header, gpu=line.gpu, versions=versions)
        for one, several in _SEVERAL.items():
            if (content := getattr(line, one)) is not None:
                getattr(self, several).append(content)
        if line.end is not None:
            self.end = {name: value for name, value in line.end.items() if not _is_impossible(value)}
            if left_out := line.end.keys() - self.end.keys():
                self.issues.problems.append(f"the last line has impossible numbers ({', '.join(sorted(left_out))})")
