"""Corrects callers: an execution trace names the wrong one beside an asynchronous range.

torch keeps one stack per thread and takes the caller from its top. The range of a gloo Work is put on it where the
call is made; when the Work ends, another thread takes off what is then on top. So for a while the top is an operation
that has long ended, and later one that runs is missing: what it calls is then given to the one around it. Kineto's
times tell who ran around an operation, and who was the innermost.
"""

from __future__ import annotations

from collections.abc import Sequence

from crossrank.tools.graph.linking.event_matching import HostMatch, nearest_nodes
from crossrank.tools.graph.linking.linked_trace import HostOp
from crossrank.tools.graph.linking.nesting import Nesting
from crossrank.tools.traces.execution_trace import is_thread_root


def correct_callers(host: Sequence[HostOp], match: HostMatch, nesting: Nesting) -> list[str]:
    """Give every operation the caller that ran around it, where the recorded one did not or another ran between them.

    Changes `HostOp.caller` in place and returns a warning about it.
    """
    op_of = {op.node.id: op for op in host}
    roots = {op.node.tid: op.id for op in reversed(host) if is_thread_root(op.node)}
    nearest = nearest_nodes(match, nesting)
    corrected = []
    for position, op in enumerate(host):
        caller = op_of.get(op.caller)
        if caller is None or caller.start_ns is None or op.is_work or op.start_ns is None:
            continue
        event = nesting.parent[match.event_of[position]]
        around = host[nearest[event]] if event >= 0 and nearest[event] >= 0 else None
        if around is caller:
            continue
        if caller.is_work or not caller.start_ns <= op.start_ns <= caller.end_ns:
            op.caller = around.id if around is not None else roots.get(op.node.tid, 0)
        elif around is not None and _is_between(caller, around, op):
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


def _is_between(caller: HostOp, around: HostOp, op: HostOp) -> bool:
    """Whether `around` ran inside `caller`, and `op` inside it: not at its edge, since times may be rounded."""
    starts = [one.start_ns or 0 for one in (around, op)]
    return caller.node.tid == around.node.tid and starts[0] < starts[1] and op.end_ns < around.end_ns <= caller.end_ns
