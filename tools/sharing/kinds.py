"""The rules for every kind of file: from the classes on the fields of the readers' structs, and from the tables below.
A field in neither has no rule. It is skipped and counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import msgspec
from msgspec import UnsetType, structs

from crossrank.comm import CommRecord
from crossrank.privacy import Privacy
from crossrank.recording import EXECUTION_TRACE, KINETO, LINKED, Header, Line, Ran, Wait
from crossrank.tools.graph.linking.linked_file import LinkedFile, Node
from crossrank.tools.sharing.rules import (
    LEFT_OUT,
    MOST_DEPTH,
    Rule,
    Scrubber,
    each,
    fields,
    inner_json,
    is_ours,
    keyed,
    number,
    pair,
    power_of_two,
    rule_of_class,
)
from crossrank.tools.traces.execution_trace import IO, TraceFile, TraceNode
from crossrank.tools.traces.flight.dump import GroupConfig, Moment, Progress, Raised
from crossrank.tools.traces.flight.entries import Entry
from crossrank.tools.traces.group_config import ListedGroup
from crossrank.tools.traces.kineto import DeviceArgs, DistributedInfo, Event, HostArgs, KinetoFile
from crossrank.tools.traces.nsight.markers import MarkerText
from crossrank.tools.traces.nsight.nccl import Payload
from crossrank.tools.traces.param_comms import CollectiveArgs

_TENSOR_VALUES = 6
"""Number of values of a tensor in an execution trace."""
Names = Mapping[Privacy, str]
"""Class -> names of fields, separated by commas."""

_EXTRA_FIELDS: dict[type, Names] = {
    Header: {Privacy.API: "ops"},
    Entry: {
        Privacy.NUMBER: "timeout_ms, thread_id",
        Privacy.WALL: "time_created_us",
        Privacy.THREAD: "thread_name",
    },
    Progress: {Privacy.NUMBER: "last_started_collective"},
    ListedGroup: {Privacy.NUMBER: "backend_id, group_count"},
    TraceNode: {Privacy.NUMBER: "pid"},
    Event: {Privacy.NUMBER: "id", Privacy.PHASE: "bp, s"},
    KinetoFile: {
        Privacy.NUMBER: """schemaVersion, record_shapes, with_stack, with_flops, with_modules, profile_memory,
        roctracer_version, hip_driver_version, hip_runtime_version, cuda_driver_version, cuda_runtime_version,
        cupti_version""",
        Privacy.UNIT: "displayTimeUnit",
        Privacy.MIXED: "deviceProperties",
    },
    DistributedInfo: {
        Privacy.NUMBER: "pg_count",
        Privacy.BACKEND: "backend",
        Privacy.VERSION: "nccl_version",
    },
    HostArgs: {
        Privacy.NUMBER: """Fwd thread id, Ev Idx, Op count, Python id, Python parent id, Python module id, Rank, cbid,
        cid, registers per thread, shared memory, blocks per SM, warps per SM, est. achieved occupancy %, queued,
        external id, wait_on_cuda_event_id, sort_index, memory bandwidth (GB/s), graph id, graph node id, ctx_id,
        kernel_num, context, ptr, Addr, Device Id, Device Type, Total Allocated, Total Reserved, Bytes,
        cudaGraph id, cuda_event_id, priority, device_id, ccid, grid, block""",
        Privacy.SIZE: "bytes, Nbytes, Input Dims, Input Strides, Output Dims, Output Strides",
        Privacy.TYPE: "Input type, Output type",
        Privacy.MIXED: "Concrete Inputs, Concrete Outputs",
        Privacy.MEMORY: "kind",
        Privacy.EVENT: "kernel",
        Privacy.LABEL: "labels, name",
    },
    MarkerText: {Privacy.NUMBER: "CUDA device", Privacy.SIZE: "inputs, outputs"},
    Payload: {Privacy.NUMBER: "Root", Privacy.REDUCTION: "Reduction operation"},
}
"""Struct -> fields of files that the struct does not have."""
_OBJECTS: dict[str, Names] = {
    "window": {Privacy.NUMBER: "window, step, t, threads, start, stop, every", Privacy.EDGE: "edge"},
    "clock": {Privacy.NUMBER: "t", Privacy.WALL: "wall"},
    "config": {
        Privacy.NUMBER: "print_calls, flight, hang_seconds, timing, exception_texts, nsys, ring",
        Privacy.SETTING: "emit, nvtx, on_hang, kernel",
        Privacy.FOLDER: "directory",
        Privacy.NODE: "node",
        Privacy.SERIAL: "gpu_serial",
        Privacy.VM: "vm_id",
        Privacy.MIXED: "window",
    },
    "deviceProperties": {
        Privacy.NUMBER: """id, totalGlobalMem, computeMajor, computeMinor, maxThreadsPerBlock, regsPerBlock, warpSize,
        maxThreadsPerMultiprocessor, sharedMemPerBlock, numSms, regsPerMultiprocessor, sharedMemPerBlockOptin,
        sharedMemPerMultiprocessor, maxSharedMemoryPerMultiProcessor""",
        Privacy.DEVICE_NAME: "name",
    },
    "end": {
        Privacy.NUMBER: "step, calls, records, dropped, unwritten, filtered, spans, spans_dropped, errors",
        Privacy.REASON: "reason",
        Privacy.MESSAGE: "blind_spots",
        Privacy.MIXED: "exceptions",
    },
    "gpu": {
        Privacy.NUMBER: "index, memory, sms, compute_capability, major, minor, power_w",
        Privacy.DEVICE_NAME: "name",
        Privacy.VERSION: "driver",
        Privacy.UUID: "uuid",
        Privacy.SERIAL: "serial",
        Privacy.PCI: "pci, pci_id, pci_bus_id, bus_id",
        Privacy.FABRIC: "fabric_cluster, fabric_clique",
    },
    "step": {Privacy.NUMBER: "step, t"},
}
"""Name of a `MIXED` field that is an object -> its fields."""
_ATTRIBUTES: Names = {
    Privacy.NUMBER: """rf_id, fw_parent, seq_id, scope, tid, fw_tid, tensor_range, pg_size, global_rank_start,
    global_rank_stride""",
    Privacy.SIZE: "comm_size, in_msg_nelems, out_msg_nelems, in_split_size, out_split_size",
    Privacy.OP_SCHEMA: "op_schema",
    Privacy.SETTING: "kernel_backend",
    Privacy.PATH: "kernel_file",
    Privacy.GROUP: "pg_name, pg_desc",
    Privacy.API: "collective_name",
    Privacy.DTYPE: "dtype",
}
_COUNTER_NAMES = {
    CommRecord: "call",
    MarkerText: "marker",
    Ran: "wait",
    Raised: "exception",
    DistributedInfo: "distributedInfo",
}
"""Struct -> name under which its fields without a rule are counted. Default: the struct's own name."""
WITHOUT_CLASS: list[str] = []
"""Fields of structs without a class, which have no rule. There should be none."""


