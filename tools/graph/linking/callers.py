"""Corrects callers: an execution trace names the wrong one beside an asynchronous range.

torch keeps one stack per thread and takes the caller from its top. The range of a gloo Work is put on it where the
call is made; when the Work ends, another thread takes off what is then on top. So for a while the top is an operation
that has long ended, and later one that runs is missing: what it calls is then given to the one around it. Kineto's
times tell who ran around an operation, and who was the innermost.
"""

from __future__ import annotations

from collections.abc import Sequence

from crossrank.tools.graph.linking.event_matching import HostMatch
from crossrank.tools.graph.linking.linked_trace import HostOp
from crossrank.tools.graph.linking.nesting import Nesting
from crossrank.tools.traces.execution_trace import is_thread_root


def correct_callers(host: Sequence[HostOp], match: HostMatch, nesting: Nesting) -> list[str]:
    """Give every operation the caller that ran around it, where the recorded one did not or another ran between them.

    Changes `HostOp.caller` in place and returns a warning about it.
    """
    position_of = {op.id: position for position, op in enumerate(host)}
    roots = {op.node.tid: op.id for op in reversed(host) if is_thread_root(op.node)}
    corrected = []
    for position, op in enumerate(host):
        at = position_of.get(op.caller)
        if at is None or op.is_work or op.start_ns is None:
            continue
        event = nesting.parent[match.event_of[position]]
        while event >= 0 and match.node_of[event] < 0:
            event = nesting.parent[event]
        around = host[match.node_of[event]] if event >= 0 else None
        if _cannot_call(host[at], op):
            op.caller = around.id if around is not None else roots.get(op.node.tid, 0)
        elif around is not None and around is not host[at] and _is_between(host[at], around, op):
            op.caller = around.id
        else:
            continue
        corrected.append(op.id)
    if not corrected:
        return []
    return [
        f"{len(corrected)} operation(s) have a recorded caller that was not the one running when they began "
        f"(first: node {corrected[0]}); their caller is taken from the Kineto trace"
    ]


def _cannot_call(caller: HostOp, op: HostOp) -> bool:
    return (
        op.start_ns is not None
        and (span := _span(caller)) is not None
        and (caller.is_work or not span[0] <= op.start_ns <= span[1])
    )


def _is_between(caller: HostOp, around: HostOp, op: HostOp) -> bool:
    """Whether `around` ran inside `caller`, and `op` inside it: not at its edge, since times may be rounded."""
    outer, middle, inner = _span(caller), _span(around), _span(op)
    if outer is None or middle is None or inner is None or caller.node.tid != around.node.tid:
        return False
    return outer[0] <= middle[0] < inner[0] and inner[1] < middle[1] <= outer[1]


def _span(op: HostOp) -> tuple[int, int] | None:
    return None if op.start_ns is None or op.duration_ns is None else (op.start_ns, op.start_ns + op.duration_ns)
