"""Execution traces of PyTorch (`torch.profiler.ExecutionTraceObserver`), schemas 1.0.1 to 1.1.1.

Up to 1.0.1 a node is flat (`parent`, `rf_id`, `input_shapes`, …); from 1.0.2 on it has `ctrl_deps`, `inputs`, `outputs`
and a list `attrs`. The fields of a node show its layout. Inputs, outputs and attributes are kept as JSON text, because
most of them are passed on without decoding.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, Any

import msgspec

from crossrank.budget import Budget
from crossrank.comm import Amount, Count, Group, Number
from crossrank.errors import BROKEN, CrossrankError
from crossrank.privacy import Privacy
from crossrank.tools.traces.group_config import read_groups
from crossrank.tools.traces.json_document import Document, Shape, parse

FLAT_SCHEMA = "1.0.1"
NEWEST_SCHEMA = "1.1.1-chakra.0.0.4"
FIRST_NESTED_SCHEMA = "1.0.2-chakra.0.0.4"
"""The oldest schema with nested nodes. It has every field of a flat node."""
KNOWN_SCHEMAS = (FLAT_SCHEMA, "1.0.2", "1.0.3", "1.0.4", "1.1.0", "1.1.1")

_EMPTY_LIST = msgspec.Raw(b"[]")
_NO_IO = b'{"values":[],"shapes":[],"types":[]}'
_NOTHING = msgspec.Raw(_NO_IO)
_NO_ATTRIBUTES = msgspec.Raw(b"")
_NO_SCHEMA = msgspec.Raw(b'""')


class HostOp(msgspec.Struct, gc=False):
    """One operation on the host, described as in the newest schema. Its times come from a Kineto trace."""

    id: int
    name: str
    caller: int
    """Id of the calling node; 0 if there is none. It may be larger than `id`. A linked trace replaces the caller in the
    file if that is impossible."""
    rf_id: int
    """Id of the RecordFunction, in the order of starts; 0 for the roots, which have none."""
    tid: int
    """Thread number of the observer, from 1; not the system's thread id."""
    seq_id: int = -1
    """Autograd's sequence number: a backward node has the number of its forward operation. -1 if there is none."""
    fw_parent: int = 0
    fw_tid: int = 0
    scope: int = 0
    inputs: msgspec.Raw = _NOTHING
    """JSON object of `values`, `shapes`, `types` and, from 1.1.1 on, `strides`."""
    outputs: msgspec.Raw = _NOTHING
    attributes: msgspec.Raw = _NO_SCHEMA
    """As in the file: see `attribute_text`."""
    start_ns: int | None = None
    """None if no Kineto event matched; the other times are then unknown too."""
    duration_ns: int = 0
    exclusive_ns: int = 0
    """Duration without the operations that it called on the same thread."""
    blocked_ns: int = 0
    """Part of the exclusive time in a runtime call that waited for the GPU, if an edge shows what it waited for."""
    is_work: bool = False
    """The range of a Work (`gloo:all_reduce`): started by its thread, but run elsewhere."""

    @property
    def end_ns(self) -> int:
        return (self.start_ns or 0) + self.duration_ns


@dataclass(frozen=True, kw_only=True)
class ExecutionTrace:
    """Operations of one rank on the host."""

    path: str
    sha256: str
    schema: str
    pid: int | None
    time: str | None
    """Local time at which the trace was written, to the second: `2023-09-07 16:09:59`."""
    start_ts: int | None
    """Milliseconds of the steady clock."""
    finish_ts: int | None
    nodes: list[HostOp]
    """Ordered by id. Ids are unique; every caller exists or is 0."""
    groups: tuple[Group, ...]
    """Groups that `## process_group:init ##` nodes list."""
    orphans: frozenset[int]
    """Ids of the nodes whose caller is not in the file."""
    warnings: tuple[str, ...]
    damage: tuple[str, ...]
    """Parts of the file that could not be read."""


class IO(msgspec.Struct, gc=False):
    """Inputs or outputs of a node, decoded."""

    values: Annotated[list[Any], Privacy.MIXED] = []
    shapes: Annotated[list[Any], Privacy.SIZE] = []
    types: Annotated[list[str], Privacy.TYPE] = []
    strides: Annotated[list[Any], Privacy.SIZE] = []
    """From 1.1.1 on."""