def listed(names: Names) -> dict[str, Rule]:
    """Return the rules of fields that no struct has.

    >>> list(listed({Privacy.NUMBER: "a b,  c"}))
    ['a b', 'c']
    """
    rules = {}
    for privacy, several in names.items():
        for name in map(str.strip, several.split(",")):
            rules[name] = _MIXED[name] if privacy is Privacy.MIXED else rule_of_class(privacy)
    return rules


def declared(*several: type[msgspec.Struct], inside: Sequence[type] = ()) -> dict[str, Rule]:
    """Return the rules of the fields of structs. `inside` are the structs that contain these."""
    rules: dict[str, Rule] = {}
    for struct in several:
        rules |= listed(_EXTRA_FIELDS.get(struct, {}))
        for one in structs.fields(struct):
            rule = _rule_of(one.type, one.encode_name, (*inside, struct))
            if rule is None:
                WITHOUT_CLASS.append(f"{struct.__name__}.{one.name}")
            else:
                rules[one.encode_name] = rule
    return rules


def _rule_of(kind: Any, name: str, inside: Sequence[type] = ()) -> Rule | None:
    """Return the rule for values of type `kind` in a field `name`; None if their class is unknown."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if inside.count(kind) > 1:  # members of a call have no members
            return lambda value, scrubber: LEFT_OUT
        return fields(_COUNTER_NAMES.get(kind, kind.__name__.lower()), declared(kind, inside=inside))
    if kind is bool:
        return rule_of_class(Privacy.NUMBER)
    outer, inner = get_origin(kind), get_args(kind)
    if outer is Literal:
        return lambda value, scrubber: value if value in inner else LEFT_OUT
    if outer is Annotated:
        for one in reversed(kind.__metadata__):
            if isinstance(one, Privacy):
                return _MIXED.get(name) if one is Privacy.MIXED else rule_of_class(one)
        inner = inner[:1]
    rules = [_rule_of(one, name, inside) for one in inner if one not in (NoneType, UnsetType, ...)]
    if not rules or None in rules:
        return None
    known = cast("list[Rule]", rules)
    if outer in (Annotated, Union, UnionType):
        return known[0] if len(known) == 1 else None
    if outer is dict:
        return keyed(*known)
    return each(known[0]) if len(known) == 1 else pair(known)


def _list_or_object(rule: Rule) -> Rule:
    """Return the rule for a list, or for an object with the names of groups as keys."""
    by_name = keyed(rule_of_class(Privacy.GROUP), rule)
    in_order = each(rule)
    return lambda value, scrubber: (by_name if isinstance(value, dict) else in_order)(value, scrubber)


def _scrub_value(given: Any, scrubber: Scrubber, depth: int = 0) -> Any:
    """Replace an input or output of an operation."""
    if isinstance(given, list):
        if depth > MOST_DEPTH:
            return LEFT_OUT
        found = [_scrub_value(one, scrubber, depth + 1) for one in given]
        found = [one for one in found if one is not LEFT_OUT]
        # A tensor: id, storage, offset, number of elements, bytes per element, device.
        if (
            scrubber.coarse
            and len(found) == _TENSOR_VALUES
            and isinstance(found[3], int)
            and isinstance(found[-1], str)
        ):
            found[3] = power_of_two(found[3])
        return found
    if not isinstance(given, str):
        return number(given, scrubber)
    for begin, rule in _JSON_VALUES.items():
        if given.startswith(begin) and (made := rule(given, scrubber)) is not LEFT_OUT:
            return made
    names = scrubber.names
    known = any(names.passes(kind, given) for kind in ("value", "op", "api", "group", "type"))
    return given if known else names.text("group", given)


def _scrub_side(value: Any, scrubber: Scrubber) -> Any:
    """Replace the inputs or outputs of an operation, in either layout of execution traces."""
    return (_scrub_value if isinstance(value, list) else _IO)(value, scrubber)


def _scrub_attribute(value: Any, scrubber: Scrubber) -> Any:
    rule = _RULES_OF_ATTRIBUTES.get(str(value.get("name"))) if isinstance(value, dict) else None
    made = rule(value.get("value"), scrubber) if rule is not None else LEFT_OUT
    if made is LEFT_OUT:
        scrubber.left_out["attribute" if rule is None else f"attribute.{value['name']}"] += 1
        if rule is None:
            return LEFT_OUT
        made = ""
    return {"name": value["name"], "type": scrubber.names.text("dtype", str(value.get("type", ""))), "value": made}


def _scrub_report(value: Any, scrubber: Scrubber, depth: int = 0) -> Any:
    """Replace the match report of a linked trace: counts by crossrank's words, and sentences about files."""
    if depth > MOST_DEPTH:
        return LEFT_OUT
    if isinstance(value, dict):
        made = {_scrub_sentence(key, scrubber): _scrub_report(one, scrubber, depth + 1) for key, one in value.items()}
        return {key: one for key, one in made.items() if one is not LEFT_OUT}
    if isinstance(value, list):
        found = [_scrub_report(one, scrubber, depth + 1) for one in value]
        return [one for one in found if one is not LEFT_OUT]
    return _scrub_sentence(value, scrubber) if isinstance(value, str) else number(value, scrubber)


