"""Checks whether a Chakra file keeps the contract of ASTRA-sim's feeders, and whether ASTRA-sim can run all of it.

The newer feeder takes `data_deps` and `ctrl_deps` together: their union must have no cycle and name only nodes of the
file. Both feeders need certain attributes of communication nodes, and both read a group's name as an integer.
ASTRA-sim runs only a part of what they accept (`Workload.cc`, `Statistics.cc`, `Sys.cc`). At the rest it stops, or it
ends silently with unfinished ranks. The file is read as a stream. The check keeps one bit for each id, and the edges
only if nodes are not in order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath
from typing import Any

import msgspec

from crossrank.errors import CrossrankError
from crossrank.text import printable
from crossrank.tools.graph.chakra import et_def_pb2 as pb
from crossrank.tools.graph.chakra.framing import KINDS, read_trace
from crossrank.tools.traces.json_document import parse

REQUIRED: dict[int, tuple[str, ...]] = {
    pb.COMM_COLL_NODE: ("comm_type", "comm_size"),
    pb.COMM_SEND_NODE: ("comm_dst", "comm_size", "comm_tag"),
    pb.COMM_RECV_NODE: ("comm_src", "comm_size", "comm_tag"),
    pb.MEM_LOAD_NODE: ("tensor_size",),
    pb.MEM_STORE_NODE: ("tensor_size",),
}
"""Type of a node -> the attributes that both generations of feeders need, with the kinds in `KINDS`."""
RUN_BY_ASTRA_SIM = frozenset((pb.ALL_REDUCE, pb.ALL_TO_ALL, pb.ALL_GATHER, pb.REDUCE_SCATTER, pb.BROADCAST))
CHUNKS = 4
"""`preferred-dataset-splits` of ASTRA-sim's own system files. An all_gather of fewer bytes never ends there."""
Groups = Mapping[str, Sequence[int]]
"""Number -> global ranks, as in the group file."""
TYPES: dict[int, str] = {number: name for name, number in pb.NodeType.items()}

_COLLECTIVES: dict[int, str] = {number: name for name, number in pb.CollectiveCommType.items()}
_RANK_ATTRIBUTES = {pb.COMM_SEND_NODE: ("comm_src", "comm_dst"), pb.COMM_RECV_NODE: ("comm_dst", "comm_src")}
"""Type of a message -> the attributes with this rank and the other rank."""
_COMMUNICATION_TYPES = frozenset((pb.COMM_COLL_NODE, *_RANK_ATTRIBUTES))
_LOWER_HINT = "convert with --lower astra-sim"
_HOST_NOTE = "a computation on the host: ASTRA-sim reports no overlap if there is one; --nodes gpu skips them"
_INTEGER = re.compile(r"(?:u?int|s?fixed|sint)(?:32|64)_val")
_RANK = re.compile(r"\.(\d+)\.et(?:\.gz|\.zst)?$")
_IDS_PER_RUN = 512


@dataclass(kw_only=True)
class Checked:
    """The findings in one file."""

    path: str
    nodes: int = 0
    types: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    """What breaks the contract -> how often."""
    first: dict[str, str] = field(default_factory=dict)
    """The first place of each fault."""
    notes: Counter[str] = field(default_factory=Counter)
    """What only some readers or settings reject -> how often."""
    collectives: dict[str, Counter[str]] = field(default_factory=dict)
    """Name of a group -> its collectives with the bytes that this rank contributes -> how often."""

    def fault(self, what: str, where: str) -> None:
        self.faults[what] += 1
        self.first.setdefault(what, where)


def compare(results: Sequence[Checked]) -> None:
    """Add a fault if ranks of a group contribute different amounts to its collectives. In ASTRA-sim a rank sends
    messages of its own amount, and a rank that expects another amount never takes them."""
    first: dict[str, Checked] = {}
    for result in results:
        for group, collectives in result.collectives.items():
            other = first.setdefault(group, result)
            here, there = collectives - other.collectives[group], other.collectives[group] - collectives
            if here and there:
                result.fault(
                    f"the ranks of group {group} give different amounts to a collective, which never ends in "
                    f"ASTRA-sim; {_LOWER_HINT}",
                    f"{min(here)} here and {min(there)} in {other.path}",
                )


