"""Turns communications that a simulator cannot run into ones that it runs.

ASTRA-sim's `Workload.cc` runs all_reduce, all_gather, all_to_all, reduce_scatter, sends and receives on its network and
plays a broadcast for as long as its node says. At anything else it stops; at a collective of a group of one rank, at an
all_gather of fewer bytes than the chunks that the system file asks for (`preferred-dataset-splits`) and at a message
of 0 bytes its ranks never finish, or it stops too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from crossrank.comm import CommRecord
from crossrank.tools.chakra.graph import ChakraNode

RUNS_AS = {"barrier": "all_reduce", "reduce": "reduce_scatter", "gather": "all_gather", "scatter": "reduce_scatter"}
"""Operation -> the one with the nearest traffic: each rank passes on (n-1)/n of S, as on the busiest link of the first.
All members then wait for each other, also where only the root would."""
LEAST_BYTES = {"all_gather": 64, "send": 1, "recv": 1}
"""Operation -> bytes that one rank puts in at least; the first suffices for up to 64 chunks."""


def lower(nodes: Iterable[ChakraNode]) -> dict[str, int]:
    """Set what the communications among `nodes` run as. Returns what was changed, and how often."""
    changed: Counter[str] = Counter()
    for node in nodes:
        if node.comm is None:
            continue
        record, members = node.comm.record, len(node.comm.group.ranks)
        run = _runs_as(record, members)
        if members == 1:
            changed[f"{record.op} of a group of one rank as a computation"] += 1
            node.comm = None
        elif run != record:
            least = "" if run.bytes == record.bytes else f" of {run.bytes} B"
            changed[f"{record.op} as {run.op}{least}"] += 1
            node.comm = msgspec.structs.replace(node.comm, runs_as=run)
    return dict(changed.most_common())


def _runs_as(record: CommRecord, members: int) -> CommRecord:
    op = RUNS_AS.get(record.op, record.op)
    least = LEAST_BYTES.get(op, 0) * (members if op == "all_gather" else 1)
    return msgspec.structs.replace(record, op=op, bytes=max(record.bytes, least))
