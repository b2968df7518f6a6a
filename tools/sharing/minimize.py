"""Writes some steps of a recording as a recording of its own.

Lines of a comms file are copied or skipped, but not changed. So the part keeps what later versions of the recorder add.
Only a rank that continued after the part gets another `end`, which marks this.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import fsspec
import msgspec
import zstandard

from crossrank.atomic_file import join, make_folder, whole_file
from crossrank.comm import Int
from crossrank.errors import BROKEN, CrossrankError, one_line
from crossrank.recording import (
    COMMS,
    EXECUTION_TRACE,
    FLIGHT,
    KINETO,
    LINKED,
    VERDICT,
    Header,
    ReadIssues,
    file_name,
    is_folder,
    rank_folder,
    read_lines,
)
from crossrank.tools.graph.linking.window_files import writing
from crossrank.tools.parallel import Fleet, map_ranks
from crossrank.tools.sharing.folders import exists, refuse_full
from crossrank.tools.traces.comms import WallClock
from crossrank.tools.traces.discover import Files, FoundFile, discover, files_by_rank

_WINDOW_KINDS = (EXECUTION_TRACE, KINETO, LINKED)


class _Timed(msgspec.Struct):
    """A line that belongs to a call or a time."""

    t: Int = 0
    id: Int | None = None


class _Edge(msgspec.Struct):
    """Start or end of a window."""

    window: Int
    edge: str
    step: Int


class _Line(msgspec.Struct):
    """A line that is not a record, with the fields that show whether it belongs to the part."""

    header: dict[str, msgspec.Raw] | None = None
    step: dict[str, Int] | None = None
    wait: _Timed | None = None
    ran: _Timed | None = None
    clock: dict[str, Int] | None = None
    counters: _Timed | None = None
    window: _Edge | None = None
    end: dict[str, Any] | None = None


class _Record(msgspec.Struct):
    id: Int
    t: Int
    step: Int = 0


_decode_record = msgspec.json.Decoder(_Record).decode
_decode_line = msgspec.json.Decoder(_Line).decode
_decode_header = msgspec.json.Decoder(dict[str, Header]).decode


@dataclass(kw_only=True)
class MinimizedRank:
    """The part of one rank."""

    rank: int
    calls: int = 0
    of_calls: int = 0
    steps: tuple[int, int] | None = None
    """First and last step with a call in the whole recording; None without calls."""
    goes_on: bool = False
    """Whether the rank made calls or started steps after the part."""
    windows: list[int] = field(default_factory=list)
    """Windows with all steps in the part."""
    cut_windows: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Windows with some steps in the part -> their first and last step."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Lines whose step is unknown -> how many."""
    folder: str = ""
    """Folder with its files."""
    size: int = 0
    """Bytes of its files."""
    of_size: int = 0
    """Bytes of its files in the whole recording."""
    problems: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Minimized:
    """The result for all ranks."""

    ranks: list[MinimizedRank]
    dumps: int = 0
    """Copied flight-recorder dumps."""
    dumps_left_out: int = 0
    """Dumps that were skipped, as was the verdict. They are from later: every rank continued after the part."""
    without_comms: list[int] = field(default_factory=list)
    """Ranks with other files but no comms file. Only that file has the steps."""