class _IdSet(dict[int, int]):
    """A set of ids at little more than one bit each: number of a run of ids -> bits of the ids in it."""

    def has(self, number: int) -> bool:
        return bool(self.get(number // _IDS_PER_RUN, 0) >> number % _IDS_PER_RUN & 1)

    def add(self, number: int) -> None:
        self[number // _IDS_PER_RUN] = self.get(number // _IDS_PER_RUN, 0) | 1 << number % _IDS_PER_RUN


def check(path: str, groups: Groups | None = None) -> Checked:
    """Check one file. `groups` are those of the group file, if there is one.

    Raise `CrossrankError` if the file cannot be read to its end, or if an id occurs twice.
    """
    result = Checked(path=path)
    _, nodes = read_trace(path)
    match = _RANK.search(PurePosixPath(path).name)
    rank = int(match[1]) if match else None
    if rank is None:
        result.notes["the name does not end in .RANK.et, which ASTRA-sim needs"] += 1
    seen = _IdSet()
    later: dict[int, str] = {}
    open_ends: dict[int, str] = {}  # messages that no node has waited for so far
    ordered = True
    for offset, node in nodes:
        where = f"node {node.id} ({printable(node.name[:60])}) at byte {offset}"
        if seen.has(node.id):
            raise CrossrankError(f"{path}: {where} has the id of {_describe_node(path, node.id)}; convert it again")
        sources = (*node.ctrl_deps, *node.data_deps)
        ordered = ordered and all(seen.has(source) for source in sources)
        seen.add(node.id)
        if later.pop(node.id, None) is None and node.type in _RANK_ATTRIBUTES:
            open_ends[node.id] = where
        result.nodes += 1
        result.types[TYPES.get(node.type) or f"type {node.type}"] += 1
        for source in sources:
            open_ends.pop(source, None)
            if not seen.has(source):
                later.setdefault(source, where)
        if node.type != pb.COMP_NODE:
            _check_attributes(node, rank, groups, result, where)
        elif any(attribute.bool_val for attribute in node.attr if attribute.name == "is_cpu_op"):
            result.notes[_HOST_NOTE] += 1
    for source, where in later.items():
        result.fault("a dependency on a node that is not in the file", f"{where} waits for {source}")
    for where in open_ends.values() if _HOST_NOTE in result.notes else ():
        result.fault(
            "a message without a dependent node, in a file with host nodes: ASTRA-sim stops if a rank ends with "
            f"one; {_LOWER_HINT}, or with --nodes gpu",
            where,
        )
    # If all nodes follow their dependencies, there is no cycle.
    if not ordered:
        if cycle := _find_cycle(path):
            result.fault("dependencies form a cycle", f"nodes {' <- '.join(map(str, cycle[:8]))}")
        result.notes["nodes before their dependencies: an older feeder keeps all of them in memory"] += 1
    return result


def _check_attributes(node: pb.Node, rank: int | None, groups: Groups | None, result: Checked, where: str) -> None:
    kinds = {attribute.name: attribute.WhichOneof("value") or "" for attribute in node.attr}
    values = {a.name: getattr(a, kinds[a.name]) for a in node.attr if kinds[a.name]}
    for name in REQUIRED.get(node.type, ()):
        wanted = KINDS[name]
        if name not in kinds:
            result.fault(f"a {TYPES[node.type]} has no {name}", where)
        elif kinds[name] != wanted and _INTEGER.fullmatch(kinds[name]):
            result.notes[f"{name} is {kinds[name]}, the older feeder reads {wanted}"] += 1
        elif kinds[name] != wanted:
            result.fault(f"{name} is {kinds[name] or None}, not {wanted}", where)
    if node.type in _COMMUNICATION_TYPES and (fault := _check_group(values.get("pg_name", ""), groups)):
        result.fault(fault, f"{where}: {values['pg_name']!r}")
    kind, size = values.get("comm_type"), values.get("comm_size")
    if node.type == pb.COMM_COLL_NODE and isinstance(kind, int) and isinstance(size, int):
        of_group = result.collectives.setdefault(str(values.get("pg_name") or "0"), Counter())
        of_group[f"{_COLLECTIVES.get(kind, kind)} of {size} B"] += 1
    for fault in _find_faults(node, values, rank, groups):
        result.fault(fault, where)


def _find_faults(node: pb.Node, values: Mapping[str, Any], rank: int | None, groups: Groups | None) -> Iterator[str]:
    """Yield what is wrong with a node that is no computation, and why ASTRA-sim does not finish it."""
    number, size, is_collective = values.get("comm_type"), values.get("comm_size"), node.type == pb.COMM_COLL_NODE
    if node.type in _COMMUNICATION_TYPES and values.get("is_cpu_op"):
        yield "a communication node with is_cpu_op true; ASTRA-sim stops at it"
    for name in ("comm_size", "comm_src", "comm_dst"):
        if isinstance(values.get(name), int) and values[name] < 0:
            yield f"{name} is negative"
    if is_collective and isinstance(number, int) and number not in RUN_BY_ASTRA_SIM:
        known = _COLLECTIVES.get(number)
        yield f"ASTRA-sim cannot run {known}; {_LOWER_HINT}" if known else f"ASTRA-sim cannot run comm_type {number}"
    if number == pb.ALL_GATHER and isinstance(size, int) and 0 <= size < CHUNKS:
        yield f"an ALL_GATHER of less than {CHUNKS} B, which never ends in ASTRA-sim; {_LOWER_HINT}"
    if is_collective and len((groups or {}).get(str(values.get("pg_name")), ())) == 1:
        yield f"a collective in a group of one rank, which never ends in ASTRA-sim; {_LOWER_HINT}"
    if node.type in _RANK_ATTRIBUTES:
        own, other = _RANK_ATTRIBUTES[node.type]
        if size == 0:
            yield f"a message of 0 B, at which ASTRA-sim stops; {_LOWER_HINT}"
        if rank is not None and values.get(own, rank) != rank:
            yield f"{own} is not the rank of the file"
        if rank is not None and values.get(other) == rank:
            yield f"a message of a rank to itself, at which ASTRA-sim stops; {_LOWER_HINT}"
    if node.type == pb.METADATA_NODE:
        if not _lists_groups(node):
            yield "a metadata node with a list of groups that the feeder cannot parse"
        yield (
            "a METADATA_NODE, at which the statistics of ASTRA-sim stop; convert without --group-node and give it the "
            "groups with --comm-group-configuration"
        )


def _check_group(name: object, groups: Groups | None) -> str | None:
    if name in ("", "0"):
        return None
    if not (isinstance(name, str) and re.fullmatch(r"[0-9]{1,10}", name) and int(name) < 1 << 31):
        return "pg_name is not an integer; ASTRA-sim stops at it"
    return "pg_name is not in the group file" if groups is not None and name not in groups else None


class _ListedGroup(msgspec.Struct):
    pg_name: str
    ranks: list[int]


def _lists_groups(node: pb.Node) -> bool:
    """Return whether the feeder can parse the groups: JSON in `inputs.values` without two characters at each end."""
    groups = parse(node.inputs.values[2:-2], list[_ListedGroup])
    return groups is not None and all(group.pg_name.isdecimal() for group in groups)


def _describe_node(path: str, node_id: int) -> str:
    for offset, node in read_trace(path)[1]:
        if node.id == node_id:
            return f"the one ({printable(node.name[:60])}) at byte {offset}"
    raise AssertionError("unreachable")


def _find_cycle(path: str) -> list[int]:
    """Return the nodes of one cycle, each waiting for the next; empty without a cycle. Keeps all edges in memory."""
    try:
        TopologicalSorter({node.id: [*node.ctrl_deps, *node.data_deps] for _, node in read_trace(path)[1]}).prepare()
    except CycleError as error:
        nodes: list[int] = error.args[1]
        return nodes[:0:-1]
    return []
