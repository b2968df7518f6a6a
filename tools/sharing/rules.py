"""What becomes of every field of every kind of file. A field that has no rule is left out, and counted.

A rule takes a value of a decoded JSON document and gives what stands in its place, or `LEFT_OUT`. No rule but those for
numbers hands a value on that it does not know.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec

from crossrank.errors import BROKEN
from crossrank.tools.sharing.pseudonyms import Pseudonyms
from crossrank.tools.sharing.vocabulary import is_public

LEFT_OUT: Any = object()
"""In the place of a value that is not written."""
_MOST_DEPTH = 12
_TENSOR = 6
"""Values that an execution trace has of a tensor."""
_OUR_WORDS = re.compile(r"[a-z]+(?:[_ ][a-z]+){0,8}|Kineto(?: [a-z]+){0,3}|")
_EPOCH_US = 6 * 10**14
_EPOCH_NS = 6 * 10**17
"""Above these a time is one since 1970 (of 1989 and later), and not since the machine started."""


class Scrubber:
    """The names of a run, and what of one file was left out."""

    def __init__(self, names: Pseudonyms, *, coarse: bool) -> None:
        self.names = names
        self.coarse = coarse
        self.left_out: Counter[str] = Counter()
        self.damage: list[str] = []


Rule = Callable[[Any, Scrubber], Any]


def number(value: Any, scrubber: Scrubber) -> Any:
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 64 else LEFT_OUT  # JSON of ours has no larger ones
    return value if value is None or isinstance(value, float | Decimal) else LEFT_OUT


def nested(rule: Rule) -> Rule:
    """Values in lists, however deep. What has a value that is left out is left out as a whole."""

    def of_list(value: Any, scrubber: Scrubber, depth: int = 0) -> Any:
        if not isinstance(value, list | tuple):
            return rule(value, scrubber)
        if depth > _MOST_DEPTH:
            return LEFT_OUT
        found = [of_list(one, scrubber, depth + 1) for one in value]
        return LEFT_OUT if any(one is LEFT_OUT for one in found) else found

    return of_list


numbers = nested(number)


def power_of_two(count: int) -> int:
    """The nearest power of two, of equally near ones the larger.

    >>> [power_of_two(count) for count in (0, 1, 3, 5, 6, 1000, -1)]
    [0, 1, 4, 4, 8, 1024, -1]
    """
    if count < 2:
        return count
    low = 1 << (count.bit_length() - 1)
    return low if count - low < 2 * low - count else 2 * low


def size(value: Any, scrubber: Scrubber) -> Any:
    """A count of elements or bytes."""
    if isinstance(value, str):  # ROCm writes them so
        return str(size(int(value), scrubber)) if value.isdecimal() and len(value) < 20 else LEFT_OUT
    known = isinstance(value, int) and not isinstance(value, bool)
    return power_of_two(value) if known and scrubber.coarse else number(value, scrubber)


sizes = nested(size)


def counts(rule: Rule) -> Rule:
    """Numbers in lists, or JSON of such as a text: torch writes ranks and splits either way."""

    def of_either(value: Any, scrubber: Scrubber) -> Any:
        if not isinstance(value, str) or not value:
            return rule(value, scrubber)
        return inner_json(rule)(value, scrubber)

    return of_either


def text(kind: str) -> Rule:
    """A text of a kind of the vocabulary, or a name for it."""

    def rule(value: Any, scrubber: Scrubber) -> Any:
        return scrubber.names.text(kind, value) if isinstance(value, str) else number(value, scrubber)

    return rule


def name(kind: str) -> Rule:
    """A name for any text, and for any number, which may be an address or a serial number."""

    def rule(value: Any, scrubber: Scrubber) -> Any:
        if value is None:
            return None
        return scrubber.names.name(kind, str(value)) if isinstance(value, str | int | float | Decimal) else LEFT_OUT

    return rule


def our_word(value: Any, scrubber: Scrubber) -> Any:
    """A word of our own files: which of a few things something is."""
    known = isinstance(value, str) and _OUR_WORDS.fullmatch(value) and is_public(value)
    return value if known else number(value, scrubber)


def path(value: Any, scrubber: Scrubber) -> Any:
    return scrubber.names.path(value) if isinstance(value, str) else number(value, scrubber)


def place(value: Any, scrubber: Scrubber) -> Any:
    return scrubber.names.place(value) if isinstance(value, str) else number(value, scrubber)


def event_name(value: Any, scrubber: Scrubber) -> Any:
    return scrubber.names.range(value) if isinstance(value, str) else LEFT_OUT


def message(value: Any, scrubber: Scrubber) -> Any:
    return scrubber.names.message(value) if isinstance(value, str) else number(value, scrubber)


def wall(value: Any, scrubber: Scrubber) -> Any:
    """A time since 1970 in ns or us, as a number or its digits; what is too small for one stays."""
    if isinstance(value, str):
        moved = wall(int(value), scrubber) if value.isdecimal() and len(value) < 20 else LEFT_OUT
        return LEFT_OUT if moved is LEFT_OUT else str(moved)
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return number(value, scrubber)
    whole = int(value)
    if whole > _EPOCH_NS:
        return scrubber.names.wall(whole)
    return value if whole < _EPOCH_US else Decimal(value) - scrubber.names.shift_ns // 1000


def day(value: Any, scrubber: Scrubber) -> Any:
    """`2023-09-07 16:09:59`"""
    try:
        moment = datetime.datetime.strptime(value, "%Y-%m-%d %H:%M:%S")
        moved = moment - datetime.timedelta(seconds=scrubber.names.shift_ns // 1_000_000_000)
    except (TypeError, ValueError, OverflowError):
        return LEFT_OUT
    return moved.strftime("%Y-%m-%d %H:%M:%S")


def each(rule: Rule) -> Rule:
    """A list, of which each value has the rule."""

    def of_list(value: Any, scrubber: Scrubber) -> Any:
        if not isinstance(value, list | tuple):
            return number(value, scrubber)
        found = [rule(one, scrubber) for one in value]
        return [one for one in found if one is not LEFT_OUT]

    return of_list


def pair(*rules: Rule) -> Rule:
    """A list whose values have a rule each."""

    def of_list(value: Any, scrubber: Scrubber) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(rules):
            return LEFT_OUT
        found = [rule(one, scrubber) for rule, one in zip(rules, value, strict=True)]
        return LEFT_OUT if any(one is LEFT_OUT for one in found) else found

    return of_list


KEYS: set[str] = {"filename", "line"}
"""Names of all fields that have a rule."""


def fields(where: str, rules: dict[str, Rule]) -> Rule:
    """An object, of which each field has a rule. Fields without one are counted under `where`."""
    KEYS.update(rules)

    def of_object(value: Any, scrubber: Scrubber) -> Any:
        if not isinstance(value, dict):
            return number(value, scrubber)
        made = {}
        for key, one in value.items():
            rule = rules.get(key) if isinstance(key, str) else None
            found = rule(one, scrubber) if rule is not None else LEFT_OUT
            if found is LEFT_OUT:
                scrubber.left_out[
                    f"{where}.{key if rule is not None or (isinstance(key, str) and is_public(key)) else '…'}"
                ] += 1
            else:
                made[key] = found
        return made

    return of_object


def keyed(kind: str, rule: Rule) -> Rule:
    """An object whose keys are texts of a kind, and whose values all have the rule."""

    def of_object(value: Any, scrubber: Scrubber) -> Any:
        if not isinstance(value, dict):
            return number(value, scrubber)
        found = {scrubber.names.text(kind, str(key)): rule(one, scrubber) for key, one in value.items()}
        return {key: one for key, one in found.items() if one is not LEFT_OUT}

    return of_object


def inner_json(rule: Rule) -> Rule:
    """JSON as a text."""

    def of_text(value: Any, scrubber: Scrubber) -> Any:
        try:
            made = rule(msgspec.json.decode(value), scrubber)
        except (*BROKEN, TypeError):
            return LEFT_OUT
        return LEFT_OUT if made is LEFT_OUT else msgspec.json.encode(made).decode()

    return of_text


# What several kinds of files have.

SHAPES = sizes
GROUP_FIELDS: dict[str, Rule] = {
    "pg": text("group"),
    "size": number,
    "ranks": numbers,
    "desc": text("group"),
    "backend": text("backend"),
    "locality": text("locality"),
    "eager": number,
}
GROUP = fields("group", GROUP_FIELDS)
_RECORD: dict[str, Rule] = {
    **dict.fromkeys(("id", "t", "seq", "p2p_seq", "async", "root", "peer", "tag", "batch", "step", "thread"), number),
    "op": text("api"),
    "c10d": text("api"),
    "pg": text("group"),
    "bytes": size,
    "api": text("api"),
    "in": SHAPES,
    "out": SHAPES,
    "in_split": sizes,
    "out_split": sizes,
    "dtype": text("dtype"),
    "out_dtype": text("dtype"),
    "reduce": text("reduction"),
    "source": place,
    "locality": text("locality"),
}
RECORD = fields("call", _RECORD | {"members": each(fields("call", _RECORD))})


MARKER = fields(
    "marker",
    _RECORD
    | {
        **dict.fromkeys(
            (
                *("rank", "world_size", "message_size", "peer_rank", "root_rank", "correlation_id"),
                *("Message size [bytes]", "Peer rank", "No. of ranks", "Rank", "Root"),
            ),
            number,
        ),
        **dict.fromkeys(("group_ranks", "rank_runs", "CUDA device"), numbers),
        "inputs": SHAPES,
        "outputs": SHAPES,
        "crossrank": text("version"),
        "host": name("host"),
        "group": fields("group", GROUP_FIELDS | {"rank_runs": numbers, "left_out": keyed("field", number)}),
        "left_out": keyed("field", number),
        "name": text("api"),
        "source_line": place,
        "NCCL communicator ID": name("communicator"),
        "Reduction operation": text("reduction"),
    },
)
"""The text of a range: ours, an older shim's, or the payload of NCCL's."""


def frame(value: Any, scrubber: Scrubber) -> Any:
    if not isinstance(value, dict):
        return LEFT_OUT
    file, function = str(value.get("filename", "")), str(value.get("name", ""))
    line = value.get("line", 0)
    names = scrubber.names
    return {
        "name": names.function(function, file),
        "filename": names.path(file),
        "line": line if isinstance(line, int) else 0,
    }


FRAMES = each(frame)
_RAISED = fields("exception", {"thread": text("thread"), "error": message, "causes": each(message), "frames": FRAMES})
_CLOCK = fields("clock", {"t": number, "wall": wall})
_GPU = fields(
    "gpu",
    {
        **dict.fromkeys(("index", "memory", "sms", "compute_capability", "major", "minor", "power_w"), numbers),
        "name": text("device name"),
        "driver": text("version"),
        "uuid": name("uuid"),
        "serial": name("serial"),
        "pci": name("pci"),
        "pci_id": name("pci"),
        "pci_bus_id": name("pci"),
        "fabric_cluster": name("fabric"),
        "fabric_clique": name("fabric"),
        "bus_id": name("pci"),
    },
)
_CONFIG = fields(
    "config",
    {
        **dict.fromkeys(("print_calls", "flight", "hang_seconds", "timing", "nsys", "ring"), number),
        **dict.fromkeys(("emit", "nvtx", "on_hang", "kernel"), text("emit")),
        "window": fields("window", dict.fromkeys(("start", "stop", "every"), number)),
        "directory": name("folder"),
        "node": name("node"),
        "gpu_serial": name("serial"),
        "vm_id": name("vm"),
    },
)
_HEADER = fields(
    "header",
    {
        **dict.fromkeys(("rank", "world_size", "local_rank", "pid", "all_calls"), number),
        "part": numbers,
        "schema": text("schema"),
        "host": name("host"),
        "node": name("node"),
        "boot_id": name("boot"),
        "gpu": _GPU,
        "gpu_serial": name("serial"),
        "vm_id": name("vm"),
        "clock": _CLOCK,
        "versions": keyed("package", text("version")),
        "config": _CONFIG,
        "blind_spots": each(message),
        "ops": each(text("api")),
    },
)
_WAIT = fields(
    "wait",
    {**dict.fromkeys(("t", "took", "thread", "id", "raised", "on_device"), number), "in": text("stack kind")},
)
_END = fields(
    "end",
    {
        **dict.fromkeys(
            ("step", "calls", "records", "dropped", "unwritten", "filtered", "spans", "spans_dropped", "errors"), number
        ),
        "reason": text("reason"),
        "exceptions": each(_RAISED),
        "blind_spots": each(message),
    },
)
COMMS_LINES: dict[str, Rule] = {
    "header": _HEADER,
    "gpu": _GPU,
    "group": GROUP,
    "step": fields("step", {"step": number, "t": number}),
    "wait": _WAIT,
    "ran": _WAIT,
    "clock": _CLOCK,
    "window": fields(
        "window", {"window": number, "edge": text("edge"), "step": number, "t": number, "threads": number}
    ),
    "end": _END,
}
"""The lines of a comms file that are no `RECORD`."""

_STATUS = fields(
    "pg_status",
    {
        **dict.fromkeys(
            ("last_enqueued_collective", "last_started_collective", "last_completed_collective"), text("literal")
        ),
    },
)


def _dtypes(value: Any, scrubber: Scrubber) -> Any:
    """A list, or in some tools' dumps one for all tensors."""
    return (each(text("dtype")) if isinstance(value, list) else text("dtype"))(value, scrubber)


