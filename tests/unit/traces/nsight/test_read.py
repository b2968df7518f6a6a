"""Kernels find their calls in exports of Nsight Systems, and what does not is counted."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrank.comm import MOST_RANKS
from crossrank.tools.job.job import Job
from crossrank.tools.job.launches import Launches, launches
from crossrank.tools.traces.nsight import read as reading
from crossrank.tools.traces.nsight.kernel_launches import innermost
from crossrank.tools.traces.nsight.markers import Meaning, Ranges
from crossrank.tools.traces.nsight.nccl import NO_PAYLOAD
from crossrank.tools.traces.nsight.rows import LEFT_OUT, SIZELESS
from crossrank.tools.traces.rank_trace import RankTrace
from tests.unit.traces.nsight.exports import EPOCH, SCHEMAS, ExportFile, Process, changed, read

SEND_RECV_KERNEL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def launched(times: RankTrace) -> Launches:
    return launches(Job.match([times]))


def rows(times: RankTrace) -> list[tuple[str, str, int, int, int, int]]:
    """(operation, group, number, id, begin, end) of every launch, in ns of the report."""
    job = Job.match([times])
    made = launches(job)
    moments = [pl.col(name) - EPOCH for name in ("began_ns", "ended_ns")]
    columns = made.calls.select("kind", "number", "id", *moments).fill_null(0).iter_rows()
    return [(made.kinds[kind].op, job.groups[made.kinds[kind].group].name, *others) for kind, *others in columns]


def two_calls(process: Process, *, at: int = 0, thread: int = 1) -> None:
    """Two all_reduces, each with a kernel that runs later than its marker's range."""
    for number in (1, 2):
        start = at + 1000 * number
        process.marker(start, start + 100, number, thread=thread)
        process.kernel(start + 50, start + 500, start + 900, thread=thread)


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("registered", [True, False])
def test_a_kernel_belongs_to_the_marker_around_its_launch(tmp_path: Path, schema: str, registered: bool) -> None:
    process = ExportFile(schema, registered=registered).process(70)
    process.identity(1)
    process.group()
    two_calls(process)
    process.kernel(5000, 5100, 5200, name="void at::native::elementwise_kernel()")
    times = read(process, tmp_path)
    assert rows(times) == [("all_reduce", "0", 1, 1, 1500, 1900), ("all_reduce", "0", 2, 2, 2500, 2900)]
    assert (times.rank, times.world_size, times.source, times.node) == (1, 2, "nsight", "host-a")
    assert times.groups[0].group.ranks == [0, 1]
    assert times.calls.called.tolist() == [EPOCH + 1000, EPOCH + 2000]
    assert times.calls.batch.tolist() == [-1, -1]
    assert dict(times.attributed) == {reading.IN_OURS: 2}
    assert not times.unattributed


@pytest.mark.parametrize("with_comms", [False, True])
def test_a_group_made_again_has_calls_of_its_own(with_comms: bool, tmp_path: Path, process: Process) -> None:
    process.identity(0)
    process.group(epoch=1, t=1500)
    process.group()
    for number in (1, 2):
        start = 1000 * number
        process.marker(start, start + 100, number, **({"epoch": 1} if number == 2 else {}))
        process.kernel(start + 50, start + 500, start + 900)
    calls = [{"id": number, "op": "all_reduce", "seq": 1, "epoch": number - 1} for number in (1, 2)]
    comms = write_comms(tmp_path / "rank-0.comms.jsonl", *calls, again=1) if with_comms else None
    found = rows(read(process, tmp_path, comms=comms))
    assert found == [("all_reduce", "0", 1, 1, 1500, 1900), ("all_reduce", "0 (no. 2)", 1, 2, 2500, 2900)]


def test_processes_with_the_same_correlation_ids_stay_separate(tmp_path: Path) -> None:
    export = ExportFile()
    for rank, pid in enumerate((70, 71)):
        process = export.process(pid)
        process.identity(rank)
        two_calls(process, at=7 * rank)
    decoy = export.process(72)  # another program, with the same ids again and no marker
    for number in (1, 2):
        decoy.kernel(1000 * number + 50, 100 * number, 100 * number + 5)
    first, second = reading.read_export(str(export.write(tmp_path / "a.sqlite")), None, {})
    assert [row[4:] for row in rows(first)] == [(1500, 1900), (2500, 2900)]
    assert [row[4:] for row in rows(second)] == [(1507, 1907), (2507, 2907)]
    assert (first.rank, second.rank) == (0, 1)
    assert first.notes == [f"{tmp_path}/a.sqlite: 2 communication kernels of 1 process(es) without any marker"]


