"""Writes a recording, or other traces, without names: of hosts, paths, source lines, functions and modules.

The rules for each kind of file (`kinds.py`) replace its fields. The new file name has only kind and rank. Everything
without a rule is skipped and counted: files of an unknown kind, unknown fields, damaged files.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from typing import Any

import msgspec
import zstandard

from crossrank.atomic_file import join, make_folder, whole_file
from crossrank.errors import BROKEN, CrossrankError, one_line
from crossrank.recording import (
    COMMS,
    EXECUTION_TRACE,
    FLIGHT,
    KINETO,
    LINKED,
    VERDICT,
    ReadIssues,
    file_name,
    is_folder,
    rank_folder,
    read_chunks,
    read_lines,
)
from crossrank.tools.graph.linking.window_files import writing
from crossrank.tools.parallel import Fleet, map_ranks
from crossrank.tools.sharing import kinds
from crossrank.tools.sharing.exports import texts_in, write_export
from crossrank.tools.sharing.folders import exists, refuse_full
from crossrank.tools.sharing.logs import scrub_log
from crossrank.tools.sharing.pseudonyms import Pseudonyms
from crossrank.tools.sharing.rules import KEYS, LEFT_OUT, Rule, Scrubber
from crossrank.tools.sharing.vocabulary import is_public
from crossrank.tools.traces.discover import LOG, NSIGHT, WHAT, FoundFile, discover
from crossrank.tools.traces.flight.safe_pickle import RefusedPickleError, load_data
from crossrank.tools.traces.logs.read import ATTEMPT

_PICKLE = b"\x80"
_MOST_RANKS = 1 << 16
_NUMBERED = {NSIGHT: "sqlite", LOG: "log.zst"}
"""Kinds of file that a rank may have several times -> the ending of the new ones; their names have a number."""
_encode = msgspec.json.Encoder(decimal_format="number").encode
_decode_exactly = msgspec.json.Decoder(float_hook=Decimal).decode
"""Decode JSON so that numbers keep all their digits."""


@dataclass(kw_only=True)
class AnonymousFile:
    """The result for one file."""

    kind: str
    rank: int | None
    window: int = 1
    output: str | None = None
    """None if the file was skipped."""
    why: str | None = None
    """Why the file was skipped."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Field without a rule -> how often it was skipped."""
    replaced: dict[str, str] = field(default_factory=dict)
    """Replaced text -> its pseudonym."""
    passed: set[str] = field(default_factory=set)
    """Texts that stay, because they are in anyone's traces."""
    damage: list[str] = field(default_factory=list)
    """Damaged parts that were not read. The rest was written."""
    is_loss: bool = True
    """Whether a skipped file is a loss: it could not be read. No loss: it is derived from others, or is no trace."""


@dataclass(kw_only=True)
class Anonymous:
    """The result for all files."""

    files: list[AnonymousFile]
    shift_ns: int
    """Subtracted from all times since 1970."""

    @property
    def replaced(self) -> dict[str, str]:
        return {text: name for file in self.files for text, name in file.replaced.items()}

    @property
    def lost(self) -> list[AnonymousFile]:
        """Files that should be there."""
        return [file for file in self.files if file.output is None and file.is_loss]


