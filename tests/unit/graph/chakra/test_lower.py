"""What ASTRA-sim cannot run, turned into what it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crossrank.comm import CommRecord
from crossrank.tools.graph.chakra import et_def_pb2 as pb
from crossrank.tools.graph.chakra.chakra_graph import MESSAGES_END, ChakraNode, Comm, Dependency, NumberedGroup
from crossrank.tools.graph.chakra.feeder_contract import RUN_BY_ASTRA_SIM
from crossrank.tools.graph.chakra.lower import lower
from crossrank.tools.graph.chakra.write import COLLECTIVE_TYPES, P2P_TYPES, comm_size, message_ends
from tests.unit.graph.chakra.test_convert import converted, params
from tests.unit.graph.linking.small_traces import SmallTrace


def one(node_id: int, start: int, duration: int, **fields: Any) -> ChakraNode:
    given: dict[str, Any] = {"runs_on": ("stream", (0, 7)), "is_cpu": False} | fields
    return ChakraNode(id=node_id, name=f"n{node_id}", start_ns=start, duration_ns=duration, dependencies=[], **given)


def comm(op: str, size: int, members: int = 4, peer: int | None = None) -> Comm:
    record = CommRecord(id=0, op=op, c10d="", pg="0", bytes=size, t=0, peer=peer)
    return Comm(record, NumberedGroup(number="0", ranks=tuple(range(members)), pg="0"))


@pytest.mark.parametrize("op", sorted(COLLECTIVE_TYPES))
def test_every_collective_runs(tmp_path: Path, op: str) -> None:
    trace = SmallTrace()
    trace.op("record_param_comms", 0, 20, inputs=params(op.replace("_", "")))
    nodes, _ = converted(trace, tmp_path, lower=True)  # and check finds no fault
    (node,) = (node for node in nodes.values() if node["type"] == "COMM_COLL_NODE")
    assert node["attr"]["comm_type"] in RUN_BY_ASTRA_SIM
    assert node["attr"]["comm_op"] == op


@pytest.mark.parametrize(
    ("op", "runs_as", "of_one_rank"),
    [
        ("barrier", pb.ALL_REDUCE, 0),
        ("reduce", pb.REDUCE_SCATTER, 96),
        ("gather", pb.ALL_GATHER, 96),
        ("scatter", pb.REDUCE_SCATTER, 192),  # what the root puts in, of which each gets 96
    ],
)
def test_a_replaced_collective_moves_as_many_bytes(tmp_path: Path, op: str, runs_as: int, of_one_rank: int) -> None:
    trace = SmallTrace()
    trace.op("record_param_comms", 0, 20, inputs=params(op))
    nodes, result = converted(trace, tmp_path, lower=True)
    (node,) = (node for node in nodes.values() if node["type"] == "COMM_COLL_NODE")
    assert (node["attr"]["comm_type"], node["attr"]["comm_size"]) == (runs_as, of_one_rank)
    assert result.lowered == {f"{op} as {pb.CollectiveCommType.Name(runs_as).lower()}": 1}
    assert result.nodes[op] == 1


@pytest.mark.parametrize(
    ("op", "size", "runs_as", "of_one_rank"),
    [
        *((op, 0, f"{op} of 1 B", 1) for op in P2P_TYPES),
        *((op, 8, "all_gather of 256 B", 64) for op in ("all_gather", "gather")),
    ],
)
def test_messages_and_chunks_have_at_least_a_byte(op: str, size: int, runs_as: str, of_one_rank: int) -> None:
    node = one(1, 0, 10, comm=comm(op, size))
    assert lower([node], 0) == {f"{op} as {runs_as}": 1}
    assert node.comm is not None
    assert node.comm.runs_as is not None
    assert comm_size(node.comm.runs_as, 4) == of_one_rank


def test_a_collective_of_one_rank_is_a_computation_of_its_duration() -> None:
    node = one(1, 0, 10, comm=comm("all_reduce", 96, members=1))
    assert lower([node], 0) == {"all_reduce of a group of one rank as a computation": 1}
    assert (node.comm, node.duration_ns) == (None, 10)


@pytest.mark.parametrize(("peer", "runs"), [(0, False), (1, True)])
def test_a_message_of_a_rank_to_itself_is_a_computation(peer: int, runs: bool) -> None:
    node = one(1, 0, 10, comm=comm("send", 96, peer=peer))
    assert lower([node], 0) == ({} if runs else {"send of a rank to itself as a computation": 1})
    assert (node.comm is not None) == runs


def test_overlapping_nodes_do_not_count_their_time_twice() -> None:
    nodes = [
        one(1, 0, 100),
        one(2, 50, 100, runs_on=("stream", (0, 8))),  # half of it beside the first
        one(3, 60, 20, runs_on=("stream", (0, 9))),  # all of it
        one(4, 10, 100, comm=comm("all_reduce", 96)),  # the network is free
        one(5, 20, 100, comm=comm("all_gather", 960)),
        one(6, 30, 50, comm=comm("recv", 96)),  # receives are exempt
        one(7, 0, 30, is_cpu=True, runs_on=("thread", 1)),
        one(8, 20, 30, is_cpu=True, runs_on=("thread", 2)),
    ]
    nodes[-1].dependencies.append(Dependency(6, "sync"))
    assert lower(nodes, 0) == {"shortened by the time of other threads or streams that overlap": 4}
    assert [node.duration_ns for node in nodes] == [100, 50, 0, 100, 10, 50, 30, 20]


def test_no_rank_with_host_nodes_ends_with_a_message() -> None:
    host = {"is_cpu": True, "runs_on": ("thread", 1)}
    nodes = [one(1, 0, 10, **host), one(2, 10, 30, comm=comm("send", 96)), one(3, 10, 10, comm=comm("recv", 96))]
    nodes.append(one(4, 20, 10, **host))
    nodes[-1].dependencies = [Dependency(3, "sync")]
    assert lower(nodes, 0) == {"a node without time after messages without a dependent node": 1}
    waits = [Dependency(2, "sync", inferred=True)]
    assert nodes[-1] == ChakraNode(5, MESSAGES_END, ("thread", 1), 40, 0, is_cpu=True, dependencies=waits)
    assert lower(nodes, 0) == {}


def test_without_host_nodes_a_rank_may_end_with_a_message() -> None:
    nodes = [one(1, 0, 10), one(2, 10, 30, comm=comm("send", 96))]
    assert lower(nodes, 0) == {}
    assert len(nodes) == 2


def test_a_supported_collective_is_unchanged() -> None:
    node = one(1, 0, 10, comm=comm("all_reduce", 96))
    assert lower([node], 0) == {}
    assert node.comm == comm("all_reduce", 96)


def exchange(rank: int, sent: list[list[int]], *, lists: bool = False) -> list[ChakraNode]:
    """The nodes of a rank that makes an all_to_all: `sent` has the rows of 8 bytes from each member to each."""
    out, came = sent[rank], [row[rank] for row in sent]
    sides: dict[str, Any] = {"in_split": out, "out_split": came, "inputs": [[sum(out), 2]], "outputs": [[sum(came), 2]]}
    if lists:
        sides = {"inputs": [[rows, 2] for rows in out], "outputs": [[rows, 2] for rows in came]}
    record = CommRecord(id=0, op="all_to_all", c10d="", pg="0", bytes=8 * sum(out), t=0, dtype="float32", **sides)
    call = Comm(record, NumberedGroup(number="0", ranks=(0, 1, 2), pg="0"))
    nodes = [one(1, 0, 10), one(2, 10, 30, comm=call), one(3, 40, 10)]
    nodes[1].dependencies = [Dependency(1, "launch")]
    nodes[2].dependencies = [Dependency(2, "sync")]
    return nodes


@pytest.mark.parametrize("lists", [False, True])
def test_an_all_to_all_with_splits_becomes_sends_and_receives(lists: bool) -> None:
    sent = [[5, 1, 0], [2, 0, 4], [3, 3, 3]]
    messages = set()
    for rank in range(3):
        nodes = exchange(rank, sent, lists=lists)
        assert lower(nodes, rank, messages=True) == {"all_to_all with splits as its sends and receives": 1}
        between = [node for node in nodes if node.comm is not None]
        assert [node.id for node in nodes] == [1, *(node.id for node in between), 2, 3]
        assert all(node.dependencies == [Dependency(1, "launch")] for node in between)
        assert nodes[-2].comm is None
        assert {one.source for one in nodes[-2].dependencies} == {1, *(node.id for node in between)}
        for node in between:
            assert node.comm is not None
            record = node.comm.record
            messages.add((record.op, *message_ends(record, rank), record.bytes, record.p2p_seq))
    of = [(a, b, 8 * rows) for a, row in enumerate(sent) for b, rows in enumerate(row) if a != b and rows]
    assert messages == {(op, *message, (1 << 19) + 1) for op in ("send", "recv") for message in of}


def test_an_all_to_all_is_kept_without_messages_or_known_sizes() -> None:
    assert lower(exchange(0, [[1, 2, 3]] * 3), 0) == {}
    even = one(1, 0, 10, comm=comm("all_to_all", 96))
    assert lower([even], 0, messages=True) == {}
    assert even.comm == comm("all_to_all", 96)


def test_a_roofline_runs_gpu_nodes_without_num_ops_on_the_host() -> None:
    def nodes() -> list[ChakraNode]:
        return [
            one(1, 0, 10, flop=8, tensor_bytes=16),
            one(2, 10, 10, flop=8),
            one(3, 20, 10, tensor_bytes=16),
            one(4, 30, 10, is_cpu=True),
            one(5, 40, 10, comm=comm("all_reduce", 96)),
        ]

    text = "computation on a GPU without num_ops, as one of the host, which keeps its time"
    for roofline, on_host in ((True, [2, 3, 4]), (False, [4])):
        lowered = nodes()
        changed = lower(lowered, 0, roofline=roofline)
        assert [node.id for node in lowered if node.is_cpu] == on_host
        assert changed.get(text, 0) == len(on_host) - 1