def test_markers_of_other_threads_do_not_count(tmp_path: Path, process: Process) -> None:
    process.marker(1000, 9000, 1, thread=1)  # the main thread waits in a call of its own
    process.marker(2000, 2100, 2, thread=5)  # autograd's thread
    process.kernel(2050, 2500, 2900, thread=5)
    process.kernel(1050, 3000, 3300, thread=1)
    times = read(process, tmp_path, 3)
    assert [(row[3], row[4], row[5]) for row in rows(times)] == [(1, 3000, 3300), (2, 2500, 2900)]
    assert times.rank == 3


def test_the_innermost_range_counts(tmp_path: Path, process: Process) -> None:
    process.marker(1000, 9000, 1, op="broadcast")
    process.marker(2000, 2100, 2)
    process.marker(3000, None, 3)  # still open when the capture ended
    process.kernel(2050, 2500, 2900)
    process.kernel(2500, 3000, 3300)
    process.kernel(3500, 4000, 4400)
    times = read(process, tmp_path)
    shown = [(row[0], row[3], row[4]) for row in rows(times)]
    assert shown == [("broadcast", 1, 3000), ("all_reduce", 2, 2500), ("all_reduce", 3, 4000)]


def test_several_kernels_of_a_call_are_one_span(tmp_path: Path, process: Process) -> None:
    process.marker(1000, 1100, 1)
    process.kernel(1010, 1500, 1900)
    process.kernel(1050, 1700, 2300)
    times = read(process, tmp_path)
    assert [row[4:] for row in rows(times)] == [(1500, 2300)]
    assert dict(times.attributed) == {reading.IN_OURS: 2}


def test_the_calls_of_a_coalesced_launch_share_one_kernel(tmp_path: Path, process: Process) -> None:
    for number in (4, 5):
        process.marker(1000 + 10 * number, 1005 + 10 * number, number, op="all_gather", bytes=1000)
    process.event(59, 1100, 1200, json.dumps({"op": "coalesced", "pg": "0"}), payload=4)
    process.kernel(1150, 2000, 2600, name="ncclDevKernel_AllGather_RING_LL()")
    process.marker(3000, 3010, 6)
    process.kernel(3005, 3500, 3900)
    times = read(process, tmp_path)
    assert rows(times) == [("all_gather", "0", 1, 4, 2000, 2600), ("all_reduce", "0", 2, 6, 3500, 3900)]
    assert (launched(times).kinds[0].bytes, launched(times).kinds[0].calls) == (2000, 2)


def test_a_send_recv_launch_has_the_bytes_of_the_larger_direction(tmp_path: Path, process: Process) -> None:
    process.identity(0)
    process.marker(1000, 1005, 4, op="send", bytes=1000, peer=1)
    process.marker(1010, 1015, 5, op="recv", bytes=300, peer=1)
    process.event(59, 1100, 1200, json.dumps({"op": "coalesced", "pg": "0"}), payload=4)
    process.kernel(1150, 2000, 2600, name=SEND_RECV_KERNEL)
    times = read(process, tmp_path)
    assert rows(times) == [("send/recv", "0", 1, 4, 2000, 2600)]
    assert launched(times).kinds[0].bytes == 1000


def test_older_shim_markers_without_id_and_end_are_read(tmp_path: Path) -> None:
    for registered in (True, False):
        process = ExportFile(registered=registered).process(70)
        for number in (1, 2, 3):
            text = {"name": "all_reduce", "message_size": 4096, "group_ranks": [0, 2], "timestamp": number}
            process.event(34, 1000 * number, None, json.dumps(text))
            process.kernel(1000 * number + 999, 1000 * number + 500, 1000 * number + 900)
        times = read(process, tmp_path, 2)
        assert rows(times) == [("all_reduce", "0,2", n, n - 1, 1000 * n + 500, 1000 * n + 900) for n in (1, 2, 3)]
        assert times.groups[0].group.ranks == [0, 2]
        assert launched(times).kinds[0].bytes == 4096
        assert dict(times.attributed) == {reading.IN_OLD: 3}


