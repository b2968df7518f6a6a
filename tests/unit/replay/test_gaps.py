"""The gaps of a plan are the time in which a rank did something else than wait for its communication."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crossrank.comm import CommRecord
from crossrank.replay.plan.build_plan import build
from crossrank.replay.run.pacing import computed_ns
from crossrank.tools.graph.linking.window_files import RankInput
from crossrank.tools.job.read_rank import RankSources, read_kineto_with_pair
from crossrank.tools.traces.rank_trace import RankTrace, TraceBuilder, Waits
from tests.unit.graph.linking.small_traces import FLOATS, SmallTrace, comm_params
from tests.unit.graph.linking.test_communications import SCHEMA, TENSORS
from tests.unit.replay.plans import rank_trace, record

_WALL = 1_700_000_000_000_000_000
"""When the calls begin."""


MS = 1_000_000


@dataclass(frozen=True)
class Called:
    """A call with its times, all in ns of one clock; None = not recorded."""

    record: CommRecord
    t: int
    returned: int | None = None
    began: int | None = None
    took: int | None = None


def traced_calls(*calls: Called) -> RankTrace:
    trace = rank_trace(0, [], world=1)
    builder = TraceBuilder(trace)
    trace.waits = Waits()
    for call in calls:
        began = 0 if call.began is None else _WALL + call.began
        builder.add(
            msgspec.structs.replace(call.record, id=call.t), called=_WALL + call.t, began=began, took=call.took or 0
        )
        trace.waits.before.append(-1)
        trace.waits.blocking.append(-1)
        trace.waits.returned.append(0 if call.returned is None else _WALL + call.returned)
    return trace


def gaps(*calls: Called) -> list[tuple[int, bool]]:
    plan = build([traced_calls(*calls)], "job", "comms")
    return [(call.gap_ns, call.gap_from_return) for call in plan.ranks[0].calls]


BLOCKING: dict[str, Any] = {"api": "all_reduce", "is_async": False}
ASYNC: dict[str, Any] = {"api": "all_reduce", "is_async": True}


@pytest.mark.parametrize(
    ("first", "next_at", "gap"),
    [
        # A call that blocked: from when it was over, or its launch returned, whichever is later.
        (BLOCKING | {"returned": 1100, "took": 170_000}, 175_050, (4000, True)),
        (BLOCKING | {"returned": 1100, "took": 170_000}, 171_050, (0, True)),
        (BLOCKING | {"returned": 9000, "took": 100}, 13_000, (4000, True)),
        # An asynchronous call runs in the gap: from when its launch returned.
        (ASYNC | {"returned": 1100, "took": 170_000}, 175_100, (174_000, True)),
        # What is launched before a call that blocked was over follows its launch.
        (BLOCKING | {"returned": 1100, "took": 170_000}, 5000, (4000, False)),
    ],
)
def test_a_gap_starts_when_the_rank_can_go_on(first: dict[str, Any], next_at: int, gap: tuple[int, bool]) -> None:
    how = {name: first[name] for name in ("api", "is_async")}
    call = Called(record("all_reduce", **how), 1000, returned=first["returned"], began=1050, took=first["took"])
    assert gaps(call, Called(record("barrier"), next_at)) == [(0, False), gap]


@pytest.mark.parametrize("times", [{}, {"returned": 1100}, {"returned": 1100, "took": 170_000}])
def test_a_blocking_call_with_unknown_end_has_a_gap_from_launch_to_launch(times: dict[str, int]) -> None:
    first = Called(record("all_reduce", **BLOCKING), 1000, **times)
    after = build([traced_calls(first, Called(record("barrier"), 175_000))], "job", "comms").ranks[0].calls[1]
    assert (after.gap_ns, after.gap_from_return, after.exposed_ns) == (174_000, False, times.get("took", 0))


def test_the_host_sees_the_end_of_a_call_timed_by_its_work() -> None:
    trace = traced_calls(
        Called(record("all_reduce", **BLOCKING), 1000),
        Called(record("all_reduce", **ASYNC), 175_000),
        Called(record("barrier"), 190_000),
    )
    trace.timed_by = "work"
    for row, (began, ended) in enumerate(((1000, 171_000), (175_000, 180_000))):
        trace.calls.began[row], trace.calls.ended[row] = _WALL + began, _WALL + ended
    calls = build([trace], "job", "comms").ranks[0].calls
    assert [(call.gap_ns, call.gap_from_return) for call in calls] == [(0, False), (4000, True), (15_000, False)]


def test_a_batch_is_one_launch_with_one_gap_before_and_one_after() -> None:
    member = record("all_reduce", batch=10_000, **ASYNC)
    batch = [Called(member, 10_000 + 100 * number, returned=10_050 + 100 * number) for number in range(3)]
    found = gaps(Called(record("barrier"), 1000), *batch, Called(record("barrier"), 20_000))
    assert found == [(0, False), (9000, False), (0, False), (0, False), (9750, True)]
    without = [Called(call.record, call.t) for call in batch]
    assert gaps(*without, Called(record("barrier"), 20_000))[-1] == (10_000, False)


def test_computation_in_a_gap_excludes_the_awaited_communication() -> None:
    # The host is ahead of its GPU: it launches three calls of 10 ms at once, waits for them, and computes for 8 ms.
    blocking = record("all_reduce", **BLOCKING)
    launched = [Called(blocking, t * MS, began=(10 * t) * MS, took=10 * MS) for t in range(3)]
    later = Called(blocking, 38 * MS, began=38 * MS, took=10 * MS)
    source = traced_calls(*launched, later, Called(record("barrier"), 50 * MS))
    calls = build([source], "job", "linked").ranks[0].calls
    assert [call.gap_ns for call in calls] == [0, MS, MS, 36 * MS, 12 * MS]
    assert computed_ns(calls) == [0, 0, 0, 8 * MS, 2 * MS]


def test_asynchronous_communication_overlaps_computation() -> None:
    first = Called(record("all_reduce", **ASYNC), 0, began=0, took=10 * MS)
    source = traced_calls(first, Called(record("barrier"), 50 * MS))
    assert computed_ns(build([source], "job", "linked").ranks[0].calls) == [0, 50 * MS]


def traced(folder: Path, name: str, *, on_gpu: bool) -> list[tuple[int, bool]]:
    """The gaps of a rank that makes a call of 170 ms, launched in 100 us, and another one 4 ms after it was over."""
    trace = SmallTrace()
    blocking = TENSORS | {"values": [[FLOATS], "<Object>", False]}
    world = {"pg_name": "0", "pg_size": 1, "ranks": [0]}
    trace.kineto_head["distributedInfo"] |= {"world_size": 1, "pg_config": [world]}
    params = comm_params(name, [1, False], size=1)
    for number, ts in enumerate((0, 174_100)):
        if on_gpu:
            call = trace.op("record_param_comms", ts, 100, inputs=params)
            trace.op(f"nccl:{name}", ts + 10, 70, call)
            trace.launch(f"ncclDevKernel_{name}(x)", ts + 20, ts + 100, 170_000, 501 + number, stream=20)
        else:
            call = trace.op("c10d::allreduce_", ts, 100, inputs=blocking, op_schema=SCHEMA)
            trace.op("gloo:all_reduce", ts + 100, 170_000, call)
    et, kineto = trace.write(folder)
    calls = read_kineto_with_pair(
        RankSources(kind="kineto", path=kineto, rank=0, windows=(RankInput(rank=0, window=1, et=et, kineto=kineto),))
    )
    (rank,) = build([calls], str(folder), "linked", world_size=1).ranks
    return [(call.gap_ns, call.gap_from_return) for call in rank.calls]


@pytest.mark.parametrize(
    ("name", "on_gpu", "gap"),
    [
        ("all_reduce", False, (4_000_000, True)),  # after the Work of a call of gloo that blocked
        ("allreduce", True, (174_100_000, False)),  # the host does not follow what a GPU communicates,
        ("barrier", True, (4_000_000, True)),  # but for a barrier, for which it waits
    ],
)
def test_a_linked_call_is_followed_by_a_gap(name: str, on_gpu: bool, gap: tuple[int, bool], tmp_path: Path) -> None:
    assert traced(tmp_path, name, on_gpu=on_gpu) == [(0, False), gap]
