"""Windows of execution trace and Kineto: whole files, and every record of the window in both of them."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.autograd.profiler
import torch.distributed as dist
import torch.profiler
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import crossrank
from crossrank.instrument import api, unpatched
from crossrank.recording import list_recording
from crossrank.tools.graph.linking import link
from tests.integration import jobs
from tests.integration.traces import execution_trace_ids, kineto_ids, load, process_groups
from tests.integration.world import TwoRanks


def _train(rank: int, iterations: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(iterations):
        model(torch.ones(4)).sum().backward()
        ops = [dist.P2POp(dist.isend, torch.ones(1), 1 - rank), dist.P2POp(dist.irecv, torch.ones(1), 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        optimizer.step()
        optimizer.zero_grad()


def test_both_traces_have_the_id_of_every_call_in_a_window(two_ranks: TwoRanks) -> None:
    two_ranks.run(_train, 10, window="2:4:4")
    for rank in (0, 1):
        records = two_ranks.recorded(rank).calls
        for window, steps in ((1, (2, 3)), (2, (6, 7))):
            wanted = {record.id for record in records if record.step in steps}
            assert len(wanted) >= 6
            in_trace = execution_trace_ids(two_ranks.load("et", rank, window))
            in_kineto = kineto_ids(two_ranks.load("kineto", rank, window))
            assert set(in_trace) == wanted
            assert in_kineto == in_trace  # also the record-function ids
    assert list_recording(str(two_ranks.recording)).partial == ()


def test_kineto_has_the_groups_and_the_execution_trace_has_the_ranks(two_ranks: TwoRanks) -> None:
    two_ranks.run(_new_group_in_window)
    trace = two_ranks.load("et", rank=1)
    at_start, with_new_group = process_groups(trace)
    assert [(group["pg_name"], group["ranks"]) for group in at_start] == [("0", [0, 1])]
    assert [group["ranks"] for group in with_new_group] == [[0, 1], [0, 1]]
    assert with_new_group[1]["pg_desc"] == "late"
    assert two_ranks.load("kineto", rank=1)["distributedInfo"]["pg_config"][0]["ranks"] == [0, 1]


def _new_group_in_window(rank: int) -> None:
    with crossrank.window():
        dist.all_reduce(torch.ones(1))
        group = dist.new_group([0, 1], group_desc="late")
        dist.all_reduce(torch.ones(1), group=group)


def _other_threads(rank: int) -> None:
    with crossrank.window():
        thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),))
        thread.start()
        thread.join()
        dist.all_reduce(torch.ones(1))


def test_calls_of_other_threads_are_in_both_traces(two_ranks: TwoRanks) -> None:
    two_ranks.run(_other_threads)
    assert set(execution_trace_ids(two_ranks.load("et"))) == {0, 1}
    assert set(kineto_ids(two_ranks.load("kineto"))) == {0, 1}


def _first_iteration(rank: int, directory: str) -> None:
    # Tracing is on before the process group is there: the window opens with the first communication.
    dist.destroy_process_group()
    crossrank.enable(tracing="ALL", directory=directory, window="0:1", flight=False)
    dist.init_process_group("gloo", init_method=f"file://{directory}-store", rank=rank, world_size=2)
    _train(rank, 2)
    crossrank.disable()


def test_a_window_may_start_with_the_first_step(two_ranks: TwoRanks) -> None:
    two_ranks.run_bare(_first_iteration)
    wanted = {record.id for record in two_ranks.recorded().calls if record.step == 0}
    assert 0 in wanted
    assert set(execution_trace_ids(two_ranks.load("et"))) == wanted
    assert set(kineto_ids(two_ranks.load("kineto"))) == wanted


def _clock_steps_back(rank: int, directory: str) -> None:
    """The wall clock steps back by 2 ms in step 1, and the window would begin with step 2."""
    crossrank.enable(tracing="ALL", directory=directory, window="2:5")
    real = unpatched.time.time_ns
    with pytest.MonkeyPatch.context() as patch:
        for number in range(6):
            if number == 1:
                patch.setattr(unpatched.time, "time_ns", lambda: real() - 2_000_000)
            dist.all_reduce(torch.ones(1))
            crossrank.step()
        crossrank.disable()


def test_a_window_waits_for_a_wall_clock_that_steps_back(two_ranks: TwoRanks) -> None:
    two_ranks.run(_clock_steps_back, str(two_ranks.recording), record=False)
    edges = [(one["edge"], one["step"]) for one in two_ranks.recorded().windows]
    assert edges == [("open", 3), ("close", 4)]


def _losses(rank: int, directory: str | None) -> list[float]:
    torch.manual_seed(rank)
    if directory:
        crossrank.enable(tracing="ALL", directory=directory, window="1:3")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(5):
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    crossrank.disable()
    return [*losses, *(parameter.sum().item() for parameter in model.parameters())]


def test_training_is_bit_identical_with_tracing(two_ranks: TwoRanks) -> None:
    without = two_ranks.run(_losses, None, folder="off", record=False)
    assert two_ranks.run(_losses, str(two_ranks.recording), folder="on", record=False) == without


def reductions_in(profiler: torch.profiler.profile) -> int:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    return sum(event.get("name") == "c10d::allreduce_" for event in events)


def _users_profiler_runs(rank: int) -> int:
    with torch.profiler.profile() as profiler:
        dist.all_reduce(torch.ones(1))
        with crossrank.window():
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
    return reductions_in(profiler)


def test_a_window_does_not_stop_a_user_profiler(two_ranks: TwoRanks) -> None:
    assert two_ranks.run(_users_profiler_runs) == [3, 3]
    listing = list_recording(str(two_ranks.recording))
    assert [file.rank for file in listing.of_kind("et")] == [0, 1]
    assert listing.of_kind("kineto") == []


def _users_profiler_starts_inside(rank: int) -> int:
    with crossrank.window():
        dist.all_reduce(torch.ones(1))
        with torch.profiler.profile() as profiler:
            dist.all_reduce(torch.ones(1))
    return reductions_in(profiler)


def test_a_profiler_started_in_a_window_gets_all_its_events(two_ranks: TwoRanks) -> None:
    assert two_ranks.run(_users_profiler_starts_inside) == [1, 1]
    assert set(kineto_ids(two_ranks.load("kineto"))) == {0}  # up to there
    assert set(execution_trace_ids(two_ranks.load("et"))) == {0, 1}


def test_a_user_profiler_with_stacks_has_no_names_from_freed_memory(tmp_path: Path) -> None:
    """torch keeps no reference to the name of a module's code, which is freed when the module has been imported."""
    script = jobs.write_script(
        tmp_path,
        jobs.ONE_RANK
        + """
with crossrank.enable(), torch.profiler.profile(with_stack=True) as profiler:
    with torch.profiler.record_function("step"):
        dist.all_reduce(torch.ones(1))
names = [event.name for event in profiler.events()]
print("step" in names, [name for name in names if ".py(0): " in name])
""",
    )
    result = jobs.run([sys.executable, script], tmp_path)  # a new process: a fork has imported too much
    assert (result.returncode, result.stdout) == (0, "True []\n"), result.stderr