def anonymize(paths: Sequence[str], folder: str, fleet: Fleet, *, coarse: bool = False) -> Anonymous:
    """Write the files at `paths` to `folder`, which must be new or empty. Raise `CrossrankError` if it is not, or if
    there is nothing to write."""
    refuse_full(folder)
    # A larger number in a file name is more likely the number of a job.
    found = [
        replace(file, rank=None) if file.rank is not None and file.rank >= _MOST_RANKS else file
        for file in discover(paths)
    ]
    if not any(file.kind in (*_SCRUBBERS, NSIGHT) and not file.problem for file in found):
        kinds = ", ".join(sorted({WHAT.get(file.kind, file.kind) for file in found})) or "nothing"
        raise CrossrankError(f"{paths[0]}: has no file to anonymize, only {kinds}")
    _refuse_duplicates(found)
    key = secrets.token_bytes(32)
    ranks = [file.rank for file in found if file.rank is not None]
    world = 1 + max(ranks, default=0)
    work = partial(_anonymize_file, key=key, folder=folder, world=world, coarse=coarse)
    # A linked trace repeats the two files of its window. It is written only if one of them is missing.
    linked = [item for item in _number_files(found) if item[0].kind == LINKED]
    others = [item for item in _number_files(found) if item[0].kind != LINKED]
    files = _anonymize_all(work, others, fleet)
    pairs = [
        {(file.rank, file.window) for file in files if file.kind == kind and file.output}
        for kind in (KINETO, EXECUTION_TRACE)
    ]
    needed = [item for item in linked if not all((item[0].rank, item[0].window) in pair for pair in pairs)]
    files += [
        _make_result(one, f"{one.path}: `crossrank link` writes it again", is_loss=False)
        for one, number in linked
        if (one, number) not in needed
    ]
    files += _anonymize_all(work, needed, fleet)
    if any(is_folder(path) and exists(join(path, VERDICT)) for path in paths):
        why = f"{VERDICT}: `crossrank diagnose` writes it again"
        files.append(AnonymousFile(kind="", rank=None, why=why, is_loss=False))
    return Anonymous(files=files, shift_ns=Pseudonyms(key).shift_ns)


def _anonymize_all(
    work: Callable[[tuple[FoundFile, int]], AnonymousFile],
    items: Sequence[tuple[FoundFile, int]],
    fleet: Fleet,
) -> list[AnonymousFile]:
    return map_ranks(
        work, items, fleet, failed=lambda item, error: _make_result(item[0], str(error)), what="anonymizing"
    )


def _make_result(file: FoundFile, why: str | None = None, *, is_loss: bool = True) -> AnonymousFile:
    return AnonymousFile(kind=file.kind, rank=file.rank, window=file.window, why=why, is_loss=is_loss)


def _refuse_duplicates(found: Iterable[FoundFile]) -> None:
    """Raise `CrossrankError` if two inputs have the same kind, rank and window, and so the same new name."""
    seen: dict[tuple[str, int | None, int], FoundFile] = {}
    for file in found:
        if file.kind in _SCRUBBERS and file.kind not in _NUMBERED and file.rank is not None and not file.problem:
            other = seen.setdefault((file.kind, file.rank, file.window), file)
            if other is not file:
                raise CrossrankError(f"{other.path} and {file.path} are both of rank {file.rank}; give one of them")


def _number_files(found: Iterable[FoundFile]) -> Iterator[tuple[FoundFile, int]]:
    """Yield each file with its number among the files of its kind that have no rank."""
    nameless: Counter[str] = Counter()
    for file in found:
        nameless[file.kind] += file.rank is None or file.kind in _NUMBERED
        yield file, nameless[file.kind]


def _anonymize_file(item: tuple[FoundFile, int], key: bytes, folder: str, world: int, coarse: bool) -> AnonymousFile:
    file, number = item
    make = _SCRUBBERS.get(file.kind)
    if file.problem:
        return _make_result(file, f"{file.path}: {file.problem}", is_loss=not file.left_out)
    if make is None and file.kind != NSIGHT:
        return _make_result(file, f"{file.path}: is {WHAT.get(file.kind, WHAT[''])}", is_loss=False)
    scrubber = Scrubber(Pseudonyms(key), coarse=coarse)
    place = folder
    suffix = _NUMBERED.get(file.kind, "json.zst")
    # Letters, not a number: a reader would take a number for the rank.
    name = f"{file.kind}-{'x' * number}.{suffix}"
    if file.kind == LOG and (inside := ATTEMPT.search(file.path)):
        attempt, local, name = inside[0].split("/")
        place = join(join(folder, attempt), local)
    elif file.rank is not None and file.kind in _NUMBERED:
        name = f"{file.kind}-{'x' * number}-rank-{file.rank}.{suffix}"
    elif file.rank is not None:
        place = join(folder, inner) if (inner := rank_folder(file.rank, world)) else folder
        name = file_name(file.kind, file.rank, file.window)
    make_folder(place)
    output = join(place, name)
    with writing(output), whole_file(output) as temporary:
        if make is None:
            write_export(file.path, temporary, scrubber)
        else:
            compress = zstandard.ZstdCompressor(level=3)
            with temporary.open("wb") as target, compress.stream_writer(target, closefd=False) as stream:
                for part in make(file, scrubber):
                    stream.write(part)
    result = _make_result(file)
    result.output, result.left_out = output, dict(scrubber.left_out)
    result.replaced, result.passed = scrubber.names.replaced, scrubber.names.passed
    result.damage = scrubber.damage
    return result