_ENTRY = fields(
    "entry",
    {
        **dict.fromkeys(
            (
                "record_id",
                "pg_id",
                "op_id",
                "collective_seq_id",
                "p2p_seq_id",
                "timeout_ms",
                "duration_ms",
                "retired",
                "is_p2p",
            ),
            text("literal"),
        ),
        **dict.fromkeys(
            (
                "time_created_ns",
                "time_discovered_started_ns",
                "time_discovered_completed_ns",
                "time_created_us",
            ),
            wall,
        ),
        "profiling_name": event_name,
        "process_group": pair(text("group"), text("group")),
        "input_sizes": sizes,
        "output_sizes": sizes,
        "input_dtypes": _dtypes,
        "output_dtypes": _dtypes,
        "state": text("state"),
        "frames": FRAMES,
        "thread_name": text("thread"),
        "thread_id": text("literal"),
    },
)
FLIGHT = fields(
    "dump",
    {
        "version": text("version"),
        "comm_lib_version": text("version"),
        "nccl_version": text("version"),
        "rank": text("literal"),
        "pg_config": keyed(
            "group", fields("pg_config", {"name": text("group"), "desc": text("group"), "ranks": counts(numbers)})
        ),
        "pg_status": keyed("group", _STATUS),
        "entries": each(_ENTRY),
        "crossrank": fields(
            "crossrank",
            {
                "rank": number,
                "world_size": number,
                "host": name("host"),
                "reason": text("reason"),
                "error": message,
                "exceptions": each(_RAISED),
                "time_ns": wall,
                "clock": _CLOCK,
                "groups": each(GROUP),
                "calls": each(RECORD),
                "stacks": each(fields("stack", {"thread": text("thread"), "frames": FRAMES})),
            },
        ),
    },
)
_PG_CONFIG = fields(
    "pg_config",
    {
        "pg_name": text("group"),
        "pg_desc": text("group"),
        "backend_id": text("literal"),
        "backend_config": text("backend"),
        **dict.fromkeys(("pg_size", "group_count", "group_size"), text("literal")),
        "ranks": counts(numbers),
    },
)