class _Attribute(msgspec.Struct, gc=False):
    name: str
    value: Any = None


class TraceNode(msgspec.Struct, gc=False):
    """A node of either layout as in the file."""

    id: Annotated[Amount, Privacy.NUMBER]
    name: Annotated[str, Privacy.EVENT]
    ctrl_deps: Number | None = None
    attrs: Annotated[msgspec.Raw, Privacy.MIXED] = _NO_ATTRIBUTES
    inputs: Annotated[msgspec.Raw, Privacy.MIXED] = _NOTHING
    outputs: Annotated[msgspec.Raw, Privacy.MIXED] = _NOTHING
    parent: Number | None = None
    rf_id: Annotated[int, Privacy.NUMBER] = 0
    fw_parent: Annotated[int, Privacy.NUMBER] = 0
    seq_id: Annotated[int, Privacy.NUMBER] = -1
    scope: Annotated[int, Privacy.NUMBER] = 0
    tid: Annotated[int, Privacy.NUMBER] = 0
    fw_tid: Annotated[int, Privacy.NUMBER] = 0
    op_schema: Annotated[msgspec.Raw, Privacy.OP_SCHEMA] = _NO_SCHEMA
    input_shapes: Annotated[msgspec.Raw, Privacy.SIZE] = _EMPTY_LIST
    input_types: Annotated[msgspec.Raw, Privacy.TYPE] = _EMPTY_LIST
    output_shapes: Annotated[msgspec.Raw, Privacy.SIZE] = _EMPTY_LIST
    output_types: Annotated[msgspec.Raw, Privacy.TYPE] = _EMPTY_LIST


class TraceFile(msgspec.Struct):
    nodes: list[TraceNode]
    schema: Annotated[str, Privacy.VERSION] = ""
    pid: Annotated[Count, Privacy.NUMBER] | None = None
    time: Annotated[str, Privacy.DAY] | None = None
    start_ts: Annotated[Count, Privacy.NUMBER] | None = None
    finish_ts: Annotated[Count, Privacy.NUMBER] | None = None


_SHAPE = Shape(what="an execution trace", content=TraceFile, rows="nodes", row=TraceNode)
_DEEPEST = 64
"""More callers than there are between two nodes that are kept."""
_FLAT_ATTRIBUTES = (
    b'[{"name":"rf_id","type":"uint64","value":%d},{"name":"fw_parent","type":"uint64","value":%d},'
    b'{"name":"seq_id","type":"int64","value":%d},{"name":"scope","type":"uint64","value":%d},'
    b'{"name":"tid","type":"uint64","value":%d},{"name":"fw_tid","type":"uint64","value":%d},'
    b'{"name":"op_schema","type":"string","value":%b}]'
)
_id_of = attrgetter("id")
_decode_attributes = msgspec.json.Decoder(list[_Attribute]).decode


def read_execution_trace(path: str, keeps: Callable[[str], bool] | None = None) -> ExecutionTrace:
    """Read one rank's execution trace. With `keeps`, read only the nodes with names that it accepts; the nearest of
    these above a node becomes its caller.

    Raises `CrossrankError` if nothing of it can be used.
    """
    nodes = _Nodes(keeps)
    document = Document(path, _SHAPE, nodes.take)
    file = document.content
    if not nodes.count:
        raise CrossrankError(f"{path}: has no nodes; record a window with a training step")
    damage = list(document.damage)
    if nodes.odd:
        damage.append(f"{len(nodes.odd)} attribute(s) are not as the schema has them (first: of node {nodes.odd[0]})")
    repairs, orphans = _repair(nodes.kept())
    return ExecutionTrace(
        path=path,
        sha256=document.sha256,
        schema=file.schema,
        pid=file.pid,
        time=file.time,
        start_ts=file.start_ts,
        finish_ts=file.finish_ts,
        nodes=nodes.nodes,
        groups=_groups_of(nodes.nodes, document.budget),
        orphans=orphans,
        warnings=(*_schema_warnings(file.schema), *repairs),
        damage=tuple(damage),
    )


