"""The processes of a replay: launched by whatever launcher, and ended, all of them, whatever happens to one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist
import zstandard

from crossrank.comm import CommRecord, Group
from crossrank.replay.plan.plan import Plan, PlannedCall, RankPlan, load_plan, save_plan
from crossrank.replay.run.failure_report import Failed
from crossrank.replay.run.launcher import LAUNCHERS, RankInfo
from crossrank.replay.run.messages import OwnOptions, State, WorkItem
from crossrank.replay.run.processes import run_local
from crossrank.replay.run.rendezvous import FINISHED, Rendezvous, connect, host_store
from crossrank.replay.run.worker import run_rank
from crossrank.tools.traces.replayed import Settings
from tests.integration import callers
from tests.integration.fork_server import ForkedProcess
from tests.integration.test_replay import plan_of_recording
from tests.integration.world import TwoRanks

pytestmark = pytest.mark.touches("replay")

CALLS = 2_000
"""Of a pass: most moments of a replay are in one."""


@pytest.fixture
def long_plan(tmp_path: Path) -> Path:
    """A plan to be repeated until something ends it."""
    record = CommRecord(
        id=0, op="all_reduce", c10d="allreduce_", pg="0", bytes=4, t=0, inputs=[[1]], outputs=[[1]], dtype="float32"
    )
    calls = [
        PlannedCall(record=msgspec.structs.replace(record, id=i, seq=i + 1), wait_before=i + 1) for i in range(CALLS)
    ]
    plan = Plan(
        source="long",
        kind="comms",
        world_size=2,
        groups=[Group(pg="0", size=2, ranks=[0, 1])],
        ranks=[RankPlan(rank=rank, calls=calls) for rank in (0, 1)],
    )
    path = tmp_path / "plan.json.zst"
    save_plan(plan, path)
    return path


def _session(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def _started(words: list[str]) -> tuple[subprocess.Popen[str], list[int]]:
    """A replay in a session of its own, when its two ranks are at work."""
    process = ForkedProcess(
        [sys.executable, "-m", "crossrank", "replay", *words, "--warmup", "0", "--repeat", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        workers = [pid for pid in _session(process.pid) if pid != process.pid and _is_gloo(pid)]
        if len(workers) == 2 and all(
            state.phase.startswith("in pass ") and state.call >= 0 for state in _states(process.pid)
        ):
            return process, workers
        time.sleep(0.1)
    process.kill()
    raise AssertionError("the ranks do not start")


def _states(pid: int) -> list[State]:
    """What the two ranks of the replay of a process have reported."""
    (listening,) = _listens_at(pid)
    port = int(listening.partition(":")[2], 16)
    store = Rendezvous(dist.TCPStore("127.0.0.1", port, is_master=False), 2).store
    return [_state(store, f"state/{rank}") for rank in range(2)]


def _state(store: dist.Store, key: str) -> State:
    """A state as it is in the store, without the key that could check its seal."""
    if not store.check([key]):
        return State(phase="")
    return msgspec.msgpack.decode(zstandard.decompress(store.get(key)[32:]), type=State)


_GLOO_THREADS = ("gloo_tcp_loop\n", "pt_gloo_runloop\n")


def _is_gloo(pid: int) -> bool:
    """Whether a process has a process group."""
    try:
        return any((task / "comm").read_text() in _GLOO_THREADS for task in Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return False


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not _session(pid):
            return True
        time.sleep(0.1)
    return False


def _listens_at(pid: int) -> list[str]:
    """The `address:port`s, in hexadecimal as the kernel has them, at which a process takes connections."""
    sockets = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    listening = "0A"
    return [row[1] for row in rows if row[3] == listening and f"socket:[{row[9]}]" in sockets]


def test_the_store_of_a_replay_on_one_machine_accepts_only_local_connections(long_plan: Path) -> None:
    process, _ = _started([str(long_plan)])
    found = _listens_at(process.pid)
    process.kill()
    process.communicate()
    assert [address.partition(":")[0] for address in found] == ["0100007F"]  # 127.0.0.1


def test_a_dead_rank_ends_all_ranks_and_each_position_is_reported(long_plan: Path) -> None:
    process, ranks = _started([str(long_plan), "--timeout", "20"])
    os.kill(ranks[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "killed by signal 9" in output
    assert "Last reported position of each rank" in output
    assert output.count(f"of {CALLS}: all_reduce #") == 2
    assert _gone(process.pid)


def test_a_stopped_rank_ends_all_ranks_within_the_timeout(long_plan: Path) -> None:
    process, ranks = _started([str(long_plan), "--timeout", "3"])
    os.kill(ranks[1], signal.SIGSTOP)
    begin = time.monotonic()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert time.monotonic() - begin < 15
    assert "Last reported position of each rank" in output
    assert "made no progress" in output
    assert _gone(process.pid)


def test_no_process_outlives_the_users_process(long_plan: Path) -> None:
    process, _ = _started([str(long_plan)])
    process.kill()
    process.communicate()
    assert _gone(process.pid)


def test_ctrl_c_ends_all_without_a_partial_file(long_plan: Path, tmp_path: Path) -> None:
    process, _ = _started([str(long_plan), "-o", str(tmp_path / "out")])
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert output.splitlines()[-1] == "crossrank: interrupted"
    assert list((tmp_path / "out").iterdir()) == []
    assert _gone(process.pid)


def test_a_failure_of_a_rank_has_the_state_of_all_ranks(two_ranks: TwoRanks) -> None:
    plan = plan_of_recording(two_ranks.record(callers.all_reduce))
    plan.ranks[1].calls = []  # the other rank waits for ever
    with pytest.raises(Failed) as failed:
        run_local(plan, Settings(backend="gloo", device="cpu", warmup=1, repeats=1, timeout_s=2))
    assert failed.value.states[0].call == 0
    assert failed.value.states[0].error
    assert failed.value.states[1].call == -1


@pytest.mark.parametrize("launcher", ["torchrun, or plain variables", "Open MPI", "Slurm"])
def test_the_processes_of_a_launcher_replay_together(launcher: str, two_ranks: TwoRanks) -> None:
    recorded = two_ranks.record(callers.lists)
    port = free_port()
    processes = []
    for rank in (0, 1):
        names = dict(zip(LAUNCHERS[launcher], (str(rank), "2", str(rank), "2"), strict=True))
        processes.append(_launch(recorded, names | {"MASTER_PORT": str(port)}))
    printed, of_the_other = ended(processes, 0)
    assert "Checked: all" in printed[0]
    assert of_the_other[0] == ""
    line = f"crossrank: CROSSRANK_REPLAY_KEY is not set: other processes that can connect to 127.0.0.1:{port} can"
    assert printed[1].splitlines()[0].startswith(line)
    assert "CROSSRANK_REPLAY_KEY" not in of_the_other[1]


def test_a_replay_with_a_key_prints_nothing_about_keys(two_ranks: TwoRanks) -> None:
    recorded = two_ranks.record(callers.lists)
    port = free_port()
    processes = [_launch(recorded, _plain(rank, port) | {"CROSSRANK_REPLAY_KEY": "secret"}) for rank in (0, 1)]
    printed, _ = ended(processes, 0)
    assert "Checked: all" in printed[0]
    assert "CROSSRANK_REPLAY_KEY" not in printed[1]


def _plain(rank: int, port: int) -> dict[str, str]:
    """The variables of one of two ranks on this machine."""
    return {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(port)}


def _lead_with_other_folders(port: int, folder: Path) -> None:
    """Rank 0 of a replay that puts its own folders into the work item of rank 1."""
    plan = load_plan(str(folder / "plan.json.zst"))
    place = RankInfo(rank=0, world_size=2, local_rank=0, launcher="", host="127.0.0.1", port=port, attempt="0/0")
    ours = Rendezvous(host_store(place, 20), 2)
    settings = Settings(backend="gloo", device="cpu", warmup=0, repeats=1, timeout_s=20)
    others = OwnOptions(record=str(folder / "recording"), save_data=str(folder / "data"))
    for rank, own in enumerate((OwnOptions(), others)):
        item = WorkItem(settings=own.put_into(settings), groups=plan.groups, calls=plan.ranks[rank].calls, world_size=2)
        ours.put(f"work/{rank}", item)
    code, result = run_rank(0, 0, ours, Rendezvous(connect(place, 20), 2), OwnOptions(), leads=True)
    assert (code, result is not None) == (0, True)
    ours.results()
    ours.store.set(FINISHED, "1")


def test_a_rank_writes_only_into_folders_of_its_own_command_line(long_plan: Path) -> None:
    folder, port = long_plan.parent, free_port()
    process = launch([str(long_plan), "--timeout", "20"], _plain(1, port))
    leader = multiprocessing.get_context("spawn").Process(target=_lead_with_other_folders, args=(port, folder))
    leader.start()
    leader.join(60)
    process.kill()
    process.communicate()
    assert leader.exitcode == 0
    assert sorted(one.name for one in folder.iterdir()) == ["plan.json.zst"]


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:{port}", "file://{folder}/meeting"])
def test_processes_meet_at_the_init_method(url: str, two_ranks: TwoRanks, tmp_path: Path) -> None:
    recorded = two_ranks.record(callers.lists)
    url = url.format(port=free_port(), folder=tmp_path)
    processes = [_launch(recorded, {}, "--init-method", f"{url}?rank={rank}&world_size=2") for rank in (0, 1)]
    assert "Checked: all" in ended(processes, 0)[0][0]
    assert not (tmp_path / "meeting").exists()


def test_an_init_file_of_another_replay_is_refused(two_ranks: TwoRanks, tmp_path: Path) -> None:
    recorded = two_ranks.record(callers.lists)
    meeting = tmp_path / "meeting"
    dist.PrefixStore("0/0", dist.FileStore(str(meeting))).add("replays", 1)
    process = _launch(recorded, {}, "--init-method", f"file://{meeting}?rank=0&world_size=2")
    ((_, error),) = ended([process], 2)
    assert f"--init-method: {meeting} belongs to another replay; give a new file" in error


def _launch(recorded: Path, variables: dict[str, str], *more: str) -> subprocess.Popen[str]:
    words = ["--trace-path", str(recorded), "--trace-type", "comms", "--num-replays", "2", "--check", "--timeout", "20"]
    return launch([*words, *more], variables)


def launch(
    words: list[str], variables: dict[str, str], command: Sequence[str] = ("crossrank.replay",)
) -> subprocess.Popen[str]:
    """One rank of a replay, as a launcher starts it."""
    return ForkedProcess(
        [sys.executable, "-m", *command, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    )


def ended(processes: list[subprocess.Popen[str]], code: int) -> list[tuple[str, str]]:
    """What each has printed to stdout and to stderr when it has ended with this code."""
    outputs = [process.communicate(timeout=60) for process in processes]
    assert {process.returncode for process in processes} == {code}, outputs
    return outputs


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_port_in_use_is_reported_with_a_remedy(two_ranks: TwoRanks) -> None:
    recorded = two_ranks.record(callers.lists)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = _launch(recorded, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(port)})
        output, error = process.communicate(timeout=60)
    assert process.returncode == 2, (output, error)
    assert f"port {port} of 127.0.0.1 is in use; set MASTER_PORT" in error


def test_a_refusal_by_rank_0_ends_all_launched_ranks_and_is_reported_once(tmp_path: Path) -> None:
    port = str(free_port())
    processes = [
        _launch(tmp_path, {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port})
        for rank in (0, 1)
    ]
    outputs = ended(processes, 2)
    assert f"crossrank: {tmp_path}: the folder is empty; give a recording" in outputs[0][1]
    assert "crossrank:" not in outputs[1][1]