def test_copies_between_gpus_are_used_if_no_kernel_was_launched(tmp_path: Path, process: Process) -> None:
    process.marker(1000, 1100, 1, op="all_gather")
    process.copy(1020, 2000, 2500)
    process.copy(1030, 2100, 2700, kind=1, to=1)
    process.copy(1040, 100, 9000, kind=8)  # within the device: a list is flattened
    process.marker(3000, 3100, 2)
    process.kernel(3050, 3500, 3900)
    process.copy(3060, 1, 9999)  # beside a kernel copies say nothing
    times = read(process, tmp_path)
    assert [row[4:] for row in rows(times)] == [(2000, 2700), (3500, 3900)]
    assert dict(times.attributed) == {reading.IN_OURS: 1, reading.COPIES: 2}


def test_launches_of_nccls_own_thread_match_calls_in_order_if_counts_agree(tmp_path: Path, process: Process) -> None:
    for number in (1, 2):
        process.marker(1000 * number, 1000 * number + 10, number)
        process.kernel(1000 * number + 200, 1000 * number + 500, 1000 * number + 900, thread=9)
    process.marker(5000, 5010, 3, op="broadcast")
    process.kernel(5005, 5100, 5200, name="ncclDevKernel_Broadcast_RING_LL()")
    process.marker(6000, 6010, 4, op="all_gather")
    process.kernel(6005, 7000, 7100, thread=9, stream=21)
    times = read(process, tmp_path)
    assert [row[3:] for row in rows(times)] == [(1, 1500, 1900), (2, 2500, 2900), (3, 5100, 5200), (4, 0, 0)]
    assert dict(times.attributed) == {reading.IN_OURS: 1, reading.IN_ORDER: 2}
    assert dict(times.unattributed) == {reading.NO_KERNEL: 1, reading.OUTSIDE: 1}


def test_a_kernel_that_starts_before_the_call_is_not_matched(tmp_path: Path, process: Process) -> None:
    process.marker(1000, 1010, 1, op="broadcast")
    process.kernel(1005, 1100, 1200, name="ncclDevKernel_Broadcast_RING_LL()")
    process.marker(2000, 2010, 2)
    process.kernel(200, 500, 900, thread=9)
    times = read(process, tmp_path)
    assert dict(times.unattributed) == {reading.NO_KERNEL: 1, reading.OUTSIDE: 1}
    assert times.unattributed_ns == 400


def test_graph_launches_are_counted_and_attributed_if_nodes_are_known(tmp_path: Path, process: Process) -> None:
    two_calls(process)
    process.marker(4000, 4100, 3)  # captured
    for number in (1, 2):
        process.kernel(5000 * number, 5000 * number + 100, 5000 * number + 300, graph_node=42)
    times = read(process, tmp_path)
    assert dict(times.unattributed) == {reading.GRAPHS: 2, reading.NO_KERNEL: 1}
    assert times.unattributed_ns == 400
    process.graph_node(4050, 7)  # made within the marker; 42 is the node of the executable graph
    process.graph_node(4500, 42, original=7)
    times = read(process, tmp_path)
    assert dict(times.attributed) == {reading.IN_OURS: 2, reading.IN_GRAPH: 2}
    assert dict(times.unattributed) == {reading.CAPTURED: 1}
    assert [times.calls.called[row] - EPOCH for row in (3, 4)] == [5000, 10000]
    assert (list(times.calls.number[-2:]), set(times.calls.batch)) == ([-1, -1], {-1})
    assert [row[3:] for row in rows(times)][3:] == [(3, 5100, 5300), (3, 10100, 10300)]


def test_graph_nodes_are_read_from_the_older_table(tmp_path: Path) -> None:
    process = ExportFile("3.0.0").process(70)
    process.marker(400, 410, 3)
    two_calls(process)
    process.kernel(5000, 5100, 5300, graph_node=7)
    process.kernel(6000, 6100, 6300, graph_node=7, launch=False)
    process.graph_node(405, 7)
    path = process.export.write(tmp_path / "a.sqlite")
    changed(path, "ALTER TABLE CUDA_GRAPH_NODE_EVENTS RENAME TO CUDA_GRAPH_EVENTS")
    (times,) = reading.read_export(str(path), None, {})
    assert dict(times.attributed) == {reading.IN_OURS: 2, reading.IN_GRAPH: 2}
    assert times.calls.called.tolist()[-2:] == [EPOCH + 5000, 0]


