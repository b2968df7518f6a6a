"""Every call of every rank, as text (one line per call, one column per rank) and as SQLite tables:

| table | one row per |
|---|---|
| `ranks` | rank: its file, when and why it was dumped |
| `groups`, `memberships` | process group; member of a group |
| `collectives` | collective: how many members made it, whether their calls fit |
| `calls` | call of a rank: sizes, state, times in ns since 1970; `collective` joins it to its collective |
| `tracebacks` | frame of a stack, 0 = innermost; `calls.traceback` joins to it |
| `findings` | finding of the diagnosis, as JSON |
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import count
from operator import attrgetter
from typing import Any

import msgspec

from crossrank.atomic_file import whole_file
from crossrank.comm import is_p2p
from crossrank.errors import CrossrankError
from crossrank.tools.analysis.diagnosis.findings import Diagnosis, group_text
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.analysis.diagnosis.mismatches import match_key
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.output.console import print_table
from crossrank.tools.traces.rank_trace import STATES

Rows = Iterable[tuple[Any, ...]]

_MOST_COLUMNS = 8
_SCHEMA = """
CREATE TABLE ranks (rank INTEGER PRIMARY KEY, path TEXT, source TEXT, host TEXT, version TEXT, taken_at INTEGER,
  reason TEXT, error TEXT);
CREATE TABLE groups (id INTEGER PRIMARY KEY, name TEXT, description TEXT, size INTEGER, inferred INTEGER);
CREATE TABLE memberships (group_id INTEGER REFERENCES groups, rank INTEGER, PRIMARY KEY (group_id, rank));
CREATE TABLE collectives (id INTEGER PRIMARY KEY, group_id INTEGER REFERENCES groups, seq INTEGER, op TEXT,
  members INTEGER, made_by INTEGER, fits INTEGER);
CREATE TABLE calls (id INTEGER PRIMARY KEY, rank INTEGER REFERENCES ranks, position INTEGER, record_id INTEGER,
  group_id INTEGER REFERENCES groups, seq INTEGER, op TEXT, name TEXT, peer INTEGER, root INTEGER, reduce TEXT,
  tag INTEGER, input_sizes TEXT,
  output_sizes TEXT, dtype TEXT, state TEXT, created INTEGER, started INTEGER, completed INTEGER,
  traceback INTEGER, collective INTEGER REFERENCES collectives);