def _pg_configs(value: Any, scrubber: Scrubber) -> Any:
    """A list, or an object by the names of the groups."""
    return (keyed("group", _PG_CONFIG) if isinstance(value, dict) else each(_PG_CONFIG))(value, scrubber)


def _value(given: Any, scrubber: Scrubber, depth: int = 0) -> Any:
    """An input or output of an operation."""
    if isinstance(given, list):
        if depth > _MOST_DEPTH:
            return LEFT_OUT
        found = [_value(one, scrubber, depth + 1) for one in given]
        found = [one for one in found if one is not LEFT_OUT]
        # A tensor: its id, storage, offset, elements, bytes of each, and device.
        if scrubber.coarse and len(found) == _TENSOR and isinstance(found[3], int) and isinstance(found[-1], str):
            found[3] = power_of_two(found[3])
        return found
    if isinstance(given, str):
        for begin, rule in _INNER.items():
            if given.startswith(begin) and (made := rule(given, scrubber)) is not LEFT_OUT:
                return made
        names = scrubber.names
        known = any(names.passes(kind, given) for kind in ("value", "op", "api", "group", "type"))
        return given if known else names.text("group", given)
    return number(given, scrubber)


_INNER = {"[{": inner_json(each(_PG_CONFIG)), '{"op":': inner_json(RECORD)}
"""What the JSON in a text begins with: the groups as torch lists them, a call as our range around it says it."""


