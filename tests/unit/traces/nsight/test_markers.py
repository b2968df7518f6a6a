"""What one text of an NVTX range means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from crossrank.comm import MOST_RANKS, CommRecord, Group
from crossrank.tools.traces.nsight.markers import BATCH, CALL, GROUP, IDENTITY, NCCL, WORLD, Meaning, meaning_of

OLD = {"name": "isend", "message_size": 4.5}
PAIR = Group(pg="0,2", size=2, ranks=[0, 2])


def old(group: Group | None = None, id: int = -1, rank: int | None = None, **fields: Any) -> Meaning:
    record: dict[str, Any] = {"op": "send", "api": "isend", "pg": group.pg if group else WORLD, "bytes": 4} | fields
    return Meaning(CALL, record=CommRecord(id=0, c10d="", t=0, **record), group=group, rank=rank, old=True, id=id)


def test_our_marker_texts_are_parsed() -> None:
    call = {"op": "all_to_all", "c10d": "alltoall_", "pg": "3", "in": [[4]], "in_split": [1, 3], "dtype": "int8"}
    same: dict[str, Any] = {"id": 0, "t": 0, "op": "all_to_all", "c10d": "alltoall_", "pg": "3", "dtype": "int8"}
    whole = CommRecord(bytes=7, inputs=[[4]], in_split=[1, 3], **same)
    less = CommRecord(id=0, t=0, op="send", c10d="", pg="3", bytes=0)
    batch = CommRecord(id=0, t=0, op="coalesced", c10d="", pg="3", bytes=0)
    for given, meaning in (
        (call | {"bytes": 7, "id": 4, "t": 5}, Meaning(CALL, record=whole)),
        ({"op": "send", "pg": "3", "left_out": {"in": 3}}, Meaning(CALL, record=less, sizeless=True, left_out=True)),
        ({"op": "send", "pg": "3", "bytes": 0}, Meaning(CALL, record=less)),
        ({"op": "coalesced", "pg": "3"}, Meaning(BATCH, record=batch)),
        ({"crossrank": "1", "rank": 0, "host": "a"}, Meaning(IDENTITY, rank=0, host="a")),
        *((one, None) for one in ({"crossrank": "1", "rank": MOST_RANKS}, {"crossrank": "1"}, {"rank": 1})),
        (
            {"group": {"pg": "3", "size": 9, "left_out": {"ranks": 9}}},
            Meaning(GROUP, group=Group(pg="3", size=9), left_out=True),
        ),
        (
            {"group": {"pg": "3", "size": 2, "rank_runs": [[0, 2, 2]]}},
            Meaning(GROUP, group=Group(pg="3", size=2, ranks=[0, 2])),
        ),
        ({"op": "send"}, None),
        ({"name": "send"}, None),
    ):
        assert meaning_of(json.dumps(given)) == meaning
    assert meaning_of("ncclSend") == Meaning(NCCL, function="ncclSend")
    assert meaning_of("[1]") is None


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ({}, old()),
        ({"message_size": -1}, old(bytes=0)),
        ({"message_size": 1e30}, old(bytes=1 << 60)),
        ({"name": "warp"}, old(op="warp", api="warp")),
        ({"group_ranks": [0, 2, -1, MOST_RANKS]}, old(PAIR)),
        ({"rank_runs": [[0, 2, 2]]}, old(PAIR)),
        ({"left_out": {"ranks": 7}}, old(pg="7 ranks")),
        ({"rank": MOST_RANKS, "peer_rank": -1, "root_rank": 0}, old(root=0)),
        (
            {"rank": 0, "peer_rank": MOST_RANKS - 1, "source_line": "a.py:1"},
            old(rank=0, peer=MOST_RANKS - 1, source="a.py:1"),
        ),
        ({"correlation_id": 0}, old(id=0)),
        ({"correlation_id": -1}, old()),
        ({"correlation_id": 1 << 62}, old()),
        ({"correlation_id": "x"}, old()),
    ],
)
def test_older_shim_marker_texts_are_parsed(text: dict[str, Any], meaning: Meaning) -> None:
    assert meaning_of(json.dumps(OLD | text)) == meaning
