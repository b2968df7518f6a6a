"""The compared calls as SQLite tables, for questions that no command answers.

| table | one row per |
|---|---|
| `ranks` | rank: its file, when and why it was dumped |
| `groups`, `memberships` | process group; member of a group |
| `collectives` | collective of a group: how many members made it, whether their calls fit |
| `calls` | call of a rank: sizes, state, times in ns since 1970; `collective` joins it to its collective |
| `tracebacks` | frame of a stack, 0 = innermost; `calls.traceback` joins to it |
| `findings` | finding of the diagnosis, as JSON |
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from operator import attrgetter
from typing import Any

import msgspec

from crossrank.atomic_file import whole_file
from crossrank.comm import is_p2p
from crossrank.errors import CrossrankError
from crossrank.tools.analysis.diagnosis.collectives import match_key
from crossrank.tools.analysis.diagnosis.findings import Diagnosis
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.traces.rank_trace import STATES

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


def write_database(name: str, job: JobState, diagnosis: Diagnosis) -> None:
    """Write everything to the SQLite file `name`, which is made anew."""
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


Rows = Iterable[tuple[Any, ...]]


def _tables(job: JobState, diagnosis: Diagnosis) -> Iterator[tuple[str, Rows]]:
    """The rows of each table, which are taken in this order."""
    facts = attrgetter(
        *("rank", "path", "source", "host", "version", "ending.taken_at", "ending.reason", "ending.error")
    )
    yield "ranks", map(facts, job.ranks.values())
    yield "groups", ((one.index, one.name, one.desc, len(one.ranks), one.inferred) for one in job.groups)
    yield "memberships", ((group.index, rank) for group in job.groups for rank in group.ranks)
    collective_of: dict[tuple[int, int], int] = {}
    yield "collectives", _collectives(job, collective_of)
    yield "calls", _calls(job, collective_of)
    yield (
        "tracebacks",
        (
            (number, depth, frame.name, frame.filename, frame.line)
            for number, stack in enumerate(job.stacks)
            for depth, frame in enumerate(stack)
        ),
    )
    yield (
        "findings",
        (
            (position, role, finding.kind, msgspec.json.encode(finding).decode())
            for role in ("findings", "consequences", "advisory")
            for position, finding in enumerate(getattr(diagnosis, role))
        ),
    )


def _collectives(job: JobState, collective_of: dict[tuple[int, int], int]) -> Rows:
    keys = [match_key(signature) for signature in job.signatures]
    for group in job.groups:
        first: dict[int, tuple[int, int, bool]] = {}  # seq -> signature, ranks that made it, whether they fit
        for rank, lane in group.lanes.items():
            signatures = job.ranks[rank].calls.signature
            for seq, row in zip(lane.numbers, lane.rows, strict=True):
                number = signatures[row]
                known = first.get(seq)
                if known is None:
                    first[seq] = (number, 1, True)
                else:
                    same = known[0] == number or keys[known[0]].fits(keys[number])
                    first[seq] = (known[0], known[1] + 1, known[2] and same)
        for seq, (number, made_by, fit) in sorted(first.items()):
            collective_of[group.index, seq] = len(collective_of)
            key = collective_of[group.index, seq]
            yield key, group.index, seq, job.signatures[number].op, len(group.ranks), made_by, fit


def _calls(job: JobState, collective_of: dict[tuple[int, int], int]) -> Rows:
    encode = msgspec.json.encode
    facts = attrgetter("op", "c10d", "peer", "root", "reduce", "tag")
    of_signature = [
        (*facts(one), encode(one.inputs).decode(), encode(one.outputs).decode(), one.dtype) for one in job.signatures
    ]
    number = 0
    for rank, evidence in job.ranks.items():
        calls = evidence.calls
        for row in range(len(calls)):
            group, seq, signature = job.group_at(rank, row).index, calls.number[row], calls.signature[row]
            yield (
                *(number, rank, row, calls.id[row], group, seq, *of_signature[signature], STATES[calls.state[row]]),
                *(calls.called[row] or None, calls.began[row] or None, calls.ended[row] or None),
                calls.stack[row] or None,
                None if is_p2p(job.signatures[signature]) else collective_of.get((group, seq)),
            )
            number += 1
