"""Reads only the communication of an execution trace.

A trace of a large model has hundreds of thousands of nodes. A few hundred of them communicate; only those are kept.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from crossrank.budget import Budget
from crossrank.comm import Group
from crossrank.tools.graph.linking.communications import COMMUNICATING, find_communications
from crossrank.tools.graph.linking.linked_trace import Communication
from crossrank.tools.graph.linking.nesting import is_work
from crossrank.tools.traces.execution_trace import is_group_node, read_execution_trace
from crossrank.tools.traces.param_comms import ParamComms


@dataclass(frozen=True, kw_only=True)
class CommunicationTrace:
    """The communication of one rank."""

    communications: list[Communication]
    """Ordered by start. `record.t` is 0, since an execution trace has no times."""
    waits: list[tuple[int, ParamComms]]
    """(number of communications that started before it, what it waits for) for each `wait` in the trace."""
    groups: list[Group]
    warnings: list[str]
    damage: list[str]
    unknown: list[str]
    """Names of communications that are no known operation, one entry for each communication."""


def read_communication_trace(path: str, world_size: int | None = None) -> CommunicationTrace:
    """Return the communication of one rank. Raise `CrossrankError` if the file is unusable."""
    trace = read_execution_trace(path, _is_kept)
    host = trace.nodes
    for op in host:
        op.is_work = is_work(op.name)
    groups = {group.pg: group for group in trace.groups}
    found = find_communications(host, (), groups, world_size=world_size, budget=Budget.of(path))
    order = {op.id: op.rf_id for op in host}
    begun = sorted(order[c.host] for c in found.communications if c.host is not None)
    waits = [(bisect_left(begun, host[position].rf_id), comms) for position, comms in found.waits.items()]
    return CommunicationTrace(
        communications=found.communications,
        waits=sorted(waits, key=lambda wait: wait[0]),
        groups=list(found.groups.values()),
        warnings=[*trace.warnings, *found.warnings],
        damage=list(trace.damage),
        unknown=found.unknown,
    )


def _is_kept(name: str) -> bool:
    return name.startswith(COMMUNICATING) or is_group_node(name)