def test_normalised_times_already_count_from_1970(tmp_path: Path) -> None:
    plain, normalised = ExportFile().process(70), ExportFile().process(70)
    two_calls(plain)
    two_calls(normalised)
    for table in normalised.export.tables.values():
        for row in table:
            row |= {name: row[name] + EPOCH for name in ("start", "end") if row.get(name) is not None}
    relative, absolute = read(plain, tmp_path), read(normalised, tmp_path)
    assert dict(absolute.attributed) == {reading.IN_OURS: 2}
    assert (absolute.calls, absolute.notes) == (relative.calls, [])
    for start, called in ((1 << 56, EPOCH + (1 << 56)), ((1 << 56) + 1, (1 << 56) + 1)):
        late = ExportFile().process(70)
        late.marker(start, start + 1, 1)
        assert read(late, tmp_path).calls.called.tolist() == [called]


def test_nccls_own_ranges_are_used_if_our_markers_are_missing(tmp_path: Path, process: Process) -> None:
    process.nccl(10, 20, "ncclCommInitRankConfig", comm=0xABC, ranks=4, rank=2)
    process.nccl(1000, 1100, "ncclAllReduce", comm=0xABC, size=4096)
    process.kernel(1050, 1500, 1900)
    process.nccl(2000, 2100, "ncclAllGather", comm=0xABC, size=1024)
    process.kernel(2050, 2500, 2900, name="ncclDevKernel_AllGather_RING_LL()")
    process.nccl(3000, 3005, "ncclGroupStart")
    process.nccl(3010, 3015, "ncclSend", comm=0xABC, size=100, peer=3)
    process.nccl(3020, 3025, "ncclRecv", comm=0xABC, size=700, peer=1)
    process.nccl(3030, 3100, "ncclGroupEnd")
    process.kernel(3050, 3500, 3900, name=SEND_RECV_KERNEL)
    times = read(process, tmp_path)
    assert (times.rank, times.world_size) == (2, None)
    assert [note.partition(": ")[2] for note in times.notes] == [
        "rank 2 by its position in the largest captured communicator"
    ]
    assert [(row[0], row[1], row[4]) for row in rows(times)] == [
        ("all_reduce", "nccl:abc", 1500),
        ("all_gather", "nccl:abc", 2500),
        ("send/recv", "nccl:abc", 3500),
    ]
    assert [kind.bytes for kind in launched(times).kinds] == [4096, 4096, 700]
    assert [member.peer for member in times.signatures[2].members] == [3, 1]
    assert dict(times.attributed) == {reading.IN_NCCL: 3}


def test_nccl_ranges_without_payload_have_times_but_no_size(tmp_path: Path, process: Process) -> None:
    process.nccl(1000, 1100, "ncclAllReduce")
    process.kernel(1050, 1500, 1900)
    times = read(process, tmp_path, 0)
    assert [(kind.bytes, times.groups[0].group.pg) for kind in launched(times).kinds] == [(0, "nccl:?")]
    assert times.unattributed == {NO_PAYLOAD: 1}


@pytest.mark.parametrize(("ranks", "bytes"), [(0, 0), (1, 8), (MOST_RANKS, 8 * MOST_RANKS), (MOST_RANKS + 1, 0)])
def test_a_communicator_above_the_rank_limit_has_no_size(
    tmp_path: Path, process: Process, ranks: int, bytes: int
) -> None:
    process.nccl(10, 20, "ncclCommInitRankConfig", comm=0xABC, ranks=ranks, rank=0)
    process.nccl(30, 40, "ncclCommInitRankConfig", ranks=5, rank=0)
    process.nccl(1000, 1100, "ncclAllGather", comm=0xABC, size=8)
    process.kernel(1050, 1500, 1900)
    times = read(process, tmp_path, 0)
    assert [one.bytes for one in times.signatures] == [bytes]
    assert times.groups[0].group.size == (ranks if bytes else 0)


def test_kernels_without_launch_are_counted(tmp_path: Path, process: Process) -> None:
    two_calls(process)
    process.kernel(0, 0, 200, launch=False)
    assert dict(read(process, tmp_path).unattributed) == {reading.NO_LAUNCH: 1}