CREATE TABLE tracebacks (id INTEGER, depth INTEGER, function TEXT, file TEXT, line INTEGER, PRIMARY KEY (id, depth));
CREATE TABLE findings (position INTEGER, role TEXT, kind TEXT, content TEXT);
CREATE INDEX calls_of_collective ON calls (collective);
"""


# --- text ------------------------------------------------------------------------------------------------------------


def print_entries(job: JobState, ranks: set[int] | None, groups: Sequence[str] | None) -> None:
    """Print the calls per group: collectives by number, P2P calls in the order of each rank."""
    for group in job.groups:
        if groups is not None and not set(groups) & set(group.pg):
            continue
        members = [rank for rank in group.ranks if rank in job.ranks and (ranks is None or rank in ranks)]
        for first in range(0, len(members), _MOST_COLUMNS):
            some = members[first : first + _MOST_COLUMNS]
            rows = list(_side_by_side(job, group, some))
            if rows:
                columns = ("#number", "call", *(f"rank {rank}" for rank in some))
                print_table(f"Collectives of {group_text(group.pg)}", columns, rows)
        rows = [row for rank in members for row in _p2p(job, group, rank)]
        if rows:
            print_table(
                f"Sends and receives on {group_text(group.pg)}",
                ("rank", "call", "#peer", "#number", "sizes", "state"),
                rows,
            )


def _side_by_side(job: JobState, group: ProcessGroup, ranks: list[int]) -> Rows:
    lanes = {rank: group.lanes[rank] for rank in ranks if rank in group.lanes}
    for seq in sorted({seq for lane in lanes.values() for seq in lane.numbers}):
        rows = {rank: row for rank, lane in lanes.items() if (row := lane.row(seq)) is not None}
        names = {rank: _call(job, rank, row) for rank, row in rows.items()}
        counts = Counter(names.values())
        common = max(counts, key=lambda name: (counts[name], name))
        states = {rank: STATES[job.ranks[rank].calls.state[row]] for rank, row in rows.items()}
        cells = {rank: state if names[rank] == common else f"{state}: {names[rank]}" for rank, state in states.items()}
        yield seq, common, *(cells.get(rank, "-") for rank in ranks)


def _call(job: JobState, rank: int, row: int) -> str:
    signature = job.signature(rank, row)
    shapes = signature.inputs or signature.outputs
    sizes = "+".join("x".join(map(str, shape)) or "1" for shape in shapes[:4]) + ("+…" if len(shapes) > 4 else "")
    return " ".join(word for word in (signature.op, sizes, signature.dtype or "") if word)


def _p2p(job: JobState, group: ProcessGroup, rank: int) -> Rows:
    calls = job.ranks[rank].calls
    for row in range(len(calls)):
        signature = job.signature(rank, row)
        if is_p2p(signature) and job.group_at(rank, row) is group:
            peer = "any" if signature.peer is None else signature.peer
            words = _call(job, rank, row).split(" ", 1)
            yield rank, signature.op, peer, calls.number[row], words[-1], STATES[calls.state[row]]


# --- tables ----------------------------------------------------------------------------------------------------------


def write_database(name: str, job: JobState, diagnosis: Diagnosis) -> None:
    """Write all tables to the SQLite file `name`, and replace an existing file."""
    try:
        with whole_file(name) as temporary:
            temporary.unlink(missing_ok=True)
            with closing(sqlite3.connect(temporary)) as connection, connection:
                connection.executescript(_SCHEMA)
                for table, rows in _tables(job, diagnosis):
                    columns = connection.execute(f"SELECT * FROM {table}").description
                    connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", rows)
    except (OSError, sqlite3.Error) as error:
        raise CrossrankError(f"{name}: the database cannot be written ({error}); name another file") from error


def _tables(job: JobState, diagnosis: Diagnosis) -> Iterator[tuple[str, Rows]]:
    """Yield the rows of each table, in the order in which they must be written."""
    facts = "rank", "path", "source", "host", "version", "ending.taken_at", "ending.reason", "ending.error"
    yield "ranks", map(attrgetter(*facts), job.ranks.values())
    yield "groups", ((one.index, one.name, one.desc, len(one.ranks), one.inferred) for one in job.groups)
    yield "memberships", ((group.index, rank) for group in job.groups for rank in group.ranks)
    collective_of: dict[tuple[int, int], int] = {}
    yield "collectives", _collectives(job, collective_of)
    yield "calls", _calls(job, collective_of)
    frames = ((number, depth, one) for number, stack in enumerate(job.stacks) for depth, one in enumerate(stack))
    yield "tracebacks", ((number, depth, one.name, one.filename, one.line) for number, depth, one in frames)
    roles = ("findings", "consequences", "advisory")
    found = ((position, role, one) for role in roles for position, one in enumerate(getattr(diagnosis, role)))
    yield "findings", ((position, role, one.kind, msgspec.json.encode(one).decode()) for position, role, one in found)


def _collectives(job: JobState, collective_of: dict[tuple[int, int], int]) -> Rows:
    keys = [match_key(signature) for signature in job.signatures]
    for group in job.groups:
        made: dict[int, list[int]] = defaultdict(list)  # sequence number -> signatures
        for rank, lane in group.lanes.items():
            signatures = job.ranks[rank].calls.signature
            for seq, row in zip(lane.numbers, lane.rows, strict=True):
                made[seq].append(signatures[row])
        for seq, (first, *others) in sorted(made.items()):
            key = collective_of[group.index, seq] = len(collective_of)
            fit = all(keys[first].fits(keys[other]) for other in others)
            yield key, group.index, seq, job.signatures[first].op, len(group.ranks), len(others) + 1, fit


def _calls(job: JobState, collective_of: dict[tuple[int, int], int]) -> Rows:
    facts = attrgetter("op", "c10d", "peer", "root", "reduce", "tag")
    of_signature = [
        (*facts(one), *(msgspec.json.encode(side).decode() for side in (one.inputs, one.outputs)), one.dtype)
        for one in job.signatures
    ]
    p2p, numbers = list(map(is_p2p, job.signatures)), count()
    for rank, trace in job.ranks.items():
        calls, own = trace.calls, job.group_of[rank]
        columns = (calls.id, calls.group, calls.number, calls.signature, calls.state)
        moments = zip(calls.called, calls.began, calls.ended, calls.stack, strict=True)
        for row, (id, local, seq, signature, state) in enumerate(zip(*columns, strict=True)):
            collective = None if p2p[signature] else collective_of.get((own[local], seq))
            facts_of = (id, own[local], seq, *of_signature[signature], STATES[state])
            yield next(numbers), rank, row, *facts_of, *(one or None for one in next(moments)), collective
