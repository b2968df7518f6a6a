"""Corrects callers that cannot be: an execution trace names the wrong one after an asynchronous range.

torch keeps one stack per thread and takes the caller from its top. The range of a gloo Work is put on it where the
call is made and taken off by another thread, so for a while the top is an operation that has long ended. Kineto's
times tell: who ended before an operation began did not call it.
"""

from __future__ import annotations

from collections.abc import Sequence

from crossrank.tools.linking.graph import HostOp
from crossrank.tools.linking.matching import HostMatch
from crossrank.tools.linking.nesting import Nesting
from crossrank.tools.readers.execution_trace import is_thread_root


def correct_callers(host: Sequence[HostOp], match: HostMatch, nesting: Nesting) -> list[str]:
    """Give every operation whose recorded caller had ended, or had not begun, the one that ran around it.

    Changes `HostOp.caller` in place and returns what to say about it.
    """
    position_of = {op.id: position for position, op in enumerate(host)}
    roots = {op.node.tid: op.id for op in reversed(host) if is_thread_root(op.node)}
    corrected = []
    for position, op in enumerate(host):
        at = position_of.get(op.caller)
        if at is None or op.is_work or not _cannot_call(host[at], op):
            continue
        event = nesting.parent[match.event_of[position]]
        while event >= 0 and match.node_of[event] < 0:
            event = nesting.parent[event]
        op.caller = host[match.node_of[event]].id if event >= 0 else roots.get(op.node.tid, 0)
        corrected.append(op.id)
    if not corrected:
        return []
    return [
        f"{len(corrected)} operation(s) have a caller that was not running when they began "
        f"(first: node {corrected[0]}); their caller is taken from the Kineto trace"
    ]


def _cannot_call(caller: HostOp, op: HostOp) -> bool:
    if op.start_ns is None or caller.start_ns is None or caller.duration_ns is None:
        return False
    return caller.is_work or not caller.start_ns <= op.start_ns <= caller.start_ns + caller.duration_ns