def old_marker(process: Process, at: int, **said: object) -> None:
    text = {"name": "all_reduce", "message_size": 4096, "group_ranks": [0, 1], "timestamp": at} | said
    process.event(34, at, None, json.dumps(text))


def test_a_marker_without_an_end_gets_only_its_own_kernel(tmp_path: Path, process: Process) -> None:
    old_marker(process, 1000)
    process.kernel(1100, 1500, 1900)
    process.kernel(2100, 2500, 2900)  # of a call that was not marked
    process.kernel(3100, 3500, 3900, name="ncclDevKernel_AllGather_RING_LL()")
    process.kernel(4100, 4500, 4900, graph_node=7)
    times = read(process, tmp_path, 0)
    assert [row[4:] for row in rows(times)] == [(1500, 1900)]
    assert dict(times.unattributed) == {reading.OUTSIDE: 2, reading.GRAPHS: 1}


def test_old_send_and_receive_markers_before_one_kernel_are_a_batch(tmp_path: Path, process: Process) -> None:
    old_marker(process, 500)
    process.kernel(510, 600, 700)
    for number, name in enumerate(("send", "recv", "send", "recv")):
        old_marker(process, 1000 + 10 * number, name=name, message_size=1000, peer_rank=1)
    process.kernel(1100, 1500, 1900, name=SEND_RECV_KERNEL)
    times = read(process, tmp_path, 0)
    assert [(row[0], row[4], row[5]) for row in rows(times)] == [("all_reduce", 600, 700), ("send/recv", 1500, 1900)]
    assert [(kind.bytes, kind.calls) for kind in launched(times).kinds if kind.op == "send/recv"] == [(2000, 4)]
    assert launched(times).sent == {0: {1: 2000}}


def test_a_batch_has_only_the_calls_since_its_id(tmp_path: Path, process: Process) -> None:
    for number in range(10):  # captured, or through symmetric memory: they launch nothing that is seen
        process.marker(100 * number, 100 * number + 50, number)
    for number in (10, 11):
        process.marker(1000 + 10 * number, 1005 + 10 * number, number, op="reduce_scatter", bytes=1000)
    process.event(59, 1200, 1300, json.dumps({"op": "coalesced", "pg": "0"}), payload=10)
    process.kernel(1250, 2000, 2600, name="ncclDevKernel_ReduceScatter_Sum_f32_RING_LL()")
    times = read(process, tmp_path)
    assert [(row[0], row[3]) for row in rows(times) if row[4]] == [("reduce_scatter", 10)]
    assert times.unattributed == {reading.NO_KERNEL: 10}
    assert [kind.calls for kind in launched(times).kinds if kind.op == "reduce_scatter"] == [2]


def test_a_launch_of_calls_that_were_not_emitted_is_not_ours(tmp_path: Path, process: Process) -> None:
    process.marker(1000, 1100, 1)
    process.kernel(1050, 1500, 1900)
    process.event(59, 2000, 2100, json.dumps({"op": "coalesced", "pg": "9"}), payload=2)
    process.kernel(2050, 2500, 2900, name=SEND_RECV_KERNEL)
    times = read(process, tmp_path)
    assert [row[3] for row in rows(times)] == [1]
    assert dict(times.attributed) == {reading.IN_OURS: 1, reading.NOT_EMITTED: 1}
    assert not times.unattributed
    alone = ExportFile().process(70)
    alone.event(59, 2000, 2100, json.dumps({"op": "coalesced", "pg": "9"}))
    alone.kernel(2050, 2500, 2900, name=SEND_RECV_KERNEL)
    assert dict(read(alone, tmp_path).attributed) == {reading.NOT_EMITTED: 1}


def write_comms(
    path: Path, *records: Mapping[str, object], pid: int | None = None, again: int = 0, **more: object
) -> str:
    header = {"schema": "crossrank-comms 1", "rank": 0, "world_size": 2, "host": "h", "node": "n", "pid": pid} | more
    steps: list[dict[str, object]] = [{"step": {"step": 7, "t": 50}}, {"step": {"t": 60}}]
    group = {"pg": "0", "size": 2, "ranks": [0, 1], "locality": "cross_node"}
    groups = [{"group": group | {"epoch": epoch}} for epoch in range(again + 1)]
    rest = {"c10d": "", "pg": "0", "t": 0, "bytes": 4_000_000}
    whole = [{"id": record["id"], **rest, **record} for record in records]  # a record begins with its id
    path.write_text("\n".join(map(json.dumps, [{"header": header}, *groups, *steps, *whole])) + "\n")
    return str(path)