def _scrub_sentence(text: str, scrubber: Scrubber) -> str:
    return text if is_ours(text) else scrubber.names.range(text)


_MIXED: dict[str, Rule] = {
    **dict.fromkeys(("values", "Concrete Inputs", "Concrete Outputs"), _scrub_value),
    **dict.fromkeys(("inputs", "outputs"), _scrub_side),
    "attrs": each(_scrub_attribute),
    "match": _scrub_report,
}
"""Name of a `MIXED` field -> its rule."""
_RULES_OF_ATTRIBUTES = listed(_ATTRIBUTES)
_IO = fields("io", declared(IO))
_GROUP = fields("pg_config", declared(ListedGroup, GroupConfig))
_MIXED["pg_config"] = _list_or_object(_GROUP)
_MIXED["exceptions"] = each(fields("exception", declared(Raised)))
_MIXED["args"] = fields("args", declared(HostArgs, DeviceArgs, CollectiveArgs))
for _name, _names in _OBJECTS.items():
    _MIXED[_name] = fields(_name, listed(_names))
_MIXED["deviceProperties"] = each(_MIXED["deviceProperties"])

RECORD = fields("call", declared(CommRecord))
_JSON_VALUES = {"[{": inner_json(each(_GROUP)), '{"op":': inner_json(RECORD)}
"""Start of a JSON value -> its rule: torch's list of groups, or a call in the text of crossrank's range."""
COMMS_LINES = declared(Line) | {"wait": fields("wait", declared(Wait)), "ran": fields("wait", declared(Ran))}
"""Kind of line in a comms file -> its rule, except for `RECORD`."""
MARKER = fields("marker", declared(MarkerText, Payload))
"""The text of a range: of crossrank, of an older shim, or the payload of NCCL."""
FLIGHT = fields(
    "dump",
    {
        **listed({Privacy.NUMBER: "rank", Privacy.VERSION: "version, comm_lib_version, nccl_version"}),
        "pg_config": _MIXED["pg_config"],
        "pg_status": _list_or_object(fields("pg_status", declared(Progress))),
        "entries": each(fields("entry", declared(Entry))),
        "crossrank": fields("crossrank", declared(Moment)),
    },
)
ROWS = {
    KINETO: ("traceEvents", fields("event", declared(Event))),
    **dict.fromkeys((EXECUTION_TRACE, LINKED), ("nodes", fields("node", declared(Node, TraceNode)))),
}
"""Kind of file -> name and rule of its rows."""
HEADS = {KINETO: declared(KinetoFile), EXECUTION_TRACE: declared(TraceFile), LINKED: declared(LinkedFile)}
"""Kind of file -> its other fields."""
