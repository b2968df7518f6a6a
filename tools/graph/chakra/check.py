"""Does a Chakra file keep the contract of ASTRA-sim's feeders, and can ASTRA-sim run all of it?

The newer feeder takes `data_deps` and `ctrl_deps` together: their union must have no cycle and name only nodes of
the file. Both need certain attributes of communication nodes, and both take a group's name for an integer. Of what
they accept ASTRA-sim runs a part (`Workload.cc`, `Statistics.cc`, `Sys.cc`): at the rest it stops, or ends without a
word with ranks that did not finish. A file is read as a stream; only a bit for each id is kept, and the edges only of
a file whose nodes are not in order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath

import msgspec

from crossrank.errors import CrossrankError
from crossrank.tools.graph.chakra import et_def_pb2 as pb
from crossrank.tools.graph.chakra.framing import read_trace
from crossrank.tools.traces.json_document import parse

# What a node of each type needs, as (attribute, kinds that a feeder reads); the first kind suits both generations.
REQUIRED: dict[int, tuple[tuple[str, tuple[str, ...]], ...]] = {
    pb.COMM_COLL_NODE: (("comm_type", ("int64_val",)), ("comm_size", ("int64_val",))),
    pb.COMM_SEND_NODE: (
        ("comm_dst", ("int32_val",)),
        ("comm_size", ("int64_val",)),
        ("comm_tag", ("int32_val",)),
    ),
    pb.COMM_RECV_NODE: (
        ("comm_src", ("int32_val",)),
        ("comm_size", ("int64_val",)),
        ("comm_tag", ("int32_val",)),
    ),
    pb.MEM_LOAD_NODE: (("tensor_size", ("uint64_val",)),),
    pb.MEM_STORE_NODE: (("tensor_size", ("uint64_val",)),),
}
RUN_BY_ASTRA_SIM = frozenset((pb.ALL_REDUCE, pb.ALL_TO_ALL, pb.ALL_GATHER, pb.REDUCE_SCATTER, pb.BROADCAST))
CHUNKS = 4
"""`preferred-dataset-splits` of ASTRA-sim's own system files; an all_gather of fewer bytes never ends there."""
_TYPES = {number: name for name, number in pb.NodeType.items()}
_ENDS = {pb.COMM_SEND_NODE: ("comm_src", "comm_dst"), pb.COMM_RECV_NODE: ("comm_dst", "comm_src")}
"""Type of a message -> the attributes with the rank itself and the other one."""
_LOWER = "convert with --lower astra-sim"
_ON_HOST = "a computation on the host: ASTRA-sim reports no overlap where there is one; --nodes gpu leaves them out"
Groups = Mapping[str, Sequence[int]]
"""Number -> global ranks, as the group file has it."""
_INTEGER = re.compile(r"(?:u?int|s?fixed|sint)(?:32|64)_val")
_COMMUNICATES = frozenset((pb.COMM_COLL_NODE, *_ENDS))
_RANK = re.compile(r"\.(\d+)\.et(?:\.gz|\.zst)?$")
_RUN = 1 << 9


@dataclass(kw_only=True)
class Checked:
    """What was found in one file."""

    path: str
    nodes: int = 0
    types: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    """What breaks the contract -> how often."""
    first: dict[str, str] = field(default_factory=dict)
    """Where each was found first."""
    notes: dict[str, int] = field(default_factory=dict)
    """What only some readers or settings mind -> how often."""

    def fault(self, what: str, where: str) -> None:
        self.faults[what] = self.faults.get(what, 0) + 1
        self.first.setdefault(what, where)

    def note(self, what: str) -> None:
        self.notes[what] = self.notes.get(what, 0) + 1