@pytest.mark.parametrize(("clock", "began"), [({"t": 5, "wall": 105}, 150), ({}, 50)])
def test_a_comms_file_gives_numbers_and_steps_for_marker_ids(
    tmp_path: Path, process: Process, clock: dict[str, int], began: int
) -> None:
    process.identity(0)
    two_calls(process)
    comms = write_comms(
        tmp_path / "rank-0.comms.jsonl",
        {"id": 1, "op": "all_reduce", "seq": 41, "step": 7},
        {"id": 2, "op": "all_reduce", "seq": 42, "step": 7},
        clock=clock,
    )
    times = read(process, tmp_path, comms=comms)
    assert [row[2:4] for row in rows(times)] == [(41, 1), (42, 2)]
    assert times.calls.step.tolist() == [7, 7]
    assert times.calls.called.tolist() == [EPOCH + 1000, EPOCH + 2000]
    assert (times.numbered, times.numbered_pairs, times.steps) == (True, True, [(7, began)])
    assert (times.world_size, times.node) == (2, "n")


def test_calls_of_a_batch_are_one_launch_even_if_only_one_has_a_marker(tmp_path: Path, process: Process) -> None:
    process.identity(0)
    process.marker(1000, 1005, 4, op="send", bytes=100)
    process.event(59, 1100, 1200, json.dumps({"op": "coalesced", "pg": "0"}), payload=4)
    process.kernel(1150, 2000, 2600, name=SEND_RECV_KERNEL)
    send, receive = ({"id": id, "op": op, "batch": 4, "bytes": 100} for id, op in ((4, "send"), (5, "recv")))
    comms = write_comms(tmp_path / "c", {"id": 3, "op": "send"}, send, receive, {"id": 6, "op": "send"})
    times = read(process, tmp_path, comms=comms)
    assert [[member.op for member in one.members] for one in times.signatures] == [["send", "recv"]]
    assert (times.calls.id.tolist(), times.calls.ended.tolist()) == ([4], [EPOCH + 2600])


@pytest.mark.parametrize(("calls", "is_used"), [(99, False), (100, True)])
def test_one_record_in_a_hundred_may_differ_from_its_marker(
    tmp_path: Path, process: Process, calls: int, is_used: bool
) -> None:
    process.identity(0)
    for number in range(calls):
        process.marker(10 * number, 10 * number + 5, number, bytes=1)
    records = ({"id": number, "op": "all_reduce", "seq": number + 1, "bytes": 1} for number in range(1, calls))
    comms = write_comms(tmp_path / "c", {"id": 0, "op": "all_reduce", "seq": 1, "bytes": 2}, *records)
    assert read(process, tmp_path, comms=comms).numbered == is_used


@pytest.mark.parametrize(
    "other", [{"op": "all_gather"}, {"op": "all_reduce", "bytes": 8}, {"op": "all_reduce", "pg": "5"}]
)
def test_a_comms_file_of_another_run_is_skipped(tmp_path: Path, process: Process, other: dict[str, object]) -> None:
    process.identity(0)
    two_calls(process)
    comms = write_comms(tmp_path / "rank-0.comms.jsonl", *({"id": n, "seq": n} | other for n in (1, 2)))
    times = read(process, tmp_path, comms=comms)
    assert [row[:4] for row in rows(times)] == [("all_reduce", "0", 1, 1), ("all_reduce", "0", 2, 2)]
    assert launched(times).kinds[0].bytes == 4_000_000
    assert times.notes == [f"{comms}: is not of the same run as {tmp_path}/a.sqlite, and was skipped"]


