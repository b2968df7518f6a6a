"""Every kind of file gives the calls of its rank, with waits and durations where it has them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crossrank.errors import CrossrankError
from crossrank.replay.plan.build_plan import build, settle
from crossrank.replay.plan.plan import Plan
from crossrank.replay.plan.replay_inputs import find, read
from crossrank.tools.parallel import Fleet
from crossrank.tools.traces.discover import PLAN, look
from tests.unit.graph.linking.public_traces import needs_traces, public
from tests.unit.replay.plans import ops, plan_of, rank_trace, record, waits

SCHEMAS = ("1.0.1", "1.0.2-chakra.0.0.4", "1.0.3-chakra.0.0.4", "1.1.0-chakra.0.0.4", "1.1.1-chakra.0.0.4")
_TENSOR = [7, 8, 0, 256, 4, "cuda:0"]


def et_node(schema: str, number: int, name: str, seq: int, *, peer: int = 0, tensor: bool = True) -> dict[str, Any]:
    """A `record_param_comms` node in the layout of a schema."""
    group: Any = 94594108284448 if schema == "1.0.1" else "0"
    if schema.startswith(("1.0.3", "1.1")):
        group = ["0", "default_pg"]
    values: list[Any] = [seq, group, peer, name, [], []]
    shapes: list[Any] = [[], [], [], [], [], []]
    types = ["Int", "Int", "Int", "String", "GenericList[]", "GenericList[]"]
    if schema.startswith("1.1"):
        values[0] = [seq, name in ("send", "recv")]
    if schema.startswith(("1.0.3", "1.1")):
        values += [0, 1, 2]
        shapes += [[], [], []]
        types += ["Int", "Int", "Int"]
    if tensor:
        values, shapes, types = [[_TENSOR], *values], [[[256]], *shapes], ["GenericList[Tensor(float)]", *types]
    if schema == "1.0.1":
        return {
            "name": "record_param_comms", "id": number, "rf_id": number, "parent": 1, "fw_parent": 0, "seq_id": -1,
            "scope": 0, "tid": 1, "fw_tid": 0, "op_schema": "",
            "inputs": values, "input_shapes": shapes, "input_types": types,
            "outputs": [], "output_shapes": [], "output_types": [],
        }  # fmt: skip
    attributes: list[tuple[str, str, Any]] = [("rf_id", "uint64", number), ("tid", "uint64", 1)]
    if schema.startswith("1.1"):
        attributes += [("collective_name", "string", name), ("dtype", "string", "Float"), ("pg_name", "string", "0"),
                       ("in_msg_nelems", "uint64", 256), ("out_msg_nelems", "uint64", 256), ("pg_size", "uint64", 2),
                       ("global_rank_start", "uint64", 0), ("global_rank_stride", "uint64", 1)]  # fmt: skip
    return {
        "id": number, "name": "record_param_comms", "ctrl_deps": 1,
        "inputs": {"values": values, "shapes": shapes, "types": types},
        "outputs": {"values": [], "shapes": [], "types": []},
        "attrs": [{"name": key, "type": kind, "value": value} for key, kind, value in attributes],
    }  # fmt: skip


def write_et(folder: Path, schema: str, rank: int) -> None:
    nodes = [
        et_node(schema, 5, "wait", 6, tensor=False),
        et_node(schema, 10, "allreduce", 7),
        et_node(schema, 11, "allreduce", 8),
        et_node(schema, 12, "wait", 7, tensor=False),
        et_node(schema, 13, "barrier", 9),
    ]
    if schema.startswith(("1.0.1", "1.0.2")):
        # These do not describe groups; the splits of an exchange tell the size of the world.
        exchange = et_node(schema, 14, "all_to_allv", 10)
        values = exchange["inputs"] if schema == "1.0.1" else exchange["inputs"]["values"]
        values[-2:] = [[128, 128], [128, 128]]
        nodes.append(exchange)
    if schema.startswith("1.0.2"):
        config = json.dumps([{"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1], "group_size": 2}])
        nodes.append({
            "id": 2, "name": "## process_group:init ##", "ctrl_deps": 1,
            "inputs": {"values": [config], "shapes": [[]], "types": ["String"]},
            "outputs": {"values": [], "shapes": [], "types": []}, "attrs": [],
        })  # fmt: skip
    with gzip.open(folder / f"rank-{rank}.json.gz", "wt") as file:
        json.dump({"schema": schema, "pid": 1, "nodes": nodes}, file, indent=1)


def plan_at(path: object, **options: Any) -> Plan:
    found = find(str(path))
    plan = build(read(found, Fleet()), str(path), found.kind, **options)
    settle(plan)
    return plan


@pytest.mark.parametrize("schema", SCHEMAS)
def test_execution_traces_of_every_schema_give_their_calls_and_waits(schema: str, tmp_path: Path) -> None:
    for rank in (0, 1):
        write_et(tmp_path, schema, rank)
    plan = plan_at(tmp_path)
    old = schema.startswith(("1.0.1", "1.0.2"))
    assert plan.kind == "et"
    assert ops(plan) == ["all_reduce", "all_reduce", "barrier"] + (["all_to_all"] if old else [])
    # The second waits at once: a trace that has waits has none for it.
    assert waits(plan)[:3] == [2, 2, 3]
    assert [group.ranks for group in plan.groups] == [[0, 1]]
    first = plan.ranks[1].calls[0].record
    assert (first.inputs, first.dtype, first.bytes) == ([[256]], "float32", 1024)
    assert plan.notes == [
        "2 recorded wait(s) are for calls before the trace, and are not replayed",
        "2 recorded wait(s) are replayed at their original position",
        "execution traces have no times, so there are no gaps to keep",
    ]


def kineto_event(name: str, start: float, correlation: int, **args: Any) -> list[dict[str, Any]]:
    common = {"In msg nelems": 256, "Out msg nelems": 256, "Group size": 2, "dtype": "BFloat16"}
    group = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "stream": 7, "correlation": correlation}
    described = {"Collective name": name} | common | group | args
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": start, "dur": 5}
    kernel = {"ph": "X", "cat": "kernel", "name": f"ncclDevKernel_{name}", "pid": 0, "tid": 7, "ts": start + 100}
    return [launch | {"args": {"correlation": correlation}}, kernel | {"dur": 40.5, "args": described}]


def test_kineto_traces_give_the_calls_that_their_kernels_describe(tmp_path: Path) -> None:
    for rank in (0, 1):
        events = [
            *kineto_event("reduce_scatter", 2000.0, 2, **{"In msg nelems": 512}),
            *kineto_event("allreduce", 1000.0, 1),
        ]
        trace = {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}
        (tmp_path / f"worker{rank}.json").write_text(json.dumps(trace))
    plan = plan_at(tmp_path)
    assert plan.kind == "kineto"
    shown = [(call.record.op, call.record.bytes, call.took_ns, call.gap_ns) for call in plan.ranks[1].calls]
    assert shown == [("all_reduce", 512, 40_500, 0), ("reduce_scatter", 1024, 40_500, 1_000_000)]


@needs_traces
def test_the_real_traces_of_eight_ranks_are_replayed_whole_with_their_uneven_splits() -> None:
    plan = plan_at(public("dlrm_8gpu"))
    assert plan.world_size == 8
    assert plan.coverage().complete
    for rank in plan.ranks:
        assert [call.record.op for call in rank.calls] == [
            *["all_to_all"] * 4, "all_reduce", "all_to_all", "all_reduce", "all_reduce",
        ]  # fmt: skip
    exchange = [rank.calls[3].record for rank in plan.ranks]
    assert exchange[0].in_split == [96, 224, 288, 1664, 592, 96, 192, 240]
    for sender, one in enumerate(exchange):
        for receiver, other in enumerate(exchange):
            assert (one.in_split or [])[receiver] == (other.out_split or [])[sender]


@needs_traces
@pytest.mark.parametrize(
    ("case", "calls"), [("clean", 80), ("clean_no_timing", 80), ("wrapped_clean", 200), ("alltoallv_clean", 36)]
)
def test_flight_dumps_of_healthy_jobs_are_replayed_whole(case: str, calls: int) -> None:
    coverage = plan_at(public(f"flight/{case}")).coverage()
    assert (coverage.calls, coverage.reasons) == (calls, {})


@needs_traces
def test_a_dump_of_a_hung_job_is_refused_or_replayed_up_to_the_hang() -> None:
    with pytest.raises(CrossrankError, match="missing_rank: all_reduce #4 on default_pg"):
        plan_at(public("flight/missing_one"))
    coverage = plan_at(public("flight/missing_one"), partial=True).coverage()
    assert (coverage.calls, coverage.recorded_calls) == (48, 51)
    assert coverage.reasons == {"another rank of its group has no such call": 3}


@needs_traces
def test_a_kineto_trace_of_one_rank_asks_for_the_other() -> None:
    with pytest.raises(CrossrankError, match=r"has no file of rank 1 of 2; add it, or .*--one-trace"):
        plan_at(public("nccl_2gpu"))


def test_a_plan_is_known_by_its_content(tmp_path: Path) -> None:
    from crossrank.replay.plan.plan import save_plan

    path = tmp_path / "anything"
    save_plan(plan_of([record("barrier")]), path)
    assert (look(str(path)).kind, look(str(path)).rank) == (PLAN, None)


@pytest.mark.parametrize("content", ["", "hello", "{}", "[1, 2]", '{"nodes": []}', '{"traceEvents": []}', "\x00" * 64])
def test_a_file_that_is_not_a_trace_is_refused_in_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_text(content)
    with pytest.raises(CrossrankError) as refused:
        plan_at(tmp_path)
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def test_a_cut_off_trace_is_refused_with_its_place(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_et(tmp_path, SCHEMAS[-1], rank)
        whole = gzip.decompress((tmp_path / f"rank-{rank}.json.gz").read_bytes())
        (tmp_path / f"rank-{rank}.json.gz").unlink()
        (tmp_path / f"rank-{rank}.json").write_bytes(whole[: len(whole) * 3 // 4] if rank else whole)
    with pytest.raises(CrossrankError, match=r"rank-1\.json: cut off or broken after \d nodes; \d whole nodes"):
        plan_at(tmp_path)
    assert plan_at(tmp_path, partial=True).coverage().share_of_calls < 1


def test_files_without_a_rank_in_name_or_content_are_numbered_in_order(tmp_path: Path) -> None:
    for name in ("first.json", "second.json"):
        (tmp_path / name).write_text(json.dumps({"traceEvents": kineto_event("allreduce", 1000.0, 1)}))
    assert [rank.rank for rank in plan_at(tmp_path).ranks] == [0, 1]


@pytest.mark.parametrize(("given", "missing"), [(5, "1-3 of 5"), (None, "1-3 of 4")])
def test_a_missing_world_size_comes_from_the_option_or_the_groups(given: int | None, missing: str) -> None:
    calls = replace(rank_trace(0, [record("barrier")], {"0": [0, 1, 2, 3]}), world_size=None)
    with pytest.raises(CrossrankError, match=f"has no file of rank {missing};"):
        build([calls], "p", "et", world_size=given)


def test_a_file_without_rank_and_group_is_rank_0_of_1() -> None:
    calls = replace(rank_trace(0, [record("barrier")], world=1), rank=None, world_size=None)
    plan = build([calls], "p", "et")
    assert (plan.world_size, [rank.rank for rank in plan.ranks]) == (1, [0])