def minimize(path: str, folder: str, steps: tuple[int, int], fleet: Fleet) -> Minimized:
    """Write the steps of the recording at `path`, from the first of `steps` to before the second, to `folder`.

    Raise `CrossrankError` if there is no comms file, if no rank has a call in the part, or if `folder` is not empty.
    """
    by_rank = files_by_rank(discover([path]), (COMMS, *_WINDOW_KINDS, FLIGHT))
    ranks = {rank: files for rank, files in by_rank.items() if rank is not None and COMMS in files}
    if not ranks:
        raise CrossrankError(
            f"{path}: has no comms file, so the steps of its calls are unknown; give a recording (TRACING_DIR)"
        )
    refuse_full(folder)
    results = map_ranks(
        partial(_minimize_rank, folder=folder, steps=steps),
        ranks.items(),
        fleet,
        failed=lambda item, error: MinimizedRank(rank=item[0] or 0, problems=[str(error)]),
        what="minimizing",
    )
    written = [rank for rank in results if rank.folder]
    if not written:
        raise CrossrankError(results[0].problems[0])
    if not any(rank.calls for rank in results):
        for rank in written:
            _remove(join(rank.folder, file_name(COMMS, rank.rank)))
        of_calls = [step for rank in results for step in rank.steps or ()]
        there = f"its calls are in steps {min(of_calls)} to {max(of_calls)}" if of_calls else "it has no call"
        raise CrossrankError(f"{path}: no call in steps {steps[0]}:{steps[1]}; {there}")
    result = Minimized(
        ranks=results, without_comms=[rank for rank in by_rank if rank is not None and rank not in ranks]
    )
    dumps = [(rank, file) for rank in written for file in ranks[rank.rank].get(FLIGHT, ())]
    # A dump shows the end of a run. If one rank ends in the part, the dumps of the others show what they waited for.
    if all(rank.goes_on for rank in written):
        result.dumps_left_out = len(dumps)
        return result
    for rank, file in dumps:
        rank.size += _copy(file, rank.folder)
    result.dumps = len(dumps)
    verdict = FoundFile(path=join(path, VERDICT), kind=VERDICT, rank=None)
    if is_folder(path) and exists(verdict.path):
        _copy(verdict, folder)
    return result


def _remove(path: str) -> None:
    file_system, there = fsspec.core.url_to_fs(path)
    file_system.rm(there)


def _minimize_rank(item: tuple[int, Files], folder: str, steps: tuple[int, int]) -> MinimizedRank:
    rank, files = item
    (comms,) = files[COMMS]
    result = MinimizedRank(rank=rank, of_size=sum(file.size for found in files.values() for file in found))
    part = _Part(comms.path, steps, result)
    if part.header is None:
        raise CrossrankError(f"{comms.path}: {'; '.join(result.problems) or 'has no header'}; its calls are unknown")
    result.folder = join(folder, name) if (name := rank_folder(rank, part.header.world_size)) else folder
    make_folder(result.folder)
    output = join(result.folder, file_name(COMMS, rank))
    with writing(output), whole_file(output) as temporary, temporary.open("wb") as file:
        with zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False) as stream:
            for line in part.lines():
                stream.write(line + b"\n")
        result.size = file.tell()
    of_windows = [file for kind in _WINDOW_KINDS for file in files.get(kind, ())]
    for file_of_window in of_windows:
        if file_of_window.window in result.windows:
            result.size += _copy(file_of_window, result.folder)
        elif file_of_window.window not in part.marked:
            what = "file(s) of windows whose steps are not in the comms file"
            result.left_out[what] = result.left_out.get(what, 0) + 1
    there = {one.window for one in of_windows}
    result.windows = [window for window in result.windows if window in there]
    return result


