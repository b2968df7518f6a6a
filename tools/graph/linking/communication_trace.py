"""The communication in an execution trace, and nothing else of it: read chunk by chunk, whatever the file's size.

A trace of a large model has hundreds of thousands of nodes, of which a few hundred communicate. Here the nodes of a
few megabytes of the file at a time are decoded; those that communicate are kept, of the others only who called them.
A file that is not laid out as torch writes it, or is broken, is read whole and repaired by `read_execution_trace`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, field

import msgspec

from crossrank.budget import ROWS, Budget
from crossrank.comm import Group
from crossrank.errors import BROKEN, CrossrankError, one_line
from crossrank.recording import RANGE, Damage, read_chunks
from crossrank.tools.graph.linking.communications import Finder
from crossrank.tools.graph.linking.graph import Communication, HostOp
from crossrank.tools.graph.linking.nesting import is_work
from crossrank.tools.traces.execution_trace import (
    HostNode,
    Node,
    TraceFile,
    groups_of,
    host_node,
    read_execution_trace,
    schema_warnings,
)
from crossrank.tools.traces.param_comms import ParamComms

_COMMUNICATING = ("record_param_comms", "c10d::", "_c10d_functional", "c10d_functional::", RANGE)
_GROUPS = "process_group:init"
_LIST = re.compile(rb'"nodes"\s*:\s*\[\s*')
_FIRST_KEY = re.compile(rb'\{\s*("[a-z_]+")')
_BATCH = 4 << 20
_LONGEST_ROW = 64 << 20
_HEAD = 1 << 20


@dataclass(frozen=True, kw_only=True)
class CommunicationTrace:
    """What one rank communicated."""

    path: str
    schema: str
    communications: list[Communication]
    """In the order in which they began; `record.t` is 0, for an execution trace has no times."""
    waits: list[tuple[int, ParamComms]]
    """(number of communications begun before it, what it waits for) for every `wait` that the trace has."""
    groups: list[Group]
    warnings: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Names of communications that are no operation that is known, one entry each."""


def read_communication_trace(path: str, world_size: int | None = None) -> CommunicationTrace:
    """The communication of one rank. Raises `CrossrankError` where nothing of the file can be used."""
    found = _scan(path)
    damage: list[str] = []
    if found is None:
        trace = read_execution_trace(path)
        damage = list(trace.damage)
        nodes, parents, schema = [], {}, trace.schema
        for node in trace.nodes:
            parents[node.id] = node.parent
            if _is_kept(node.name):
                nodes.append(node)
    else:
        nodes, parents, schema = found
    kept = {node.id for node in nodes}
    host = []
    for node in sorted(nodes, key=lambda node: node.id):
        caller = _kept_caller(parents.get(node.id, 0), parents, kept)
        host.append(HostOp(node, caller, None, None, None, 0, is_work(node.name)))
    budget = Budget.of(path)
    groups = groups_of(nodes, budget)
    finder = Finder(
        host,
        {group.pg: group for group in groups},
        world_size=world_size,
        records={},
        event_args=lambda _: None,
        budget=budget,
    )
    finder.search()
    finder.number()
    order = {op.id: op.node.rf_id for op in host}
    begun = sorted(order[c.host] for c in finder.found if c.host is not None)
    waits = []
    for position, comms in finder.waits.items():
        rf_id = host[position].node.rf_id
        waits.append((bisect_left(begun, rf_id), comms))
    waits.sort(key=lambda wait: wait[0])
    return CommunicationTrace(
        path=path,
        schema=schema,
        communications=finder.found,
        waits=waits,
        groups=list(finder.groups.values()),
        warnings=[*schema_warnings(schema), *finder.warnings],
        damage=damage,
        unknown=finder.unknown,
    )


def _is_kept(name: str) -> bool:
    return name.startswith(_COMMUNICATING) or _GROUPS in name


def _kept_caller(parent: int, parents: dict[int, int], kept: set[int]) -> int:
    """The nearest caller that is kept; 0 where there is none. Ids may run in a circle in a broken file."""
    for _ in range(64):
        if parent in kept or not parent:
            return parent
        parent = parents.get(parent, 0)
    return 0


_Found = tuple[list[HostNode], dict[int, int], str]


def _scan(path: str) -> _Found | None:
    """(kept nodes, id -> parent of all, schema); None where the file has to be read whole."""
    damage = Damage(path)
    decode_rows = msgspec.json.Decoder(list[Node]).decode
    nodes: list[HostNode] = []
    parents: dict[int, int] = {}
    head = rest = b""
    boundary: re.Pattern[bytes] | None = None
    try:
        for chunk in read_chunks(path, damage):
            rest += chunk
            if boundary is None:
                start = _LIST.search(rest)
                key = _FIRST_KEY.match(rest, start.end()) if start else None
                if start is None or key is None:
                    if len(rest) > _HEAD:
                        return None
                    continue
                head, rest = rest[: start.end()], rest[start.end() :]
                boundary = re.compile(rb"\}\s*,\s*(?=\{\s*" + key[1] + rb"\s*:)")
            if len(rest) < _BATCH:
                continue
            cut = _last_boundary(rest, boundary)
            if cut is not None:
                rows = decode_rows(b"[%b]" % rest[: cut[0]])
                damage.budget.spend(ROWS, len(rows))
                _take(rows, nodes, parents)
                rest = rest[cut[1] :]
            elif len(rest) > _LONGEST_ROW:
                return None
        if boundary is None or damage.problems:
            return None
        tail = msgspec.json.decode(head + rest, type=TraceFile)
    except OSError as error:
        raise CrossrankError(f"{path}: cannot be read ({error.strerror or one_line(error)})") from error
    except BROKEN:
        return None
    _take(tail.nodes, nodes, parents)
    return nodes, parents, tail.schema


def _take(rows: list[Node], nodes: list[HostNode], parents: dict[int, int]) -> None:
    for row in rows:
        parent = row.parent if row.parent is not None else row.ctrl_deps or 0
        parents[row.id] = 0 if parent == row.id else parent
        if _is_kept(row.name):
            node = host_node(row, [])
            # Texts of a node are views into the chunk they came in, which must not stay.
            node.inputs, node.outputs, node.attributes = (
                text.copy() for text in (node.inputs, node.outputs, node.attributes)
            )
            nodes.append(node)


def _last_boundary(text: bytes, boundary: re.Pattern[bytes]) -> tuple[int, int] | None:
    """(end of the last row that another one follows, start of that one)."""
    window = 1 << 14
    while True:
        at = max(0, len(text) - window)
        found = [(match.start() + 1, match.end()) for match in boundary.finditer(text, at)]
        if found:
            return found[-1]
        if at == 0:
            return None
        window *= 8