def test_nested_nccl_groups_are_one_launch(tmp_path: Path, process: Process) -> None:
    process.identity(1)
    process.nccl(10, 20, "ncclCommInitRankConfig", comm=0xABC, ranks=2, rank=0)
    process.nccl(1000, 1005, "ncclGroupStart")
    for start in (1010, 1050):
        process.nccl(start, start + 5, "ncclGroupStart")
        process.nccl(start + 10, start + 15, "ncclAllGather", comm=0xABC, size=512)
        process.nccl(start + 20, start + 25, "ncclGroupEnd")
    process.nccl(1100, 1200, "ncclGroupEnd")
    process.kernel(1150, 1500, 1900, name="ncclDevKernel_AllGather_RING_LL()")
    times = read(process, tmp_path)
    assert [(row[0], row[4]) for row in rows(times)] == [("all_gather", 1500)]
    assert (launched(times).kinds[0].bytes, launched(times).kinds[0].calls) == (2048, 2)
    assert (times.rank, times.notes) == (1, [])


def test_a_lost_end_of_an_nccl_group_costs_this_group_alone(tmp_path: Path, process: Process) -> None:
    process.nccl(10, 20, "ncclCommInitRankConfig", comm=0xABC, ranks=2, rank=0)
    for number, start in enumerate(range(1000, 6000, 1000)):
        process.nccl(start, start + 5, "ncclGroupStart")
        process.nccl(start + 10, start + 15, "ncclAllGather", comm=0xABC, size=512)
        if number != 1:
            process.nccl(start + 100, start + 200, "ncclGroupEnd")
        process.kernel(start + 150, start + 500, start + 900, name="ncclDevKernel_AllGather_RING_LL()")
    times = read(process, tmp_path, 0)
    assert [(row[0], row[4]) for row in rows(times)] == [
        ("all_gather", start + 500) for start in (1000, 3000, 4000, 5000)
    ]
    assert dict(times.unattributed) == {reading.OUTSIDE: 1}


def test_an_nccl_group_started_before_the_capture_is_one_launch_and_ends_once(tmp_path: Path, process: Process) -> None:
    for start, function in ((1000, "ncclSend"), (1010, "ncclRecv")):
        process.nccl(start, start + 5, function, comm=0xABC, size=100, peer=1)
    for start in (1100, 2100):
        process.nccl(start, start + 100, "ncclGroupEnd")
        process.kernel(start + 50, start + 500, start + 900, name=SEND_RECV_KERNEL)
    times = read(process, tmp_path, 0)
    assert [(kind.op, kind.calls, kind.bytes) for kind in launched(times).kinds] == [("send/recv", 2, 100)]
    assert dict(times.attributed) == {reading.IN_NCCL: 1}
    assert dict(times.unattributed) == {reading.OUTSIDE: 1}


def test_peers_in_a_communicator_with_unknown_ranks_are_unknown(tmp_path: Path, process: Process) -> None:
    process.nccl(1000, 1100, "ncclSend", comm=0xABC, size=100, peer=1)
    process.kernel(1050, 1500, 1900, name=SEND_RECV_KERNEL)
    assert [kind.ends for kind in launched(read(process, tmp_path, 4)).kinds] == [None]


def test_processes_without_a_rank_get_it_from_their_comms_file_or_are_numbered(tmp_path: Path) -> None:
    export = ExportFile()
    for pid in (72, 71, 70, 73):
        two_calls(export.process(pid))
    export.process(73).identity(0, 4)
    comms = {rank: write_comms(tmp_path / f"rank-{rank}", pid=pid) for rank, pid in ((1, 71), (9, 1 << 24 | 9))}
    found = reading.read_export(str(export.write(tmp_path / "a.sqlite")), 7, comms)
    assert [(times.rank, times.world_size) for times in found] == [(2, None), (1, None), (3, None), (0, 4)]
    assert [note.partition(": ")[2] for note in found[0].notes] == [
        "2 process(es) have no rank: crossrank numbers them in the order of their ids"
    ]
    assert found[1].notes == [f"{comms[1]}: is not of the same run as {tmp_path}/a.sqlite, and was skipped"]