def _scrub_comms(file: FoundFile, scrubber: Scrubber) -> Iterator[bytes]:
    issues = ReadIssues(file.path)
    for line in read_lines(file.path, issues):
        try:
            content = msgspec.json.decode(line)
        except BROKEN:
            scrubber.left_out["unreadable lines"] += 1
            continue
        if not isinstance(content, dict):
            scrubber.left_out["unreadable lines"] += 1
            continue
        if "id" in content:
            yield _encode(kinds.RECORD(content, scrubber)) + b"\n"
            continue
        for kind, value in content.items():
            rule = kinds.COMMS_LINES.get(kind)
            made = rule(value, scrubber) if rule is not None else LEFT_OUT
            if made is LEFT_OUT:
                scrubber.left_out[f"line {kind if is_public(kind) else '…'}"] += 1
            else:
                yield _encode({kind: made}) + b"\n"
    scrubber.damage += [f"{file.path}: {problem}" for problem in issues.problems]


def _scrub_rows(file: FoundFile, scrubber: Scrubber) -> Iterator[bytes]:
    """Yield the content of a file with many rows, which are decoded one by one."""
    name, rule = kinds.ROWS[file.kind]
    issues = ReadIssues(file.path)
    data = b"".join(read_chunks(file.path, issues))
    if issues.problems:
        raise CrossrankError(f"{file.path}: {issues.problems[0]}; skipped")
    try:
        if b"NaN" in data or b"Infinity" in data:  # torch writes them, but JSON has no such values
            data = _NOT_A_NUMBER.sub(rb"\1null", data)
        head = msgspec.json.decode(data, type=dict[str, msgspec.Raw] | list[msgspec.Raw])
        listed = msgspec.json.decode(head[name], type=list[msgspec.Raw]) if isinstance(head, dict) else head
    except (*BROKEN, KeyError) as error:
        raise CrossrankError(
            f"{file.path}: is not {WHAT[file.kind]} as a whole ({one_line(error)}); skipped"
        ) from error
    move = _replace_base(head, scrubber) if file.kind == KINETO and isinstance(head, dict) else None
    made: dict[str, Any] = {}
    for field_name, raw in head.items() if isinstance(head, dict) else ():
        if field_name != name:
            known = kinds.HEADS[file.kind].get(field_name)
            value = _apply_rule(known, raw, scrubber) if known is not None else LEFT_OUT
            if value is LEFT_OUT:
                scrubber.left_out[field_name if is_public(field_name) else "…"] += 1
            else:
                made[field_name] = value
    yield _encode(made)[:-1] + (b"," if made else b"") + f'"{name}":['.encode()
    separator = b"\n"
    for raw in listed:
        row = _apply_rule(rule, raw, scrubber)
        if isinstance(row, dict):
            if move is not None and isinstance(row.get("ts"), int | Decimal):
                row["ts"] += move
            yield separator + _encode(row)
            separator = b",\n"
        else:
            scrubber.left_out["unreadable rows"] += 1
    yield b"\n]}\n"


_DAY_NS = 86_400 * 10**9


