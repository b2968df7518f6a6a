"""Linking what real gloo jobs recorded."""

from __future__ import annotations

from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import crossrank
from crossrank.recording import COMMS, EXECUTION_TRACE, KINETO, file_name
from crossrank.tools.cli import main
from crossrank.tools.graph.linking import link
from crossrank.tools.graph.linking.event_matching import match_hosts
from crossrank.tools.traces.execution_trace import read_execution_trace
from crossrank.tools.traces.kineto import read_kineto
from tests.integration.traces import load, records_of
from tests.integration.world import TwoRanks, World


def train(rank: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.ones(2, 8)).sum().backward()
        ops = [dist.P2POp(dist.isend, torch.ones(3), 1 - rank), dist.P2POp(dist.irecv, torch.ones(3), 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        funcol.all_reduce(torch.ones(5), "max", group=[0, 1]).sum().item()
        dist.all_to_all_single(torch.empty(3), torch.ones(3), [1 + rank, 2 - rank], [1 + rank, 2 - rank])
        dist.barrier()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def trained(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording of `train`, with a window."""
    folder = tmp_path_factory.mktemp("trained")
    world.run(train, folder, window="2:4")
    return folder / "recording"


def paths(recording: Path, rank: int) -> list[str]:
    return [str(recording / file_name(kind, rank)) for kind in (EXECUTION_TRACE, KINETO, COMMS)]


def test_every_communication_of_a_gloo_window_is_in_the_graph_with_its_record(trained: Path) -> None:
    for rank in (0, 1):
        et, kineto, comms = paths(trained, rank)
        result = link(et, kineto, comms)
        wanted = [record for record in records_of(trained, rank) if 2 <= record.step < 4]
        assert len(wanted) == 2 * 6
        assert [c.record for c in result.communications] == wanted
        assert {c.origin for c in result.communications} == {"comms file"}
        assert all(c.group is not None and c.group.ranks == [0, 1] for c in result.communications)
        assert result.report.host_rate > 0.99
        in_order = [edge for edge in result.edges if edge.kind == "group_order"]
        assert len(in_order) == 4 * 2 - 1 + (2 - 1) * 2  # the collectives; sends; receives

        # Without the comms file the ranges in the execution trace say the same, but for what changes at every call.
        alone = link(et, kineto).communications
        assert {c.origin for c in alone} == {"crossrank range"}
        assert [(c.record.id, c.record.op, c.record.bytes, c.record.pg, c.record.peer) for c in alone] == [
            (record.id, record.op, record.bytes, record.pg, record.peer) for record in wanted
        ]


def test_a_gloo_call_has_the_range_of_its_work(trained: Path) -> None:
    result = link(*paths(trained, 0))
    ops = {op.id: op for op in result.host}
    for communication in result.communications:
        if communication.record.op in ("all_reduce", "all_to_all"):
            assert communication.work is not None
            work = ops[communication.work]
            assert work.name == f"gloo:{communication.record.op}"
            assert work.is_work
            assert work.duration_ns is not None
            assert work.duration_ns > 0


def test_forward_and_backward_are_linked_as_in_kineto(trained: Path) -> None:
    for rank in (0, 1):
        et, kineto, comms = paths(trained, rank)
        result = link(et, kineto, comms)
        ours = {(edge.source, edge.target) for edge in result.edges if edge.kind == "forward_backward"}
        assert ours == _arrows(et, kineto, load(trained, KINETO, rank), ours)


def _arrows(et: str, kineto: str, raw: Any, ours: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Kineto's `fwdbwd` arrows as pairs of node ids; an arrow's end touches every event that begins where it does."""
    host, device = read_execution_trace(et), read_kineto(kineto)
    match = match_hosts(host, device)
    nodes: dict[tuple[object, object, int], set[int]] = defaultdict(set)
    for event, position in zip(device.host, match.node_of, strict=True):
        if position >= 0:
            nodes[event.pid, event.tid, event.start].add(host.nodes[position].id)
    ends: dict[int, dict[str, set[int]]] = defaultdict(dict)
    for event in raw["traceEvents"]:
        if event.get("cat") == "fwdbwd":
            ends[event["id"]][event["ph"]] = nodes[event["pid"], event["tid"], int(Decimal(repr(event["ts"])) * 1000)]
    assert len(ends) > 10
    arrows = set()
    for arrow in ends.values():
        touching = [(source, target) for source in arrow["s"] for target in arrow["f"]]
        arrows.add(next((pair for pair in touching if pair in ours), touching[0]))
    return arrows


def test_the_command_links_a_recording_and_finds_nothing_wrong(trained: Path) -> None:
    assert main(["link", str(trained), "--jobs", "1"]) == 0
    for rank in (0, 1):
        trace = load(trained, "linked", rank)
        assert sum("comm" in node for node in trace["nodes"]) == 12
        assert trace["crossrank"]["rank"] == rank


def test_no_edge_runs_against_time(trained: Path) -> None:
    for rank in (0, 1):
        result = link(*paths(trained, rank))
        starts = {op.id: op.start_ns for op in result.host}
        for edge in result.edges:
            before, after = starts[edge.source], starts[edge.target]
            assert before is None or after is None or before <= after, edge


def _waits(rank: int) -> None:
    with crossrank.window():
        dist.all_reduce(torch.ones(1000))
        torch.ones(7).exp()
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        assert work is not None
        torch.ones(8).cos()
        work.wait()
        torch.ones(9).sin()


def test_the_host_continues_when_the_work_of_a_call_is_done(two_ranks: TwoRanks) -> None:
    two_ranks.run(_waits)
    result = link(*paths(two_ranks.recording, 0))
    first, second = result.communications
    ops = {op.id: op for op in result.host}
    syncs = {edge.source: edge for edge in result.edges if edge.kind == "sync"}
    sure = syncs[first.work or 0]
    assert ops[sure.target].name == "aten::ones"
    assert not sure.inferred
    if second.work in syncs:  # the Work may have ended while the host still computed
        assert syncs[second.work].inferred
        assert ops[syncs[second.work].target].start_ns is not None
    else:
        assert result.report.syncs_unresolved == {"the traces show no wait for the end of a Work": 1}