class _Ids(dict[int, int]):
    """A set of ids at little more than one bit each: number of a run of ids -> which of it."""

    def has(self, number: int) -> bool:
        return bool(self.get(number // _RUN, 0) >> number % _RUN & 1)

    def add(self, number: int) -> None:
        self[number // _RUN] = self.get(number // _RUN, 0) | 1 << number % _RUN


def check(path: str, groups: Groups | None = None) -> Checked:
    """Check one file; `groups` are those that the group file defines, where there is one.

    Raises `CrossrankError` where it cannot be read to its end, or has an id twice.
    """
    result = Checked(path=path)
    _, nodes = read_trace(path)
    rank = _RANK.search(PurePosixPath(path).name)
    if rank is None:
        result.note("the name does not end in .RANK.et, by which ASTRA-sim finds a rank's file")
    seen = _Ids()
    later: dict[int, str] = {}
    open_ends: dict[int, str] = {}  # messages that nothing has waited for so far
    ordered = True
    for offset, node in nodes:
        where = f"node {node.id} ({node.name[:60]}) at byte {offset}"
        if seen.has(node.id):
            raise CrossrankError(f"{path}: {where} has the id of {_place(path, node.id)}; convert it anew")
        sources = (*node.ctrl_deps, *node.data_deps)
        ordered = ordered and all(seen.has(source) for source in sources)
        seen.add(node.id)
        if later.pop(node.id, None) is None and node.type in _ENDS:
            open_ends[node.id] = where
        result.nodes += 1
        kind = _TYPES.get(node.type) or f"type {node.type}"
        result.types[kind] = result.types.get(kind, 0) + 1
        for source in sources:
            if open_ends:
                open_ends.pop(source, None)
            if not seen.has(source):
                later.setdefault(source, where)
        _check_node(node, where, int(rank[1]) if rank else None, groups, result)
    for source, where in later.items():
        result.fault("a dependency names a node that is not in the file", f"{where} waits for {source}")
    if _ON_HOST in result.notes:
        for where in open_ends.values():
            result.fault(
                "a message that nothing waits for, in a file with host nodes: ASTRA-sim stops where a rank ends with "
                f"one; {_LOWER}, or with --nodes gpu",
                where,
            )
    # In a file whose nodes all follow what they wait for there is no cycle.
    if not ordered:
        if cycle := _cycle(path):
            result.fault("dependencies form a cycle", f"nodes {' <- '.join(map(str, cycle[:8]))}")
        result.note("nodes stand before what they wait for: an older feeder keeps all of them in memory")
    return result


def _check_node(node: pb.Node, where: str, rank: int | None, groups: Groups | None, result: Checked) -> None:
    if node.type == pb.COMP_NODE:
        if any(attribute.bool_val for attribute in node.attr if attribute.name == "is_cpu_op"):
            result.note(_ON_HOST)
        return
    kinds = {attribute.name: attribute.WhichOneof("value") for attribute in node.attr}
    values = {a.name: getattr(a, kind) for a in node.attr if (kind := a.WhichOneof("value"))}
    for name, wanted in REQUIRED.get(node.type, ()):
        if name not in kinds:
            result.fault(f"a {_TYPES[node.type]} has no {name}", where)
        elif kinds[name] not in wanted:
            if _INTEGER.fullmatch(kinds[name] or ""):
                result.note(f"{name} is {kinds[name]}, the older feeder reads {wanted[0]}")
            else:
                result.fault(f"{name} is {kinds[name]}, not {wanted[0]}", where)
    if node.type in _COMMUNICATES:
        if values.get("is_cpu_op"):
            result.fault("a communication node has is_cpu_op true, at which ASTRA-sim stops", where)
        _check_group(values.get("pg_name", ""), groups, where, result)
    for name in ("comm_size", "comm_src", "comm_dst"):
        if isinstance(values.get(name), int) and values[name] < 0:
            result.fault(f"{name} is negative", where)
    _check_runs(node, values, groups, where, result)
    if node.type in _ENDS and rank is not None:
        own, other = _ENDS[node.type]
        if values.get(own, rank) != rank:
            result.fault(f"{own} is not the rank of the file", where)
        if values.get(other) == rank:
            result.fault(f"a message of a rank to itself, at which ASTRA-sim stops; {_LOWER}", where)
    if node.type == pb.METADATA_NODE:
        if not _lists_groups(node):
            result.fault("a metadata node does not list groups as the feeder parses them", where)
        result.fault(
            "a METADATA_NODE, at which ASTRA-sim's statistics stop; convert without --group-node and give it the "
            "groups with --comm-group-configuration",
            where,
        )


def _check_runs(
    node: pb.Node, values: Mapping[str, object], groups: Groups | None, where: str, result: Checked
) -> None:
    """Whether ASTRA-sim runs a communication node to its end."""
    number, size, pg_name = values.get("comm_type"), values.get("comm_size"), values.get("pg_name")
    if node.type == pb.COMM_COLL_NODE and isinstance(number, int) and number not in RUN_BY_ASTRA_SIM:
        known = number in pb.CollectiveCommType.values()
        kind = pb.CollectiveCommType.Name(number) if known else f"comm_type {number}"
        result.fault(f"ASTRA-sim cannot run {kind}; {_LOWER}" if known else f"ASTRA-sim cannot run {kind}", where)
    if number == pb.ALL_GATHER and isinstance(size, int) and 0 <= size < CHUNKS:
        result.fault(f"an ALL_GATHER of less than {CHUNKS} B, which never ends in ASTRA-sim; {_LOWER}", where)
    if node.type in _ENDS and size == 0:
        result.fault(f"a message of 0 B, at which ASTRA-sim stops; {_LOWER}", where)
    if node.type == pb.COMM_COLL_NODE and groups is not None and len(groups.get(str(pg_name), (0, 1))) == 1:
        result.fault(f"a collective of a group of one rank, which never ends in ASTRA-sim; {_LOWER}", where)


def _check_group(pg_name: object, groups: Groups | None, where: str, result: Checked) -> None:
    if pg_name in ("", "0"):
        return
    if not (isinstance(pg_name, str) and re.fullmatch(r"[0-9]{1,10}", pg_name) and int(pg_name) < 1 << 31):
        result.fault("pg_name is no integer, at which ASTRA-sim stops", f"{where}: {pg_name!r}")
    elif groups is not None and pg_name not in groups:
        result.fault("pg_name is not in the group file", f"{where}: {pg_name!r}")


class _ListedGroup(msgspec.Struct):
    pg_name: str
    ranks: list[int]


def _lists_groups(node: pb.Node) -> bool:
    """The feeder strips two characters from each end of `inputs.values` and parses JSON."""
    groups = parse(node.inputs.values[2:-2], list[_ListedGroup])
    return groups is not None and all(group.pg_name.isdecimal() for group in groups)


def _place(path: str, node_id: int) -> str:
    for offset, node in read_trace(path)[1]:
        if node.id == node_id:
            return f"the one ({node.name[:60]}) at byte {offset}"
    raise AssertionError("unreachable")


def _cycle(path: str) -> list[int]:
    """The nodes of one cycle, each waiting for the next; empty where there is none. Takes memory for all edges."""
    try:
        TopologicalSorter({node.id: [*node.ctrl_deps, *node.data_deps] for _, node in read_trace(path)[1]}).prepare()
    except CycleError as error:
        nodes: list[int] = error.args[1]
        return nodes[:0:-1]
    return []