def _users_profiler_starts_inside_and_outlives(rank: int) -> int:
    profiler = torch.profiler.profile()
    with crossrank.window():
        profiler.start()
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))
    profiler.stop()
    return reductions_in(profiler)


def test_a_window_end_does_not_stop_a_newer_profiler(two_ranks: TwoRanks) -> None:
    assert two_ranks.run(_users_profiler_starts_inside_and_outlives) == [2, 2]


def _users_observer(rank: int, folder: str) -> int:
    observer = torch.profiler.ExecutionTraceObserver()
    observer.register_callback(f"{folder}/mine-{rank}.et.json")
    observer.start()
    with warnings.catch_warnings(), crossrank.window():
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))
    observer.stop()
    observer.unregister_callback()
    nodes = json.loads(Path(f"{folder}/mine-{rank}.et.json").read_text())["nodes"]
    return sum(node["name"] == "c10d::allreduce_" for node in nodes)


def test_a_window_keeps_a_user_observer(two_ranks: TwoRanks, tmp_path: Path) -> None:
    assert two_ranks.run(_users_observer, str(tmp_path)) == [2, 2]
    assert list_recording(str(two_ranks.recording)).of_kind("et") == []
    assert set(kineto_ids(two_ranks.load("kineto"))) == {0}


def test_window_edges_are_in_the_comms_file(two_ranks: TwoRanks) -> None:
    two_ranks.run(_train, 4, window="1:3")
    comms = two_ranks.recorded()
    assert [(edge["window"], edge["edge"], edge["step"]) for edge in comms.windows] == [(1, "open", 1), (1, "close", 2)]


def _steps_of(folder: Path, rank: int, window: int = 1) -> tuple[list[str], list[str]]:
    """The ranges of iterations in the execution trace and in the Kineto trace."""
    nodes = [node["name"] for node in load(folder, "et", rank, window)["nodes"]]
    events = load(folder, "kineto", rank, window)["traceEvents"]
    annotations = sorted(
        (event["ts"], event["name"]) for event in events if event.get("cat") == "user_annotation" and event["ph"] == "X"
    )
    return (
        [name for name in nodes if name.startswith("ProfilerStep#")],
        [name for _, name in annotations if name.startswith("ProfilerStep#")],
    )


def test_every_step_of_a_window_has_a_profiler_step_range(two_ranks: TwoRanks) -> None:
    two_ranks.run(_train, 10, window="2:5:5")
    for rank in (0, 1):
        for window, steps in ((1, (2, 3, 4)), (2, (7, 8, 9))):
            wanted = [f"ProfilerStep#{step}" for step in steps]
            assert _steps_of(two_ranks.recording, rank, window) == (wanted, wanted)