class _Nodes:
    """Collects the nodes of a file."""

    def __init__(self, keeps: Callable[[str], bool] | None) -> None:
        self.nodes: list[HostOp] = []
        self.count = 0
        self.odd: list[int] = []
        """Ids of the nodes with broken attributes."""
        self._keeps = keeps
        self._parents: dict[int, int] = {}
        self._schemas: dict[bytes, msgspec.Raw] = {}

    def take(self, rows: list[TraceNode]) -> None:
        self.count += len(rows)
        for row in rows:
            if self._keeps is not None:
                self._parents[row.id] = _parent(row)
                if not self._keeps(row.name):
                    continue
            node = _host_op(row)
            if row.attrs is _NO_ATTRIBUTES:
                node.attributes = self._schemas.setdefault(bytes(row.op_schema), row.op_schema.copy())
            elif not read_attributes(node):
                self.odd.append(node.id)
            if self._keeps is not None:  # decoded texts are views that keep the whole text in memory
                node.inputs, node.outputs = node.inputs.copy(), node.outputs.copy()
                node.attributes = node.attributes.copy()
            self.nodes.append(node)

    def kept(self) -> list[HostOp]:
        ids = {node.id for node in self.nodes} if self._keeps is not None else set()
        for node in self.nodes if self._keeps is not None else ():
            for _ in range(_DEEPEST):  # ids may form a cycle in a broken file
                if node.caller in ids or not node.caller:
                    break
                node.caller = self._parents.get(node.caller, 0)
            else:
                node.caller = 0
        return self.nodes


def _parent(node: TraceNode) -> int:
    parent = (node.parent if node.parent is not None else node.ctrl_deps) or 0
    return 0 if parent == node.id else parent  # torch's own root is its own parent


def _host_op(node: TraceNode) -> HostOp:
    nested = node.attrs is not _NO_ATTRIBUTES
    return HostOp(
        id=node.id,
        name=sys.intern(node.name),
        caller=_parent(node),
        rf_id=node.rf_id,
        tid=node.tid,
        seq_id=node.seq_id,
        fw_parent=node.fw_parent,
        fw_tid=node.fw_tid,
        scope=node.scope,
        inputs=node.inputs if nested else _io_text(node.inputs, node.input_shapes, node.input_types),
        outputs=node.outputs if nested else _io_text(node.outputs, node.output_shapes, node.output_types),
        attributes=node.attrs,
    )


def _io_text(values: msgspec.Raw, shapes: msgspec.Raw, types: msgspec.Raw) -> msgspec.Raw:
    text = b'{"values":%b,"shapes":%b,"types":%b}' % (values, shapes, types)
    return _NOTHING if text == _NO_IO else msgspec.Raw(text)


def read_attributes(node: HostOp) -> bool:
    """Set the fields that nested nodes have as attributes. Return False if one does not fit the schema."""
    try:
        given = _decode_attributes(node.attributes)
    except BROKEN:
        node.attributes = _EMPTY_LIST
        return False
    good = True
    for attribute in given:
        if attribute.name in _NUMBERS:
            if isinstance(attribute.value, int) and -_LARGEST < attribute.value < _LARGEST:
                setattr(node, attribute.name, attribute.value)
            else:
                good = False
    return good


def attributes(node: HostOp) -> dict[str, Any]:
    """The attributes of a node by name."""
    return {attribute.name: attribute.value for attribute in parse(attribute_text(node), list[_Attribute]) or ()}


def io(text: msgspec.Raw) -> IO:
    """`inputs` or `outputs` of a node, decoded; empty if they do not fit the schema."""
    return parse(text, IO) or IO()


class _Texts(msgspec.Struct, gc=False):
    values: msgspec.Raw = _EMPTY_LIST
    shapes: msgspec.Raw = _EMPTY_LIST
    types: msgspec.Raw = _EMPTY_LIST


def io_texts(text: msgspec.Raw) -> tuple[str, str, str]:
    """Values, shapes and types of `inputs` or `outputs`, each as JSON text."""
    if text is _NOTHING:
        return "[]", "[]", "[]"
    try:
        given = _decode_texts(text)
    except BROKEN:
        given = _Texts()
    values, shapes, types = given.values, given.shapes, given.types
    return str(values, "utf-8", "replace"), str(shapes, "utf-8", "replace"), str(types, "utf-8", "replace")