def _replace_base(head: dict[str, msgspec.Raw], scrubber: Scrubber) -> Decimal | None:
    """Replace the base time of a Kineto trace with the start of a day after the shift. Kineto's base is a multiple of
    about three months, which would reveal the shift. Return the µs to add to the times."""
    name = "baseTimeNanoseconds"
    try:
        base = msgspec.json.decode(head[name], type=int)
    except (*BROKEN, KeyError):
        return None
    moved = scrubber.names.wall(base)
    new = moved - moved % _DAY_NS
    # The rule for this field subtracts the shift again.
    head[name] = msgspec.Raw(str(new + (base - moved)).encode())
    return Decimal(moved - new) / 1000


def _apply_rule(rule: Rule, raw: Any, scrubber: Scrubber) -> Any:
    """Return the result of a rule for a field or row in its JSON form."""
    try:
        return rule(_decode_exactly(raw), scrubber)
    except BROKEN:
        return LEFT_OUT


def _scrub_flight(file: FoundFile, scrubber: Scrubber) -> Iterator[bytes]:
    """Yield a dump as JSON, from any of its formats."""
    issues = ReadIssues(file.path)
    data = b"".join(read_chunks(file.path, issues))
    if issues.problems:
        raise CrossrankError(f"{file.path}: {issues.problems[0]}; skipped")
    try:
        content = load_data(data, issues.budget) if data[:1] == _PICKLE else msgspec.json.decode(data)
    except (*BROKEN, RefusedPickleError) as error:
        raise CrossrankError(f"{file.path}: is not a dump ({one_line(error)}); skipped") from error
    made = kinds.FLIGHT(content, scrubber)
    if not isinstance(made, dict):
        raise CrossrankError(f"{file.path}: is not a dump, but {type(content).__name__}; skipped")
    yield _encode(made)


_SCRUBBERS: Mapping[str, Callable[[FoundFile, Scrubber], Iterator[bytes]]] = {
    COMMS: _scrub_comms,
    KINETO: _scrub_rows,
    EXECUTION_TRACE: _scrub_rows,
    LINKED: _scrub_rows,
    FLIGHT: _scrub_flight,
    LOG: scrub_log,
}
"""Kind of file -> function that writes it without names."""
_TEXTS = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_NOT_A_NUMBER = re.compile(rb"([\[:,]\s*)(?:NaN|-?Infinity)(?=\s*[,\]}])")
_WORD = re.compile(r"\w+")


def verify(result: Anonymous) -> dict[str, str]:
    """Return each replaced text that is still in the result, with a file that contains it.

    The search covers every text of every file. It looks for whole words, in texts of at least four characters. A
    single word in a text that stays does not count: `wrapper` may be a function of the user and of torch.
    """
    wanted: dict[str, list[str]] = {}
    for text in searched(result):
        wanted.setdefault(max(_WORD.findall(text), key=len), []).append(text)
    found: dict[str, str] = {}
    for file in result.files:
        if file.output is None:
            continue
        for written in _texts_in(file.output):
            stays = written in file.passed or written in KEYS
            for word in set(_WORD.findall(written)):
                for text in wanted.get(word, ()):
                    if not (stays and _WORD.fullmatch(text)) and re.search(rf"(?<!\w){re.escape(text)}(?!\w)", written):
                        found.setdefault(text, file.output)
    return found


def searched(result: Anonymous) -> list[str]:
    """Return the replaced texts that `verify` looks for. Shorter texts occur everywhere by chance."""
    return [text for text in result.replaced if len(text) >= _MIN_LENGTH and _WORD.search(text)]


def _texts_in(path: str) -> Iterator[str]:
    """Yield every text of a file once."""
    if path.endswith(".sqlite"):
        yield from texts_in(path)
        return
    data = b"".join(read_chunks(path, ReadIssues(path)))
    for raw in set(_TEXTS.findall(data)):
        with suppress(*BROKEN):
            yield msgspec.json.decode(b'"' + raw + b'"', type=str)


_MIN_LENGTH = 4
"""Least characters of a text to look for."""
