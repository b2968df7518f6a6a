"""Print a Chakra file as one JSON object or as a table of its first nodes. Both read it as a stream."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import msgspec

from crossrank.errors import CrossrankError
from crossrank.text import amount, percent, printable
from crossrank.tools.graph.chakra import et_def_pb2 as pb
from crossrank.tools.graph.chakra.feeder_contract import TYPES
from crossrank.tools.graph.chakra.framing import read_trace
from crossrank.tools.output.console import print_fact, print_table

_SHOWN = 40


def print_json(path: str) -> None:
    """Print `{"metadata": {...}, "nodes": [...]}`, one node per line. Attributes become fields of `attr`. If the file
    is damaged, the object has `problems` too, and `CrossrankError` is raised after it."""
    problems: list[str] = []
    metadata, nodes = read_trace(path, problems)
    head = {"version": metadata.version, "attr": _attributes(metadata.attr)}
    write = sys.stdout.write
    write(f'{{"metadata":{msgspec.json.encode(head).decode()},"nodes":[')
    separator = "\n"
    for _, node in nodes:
        write(separator + msgspec.json.encode(as_dict(node)).decode())
        separator = ",\n"
    write(f'\n],"problems":{msgspec.json.encode(problems).decode()}}}\n' if problems else "\n]}\n")
    _raise_first(problems)


def print_nodes(path: str) -> None:
    """Print the number of nodes by type, and the first nodes. Raise `CrossrankError` after them if the file is
    damaged."""
    problems: list[str] = []
    metadata, nodes = read_trace(path, problems)
    types: Counter[str] = Counter()
    rows: list[tuple[object, ...]] = []
    on_gpu: Counter[str] = Counter()
    for _, node in nodes:
        kind = TYPES.get(node.type) or str(node.type)
        types[kind] += 1
        given = _attributes(node.attr)
        if len(rows) < _SHOWN:
            deps = ", ".join(map(str, node.data_deps))
            flop, size = given.get("num_ops"), given.get("tensor_size")
            counts = (_number(flop), _number(size), _number(flop / size if flop and size else None))
            rows.append((node.id, kind, node.name[:48], node.start_time_micros, node.duration_micros, *counts, deps))
        if node.type == pb.COMP_NODE and not given.get("is_cpu_op", True):
            on_gpu.update({"nodes": 1, "us": node.duration_micros})
            if "num_ops" in given:
                on_gpu.update({"counted": 1, "counted us": node.duration_micros, "FLOP": given["num_ops"]})
                on_gpu["bytes"] += given.get("tensor_size", 0)
    print_fact("file", path)
    print_fact("version", metadata.version or "-")
    for attribute in metadata.attr:
        value = str(_value(attribute))
        print_fact(printable(attribute.name), value[:100] + ("…" if len(value) > 100 else ""))
    print_table("Nodes by type", ("type", "#nodes"), sorted(types.items()))
    if on_gpu:
        print(f"\n{_counted(on_gpu)}")
    more = sum(types.values()) - len(rows)
    print_table(
        "First nodes" + (f" ({more} more: --json)" if more > 0 else ""),
        ("#id", "type", "name", "#start us", "#us", "#FLOP", "#bytes", "#FLOP/byte", "data_deps"),
        rows,
    )
    _raise_first(problems)


def _raise_first(problems: list[str]) -> None:
    if problems:
        more = f"; {len(problems) - 1} more nodes are damaged" if len(problems) > 1 else ""
        raise CrossrankError(problems[0] + more)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _counted(on_gpu: Counter[str]) -> str:
    """Return a sentence about FLOP counts and bytes of the computations on GPUs."""
    us, flop, size = on_gpu["counted us"], on_gpu["FLOP"], on_gpu["bytes"]
    text = (
        f"FLOP counts (num_ops) exist for {on_gpu['counted']:,} of {on_gpu['nodes']:,} computations on GPUs, "
        f"{percent(us / on_gpu['us'] if on_gpu['us'] else None)} of their time"
    )
    if not us:
        return text
    intensity = f", {flop / size:,.1f} FLOP/byte" if size else ""
    return f"{text}: {flop:,} FLOP, {flop / us / 1e6:,.2f} TFLOP/s, {amount(size)}{intensity}"


def as_dict(node: pb.Node) -> dict[str, Any]:
    """Return a node as plain values, without fields that are not set."""
    fields: dict[str, Any] = {"id": node.id, "name": node.name, "type": TYPES.get(node.type) or str(node.type)}
    for name in ("ctrl_deps", "data_deps"):
        if deps := list(getattr(node, name)):
            fields[name] = deps
    fields |= {"start_time_micros": node.start_time_micros, "duration_micros": node.duration_micros}
    for name in ("inputs", "outputs"):
        if node.HasField(name):
            text = getattr(node, name)
            fields[name] = {"values": text.values, "shapes": text.shapes, "types": text.types}
    fields["attr"] = _attributes(node.attr)
    return fields


def _attributes(attributes: Any) -> dict[str, Any]:
    return {attribute.name: _value(attribute) for attribute in attributes}


def _value(attribute: pb.AttributeProto) -> Any:
    kind = attribute.WhichOneof("value")
    if kind is None:
        return None
    value = getattr(attribute, kind)
    return list(value.values) if kind.endswith("_list") else value
