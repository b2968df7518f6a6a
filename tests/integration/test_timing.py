"""How long calls of a CPU backend take, recorded without a window: `TRACING_TIMING=1`, on real gloo."""

from __future__ import annotations

import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from crossrank.recording import Ran
from crossrank.tools.traces.comms import read_comms
from crossrank.tools.traces.rank_trace import COMPLETED
from tests.integration.jobs import RECORDING, Scripts
from tests.integration.names import needs_gloo_recorder
from tests.integration.world import TwoRanks

LATE = 0.2  # s


def times(two_ranks: TwoRanks, rank: int) -> list[Ran]:
    return sorted(two_ranks.recorded(rank).ran, key=lambda one: one.id)  # they end in any order


def _late(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        time.sleep(LATE)
    work = dist.all_reduce(torch.ones(8), async_op=True)
    dist.all_reduce(torch.ones(8))
    time.sleep(LATE)
    work.wait()


def test_a_duration_is_from_launch_to_end_and_ignores_the_wait(two_ranks: TwoRanks) -> None:
    two_ranks.run(_late, timing=True, recorder="compiled")
    early, late = times(two_ranks, 0), times(two_ranks, 1)
    assert [one.id for one in early] == [one.id for one in late] == [1, 2]  # a barrier has no tensor to tell its device
    assert LATE * 0.5e9 < early[0].took < 60e9
    assert late[0].took < early[0].took
    trace = read_comms(two_ranks.recorded().path)
    took = [ended - began for began, ended in zip(trace.calls.began, trace.calls.ended, strict=True)]
    assert took[1:] == pytest.approx([one.took for one in early], rel=0.01)  # the wall clock is slewed
    assert trace.calls.called[1] <= trace.calls.began[1]
    assert list(trace.calls.state)[1:] == [COMPLETED, COMPLETED]
    assert (trace.timed_by, trace.calls.ended[0]) == ("work", 0)


def _untimed(rank: int) -> None:
    dist.all_reduce(torch.ones(8))


def test_call_ends_are_not_timed_by_default(two_ranks: TwoRanks) -> None:
    two_ranks.run(_untimed, recorder="compiled")
    assert times(two_ranks, 0) == []


def test_the_python_recorder_warns_that_it_cannot_time_calls(scripts: Scripts) -> None:
    source = "crossrank.enable()\ndist.all_reduce(torch.ones(8))\n"
    result = scripts(TRACING_TIMING="1", TRACING_RECORDER="python").python(source)
    said = "crossrank: durations of calls on a CPU backend are not recorded: they need the compiled recorder"
    assert result.stderr.splitlines()[0] == said


def test_a_timed_job_has_bandwidths_without_a_window(scripts: Scripts) -> None:
    scripts(TRACING_TIMING="1").ranks("""
        import torch, torch.distributed as dist, crossrank
        dist.init_process_group("gloo")
        crossrank.enable()
        for _ in range(5):
            dist.all_reduce(torch.ones(1 << 20))
        dist.destroy_process_group()
        """)
    printed = scripts.crossrank("bandwidth", RECORDING).stdout
    assert "measured   the recording (TRACING_TIMING=1): from the launch of a call to the end of its Work" in printed
    assert "5 timed collectives and transfers (10 of 10 calls have a measured time)" in printed


# There is no NCCL without a GPU. torch's recorder is the same for gloo, but that it lacks durations: here the number of
# a call within its group stands for them.
NUMBERED = """
import orjson
from crossrank.instrument.record.python_recorder import PythonRecorder
from crossrank.instrument.write import device_times

def recorder(self):
    content = orjson.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))
    for entry in content.get("entries", []):
        if entry["profiling_name"] != "gloo:reduce":  # of which torch never notices the end
            entry["duration_ms"] = float(entry["collective_seq_id"])
            entry["time_discovered_completed_ns"] = time.time_ns()
    return orjson.dumps(content)

device_times._BACKEND = "gloo"
PythonRecorder.nccl_recorder = recorder
"""
CALLS = """
reads = []

def counted(self):
    reads.append(True)
    return recorder(self)

PythonRecorder.nccl_recorder = counted
device_times._PATIENCE = 60.0  # a busy machine may need longer than a job's end should take
dist.all_reduce(torch.ones(8))  # what was called before is of no record
crossrank.enable(timing=True)
other = dist.new_group([0], group_desc="other")
for number in range(1500):
    dist.all_reduce(torch.ones(8))
    dist.broadcast(torch.ones(8), 0, group=other)
    if number % 100 == 0:
        dist.reduce(torch.ones(8), 0)
    if number % 300 == 0:  # the recorder keeps 2000 entries: each is read before it leaves
        before = len(reads)
        while len(reads) == before:
            time.sleep(0.01)
"""


@needs_gloo_recorder
def test_device_durations_match_their_calls_while_the_flight_recorder_wraps(scripts: Scripts) -> None:
    result = scripts(TRACING_RECORDER="python", TRACING_FLIGHT="0").python(NUMBERED + CALLS)
    assert result.stderr.count("crossrank: ") == 1, result.stderr
    file = scripts.recorded()
    calls = {one.id: one for one in file.calls}
    took = {one.id: one.took for one in file.ran if one.on_device}
    world = [one for one in calls.values() if one.pg == "0"]
    assert took == {
        one.id: ((one.seq or 0) + (one.pg == "0")) * 1_000_000 for one in calls.values() if one.op != "reduce"
    }
    assert (len(took), len(world)) == (3000, 1515)
    assert min(one.t - calls[one.id].t for one in file.ran) >= 0


@needs_gloo_recorder
def test_lost_durations_warn_once_and_the_others_are_kept(scripts: Scripts) -> None:
    loop = """
may_read, reads = threading.Event(), []
may_read.set()

def counted(self):
    reads.append(may_read.wait())
    return recorder(self)

PythonRecorder.nccl_recorder = counted
device_times._PATIENCE = 60.0  # a busy machine may need longer than a job's end should take
crossrank.enable(timing=True)
while len(reads) < 3:  # what the first reading gave has been joined to its calls by then
    dist.all_reduce(torch.ones(8))
    time.sleep(0.01)
may_read.clear()
for _ in range(1500):
    dist.all_reduce(torch.ones(8))
may_read.set()
while len(reads) < 6:
    dist.all_reduce(torch.ones(8))
    time.sleep(0.01)
"""
    result = scripts(TRACING_RECORDER="python", TORCH_FR_BUFFER_SIZE="300").python(NUMBERED + loop)
    lost = [line for line in result.stderr.splitlines() if "before they were read" in line]
    assert len(lost) == 1
    assert lost[0].endswith(
        "entries left torch's flight recorder of 300 before they were read; TORCH_FR_BUFFER_SIZE=3000 keeps more"
    )
    file = scripts.recorded()
    number = {one.id: one.seq or 0 for one in file.calls}
    last = max(number.values())
    assert 300 <= len(file.ran) < last
    assert all(one.took == number[one.id] * 1_000_000 for one in file.ran)
    assert {number[one.id] for one in file.ran} >= set(range(last - 299, last + 1))


@needs_gloo_recorder
def test_an_unresponsive_device_loses_only_durations(scripts: Scripts) -> None:
    source = """
    PythonRecorder.nccl_recorder = lambda self: time.sleep(600)
    crossrank.enable(timing=True)
    for number in range(200):
        dist.all_reduce(torch.ones(8))
        time.sleep(0.01)
    began = time.monotonic()
    crossrank.disable()
    print(time.monotonic() - began)
    """
    result = scripts(TRACING_RECORDER="python").python(NUMBERED + textwrap.dedent(source))
    assert float(result.stdout) < 5
    file = scripts.recorded()
    assert len(file.calls) == 200
    assert (file.end["reason"], file.ran) == ("disable", [])
    assert "torch's flight recorder did not answer within 1 s at the end" in result.stderr


@pytest.mark.parametrize(
    ("variable", "why"),
    [
        ("TORCH_FR_BUFFER_SIZE", "torch's flight recorder is off (TORCH_FR_BUFFER_SIZE=0)"),
        ("TORCH_NCCL_CUDA_EVENT_CACHE", "torch's flight recorder cannot be read safely with "),
    ],
)
def test_an_unusable_flight_recorder_is_reported(variable: str, why: str, scripts: Scripts) -> None:
    source = (
        "crossrank.enable(timing=True)\nfor _ in range(3):\n    dist.all_reduce(torch.ones(8))\n    time.sleep(0.3)\n"
    )
    result = scripts(TRACING_RECORDER="python", **{variable: "0"}).python(NUMBERED + source)
    (said,) = (line for line in result.stderr.splitlines() if "NCCL calls" in line)
    assert said.startswith(f"crossrank: durations are missing for some NCCL calls: {why}")


def test_many_waits_per_call_are_written_without_drops(scripts: Scripts) -> None:
    source = """
    crossrank.enable()
    for _ in range(4000):
        work = dist.all_reduce(torch.ones(8), async_op=True)
        for _ in range(4):
            work.wait()
        time.sleep(0.0003)
    """
    scripts(TRACING_RING="4096").python(source)
    file = scripts.recorded()
    assert len(file.calls) == 4000
    assert (file.end["spans"], file.end["spans_dropped"]) == (len(file.waits), 0)
    assert len(file.waits) >= 16000