def test_adjacent_markers_of_one_kind_without_ids_are_a_batch(tmp_path: Path, process: Process) -> None:
    process.identity(0)
    ops = ("all_reduce", "send", "recv", "send")
    for number, op in enumerate(ops):
        process.marker(1000 + 10 * number, 1005 + 10 * number, None, op=op, bytes=100 * (number + 1), peer=1)
    process.event(59, 1100, 1200, json.dumps({"op": "coalesced", "pg": "0"}))
    process.kernel(1150, 2000, 2600, name=SEND_RECV_KERNEL)
    process.marker(3000, 3010, None, left_out={"in_split": 4})
    process.kernel(3005, 3500, 3900)
    process.event(59, 4000, 4010, json.dumps({"op": "all_gather", "pg": "1"}))
    process.kernel(4005, 4500, 4900, name="ncclDevKernel_AllGather_RING_LL()")
    times = read(process, tmp_path, comms=str(tmp_path / "not opened"))  # there are no ids to look up
    assert [(row[0], row[1], *row[3:]) for row in rows(times)] == [
        ("all_reduce", "0", 0, 0, 0),
        ("send/recv", "0", 1, 2000, 2600),
        ("all_reduce", "0", 2, 3500, 3900),
        ("all_gather", "1", 3, 4500, 4900),
    ]
    assert [one.bytes for one in times.signatures] == [900, 100, 4_000_000, 0]
    assert dict(times.unattributed) == {reading.NO_KERNEL: 1, LEFT_OUT: 1, SIZELESS: 1}


def test_nccl_ranges_are_used_with_a_comms_file_but_have_no_numbers(tmp_path: Path, process: Process) -> None:
    process.identity(0)
    two_calls(process)
    for start, function in ((5000, "ncclAllGather"), (6000, "ncclCommDestroy")):
        process.nccl(start, start + 100, function, comm=0xABC, size=8)
        process.kernel(start + 50, start + 200, start + 300, name="ncclDevKernel_AllGather_RING_LL()")
    comms = write_comms(tmp_path / "c", *({"id": number, "op": "all_reduce", "seq": number} for number in (1, 3)))
    times = read(process, tmp_path, comms=comms)
    assert [(one.id, one.seq, one.pg) for one in times.records()] == [(1, 1, "0"), (-1, -1, "nccl:abc")]
    assert dict(times.attributed) == {reading.IN_OURS: 1, reading.IN_NCCL: 1}
    assert times.unattributed_ns == 500
    assert dict(times.unattributed) == {
        f"markers whose id is not in {comms}": 1,
        reading.OUTSIDE: 2,
        "the size of the communicator is unknown: its creation was not captured": 1,
    }


# --- the join, against a plain search ---------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40), st.integers(0, 25)), max_size=12), st.randoms())
def test_the_innermost_range_matches_a_plain_search(spans: list[tuple[int, int, int]], random: random.Random) -> None:
    import numpy as np

    nested: list[tuple[int, int, int]] = []
    for thread, start, length in sorted(spans, key=lambda span: (span[1], -span[2])):
        end = start + length
        # Push/pop ranges of a thread lie apart or within each other.
        if all(other != thread or end <= last or start > last for other, _, last in nested):
            nested.append((thread, start, end))
    columns = [np.array([span[i] for span in nested], np.int64) for i in range(3)]
    zeros = np.zeros(len(nested), np.int64)
    ranges = Ranges(columns[1], columns[2], columns[0], zeros, zeros, zeros, zeros.astype(bool), [Meaning(0)])
    asked = [(thread, moment) for thread in (1, 2, 3) for moment in range(-1, 70)]
    random.shuffle(asked)
    threads, moments = (np.array([one[i] for one in asked], np.int64) for i in range(2))
    for (thread, moment), found in zip(asked, innermost(ranges, threads, moments).tolist(), strict=True):
        around = [i for i, (t, start, end) in enumerate(nested) if t == thread and start <= moment <= end]
        shortest = min((nested[i][2] - nested[i][1], -nested[i][1]) for i in around) if around else None
        if shortest is None:
            assert found == -1
        else:
            assert found in around
            assert nested[found][2] - nested[found][1] == shortest[0]


def test_a_kernel_without_usable_times_keeps_the_place_of_its_call(tmp_path: Path, process: Process) -> None:
    """Calls without numbers are counted: a lost one would shift all later ones."""
    for number, (start, end) in enumerate([(1500, 1900), (2500, 5), (3500, 3900)], 1):
        process.nccl(1000 * number, 1000 * number + 100, "ncclAllReduce")
        process.kernel(1000 * number + 50, start, end)
    times = read(process, tmp_path, 0)
    assert [(row[0], row[4] > 0) for row in rows(times)] == [
        ("all_reduce", True),
        ("all_reduce", False),
        ("all_reduce", True),
    ]
