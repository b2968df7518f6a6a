"""What becomes of every field of every kind of file. A field that has no rule is left out, and counted."""

from __future__ import annotations

from typing import Any

from crossrank.tools.sharing.rules import (
    KEYS,
    LEFT_OUT,
    MOST_DEPTH,
    Rule,
    Scrubber,
    all_of,
    counts,
    day,
    each,
    event_name,
    fields,
    inner_json,
    is_ours,
    keyed,
    message,
    name,
    number,
    numbers,
    our_word,
    pair,
    path,
    place,
    power_of_two,
    size,
    sizes,
    text,
    wall,
)
from crossrank.tools.sharing.vocabulary import is_public

_TENSOR = 6
"""Values that an execution trace has of a tensor."""
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
    **all_of(number, "id, t, seq, p2p_seq, async, root, peer, tag, batch, step, thread"),
    "op": text("api"),
    "c10d": text("api"),
    "pg": text("group"),
    "bytes": size,
    "api": text("api"),
    "in": sizes,
    "out": sizes,
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
        **all_of(
            number,
            """rank, world_size, message_size, peer_rank, root_rank, correlation_id, Message size [bytes],
            Peer rank, No. of ranks, Rank, Root""",
        ),
        **all_of(numbers, "group_ranks, rank_runs, CUDA device"),
        "inputs": sizes,
        "outputs": sizes,
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
        **all_of(numbers, "index, memory, sms, compute_capability, major, minor, power_w"),
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
        **all_of(number, "print_calls, flight, hang_seconds, timing, nsys, ring"),
        **all_of(text("emit"), "emit, nvtx, on_hang, kernel"),
        "window": fields("window", all_of(number, "start, stop, every")),
        "directory": name("folder"),
        "node": name("node"),
        "gpu_serial": name("serial"),
        "vm_id": name("vm"),
    },
)
_HEADER = fields(
    "header",
    {
        **all_of(number, "rank, world_size, local_rank, pid, all_calls"),
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
    {**all_of(number, "t, took, thread, id, raised, on_device"), "in": text("stack kind")},
)
_END = fields(
    "end",
    {
        **all_of(number, "step, calls, records, dropped, unwritten, filtered, spans, spans_dropped, errors"),
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
        **all_of(text("literal"), "last_enqueued_collective, last_started_collective, last_completed_collective"),
    },
)


def _dtypes(value: Any, scrubber: Scrubber) -> Any:
    """A list, or in some tools' dumps one for all tensors."""
    return (each(text("dtype")) if isinstance(value, list) else text("dtype"))(value, scrubber)


_ENTRY = fields(
    "entry",
    {
        **all_of(
            text("literal"),
            """record_id, pg_id, op_id, collective_seq_id, p2p_seq_id, timeout_ms, duration_ms, retired, is_p2p""",
        ),
        **all_of(wall, "time_created_ns, time_discovered_started_ns, time_discovered_completed_ns, time_created_us"),
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
                "waits": each(number),
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
        **all_of(text("literal"), "pg_size, group_count, group_size"),
        "ranks": counts(numbers),
    },
)


def _pg_configs(value: Any, scrubber: Scrubber) -> Any:
    """A list, or an object by the names of the groups."""
    return (keyed("group", _PG_CONFIG) if isinstance(value, dict) else each(_PG_CONFIG))(value, scrubber)


def _value(given: Any, scrubber: Scrubber, depth: int = 0) -> Any:
    """An input or output of an operation."""
    if isinstance(given, list):
        if depth > MOST_DEPTH:
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


_IO = fields("io", {"values": _value, "shapes": sizes, "types": each(text("type")), "strides": sizes})


def _schema(value: Any, scrubber: Scrubber) -> Any:
    """The schema of an operation, where all its words are public."""
    return value if isinstance(value, str) and is_public(value) else LEFT_OUT


_ATTRIBUTES: dict[str, Rule] = {
    **all_of(text("literal"), "rf_id, fw_parent, seq_id, scope, tid, fw_tid"),
    "op_schema": _schema,
    "kernel_backend": text("emit"),
    "kernel_file": path,
    "tensor_range": text("literal"),
    "pg_name": text("group"),
    "pg_desc": text("group"),
    "collective_name": text("api"),
    "dtype": text("dtype"),
    **all_of(text("literal"), "pg_size, global_rank_start, global_rank_stride"),
    **all_of(size, "comm_size, in_msg_nelems, out_msg_nelems"),
    **all_of(counts(sizes), "in_split_size, out_split_size"),
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
    if depth > MOST_DEPTH:
        return LEFT_OUT
    if isinstance(value, dict):
        made = {_sentence(key, scrubber): _report(one, scrubber, depth + 1) for key, one in value.items()}
        return {key: one for key, one in made.items() if one is not LEFT_OUT}
    if isinstance(value, list):
        found = [_report(one, scrubber, depth + 1) for one in value]
        return [one for one in found if one is not LEFT_OUT]
    return _sentence(value, scrubber) if isinstance(value, str) else number(value, scrubber)


def _sentence(text: str, scrubber: Scrubber) -> str:
    return text if is_ours(text) else scrubber.names.range(text)


PROVENANCE = fields(
    "crossrank",
    {
        **all_of(number, "rank, world_size"),
        "version": text("version"),
        "et_schema": text("version"),
        "base_time_ns": wall,
        "iterations_ns": each(pair(number, wall)),
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
    **all_of(
        text("literal"),
        """External id, external id, Record function id, Sequence number, Fwd thread id, Ev Idx, Op count,
        Python id, Python parent id, Python module id, Rank, Group size, Global rank start, Global rank stride,
        Src Rank, Dst Rank, Seq, Is asynchronized op, device, context, stream, correlation, cbid, cid,
        registers per thread, shared memory, blocks per SM, warps per SM, est. achieved occupancy %, queued,
        wait_on_stream, wait_on_cuda_event_record_corr_id, wait_on_cuda_event_id, sort_index,
        memory bandwidth (GB/s), graph id, graph node id, ctx_id, kernel_num, ptr, Addr, Device Id, Device Type,
        Total Allocated, Total Reserved, Bytes, cudaGraph id, cuda_event_id, priority, device_id, ccid""",
    ),
    **all_of(numbers, "grid, block"),
    **all_of(size, "bytes, In msg nelems, Out msg nelems, Nbytes"),
    **all_of(sizes, "Input Dims, Input Strides, Output Dims, Output Strides"),
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
    **all_of(
        number,
        """schemaVersion, record_shapes, with_stack, with_flops, with_modules, profile_memory, roctracer_version,
        hip_driver_version, hip_runtime_version, cuda_driver_version, cuda_runtime_version, cupti_version""",
    ),
    "displayTimeUnit": text("unit"),
    "baseTimeNanoseconds": wall,
    "deviceProperties": each(
        fields(
            "deviceProperties",
            {
                **all_of(
                    number,
                    """id, totalGlobalMem, computeMajor, computeMinor, maxThreadsPerBlock,
                    maxThreadsPerMultiprocessor, regsPerBlock, warpSize, sharedMemPerBlock, numSms,
                    regsPerMultiprocessor, sharedMemPerBlockOptin, sharedMemPerMultiprocessor,
                    maxSharedMemoryPerMultiProcessor""",
                ),
                "name": text("device name"),
            },
        )
    ),
    "distributedInfo": fields(
        "distributedInfo",
        {
            **all_of(number, "rank, world_size, pg_count"),
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
    **all_of(number, "inclusive_dur, exclusive_dur, blocked_dur, correlation, comm_host, inter_thread_dep"),
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
        **all_of(number, "id, ctrl_deps, parent, rf_id, fw_parent, fw_tid, seq_id, scope, tid, pid"),
        "name": event_name,
        "inputs": _side,
        "outputs": _side,
        "attrs": each(_attribute),
        "input_shapes": sizes,
        "output_shapes": sizes,
        "input_types": each(text("type")),
        "output_types": each(text("type")),
        "op_schema": _schema,
    }
    | _LINKED,
)
for _rules in (COMMS_LINES, KINETO_HEAD, TRACE_HEAD, _ATTRIBUTES):
    KEYS.update(_rules)
