"""Linking traces that others recorded: counts that were found by other means."""

from __future__ import annotations

from collections import Counter

import pytest

from crossrank.tools.graph.linking import LinkedTrace, link
from tests.unit.graph.linking.public_traces import needs_traces, public

pytestmark = needs_traces


def linked(name: str) -> LinkedTrace:
    return link(public(f"{name}.et.json.gz"), public(f"{name}.kineto.json.gz"))


@pytest.mark.parametrize("rank", range(8))
def test_every_operation_and_activity_of_dlrm_is_linked(rank: int) -> None:
    result = linked(f"dlrm_8gpu/rank-{rank}")
    report = result.report
    assert (report.host_nodes, report.host_matched) == (1672, {"sequence of names": 1672})
    assert report.activities_unlinked == {}
    assert sum(report.activities_linked.values()) == len(result.activities)
    assert report.communications == {"record_param_comms": 8}
    assert [c.record.op for c in result.communications] == ["all_to_all"] * 4 + ["all_reduce", "all_to_all"] + [
        "all_reduce"
    ] * 2
    for communication in result.communications:
        assert len(communication.activities) == 1
        assert communication.group is not None
        assert communication.group.ranks == list(range(8))
    # The two files hold neighbouring iterations of the job.
    assert ["sequence numbers differ by 40" in warning for warning in report.warnings] == [True, True, False]
    assert report.warnings[2].endswith(
        "has an address as its name, which differs between ranks: match it by its members"
    )


def test_stream_waits_are_equal_on_every_rank_of_dlrm() -> None:
    waits = []
    for rank in range(8):
        result = linked(f"dlrm_8gpu/rank-{rank}")
        names = {activity.id: activity.name[:20] for activity in result.activities}
        edges = [edge for edge in result.edges if edge.kind == "stream_wait"]
        waits.append(sorted((names[edge.source], names[edge.target]) for edge in edges))
        # What waited went on within microseconds of the end of the last thing it waited for.
        assert sorted(edge.slack_ns for edge in edges if edge.slack_ns is not None)[len(edges) // 2] < 20_000
    assert len(waits[0]) == 14
    assert waits == [waits[0]] * 8


def test_the_optimizer_of_dlrm_waits_for_the_all_reduces_of_its_gradients() -> None:
    for rank in range(8):
        result = linked(f"dlrm_8gpu/rank-{rank}")
        hosts = {op.id: op.name for op in result.host}
        activities = {activity.id: activity for activity in result.activities}
        reduces = {kernel for c in result.communications if c.record.op == "all_reduce" for kernel in c.activities}
        targets = [edge.target for edge in result.edges if edge.kind == "stream_wait" and edge.source in reduces]
        assert len(targets) == 3
        assert {hosts[activities[target].host or 0] for target in targets} == {"aten::addcmul_"}


def test_the_splits_of_dlrm_match_across_its_ranks() -> None:
    records = [[c.record for c in linked(f"dlrm_8gpu/rank-{rank}").communications] for rank in range(8)]
    exchanges = [calls[3] for calls in records]
    for sender, sent in enumerate(exchanges):
        for receiver, received in enumerate(exchanges):
            assert sent.in_split is not None
            assert received.out_split is not None
            assert sent.in_split[receiver] == received.out_split[sender]
    assert {record.seq for record in exchanges} == {150}


def test_linear_is_matched_to_the_step_of_its_sequence_numbers() -> None:
    result = linked("linear_1gpu/rank-0")
    report = result.report
    assert (report.host_nodes, report.host_matched, report.warnings) == (928, {"sequence of names": 928}, [])
    assert Counter(activity.category for activity in result.activities) == {"kernel": 220, "gpu_memset": 41}
    assert report.activities_outside == {"launched before or after the execution trace": 8716 + 1640 - 261}
    assert report.activities_unlinked == {}


def test_files_of_different_jobs_are_refused() -> None:
    with pytest.raises(Exception, match="are not of the same run"):
        link(public("dlrm_8gpu/rank-0.et.json.gz"), public("linear_1gpu/rank-0.kineto.json.gz"))


@pytest.mark.parametrize("name", ["dlrm_8gpu/rank-3", "linear_1gpu/rank-0"])
def test_a_graph_of_a_real_trace_is_sound(name: str) -> None:
    result = linked(name)
    starts = {op.id: op.start_ns for op in result.host} | {a.id: a.start_ns for a in result.activities}
    assert all(op.exclusive_ns is None or 0 <= op.exclusive_ns <= (op.duration_ns or 0) for op in result.host)
    assert len({(edge.source, edge.target, edge.kind) for edge in result.edges}) == len(result.edges)
    backward: Counter[str] = Counter()
    for edge in result.edges:
        before, after = starts[edge.source], starts[edge.target]
        if before is not None and after is not None and before > after:
            backward[edge.kind] += 1
    assert backward == {}
