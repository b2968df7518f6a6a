"""However a process ends, its exit status stays its own and its files can be read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from crossrank.recording import list_recording
from tests.integration import fork_server, jobs
from tests.integration.jobs import RECORDING, Scripts
from tests.integration.names import needs_gloo_recorder
from tests.integration.traces import execution_trace_ids, kineto_ids


@pytest.fixture(autouse=True)
def _to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are torn down as the interpreter does it."""
    monkeypatch.setenv(fork_server.TEARDOWN, "1")


def end(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> str:
    """Have a process die of a signal; what it printed to stderr."""
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == -number
    return errors


def of_windows(scripts: Scripts) -> list[set[int]]:
    """The calls in the execution trace and in the Kineto trace."""
    return [set(execution_trace_ids(scripts.load("et"))), set(kineto_ids(scripts.load("kineto")))]


def test_a_signal_at_the_start_of_shutdown_leaves_complete_files(scripts: Scripts) -> None:
    result = scripts(-signal.SIGTERM).python("""
        crossrank.enable()
        dist.all_reduce(torch.ones(4))

        def interrupt(frame, event, function):
            if (event, frame.f_code.co_name) == ("c_return", "close") and function.__name__ == "acquire":
                sys.setprofile(None)
                print("interrupted", flush=True)
                os.kill(os.getpid(), signal.SIGTERM)

        sys.setprofile(interrupt)
        """)
    assert result.stdout == "interrupted\n"
    comms = scripts.recorded()
    assert (comms.end or {})["reason"] == "exit"
    assert comms.ids == [0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_window_kills_and_leaves_complete_files(number: signal.Signals, scripts: Scripts) -> None:
    process = scripts.start("""
        crossrank.enable(window="0:1000000")
        dist.all_reduce(torch.ones(4))
        print("ready", flush=True)
        while True:
            dist.all_reduce(torch.ones(4))
            time.sleep(0.001)
        """)
    time.sleep(0.3)
    end(process, number)
    comms = scripts.recorded()
    assert comms.end["reason"] == ("SIGTERM" if number == signal.SIGTERM else "exit")
    assert comms.ids == list(range(len(comms.ids)))
    for found in of_windows(scripts):
        # The signal may have come between the last record and its launch.
        assert set(comms.ids[:-1]) <= found <= set(comms.ids)


def test_an_exception_in_a_window_keeps_its_traceback_and_status(scripts: Scripts) -> None:
    result = scripts(1).python("""
        crossrank.enable(window="0:10")
        dist.all_reduce(torch.ones(4))
        raise ValueError("the user's own")
        """)
    assert result.stderr.count("ValueError: the user's own") == 1
    assert of_windows(scripts) == [{0}, {0}]


def test_sys_exit_keeps_its_status(scripts: Scripts) -> None:
    scripts(7).python("crossrank.enable(); dist.barrier(); sys.exit(7)")
    comms = scripts.recorded()
    assert comms.ids == [0]
    assert comms.end is not None


@pytest.mark.parametrize(
    ("status", "before", "error"),
    [
        (0, "pass", None),
        (5, "pass", "os._exit(5)"),
        (5, "raise ValueError('no such file')", "ValueError: no such file"),
    ],
)
def test_os_exit_loses_nothing(status: int, before: str, error: str | None, scripts: Scripts) -> None:
    scripts(status).python(f"""
        crossrank.enable(window="0:10")
        dist.all_reduce(torch.ones(4))
        try:
            {before}
            os._exit({status})
        except ValueError:
            os._exit({status})
        """)
    comms = scripts.recorded()
    assert (comms.ids, comms.end["reason"]) == ([0], "exit")
    assert of_windows(scripts) == [{0}, {0}]
    found = [(one["thread"], one["error"], one["frames"][0]["name"]) for one in comms.end["exceptions"]]
    assert found == ([] if error is None else [("MainThread", error, "<module>")])


def test_os_exit_leaves_after_a_few_seconds_if_the_files_cannot_be_finished(scripts: Scripts) -> None:
    began = time.monotonic()
    scripts(3).python("""
        from crossrank.instrument import api
        crossrank.enable()
        dist.barrier()
        api._current._end_files = lambda *_, **__: time.sleep(600)
        os._exit(3)
        """)
    assert time.monotonic() - began < 300


def test_a_killed_rank_loses_at_most_a_second_and_inspect_reports_the_cut_trace(
    scripts: Scripts, tmp_path: Path
) -> None:
    scripts(-signal.SIGKILL).python("""
        crossrank.enable(window="0:10")
        dist.all_reduce(torch.ones(4))
        time.sleep(1.2)
        dist.all_reduce(torch.ones(4))
        os.kill(os.getpid(), signal.SIGKILL)
        """)
    comms = scripts.recorded()
    assert comms.ids[:1] == [0]
    assert comms.end is None
    assert list_recording(str(tmp_path / RECORDING)).partial == (".rank-0.et.json.part",)
    inspected = scripts(1).crossrank("inspect", RECORDING).stdout
    assert "unfinished rank 0" in inspected
    assert "cut off    .rank-0.et.json.part" in inspected


def test_sigkill_loses_at_most_the_last_second(scripts: Scripts) -> None:
    process = scripts.start("""
        crossrank.enable()
        for number in range(1000000):
            dist.all_reduce(torch.ones(4))
            if number == 2000:
                print("ready", flush=True)
            time.sleep(0.0005)
        """)
    ready = time.monotonic_ns()
    time.sleep(1.5)
    killed = time.monotonic_ns()
    end(process, signal.SIGKILL)
    comms = scripts.recorded()
    last = comms.calls[-1].t
    assert last > ready
    assert killed - last < 1_000_000_000
    assert comms.ids == list(range(len(comms.ids)))


STUCK = """
crossrank.enable()
dist.barrier()
print("ready", flush=True)
if rank == 1:
    time.sleep(600)
dist.all_reduce(torch.ones(4))
"""


def stuck_rank(scripts: Scripts, source: str = STUCK) -> subprocess.Popen[str]:
    """Rank 0 of two, which waits in C++ for the other one."""
    ranks = scripts.start_two(source)
    for process in ranks:
        jobs.wait_for_line(process, "ready")
    time.sleep(0.5)
    return ranks[0]


@needs_gloo_recorder
def test_a_rank_that_hangs_in_a_collective_dumps_on_sigusr1_and_dies_of_sigterm(scripts: Scripts) -> None:
    process = stuck_rank(scripts)
    process.send_signal(signal.SIGUSR1)
    jobs.wait_for_file(scripts.folder / RECORDING / "rank-0.flight.json.zst")
    names = [entry["profiling_name"] for entry in scripts.load("flight")["entries"]]
    assert names == ["gloo:barrier", "gloo:all_reduce"]
    assert process.poll() is None
    end(process)
    comms = scripts.recorded()
    assert comms.ids == [0, 1]
    assert comms.end["reason"] == "SIGTERM"


def test_the_scripts_own_signal_handlers_stay_unchanged(scripts: Scripts) -> None:
    result = scripts.python("""
        seen = []
        mine = lambda number, frame: seen.append(number)
        signal.signal(signal.SIGTERM, mine)
        signal.signal(signal.SIGUSR1, mine)
        crossrank.enable()
        assert signal.getsignal(signal.SIGTERM) is mine
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        dist.barrier()
        crossrank.disable()
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert seen == [signal.SIGTERM, signal.SIGUSR1], seen
        assert signal.set_wakeup_fd(-1) == -1
        """)
    assert result.stderr == ""
    assert scripts.recorded().ids == [0]


def test_a_forked_child_leaves_the_parents_files_intact(scripts: Scripts, tmp_path: Path) -> None:
    scripts.python("""
        crossrank.enable(window="0:10")
        dist.all_reduce(torch.ones(4))
        dist.destroy_process_group()  # with gloo's threads a forked child never exits, traced or not
        child = os.fork()
        if child == 0:
            torch.ones(4) + 1
            assert not crossrank.enabled()
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            sys.exit(3)  # through atexit and the destructors
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        torch.ones(4) + 1
        """)
    comms = scripts.recorded()
    assert comms.ids == [0]
    assert of_windows(scripts) == [{0}, {0}]
    kinds = ("comms.jsonl", "et.json", "flight.json", "kineto.json")
    assert sorted(os.listdir(tmp_path / RECORDING)) == [f"rank-0.{kind}.zst" for kind in kinds]


def test_data_loader_workers_do_not_disturb_a_recording(scripts: Scripts) -> None:
    scripts.python("""
        from torch.utils.data import DataLoader
        crossrank.enable(window="0:10")
        for batch in DataLoader(torch.arange(8.0), batch_size=2, num_workers=2):
            dist.all_reduce(batch)
        """)
    assert scripts.recorded().ids == [0, 1, 2, 3]
    assert {0, 1, 2, 3} <= set(execution_trace_ids(scripts.load("et")))


def test_a_forked_child_may_record_on_its_own(scripts: Scripts) -> None:
    scripts.run("""
        import os
        import torch, torch.distributed as dist
        import crossrank

        def work(directory):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            with crossrank.enable(directory=directory) as tracing:
                assert tracing.active
                dist.barrier()

        crossrank.enable(directory="parent")
        child = os.fork()
        if child == 0:
            work("child")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(4))
        """)
    assert scripts.recorded(folder="parent").ops == ["all_reduce"]
    assert scripts.recorded(folder="child").ops == ["barrier"]


def test_forked_workers_of_multiprocessing_finish_their_files(scripts: Scripts) -> None:
    scripts.run("""
        import multiprocessing, os
        import torch, torch.distributed as dist
        import crossrank

        def work(rank):
            crossrank.enable()
            dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
            dist.all_reduce(torch.ones(4))
            dist.destroy_process_group()

        workers = [multiprocessing.get_context("fork").Process(target=work, args=(rank,)) for rank in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
        """)
    for rank in (0, 1):
        comms = scripts.recorded(rank)
        assert comms.ids == [0]
        assert comms.end is not None


def test_a_handler_set_later_by_the_script_runs_to_its_end(scripts: Scripts) -> None:
    result = scripts.python("""
        crossrank.enable()
        def save(number, frame):
            time.sleep(2.5)
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGTERM)
        """)
    assert (result.stdout, result.stderr) == ("saved\n", "")
    assert scripts.recorded().ids == [0]


def test_exceptions_of_signal_handlers_reach_the_script(scripts: Scripts) -> None:
    result = scripts.python("""
        class Late(Exception):
            pass
        raised = caught = 0
        def late(number, frame):
            global raised
            raised += 1
            raise Late
        signal.signal(signal.SIGALRM, late)
        crossrank.enable(flight=False)
        tensor = torch.ones(1)
        for _ in range(600):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005)
                while True:
                    dist.all_reduce(tensor)
            except Late:
                caught += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(raised - caught)
        """)
    assert result.stdout == "0\n"


@pytest.mark.parametrize("main_thread", ["runs Python", "is stuck as well"])
def test_a_signal_ends_a_process_on_a_stuck_gpu_with_its_dump_and_comms_file(
    main_thread: str, scripts: Scripts
) -> None:
    # A thread that is stuck in C++ runs no handler of Python's; here such signals are blocked for it.
    blocked = "signal.SIGTERM" if main_thread == "is stuck as well" else ""
    # The end of a window waits for the GPU; one that is stuck is played by a profiler that does not stop.
    process = scripts.start(f"""
        import torch.autograd.profiler
        from crossrank.instrument.write import window
        window._PATIENCE_DYING = 1.0
        torch.autograd.profiler.profile.__exit__ = lambda *_: time.sleep(600)
        crossrank.enable(window="0:1000000")
        dist.all_reduce(torch.ones(4))
        signal.pthread_sigmask(signal.SIG_BLOCK, [{blocked}])
        print("ready", flush=True)
        time.sleep(600)
        """)
    assert "crossrank: window 1 is incomplete: the process dies, and closing the window took over 1 s" in end(process)
    comms = scripts.recorded()
    assert comms.ids == [0]
    assert comms.end["reason"] == "SIGTERM"
    assert scripts.load("flight")["crossrank"]["reason"] == "SIGTERM"


@pytest.mark.parametrize("ending", ["disable() on another thread", "disable() on the main thread"])
def test_a_signal_during_the_end_of_a_recording_acts_after_the_end(ending: str, scripts: Scripts) -> None:
    start = "threading.Thread(target=crossrank.disable).start()" if "another" in ending else "crossrank.disable()"
    process = scripts.start(f"""
        from crossrank.instrument.write import flight_dump
        crossrank.enable()
        dist.all_reduce(torch.ones(4))
        dump = flight_dump.dump
        def slow(moment):
            print("ready", flush=True)
            time.sleep(1)
            return dump(moment)
        flight_dump.dump = slow
        {start}
        time.sleep(600)
        """)
    assert end(process) == ""
    comms = scripts.recorded()
    assert (comms.ids, comms.end["reason"]) == ([0], "disable")


def test_a_slow_end_on_another_thread_does_not_keep_the_process_alive(scripts: Scripts) -> None:
    process = scripts.start("""
        from crossrank.instrument.hooks import signals
        from crossrank.instrument.write import flight_dump
        signals._LONGEST_END = 2.0
        crossrank.enable()
        dist.all_reduce(torch.ones(4))
        def stuck(moment):
            print("ready", flush=True)
            time.sleep(600)
        flight_dump.dump = stuck
        threading.Thread(target=crossrank.disable, daemon=True).start()
        time.sleep(600)
        """)
    end(process)


def test_calls_of_a_slow_job_are_on_disk_after_half_a_second_even_at_its_start(scripts: Scripts) -> None:
    # Rank 1 does not record: what the nodes of the job are is not known for long.
    ranks = scripts.start_two("""
        if rank == 0:
            crossrank.enable()
        for number in range(1000):
            dist.all_reduce(torch.ones(4))
            if rank == 0:
                print("call", number, time.monotonic_ns(), flush=True)
            time.sleep(0.05)
        """)
    assert ranks[0].stdout is not None
    called: list[int] = []
    while len(called) < 24:  # a bit more than a second
        called.append(int(ranks[0].stdout.readline().split()[2]))
    ranks[0].kill()
    killed = time.monotonic_ns()
    comms = scripts.recorded()
    old_enough = sum(moment < killed - 500_000_000 for moment in called)
    assert old_enough >= 10
    assert len(comms.ids) >= old_enough


def test_a_call_that_makes_gloo_abort_is_recorded(scripts: Scripts) -> None:
    ranks = scripts.start_two("""
        crossrank.enable()
        dist.barrier()
        dist.all_reduce(torch.ones(1000 if rank == 0 else 100000))
        """)
    _, errors = ranks[0].communicate(timeout=60)
    assert ranks[0].returncode == -signal.SIGABRT
    assert "terminate called after throwing an instance of 'gloo::EnforceNotMet'" in errors
    comms = scripts.recorded()
    assert comms.ids == [0, 1]
    assert comms.end["reason"] == "SIGABRT"
    assert scripts.load("flight")["crossrank"]["reason"] == "SIGABRT"


def test_exceptions_of_a_script_and_its_threads_are_recorded_and_still_printed(scripts: Scripts) -> None:
    result = scripts(1).python("""
        def fail():
            raise KeyError("shard 3")
        before = threading.excepthook
        for directory in ("first", "second"):
            crossrank.disable()
            assert threading.excepthook is before
            crossrank.enable(directory=directory)
            dist.all_reduce(torch.ones(4))
            thread = threading.Thread(target=fail, name="loader")
            thread.start()
            thread.join()
        raise ValueError("the user's own")
        """)
    assert result.stderr.count("KeyError: 'shard 3'") == 2
    assert result.stderr.count("ValueError: the user's own") == 1
    assert "crossrank" not in result.stderr
    ends = [scripts.recorded(folder=folder).end["exceptions"] for folder in ("first", "second")]
    loader, main = ("loader", "KeyError: 'shard 3'"), ("MainThread", "ValueError: the user's own")
    assert [[(found["thread"], found["error"]) for found in end] for end in ends] == [[loader], [main, loader]]
    innermost = ends[1][1]["frames"][0]
    assert (innermost["name"], Path(innermost["filename"]).name) == ("fail", "train.py")
    assert [frame["name"] for frame in ends[1][0]["frames"]] == ["<module>"]
    moment = scripts.load("flight", "second")["crossrank"]
    assert (moment["error"], moment["exceptions"]) == ("ValueError: the user's own", ends[1])


def test_each_failure_at_exit_prints_one_line_and_no_traceback(scripts: Scripts) -> None:
    result = scripts.python("""
        from crossrank.instrument import api
        crossrank.enable()
        dist.all_reduce(torch.ones(4))
        api._current.recorder.calls = None
        api._current.windows.close = None
        """)
    assert "Traceback" not in result.stderr
    lines = [line.partition(": TypeError")[0] for line in result.stderr.splitlines()]
    assert lines == ["crossrank: the end of a window is not recorded", "crossrank: the flight recorder was not dumped"]
    assert scripts.recorded().end is not None


def test_a_comms_file_reports_until_when_it_is_complete(scripts: Scripts, tmp_path: Path) -> None:
    process = scripts.start("""
        crossrank.enable()
        dist.all_reduce(torch.ones(4))
        time.sleep(1.5)
        print("ready", flush=True)
        time.sleep(600)
        """)
    ready = time.monotonic_ns()
    path = tmp_path / RECORDING / "rank-0.comms.jsonl.zst"
    size = path.stat().st_size
    time.sleep(1.0)
    process.kill()
    killed = time.monotonic_ns()
    process.communicate()
    comms = scripts.recorded()
    assert comms.ids == [0]
    assert ready < comms.clocks[-1]["t"] < killed
    assert killed - comms.clocks[-1]["t"] < 500_000_000
    assert abs(path.stat().st_size - size) < 100  # a rank that stands still writes over its last word


def test_a_signal_to_a_newly_forked_child_does_not_reach_its_parent(scripts: Scripts) -> None:
    result = scripts.python("""
        import multiprocessing
        crossrank.enable(flight=False)
        dist.all_reduce(torch.ones(4))
        dist.destroy_process_group()
        context = multiprocessing.get_context("fork")
        codes = set()
        for _ in range(150):
            child = context.Process(target=time.sleep, args=(60,))
            child.start()
            child.terminate()
            child.join()
            codes.add(child.exitcode)
        print("trained", codes, signal.pthread_sigmask(signal.SIG_BLOCK, []))
        """)
    assert result.stdout == "trained {-15} set()\n"
    assert scripts.recorded().end["reason"] == "exit"


@pytest.mark.parametrize("loop", ["before", "after"])
def test_sigterm_ends_a_hanging_rank_even_if_an_event_loop_takes_the_signals(loop: str, scripts: Scripts) -> None:
    taken = """
import asyncio
loop = asyncio.new_event_loop()
loop.add_signal_handler(signal.SIGUSR2, lambda: None)
"""
    enable = "crossrank.enable()\n"
    closed = "loop.remove_signal_handler(signal.SIGUSR2)\nloop.close()\ncrossrank.step()\n"
    end(stuck_rank(scripts, STUCK.replace(enable, taken + enable if loop == "before" else enable + taken + closed)))


@pytest.mark.parametrize(
    ("text", "noted"),
    [("raise RuntimeError", "Odd: its text is unavailable"), ("return '\\ud800 half'", "Odd: \\ud800 half")],
)
def test_an_exception_with_an_unwritable_text_loses_only_its_text(text: str, noted: str, scripts: Scripts) -> None:
    result = scripts(1).python(f"""
        class Odd(Exception):
            def __str__(self):
                {text}
        def fail():
            raise Odd
        crossrank.enable()
        dist.all_reduce(torch.ones(4))
        thread = threading.Thread(target=fail, name="loader")
        thread.start()
        thread.join()
        raise Odd from KeyError("the cause")
        """)
    assert "crossrank/" not in result.stderr
    comms = scripts.recorded()
    assert comms.ids == [0]
    found = [(one["thread"], one["error"], one["causes"]) for one in comms.end["exceptions"]]
    assert found == [("MainThread", noted, ["KeyError: 'the cause'"]), ("loader", noted, [])]
    assert scripts.load("flight")["crossrank"]["error"] == noted


def test_the_exception_of_a_multiprocessing_worker_is_recorded(scripts: Scripts) -> None:
    scripts.run("""
        import os, sys
        import torch, torch.distributed as dist, torch.multiprocessing as mp
        import crossrank

        def work(rank, store):
            crossrank.enable(directory=os.path.basename(store))
            dist.init_process_group("gloo", init_method=f"file://{store}-store", rank=0, world_size=1)
            dist.all_reduce(torch.ones(4))
            raise ValueError("shard 3")

        if __name__ == "__main__":
            worker = mp.get_context("spawn").Process(target=work, args=(0, os.path.abspath("own")))
            worker.start()
            worker.join()
            try:
                mp.spawn(work, (os.path.abspath("torchs"),), nprocs=1)
            except mp.ProcessRaisedException:
                pass
        """)
    for folder in ("own", "torchs"):
        (found,) = scripts.recorded(folder=folder).end["exceptions"]
        assert (found["error"], found["frames"][0]["name"]) == ("ValueError: shard 3", "work")


def test_an_earlier_exception_is_not_recorded_at_the_end(scripts: Scripts) -> None:
    scripts.python("""
        sys.last_value = ZeroDivisionError("a cell of a notebook")
        crossrank.enable()
        dist.all_reduce(torch.ones(4))
        """)
    assert scripts.recorded().end["exceptions"] == []


def test_an_interrupted_disable_still_removes_the_hooks(scripts: Scripts) -> None:
    result = scripts(-signal.SIGTERM).python("""
        crossrank.enable()
        dist.all_reduce(torch.ones(4))
        from crossrank.instrument.write import flight_dump
        def stop(moment):
            raise KeyboardInterrupt
        flight_dump.dump = stop
        try:
            crossrank.disable()
        except KeyboardInterrupt:
            print("interrupted", signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
        """)
    assert result.stdout == "interrupted True\n"


def test_a_script_may_wait_for_a_signal_that_it_blocks(tmp_path: Path) -> None:
    """The kernel gives such a signal to any thread that does not block it, and it would end the process there."""
    source = """
        import os, signal
        import torch, torch.distributed as dist
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(8))
        for _ in range(20):
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signal.sigwait({signal.SIGUSR2}) == signal.SIGUSR2
        print("waited")
        """
    script = jobs.write_script(tmp_path, textwrap.dedent(source))
    command = [sys.executable, "-m", "crossrank.instrument", str(script)]
    # With more threads, numpy has one that blocks no signal.
    result = jobs.run(command, tmp_path, TRACING="ALL", OMP_NUM_THREADS="1")
    assert (result.returncode, "waited" in result.stdout) == (0, True), result.stderr
    assert list_recording(str(tmp_path / RECORDING)).files