_decode_texts = msgspec.json.Decoder(_Texts, strict=False).decode


def attribute_text(node: HostOp) -> msgspec.Raw:
    """The attributes of a node of either layout as a JSON list of `{"name", "type", "value"}`."""
    schema = bytes(node.attributes)
    if not schema.startswith(b'"'):
        return node.attributes
    return msgspec.Raw(
        _FLAT_ATTRIBUTES % (node.rf_id, node.fw_parent, node.seq_id, node.scope, node.tid, node.fw_tid, schema)
    )


_NUMBERS = frozenset(("rf_id", "tid", "seq_id", "fw_parent", "fw_tid", "scope"))
_LARGEST = 1 << 64


def _schema_warnings(schema: str) -> list[str]:
    """The warning for an unknown schema."""
    version = re.match(r"\d+\.\d+\.\d+", schema)
    if version is None:
        return [f"schema {schema!r} is not a version; read by the fields that exist"]
    if version[0] in KNOWN_SCHEMAS:
        return []
    return [f"schema {schema!r} is not known, read as {NEWEST_SCHEMA!r}; check what it links"]


def _repair(nodes: list[HostOp]) -> tuple[list[str], frozenset[int]]:
    """Make ids unique, and every caller an existing node, in place. Return (a warning for each change, the ids of the
    nodes whose caller does not exist)."""
    warnings = []
    nodes.sort(key=_id_of)
    ids = {node.id for node in nodes}
    if len(ids) < len(nodes):
        doubled = [node for before, node in pairwise(nodes) if node.id == before.id]
        named = ", ".join(str(node.id) for node in doubled[:3])
        first = nodes[-1].id + 1
        for fresh, node in enumerate(doubled, start=first):
            node.id = fresh
            ids.add(fresh)
        warnings.append(
            f"{len(doubled)} node(s) have an id that another node has ({named}{', …' if len(doubled) > 3 else ''}); "
            f"the later ones are numbered from {first} on"
        )
        nodes.sort(key=_id_of)
    lost = [node for node in nodes if node.caller and node.caller not in ids]
    if lost:
        threads = {node.tid: node.id for node in reversed(nodes) if is_thread_root(node)}
        for node in lost:
            node.caller = threads.get(node.tid, 0)
        warnings.append(
            f"{len(lost)} node(s) name a parent that is not in the file (first: node {lost[0].id}; an operation that "
            "was still open when the trace ended is not written); they are put under the root of their thread"
        )
    return warnings + _break_cycles(nodes), frozenset(node.id for node in lost)


def _break_cycles(nodes: list[HostOp]) -> list[str]:
    if all(node.caller < node.id for node in nodes):
        return []  # no cycle: ids become smaller from caller to caller
    by_id = {node.id: node for node in nodes}
    settled: set[int] = {0}
    broken = []
    for node in nodes:
        path: dict[int, HostOp] = {}
        at = node.id
        while at not in settled and at not in path:
            path[at] = by_id[at]
            at = path[at].caller
        if at in path:
            last = next(reversed(path.values()))
            last.caller = 0
            broken.append(last.id)
        settled.update(path)
    if not broken:
        return []
    return [f"{len(broken)} chain(s) of parents form a cycle (first: at node {broken[0]}); cut there"]


def is_thread_root(node: HostOp) -> bool:
    """Whether a node represents a whole thread."""
    return node.name.startswith("[pytorch|profiler|") and node.name.endswith("|thread]")


def is_group_node(name: str) -> bool:
    """Whether a node lists process groups."""
    return "process_group:init" in name


def _groups_of(nodes: list[HostOp], budget: Budget) -> tuple[Group, ...]:
    """The groups that `## process_group:init ##` nodes list. Raises `BudgetError` if they have too many members."""
    # The observer limits the length of strings, so a text may be cut off; others may have another format.
    configs = (value for node in nodes if is_group_node(node.name) for value in io(node.inputs).values)
    groups = (group for config in configs for group in read_groups(parse(config, list[Any]), budget))
    return tuple({group.pg: group for group in groups}.values())