class _Part:
    """Selects the lines of one rank's comms file that belong to the part."""

    def __init__(self, path: str, steps: tuple[int, int], result: MinimizedRank) -> None:
        self._path = path
        self._first, self._stop = steps
        self._result = result
        self.header: Header | None = None
        self._whole_header: dict[str, msgspec.Raw] = {}
        self.marked: set[int] = set()
        """Windows whose steps are in the file."""
        self._end: dict[str, Any] | None = None
        self._ids: set[int] = set()
        self._clocks: list[dict[str, int]] = []
        self._begins: float | None = None
        self._ends: float | None = None
        """Start and end of the part on the monotonic clock in ns; None if they are those of the recording."""
        self._select()

    def _select(self) -> None:
        """Find out what belongs to the part, without its content."""
        issues = ReadIssues(self._path)
        opened: dict[int, int] = {}
        closed: dict[int, int] = {}
        first_step, last_step = 1 << 63, -1
        result, unreadable = self._result, 0
        for line in read_lines(self._path, issues):
            try:
                if line.startswith(b'{"id":'):
                    record = _decode_record(line)
                    result.of_calls += 1
                    first_step, last_step = min(first_step, record.step), max(last_step, record.step)
                    if self._first <= record.step < self._stop:
                        self._ids.add(record.id)
                    elif record.step >= self._stop:
                        self._ends = min(self._ends or record.t, record.t)
                    continue
                other = _decode_line(line)
                if other.header is not None and self.header is None:
                    self.header, self._whole_header = _decode_header(line)["header"], other.header
                    self._clocks.append(self.header.clock)
                    continue
            except BROKEN:
                unreadable += 1
                continue
            if other.clock is not None:
                self._clocks.append(other.clock)
            elif other.step is not None and "step" in other.step and "t" in other.step:
                if other.step["step"] == self._first:
                    self._begins = other.step["t"]
                elif other.step["step"] >= self._stop:
                    self._ends = min(self._ends or other.step["t"], other.step["t"])
            elif other.window is not None:
                (opened if other.window.edge == "open" else closed)[other.window.window] = other.window.step
            elif other.end is not None:
                self._end = other.end
        if unreadable:
            result.problems.append(f"{self._path}: {unreadable} line(s) unreadable, skipped")
        result.problems += [f"{self._path}: {problem}" for problem in issues.problems]
        result.calls, result.goes_on = len(self._ids), self._ends is not None
        result.steps = (first_step, last_step) if last_step >= 0 else None
        self.marked = set(opened)
        for window, begin in opened.items():
            last = closed.get(window, begin)
            if window in closed and self._first <= begin and last < self._stop:
                result.windows.append(window)
            elif begin < self._stop and last >= self._first:
                result.cut_windows[window] = begin, last

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of the part."""
        left_out = Counter[str]()
        for line in read_lines(self._path, ReadIssues(self._path)):
            try:
                if line.startswith(b'{"id":'):
                    if _decode_record(line).id in self._ids:
                        yield line
                    continue
                other = _decode_line(line)
            except BROKEN:
                continue
            if other.header is not None:
                yield msgspec.json.encode({"header": self._new_header()})
            elif self._is_in_part(other, left_out):
                yield line
        self._result.left_out = dict(left_out)
        clock = WallClock(self._clocks)
        if self._ends is not None:
            t = int(self._ends)
            yield msgspec.json.encode({"clock": {"t": t, "wall": clock.at(t)}})
        if self._end is not None or self._ends is not None:
            yield msgspec.json.encode({"end": self._new_end()})

    def _is_in_part(self, line: _Line, left_out: Counter[str]) -> bool:
        if line.end is not None:
            return False
        for timed, what in ((line.wait, "waits"), (line.ran, "durations")):
            if timed is None:
                continue
            if timed.id is None:
                return self._is_in_time(timed.t)
            if timed.id not in self._ids:
                left_out[f"{what} for earlier calls"] += self._is_in_time(timed.t)
                return False
            return True
        if line.clock is not None:
            return "t" in line.clock and self._is_in_time(line.clock["t"])
        if line.counters is not None:
            return self._is_in_time(line.counters.t)
        if line.step is not None:
            return self._first <= line.step.get("step", -1) <= self._stop
        if line.window is not None:
            return line.window.window in self._result.windows
        return True

    def _is_in_time(self, t: int) -> bool:
        return (self._begins is None or t >= self._begins) and (self._ends is None or t < self._ends)

    def _new_header(self) -> dict[str, Any]:
        header: dict[str, Any] = self._whole_header | {"part": [self._first, self._stop]}
        if self._begins is not None:
            t = int(self._begins)
            header["clock"] = {"t": t, "wall": WallClock(self._clocks).at(t)}
        return header

    def _new_end(self) -> dict[str, Any]:
        """Return the recording's `end` with the part's numbers. A rank that continued looks as if it was disabled."""
        end = (self._end or {}) | {"calls": self._result.calls, "records": self._result.calls}
        return end | {"reason": "disable", "exceptions": [], "step": self._stop} if self._ends is not None else end


def _copy(file: FoundFile, folder: str) -> int:
    """Copy a file unchanged into a folder. Return its bytes."""
    output = join(folder, file.name)
    with writing(output), whole_file(output) as temporary:
        try:
            with fsspec.open(file.path, "rb") as source, temporary.open("wb") as target:
                shutil.copyfileobj(source, target)
                return target.tell()
        except OSError:
            raise
        except Exception as error:  # each kind of file system has its own errors
            raise CrossrankError(f"{file.path}: cannot be read ({one_line(error)})") from error