def test_the_calls_of_a_step_are_in_its_range(two_ranks: TwoRanks) -> None:
    two_ranks.run(_train, 5, window="2:4")
    step_of = {record.id: record.step for record in two_ranks.recorded().calls}
    events = [event for event in two_ranks.load("kineto")["traceEvents"] if event.get("ph") == "X"]
    ranges = [event for event in events if event["name"].startswith("ProfilerStep#")]
    calls = [event for event in events if event["name"].startswith("crossrank#")]
    assert len(calls) >= 6
    for call in calls:
        (around,) = (one for one in ranges if one["ts"] <= call["ts"] < one["ts"] + one["dur"])
        assert around["name"] == f"ProfilerStep#{step_of[int(call['name'].partition('#')[2])]}"


def _train_while_capturing(rank: int, steps: tuple[int, ...]) -> None:
    """Train as if a CUDA graph were captured at the end of these iterations."""
    current = api._current
    assert current is not None
    patch = pytest.MonkeyPatch()
    patch.setattr("crossrank.instrument.write.window.is_capturing", lambda: current.recorder.step - 1 in steps)
    try:
        _train(rank, 10)
    finally:
        patch.undo()


@pytest.mark.parametrize(
    ("capturing", "edges"),
    [
        ((), [("open", 3), ("close", 5)]),
        ((2,), [("open", 4), ("close", 5)]),
        ((5, 6), [("open", 3), ("close", 7)]),
        ((2, 3, 4), []),
    ],
)
def test_a_window_edge_waits_for_the_end_of_cuda_graph_captures(
    capturing: tuple[int, ...], edges: list[tuple[str, int]], two_ranks: TwoRanks
) -> None:
    two_ranks.run(_train_while_capturing, capturing, window="3:6")
    comms = two_ranks.recorded()
    assert len(comms.calls) >= 30
    assert [(edge["edge"], edge["step"]) for edge in comms.windows] == edges


FAILING = {
    "the start of Kineto": (torch.autograd.profiler.profile, "_start_trace"),
    "the end of Kineto": (torch.autograd.profiler.profile, "__exit__"),
    "the export of Kineto": (torch.autograd.profiler.profile, "export_chrome_trace"),
    "the metadata": (torch.autograd, "_add_metadata_json"),
    "the end of the observer": (torch._C._profiler, "_disable_execution_trace_observer"),
}


def _failing_window(rank: int, what: str) -> tuple[bool, bool, float]:
    patch = pytest.MonkeyPatch()
    patch.setattr(*FAILING[what], None)  # not callable
    tensor = torch.ones(1)
    try:
        with crossrank.window():
            dist.all_reduce(tensor)
    finally:
        patch.undo()
    runs = torch.autograd._profiler_enabled()
    # Another observer can be registered only if ours is gone.
    with crossrank.window():
        dist.all_reduce(tensor)
    return runs, torch.autograd._profiler_enabled(), tensor.item()


@pytest.mark.parametrize("what", FAILING)
def test_a_failed_window_closes_its_profiler_and_observer(what: str, two_ranks: TwoRanks) -> None:
    assert two_ranks.run(_failing_window, what) == [(False, False, 4.0)] * 2
    assert set(execution_trace_ids(two_ranks.load("et", window=2))) == {1}
    assert set(kineto_ids(two_ranks.load("kineto", window=2))) == {1}


def _profile_after_a_warm_up(rank: int, directory: str) -> int:
    crossrank.enable(tracing="ALL", directory=directory, window="2:4")
    crossrank.step()  # the next iteration would be recorded: Kineto is warmed up
    dist.all_reduce(torch.ones(1))
    crossrank.disable()
    with torch.profiler.profile() as profiler:
        dist.all_reduce(torch.ones(1))
    return sum(event.name == "c10d::allreduce_" for event in profiler.events())


def test_a_warm_up_without_a_window_does_not_stop_user_profilers(two_ranks: TwoRanks) -> None:
    assert two_ranks.run_bare(_profile_after_a_warm_up) == [1, 1]


def test_step_ranges_cross_no_other_event(two_ranks: TwoRanks) -> None:
    two_ranks.run(_train, 6, window="2:5")
    events = [event for event in two_ranks.load("kineto")["traceEvents"] if event.get("ph") == "X"]
    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    assert len(steps) == 3
    for step in steps:
        start, end = step["ts"], step["ts"] + step["dur"]
        crossing = [
            event["name"]
            for event in events
            if event["tid"] == step["tid"] and start < event["ts"] < end < event["ts"] + event["dur"]
        ]
        assert crossing == []
    nodes = two_ranks.load("et")["nodes"]
    assert {node["ctrl_deps"] for node in nodes} <= {node["id"] for node in nodes}  # every parent is there
    # A Work that ends beside an operation makes torch's observer name another caller; linking has the right one.
    host = link(*(str(two_ranks.recording / f"rank-0.{kind}.json.zst") for kind in ("et", "kineto"))).host
    name_of = {op.id: op.name for op in host}
    assert None not in {name_of.get(op.caller) for op in host if op.name == "c10d::allreduce_"}
    optimizer = [name_of[op.caller] for op in host if op.name == "Optimizer.step#SGD.step"]
    assert optimizer == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
