"""What the files of one rank say of its calls: times, waits, and what they were matched by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from crossrank.recording import COMMS, EXECUTION_TRACE, KINETO, LINKED
from crossrank.tools.graph.linking.link import link
from crossrank.tools.graph.linking.linked_file import write_linked
from crossrank.tools.graph.linking.window_files import RankInput
from crossrank.tools.job.read_rank import READERS, RankSources
from crossrank.tools.traces.rank_trace import RankTrace
from tests.unit.graph.linking.small_traces import SmallTrace, comm_params
from tests.unit.job.test_sources import MS, WALL, comms, dump, entry
from tests.unit.replay.test_readers import SCHEMAS, et_node

US = 1000
BASE = 1714644000_000_000_000


def called(trace: SmallTrace, name: str, seq: int, at: float, took: float) -> None:
    inputs = comm_params(name, seq)
    if name == "wait":  # without a tensor
        inputs = {field: given[1:] for field, given in inputs.items()}
    trace.op("record_param_comms", at, took, inputs=inputs)


def window() -> SmallTrace:
    """Two all_reduces, the second of two kernels, a barrier and a broadcast without a kernel; waits for 2, 1, 9."""
    trace = SmallTrace()
    called(trace, "allreduce", 1, 100, 50)
    trace.launch("ncclDevKernel_AllReduce_Sum_f32(x)", 105, 110, 20, 500, stream=20)
    called(trace, "allreduce", 2, 200, 50)
    trace.launch("ncclDevKernel_AllReduce_Sum_f32(x)", 205, 210, 20, 501, stream=20)
    trace.launch("ncclDevKernel_AllReduce_Sum_f32(x)", 215, 250, 30, 502, stream=20)
    called(trace, "wait", 2, 300, 5)
    called(trace, "barrier", 3, 400, 50)
    trace.launch("ncclDevKernel_AllReduce_Sum_f32(x)", 405, 410, 20, 503, stream=20)
    called(trace, "wait", 1, 500, 5)
    called(trace, "wait", 9, 505, 5)
    called(trace, "broadcast", 4, 600, 60)
    for at in range(10):
        trace.op("aten::mm", 2000 + 10 * at, 5)
    return trace


def columns(trace: RankTrace) -> list[tuple[float, ...]]:
    """(called, began, ended) of each call in us from BASE, -1 = not known."""
    calls = trace.calls
    rows = zip(calls.called, calls.began, calls.ended, strict=True)
    return [tuple((one - BASE) / US if one else -1 for one in row) for row in rows]


def test_a_linked_window_gives_times_and_waits(tmp_path: Path) -> None:
    et, kineto = window().write(tmp_path)
    pair = RankInput(rank=3, window=1, et=et, kineto=kineto)
    linked = tmp_path / "linked.json"
    write_linked(link(et, kineto, None, rank=3), str(linked))
    for given in (
        RankSources(kind=KINETO, path=kineto, rank=3, windows=(pair,)),
        RankSources(kind=LINKED, path=str(linked), rank=None),
    ):
        trace = READERS[given.kind](given)
        assert (trace.rank, trace.path, trace.timed_by, trace.numbered_pairs) == (3, given.path, "kineto", False)
        assert [record.op for record in trace.records()] == ["all_reduce", "all_reduce", "barrier", "broadcast"]
        assert trace.numbered
        assert columns(trace) == [(100, 110, 130), (200, 210, 280), (400, 410, 430), (600, -1, -1)]
        assert trace.waits is not None
        assert (trace.waits.before.tolist(), trace.waits.blocking.tolist()) == ([3, 2, -1, -1], [0, 0, -1, 1])
        assert [one and (one - BASE) / US for one in trace.waits.returned] == [0, 0, 450, 660]
        assert (trace.waits.recorded, trace.waits.without_call) == (2, 1)
        assert trace.matched == {"host operations": (17, 17), "GPU activities": (4, 4)}
        assert trace.span == (BASE, BASE + 1800 * 10**9)


def test_windows_give_times_to_the_calls_of_a_comms_file(tmp_path: Path) -> None:
    records = [{"id": n, "op": "all_reduce", "seq": 1 + n, "t": 1000 * n} for n in range(5)]
    comms(tmp_path, 0, records)
    pairs = []
    for number, ids in ((1, (0, 1)), (2, (3, 9))):
        small = SmallTrace()
        for at, identity in enumerate(ids):
            small.op(f"crossrank#{identity}", 100 * at + 10, 20)
            small.launch("ncclDevKernel_AllReduce_Sum_f32(x)", 100 * at + 15, 100 * at + 20 * number, 30, 500 + at)
        for at in range(10):
            small.op("aten::mm", 2000 + 10 * at, 5)
        (tmp_path / str(number)).mkdir()
        et, kineto = small.write(tmp_path / str(number))
        comms_file = str(tmp_path / "rank-0.comms.jsonl")
        pairs.append(RankInput(rank=0, window=number, et=et, kineto=kineto, comms=comms_file))
    missing = RankInput(rank=0, window=3, et="", kineto="", linked=str(tmp_path / "none.json"))
    given = RankSources(kind=COMMS, path=comms_file, rank=0, windows=(missing, *pairs))
    trace = READERS[COMMS](given)
    times = [(began - BASE, ended - BASE) if ended else None for _, began, ended in
             zip(trace.calls.id, trace.calls.began, trace.calls.ended, strict=True)]  # fmt: skip
    assert times == [(20 * US, 50 * US), (120 * US, 150 * US), None, (40 * US, 70 * US), None]
    assert (trace.timed_by, trace.placed, len(trace)) == ("kineto", True, 5)
    assert trace.matched == {"host operations": (24, 24), "GPU activities": (4, 4)}
    assert [note.partition(": ")[0] for note in trace.notes] == ["its durations are not used"]

    whole = Path(pairs[1].et).read_bytes()
    Path(pairs[1].et).write_bytes(whole[: len(whole) * 3 // 4])
    assert READERS[COMMS](given).notes[1:] == [
        f"{pairs[1].et}: cut off or broken after 11 nodes; 11 whole nodes were read"
    ]


@pytest.mark.parametrize(("world_size", "size"), [(None, 2), (3, 0)])
def test_an_execution_trace_alone_gives_the_order_of_calls_and_waits(
    tmp_path: Path, world_size: int | None, size: int
) -> None:
    old = SCHEMAS[0]
    exchange = et_node(old, 14, "all_to_allv", 10)
    exchange["inputs"][-2:] = [[128, 128], [128, 128]]
    nodes = [et_node(old, 10, "allreduce", 7), et_node(old, 11, "allreduce", 7), et_node(old, 13, "strange", 9)]
    nodes += [et_node(old, 12, "wait", 7, tensor=False), exchange, et_node(old, 16, "wait", 7, tensor=False)]
    path = tmp_path / "rank-0.json"
    path.write_bytes(orjson.dumps({"schema": old, "pid": 1, "nodes": nodes}))
    trace = READERS[EXECUTION_TRACE](RankSources(kind=EXECUTION_TRACE, path=str(path), rank=0, world_size=world_size))
    assert [record.op for record in trace.records()] == ["all_reduce", "all_reduce", "all_to_all", "strange"]
    assert (trace.timed, trace.numbered, trace.calls.called.tolist()) == (False, False, [0] * 4)
    assert [one.group.size for one in trace.groups][:1] == [size]
    assert trace.waits is not None
    assert trace.waits.before.tolist() == [3, 2, -1, -1]
    assert trace.waits.blocking.tolist() == [0, 0, 1, 1]
    assert trace.notes == []


def test_a_dump_gives_durations_to_the_calls_of_a_comms_file(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"id": n, "op": op, "seq": 1 + n, "t": 20 * MS * n}
        for n, op in enumerate(("all_reduce", "barrier", "all_reduce", "all_reduce", "broadcast"))
    ]
    batch: dict[str, Any] = {"op": "all_gather", "batch": 5, "seq": 6}
    records += [batch | {"id": 5 + n, "t": 100 * MS + n} for n in range(2)]
    entries = [
        entry(0, "all_reduce", -1, 3.0),  # of a call that fell out of the record
        entry(1, "all_reduce", 0, 4.0),
        entry(2, "all_reduce", 20.5, 5.0),  # no barrier
        entry(3, "all_reduce", 44.999, 6.0),
        entry(4, "all_reduce", 65, 7.0),  # its communicator was made first
        entry(5, "broadcast", 80.1, 8.0, duration_ms=None),
        entry(6, "coalesced", 101, 9.0, time_discovered_started_ns=None, input_sizes=[], output_sizes=[]),
    ]
    comms(tmp_path, 0, records)
    dump(tmp_path, 0, entries, ours=True)
    paths = (str(tmp_path / f"rank-0.{name}") for name in ("comms.jsonl", "flight.json"))
    trace = READERS[COMMS](RankSources(kind=COMMS, path=next(paths), rank=0, flight=next(paths)))
    calls = trace.calls
    assert [one / MS for one in calls.took] == [4, 0, 6, 7, 8, 9, 9]
    assert [one and (one - WALL) / MS for one in calls.began] == [0, 0, 44.999, 65, 80.1, 101, 101]
    assert [one and (one - WALL) / MS for one in calls.ended] == [4, 0, 50.999, 72, 88.1, 110, 110]
    assert (trace.timed_by, trace.placed) == ("flight", False)
    (tmp_path / "rank-0.flight.json").write_text("[]")
    given = RankSources(kind=COMMS, path=trace.path, rank=0, flight=str(tmp_path / "rank-0.flight.json"))
    trace = READERS[COMMS](given)
    assert (trace.timed_by, trace.placed, len(trace.notes)) == ("comms", True, 1)


def test_recorded_device_durations_need_no_dump(tmp_path: Path) -> None:
    comms(tmp_path, 0, [{"id": n, "op": "all_reduce", "seq": 1 + n, "t": 20 * MS * n} for n in range(3)])
    path = tmp_path / "rank-0.comms.jsonl"
    ran = {"id": 1, "t": 21 * MS, "took": 4 * MS, "on_device": True}
    path.write_bytes(path.read_bytes() + orjson.dumps({"ran": ran}) + b"\n")
    trace = READERS[COMMS](RankSources(kind=COMMS, path=str(path), rank=0))
    assert [trace.took(row) for row in range(3)] == [None, 4 * MS, None]
    assert (trace.timed_by, trace.placed) == ("flight", False)