def _side(value: Any, scrubber: Scrubber) -> Any:
    """What an operation takes or gives, in either layout of execution traces."""
    return (_value if isinstance(value, list) else _IO)(value, scrubber)


_IO = fields("io", {"values": _value, "shapes": SHAPES, "types": each(text("type")), "strides": sizes})


def _schema(value: Any, scrubber: Scrubber) -> Any:
    """The schema of an operation, where all its words are public."""
    return value if isinstance(value, str) and is_public(value) else LEFT_OUT


_ATTRIBUTES: dict[str, Rule] = {
    **dict.fromkeys(("rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid"), text("literal")),
    "op_schema": _schema,
    "kernel_backend": text("emit"),
    "kernel_file": path,
    "tensor_range": text("literal"),
    "pg_name": text("group"),
    "pg_desc": text("group"),
    "collective_name": text("api"),
    "dtype": text("dtype"),
    **dict.fromkeys(("pg_size", "global_rank_start", "global_rank_stride"), text("literal")),
    **dict.fromkeys(("comm_size", "in_msg_nelems", "out_msg_nelems"), size),
    **dict.fromkeys(("in_split_size", "out_split_size"), counts(sizes)),
}


def _attribute(value: Any, scrubber: Scrubber) -> Any:
    rule = _ATTRIBUTES.get(str(value.get("name"))) if isinstance(value, dict) else None
    made = rule(value.get("value"), scrubber) if rule is not None else LEFT_OUT
    if made is LEFT_OUT:
        scrubber.left_out["attribute" if rule is None else f"attribute.{value['name']}"] += 1
        if rule is None:
            return LEFT_OUT
        made = ""
    return {"name": value["name"], "type": scrubber.names.text("dtype", str(value.get("type", ""))), "value": made}


_DEP = fields("dep", {"id": number, "kind": our_word, "inferred": number, "slack_ns": number})


def _report(value: Any, scrubber: Scrubber, depth: int = 0) -> Any:
    """What matched in a linked trace: counts by our own words, and sentences about files."""
    if depth > _MOST_DEPTH:
        return LEFT_OUT
    if isinstance(value, dict):
        made = {_sentence(key, scrubber): _report(one, scrubber, depth + 1) for key, one in value.items()}
        return {key: one for key, one in made.items() if one is not LEFT_OUT}
    if isinstance(value, list):
        found = [_report(one, scrubber, depth + 1) for one in value]
        return [one for one in found if one is not LEFT_OUT]
    return _sentence(value, scrubber) if isinstance(value, str) else number(value, scrubber)


def _sentence(text: str, scrubber: Scrubber) -> str:
    return text if _OUR_WORDS.fullmatch(text) and is_public(text) else scrubber.names.range(text)


PROVENANCE = fields(
    "crossrank",
    {
        **dict.fromkeys(("rank", "world_size"), number),
        "version": text("version"),
        "et_schema": text("version"),
        "base_time_ns": wall,
        "inputs": lambda value, scrubber: (
            {
                scrubber.names.name("file", str(name)): scrubber.names.name("sha256", str(digest))
                for name, digest in value.items()
            }
            if isinstance(value, dict)
            else LEFT_OUT
        ),
        "groups": each(GROUP),
        "match": _report,
    },
)
_COMMUNICATION = fields(
    "comm",
    {
        "record": RECORD,
        "group": GROUP,
        "origin": our_word,
        "host": number,
        "work": number,
        "activities": numbers,
        "seq_counted": number,
    },
)
_KINETO_ARGS: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "External id",
            "external id",
            "Record function id",
            "Sequence number",
            "Fwd thread id",
            "Ev Idx",
            "Op count",
            "Python id",
            "Python parent id",
            "Python module id",
            "Rank",
            "Group size",
            "Global rank start",
            "Global rank stride",
            "Src Rank",
            "Dst Rank",
            "Seq",
            "Is asynchronized op",
            "device",
            "context",
            "stream",
            "correlation",
            "cbid",
            "cid",
            "registers per thread",
            "shared memory",
            "blocks per SM",
            "warps per SM",
            "est. achieved occupancy %",
            "queued",
            "wait_on_stream",
            "wait_on_cuda_event_record_corr_id",
            "wait_on_cuda_event_id",
            "sort_index",
            "memory bandwidth (GB/s)",
            "graph id",
            "graph node id",
            "ctx_id",
            "kernel_num",
            "ptr",
            "Addr",
            "Device Id",
            "Device Type",
            "Total Allocated",
            "Total Reserved",
            "Bytes",
            "cudaGraph id",
            "cuda_event_id",
            "priority",
            "device_id",
            "ccid",
        ),
        text("literal"),
    ),
    **dict.fromkeys(("grid", "block"), numbers),
    **dict.fromkeys(("bytes", "In msg nelems", "Out msg nelems", "Nbytes"), size),
    **dict.fromkeys(("Input Dims", "Input Strides", "Output Dims", "Output Strides"), sizes),
    "Input type": each(text("type")),
    "Output type": each(text("type")),
    "Concrete Inputs": each(_value),
    "Concrete Outputs": each(_value),
    "Collective name": text("api"),
    "dtype": text("dtype"),
    "Process Group Name": text("group"),
    "Process Group Description": text("group"),
    "Process Group Ranks": counts(numbers),
    "In split size": counts(sizes),
    "Out split size": counts(sizes),
    "cuda_sync_kind": text("sync"),
    "kind": text("memory"),
    "kernel": event_name,
    "labels": text("label"),
    "name": text("label"),
}
KINETO_EVENT = fields(
    "event",
    {
        "ph": text("phase"),
        "cat": text("category"),
        "name": event_name,
        "pid": text("label"),
        "tid": text("label"),
        "ts": wall,
        "dur": number,
        "id": number,
        "bp": text("phase"),
        "s": text("phase"),
        "args": fields("args", _KINETO_ARGS),
    },
)
KINETO_HEAD: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "schemaVersion",
            "record_shapes",
            "with_stack",
            "with_flops",
            "with_modules",
            "profile_memory",
            "roctracer_version",
            "hip_driver_version",
            "hip_runtime_version",
            "cuda_driver_version",
            "cuda_runtime_version",
            "cupti_version",
        ),
        number,
    ),
    "displayTimeUnit": text("unit"),
    "baseTimeNanoseconds": wall,
    "deviceProperties": each(
        fields(
            "deviceProperties",
            {
                **dict.fromkeys(
                    (
                        "id",
                        "totalGlobalMem",
                        "computeMajor",
                        "computeMinor",
                        "maxThreadsPerBlock",
                        "maxThreadsPerMultiprocessor",
                        "regsPerBlock",
                        "warpSize",
                        "sharedMemPerBlock",
                        "numSms",
                        "regsPerMultiprocessor",
                        "sharedMemPerBlockOptin",
                        "sharedMemPerMultiprocessor",
                        "maxSharedMemoryPerMultiProcessor",
                    ),
                    number,
                ),
                "name": text("device name"),
            },
        )
    ),
    "distributedInfo": fields(
        "distributedInfo",
        {
            **dict.fromkeys(("rank", "world_size", "pg_count"), number),
            "backend": text("backend"),
            "nccl_version": text("version"),
            "pg_config": _pg_configs,
        },
    ),
}
TRACE_HEAD: dict[str, Rule] = {
    "schema": text("version"),
    "pid": number,
    "time": day,
    "start_ts": number,
    "finish_ts": number,
}
"""Of an execution trace, linked or not."""
_LINKED: dict[str, Rule] = {
    **dict.fromkeys(
        ("inclusive_dur", "exclusive_dur", "blocked_dur", "correlation", "comm_host", "inter_thread_dep"), number
    ),
    "ts": wall,
    "sync_dep": numbers,
    "cat": text("category"),
    "ph": text("phase"),
    "device": text("label"),
    "stream": text("label"),
    "pg_name": text("group"),
    "unlinked": name("reason"),
    "args": fields("args", _KINETO_ARGS),
    "comm": _COMMUNICATION,
    "deps": each(_DEP),
}
TRACE_NODE = fields(
    "node",
    {
        **dict.fromkeys(
            ("id", "ctrl_deps", "parent", "rf_id", "fw_parent", "fw_tid", "seq_id", "scope", "tid", "pid"), number
        ),
        "name": event_name,
        "inputs": _side,
        "outputs": _side,
        "attrs": each(_attribute),
        "input_shapes": SHAPES,
        "output_shapes": SHAPES,
        "input_types": each(text("type")),
        "output_types": each(text("type")),
        "op_schema": _schema,
    }
    | _LINKED,
)
for _rules in (COMMS_LINES, KINETO_HEAD, TRACE_HEAD, _ATTRIBUTES):
    KEYS.update(_rules)
